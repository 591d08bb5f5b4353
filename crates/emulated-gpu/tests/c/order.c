/* What waits for what: work of streams that are gone, launches behind a host function, streams that are only asked. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "call.h"

typedef unsigned long long ptr;

static const char *PTX = ".version 7.0\n.target sm_75\n.address_size 64\n"
".visible .entry long_muxflow_us10000000_f10() { ret; }\n.visible .entry slow_muxflow_us300000() { ret; }\n.visible .entry quick_muxflow_us5() { ret; }\n.visible .entry some_muxflow_us10000() { ret; }\n"
/* Counts to n, which takes this machine a while, and stores it. */
".visible .entry count(.param .u64 p, .param .u32 n)\n{ .reg .pred %q; .reg .b32 %r<3>; .reg .b64 %rd;\n"
" ld.param.u64 %rd, [p]; ld.param.u32 %r1, [n]; mov.u32 %r2, 0;\n"
"$again: add.u32 %r2, %r2, 1; setp.lt.u32 %q, %r2, %r1; @%q bra $again; st.global.u32 [%rd], %r2; ret; }\n";
static void *context, *module, *slow, *some, *quick, *count;
static void start(void) {
    load("libcuda.so.1");
    CHECK(cuInit, 0); CHECK(cuDevicePrimaryCtxRetain, &context, 0); CHECK(cuCtxSetCurrent, context);
    CHECK(cuModuleLoadData, &module, PTX);
    CHECK(cuModuleGetFunction, &slow, module, "slow_muxflow_us300000"); CHECK(cuModuleGetFunction, &some, module, "some_muxflow_us10000");
    CHECK(cuModuleGetFunction, &quick, module, "quick_muxflow_us5"); CHECK(cuModuleGetFunction, &count, module, "count");
}
static int launch(void *f, void *s) { return CALL(cuLaunchKernel, f, 40, 1, 1, 64, 1, 1, 0, s, NULL, NULL); }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }

/* Puts a kernel that computes and one that takes long into a stream, or into that of a thread, which is gone then. */
enum { N = 300000 };
static ptr managed; static void *mark;
static void fill(void *s) {
    unsigned n = N; void *args[] = {&managed, &n}; *(volatile unsigned *)managed = 0;
    CHECK(cuLaunchKernel, count, 1, 1, 1, 1, 1, 1, 0, s, args, NULL); EXPECT(!launch(slow, s)); CHECK(cuEventRecord, mark, s);
}
static void destroyed(int flags) { void *s; CHECK(cuStreamCreate, &s, flags); fill(s); CHECK(cuStreamDestroy_v2, s); }
static void *in_own_stream(void *unused) { CHECK(cuCtxSetCurrent, context); fill((void *)2); return NULL; }
static void ended(void) { pthread_t t; EXPECT(!pthread_create(&t, NULL, in_own_stream, NULL)); pthread_join(t, NULL); }
static void gone(void) {
    CHECK(cuMemAllocManaged, &managed, (size_t)4096, 1); CHECK(cuEventCreate, &mark, 2); volatile unsigned *value = (volatile unsigned *)managed; ptr p;
    for (int by_thread = 0; by_thread < 2; by_thread++) {
        /* Who waits for the context waits for them. */
        if (by_thread) ended(); else destroyed(1);
        CHECK(cuCtxSynchronize); EXPECT(*value == N); CHECK(cuEventQuery, mark);
        /* So does freeing. */
        CHECK(cuMemAlloc_v2, &p, (size_t)512); if (by_thread) ended(); else destroyed(1);
        CHECK(cuMemFree_v2, p); EXPECT(*value == N); CHECK(cuEventQuery, mark);
        /* So does the legacy stream. */
        if (by_thread) ended(); else destroyed(0);
        EXPECT(!launch(quick, NULL)); CHECK(cuStreamSynchronize, NULL); EXPECT(*value == N); CHECK(cuEventQuery, mark);
    }
    CHECK(cuMemFree_v2, managed); CHECK(cuEventDestroy_v2, mark);
}

/* More launches behind a host function than may be under way. */
static volatile int called;
static void host(void *data) { called++; }
static void behind(void) {
    void *s; CHECK(cuStreamCreate, &s, 1); EXPECT(!launch(some, s)); CHECK(cuLaunchHostFunc, s, host, NULL);
    for (int i = 0; i < 1100; i++) EXPECT(!launch(quick, s));
    CHECK(cuStreamSynchronize, s); EXPECT(called == 1); CHECK(cuStreamDestroy_v2, s);
}

/* Asked over and over, a short kernel is done long before a long one in another stream, and so is its event. */
static void polled(void) {
    void *a, *b, *f, *event; CHECK(cuModuleGetFunction, &f, module, "long_muxflow_us10000000_f10");
    CHECK(cuStreamCreate, &a, 1); CHECK(cuStreamCreate, &b, 1); CHECK(cuEventCreate, &event, 2);
    EXPECT(!launch(f, a)); GIVES(600, cuStreamQuery, a); usleep(100000); GIVES(600, cuStreamQuery, a);
    double began = now(); int r;
    EXPECT(!launch(quick, b)); CHECK(cuEventRecord, event, b);
    while ((r = CALL(cuStreamQuery, b)) == 600) EXPECT(now() - began < 8);
    EXPECT(r == 0); CHECK(cuEventQuery, event); GIVES(600, cuStreamQuery, a);
    EXPECT(!launch(quick, b)); CHECK(cuEventRecord, event, b);
    while ((r = CALL(cuEventQuery, event)) == 600) EXPECT(now() - began < 8);
    EXPECT(r == 0); GIVES(600, cuStreamQuery, a);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    start();
    if (!strcmp(what, "gone")) gone();
    else if (!strcmp(what, "behind")) behind();
    else if (!strcmp(what, "polled")) polled();
    else return 2;
    puts("ok");
    return 0;
}
