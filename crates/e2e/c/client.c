/* A driver-API client that does what its arguments say, one after the other; prints one line each.
 * LOOKUP=dlsym (default), gpa (cuGetProcAddress) or default (dlsym(RTLD_DEFAULT)). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
static void *driver;
static int (*gpa)(const char *, void **, int, u64, int *);
static u64 now_ns(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }

static void *look_up(const char *name) {
    const char *how = getenv("LOOKUP");
    void *found = 0;
    if (how && !strcmp(how, "gpa")) {
        char base[64]; int status;
        strcpy(base, name);
        char *v = strstr(base, "_v2"); if (v) *v = 0;
        gpa(base, &found, 13040, 0, &status);
    } else if (how && !strcmp(how, "default")) {
        found = dlsym(RTLD_DEFAULT, name);
    } else {
        found = dlsym(driver, name);
    }
    if (!found) { fprintf(stderr, "no %s\n", name); exit(3); }
    return found;
}
#define CALL(name, ...) ((int (*)())look_up(#name))(__VA_ARGS__)

static u64 pointers[200000], graph, exec, context, pool, green; static int count;
static volatile int told, over, times;
static void on_signal(int s) { told = s; times++; }
static void on_signal_exit(int s) { (void)s; _exit(7); }
static int (*launch)();

/* Chaos: takes, gives back, forks and execs at random until it is killed or told to hold. What it
 * holds stands in a file that all processes share. It forks when it may: so many live, not more. */
