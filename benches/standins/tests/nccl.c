/* Collectives of the stand-in for NCCL between processes, and bugs in their use. */
#include "support.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;
typedef void *Comm;

int ncclGetUniqueId(Id *id);
int ncclCommInitRankConfig(Comm *made, int ranks, Id id, int rank, void *config);
int ncclCommSplit(Comm of, int color, int key, Comm *made, void *config);
int ncclCommFinalize(Comm comm);
int ncclCommDestroy(Comm comm);
int ncclCommAbort(Comm comm);
int ncclCommCount(Comm comm, int *ranks);
int ncclCommUserRank(Comm comm, int *rank);
int ncclCommGetAsyncError(Comm comm, int *error);
int ncclAllGather(const void *from, void *to, size_t count, int type, Comm comm, Stream stream);
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Comm comm, Stream stream);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Comm comm, Stream stream);
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Comm comm, Stream stream);

enum { IN_PROGRESS = 7, FLOAT16 = 6, FLOAT32 = 7, BFLOAT16 = 9, MOST = 100003, UNSET = INT_MIN };

/* ncclConfig_t up to NCCL 2.30.0, and the padding behind it. */
struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cluster, least, most;
    const char *net;
    int share, traffic;
    const char *name;
    int more[9];
    int padding;
};

static struct config config(void) {
    struct config config = {sizeof config, 0xcafebeef, 23000, 0, UNSET, UNSET, UNSET, NULL, UNSET, UNSET, NULL,
                            {UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET, UNSET}, 0};
    return config;
}

static Id id;
static int ranks, rank;
static Stream stream;

static int state(Comm comm) {
    int error = -1;
    CHECK(ncclCommGetAsyncError(comm, &error) == 0);
    return error;
}

/* Waits for the work in the background. */
static int settled(Comm comm) {
    int error;
    while ((error = state(comm)) == IN_PROGRESS)
        usleep(100);
    return error;
}

static Comm connected(void) {
    struct config given = config();
    Comm comm;
    CHECK(cuInit(0) == 0 && cuStreamCreate(&stream, 1) == 0);
    int result = ncclCommInitRankConfig(&comm, ranks, id, rank, &given);
    CHECK(result == IN_PROGRESS && settled(comm) == 0);
    return comm;
}

static void ended(Comm comm) {
    CHECK(cuStreamSynchronize(stream) == 0);
    ncclCommFinalize(comm);
    CHECK(settled(comm) == 0 && ncclCommDestroy(comm) == 0);
}

/* Runs `program` in `count` processes; returns 0 if all return 0, or else the exit code of the first failure. */
static int in_ranks(int count, int (*program)(int), int argument) {
    pid_t children[8];
    ranks = count;
    CHECK(ncclGetUniqueId(&id) == 0);
    for (rank = 0; rank < count; rank++) {
        children[rank] = fork();
        if (children[rank] == 0) {
            int code = program(argument);
            fflush(stdout);
            _exit(code);
        }
    }
    int result = 0, status;
    for (int left = count; left > 0; left--) {
        pid_t ended = wait(&status);
        CHECK(ended > 0);
        if (result != 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0))
            continue;
        result = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
        /* Other ranks may wait for one that has ended. Ranks that report a bug end by themselves. */
        for (int i = 0; i < count && result != 1; i++)
            if (children[i] != ended)
                kill(children[i], SIGKILL);
    }
    return result;
}

/* Numbers that a type represents exactly, and whose sums it does. */
static float value(int of, size_t i) { return (float)((of + 1) * (int)(i % 13) - 20); }

static size_t width(int type) { return type == FLOAT32 ? 4 : 2; }

static void put(void *to, size_t i, int type, float number) {
    if (type == FLOAT32) {
        ((float *)to)[i] = number;
    } else if (type == FLOAT16) {
        ((_Float16 *)to)[i] = (_Float16)number;
    } else {
        uint32_t bits;
        memcpy(&bits, &number, 4);
        ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
    }
}

