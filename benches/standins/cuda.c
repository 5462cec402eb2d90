/* A stand-in for NVIDIA's driver, libcuda.so.1: devices, contexts and kernels. Memory is in memory.c, streams
 * and events in streams.c.
 *
 * Kernels are loaded and launched. With FAKE_CUDA_EXECUTE, benches/standins/ptx executes them; without it, they do
 * nothing and leave their outputs unchanged. See README.md for the settings.
 *
 * Only functions that CubeCL, cudarc and Kiln call are defined; others are reported as missing symbols, by name. */
#include "fake.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[16]; } Uuid;

static unsigned long modules, files;

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

/* CubeCL infers from the name whether the device has tensor cores. */
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

/* `attribute` is a CUdevice_attribute. Values that depend on the architecture are an A100's or an H100's. */
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
    case 97: *value = hopper ? 232448 : 166912; break;      /* the same per block, opt-in */
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
    case NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
    case INVALID_PTX:    *name = "CUDA_ERROR_INVALID_PTX"; break;
    case NOT_READY:      *name = "CUDA_ERROR_NOT_READY"; break;
    case LAUNCH_FAILED:  *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
    case 803:            *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; break;
    default:             *name = "CUDA_ERROR_UNKNOWN";
    }
    return SUCCESS;
}

Result cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

/* Private tables that NVIDIA's libraries request. */
Result cuGetExportTable(const void **table, const void *id) {
    (void)id;
    *table = NULL;
    return NOT_FOUND;
}

/* -- Contexts: one per device -------------------------------------------------------------------- */

/* Number of times that each device's context is retained. */
enum { MOST_DEVICES = 64 };
static int retained[MOST_DEVICES];

Result cuDevicePrimaryCtxRetain(void **made, Device device) {
    if (device < 0 || device >= MOST_DEVICES)
        return INVALID_DEVICE;
    if (__atomic_fetch_add(&retained[device], 1, __ATOMIC_RELAXED) == 0)
        trace("context_create device=%d", device);
    *made = (void *)(uintptr_t)(0x1000 + device);
    return SUCCESS;
}

Result cuDevicePrimaryCtxRelease_v2(Device device) {
    if (__atomic_fetch_sub(&retained[device], 1, __ATOMIC_RELAXED) == 1)
        trace("context_destroy device=%d", device);
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
    return is_async() ? kiln_ptx_synchronize() : SUCCESS;
}

/* -- Kernels: saved, and executed on request ------------------------------------------------------------ */

/* Writes PTX to a separate file in the folder FAKE_CUDA_PTX_DIR. */
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

/* Machine code cannot be executed here and is refused. With FAKE_CUDA_CUBIN, it is accepted if kernels compute
 * nothing. */
static int is_machine_code(const void *image) { return memcmp(image, "\177ELF", 4) == 0; }

/* The handle of a module is a number, or, if kernels are executed, the parsed module of benches/standins/ptx. */
Result cuModuleLoadData(void **module, const void *image) {
    if (is_machine_code(image)) {
        if (executes() || setting("FAKE_CUDA_CUBIN", 0) == 0)
            return NO_BINARY_FOR_GPU;
        trace("module_load cubin");
        *module = next_handle(&modules);
        return SUCCESS;
    }
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

/* A function: its name, for the trace, and its parsed kernel, if kernels are executed. */
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

/* Only CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES has an effect. */
Result cuFuncSetAttribute(void *function, int attribute, int value) {
    void *kernel = ((struct function *)function)->kernel;
    if (attribute == 8 && kernel != NULL)
        kiln_ptx_allow_shared(kernel, (unsigned)value);
    return SUCCESS;
}

static launch_hook *launch_told;

void fake_cuda_on_launch(launch_hook *hook) { __atomic_store_n(&launch_told, hook, __ATOMIC_RELEASE); }

Result cuLaunchKernel(void *launched, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **arguments,
                      void **extra) {
    const struct function *function = launched;
    trace("launch stream=%lu kernel=%s grid=%u,%u,%u block=%u,%u,%u shared=%u", (unsigned long)stream,
          function->name, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared);
    launch_hook *hook = __atomic_load_n(&launch_told, __ATOMIC_ACQUIRE);
    Device device = 0;
    if (hook != NULL && cuCtxGetDevice(&device) == SUCCESS)
        hook((uint32_t)device, (uint32_t)(uintptr_t)stream, function->name);
    take_time();
    if (function->kernel == NULL)
        return SUCCESS;
    if (extra != NULL)
        return NOT_SUPPORTED;
    const unsigned grid[] = {grid_x, grid_y, grid_z}, block[] = {block_x, block_y, block_z};
    return kiln_ptx_launch(function->kernel, grid, block, shared, (const void *const *)arguments,
                           (unsigned long)stream);
}

/* Tensor maps are opaque, and no kernel reads one. */
Result cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const uint64_t *dimensions,
                              const uint64_t *strides, const unsigned *box, const unsigned *element_strides,
                              int interleave, int swizzle, int promotion, int fill) {
    (void)type, (void)rank, (void)address, (void)dimensions, (void)strides, (void)box;
    (void)element_strides, (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    memset(map, 0, 128);
    return SUCCESS;
}
