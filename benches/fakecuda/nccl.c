/* A stand-in for NCCL, libnccl.so.2: every rank is on its own.
 *
 * A collective copies this rank's part to where it belongs in its own result, and leaves a line in the
 * trace. With one rank that is the right result. With more, the parts of the others are copies of this
 * rank's: for traces of a rank in a world that is not there. */
#define _GNU_SOURCE
#include "trace.h"

#include <limits.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

typedef int Result;
typedef struct { char bytes[128]; } UniqueId;
typedef struct {
    unsigned long number;
    int ranks, rank, device, blocking;
    /* What goes on in the background: looks until it is done, looks so far, who began it, and how often that
     * thread had slept by then. */
    int busy, looks, thread;
    long slept;
    /* Calls so far that go on in the background. */
    int begun;
} *Communicator;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

/* ncclConfig_t as of NCCL 2.30.7. Fields are only ever added at its end, the last one into what was padding
 * before, which the size does not show. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs, nChannelsPerNetPeer, nvlinkCentricSched;
    int graphUsageMode, numRmaCtx, maxP2pPeers, graphStreamOrdering;
} Config;

enum { UNSET = INT_MIN };

static unsigned long communicators;

static int library_version(void) {
    return (int)setting("FAKE_NCCL_VERSION", 22803);
}

/* Bytes of ncclDataType_t. */
static size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[type];
}

Result ncclGetVersion(int *version) {
    *version = library_version();
    return SUCCESS;
}

Result ncclGetUniqueId(UniqueId *id) {
    memset(id, 7, sizeof *id);
    return SUCCESS;
}

/* Bytes of ncclConfig_t in a library of this version. */
static size_t config_size(int version) {
    return version >= 23000   ? sizeof(Config)
           : version >= 22900 ? offsetof(Config, maxP2pPeers)
           : version >= 22800 ? offsetof(Config, graphUsageMode)
           : version >= 22700 ? offsetof(Config, nChannelsPerNetPeer)
           : version >= 21700 ? offsetof(Config, commName)
                              : offsetof(Config, cgaClusterSize) + 4;
}

static int outside(int value, int least, int most) {
    return value != UNSET && (value < least || value > most);
}

/* As parseCommConfig in init.cc of NCCL 2.30.7: as many bytes as both sides know, without the fields that are
 * newer than the version that the caller says; what is left must be unset or in its range. */
static Result parse(const void *given, int *blocking) {
    *blocking = 1;
    if (given == NULL)
        return SUCCESS;
    Config config = {
        0, 0, 0, UNSET, UNSET, UNSET, UNSET, NULL, UNSET, UNSET, NULL, UNSET, UNSET, UNSET, UNSET, UNSET,
        UNSET, UNSET, UNSET, UNSET, UNSET,
    };
    size_t size, known = config_size(library_version());
    memcpy(&size, given, sizeof size);
    memcpy(&config, given, size < known ? size : known);
    if (config.magic != 0xcafebeef)
        return INVALID_ARGUMENT;
    if (config.version < 21400)
        config.blocking = UNSET;
    if (config.version < 21700)
        config.cgaClusterSize = config.minCTAs = config.maxCTAs = UNSET, config.netName = NULL;
    if (config.version < 22500)
        config.trafficClass = UNSET;
    if (config.version < 22700)
        config.collnetEnable = config.CTAPolicy = config.shrinkShare = config.nvlsCTAs = UNSET;
    if (config.version < 22800)
        config.nChannelsPerNetPeer = config.nvlinkCentricSched = UNSET;
    if (config.version < 22900)
        config.graphUsageMode = config.numRmaCtx = UNSET;
    if (config.version < 23000)
        config.maxP2pPeers = UNSET;
    if (config.version < 23005 || library_version() < 23005)
        config.graphStreamOrdering = UNSET;
    trace("comm_config version=%u blocking=%d max_p2p_peers=%d graph_stream_ordering=%d", config.version,
          config.blocking, config.maxP2pPeers, config.graphStreamOrdering);
    if (outside(config.blocking, 0, 1) || outside(config.cgaClusterSize, 0, INT_MAX) ||
        outside(config.minCTAs, 1, INT_MAX) || outside(config.maxCTAs, 1, INT_MAX) ||
        config.minCTAs > config.maxCTAs || outside(config.splitShare, 0, 1) ||
        outside(config.collnetEnable, 0, 1) || outside(config.CTAPolicy, 0, 3) ||
        outside(config.shrinkShare, 0, 1) || outside(config.nvlsCTAs, 1, INT_MAX) ||
        outside(config.nChannelsPerNetPeer, 1, 64) || outside(config.nvlinkCentricSched, 0, 1) ||
        outside(config.graphUsageMode, 0, 2) || outside(config.numRmaCtx, 0, INT_MAX) ||
        outside(config.maxP2pPeers, 1, INT_MAX) || outside(config.graphStreamOrdering, 0, 1))
        return INVALID_ARGUMENT;
    *blocking = config.blocking != 0;
    return SUCCESS;
}

