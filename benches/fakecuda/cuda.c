/* A stand-in for NVIDIA's driver, libcuda.so.1: memory, order, and computation if it is asked for.
 *
 * Device memory is the host's, and copies copy. Kernels are loaded and launched. With FAKE_CUDA_EXECUTE,
 * benches/ptx executes them; without, they do nothing: what they should have written is what was there
 * before. Everything has happened when a call returns, so streams and events only leave lines in the
 * trace. See README.md for the settings.
 *
 * Only what CubeCL, cudarc and Kiln call is here; another call fails as a missing symbol, by name. */
#include "ptx.h"
#include "trace.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef int Result;
typedef int Device;
typedef unsigned long long DevicePointer;
typedef struct { char bytes[16]; } Uuid;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_PTX = 218,
    NOT_FOUND = 500,
    NOT_SUPPORTED = 801,
};

#define GIB (1024.0 * 1024.0 * 1024.0)

static unsigned long streams, events, modules, files;

/* Whether kernels compute. */
static int executes(void) { return HAS_PTX && setting("FAKE_CUDA_EXECUTE", 0) != 0; }
static __thread Device current;
static __thread void *context;

/* -- The driver and its devices ------------------------------------------------------------------ */

static int devices(void) {
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible != NULL && *visible == 0)
        return 0;
    return (int)setting("FAKE_CUDA_DEVICES", 1);
}

Result cuInit(unsigned flags) {
    (void)flags;
    int error = (int)setting("FAKE_CUDA_INIT", SUCCESS);
    return error != SUCCESS ? error : devices() > 0 ? SUCCESS : NO_DEVICE;
}

Result cuDriverGetVersion(int *version) {
    *version = (int)setting("FAKE_CUDA_VERSION", 13000);
    return SUCCESS;
}

Result cuDeviceGetCount(int *count) {
    *count = devices();
    return SUCCESS;
}

Result cuDeviceGet(Device *device, int ordinal) {
    if (ordinal < 0 || ordinal >= devices())
        return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

/* CubeCL tells from the name whether there are tensor cores. */
Result cuDeviceGetName(char *name, int length, Device device) {
    (void)device;
    snprintf(name, (size_t)length, "NVIDIA stand-in");
    return SUCCESS;
}

Result cuDeviceGetUuid_v2(Uuid *uuid, Device device) {
    memset(uuid, device + 1, sizeof *uuid);
    return SUCCESS;
}

Result cuDeviceGetPCIBusId(char *id, int length, Device device) {
    snprintf(id, (size_t)length, "0000:%02x:00.0", device + 1);
    return SUCCESS;
}

/* Numbers of CUdevice_attribute. What depends on the architecture is that of an A100 or an H100. */
Result cuDeviceGetAttribute(int *value, int attribute, Device device) {
    (void)device;
    int capability = (int)(10 * setting("FAKE_CUDA_CAPABILITY", 9.0) + 0.5);
    int hopper = capability >= 90;
    switch (attribute) {
    case 1:  *value = 1024; break;                          /* threads per block */
    case 2: case 3: *value = 1024; break;                   /* block, x and y */
    case 4:  *value = 64; break;                            /* block, z */
    case 5:  *value = 2147483647; break;                    /* grid, x */
    case 6: case 7: *value = 65535; break;                  /* grid, y and z */
    case 8:  *value = 49152; break;                         /* shared memory per block */
    case 10: *value = 32; break;                            /* warp size */
    case 12: *value = 65536; break;                         /* registers per block */
    case 13: *value = hopper ? 1980000 : 1410000; break;    /* clock in kHz */
    case 16: *value = hopper ? 132 : 108; break;            /* multiprocessors */
    case 38: *value = hopper ? 52428800 : 41943040; break;  /* L2 cache */
    case 39: *value = 2048; break;                          /* threads per multiprocessor */
    case 75: *value = capability / 10; break;
    case 76: *value = capability % 10; break;
    case 81: *value = hopper ? 233472 : 167936; break;      /* shared memory per multiprocessor */
    case 97: *value = hopper ? 232448 : 166912; break;      /* the same per block, if asked for */
    case 106: *value = 32; break;                           /* blocks per multiprocessor */
    case 115: *value = 1; break;                            /* memory pools */
    default: *value = 1;
    }
    return SUCCESS;
}

Result cuGetErrorName(int error, const char **name) {
    switch (error) {
    case INVALID_VALUE:  *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY:  *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NO_DEVICE:      *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case NOT_SUPPORTED:  *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
    case INVALID_PTX:    *name = "CUDA_ERROR_INVALID_PTX"; break;
    case 719:            *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case 803:            *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; break;
    default:             *name = "CUDA_ERROR_UNKNOWN";
    }
    return SUCCESS;
}

Result cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

/* Private tables that libraries of NVIDIA ask for. */
Result cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

/* -- Contexts: one per device -------------------------------------------------------------------- */

Result cuDevicePrimaryCtxRetain(void **made, Device device) {
    *made = (void *)(uintptr_t)(0x1000 + device);
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(Device device) {
    (void)device;
    return SUCCESS;
}

Result cuCtxSetCurrent(void *set) {
    context = set;
    current = set == NULL ? 0 : (Device)((uintptr_t)set - 0x1000);
    return SUCCESS;
}

Result cuCtxGetCurrent(void **got) {
    *got = context;
    return SUCCESS;
}

Result cuCtxGetDevice(Device *device) {
    *device = current;
    return SUCCESS;
}

Result cuCtxGetApiVersion(void *of, unsigned *version) {
    (void)of;
    *version = (unsigned)setting("FAKE_CUDA_VERSION", 13000);
    return SUCCESS;
}

Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return SUCCESS;
}

Result cuCtxSynchronize(void) {
    trace("context_synchronize");
    return SUCCESS;
}

/* -- Streams and events: in order, at once -------------------------------------------------------- */

Result cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    *stream = next_handle(&streams);
    trace("stream_create stream=%lu flags=%u priority=%d", (unsigned long)*stream, flags, priority);
    return SUCCESS;
}

