/* What the stand-ins share: settings from variables, and the trace. */
#ifndef TRACE_H
#define TRACE_H

#include <stddef.h>

/* Kept inside of each library, so that two of them can be in one process. */
#pragma GCC visibility push(hidden)

/* Appends one line to the file that FAKE_CUDA_TRACE names, if it names one. Lines of all threads and
 * libraries come in the order of the calls, whole. */
void trace(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* A number from a variable, or `otherwise`. */
double setting(const char *name, double otherwise);

/* A handle that is not zero, counted from 1 per kind, so that traces of two runs can be compared. */
void *next_handle(unsigned long *counter);

/* Tells the stand-in for the driver that a library has written `size` bytes of device memory. */
void wrote(const void *to, size_t size);

#pragma GCC visibility pop
#endif