static float get(const void *from, size_t i, int type) {
    if (type == FLOAT32)
        return ((const float *)from)[i];
    if (type == FLOAT16)
        return (float)((const _Float16 *)from)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* Runs all collectives on `count` numbers, in place or not. Streams order them, without host waits in between. */
static void check_all(Comm comm, size_t count, int type) {
    int of, self;
    CHECK(ncclCommCount(comm, &of) == 0 && ncclCommUserRank(comm, &self) == 0);
    size_t size = width(type), all = count * (size_t)of;
    char *sent = malloc(all * size + 1), *got = malloc(all * size + 1);
    Pointer small, large;
    CHECK(cuMemAllocAsync(&small, count * size + 1, stream) == 0 && cuMemAllocAsync(&large, all * size + 1, stream) == 0);

    for (size_t i = 0; i < count; i++)
        put(sent, i, type, value(self, i));
    CHECK(cuMemcpyHtoDAsync_v2(small, sent, count * size, stream) == 0);
    ncclAllGather((void *)small, (void *)large, count, type, comm, stream);
    CHECK(settled(comm) == 0 && cuMemcpyDtoHAsync_v2(got, large, all * size, stream) == 0);
    for (size_t i = 0; i < all; i++)
        CHECK(get(got, i, type) == value((int)(i / count), i % count));

    for (size_t i = 0; i < all; i++)
        put(sent, i, type, value(self, i));
    CHECK(cuMemcpyHtoDAsync_v2(large, sent, all * size, stream) == 0);
    ncclReduceScatter((void *)large, (void *)small, count, type, 0, comm, stream);
    CHECK(settled(comm) == 0 && cuMemcpyDtoHAsync_v2(got, small, count * size, stream) == 0);
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int other = 0; other < of; other++)
            sum += value(other, (size_t)self * count + i);
        CHECK(get(got, i, type) == sum);
    }

    ncclAllReduce((void *)large, (void *)large, all, type, 0, comm, stream);
    CHECK(settled(comm) == 0);
    ncclBroadcast((void *)large, (void *)large, count, type, of - 1, comm, stream);
    CHECK(settled(comm) == 0 && cuMemcpyDtoHAsync_v2(got, large, all * size, stream) == 0);
    for (size_t i = 0; i < all; i++) {
        float sum = 0;
        for (int other = 0; other < of; other++)
            sum += value(other, i);
        CHECK(get(got, i, type) == sum);
    }
    CHECK(cuMemFreeAsync(small, stream) == 0 && cuMemFreeAsync(large, stream) == 0);
    free(sent), free(got);
}

static int collectives(int unused) {
    (void)unused;
    Comm comm = connected(), part;
    static const size_t counts[] = {0, 1, 5, MOST};
    for (int i = 0; i < 4; i++) {
        check_all(comm, counts[i], FLOAT32);
        check_all(comm, counts[i], FLOAT16);
        check_all(comm, counts[i], BFLOAT16);
    }
    /* Even and odd ranks, in reverse order; then the first half alone. */
    struct config given = config();
    CHECK(ncclCommSplit(comm, rank % 2, -rank, &part, &given) == IN_PROGRESS && settled(comm) == 0);
    CHECK(settled(part) == 0);
    int of, self;
    CHECK(ncclCommCount(part, &of) == 0 && of == ranks / 2);
    CHECK(ncclCommUserRank(part, &self) == 0 && self == (ranks - 1 - rank) / 2);
    check_all(part, 7, FLOAT32);
    ended(part);
    CHECK(ncclCommSplit(comm, rank < ranks / 2 ? 3 : -1, rank, &part, &given) == IN_PROGRESS && settled(comm) == 0);
    CHECK((part != NULL) == (rank < ranks / 2));
    if (part != NULL) {
        CHECK(settled(part) == 0);
        check_all(part, 7, BFLOAT16);
        ended(part);
    }
    check_all(comm, 3, FLOAT32);
    ended(comm);
    return 0;
}

static int two(int argument) { return in_ranks(2, collectives, argument); }
static int four(int argument) { return in_ranks(4, collectives, argument); }

static int field_unset(int bug) {
    struct config given = config();
    given.version = bug ? 23005 : 23000;
    Comm comm;
    setenv("FAKE_NCCL_VERSION", "23007", 1);
    CHECK(cuInit(0) == 0);
    /* Leftover bytes of another object are in the padding, which is a field from this version on. */
    given.padding = 77;
    int result = ncclCommInitRankConfig(&comm, 1, id, 0, &given);
    return result != IN_PROGRESS || settled(comm) != 0;
}

