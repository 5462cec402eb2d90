/* Stand-in for libcupti.so.13: records the launches of the stand-in for the driver.
 *
 * A launch is recorded at the time of the call by the program's clock, with a duration of a microsecond. Records have
 * the size and the field offsets of CUDA 13.0 (CUpti_ActivityKernel10). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <pthread.h>
#include <dlfcn.h>
#include "fake.h"

enum { NO_DRIVER = 15, MAX_LIMIT_REACHED = 12, INVALID_KIND = 21 };
enum { MEMCPY = 1, MEMSET = 2, KERNEL = 10, KINDS = 64 };

/* Bytes of a record of a kernel. */
enum { KERNEL_SIZE = 216 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*requested)(uint8_t **, size_t *, size_t *);
static void (*completed)(void *, uint32_t, uint8_t *, size_t, size_t);
static uint64_t (*show_time)(void);
static int enabled[KINDS];

static uint8_t *buffer;
static size_t size, filled;

int cuptiActivityRegisterTimestampCallback(void *callback) {
    *(void **)&show_time = callback;
    return SUCCESS;
}

static int switch_kind(int kind, int on) {
    if (kind < 0 || kind >= KINDS || requested == NULL)
        return INVALID_KIND;
    trace("cupti_%s kind=%d", on ? "enable" : "disable", kind);
    pthread_mutex_lock(&lock);
    enabled[kind] = on;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuptiActivityEnable(int kind) { return switch_kind(kind, 1); }

int cuptiActivityDisable(int kind) { return switch_kind(kind, 0); }

/* Returns the buffer to the program. Does not hold the lock meanwhile: the program may take its own lock. */
static void complete(void) {
    pthread_mutex_lock(&lock);
    uint8_t *full = buffer;
    size_t capacity = size, used = filled;
    buffer = NULL, filled = 0;
    pthread_mutex_unlock(&lock);
    if (full != NULL)
        completed(NULL, 0, full, capacity, used);
}

int cuptiActivityFlushAll(uint32_t flags) {
    (void)flags;
    trace("cupti_flush");
    complete();
    return SUCCESS;
}

int cuptiActivityGetNextRecord(uint8_t *from, size_t valid, uint8_t **record) {
    uint8_t *next = *record == NULL ? from : *record + KERNEL_SIZE;
    if (from == NULL)
        return INVALID_VALUE;
    if (next + KERNEL_SIZE > from + valid)
        return MAX_LIMIT_REACHED;
    *record = next;
    return SUCCESS;
}

int cuptiGetResultString(int result, const char **text) {
    *text = result == SUCCESS ? "CUPTI_SUCCESS" : "CUPTI_ERROR";
    return SUCCESS;
}

/* Records a launch. Called by the stand-in for the driver. */
static void launched(uint32_t device, uint32_t stream, const char *kernel) {
    pthread_mutex_lock(&lock);
    int is_recorded = enabled[KERNEL];
    int is_full = buffer != NULL && filled + KERNEL_SIZE > size;
    pthread_mutex_unlock(&lock);
    if (!is_recorded)
        return;
    if (is_full)
        complete();
    pthread_mutex_lock(&lock);
    if (buffer == NULL) {
        size_t most = 0;
        requested(&buffer, &size, &most);
    }
    if (buffer != NULL && filled + KERNEL_SIZE <= size) {
        uint8_t *record = buffer + filled;
        const uint32_t kind = KERNEL;
        const uint64_t start = show_time(), end = start + 1000;
        memset(record, 0, KERNEL_SIZE);
        memcpy(record, &kind, 4);
        memcpy(record + 16, &start, 8);
        memcpy(record + 24, &end, 8);
        memcpy(record + 40, &device, 4);
        memcpy(record + 48, &stream, 4);
        memcpy(record + 104, &kernel, sizeof kernel);
        filled += KERNEL_SIZE;
    }
    pthread_mutex_unlock(&lock);
}

int cuptiActivityRegisterCallbacks(void *request, void *complete) {
    void (*on_launch)(launch_hook *) = NULL;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (driver != NULL)
        *(void **)&on_launch = dlsym(driver, "fake_cuda_on_launch");
    if (on_launch == NULL)
        return NO_DRIVER;
    *(void **)&requested = request;
    *(void **)&completed = complete;
    on_launch(launched);
    return SUCCESS;
}
