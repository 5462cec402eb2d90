#include "support.h"

#include <sys/wait.h>
#include <unistd.h>

struct outcome run(int (*program)(int argument), int argument, int seed) {
    struct outcome outcome = {-1, ""};
    int pipes[2], status;
    CHECK(pipe(pipes) == 0);
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char text[16];
        snprintf(text, sizeof text, "%d", seed);
        setenv("FAKE_CUDA_EXECUTE", "1", 1);
        setenv("FAKE_CUDA_ASYNC", text, 1);
        dup2(pipes[1], 2);
        close(pipes[0]);
        /* Ends a test that hangs. */
        alarm(300);
        int code = program(argument);
        fflush(stdout);
        _exit(code);
    }
    close(pipes[1]);
    size_t length = 0;
    ssize_t got;
    while ((got = read(pipes[0], outcome.told + length, sizeof outcome.told - 1 - length)) > 0)
        length += (size_t)got;
    close(pipes[0]);
    CHECK(waitpid(child, &status, 0) == child);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

void planted(const char *name, int (*program)(int bug), const char *expected) {
    for (int seed = 1; seed <= 3; seed++) {
        struct outcome with = run(program, 1, seed), without = run(program, 0, seed);
        if (with.code != 1 || strstr(with.told, expected) == NULL) {
            printf("%s, seed %d: expected `%s`, but the program ended with %d:\n%s\n", name, seed, expected, with.code,
                   with.told);
            exit(1);
        }
        if (without.code != 0 || without.told[0] != 0) {
            printf("%s, fixed, seed %d: the program ended with %d:\n%s\n", name, seed, without.code, without.told);
            exit(1);
        }
    }
    printf("ok: %s\n", name);
}

void works(const char *name, int (*program)(int)) {
    for (int seed = 1; seed <= 3; seed++) {
        struct outcome outcome = run(program, 0, seed);
        if (outcome.code != 0) {
            printf("%s, seed %d: ended with %d:\n%s\n", name, seed, outcome.code, outcome.told);
            exit(1);
        }
    }
    printf("ok: %s\n", name);
}
