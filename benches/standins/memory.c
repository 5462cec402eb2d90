/* Memory of the stand-in for the driver: device memory is host memory, and copies copy.
 *
 * If streams are asynchronous, a copy reads and writes when its stream executes it, as on a GPU: pinned memory that it
 * reads must not change until then. Pageable memory is read before the call returns, and the call returns only after
 * writes to pageable memory are complete. */
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GIB (1024.0 * 1024.0 * 1024.0)
#define POISONED (16u << 20)

/* An allocation, in a list so that it can be freed and counted. If streams are asynchronous, freed memory stays mapped
 * until its addresses may be reused. */
struct block {
    void *start;
    size_t size;
    int freed;
    struct block *next;
};
static struct block *blocks;
/* Pinned host memory. */
static struct block *pinned;
static double used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double capacity(void) { return GIB * setting("FAKE_CUDA_MEMORY_GIB", 80); }

static double free_at_start(void) {
    return GIB * setting("FAKE_CUDA_FREE_GIB", setting("FAKE_CUDA_MEMORY_GIB", 80));
}

static void *at(DevicePointer pointer) { return (void *)(uintptr_t)pointer; }

static DevicePointer address(const void *pointer) { return (DevicePointer)(uintptr_t)pointer; }

/* `stream` is negative for memory that every stream may use immediately. */
static Result allocate(DevicePointer *pointer, size_t size, long long stream) {
    struct block *block = malloc(sizeof *block);
    Result result = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    if (block != NULL && used + (double)size <= free_at_start()) {
        /* Pages are backed by memory only when touched, so that a large model fits into a small host. */
        void *start = mmap(NULL, size > 0 ? size : 1, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start != MAP_FAILED) {
            *block = (struct block){start, size, 0, blocks};
            blocks = block;
            used += (double)size;
            *pointer = address(start);
            result = SUCCESS;
            if (executes()) {
                /* Unwritten memory reads as NaN. Large allocations stay untouched. */
                if (size <= POISONED)
                    memset(start, 0xff, size);
                kiln_ptx_allocated(*pointer, size);
            }
        }
    }
    pthread_mutex_unlock(&lock);
    if (result != SUCCESS)
        free(block);
    else if (is_async())
        result = kiln_ptx_stream_allocated(*pointer, size, stream);
    return result;
}

/* Returns the link to a block in its list. */
static struct block **find(struct block **list, const void *start) {
    while (*list != NULL && (*list)->start != start)
        list = &(*list)->next;
    return list;
}

/* Returns freed memory to the system. */
static void release(DevicePointer pointer) {
    pthread_mutex_lock(&lock);
    struct block **place = find(&blocks, at(pointer)), *block = *place;
    if (block != NULL) {
        *place = block->next;
        if (executes())
            kiln_ptx_freed(pointer);
        munmap(block->start, block->size > 0 ? block->size : 1);
        free(block);
    }
    pthread_mutex_unlock(&lock);
}

static Result give_back(DevicePointer pointer, long long stream) {
    pthread_mutex_lock(&lock);
    struct block *block = *find(&blocks, at(pointer));
    int there = block != NULL && !block->freed;
    if (there) {
        block->freed = 1;
        used -= (double)block->size;
    }
    pthread_mutex_unlock(&lock);
    if (is_async())
        return kiln_ptx_stream_free(pointer, stream, release);
    if (there)
        release(pointer);
    return there ? SUCCESS : INVALID_VALUE;
}

static void pin(void *start, size_t size) {
    struct block *block = malloc(sizeof *block);
    if (block == NULL)
        abort();
    pthread_mutex_lock(&lock);
    *block = (struct block){start, size, 0, pinned};
    pinned = block;
    pthread_mutex_unlock(&lock);
    kiln_ptx_pinned(address(start), size);
}

static void unpin(void *start, void (*then)(DevicePointer)) {
    pthread_mutex_lock(&lock);
    struct block **place = find(&pinned, start), *block = *place;
    if (block != NULL)
        *place = block->next;
    pthread_mutex_unlock(&lock);
    free(block);
    kiln_ptx_unpinned(address(start), then);
}

static int is_pinned(const void *start, size_t size) {
    pthread_mutex_lock(&lock);
    struct block *block = pinned;
    while (block != NULL && !((const char *)start >= (char *)block->start &&
                              (const char *)start + size <= (char *)block->start + block->size))
        block = block->next;
    pthread_mutex_unlock(&lock);
    return block != NULL;
}

Result cuDeviceTotalMem_v2(size_t *bytes, Device device) {
    (void)device;
    *bytes = (size_t)capacity();
    return SUCCESS;
}

Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    pthread_mutex_lock(&lock);
    *free_bytes = (size_t)(free_at_start() - used);
    pthread_mutex_unlock(&lock);
    *total = (size_t)capacity();
    return SUCCESS;
}

