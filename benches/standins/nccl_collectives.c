/* Collectives of the stand-in for NCCL, in the order of streams. */
#include "nccl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *const kinds[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"};

/* Return the number of elements that a rank sends, and that it receives. */
static size_t sent(const struct call *call, int ranks) {
    return call->kind == REDUCE_SCATTER ? call->count * (size_t)ranks : call->count;
}

static size_t received(const struct call *call, int ranks) {
    return call->kind == ALL_GATHER ? call->count * (size_t)ranks : call->count;
}

/* Runs a collective without other ranks: their parts are copies of this rank's. */
static void alone(const struct collective *of) {
    const struct call *call = &of->call;
    int ranks = of->comm->ranks, rank = of->comm->rank;
    size_t bytes = call->count * type_width(call->type);
    switch (call->kind) {
    case ALL_GATHER:
        /* The own slot is written last: in place, it is the source of the other slots. */
        for (int slot = 0; slot < ranks; slot++)
            if (slot != rank)
                memmove(of->to + (size_t)slot * bytes, of->from, bytes);
        memmove(of->to + (size_t)rank * bytes, of->from, bytes);
        break;
    case REDUCE_SCATTER: memmove(of->to, of->from + (size_t)rank * bytes, bytes); break;
    case ALL_REDUCE: memmove(of->to, of->from, bytes); break;
    default:
        if (call->root == rank)
            memmove(of->to, of->from, bytes);
    }
}

/* Returns 1 if all ranks call the same collective. */
static int is_agreed(const struct collective *of) {
    const struct seat *seats = of->comm->room->seats;
    const struct call *own = &of->call;
    for (int rank = 0; rank < of->comm->ranks; rank++) {
        const struct call *other = &seats[rank].calls[own->number % 2];
        if (other->number == own->number && other->kind == own->kind && other->count == own->count &&
            other->type == own->type && other->operation == own->operation && other->root == own->root)
            continue;
        fprintf(stderr,
                "NCCL: as collective %lu of a communicator, rank %d calls %s of %zu numbers of type %d, and rank %d %s "
                "of %zu of type %d\n",
                own->number, of->comm->rank, kinds[own->kind], own->count, own->type, rank, kinds[other->kind],
                other->count, other->type);
        return 0;
    }
    return 1;
}

/* Moves elements `at` to `at + count` of each part through the windows; returns 0 if aborted. */
static int move(const struct collective *of, size_t at, size_t count) {
    Communicator comm = of->comm;
    const struct call *call = &of->call;
    struct seat *seats = comm->room->seats;
    size_t width = type_width(call->type), bytes = count * width;
    char *own = seats[comm->rank].window;
    int parts = call->kind == REDUCE_SCATTER ? comm->ranks : 1;
    for (int part = 0; part < parts; part++)
        memcpy(own + (size_t)part * bytes, of->from + ((size_t)part * call->count + at) * width, bytes);
    if (!room_meet(comm->room, comm->ranks, comm->rank, &comm->aborted))
        return 0;
    char *to = of->to + at * width;
    if (call->kind == ALL_GATHER) {
        for (int rank = 0; rank < comm->ranks; rank++)
            memcpy(to + (size_t)rank * call->count * width, seats[rank].window, bytes);
    } else if (call->kind == BROADCAST) {
        memcpy(to, seats[call->root].window, bytes);
    } else if (call->kind != REDUCE || call->root == comm->rank) {
        size_t part = call->kind == REDUCE_SCATTER ? (size_t)comm->rank * bytes : 0;
        memcpy(to, seats[0].window + part, bytes);
        for (int rank = 1; rank < comm->ranks; rank++)
            add(to, seats[rank].window + part, count, call->type);
        if (call->operation == AVERAGE)
            divide(to, count, call->type, comm->ranks);
    }
    return room_meet(comm->room, comm->ranks, comm->rank, &comm->aborted);
}

void let_go(Communicator comm) {
    if (atomic_fetch_sub(&comm->users, 1) > 1)
        return;
    room_leave(comm->room);
    free(comm);
}

static int run(void *data) {
    const struct collective *of = data;
    Communicator comm = of->comm;
    const struct call *call = &of->call;
    size_t width = type_width(call->type);
    while (of->stalls && !atomic_load(&comm->aborted))
        usleep(1000);
    if (atomic_load(&comm->aborted)) {
        let_go(comm);
        return SUCCESS;
    }
    if (comm->room == NULL) {
        alone(of);
    } else {
        comm->room->seats[comm->rank].calls[call->number % 2] = *call;
        int goes_on = room_meet(comm->room, comm->ranks, comm->rank, &comm->aborted);
        if (goes_on && !is_agreed(of)) {
            atomic_store(&comm->failed, INVALID_USAGE);
            goes_on = 0;
        }
        size_t step = WINDOW / (width * (size_t)comm->ranks);
        for (size_t at = 0; goes_on && at < call->count; at += step)
            goes_on = move(of, at, call->count - at < step ? call->count - at : step);
    }
    if (call->kind != REDUCE || call->root == comm->rank)
        wrote(of->to, received(call, comm->ranks) * width);
    let_go(comm);
    return SUCCESS;
}

Result submit(const struct collective *of, void *stream) {
    Communicator comm = of->comm;
    const struct call *call = &of->call;
    size_t width = type_width(call->type);
    char what[64];
    snprintf(what, sizeof what, "%s of NCCL", kinds[call->kind]);
    struct span spans[] = {
        bytes_at(of->to, received(call, comm->ranks) * width, 1),
        bytes_at(of->from, sent(call, comm->ranks) * width, 0),
    };
    int has_result = call->kind != REDUCE || call->root == comm->rank;
    int has_part = call->kind != BROADCAST || call->root == comm->rank;
    atomic_fetch_add(&comm->users, 1);
    int result = in_stream(stream, what, spans + !has_result, (size_t)(has_result + has_part), run, of, sizeof *of);
    if (result == 0)
        return SUCCESS;
    atomic_fetch_sub(&comm->users, 1);
    return SYSTEM_ERROR;
}
