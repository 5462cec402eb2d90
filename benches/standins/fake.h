/* Shared declarations of the stand-in for the driver. */
#ifndef FAKE_H
#define FAKE_H

#include "ptx.h"
#include "trace.h"

#include <stdint.h>

typedef int Result;
typedef int Device;
typedef unsigned long long DevicePointer;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
};

#pragma GCC visibility push(hidden)

/* Returns 1 if kernels compute. */
static inline int executes(void) { return HAS_PTX && setting("FAKE_CUDA_EXECUTE", 0) != 0; }

/* Returns 1 if streams are asynchronous and have threads: FAKE_CUDA_ASYNC, if kernels compute. */
static inline int is_async(void) { return executes() && kiln_ptx_is_async(); }

#pragma GCC visibility pop

/* Calls `run` with a copy of `size` bytes of `data` in the order of the stream; immediately, if streams are not
 * asynchronous. `run` uses `count` spans; `what` is its name in messages. Also called by other stand-ins. */
Result fake_cuda_in_stream(void *stream, const char *what, const struct span *spans, size_t count,
                           int (*run)(void *), const void *data, size_t size);

/* A callback for launches. The kernel's name stays valid. */
typedef void launch_hook(uint32_t device, uint32_t stream, const char *kernel);

/* Calls `hook` for every launch from now on. Called by other stand-ins. */
void fake_cuda_on_launch(launch_hook *hook);

/* Advances the clock of events, for all streams. Also called by other stand-ins. */
void fake_cuda_took(double milliseconds);

/* Marks device memory as written by something other than a kernel. Also called by other stand-ins. */
void fake_cuda_wrote(DevicePointer to, size_t size);

#endif