Result cuMemAlloc_v2(DevicePointer *pointer, size_t size) {
    Result result = allocate(pointer, size, -1);
    trace("alloc bytes=%zu at=%llx result=%d", size, result == SUCCESS ? *pointer : 0, result);
    return result;
}

Result cuMemAllocAsync(DevicePointer *pointer, size_t size, void *stream) {
    Result result = allocate(pointer, size, (long long)(uintptr_t)stream);
    trace("alloc_async stream=%lu bytes=%zu at=%llx result=%d", (unsigned long)stream, size,
          result == SUCCESS ? *pointer : 0, result);
    return result;
}

/* Waits for all streams, as the driver does. */
Result cuMemFree_v2(DevicePointer pointer) {
    trace("free at=%llx", pointer);
    return give_back(pointer, -1);
}

Result cuMemFreeAsync(DevicePointer pointer, void *stream) {
    trace("free_async stream=%lu at=%llx", (unsigned long)stream, pointer);
    return give_back(pointer, (long long)(uintptr_t)stream);
}

Result cuMemAllocHost_v2(void **pointer, size_t size) {
    trace("alloc_host bytes=%zu", size);
    if (posix_memalign(pointer, 4096, size > 0 ? size : 1) != 0)
        return OUT_OF_MEMORY;
    if (is_async())
        pin(*pointer, size);
    return SUCCESS;
}

Result cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    return cuMemAllocHost_v2(pointer, size);
}

static void release_host(DevicePointer pointer) { free(at(pointer)); }

Result cuMemFreeHost(void *pointer) {
    if (is_async())
        unpin(pointer, release_host);
    else
        free(pointer);
    return SUCCESS;
}

Result cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    (void)flags;
    trace("host_register bytes=%zu", size);
    if (is_async())
        pin(pointer, size);
    return SUCCESS;
}

static void release_nothing(DevicePointer pointer) { (void)pointer; }

Result cuMemHostUnregister(void *pointer) {
    if (is_async())
        unpin(pointer, release_nothing);
    return SUCCESS;
}

void fake_cuda_wrote(DevicePointer to, size_t size) {
    if (executes())
        kiln_ptx_wrote(to, size);
}

/* A copy in a stream. */
struct copy {
    void *to;
    const void *from;
    size_t size;
    /* A copy of `from` at the time of the call, to be freed afterwards; NULL if there is none. */
    void *kept;
    int on_device;
};

/* Larger copies are skipped: pages stay untouched, so that the model need not fit into host memory. */
static double most_copied(void) { return 1024.0 * 1024.0 * setting("FAKE_CUDA_COPY_MIB", 1e12); }

static int run_copy(void *data) {
    const struct copy *copy = data;
    if ((double)copy->size <= most_copied())
        memmove(copy->to, copy->from, copy->size);
    if (copy->on_device && executes())
        kiln_ptx_copied(address(copy->to), address(copy->from), copy->size);
    else
        fake_cuda_wrote(address(copy->to), copy->size);
    free(copy->kept);
    return SUCCESS;
}

static Result to_device(DevicePointer to, const void *from, size_t size, void *stream) {
    struct copy copy = {at(to), from, size, NULL, 0};
    struct span spans[] = {bytes_at(at(to), size, 1), bytes_at(from, size, 0)};
    int by_reference = !is_async() || is_pinned(from, size);
    if (!by_reference) {
        copy.from = copy.kept = malloc(size > 0 ? size : 1);
        if (copy.kept == NULL)
            return OUT_OF_MEMORY;
        memcpy(copy.kept, from, size);
    }
    return fake_cuda_in_stream(stream, "copy to the device", spans, by_reference ? 2 : 1, run_copy, &copy,
                               sizeof copy);
}

static Result to_host(void *to, DevicePointer from, size_t size, void *stream, int waits) {
    struct copy copy = {to, at(from), size, NULL, 0};
    struct span spans[] = {bytes_at(at(from), size, 0), bytes_at(to, size, 1)};
    int by_reference = !is_async() || is_pinned(to, size);
    Result result = fake_cuda_in_stream(stream, "copy to the host", spans, by_reference ? 2 : 1, run_copy, &copy,
                                        sizeof copy);
    if (result == SUCCESS && is_async() && (waits || !by_reference))
        result = kiln_ptx_stream_synchronize((unsigned long)stream);
    return result;
}

Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void *from, size_t size, void *stream) {
    trace("memcpy_htod stream=%lu bytes=%zu to=%llx", (unsigned long)stream, size, to);
    return to_device(to, from, size, stream);
}