Result cuStreamCreate(void **stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

Result cuStreamDestroy_v2(void *stream) {
    trace("stream_destroy stream=%lu", (unsigned long)stream);
    return SUCCESS;
}

Result cuStreamQuery(void *stream) {
    trace("stream_query stream=%lu", (unsigned long)stream);
    return SUCCESS;
}

Result cuStreamSynchronize(void *stream) {
    trace("stream_synchronize stream=%lu", (unsigned long)stream);
    return SUCCESS;
}

Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    trace("stream_wait_event stream=%lu event=%lu", (unsigned long)stream, (unsigned long)event);
    return SUCCESS;
}

Result cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    *event = next_handle(&events);
    return SUCCESS;
}

Result cuEventDestroy_v2(void *event) {
    (void)event;
    return SUCCESS;
}

Result cuEventRecord(void *event, void *stream) {
    trace("event_record event=%lu stream=%lu", (unsigned long)event, (unsigned long)stream);
    return SUCCESS;
}

Result cuEventQuery(void *event) {
    trace("event_query event=%lu", (unsigned long)event);
    return SUCCESS;
}

Result cuEventSynchronize(void *event) {
    trace("event_synchronize event=%lu", (unsigned long)event);
    return SUCCESS;
}

Result cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    (void)start, (void)end;
    *milliseconds = 0.01f;
    return SUCCESS;
}

/* -- Memory ---------------------------------------------------------------------------------------- */

/* What is allocated, so that it can be given back and counted. */
struct block {
    void *start;
    size_t size;
    struct block *next;
};
static struct block *blocks;
static double used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static double capacity(void) { return GIB * setting("FAKE_CUDA_MEMORY_GIB", 80); }

static double free_at_start(void) {
    return GIB * setting("FAKE_CUDA_FREE_GIB", setting("FAKE_CUDA_MEMORY_GIB", 80));
}

static Result allocate(DevicePointer *pointer, size_t size) {
    struct block *block = malloc(sizeof *block);
    Result result = OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    if (block != NULL && used + (double)size <= free_at_start()) {
        /* Pages come into being when they are touched: a large model fits into a small host. */
        void *start = mmap(NULL, size > 0 ? size : 1, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start != MAP_FAILED) {
            *block = (struct block){start, size, blocks};
            blocks = block;
            used += (double)size;
            *pointer = (DevicePointer)(uintptr_t)start;
            result = SUCCESS;
            if (executes())
                kiln_ptx_allocated(*pointer, size);
        }
    }
    pthread_mutex_unlock(&lock);
    if (result != SUCCESS)
        free(block);
    return result;
}