static Pointer buffer(void) {
    Pointer pointer;
    CHECK(cuMemAlloc_v2(&pointer, BYTES) == 0);
    CHECK(cuMemsetD32Async(pointer, 0, WORDS, stream) == 0);
    return pointer;
}

static int different(int bug) {
    Comm comm = connected();
    Pointer data = buffer();
    if (bug && rank == 1)
        ncclAllReduce((void *)data, (void *)data, WORDS / 2, FLOAT32, 0, comm, stream);
    else
        ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    /* The other rank may have found the error by now. */
    int error = settled(comm);
    CHECK(cuStreamSynchronize(stream) == 0);
    return error != 0 || state(comm) != 0;
}

/* Queues a copy before the collective that it needs: only a poll submits the collective to the stream. */
static int not_waited_for(int bug) {
    Comm comm = connected();
    Pointer data = buffer();
    Stream other;
    Event event;
    CHECK(cuStreamCreate(&other, 1) == 0 && cuEventCreate(&event, 2) == 0);
    ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    if (!bug)
        CHECK(settled(comm) == 0);
    cuEventRecord(event, stream);
    if (bug)
        CHECK(settled(comm) == 0);
    cuStreamWaitEvent(other, event, 0);
    cuMemsetD32Async(data, 1, WORDS, other);
    return cuCtxSynchronize() != 0;
}

static int two_different(int bug) { return in_ranks(2, different, bug); }
static int two_not_waited_for(int bug) { return in_ranks(2, not_waited_for, bug); }

static int used_too_soon(int bug) {
    Comm comm = connected();
    Pointer data = buffer();
    ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    if (!bug)
        CHECK(settled(comm) == 0);
    int result = ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    CHECK(settled(comm) == 0 && cuStreamSynchronize(stream) == 0);
    return result != IN_PROGRESS;
}

static int two_used_too_soon(int bug) { return in_ranks(2, used_too_soon, bug); }

/* Starts a collective that never completes, and aborts the communicator. */
static int stalled(int unused) {
    (void)unused;
    setenv("FAKE_NCCL_STALLS", "2", 1);
    Comm comm = connected();
    Pointer data = buffer();
    ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    CHECK(settled(comm) == 0 && cuStreamSynchronize(stream) == 0);
    ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    CHECK(settled(comm) == 0 && cuStreamQuery(stream) == NOT_READY);
    CHECK(ncclCommAbort(comm) == 0 && cuStreamSynchronize(stream) == 0);
    return 0;
}

/* One rank leaves; the others can end once they abort. */
static int left_alone(int unused) {
    (void)unused;
    Comm comm = connected();
    Pointer data = buffer();
    if (rank > 0) {
        ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
        CHECK(settled(comm) == 0 && cuStreamQuery(stream) == NOT_READY);
        CHECK(ncclCommAbort(comm) == 0 && cuStreamSynchronize(stream) == 0);
    }
    return 0;
}

static int fails(int unused) {
    (void)unused;
    setenv("FAKE_NCCL_FAILS", "3", 1);
    Comm comm = connected();
    Pointer data = buffer();
    ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    CHECK(settled(comm) == 0 && cuStreamSynchronize(stream) == 0);
    ncclAllReduce((void *)data, (void *)data, WORDS, FLOAT32, 0, comm, stream);
    CHECK(settled(comm) == 2 && ncclCommAbort(comm) == 0);
    return 0;
}

static int two_stalled(int argument) { return in_ranks(2, stalled, argument); }
static int three_left_alone(int argument) { return in_ranks(3, left_alone, argument); }
static int two_fail(int argument) { return in_ranks(2, fails, argument); }

int main(void) {
    works("two processes", two);
    works("four processes", four);
    works("a collective that stalls", two_stalled);
    works("a rank that leaves", three_left_alone);
    works("a communicator that fails", two_fail);
    planted("a field of NCCL's configuration left unset", field_unset, "NCCL: graphStreamOrdering is 77");
    planted("ranks that call different collectives", two_different,
            "as collective 1 of a communicator, rank 0 calls all_reduce of 64 numbers of type 7, and rank 1 all_reduce "
            "of 32 of type 7");
    planted("an event before NCCL has queued its collective", two_not_waited_for,
            "not ordered: all_reduce of NCCL on stream 1 writes and memset on stream 2 writes bytes 0..256");
    planted("a communicator used before its last call has ended", two_used_too_soon,
            "NCCL: communicator 1 is used before its last call has ended");
    return 0;
}
