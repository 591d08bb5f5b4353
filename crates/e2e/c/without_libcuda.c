/* A program that no preloaded library can enter, and that uses the emulated GPU all the same: linked
 * with -static it has no loader, so it asks the MPS daemon and the device by itself, in the words of
 * `wire.rs` and `channel.rs` of crates/emulated-gpu. It keeps one kernel of half a second after the
 * other in flight until it is told to leave.
 *
 * Leaves with 3 when the GPU refuses it or throws it out. */
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { HELLO = 1, CONTEXT = 5, PING = 16, TOPIC_CLIENT = 2, OP_KERNEL = 1 };
enum { RING = 4096, STREAMS = 2048, EVENTS = 65536 };

struct message { uint32_t kind, status; uint64_t values[7]; };

struct entry {
    uint32_t op, stream;
    uint64_t seq, time_ns, amount;
    uint32_t target;
    float sm_fill, occupancy, issue, bandwidth;
    int32_t priority;
};

struct line { uint64_t value; } __attribute__((aligned(128)));

struct slot {
    uint64_t completed, completed_time_ns, wanted;
    uint32_t sleepers, reserved;
    uint64_t host_done, host_ready;
} __attribute__((aligned(64)));

struct channel {
    uint64_t magic;
    uint32_t fault, host_bell;
    uint64_t quiet_until_ns;
    struct line head, tail;
    struct entry ring[RING];
    struct slot streams[STREAMS];
    uint64_t events[EVENTS];
};

static void leave(const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(3);
}

static int meet(const char *dir, const char *name) {
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    snprintf(at.sun_path, sizeof at.sun_path, "%s/%s", dir, name);
    int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (s < 0 || connect(s, (struct sockaddr *)&at, sizeof at)) leave(at.sun_path);
    return s;
}

/* The answer's first value; its files go to `files`, at most three. */
static uint64_t ask(int s, struct message m, const char *what, int *files) {
    char room[4096], control[CMSG_SPACE(8 * sizeof(int))];
    if (send(s, &m, sizeof m, MSG_NOSIGNAL) < 0) leave(what);
    struct iovec part = { room, sizeof room };
    struct msghdr head = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                           .msg_controllen = sizeof control };
    if (recvmsg(s, &head, 0) < (ssize_t)sizeof m) leave(what);
    memcpy(&m, room, sizeof m);
    if (m.status) leave(what);
    struct cmsghdr *c = CMSG_FIRSTHDR(&head);
    if (files && c) memcpy(files, CMSG_DATA(c), 3 * sizeof(int));
    return m.values[0];
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

int main(void) {
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY"), *node = getenv("MUXFLOW_EMULATED_DIR");
    if (!pipe || !node) leave("no MPS or no emulated node in the environment");
    int daemon = meet(pipe, "control");
    uint64_t server = ask(daemon, (struct message){ PING, 0, { TOPIC_CLIENT } }, "MPS", 0);
    int device = meet(node, "gpu0/device.sock"), files[3] = { -1, -1, -1 };
    ask(device, (struct message){ HELLO, 0, { 1, server, 0, 0 } }, "hello", files);
    ask(device, (struct message){ CONTEXT, 0, { 1 } }, "context", 0);
    struct channel *channel = mmap(0, sizeof *channel, PROT_READ | PROT_WRITE, MAP_SHARED, files[1], 0);
    if (channel == MAP_FAILED) leave("channel");
    printf("ready\n");
    fflush(stdout);
    for (uint64_t seq = 1;; seq++) {
        struct entry kernel = { .op = OP_KERNEL, .seq = seq, .time_ns = now_ns(), .sm_fill = 8,
                                .amount = 500000000, .occupancy = 0.5f, .issue = 0.5f };
        channel->ring[(seq - 1) % RING] = kernel;
        __atomic_store_n(&channel->head.value, seq, __ATOMIC_RELEASE);
        __atomic_store_n(&channel->streams[0].wanted, seq, __ATOMIC_SEQ_CST);
        uint64_t one = 1;
        if (write(files[2], &one, sizeof one) < 0) leave("doorbell");
        while (__atomic_load_n(&channel->streams[0].completed, __ATOMIC_SEQ_CST) < seq) {
            if (__atomic_load_n(&channel->fault, __ATOMIC_SEQ_CST)) leave("thrown out");
            usleep(10000);
        }
    }
}