Result cuMemcpyDtoHAsync_v2(void *to, DevicePointer from, size_t size, void *stream) {
    trace("memcpy_dtoh stream=%lu bytes=%zu from=%llx", (unsigned long)stream, size, from);
    return to_host(to, from, size, stream, 0);
}

Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t size, void *stream) {
    trace("memcpy_dtod stream=%lu bytes=%zu to=%llx from=%llx", (unsigned long)stream, size, to, from);
    struct copy copy = {at(to), at(from), size, NULL, 1};
    struct span spans[] = {bytes_at(at(to), size, 1), bytes_at(at(from), size, 0)};
    return fake_cuda_in_stream(stream, "copy on the device", spans, 2, run_copy, &copy, sizeof copy);
}

/* Copies without a stream make the host wait until they are complete. The trace marks them. */
Result cuMemcpyHtoD_v2(DevicePointer to, const void *from, size_t size) {
    trace("memcpy_htod_synchronous bytes=%zu to=%llx", size, to);
    Result result = to_device(to, from, size, NULL);
    return result == SUCCESS && is_async() ? kiln_ptx_stream_synchronize(0) : result;
}

Result cuMemcpyDtoH_v2(void *to, DevicePointer from, size_t size) {
    trace("memcpy_dtoh_synchronous bytes=%zu from=%llx", size, from);
    return to_host(to, from, size, NULL, 1);
}

/* CUDA_MEMCPY2D. Supports host (1) and device (2) memory only. */
struct copy_2d {
    size_t from_x, from_y;
    unsigned from_kind;
    const char *from_host;
    DevicePointer from_device;
    void *from_array;
    size_t from_pitch;
    size_t to_x, to_y;
    unsigned to_kind;
    char *to_host;
    DevicePointer to_device;
    void *to_array;
    size_t to_pitch;
    size_t width, height;
};

/* Returns the address of the first byte to read. */
static const char *source(const struct copy_2d *copy) {
    const char *from = copy->from_kind == 1 ? copy->from_host : at(copy->from_device);
    return from + copy->from_y * copy->from_pitch + copy->from_x;
}

static char *target(const struct copy_2d *copy) {
    char *to = copy->to_kind == 1 ? copy->to_host : at(copy->to_device);
    return to + copy->to_y * copy->to_pitch + copy->to_x;
}

static int run_copy_2d(void *data) {
    const struct copy_2d *copy = data;
    for (size_t row = 0; row < copy->height; row++) {
        char *to = target(copy) + row * copy->to_pitch;
        memmove(to, source(copy) + row * copy->from_pitch, copy->width);
        fake_cuda_wrote(address(to), copy->width);
    }
    return SUCCESS;
}

/* With pageable host memory, the host waits here, also for a copy to the device. */
Result cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream) {
    trace("memcpy_2d stream=%lu bytes=%zu", (unsigned long)stream, copy->width * copy->height);
    const char *from = source(copy), *to = target(copy);
    size_t height = copy->height, width = copy->width;
    size_t read = height > 0 ? (height - 1) * copy->from_pitch + width : 0;
    size_t written = height > 0 ? (height - 1) * copy->to_pitch + width : 0;
    struct span spans[2];
    size_t count = 0;
    int waits = 0;
    if (copy->from_kind != 1 || is_pinned(from, read))
        spans[count++] = (struct span){address(from), width, height, copy->from_pitch, 0};
    else
        waits = 1;
    if (copy->to_kind != 1 || is_pinned(to, written))
        spans[count++] = (struct span){address(to), width, height, copy->to_pitch, 1};
    else
        waits = 1;
    Result result = fake_cuda_in_stream(stream, "copy of rows", spans, count, run_copy_2d, copy, sizeof *copy);
    return result == SUCCESS && waits && is_async() ? kiln_ptx_stream_synchronize((unsigned long)stream) : result;
}

struct fill {
    void *to;
    unsigned value;
    size_t count;
    int width;
};

static int run_fill(void *data) {
    const struct fill *fill = data;
    if (fill->width == 1)
        memset(fill->to, (int)fill->value, fill->count);
    else
        for (size_t i = 0; i < fill->count; i++)
            ((unsigned *)fill->to)[i] = fill->value;
    fake_cuda_wrote(address(fill->to), fill->count * (size_t)fill->width);
    return SUCCESS;
}

static Result fill(DevicePointer to, unsigned value, size_t count, int width, void *stream) {
    trace("memset stream=%lu bytes=%zu", (unsigned long)stream, (size_t)width * count);
    struct fill fill = {at(to), value, count, width};
    struct span span = bytes_at(at(to), (size_t)width * count, 1);
    return fake_cuda_in_stream(stream, "memset", &span, 1, run_fill, &fill, sizeof fill);
}

Result cuMemsetD8Async(DevicePointer to, unsigned char value, size_t count, void *stream) {
    return fill(to, value, count, 1, stream);
}

Result cuMemsetD32Async(DevicePointer to, unsigned value, size_t count, void *stream) {
    return fill(to, value, count, 4, stream);
}