static Result give_back(DevicePointer pointer) {
    Result result = INVALID_VALUE;
    pthread_mutex_lock(&lock);
    for (struct block **at = &blocks; *at != NULL; at = &(*at)->next) {
        struct block *block = *at;
        if ((DevicePointer)(uintptr_t)block->start == pointer) {
            *at = block->next;
            if (executes())
                kiln_ptx_freed(pointer);
            used -= (double)block->size;
            munmap(block->start, block->size > 0 ? block->size : 1);
            free(block);
            result = SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
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
    Result result = allocate(pointer, size);
    trace("alloc bytes=%zu at=%llx result=%d", size, result == SUCCESS ? *pointer : 0, result);
    return result;
}

Result cuMemAllocAsync(DevicePointer *pointer, size_t size, void *stream) {
    Result result = allocate(pointer, size);
    trace("alloc_async stream=%lu bytes=%zu at=%llx result=%d", (unsigned long)stream, size,
          result == SUCCESS ? *pointer : 0, result);
    return result;
}

Result cuMemFree_v2(DevicePointer pointer) {
    trace("free at=%llx", pointer);
    return give_back(pointer);
}

Result cuMemFreeAsync(DevicePointer pointer, void *stream) {
    trace("free_async stream=%lu at=%llx", (unsigned long)stream, pointer);
    return give_back(pointer);
}

Result cuMemAllocHost_v2(void **pointer, size_t size) {
    trace("alloc_host bytes=%zu", size);
    return posix_memalign(pointer, 4096, size > 0 ? size : 1) == 0 ? SUCCESS : OUT_OF_MEMORY;
}

Result cuMemHostAlloc(void **pointer, size_t size, unsigned flags) {
    (void)flags;
    return cuMemAllocHost_v2(pointer, size);
}

Result cuMemFreeHost(void *pointer) {
    free(pointer);
    return SUCCESS;
}

Result cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) {
    (void)pointer, (void)flags;
    trace("host_register bytes=%zu", size);
    return SUCCESS;
}

Result cuMemHostUnregister(void *pointer) {
    (void)pointer;
    return SUCCESS;
}

static void *at(DevicePointer pointer) { return (void *)(uintptr_t)pointer; }

/* For libraries of this folder as well: device memory that something other than a kernel has written. */
void fake_cuda_wrote(DevicePointer to, size_t size) {
    if (executes())
        kiln_ptx_wrote(to, size);
}

Result cuMemcpyHtoDAsync_v2(DevicePointer to, const void *from, size_t size, void *stream) {
    trace("memcpy_htod stream=%lu bytes=%zu to=%llx", (unsigned long)stream, size, to);
    memcpy(at(to), from, size);
    fake_cuda_wrote(to, size);
    return SUCCESS;
}

Result cuMemcpyDtoHAsync_v2(void *to, DevicePointer from, size_t size, void *stream) {
    trace("memcpy_dtoh stream=%lu bytes=%zu from=%llx", (unsigned long)stream, size, from);
    memcpy(to, at(from), size);
    return SUCCESS;
}

Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t size, void *stream) {
    trace("memcpy_dtod stream=%lu bytes=%zu to=%llx from=%llx", (unsigned long)stream, size, to, from);
    memmove(at(to), at(from), size);
    if (executes())
        kiln_ptx_copied(to, from, size);
    return SUCCESS;
}

/* Without a stream, the host waits for the end: the trace says so. */
Result cuMemcpyHtoD_v2(DevicePointer to, const void *from, size_t size) {
    trace("memcpy_htod_synchronous bytes=%zu to=%llx", size, to);
    memcpy(at(to), from, size);
    fake_cuda_wrote(to, size);
    return SUCCESS;
}

Result cuMemcpyDtoH_v2(void *to, DevicePointer from, size_t size) {
    trace("memcpy_dtoh_synchronous bytes=%zu from=%llx", size, from);
    memcpy(to, at(from), size);
    return SUCCESS;
}

/* CUDA_MEMCPY2D; of the kinds of memory, host (1) and device (2) are known. */
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

