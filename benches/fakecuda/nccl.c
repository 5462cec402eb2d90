/* A stand-in for NCCL, libnccl.so.2: every rank is on its own.
 *
 * A collective copies this rank's part to where it belongs in its own result, and leaves a line in the
 * trace. With one rank that is the right result. With more, the parts of the others are copies of this
 * rank's: for traces of a rank in a world that is not there. */
#include "trace.h"

#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef struct { char bytes[128]; } UniqueId;
typedef struct { unsigned long number; int ranks, rank, device; } *Communicator;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };

static unsigned long communicators;

/* Bytes of ncclDataType_t. */
static size_t width(int type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[type];
}

Result ncclGetVersion(int *version) {
    *version = (int)setting("FAKE_NCCL_VERSION", 22803);
    return SUCCESS;
}

Result ncclGetUniqueId(UniqueId *id) {
    memset(id, 7, sizeof *id);
    return SUCCESS;
}

static Result make(Communicator *made, int ranks, int rank) {
    if (ranks < 1 || rank < 0 || rank >= ranks)
        return INVALID_ARGUMENT;
    *made = malloc(sizeof **made);
    if (*made == NULL)
        return SYSTEM_ERROR;
    (*made)->number = (unsigned long)next_handle(&communicators);
    (*made)->ranks = ranks;
    (*made)->rank = rank;
    (*made)->device = 0;
    trace("nccl_init comm=%lu rank=%d ranks=%d", (*made)->number, rank, ranks);
    return SUCCESS;
}

Result ncclCommInitRank(Communicator *made, int ranks, UniqueId id, int rank) {
    (void)id;
    return make(made, ranks, rank);
}

Result ncclCommInitRankConfig(Communicator *made, int ranks, UniqueId id, int rank, void *config) {
    (void)id, (void)config;
    return make(made, ranks, rank);
}

/* Which ranks have the same color is known only where there is one. */
Result ncclCommSplit(Communicator of, int color, int key, Communicator *made, void *config) {
    (void)key, (void)config;
    if (color < 0) {
        *made = NULL;
        return SUCCESS;
    }
    return of->ranks == 1 ? make(made, 1, 0) : INVALID_USAGE;
}

Result ncclCommFinalize(Communicator comm) {
    trace("nccl_finalize comm=%lu", comm->number);
    return SUCCESS;
}

Result ncclCommDestroy(Communicator comm) {
    trace("nccl_destroy comm=%lu", comm->number);
    free(comm);
    return SUCCESS;
}

Result ncclCommAbort(Communicator comm) {
    trace("nccl_abort comm=%lu", comm->number);
    free(comm);
    return SUCCESS;
}

Result ncclCommGetAsyncError(Communicator comm, Result *error) {
    (void)comm;
    *error = SUCCESS;
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
    return SUCCESS;
}

Result ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation,
                         Communicator comm, void *stream) {
    (void)operation;
    size_t bytes = count * width(type);
    tell("reduce_scatter", comm, stream, bytes * (size_t)comm->ranks);
    memmove(to, (const char *)from + (size_t)comm->rank * bytes, bytes);
    return SUCCESS;
}

Result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator comm,
                     void *stream) {
    (void)operation;
    tell("all_reduce", comm, stream, count * width(type));
    memmove(to, from, count * width(type));
    return SUCCESS;
}

Result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator comm,
                     void *stream) {
    tell("broadcast", comm, stream, count * width(type));
    if (root == comm->rank)
        memmove(to, from, count * width(type));
    return SUCCESS;
}

Result ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
                  Communicator comm, void *stream) {
    (void)operation;
    tell("reduce", comm, stream, count * width(type));
    if (root == comm->rank)
        memmove(to, from, count * width(type));
    return SUCCESS;
}

Result ncclSend(const void *from, size_t count, int type, int peer, Communicator comm, void *stream) {
    (void)from, (void)peer;
    tell("send", comm, stream, count * width(type));
    return SUCCESS;
}

Result ncclRecv(void *to, size_t count, int type, int peer, Communicator comm, void *stream) {
    (void)to, (void)peer;
    tell("recv", comm, stream, count * width(type));
    return SUCCESS;
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