/* How often this thread has given the processor back of its own will, as one does that sleeps. */
static long sleeps(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nvcsw : 0;
}

/* What a call returns that goes on in the background, if the communicator has one. */
static Result begin(Communicator comm) {
    if (comm->blocking)
        return SUCCESS;
    comm->busy = (int)setting("FAKE_NCCL_LOOKS", 1);
    comm->begun++;
    comm->looks = 0, comm->thread = gettid(), comm->slept = sleeps();
    return comm->busy > 0 ? IN_PROGRESS : SUCCESS;
}

static Result make(Communicator *made, int ranks, int rank, const void *config) {
    int blocking;
    if (ranks < 1 || rank < 0 || rank >= ranks || parse(config, &blocking) != SUCCESS)
        return INVALID_ARGUMENT;
    *made = calloc(1, sizeof **made);
    if (*made == NULL)
        return SYSTEM_ERROR;
    (*made)->number = (unsigned long)next_handle(&communicators);
    (*made)->ranks = ranks;
    (*made)->rank = rank;
    (*made)->blocking = blocking;
    trace("nccl_init comm=%lu rank=%d ranks=%d", (*made)->number, rank, ranks);
    return begin(*made);
}

Result ncclCommInitRank(Communicator *made, int ranks, UniqueId id, int rank) {
    (void)id;
    return make(made, ranks, rank, NULL);
}

Result ncclCommInitRankConfig(Communicator *made, int ranks, UniqueId id, int rank, void *config) {
    (void)id;
    return make(made, ranks, rank, config);
}

/* Which ranks have the same color is known only where there is one. */
Result ncclCommSplit(Communicator of, int color, int key, Communicator *made, void *config) {
    (void)key;
    if (color < 0) {
        *made = NULL;
        return SUCCESS;
    }
    return of->ranks == 1 ? make(made, 1, 0, config) : INVALID_USAGE;
}

Result ncclCommFinalize(Communicator comm) {
    trace("nccl_finalize comm=%lu", comm->number);
    return begin(comm);
}

Result ncclCommDestroy(Communicator comm) {
    trace("nccl_destroy comm=%lu busy=%d", comm->number, comm->busy);
    free(comm);
    return SUCCESS;
}

Result ncclCommAbort(Communicator comm) {
    trace("nccl_abort comm=%lu", comm->number);
    free(comm);
    return SUCCESS;
}

Result ncclCommGetAsyncError(Communicator comm, Result *error) {
    double failing = setting("FAKE_NCCL_FAILS", 0);
    if (failing > 0 && comm->begun >= failing) {
        *error = SYSTEM_ERROR;
        return SUCCESS;
    }
    *error = comm->busy > 0 ? IN_PROGRESS : SUCCESS;
    comm->looks++;
    if (comm->busy > 0 && --comm->busy == 0 && comm->thread == gettid())
        trace("comm_looked comm=%lu looks=%d sleeps=%ld", comm->number, comm->looks, sleeps() - comm->slept);
    return SUCCESS;
}

