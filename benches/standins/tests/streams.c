/* Streams, events and copies of the stand-in for the driver, and bugs in their use. */
#include "support.h"

/* Adds 1 to 64 words of the first buffer, and writes them to the second one. */
static const char *const PTX = ".version 9.0\n.target sm_90\n.address_size 64\n"
                               ".visible .entry plus_one(.param .u64 p0, .param .u64 p1)\n{\n"
                               ".reg .b32 %t, %v;\n.reg .b64 %a, %b, %y;\n"
                               "mov.u32 %t, %tid.x;\nmul.wide.u32 %y, %t, 4;\n"
                               "ld.param.u64 %a, [p0];\nadd.s64 %a, %a, %y;\n"
                               "ld.param.u64 %b, [p1];\nadd.s64 %b, %b, %y;\n"
                               "ld.global.u32 %v, [%a];\nadd.u32 %v, %v, 1;\nst.global.u32 [%b], %v;\nret;\n}\n";

static Stream streams[2];
static Event event;
static Function plus_one;

static void start(void) {
    Module module;
    CHECK(cuInit(0) == 0);
    for (int i = 0; i < 2; i++)
        CHECK(cuStreamCreate(&streams[i], 1) == 0);
    CHECK(cuEventCreate(&event, 2) == 0);
    CHECK(cuModuleLoadData(&module, PTX) == 0);
    CHECK(cuModuleGetFunction(&plus_one, module, "plus_one") == 0);
}

/* Calls may fail once an error has occurred; the last one reports it. */
static int end(void) { return cuCtxSynchronize() != 0; }

static Pointer filled(unsigned value) {
    Pointer pointer;
    CHECK(cuMemAlloc_v2(&pointer, BYTES) == 0);
    CHECK(cuMemsetD32Async(pointer, value, WORDS, streams[0]) == 0);
    CHECK(cuStreamSynchronize(streams[0]) == 0);
    return pointer;
}

static void launch(Stream stream, Pointer from, Pointer to) {
    void *arguments[] = {&from, &to};
    cuLaunchKernel(plus_one, 1, 1, 1, WORDS, 1, 1, 0, stream, arguments, NULL);
}

/* The second stream waits for the first. */
static void order(void) {
    cuEventRecord(event, streams[0]);
    cuStreamWaitEvent(streams[1], event, 0);
}

static void expect(Pointer pointer, unsigned value) {
    unsigned words[WORDS];
    CHECK(cuMemcpyDtoHAsync_v2(words, pointer, BYTES, streams[1]) == 0);
    for (int i = 0; i < WORDS; i++)
        CHECK(words[i] == value);
}

static int event_forgotten(int bug) {
    start();
    Pointer a = filled(7), b = filled(0), c = filled(0);
    launch(streams[0], a, b);
    if (!bug)
        order();
    launch(streams[1], b, c);
    if (!bug)
        expect(c, 9);
    return end();
}

static int event_before_its_work(int bug) {
    start();
    Pointer a = filled(7), b = filled(0), c = filled(0);
    if (bug)
        order();
    launch(streams[0], a, b);
    if (!bug)
        order();
    launch(streams[1], b, c);
    return end();
}

static int freed_early(int bug) {
    start();
    Pointer a, b = filled(0);
    CHECK(cuMemAllocAsync(&a, BYTES, streams[0]) == 0);
    CHECK(cuMemsetD32Async(a, 7, WORDS, streams[0]) == 0);
    order();
    launch(streams[1], a, b);
    if (!bug) {
        cuEventRecord(event, streams[1]);
        cuStreamWaitEvent(streams[0], event, 0);
    }
    cuMemFreeAsync(a, streams[0]);
    if (!bug)
        expect(b, 8);
    return end();
}

static int copy_overtakes(int bug) {
    start();
    Pointer a = filled(7), b = filled(0);
    void *host;
    CHECK(cuMemAllocHost_v2(&host, BYTES) == 0);
    memset(host, 0, BYTES);
    cuMemcpyDtoHAsync_v2(host, a, BYTES, streams[0]);
    if (!bug)
        order();
    cuMemcpyHtoDAsync_v2(b, host, BYTES, streams[1]);
    if (!bug)
        expect(b, 7);
    return end();
}

static int pinned_freed_early(int bug) {
    start();
    Pointer a = filled(7);
    void *host;
    CHECK(cuMemAllocHost_v2(&host, BYTES) == 0);
    cuMemcpyDtoHAsync_v2(host, a, BYTES, streams[0]);
    if (!bug)
        cuStreamSynchronize(streams[0]);
    cuMemFreeHost(host);
    return end();
}

/* Pageable memory has been read when the call returns. */
static int pageable(int unused) {
    (void)unused;
    start();
    Pointer a = filled(0);
    unsigned words[WORDS];
    for (int value = 1; value < 40; value++) {
        for (int i = 0; i < WORDS; i++)
            words[i] = (unsigned)value;
        CHECK(cuMemcpyHtoDAsync_v2(a, words, BYTES, streams[1]) == 0);
        memset(words, 0, sizeof words);
        expect(a, (unsigned)value);
    }
    return end();
}

static void count(void *data) { ++*(int *)data; }

static int callbacks_and_queries(int unused) {
    (void)unused;
    start();
    int calls = 0;
    CHECK(cuEventQuery(event) == 0);
    for (int i = 0; i < 50; i++)
        CHECK(cuLaunchHostFunc(streams[0], count, &calls) == 0);
    CHECK(cuEventRecord(event, streams[0]) == 0);
    int state;
    while ((state = cuEventQuery(event)) == NOT_READY)
        ;
    CHECK(state == 0 && calls == 50);
    CHECK(cuEventSynchronize(event) == 0 && cuStreamQuery(streams[0]) == 0);
    return end();
}

int main(void) {
    planted("an event forgotten", event_forgotten,
            "not ordered: launch of plus_one on stream 1 writes and launch of plus_one on stream 2 reads bytes 0..256 "
            "of allocation 2 (256 bytes)");
    planted("an event recorded before its work", event_before_its_work,
            "not ordered: launch of plus_one on stream 1 writes and launch of plus_one on stream 2 reads");
    planted("a buffer freed early", freed_early,
            "not ordered: launch of plus_one on stream 2 reads and free on stream 1 frees bytes 0..256");
    planted("a copy that overtakes", copy_overtakes,
            "not ordered: copy to the host on stream 1 writes and copy to the device on stream 2 reads bytes 0..256");
    planted("pinned memory freed early", pinned_freed_early, "copy to the host on stream 1 writes");
    works("copies of memory that is not pinned", pageable);
    works("functions of the host, and queries", callbacks_and_queries);
    return 0;
}
