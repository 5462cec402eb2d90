/* Shared by the stand-ins: settings from variables, the trace, and access to the driver's streams. */
#ifndef TRACE_H
#define TRACE_H

#include <stddef.h>

/* Bytes that an operation of a stream uses: `count` pieces of `bytes` bytes, one `stride` apart. */
struct span {
    unsigned long long start, bytes, count, stride;
    int writes;
};

/* Hidden in each library, so that one process can load two of them. */
#pragma GCC visibility push(hidden)

/* Appends a line to the file FAKE_CUDA_TRACE, if set. Lines of all threads and libraries are whole, and in the order of
 * the calls. */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Waits for the duration of a launch, FAKE_CUDA_LAUNCH_US; returns immediately if unset. */
void take_time(void);

/* Returns a number from a variable, or `otherwise` if unset. */
double setting(const char *name, double otherwise);

/* Returns a handle: 1, 2, … for each kind, so that traces of two runs can be compared. */
void *next_handle(unsigned long *counter);

/* Notifies the stand-in for the driver that a library has written `size` bytes of device memory. */
void wrote(const void *to, size_t size);

/* Advances the event clock of the stand-in for the driver by the duration of the last call. */
void took(double milliseconds);

/* Calls `run` with a copy of `size` bytes of `data` in the order of the stream: see fake.h. */
int in_stream(void *stream, const char *what, const struct span *spans, size_t count, int (*run)(void *),
              const void *data, size_t size);

/* Returns the span of `size` contiguous bytes. */
static inline struct span bytes_at(const void *start, size_t size, int writes) {
    return (struct span){(unsigned long long)start, size, 1, size, writes};
}

#pragma GCC visibility pop
#endif
