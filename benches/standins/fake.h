/* What the files of the stand-in for the driver share. */
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

/* Whether kernels compute. */
static inline int executes(void) { return HAS_PTX && setting("FAKE_CUDA_EXECUTE", 0) != 0; }

/* Whether streams have threads and are late: FAKE_CUDA_ASYNC, where kernels compute. */
static inline int is_async(void) { return executes() && kiln_ptx_is_async(); }

#pragma GCC visibility pop

/* Runs `run` with a copy of `size` bytes of `data` when the stream gets there; at once, if streams are not
 * asynchronous. It uses `count` spans, and is called `what` in messages. For libraries of this folder as well. */
Result fake_cuda_in_stream(void *stream, const char *what, const struct span *spans, size_t count,
                           int (*run)(void *), const void *data, size_t size);

/* Who is told of every launch: the device, the stream, and the kernel's name, which stays. */
typedef void launch_hook(uint32_t device, uint32_t stream, const char *kernel);

/* For libraries of this folder: from now on, `hook` is told. */
void fake_cuda_on_launch(launch_hook *hook);

/* For libraries of this folder as well: moves the clock of events on, for all streams. */
void fake_cuda_took(double milliseconds);

/* For libraries of this folder as well: device memory that something other than a kernel has written. */
void fake_cuda_wrote(DevicePointer to, size_t size);

#endif
