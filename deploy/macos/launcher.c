/*
 * The main executable of mtp-cluster.app. It runs the program of its arguments as a child and ends as the child ends.
 *
 * macOS gives the permission for the local network to the app that is responsible for a process. A child belongs to
 * its parent's app. After exec the main executable would be that of Python, so this process stays. The program is an
 * argument, so that neither Python nor mtp-cluster changes the app.
 *
 * proto/terminal/mac_launcher is this file, compiled in this folder after `pip install ziglang==0.17.1` by
 * python -m ziglang cc -target aarch64-macos.14.0 -Oz -s -o mtp-cluster.service launcher.c
 * The linker signs it ad hoc with the name of the output, which is the identifier of the app.
 */
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static const int forwarded[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
static const unsigned signals = sizeof forwarded / sizeof *forwarded;
static pid_t child;

static void forward(int number) { kill(child, number); }

/* Send one byte to the group of mDNS, at the discard port. macOS 27 asks for an app's own traffic, not a child's. */
static void touch_local_network(void) {
    struct sockaddr_in group;
    int descriptor = socket(AF_INET, SOCK_DGRAM, 0);

    memset(&group, 0, sizeof group);
    group.sin_family = AF_INET;
    group.sin_port = htons(9);
    group.sin_addr.s_addr = htonl(0xE00000FB); /* 224.0.0.251 */
    sendto(descriptor, "", 1, MSG_DONTWAIT, (struct sockaddr *)&group, sizeof group);
    close(descriptor);
}

int main(int count, char **words) {
    sigset_t held, before;
    posix_spawnattr_t attributes;
    int status = 0, failure;

    if (count < 2) {
        fprintf(stderr, "usage: %s PROGRAM [ARGUMENT ...]\n", words[0]);
        return 2;
    }
    touch_local_network();
    signal(SIGCHLD, SIG_DFL); /* waitpid fails if the parent ignored it */
    /* Signals wait until the child exists. The child gets the mask and the actions of this process's parent. */
    sigemptyset(&held);
    for (unsigned i = 0; i < signals; i++) sigaddset(&held, forwarded[i]);
    sigprocmask(SIG_BLOCK, &held, &before);
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setsigmask(&attributes, &before);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    failure = posix_spawn(&child, words[1], NULL, &attributes, words + 1, environ);
    if (failure) {
        fprintf(stderr, "%s: %s\n", words[1], strerror(failure));
        return 127;
    }
    for (unsigned i = 0; i < signals; i++) signal(forwarded[i], forward);
    sigprocmask(SIG_SETMASK, &before, NULL);

    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return 1;
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    signal(WTERMSIG(status), SIG_DFL);
    raise(WTERMSIG(status));
    return 128 + WTERMSIG(status);
}
