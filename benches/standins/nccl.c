/* A stand-in for NCCL, libnccl.so.2: communicators. Collectives are in nccl_collectives.c.
 *
 * With FAKE_CUDA_EXECUTE, ranks in processes and threads of one machine exchange data through shared memory
 * (nccl_ranks.c). Without it, no other rank needs to exist: a collective uses this rank's part for all other parts, so
 * that a single process can be traced as one rank of many. */
#define _GNU_SOURCE
#include "nccl.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

static unsigned long communicators, ids;

Result ncclGetVersion(int *version) {
    *version = library_version();
    return SUCCESS;
}

/* Creates a name for the ranks' room, unique on this machine. */
Result ncclGetUniqueId(UniqueId *id) {
    unsigned long random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random)
        return SYSTEM_ERROR;
    memset(id, 0, sizeof *id);
    snprintf(id->bytes, sizeof id->bytes, "%d-%lu-%016lx", (int)getpid(), (unsigned long)next_handle(&ids), random);
    return SUCCESS;
}

/* Returns 1 if ranks exchange data. */
static int shares(void) { return setting("FAKE_CUDA_EXECUTE", 0) != 0; }

/* Returns the number of voluntary context switches of this thread, such as sleeps. */
static long sleeps(void) {
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nvcsw : 0;
}

static Result begin(Communicator comm) {
    comm->begun++;
    if (comm->blocking)
        return SUCCESS;
    comm->busy = (int)setting("FAKE_NCCL_LOOKS", 1);
    comm->looks = 0, comm->thread = gettid(), comm->slept = sleeps();
    return comm->busy > 0 || comm->joins || comm->made != NULL ? IN_PROGRESS : SUCCESS;
}

/* Returns 1 while other ranks have not joined. */
static int joins(Communicator comm) {
    if (comm->joins && room_is_full(comm->room, comm->name, comm->ranks))
        comm->joins = 0;
    return comm->joins;
}

static Result make(Communicator *made, int ranks, int rank, const char *name, int blocking) {
    Communicator comm = calloc(1, sizeof *comm);
    if (comm == NULL)
        return SYSTEM_ERROR;
    comm->number = (unsigned long)next_handle(&communicators);
    comm->ranks = ranks, comm->rank = rank, comm->blocking = blocking;
    atomic_store(&comm->users, 1);
    snprintf(comm->name, sizeof comm->name, "%s", name);
    if (ranks > 1 && shares()) {
        comm->room = room_enter(comm->name, ranks, rank);
        if (comm->room == NULL) {
            free(comm);
            return INVALID_USAGE;
        }
        comm->joins = 1;
    }
    trace("nccl_init comm=%lu rank=%d ranks=%d", comm->number, rank, ranks);
    *made = comm;
    while (blocking && joins(comm))
        usleep(200);
    return begin(comm);
}

Result ncclCommInitRankConfig(Communicator *made, int ranks, UniqueId id, int rank, void *config) {
    int blocking;
    if (ranks < 1 || rank < 0 || rank >= ranks || parse_config(config, &blocking) != SUCCESS)
        return INVALID_ARGUMENT;
    id.bytes[sizeof id.bytes - 1] = 0;
    return make(made, ranks, rank, id.bytes, blocking);
}

Result ncclCommInitRank(Communicator *made, int ranks, UniqueId id, int rank) {
    return ncclCommInitRankConfig(made, ranks, id, rank, NULL);
}

/* Completes a split once all ranks have called it. The ranks of one color are ordered by key, then by rank. */
static Result end_split(Communicator of) {
    unsigned long number = of->splits;
    for (int rank = 0; rank < of->ranks; rank++)
        if (atomic_load(&of->room->seats[rank].splits) < number)
            return IN_PROGRESS;
    const struct seat *seats = of->room->seats;
    int turn = (int)(number % 2), color = seats[of->rank].color[turn], key = seats[of->rank].key[turn];
    int ranks = 0, rank = 0;
    for (int other = 0; other < of->ranks; other++) {
        if (seats[other].color[turn] != color)
            continue;
        ranks++;
        int before = seats[other].key[turn];
        rank += before < key || (before == key && other < of->rank);
    }
    Communicator *made = of->made;
    of->made = NULL;
    char name[sizeof of->name];
    if (color < 0) {
        *made = NULL;
        return SUCCESS;
    }
    if (snprintf(name, sizeof name, "%s-%lu.%d", of->name, number, color) >= (int)sizeof name)
        return INVALID_USAGE;
    Result result = make(made, ranks, rank, name, of->made_blocking);
    return result == IN_PROGRESS ? SUCCESS : result;
}

static int is_free(Communicator comm) {
    if (comm->busy == 0 && !comm->joins && comm->made == NULL)
        return 1;
    fprintf(stderr, "NCCL: communicator %lu is used before its last call has ended\n", comm->number);
    return 0;
}