Result ncclCommCount(Communicator comm, int *ranks) {
    *ranks = comm->ranks;
    return SUCCESS;
}

Result ncclCommUserRank(Communicator comm, int *rank) {
    *rank = comm->rank;
    return SUCCESS;
}

Result ncclCommCuDevice(Communicator comm, int *device) {
    *device = comm->device;
    return SUCCESS;
}

const char *ncclGetErrorString(Result error) {
    return error == SUCCESS ? "no error" : "an error of the stand-in";
}

const char *ncclGetLastError(Communicator comm) {
    (void)comm;
    return "";
}

Result ncclGroupStart(void) { return SUCCESS; }

Result ncclGroupEnd(void) { return SUCCESS; }

static void tell(const char *what, Communicator comm, void *stream, size_t bytes) {
    trace("nccl_%s comm=%lu stream=%lu bytes=%zu ranks=%d", what, comm->number, (unsigned long)stream,
          bytes, comm->ranks);
}

Result ncclAllGather(const void *from, void *to, size_t count, int type, Communicator comm, void *stream) {
    size_t bytes = count * width(type);
    tell("all_gather", comm, stream, bytes * (size_t)comm->ranks);
    /* Own slot last: in place, it is the source of the others. */
    for (int slot = 0; slot < comm->ranks; slot++)
        if (slot != comm->rank)
            memmove((char *)to + (size_t)slot * bytes, from, bytes);
    memmove((char *)to + (size_t)comm->rank * bytes, from, bytes);
    wrote(to, bytes * (size_t)comm->ranks);
    return begin(comm);
}

Result ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                         Communicator comm, void *stream) {
    (void)operation;
    size_t bytes = count * width(type);
    tell("reduce_scatter", comm, stream, bytes * (size_t)comm->ranks);
    memmove(to, (const char *)from + (size_t)comm->rank * bytes, bytes);
    wrote(to, bytes);
    return begin(comm);
}

Result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator comm,
                     void *stream) {
    (void)operation;
    tell("all_reduce", comm, stream, count * width(type));
    memmove(to, from, count * width(type));
    wrote(to, count * width(type));
    return begin(comm);
}

Result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator comm,
                     void *stream) {
    tell("broadcast", comm, stream, count * width(type));
    if (root == comm->rank)
        memmove(to, from, count * width(type));
    wrote(to, count * width(type));
    return begin(comm);
}

Result ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                  Communicator comm, void *stream) {
    (void)operation;
    tell("reduce", comm, stream, count * width(type));
    if (root == comm->rank)
        memmove(to, from, count * width(type));
    wrote(to, count * width(type));
    return begin(comm);
}

Result ncclSend(const void *from, size_t count, int type, int peer, Communicator comm, void *stream) {
    (void)from, (void)peer;
    tell("send", comm, stream, count * width(type));
    return begin(comm);
}

Result ncclRecv(void *to, size_t count, int type, int peer, Communicator comm, void *stream) {
    (void)to, (void)peer;
    tell("recv", comm, stream, count * width(type));
    return begin(comm);
}

Result ncclMemAlloc(void **pointer, size_t size) {
    return posix_memalign(pointer, 4096, size > 0 ? size : 1) == 0 ? SUCCESS : SYSTEM_ERROR;
}

Result ncclMemFree(void *pointer) {
    free(pointer);
    return SUCCESS;
}

Result ncclCommRegister(Communicator comm, void *buffer, size_t size, void **handle) {
    (void)comm, (void)size;
    *handle = buffer;
    return SUCCESS;
}

Result ncclCommDeregister(Communicator comm, void *handle) {
    (void)comm, (void)handle;
    return SUCCESS;
}