Result cuMemcpy2DAsync_v2(const struct copy_2d *copy, void *stream) {
    trace("memcpy_2d stream=%lu bytes=%zu", (unsigned long)stream, copy->width * copy->height);
    const char *from = copy->from_kind == 1 ? copy->from_host : at(copy->from_device);
    char *to = copy->to_kind == 1 ? copy->to_host : at(copy->to_device);
    for (size_t row = 0; row < copy->height; row++) {
        char *target = to + (copy->to_y + row) * copy->to_pitch + copy->to_x;
        memmove(target, from + (copy->from_y + row) * copy->from_pitch + copy->from_x, copy->width);
        fake_cuda_wrote((DevicePointer)(uintptr_t)target, copy->width);
    }
    return SUCCESS;
}

Result cuMemsetD8Async(DevicePointer to, unsigned char value, size_t count, void *stream) {
    trace("memset stream=%lu bytes=%zu", (unsigned long)stream, count);
    memset(at(to), value, count);
    fake_cuda_wrote(to, count);
    return SUCCESS;
}

Result cuMemsetD32Async(DevicePointer to, unsigned value, size_t count, void *stream) {
    trace("memset stream=%lu bytes=%zu", (unsigned long)stream, 4 * count);
    for (size_t i = 0; i < count; i++)
        ((unsigned *)at(to))[i] = value;
    fake_cuda_wrote(to, 4 * count);
    return SUCCESS;
}

/* -- Kernels: kept, and executed if that is asked for -------------------------------------------------- */

/* Writes PTX to a file of its own in the folder that FAKE_CUDA_PTX_DIR names. */
static void keep(const char *ptx) {
    const char *folder = getenv("FAKE_CUDA_PTX_DIR");
    if (folder == NULL || *folder == 0)
        return;
    char path[4096];
    snprintf(path, sizeof path, "%s/%04lu.ptx", folder, (unsigned long)next_handle(&files));
    FILE *out = fopen(path, "w");
    if (out == NULL || fputs(ptx, out) < 0 || fclose(out) != 0) {
        perror(path);
        abort();
    }
}

/* A number, or what benches/ptx has made of the text. */
Result cuModuleLoadData(void **module, const void *image) {
    trace("module_load bytes=%zu", strlen(image));
    keep(image);
    *module = executes() ? kiln_ptx_module(image) : next_handle(&modules);
    return *module != NULL ? SUCCESS : INVALID_PTX;
}

Result cuModuleUnload(void *module) {
    if (executes())
        kiln_ptx_unload(module);
    return SUCCESS;
}

/* A function has its name, for the trace, and what executes it, if kernels are executed. */
struct function {
    char *name;
    void *kernel;
};

Result cuModuleGetFunction(void **made, void *module, const char *name) {
    struct function *function = malloc(sizeof *function);
    if (function == NULL)
        return OUT_OF_MEMORY;
    *function = (struct function){strdup(name), executes() ? kiln_ptx_function(module, name) : NULL};
    if (function->name == NULL || (executes() && function->kernel == NULL)) {
        free(function->name);
        free(function);
        return NOT_FOUND;
    }
    *made = function;
    return SUCCESS;
}

/* Of the attributes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES has an effect. */
Result cuFuncSetAttribute(void *function, int attribute, int value) {
    void *kernel = ((struct function *)function)->kernel;
    if (attribute == 8 && kernel != NULL)
        kiln_ptx_allow_shared(kernel, (unsigned)value);
    return SUCCESS;
}

Result cuLaunchKernel(void *launched, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                      void **extra) {
    const struct function *function = launched;
    trace("launch stream=%lu kernel=%s grid=%u,%u,%u block=%u,%u,%u shared=%u", (unsigned long)stream,
          function->name, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared);
    if (function->kernel == NULL)
        return SUCCESS;
    if (extra != NULL)
        return NOT_SUPPORTED;
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return kiln_ptx_launch(function->kernel, grid, block, shared, (const void *const *)arguments);
}

/* A tensor map is opaque, and kernels do not run. */
Result cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dimensions,
                              const uint64_t *strides, const unsigned *box, const unsigned *element_strides,
                              int interleave, int swizzle, int promotion, int fill) {
    (void)type, (void)rank, (void)address, (void)dimensions, (void)strides, (void)box;
    (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    memset(map, 0, 128);
    return SUCCESS;
}
