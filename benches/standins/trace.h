/* What the stand-ins share: settings from variables, the trace, and the way to the streams of the driver. */
#ifndef TRACE_H
#define TRACE_H

#include <stddef.h>

/* Bytes that an operation of a stream uses: `count` times `bytes`, one `stride` apart. */
struct span {
    unsigned long long start, bytes, count, stride;
    int writes;
};

/* Kept inside of each library, so that two of them can be in one process. */
#pragma GCC visibility push(hidden)

/* Appends one line to the file that FAKE_CUDA_TRACE names, if it names one. Lines of all threads and
 * libraries come in the order of the calls, whole. */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Lets the time pass that a launch takes by FAKE_CUDA_LAUNCH_US: none, if nothing is set. */
void take_time(void);

/* A number from a variable, or `otherwise`. */
double setting(const char *name, double otherwise);

/* A handle that is not zero, counted from 1 per kind, so that traces of two runs can be compared. */
void *next_handle(unsigned long *counter);

/* Tells the stand-in for the driver that a library has written `size` bytes of device memory. */
void wrote(const void *to, size_t size);

/* Tells the stand-in for the driver that the last call takes so long, by the clock of its events. */
void took(double milliseconds);

/* Runs `run` with a copy of `size` bytes of `data` when the stream gets there: see fake.h. */
int in_stream(void *stream, const char *what, const struct span *spans, size_t count, int (*run)(void *),
              const void *data, size_t size);

/* The span of `size` bytes. */
static inline struct span bytes_at(const void *start, size_t size, int writes) {
    return (struct span){(unsigned long long)start, size, 1, size, writes};
}

#pragma GCC visibility pop
#endif