Result ncclCommSplit(Communicator of, int color, int key, Communicator *made, void *config) {
    int blocking;
    if (!is_free(of) || parse_config(config, &blocking) != SUCCESS)
        return INVALID_ARGUMENT;
    /* The ranks of a color are known only if the other ranks exist. */
    if (of->room == NULL && of->ranks > 1 && color >= 0)
        return INVALID_USAGE;
    if (of->room == NULL) {
        *made = NULL;
        return color < 0 ? SUCCESS : make(made, 1, 0, of->name, blocking);
    }
    struct seat *seat = &of->room->seats[of->rank];
    int turn = (int)(++of->splits % 2);
    seat->color[turn] = color, seat->key[turn] = key;
    of->made = made, of->made_blocking = blocking;
    atomic_store(&seat->splits, of->splits);
    if (!of->blocking)
        return begin(of);
    Result result;
    while ((result = end_split(of)) == IN_PROGRESS)
        usleep(200);
    return result;
}

Result ncclCommFinalize(Communicator comm) {
    trace("nccl_finalize comm=%lu", comm->number);
    comm->finalizes = 1;
    return begin(comm);
}

Result ncclCommDestroy(Communicator comm) {
    trace("nccl_destroy comm=%lu busy=%d", comm->number, comm->busy);
    let_go(comm);
    return SUCCESS;
}

/* Ends pending collectives, and frees the communicator after them. */
Result ncclCommAbort(Communicator comm) {
    trace("nccl_abort comm=%lu", comm->number);
    atomic_store(&comm->aborted, 1);
    let_go(comm);
    return SUCCESS;
}

/* Polls the work in the background and advances it. */
Result ncclCommGetAsyncError(Communicator comm, Result *error) {
    double failing = setting("FAKE_NCCL_FAILS", 0);
    *error = failing > 0 && comm->begun >= failing ? SYSTEM_ERROR : atomic_load(&comm->failed);
    if (*error != SUCCESS)
        return SUCCESS;
    comm->looks++;
    int was_busy = comm->busy > 0;
    if (was_busy && --comm->busy == 0 && comm->thread == gettid())
        trace("comm_looked comm=%lu looks=%d sleeps=%ld", comm->number, comm->looks, sleeps() - comm->slept);
    if (comm->made != NULL)
        *error = end_split(comm);
    int works = comm->finalizes && atomic_load(&comm->users) > 1;
    if (*error == SUCCESS && (was_busy || works || joins(comm)))
        *error = IN_PROGRESS;
    if (comm->busy == 0 && comm->is_deferred) {
        comm->is_deferred = 0;
        Result result = submit(&comm->deferred, comm->stream);
        if (result != SUCCESS)
            atomic_store(&comm->failed, result);
    }
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

/* Calls a collective. Submits it to its stream immediately, or when the work in the background is done. */
static Result collective(enum kind kind, const void *from, void *to, size_t count, int type, int operation, int root,
                         Communicator comm, void *stream) {
    int sums = kind == REDUCE_SCATTER || kind == ALL_REDUCE || kind == REDUCE;
    if (!is_free(comm) || type_width(type) == 0 || root < 0 || root >= comm->ranks)
        return INVALID_ARGUMENT;
    if (sums && (!type_has_sum(type) || (operation != SUM && operation != AVERAGE)))
        return INVALID_ARGUMENT;
    size_t bytes = count * type_width(type) * (kind <= REDUCE_SCATTER ? (size_t)comm->ranks : 1);
    trace("nccl_%s comm=%lu stream=%lu bytes=%zu ranks=%d", kinds[kind], comm->number, (unsigned long)stream, bytes,
          comm->ranks);
    struct call call = {++comm->collectives, count, kind, type, operation, root};
    struct collective of = {comm, call, from, to, comm->collectives == (unsigned long)setting("FAKE_NCCL_STALLS", 0)};
    Result result = begin(comm);
    if (result != IN_PROGRESS)
        return submit(&of, stream);
    comm->deferred = of, comm->stream = stream, comm->is_deferred = 1;
    return result;
}

Result ncclAllGather(const void *from, void *to, size_t count, int type, Communicator comm, void *stream) {
    return collective(ALL_GATHER, from, to, count, type, SUM, 0, comm, stream);
}

Result ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Communicator comm,
                         void *stream) {
    return collective(REDUCE_SCATTER, from, to, count, type, operation, 0, comm, stream);
}

Result ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator comm,
                     void *stream) {
    return collective(ALL_REDUCE, from, to, count, type, operation, 0, comm, stream);
}

Result ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator comm, void *stream) {
    return collective(BROADCAST, from, to, count, type, SUM, root, comm, stream);
}

Result ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator comm,
                  void *stream) {
    return collective(REDUCE, from, to, count, type, operation, root, comm, stream);
}

/* Point-to-point messages are traced but not sent: Kiln uses none. */
static Result message(const char *what, size_t count, int type, Communicator comm, void *stream) {
    trace("nccl_%s comm=%lu stream=%lu bytes=%zu ranks=%d", what, comm->number, (unsigned long)stream,
          count * type_width(type), comm->ranks);
    return comm->room == NULL ? begin(comm) : INVALID_USAGE;
}

Result ncclSend(const void *from, size_t count, int type, int peer, Communicator comm, void *stream) {
    (void)from, (void)peer;
    return message("send", count, type, comm, stream);
}

Result ncclRecv(void *to, size_t count, int type, int peer, Communicator comm, void *stream) {
    (void)to, (void)peer;
    return message("recv", count, type, comm, stream);
}

Result ncclGroupStart(void) { return SUCCESS; }

Result ncclGroupEnd(void) { return SUCCESS; }
