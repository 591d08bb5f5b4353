/* A client for a driver that really runs things: what it does is its first argument, and it prints one
 * line for each thing that a test compares. Under the interposer and without it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long u64;
static void *lib;
static void *sym(const char *name) {
    void *s = dlsym(lib, name);
    if (!s) { fprintf(stderr, "no %s\n", name); exit(2); }
    return s;
}
#define CALL(name, ...) ((int (*)())sym(#name))(__VA_ARGS__)
#define CHECK(name, ...) do { int r_ = CALL(name, __VA_ARGS__); if (r_) { fprintf(stderr, "line %d: " #name " -> %d\n", __LINE__, r_); exit(1); } } while (0)
#define MIB ((size_t)1 << 20)

static const char *PTX = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry quick_muxflow_us200() { ret; }\n";
static void *context, *quick;
static void start(int device) {
    void *module;
    CHECK(cuInit, 0); CHECK(cuDevicePrimaryCtxRetain, &context, device); CHECK(cuCtxSetCurrent, context);
    CHECK(cuModuleLoadData, &module, PTX); CHECK(cuModuleGetFunction, &quick, module, "quick_muxflow_us200");
}
static int launch(void *s) { return CALL(cuLaunchKernel, quick, 1, 1, 1, 64, 1, 1, 0, s, NULL, NULL); }
static u64 free_bytes(void) { size_t f, t; CHECK(cuMemGetInfo_v2, &f, &t); return f; }

/* What tells one GPU from another. */
static void ids(void) {
    int n; CHECK(cuInit, 0); CHECK(cuDeviceGetCount, &n);
    for (int d = 0; d < n; d++) {
        unsigned char a[16], b[16]; char bus[32], name[64]; int back, domain, pci;
        CHECK(cuDeviceGetUuid, a, d); CHECK(cuDeviceGetUuid_v2, b, d); CHECK(cuDeviceGetPCIBusId, bus, 32, d); CHECK(cuDeviceGetName, name, 64, d);
        CHECK(cuDeviceGetByPCIBusId, &back, bus); CHECK(cuDeviceGetAttribute, &pci, 33, d); CHECK(cuDeviceGetAttribute, &domain, 50, d);
        printf("%d %s %s %d %d %d ", d, name, bus, back, pci, domain);
        for (int i = 0; i < 16; i++) printf("%02x%02x", a[i], b[i]);
        printf("\n");
    }
}

/* Free and total of each device, with 8 MiB held on the first. */
static void devices(void) {
    int n; u64 p; start(0); CHECK(cuMemAlloc_v2, &p, 8 * MIB); CHECK(cuDeviceGetCount, &n);
    for (int d = 0; d < n; d++) {
        void *c; size_t f, t, all; CHECK(cuDevicePrimaryCtxRetain, &c, d); CHECK(cuCtxSetCurrent, c);
        CHECK(cuMemGetInfo_v2, &f, &t); CHECK(cuDeviceTotalMem_v2, &all, d);
        int r = CALL(cuMemAlloc_v2, &p, f + 512); int q = CALL(cuMemAlloc_v2, &p, f);
        printf("%d %zu %zu %zu %d %d\n", d, f, t, all, r, q);
    }
}

/* Work that waits for what this thread does after it has launched more than may be in flight. */
static volatile int flag;
static void until_flag(void *p) { while (!flag) usleep(1000); ++*(int *)p; }
static void waits(void) {
    void *a, *b, *e; int called = 0;
    start(0); CHECK(cuStreamCreate, &a, 1); CHECK(cuStreamCreate, &b, 1); CHECK(cuEventCreate, &e, 2);
    CHECK(cuLaunchHostFunc, a, until_flag, &called);
    for (int i = 0; i < 6; i++) if (launch(a)) exit(1);
    /* And in another stream, behind an event of the first. */
    CHECK(cuEventRecord, e, a); CHECK(cuStreamWaitEvent, b, e, 0);
    for (int i = 0; i < 3; i++) if (launch(b)) exit(1);
    flag = 1;
    CHECK(cuStreamSynchronize, b); CHECK(cuStreamSynchronize, a);
    printf("called %d\n", called);
}

