/* The room in which the ranks of a communicator meet: a file of shared memory in the folder for temporary files, named
 * by the unique id. The file is unlinked once all ranks have joined. */
#define _GNU_SOURCE
#include "nccl.h"

#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static void path_of(char path[4096], const char *name) {
    const char *folder = getenv("TMPDIR");
    snprintf(path, 4096, "%s/fake-nccl-%s", folder != NULL && *folder != 0 ? folder : "/tmp", name);
}

struct room *room_enter(const char *name, int ranks, int rank) {
    if (ranks > MOST_RANKS) {
        fprintf(stderr, "NCCL: %d ranks, but this stand-in supports at most %d\n", ranks, MOST_RANKS);
        return NULL;
    }
    char path[4096];
    path_of(path, name);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    /* Every rank sets the same size. New bytes are zero. */
    if (file < 0 || ftruncate(file, sizeof(struct room)) != 0) {
        perror(path);
        if (file >= 0)
            close(file);
        return NULL;
    }
    struct room *room = mmap(NULL, sizeof *room, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (room == MAP_FAILED) {
        perror(path);
        return NULL;
    }
    int others = 0;
    if (!atomic_compare_exchange_strong(&room->ranks, &others, ranks) && others != ranks) {
        fprintf(stderr, "NCCL: rank %d expects %d ranks, but another rank expects %d\n", rank, ranks, others);
    } else if (atomic_exchange(&room->seats[rank].taken, 1) != 0) {
        fprintf(stderr, "NCCL: rank %d has joined twice\n", rank);
    } else {
        return room;
    }
    munmap(room, sizeof *room);
    return NULL;
}

int room_is_full(struct room *room, const char *name, int ranks) {
    for (int rank = 0; rank < ranks; rank++)
        if (atomic_load(&room->seats[rank].taken) == 0)
            return 0;
    char path[4096];
    path_of(path, name);
    /* Every rank calls it; only the first call has an effect. */
    unlink(path);
    return 1;
}

int room_meet(struct room *room, int ranks, int rank, atomic_int *ends) {
    unsigned long mine = atomic_fetch_add(&room->seats[rank].met, 1) + 1;
    for (int other = 0; other < ranks; other++) {
        for (int looks = 0; atomic_load(&room->seats[other].met) < mine; looks++) {
            if (atomic_load(ends))
                return 0;
            if (looks < 100)
                sched_yield();
            else
                usleep(50);
        }
    }
    return 1;
}

void room_leave(struct room *room) {
    if (room != NULL)
        munmap(room, sizeof *room);
}
