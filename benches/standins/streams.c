/* Streams and events of the stand-in for the driver.
 *
 * By default, work is complete when a call returns, and streams and events only append lines to the trace. With
 * FAKE_CUDA_ASYNC, each stream has a thread in benches/standins/ptx, which executes the stream's work later. */
#include "fake.h"

#include <limits.h>
#include <pthread.h>

static unsigned long streams, events;

/* The clock of events, which libraries advance, and the times at which the latest events were recorded. */
enum { MOMENTS = 1 << 14 };
static double now, moments[MOMENTS];
static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;

static double *moment_of(void *event) { return &moments[(uintptr_t)event % MOMENTS]; }

/* For FAKE_CUDA_AHEAD: the number of records of events so far, the last record of each event, and the last record that
 * the host has waited for. */
static unsigned long recorded, records[MOMENTS], reached;

static unsigned long *record_of(void *event) { return &records[(uintptr_t)event % MOMENTS]; }

/* Notes that the host has waited for all records up to `record`; `ULONG_MAX` means all so far. */
static void host_waited(unsigned long record) {
    pthread_mutex_lock(&clock_lock);
    record = record < recorded ? record : recorded;
    reached = reached > record ? reached : record;
    pthread_mutex_unlock(&clock_lock);
}

static int is_reached(void *event) {
    pthread_mutex_lock(&clock_lock);
    int result = *record_of(event) <= reached;
    pthread_mutex_unlock(&clock_lock);
    return result || setting("FAKE_CUDA_AHEAD", 0) == 0;
}

void fake_cuda_took(double milliseconds) {
    pthread_mutex_lock(&clock_lock);
    now += milliseconds;
    pthread_mutex_unlock(&clock_lock);
}

Result fake_cuda_in_stream(void *stream, const char *what, const struct span *spans, size_t count,
                           int (*run)(void *), const void *data, size_t size) {
    if (is_async())
        return kiln_ptx_submit((unsigned long)stream, what, spans, count, run, data, size);
    return run((void *)data);
}

Result cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    *stream = next_handle(&streams);
    trace("stream_create stream=%lu flags=%u priority=%d", (unsigned long)*stream, flags, priority);
    /* CU_STREAM_NON_BLOCKING is 1. */
    if (is_async())
        kiln_ptx_stream_create((unsigned long)*stream, (flags & 1) == 0);
    return SUCCESS;
}

Result cuStreamCreate(void **stream, unsigned flags) {
    return cuStreamCreateWithPriority(stream, flags, 0);
}

Result cuStreamDestroy_v2(void *stream) {
    trace("stream_destroy stream=%lu", (unsigned long)stream);
    if (is_async())
        kiln_ptx_stream_destroy((unsigned long)stream);
    return SUCCESS;
}

Result cuStreamQuery(void *stream) {
    trace("stream_query stream=%lu", (unsigned long)stream);
    return is_async() ? kiln_ptx_stream_query((unsigned long)stream) : SUCCESS;
}

Result cuStreamSynchronize(void *stream) {
    trace("stream_synchronize stream=%lu", (unsigned long)stream);
    host_waited(ULONG_MAX);
    return is_async() ? kiln_ptx_stream_synchronize((unsigned long)stream) : SUCCESS;
}

Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    (void)flags;
    trace("stream_wait_event stream=%lu event=%lu", (unsigned long)stream, (unsigned long)event);
    return is_async() ? kiln_ptx_stream_wait((unsigned long)stream, (unsigned long)event) : SUCCESS;
}

Result cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    *event = next_handle(&events);
    return SUCCESS;
}

Result cuEventDestroy_v2(void *event) {
    if (is_async())
        kiln_ptx_event_destroy((unsigned long)event);
    return SUCCESS;
}

Result cuEventRecord(void *event, void *stream) {
    trace("event_record event=%lu stream=%lu", (unsigned long)event, (unsigned long)stream);
    pthread_mutex_lock(&clock_lock);
    *moment_of(event) = now;
    *record_of(event) = ++recorded;
    pthread_mutex_unlock(&clock_lock);
    return is_async() ? kiln_ptx_event_record((unsigned long)event, (unsigned long)stream) : SUCCESS;
}

Result cuEventQuery(void *event) {
    trace("event_query event=%lu", (unsigned long)event);
    if (is_async())
        return kiln_ptx_event_query((unsigned long)event);
    return is_reached(event) ? SUCCESS : NOT_READY;
}

Result cuEventSynchronize(void *event) {
    trace("event_synchronize event=%lu", (unsigned long)event);
    host_waited(*record_of(event));
    return is_async() ? kiln_ptx_event_synchronize((unsigned long)event) : SUCCESS;
}

Result cuEventElapsedTime_v2(float *milliseconds, void *start, void *end) {
    pthread_mutex_lock(&clock_lock);
    *milliseconds = 0.01f + (float)(*moment_of(end) - *moment_of(start));
    pthread_mutex_unlock(&clock_lock);
    return SUCCESS;
}

Result cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    trace("host_function stream=%lu", (unsigned long)stream);
    if (is_async())
        return kiln_ptx_host_function((unsigned long)stream, function, data);
    function(data);
    return SUCCESS;
}