/* A capture for all threads in one stream while another launches; two more streams have work of before. */
static volatile int over;
static void *launches(void *s) { CHECK(cuCtxSetCurrent, context); int r = 0; while (!over) r |= launch(s); return (void *)(intptr_t)r; }
static void capture(void) {
    void *a, *b, *c, *d, *g, *exec; size_t n; pthread_t t; void *r; char line[16];
    start(0);
    CHECK(cuStreamCreate, &a, 1); CHECK(cuStreamCreate, &b, 1); CHECK(cuStreamCreate, &c, 0); CHECK(cuStreamCreate, &d, 1);
    if (launch(a) | launch(c) | launch(NULL) | launch(d)) exit(1);
    CHECK(cuStreamBeginCapture_v2, a, 0); CHECK(cuStreamBeginCapture_v2, c, 0);
    pthread_create(&t, NULL, launches, b);
    for (int i = 0; i < 5; i++) { if (launch(a) | launch(c)) exit(1); usleep(2000); }
    for (int i = 0; i < 20; i++) if (launch(d)) exit(1);
    /* Whoever stands at the gate outside does something meanwhile. */
    printf("capturing\n"); if (!fgets(line, sizeof line, stdin)) exit(1);
    if (launch(a) | launch(c)) exit(1);
    int first = CALL(cuStreamEndCapture, a, &g);
    CHECK(cuGraphGetNodes, g, NULL, &n); printf("ended %d nodes %zu\n", first, n);
    CHECK(cuGraphInstantiateWithFlags, &exec, g, 0ull); CHECK(cuGraphLaunch, exec, a);
    int second = CALL(cuStreamEndCapture, c, &g);
    CHECK(cuGraphGetNodes, g, NULL, &n); printf("ended %d nodes %zu\n", second, n);
    over = 1; pthread_join(t, &r); CHECK(cuCtxSynchronize);
    printf("launches %d\n", (int)(intptr_t)r);
}

/* Memory of one process that another one of the job opens: by an IPC handle, and by a descriptor. */
struct shared { char ipc[64]; u64 bytes; };
static void send_fd(int to, int fd) {
    char byte = 0, room[CMSG_SPACE(sizeof fd)]; struct iovec v = { &byte, 1 };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room };
    struct cmsghdr *c = CMSG_FIRSTHDR(&m); c->cmsg_level = SOL_SOCKET; c->cmsg_type = SCM_RIGHTS; c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    if (sendmsg(to, &m, 0) != 1) exit(1);
}
static int receive_fd(int from) {
    char byte, room[CMSG_SPACE(sizeof(int))]; int fd; struct iovec v = { &byte, 1 };
    struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room };
    if (recvmsg(from, &m, 0) != 1) exit(1);
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}
struct prop { int type, handles, where, id; void *meta; unsigned char flags[8]; };
static void lender(int s) {
    struct shared it = { .bytes = 8 * MIB }; u64 p, h; int fd; char done; struct prop prop = { 1, 1, 1, 0 };
    start(0); CHECK(cuMemAlloc_v2, &p, (size_t)it.bytes); CHECK(cuMemsetD8_v2, p, 7, (size_t)64); CHECK(cuIpcGetMemHandle, it.ipc, p);
    CHECK(cuMemCreate, &h, 4 * MIB, &prop, 0ull); CHECK(cuMemExportToShareableHandle, &fd, h, 1, 0ull);
    if (write(s, &it, sizeof it) != sizeof it) exit(1);
    send_fd(s, fd);
    if (read(s, &done, 1) != 1) exit(1);
    _exit(0);
}
struct handle { char b[64]; };
static void share(void) {
    int s[2]; struct shared it; u64 p, h, at; unsigned char seen = 0; char done = 1; struct handle ipc;
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, s)) exit(1);
    pid_t child = fork();
    if (!child) lender(s[1]);
    close(s[1]);
    if (read(s[0], &it, sizeof it) != sizeof it) exit(1);
    int fd = receive_fd(s[0]);
    start(0); u64 before = free_bytes();
    memcpy(&ipc, it.ipc, 64);
    int (*open_ipc)(u64 *, struct handle, unsigned) = sym("cuIpcOpenMemHandle_v2");
    int r = open_ipc(&p, ipc, 1); CHECK(cuMemcpyDtoH_v2, &seen, p, (size_t)1);
    printf("ipc %d %d %lld\n", r, seen, (long long)(before - free_bytes()));
    CHECK(cuMemImportFromShareableHandle, &h, (void *)(intptr_t)fd, 1);
    CHECK(cuMemAddressReserve, &at, 4 * MIB, (size_t)0, 0ull, 0ull); CHECK(cuMemMap, at, 4 * MIB, (size_t)0, h, 0ull);
    printf("descriptor %lld\n", (long long)(before - free_bytes()));
    printf("held %lld\n", (long long)before);
    if (write(s[0], &done, 1) != 1) exit(1);
    int status; waitpid(child, &status, 0);
    printf("lender %d\n", status);
}

/* What NVML says of the memory of the first GPU. */
static void nvml(void) {
    void *device; struct { u64 total, free, used; } memory;
    lib = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    CHECK(nvmlInit_v2); CHECK(nvmlDeviceGetHandleByIndex_v2, 0, &device); CHECK(nvmlDeviceGetMemoryInfo, device, &memory);
    printf("total %llu\n", memory.total);
}

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IOLBF, 0);
    lib = dlopen("libcuda.so.1", RTLD_NOW);
    if (!lib || argc < 2) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    char *what = argv[1];
    if (!strcmp(what, "ids")) ids();
    else if (!strcmp(what, "devices")) devices();
    else if (!strcmp(what, "waits")) waits();
    else if (!strcmp(what, "capture")) capture();
    else if (!strcmp(what, "share")) share();
    else if (!strcmp(what, "nvml")) nvml();
    else return 2;
    return 0;
}
