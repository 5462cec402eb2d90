/* Stand-in for libcupti.so.13: records of the launches that the stand-in for the driver is given.
 *
 * A launch is recorded when it is called, at the time that the program's clock shows, and takes a microsecond. Records
 * have the size and the places of fields of CUDA 13.0 (CUpti_ActivityKernel10). */
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

/* Gives the buffer back. The lock is not held: the program may take one of its own. */
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

/* The stand-in for the driver has been given a launch. */
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
