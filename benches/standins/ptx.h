/* The interface of benches/standins/ptx for the driver: see driver.rs and stream_driver.rs in its folder src. Without
 * HAS_PTX, which setup.sh defines, the driver is built from C alone, and kernels compute nothing. */
#ifndef PTX_H
#define PTX_H

#include "trace.h"

#ifndef HAS_PTX
#define HAS_PTX 0
#define KILN_PTX __attribute__((weak))
#else
#define KILN_PTX
#endif

KILN_PTX void kiln_ptx_allocated(unsigned long long start, unsigned long long size);
KILN_PTX void kiln_ptx_freed(unsigned long long start);
KILN_PTX void kiln_ptx_wrote(unsigned long long to, unsigned long long size);
KILN_PTX void kiln_ptx_copied(unsigned long long to, unsigned long long from, unsigned long long size);

KILN_PTX void *kiln_ptx_module(const char *text);
KILN_PTX void kiln_ptx_unload(void *module);
KILN_PTX void *kiln_ptx_function(const void *module, const char *name);
KILN_PTX void kiln_ptx_allow_shared(void *function, unsigned size);
KILN_PTX int kiln_ptx_launch(const void *function, const unsigned grid[3], const unsigned block[3], unsigned shared,
                             const void *const *arguments, unsigned long stream);

/* Asynchronous streams. A negative stream stands for the host. */
KILN_PTX int kiln_ptx_is_async(void);
KILN_PTX void kiln_ptx_stream_create(unsigned long stream, int blocking);
KILN_PTX void kiln_ptx_stream_destroy(unsigned long stream);
KILN_PTX int kiln_ptx_stream_query(unsigned long stream);
KILN_PTX int kiln_ptx_stream_synchronize(unsigned long stream);
KILN_PTX int kiln_ptx_stream_wait(unsigned long stream, unsigned long event);
KILN_PTX int kiln_ptx_synchronize(void);
KILN_PTX int kiln_ptx_event_record(unsigned long event, unsigned long stream);
KILN_PTX int kiln_ptx_event_query(unsigned long event);
KILN_PTX int kiln_ptx_event_synchronize(unsigned long event);
KILN_PTX void kiln_ptx_event_destroy(unsigned long event);
KILN_PTX int kiln_ptx_submit(unsigned long stream, const char *what, const struct span *spans, size_t count,
                             int (*run)(void *), const void *data, size_t size);
KILN_PTX int kiln_ptx_host_function(unsigned long stream, void (*function)(void *), void *data);
KILN_PTX int kiln_ptx_stream_allocated(unsigned long long start, unsigned long long size, long long stream);
KILN_PTX int kiln_ptx_stream_free(unsigned long long start, long long stream, void (*release)(unsigned long long));
KILN_PTX void kiln_ptx_pinned(unsigned long long start, unsigned long long size);
KILN_PTX void kiln_ptx_unpinned(unsigned long long start, void (*release)(unsigned long long));

#endif
