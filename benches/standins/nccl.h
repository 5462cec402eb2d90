/* Shared declarations of the stand-in for NCCL. */
#ifndef NCCL_H
#define NCCL_H

#include "trace.h"

#include <stdatomic.h>
#include <stddef.h>

typedef int Result;
typedef struct { char bytes[128]; } UniqueId;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

#pragma GCC visibility push(hidden)

/* nccl_config.c: the version that this library reports, and the parser of configurations. */
int library_version(void);
Result parse_config(const void *given, int *blocking);

/* nccl_ranks.c: memory shared by the ranks of a communicator, in processes or threads of one machine. */
enum { MOST_RANKS = 64, WINDOW = 1 << 18 };

/* A rank's call of a collective, to be compared with the other ranks' calls. */
struct call {
    unsigned long number;
    size_t count;
    int kind, type, operation, root;
};

struct seat {
    atomic_int taken;
    /* Number of meetings that the rank has reached. */
    atomic_ulong met;
    /* The last two calls, colors and keys: other ranks may still read the previous one. */
    struct call calls[2];
    atomic_ulong splits;
    int color[2], key[2];
    char window[WINDOW] __attribute__((aligned(64)));
};

struct room {
    atomic_int ranks;
    struct seat seats[MOST_RANKS];
};

/* Takes the seat of a rank in the room of this name. On failure, prints the reason and returns NULL. */
struct room *room_enter(const char *name, int ranks, int rank);
/* Returns 1 if all ranks have joined. */
int room_is_full(struct room *room, const char *name, int ranks);
/* Waits until all ranks have reached this meeting; returns 0 if `ends` is set meanwhile. */
int room_meet(struct room *room, int ranks, int rank, atomic_int *ends);
void room_leave(struct room *room);

/* nccl_sum.c: the size of an element in bytes, and sums of `count` elements, each rounded to a type that has sums. */
size_t type_width(int type);
int type_has_sum(int type);
void add(void *sum, const void *numbers, size_t count, int type);
/* Divides a sum by the number of ranks. */
void divide(void *sum, size_t count, int type, int ranks);

/* Values of ncclRedOp_t. */
enum { SUM = 0, AVERAGE = 4 };

/* nccl.c: communicators. */
enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE };

typedef struct communicator *Communicator;

/* A collective in a stream. */
struct collective {
    Communicator comm;
    struct call call;
    const char *from;
    char *to;
    int stalls;
};

struct communicator {
    unsigned long number;
    int ranks, rank, device, blocking;
    /* The room shared with the other ranks, or NULL without them, and its name. Set while some have not joined. */
    struct room *room;
    char name[160];
    int joins;
    /* The work in the background: polls until it is done, polls so far, the thread that began it, and the number of
     * times that this thread had slept by then. */
    int busy, looks, thread;
    long slept;
    /* Numbers of calls so far with work in the background, of collectives, and of splits. */
    int begun;
    unsigned long collectives, splits;
    /* The collective to submit to its stream when the work in the background is done. */
    struct collective deferred;
    void *stream;
    int is_deferred;
    /* Set if the communicator ends once its streams have done their work. */
    int finalizes;
    /* Where to store the new communicator of a split that not all ranks have called yet. */
    Communicator *made;
    int made_blocking;
    /* An error that the ranks have found together; set if streams must stop waiting; number of users. */
    atomic_int failed, aborted, users;
};

/* nccl_collectives.c: submits a collective to its stream. */
Result submit(const struct collective *of, void *stream);
/* Ends a use of a communicator. */
void let_go(Communicator comm);
/* Names of the kinds of collectives. */
extern const char *const kinds[];

#pragma GCC visibility pop
#endif