enum { ENTRIES = 16384 };
struct live { u64 next, forks; struct { u64 pid, bytes, held; } p[ENTRIES]; };
static volatile int hold;
static void on_hold(int s) { (void)s; hold = 1; }
static int may_fork(struct live *live, u64 most) {
    u64 left = __atomic_load_n(&live->forks, __ATOMIC_SEQ_CST);
    while (left && live->next < 2 * most)
        if (__atomic_compare_exchange_n(&live->forks, &left, left - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return 1;
    return 0;
}
static u64 entry(struct live *live, u64 seed) {
    u64 at = __atomic_fetch_add(&live->next, 1, __ATOMIC_SEQ_CST), c;
    if (at >= ENTRIES) abort();
    srand(seed + at);
    CALL(cuDevicePrimaryCtxRetain, &c, 0); CALL(cuCtxSetCurrent, c);
    __atomic_store_n(&live->p[at].pid, getpid(), __ATOMIC_SEQ_CST);
    return at;
}
static void chaos(char **argv, u64 seed) {
    int fd = open(getenv("LIVE"), O_RDWR);
    struct live *live = mmap(0, sizeof *live, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    static u64 sizes[64];
    u64 most = strtoull(getenv("CHAOS_MOST"), 0, 10);
    int pace = atoi(getenv("CHAOS_PACE_US"));
    close(fd);
    signal(SIGUSR1, on_hold);
    CALL(cuInit, 0);
    u64 at = entry(live, seed);
    for (;;) {
        if (hold) { __atomic_store_n(&live->p[at].held, 1, __ATOMIC_SEQ_CST); for (;;) pause(); }
        int r = rand() % 1000;
        if (r < 500 && count < 64) { u64 n = 512 * (1 + rand() % 2000); if (!CALL(cuMemAlloc_v2, &pointers[count], (size_t)n)) { sizes[count++] = n; live->p[at].bytes += n; } }
        else if (r < 950 && count) { int k = rand() % count; if (!CALL(cuMemFree_v2, pointers[k])) { live->p[at].bytes -= sizes[k]; pointers[k] = pointers[--count]; sizes[k] = sizes[count]; } }
        else if (r < 975 && may_fork(live, most)) {
            if (!fork()) { count = 0; at = entry(live, seed); }
        } else if (r < 978 && live->next < most) { __atomic_store_n(&live->p[at].pid, 0, __ATOMIC_SEQ_CST); execv("/proc/self/exe", argv); abort(); }
        usleep(pace + rand() % (4 * pace));
    }
}

static void *stay(void *p) { (void)p; printf("ready\n"); for (;;) pause(); return 0; }

static void *free_all(void *failed) {
    while (count) if (CALL(cuMemFree_v2, pointers[--count])) ++*(int *)failed;
    return 0;
}

/* Signals and sigaction from everywhere at once. */
static void set_term(void) { struct sigaction a = { .sa_handler = on_signal }; sigaction(SIGTERM, &a, 0); }
static void on_storm(int s) { (void)s; set_term(); }
static volatile int was_set;
static void *sets(void *p) { (void)p; while (!over) { set_term(); was_set = 1; } return 0; }
static void *launches(void *p) { (void)p; for (;;) launch((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void *)0, (void *)0); return 0; }
static void block(int s) { sigset_t set; sigemptyset(&set); sigaddset(&set, s); pthread_sigmask(SIG_BLOCK, &set, 0); }
static int wait_for_child(pid_t p) { int s; while (waitpid(p, &s, 0) < 0 && errno == EINTR); return s; }

int main(int argc, char **argv) {
    setvbuf(stdout, 0, _IOLBF, 0);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    gpa = dlsym(driver, "cuGetProcAddress_v2");
    for (int i = 1; i < argc; i++) {
        char *op = argv[i], *arg = strchr(op, ':');
        if (arg) *arg++ = 0;
        u64 n = arg ? strtoull(arg, 0, 0) : 0;
        if (!strcmp(op, "init")) {
            int r = CALL(cuInit, 0); u64 c; r |= CALL(cuDevicePrimaryCtxRetain, &c, 0); r |= CALL(cuCtxSetCurrent, c);
            launch = (int (*)())look_up("cuLaunchKernel");
            printf("init %d\n", r);
        } else if (!strcmp(op, "ctx")) printf("ctx %d\n", CALL(cuCtxCreate_v2, &context, 0, 0));
        else if (!strcmp(op, "attach")) { u64 c; printf("attach %d\n", CALL(cuCtxAttach, &c, 0)); }
        else if (!strcmp(op, "detach")) printf("detach %d\n", CALL(cuCtxDetach, context));
        else if (!strcmp(op, "green")) { int r = CALL(cuInit, 0) | CALL(cuGreenCtxCreate, &green, (void *)0, 0, 0); launch = (int (*)())look_up("cuLaunchKernel"); printf("green %d\n", r); }
        else if (!strcmp(op, "greenend")) printf("greenend %d\n", CALL(cuGreenCtxDestroy, green));
        else if (!strcmp(op, "device")) { u64 c; int r = CALL(cuDevicePrimaryCtxRetain, &c, (int)n); r |= CALL(cuCtxSetCurrent, c); printf("device %d\n", r); }
        else if (!strcmp(op, "heap")) printf("heap %d\n", CALL(cuCtxSetLimit, 2, (size_t)n));
        else if (!strcmp(op, "reset")) printf("reset %d\n", CALL(cuDevicePrimaryCtxReset_v2, (int)n));
        else if (!strcmp(op, "ctxend")) printf("ctxend %d\n", CALL(cuCtxDestroy_v2, context));
        else if (!strcmp(op, "release")) printf("release %d\n", CALL(cuDevicePrimaryCtxRelease_v2, 0));
        else if (!strcmp(op, "alloc")) { int r = CALL(cuMemAlloc_v2, &pointers[count], (size_t)n); if (!r) count++; printf("alloc %d\n", r); }
        else if (!strcmp(op, "free")) { int r = count ? CALL(cuMemFree_v2, pointers[--count]) : -1; printf("free %d\n", r); }
        else if (!strcmp(op, "pairs")) { int r = 0; u64 p; while (n--) { r |= CALL(cuMemAlloc_v2, &p, (size_t)4096); r |= CALL(cuMemFree_v2, p); } printf("pairs %d\n", r); }
        else if (!strcmp(op, "many")) { int r = 0; while (n-- && !r) { r = CALL(cuMemAlloc_v2, &pointers[count], (size_t)4096); if (!r) count++; } printf("many %d\n", r); }
        else if (!strcmp(op, "freeall")) { int failed = 0; free_all(&failed); printf("freeall %d\n", failed); }
        else if (!strcmp(op, "freeelsewhere")) { int failed = 0; pthread_t t; pthread_create(&t, 0, free_all, &failed); pthread_join(t, 0); printf("freeelsewhere %d\n", failed); }
        else if (!strcmp(op, "info")) { size_t f, t; int r = CALL(cuMemGetInfo_v2, &f, &t); printf("info %d %zu %zu\n", r, f, t); }
        else if (!strcmp(op, "info0")) { printf("info0 %d\n", CALL(cuMemGetInfo_v2, (void *)0, (void *)0)); }
        else if (!strcmp(op, "total")) { size_t t; int r = CALL(cuDeviceTotalMem_v2, &t, 0); printf("total %d %zu\n", r, t); }
        else if (!strcmp(op, "launch")) { u64 t = now_ns(); int r = 0; for (u64 k = 0; k < n && !r; k++) r = launch((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void *)0, (void *)0); printf("launch %d %llu\n", r, (unsigned long long)(now_ns() - t)); }
        else if (!strcmp(op, "loop")) { printf("looping\n"); while (!told) launch((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void *)0, (void *)0); printf("told %d\n", told); }
        else if (!strcmp(op, "forever")) { printf("looping\n"); for (;;) launch((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void *)0, (void *)0); }
        else if (!strcmp(op, "sync")) printf("sync %d\n", CALL(cuCtxSynchronize));
        else if (!strcmp(op, "paced")) { int r = 0; while (n--) { r |= launch((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void *)0, (void *)0); r |= CALL(cuStreamSynchronize, (void *)0); } printf("paced %d\n", r); }
        else if (!strcmp(op, "graph")) { u64 node, p[16] = { 0 }; ((int *)p)[2] = 1; p[13] = n; int r = CALL(cuGraphCreate, &graph, 0) | CALL(cuGraphAddMemAllocNode, &node, graph, (void *)0, (size_t)0, p); if (!r) r = CALL(cuGraphInstantiateWithFlags, &exec, graph, (u64)0) | CALL(cuGraphDestroy, graph); printf("graph %d\n", r); }
        else if (!strcmp(op, "graphend")) printf("graphend %d\n", CALL(cuGraphExecDestroy, exec));
        else if (!strcmp(op, "graphtrim")) printf("graphtrim %d\n", CALL(cuDeviceGraphMemTrim, 0));
        else if (!strcmp(op, "plan")) { u64 node, p[16] = { 0 }; ((int *)p)[2] = 1; p[13] = n; printf("plan %d\n", CALL(cuGraphCreate, &graph, 0) | CALL(cuGraphAddMemAllocNode, &node, graph, (void *)0, (size_t)0, p)); }
        else if (!strcmp(op, "instantiate")) printf("instantiate %d\n", CALL(cuGraphInstantiateWithFlags, &exec, graph, (u64)0));
        else if (!strcmp(op, "planend")) printf("planend %d\n", CALL(cuGraphDestroy, graph));
        else if (!strcmp(op, "pool")) { struct { int type, handles, where, id; u64 rest[9]; } props = { 1, 0, 1, 0 }; printf("pool %d\n", CALL(cuMemPoolCreate, &pool, &props)); }
        else if (!strcmp(op, "poolalloc")) { int r = CALL(cuMemAllocFromPoolAsync, &pointers[count], (size_t)n, pool, (void *)0); if (!r) count++; printf("poolalloc %d\n", r); }
        else if (!strcmp(op, "poolend")) printf("poolend %d\n", CALL(cuMemPoolDestroy, pool));
        else if (!strcmp(op, "freeasync")) { int r = count ? CALL(cuMemFreeAsync, pointers[--count], (void *)0) : -1; printf("freeasync %d\n", r); }
        else if (!strcmp(op, "allocin")) { u64 p; printf("allocin %d\n", CALL(cuMemAllocAsync, &p, (size_t)1 << 20, (void *)n)); }
        else if (!strcmp(op, "captures")) { int r = 0; u64 g; for (u64 k = 0; k < n; k++) r |= CALL(cuStreamBeginCapture_v2, (void *)(0x100 + k), 0); for (u64 k = 0; k < n; k++) r |= CALL(cuStreamEndCapture, (void *)(0x100 + k), &g); printf("captures %d\n", r); }
        else if (!strcmp(op, "captureown")) printf("captureown %d\n", CALL(cuStreamBeginCapture_v2_ptsz, (void *)0, 0));
        else if (!strcmp(op, "endown")) { u64 g; printf("endown %d\n", CALL(cuStreamEndCapture_ptsz, (void *)0, &g)); }
        else if (!strcmp(op, "launchin")) printf("launchin %d\n", launch((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)n, (void *)0, (void *)0));
        else if (!strcmp(op, "capture")) printf("capture %d\n", CALL(cuStreamBeginCapture_v2, (void *)n, 0));
        else if (!strcmp(op, "endcapture")) printf("endcapture %d\n", CALL(cuStreamEndCapture, (void *)n, &graph));
        else if (!strcmp(op, "handler")) { printf("handler\n"); signal(SIGTERM, on_signal); signal(SIGINT, on_signal); }
        else if (!strcmp(op, "handlerexit")) { struct sigaction a = { .sa_handler = on_signal_exit }; sigaction(SIGTERM, &a, 0); printf("handler\n"); }
        else if (!strcmp(op, "bushandler")) { signal(SIGBUS, on_signal_exit); printf("bushandler\n"); }
        else if (!strcmp(op, "buserror")) { FILE *f = tmpfile(); char *p = mmap(0, 4096, PROT_READ, MAP_SHARED, fileno(f), 0); printf("buserror %d\n", *(volatile char *)p); }
        else if (!strcmp(op, "ignore")) { signal(SIGTERM, SIG_IGN); printf("ignore\n"); }
        else if (!strcmp(op, "block")) { block(SIGTERM); printf("block\n"); }
        else if (!strcmp(op, "sigwait")) { sigset_t set; int s; pthread_t t; block(SIGTERM); pthread_create(&t, 0, launches, 0); sigemptyset(&set); sigaddset(&set, SIGTERM); printf("looping\n"); sigwait(&set, &s); _exit(40 + s); }
        else if (!strcmp(op, "threads")) { pthread_t t; while (n--) pthread_create(&t, 0, launches, 0); printf("looping\n"); for (;;) pause(); }
        else if (!strcmp(op, "storm")) {
            /* A handler that sets handlers interrupts a thread that does the same. */
            pthread_t t; signal(SIGUSR1, on_storm); alarm(60); over = 0; pthread_create(&t, 0, sets, 0);
            while (n--) { pthread_kill(t, SIGUSR1); usleep(20); }
            over = 1; pthread_join(t, 0); alarm(0); printf("storm\n");
        } else if (!strcmp(op, "forkstorm")) {
            pthread_t t; int bad = 0; over = 0; pthread_create(&t, 0, sets, 0);
            while (n--) { pid_t p = fork(); if (!p) { alarm(20); set_term(); _exit(0); } bad += wait_for_child(p) != 0; }
            over = 1; pthread_join(t, 0); printf("forkstorm %d\n", bad);
        } else if (!strcmp(op, "setting")) { pthread_t t; over = was_set = 0; pthread_create(&t, 0, sets, 0); while (!was_set) usleep(100); }
        else if (!strcmp(op, "asked")) { struct sigaction a; sigaction(SIGTERM, 0, &a); printf("asked %s\n", a.sa_handler == on_signal ? "mine" : a.sa_handler == SIG_DFL ? "default" : a.sa_handler == SIG_IGN ? "ignore" : "other"); }
        else if (!strcmp(op, "sleep")) { u64 end = now_ns() + n * 1000000; while (now_ns() < end) { struct timespec t = { 0, 1000000 }; nanosleep(&t, 0); } printf("slept\n"); }
        else if (!strcmp(op, "ready")) printf("ready\n");
        else if (!strcmp(op, "fork")) { pid_t p = fork(); if (!p) continue; int s; waitpid(p, &s, 0); printf("child %d\n", s); return 0; }
        else if (!strcmp(op, "leave")) { pthread_t t; pthread_create(&t, 0, stay, 0); pthread_exit(0); }
        else if (!strcmp(op, "traced")) { if (ptrace(PTRACE_TRACEME, 0, 0, 0)) return 4; raise(SIGSTOP); }
        else if (!strcmp(op, "forkbg")) { pid_t p = fork(); if (p) continue; }
        else if (!strcmp(op, "exec")) { execv("/proc/self/exe", argv + i); return 9; }
        else if (!strcmp(op, "chaos")) { char text[64]; sprintf(text, "chaos:%llu", (unsigned long long)n); char *again[] = { argv[0], text, 0 }; chaos(again, n); }
        else if (!strcmp(op, "exit")) exit((int)n);
        else if (!strcmp(op, "_exit")) _exit((int)n);
        else if (!strcmp(op, "oldest")) { /* What a program gets that was made for CUDA 3.1, or for default streams of threads. */
            int (*alloc)(unsigned *, unsigned) = 0, (*own)() = 0, (*plain)() = 0, st; unsigned p;
            int r = gpa("cuMemAlloc", (void **)&alloc, 3010, 0, &st) | gpa("cuLaunchKernel", (void **)&own, 12000, 2, &st) | gpa("cuLaunchKernel", (void **)&plain, 12000, 1, &st);
            printf("oldest %d %d", r, own == plain);
            r = alloc(&p, (unsigned)n); printf(" %d %d", r, alloc(&p, 512));
            r = own((void *)0x40, 1, 1, 1, 1, 1, 1, 0, (void *)0, (void *)0, (void *)0); printf(" %d\n", r);
        } else if (!strcmp(op, "times")) printf("times %d\n", times);
        else if (!strcmp(op, "pid")) printf("pid %d\n", getpid());
        else if (!strcmp(op, "quick_exit")) quick_exit((int)n);
        else if (!strcmp(op, "abort")) abort();
        else if (!strcmp(op, "kill")) kill(getpid(), (int)n);
        else if (!strcmp(op, "beside")) { u64 (*f)(void) = dlsym(driver, "stub_calls_beside"); u64 (*l)(void) = dlsym(driver, "stub_launches"); printf("beside %llu %llu\n", (unsigned long long)f(), (unsigned long long)l()); }
        else if (!strcmp(op, "table")) { const void *t; unsigned char id[16] = { 1, 2, 3 }; int r = CALL(cuGetExportTable, &t, id); printf("table %d %llu\n", r, r ? 0ull : *(u64 *)t); }
        else { fprintf(stderr, "what is %s?\n", op); return 2; }
    }
    return 0;
}
