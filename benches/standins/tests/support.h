/* Tests of the stand-ins, as programs that call them, and the declarations of CUDA and NCCL that they need. */
#ifndef SUPPORT_H
#define SUPPORT_H

#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long Pointer;
typedef void *Stream, *Event, *Module, *Function;

int cuInit(unsigned flags);
int cuCtxSynchronize(void);
int cuStreamCreate(Stream *stream, unsigned flags);
int cuStreamSynchronize(Stream stream);
int cuStreamQuery(Stream stream);
int cuStreamWaitEvent(Stream stream, Event event, unsigned flags);
int cuEventCreate(Event *event, unsigned flags);
int cuEventRecord(Event event, Stream stream);
int cuEventQuery(Event event);
int cuEventSynchronize(Event event);
int cuLaunchHostFunc(Stream stream, void (*function)(void *), void *data);
int cuMemAlloc_v2(Pointer *pointer, size_t size);
int cuMemAllocAsync(Pointer *pointer, size_t size, Stream stream);
int cuMemFree_v2(Pointer pointer);
int cuMemFreeAsync(Pointer pointer, Stream stream);
int cuMemAllocHost_v2(void **pointer, size_t size);
int cuMemFreeHost(void *pointer);
int cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t size, Stream stream);
int cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t size, Stream stream);
int cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t size, Stream stream);
int cuMemsetD32Async(Pointer to, unsigned value, size_t count, Stream stream);
int cuModuleLoadData(Module *module, const void *image);
int cuModuleGetFunction(Function *function, Module module, const char *name);
int cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared, Stream stream, void **arguments, void **extra);

enum { WORDS = 64, BYTES = 4 * WORDS, NOT_READY = 600, LAUNCH_FAILED = 719 };

/* Prints the location and ends the program unless the condition is true. */
#define CHECK(condition)                                                                                           \
    do {                                                                                                           \
        if (!(condition)) {                                                                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                 \
            exit(100);                                                                                             \
        }                                                                                                          \
    } while (0)

/* The end of a program that ran in a separate process. */
struct outcome {
    int code;
    char told[1 << 14];
};

/* Runs a program in a separate process, with delays from `seed`, and captures its output. */
struct outcome run(int (*program)(int argument), int argument, int seed);

/* Runs a program with its bug, which must be reported as `expected`, and without it. Uses several seeds. */
void planted(const char *name, int (*program)(int bug), const char *expected);

/* Runs a program without a bug, with several seeds. */
void works(const char *name, int (*program)(int));

#endif
