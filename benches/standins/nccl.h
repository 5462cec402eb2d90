/* What the files of the stand-in for NCCL share. */
#ifndef NCCL_H
#define NCCL_H

#include "trace.h"

#include <stdatomic.h>
#include <stddef.h>

typedef int Result;
typedef struct { char bytes[128]; } UniqueId;

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };

#pragma GCC visibility push(hidden)

/* nccl_config.c: the version that this library says it has, and what it takes from a configuration. */
int library_version(void);
Result parse_config(const void *given, int *blocking);

/* nccl_ranks.c: memory that the ranks of a communicator share, in processes or threads of one machine. */
enum { MOST_RANKS = 64, WINDOW = 1 << 18 };

/* What a rank calls, to be compared with what the others call. */
struct call {
    unsigned long number;
    size_t count;
    int kind, type, operation, root;
};

struct seat {
    atomic_int taken;
    /* How many meetings the rank has come to. */
    atomic_ulong met;
    /* What it calls, and its colors and keys: the last two of them, of which others may still read one. */
    struct call calls[2];
    atomic_ulong splits;
    int color[2], key[2];
    char window[WINDOW] __attribute__((aligned(64)));
};

struct room {
    atomic_int ranks;
    struct seat seats[MOST_RANKS];
};

/* Takes the seat of a rank in the room of this name. NULL, with the reason told, if that cannot be. */
struct room *room_enter(const char *name, int ranks, int rank);
/* Whether all have come. */
int room_is_full(struct room *room, const char *name, int ranks);
/* Waits until all have come to as many meetings; returns 0 if `ends` is set meanwhile. */
int room_meet(struct room *room, int ranks, int rank, atomic_int *ends);
void room_leave(struct room *room);

/* nccl_sum.c: adds `count` numbers to a sum, each rounded to its type, which has a sum; bytes of a number. */
size_t type_width(int type);
int type_has_sum(int type);
void add(void *sum, const void *numbers, size_t count, int type);
/* Divides a sum by the number of ranks. */
void divide(void *sum, size_t count, int type, int ranks);

/* Of ncclRedOp_t. */
enum { SUM = 0, AVERAGE = 4 };

/* nccl.c: communicators. */
enum kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, REDUCE };

typedef struct communicator *Communicator;

/* A collective, as a stream has it. */
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
    /* Where the others are, NULL without others, and its name. Whether some are still to come. */
    struct room *room;
    char name[160];
    int joins;
    /* What goes on in the background: looks until it is done, looks so far, who began it, and how often that
     * thread had slept by then. */
    int busy, looks, thread;
    long slept;
    /* Calls so far that go on in the background, and collectives and splits. */
    int begun;
    unsigned long collectives, splits;
    /* The collective that its stream gets when the background is done. */
    struct collective deferred;
    void *stream;
    int is_deferred;
    /* It ends when its streams have done what they have. */
    int finalizes;
    /* A split that not all have come to: where the new communicator goes. */
    Communicator *made;
    int made_blocking;
    /* An error that the ranks have found together; whether streams must not wait any more; who uses this. */
    atomic_int failed, aborted, users;
};

/* nccl_collectives.c: gives a collective to its stream. */
Result submit(const struct collective *of, void *stream);
/* Ends a use of a communicator. */
void let_go(Communicator comm);
/* What kinds of collectives are called. */
extern const char *const kinds[];

#pragma GCC visibility pop
#endif
