/* A driver-API client with its own declarations: it checks answers, holds memory, or measures. */
#define _GNU_SOURCE
#include <stdint.h>
#include <time.h>
#include <unistd.h>

#include "call.h"

typedef unsigned long long ptr;

static const char *PTX =
"//\n.version 7.0\n.target sm_75\n.address_size 64\n"
".visible .global .align 4 .u32 counter = 7;\n"
".visible .entry vadd(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)\n{\n"
" .reg .pred %p<2>; .reg .b32 %r<6>; .reg .f32 %f<4>; .reg .b64 %rd<11>;\n"
" ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [c]; ld.param.u32 %r2, [n];\n"
" mov.u32 %r3, %ctaid.x; mov.u32 %r4, %ntid.x; mov.u32 %r5, %tid.x; mad.lo.s32 %r1, %r3, %r4, %r5;\n"
" setp.ge.s32 %p1, %r1, %r2; @%p1 bra $done;\n"
" cvta.to.global.u64 %rd4, %rd1; mul.wide.s32 %rd5, %r1, 4; add.s64 %rd6, %rd4, %rd5;\n"
" cvta.to.global.u64 %rd7, %rd2; add.s64 %rd8, %rd7, %rd5; ld.global.f32 %f1, [%rd8]; ld.global.f32 %f2, [%rd6];\n"
" add.f32 %f3, %f2, %f1; cvta.to.global.u64 %rd9, %rd3; add.s64 %rd10, %rd9, %rd5; st.global.f32 [%rd10], %f3;\n"
"$done: ret;\n}\n"
/* Sum of a block through shared memory and a barrier, then one atomic. */
".visible .entry blocksum(.param .u64 a, .param .u64 out)\n{\n"
" .reg .pred %p<3>; .reg .b32 %r<12>; .reg .b64 %rd<8>; .shared .align 4 .b8 tile[1024];\n"
" ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x;\n"
" mad.lo.u32 %r4, %r2, %r3, %r1; mul.wide.u32 %rd3, %r4, 4; add.u64 %rd4, %rd1, %rd3; ld.global.u32 %r5, [%rd4];\n"
" mov.u32 %r6, tile; shl.b32 %r7, %r1, 2; add.u32 %r8, %r6, %r7; st.shared.u32 [%r8], %r5; bar.sync 0;\n"
" shr.u32 %r9, %r3, 1;\n"
"$loop: setp.eq.u32 %p1, %r9, 0; @%p1 bra $end; setp.ge.u32 %p2, %r1, %r9; @%p2 bra $skip;\n"
" add.u32 %r10, %r1, %r9; shl.b32 %r10, %r10, 2; add.u32 %r10, %r6, %r10; ld.shared.u32 %r10, [%r10]; ld.shared.u32 %r11, [%r8];\n"
" add.u32 %r11, %r11, %r10; st.shared.u32 [%r8], %r11;\n"
"$skip: bar.sync 0; shr.u32 %r9, %r9, 1; bra $loop;\n"
"$end: setp.ne.u32 %p1, %r1, 0; @%p1 ret; ld.shared.u32 %r11, [tile]; red.global.add.u32 [%rd2], %r11; ret;\n}\n"
".visible .entry wild(.param .u64 a)\n{ .reg .b64 %rd<2>; .reg .b32 %r<2>; ld.param.u64 %rd1, [a]; mov.u32 %r1, 1; st.global.u32 [%rd1], %r1; ret; }\n"
".visible .entry work_muxflow_us1000_f40_o50_i60_b30()\n{ ret; }\n"
".visible .entry hot_muxflow_us1000_f40_o100_i100_b90()\n{ ret; }\n"
".visible .entry tiny_muxflow_us5()\n{ ret; }\n";

static void *module, *vadd;
static void start(void) {
    load("libcuda.so.1");
    void *ctx;
    CHECK(cuInit, 0);
    CHECK(cuDevicePrimaryCtxRetain, &ctx, 0);
    CHECK(cuCtxSetCurrent, ctx);
    CHECK(cuModuleLoadData, &module, PTX);
    CHECK(cuModuleGetFunction, &vadd, module, "vadd");
}
static size_t freely(void) { size_t f, t; CHECK(cuMemGetInfo_v2, &f, &t); return f; }
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9; }

static volatile int host_value, may_go;
static void host_function(void *data) { while (!may_go) usleep(1000); *(int *)data = 42; host_value++; }

static void add(void *stream, ptr a, ptr b, ptr c, int n) {
    void *args[] = {&a, &b, &c, &n};
    CHECK(cuLaunchKernel, vadd, (n + 255) / 256, 1, 1, 256, 1, 1, 0, stream, args, NULL);
}

/* All kinds of memory and work in two streams, of which some is left behind in each round. */
static void counted(void *data) { host_value++; }
static void churn(int rounds) {
    void *s, *tiny; ptr p, q, handle, va; size_t size = 2 << 20; struct { int type, handles, loc, id; void *meta; unsigned char flags[8]; } prop = {1, 1, 1, 0};
    CHECK(cuModuleGetFunction, &tiny, module, "tiny_muxflow_us5"); CHECK(cuStreamCreate, &s, 1);
    for (int i = 0; i < rounds; i++) {
        CHECK(cuMemAlloc_v2, &p, (size_t)(1 + i % 7) << 21); CHECK(cuMemAllocAsync, &q, (size_t)(1 + i % 3) << 20, s);
        CHECK(cuMemCreate, &handle, size, &prop, 0ULL); CHECK(cuMemAddressReserve, &va, size, (size_t)0, 0ULL, 0ULL); CHECK(cuMemMap, va, size, (size_t)0, handle, 0ULL);
        for (int k = 0; k < 50; k++) CHECK(cuLaunchKernel, tiny, 40, 1, 1, 64, 1, 1, 0, k % 2 ? s : NULL, NULL, NULL);
        CHECK(cuMemsetD8Async, q, i, (size_t)1 << 20, s); CHECK(cuMemsetD32Async, va, i, (size_t)64, s); CHECK(cuLaunchHostFunc, s, counted, NULL);
        add(s, va, va, va, 256); if (i % 3 == 0) CHECK(cuCtxSynchronize);
        if (i % 4) CHECK(cuMemFreeAsync, q, s); if (i % 5) CHECK(cuMemFree_v2, p);
        CHECK(cuMemRelease, handle); if (i % 6) { CHECK(cuStreamSynchronize, s); CHECK(cuMemUnmap, va, size); CHECK(cuMemAddressFree, va, size); }
    }
}

static void check(void) {
    enum { N = 5000 };
    size_t before = freely();
    float *x = malloc(N * 4), *y = malloc(N * 4), *z = malloc(N * 4);
    for (int i = 0; i < N; i++) { x[i] = i; y[i] = 0.5f * i; }
    ptr a, b, c;
    CHECK(cuMemAlloc_v2, &a, (size_t)N * 4); CHECK(cuMemAlloc_v2, &b, (size_t)N * 4); CHECK(cuMemAlloc_v2, &c, (size_t)N * 4);
    CHECK(cuMemcpyHtoD_v2, a, x, (size_t)N * 4); CHECK(cuMemcpyHtoD_v2, b, y, (size_t)N * 4);
    add(NULL, a, b, c, N);
    CHECK(cuMemcpyDtoH_v2, z, c, (size_t)N * 4);
    for (int i = 0; i < N; i++) EXPECT(z[i] == x[i] + y[i]);
    /* Barriers, shared memory, atomics. */
    void *sum; CHECK(cuModuleGetFunction, &sum, module, "blocksum");
    unsigned *u = malloc(4096), total = 0, got = 0; ptr out;
    for (int i = 0; i < 1024; i++) total += u[i] = i * 3;
    CHECK(cuMemAlloc_v2, &out, (size_t)4); CHECK(cuMemsetD32_v2, out, 0, (size_t)1); CHECK(cuMemcpyHtoD_v2, a, u, (size_t)4096);
    void *sums[] = {&a, &out};
    CHECK(cuLaunchKernel, sum, 4, 1, 1, 256, 1, 1, 0, NULL, sums, NULL);
    CHECK(cuMemcpyDtoH_v2, &got, out, (size_t)4);
    EXPECT(got == total);
    /* A variable of the module. */
    ptr counter; size_t bytes; CHECK(cuModuleGetGlobal_v2, &counter, &bytes, module, "counter");
    CHECK(cuMemcpyDtoH_v2, &got, counter, (size_t)4); EXPECT(got == 7 && bytes == 4);
    /* A host function is in order with the copies around it. */
    void *s1, *s2, *event; CHECK(cuStreamCreate, &s1, 1); CHECK(cuStreamCreate, &s2, 1); CHECK(cuEventCreate, &event, 0);
    int *pinned; CHECK(cuMemHostAlloc, &pinned, (size_t)64, 0); pinned[0] = pinned[1] = 0;
    CHECK(cuLaunchHostFunc, s1, host_function, &pinned[0]);
    CHECK(cuMemcpyHtoDAsync_v2, out, &pinned[0], (size_t)4, s1);
    CHECK(cuEventRecord, event, s1); CHECK(cuStreamWaitEvent, s2, event, 0);
    CHECK(cuMemcpyDtoHAsync_v2, &pinned[1], out, (size_t)4, s2);
    EXPECT(CALL(cuStreamQuery, s2) == 600); may_go = 1;
    CHECK(cuStreamSynchronize, s2); EXPECT(pinned[1] == 42);
    /* To memory that the driver does not know a copy is waited for. */
    int seen = 0; CHECK(cuMemcpyDtoHAsync_v2, &seen, out, (size_t)4, s2); EXPECT(seen == 42);
    CHECK(cuMemFreeHost, pinned);
    /* Times of events are device times. */
    void *work, *e1, *e2; CHECK(cuModuleGetFunction, &work, module, "work_muxflow_us1000_f40_o50_i60_b30");
    CHECK(cuEventCreate, &e1, 0); CHECK(cuEventCreate, &e2, 0);
    CHECK(cuEventRecord, e1, s1);
    for (int i = 0; i < 20; i++) CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, s1, NULL, NULL);
    CHECK(cuEventRecord, e2, s1); CHECK(cuEventSynchronize, e2);
    float ms; CHECK(cuEventElapsedTime, &ms, e1, e2); EXPECT(ms > 19.9 && ms < 5000.0);
    /* A captured graph does it again. */
    void *graph, *exec; CHECK(cuMemsetD8_v2, c, 0, (size_t)N * 4);
    CHECK(cuMemcpyHtoD_v2, a, x, (size_t)N * 4);
    CHECK(cuStreamBeginCapture_v2, s1, 0); add(s1, a, b, c, N); CHECK(cuStreamEndCapture, s1, &graph);
    CHECK(cuMemcpyDtoH_v2, z, c, (size_t)N * 4); EXPECT(z[10] == 0);
    CHECK(cuGraphInstantiateWithFlags, &exec, graph, 0ULL); CHECK(cuGraphLaunch, exec, s1); CHECK(cuStreamSynchronize, s1);
    CHECK(cuMemcpyDtoH_v2, z, c, (size_t)N * 4); EXPECT(z[10] == x[10] + y[10]);
    CHECK(cuGraphExecDestroy, exec); CHECK(cuGraphDestroy, graph);
    /* Stream-ordered, managed and virtual memory. */
    ptr p; CHECK(cuMemAllocAsync, &p, (size_t)8 << 20, s1); CHECK(cuMemsetD8Async, p, 1, (size_t)8 << 20, s1);
    EXPECT(before - freely() >= (8 << 20)); CHECK(cuMemFreeAsync, p, s1); CHECK(cuStreamSynchronize, s1);
    CHECK(cuMemAllocManaged, &p, (size_t)4096, 1); *(int *)p = 5; CHECK(cuMemcpyDtoH_v2, &got, p, (size_t)4); EXPECT(got == 5);
    CHECK(cuMemFree_v2, p);
    struct { int type, handles, loc, id; void *meta; unsigned char flags[8]; } prop = {1, 1, 1, 0};
    ptr handle, va; CHECK(cuMemCreate, &handle, (size_t)4 << 20, &prop, 0ULL);
    CHECK(cuMemAddressReserve, &va, (size_t)4 << 20, (size_t)0, 0ULL, 0ULL); CHECK(cuMemMap, va, (size_t)4 << 20, (size_t)0, handle, 0ULL);
    CHECK(cuMemRelease, handle); CHECK(cuMemsetD32_v2, va, 9, (size_t)16); CHECK(cuMemcpyDtoH_v2, &got, va, (size_t)4); EXPECT(got == 9);
    CHECK(cuMemUnmap, va, (size_t)4 << 20); CHECK(cuMemAddressFree, va, (size_t)4 << 20);
    /* Errors. */
    EXPECT(CALL(cuMemAlloc_v2, &p, (size_t)1 << 40) == 2); EXPECT(CALL(cuMemFree_v2, (ptr)0x1234) == 1);
    EXPECT(CALL(cuModuleGetFunction, &p, module, "nobody") == 500); CHECK(cuStreamDestroy_v2, s2); EXPECT(CALL(cuStreamSynchronize, s2) == 400);
    CHECK(cuMemFree_v2, a); CHECK(cuMemFree_v2, b); CHECK(cuMemFree_v2, c); CHECK(cuMemFree_v2, out);
    EXPECT(freely() == before);
    puts("ok");
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "check";
    if (!strcmp(what, "version")) { lib = dlopen("libcuda.so.1", RTLD_NOW); int v = 0; CALL(cuDriverGetVersion, &v); printf("%d\n", v); return 0; }
    if (!strcmp(what, "devices")) { /* What cuInit gives, and the UUIDs of the devices. */
        int count = 0; unsigned char uuid[16]; load("libcuda.so.1"); printf("%d", CALL(cuInit, 0)); CALL(cuDeviceGetCount, &count);
        for (int d = 0; d < count; d++) { CHECK(cuDeviceGetUuid, uuid, d); printf(" "); for (int i = 0; i < 16; i++) printf("%02x", uuid[i]); }
        puts(""); return 0; }
    if (!strcmp(what, "late")) { /* Initialises, and makes a context when a line comes in. */
        void *context; char line[16]; load("libcuda.so.1"); CHECK(cuInit, 0); puts("waits"); fflush(stdout);
        fgets(line, sizeof line, stdin); printf("%d\n", CALL(cuDevicePrimaryCtxRetain, &context, 0)); return 0; }
    start();
    if (!strcmp(what, "pair")) { /* With a context on the second GPU too: what waiting gives on both, or on each where it differs. */
        void *other, *own; char line[16]; int a, b; CHECK(cuCtxGetCurrent, &own); CHECK(cuDevicePrimaryCtxRetain, &other, 1);
        puts("pushed"); fflush(stdout); fgets(line, sizeof line, stdin); a = CALL(cuCtxSynchronize); CHECK(cuCtxSetCurrent, other); b = CALL(cuCtxSynchronize);
        if (a == b) printf("%d\n", a); else printf("%d %d\n", a, b);
        return 0; }
    if (!strcmp(what, "check")) { check(); return 0; }
    if (!strcmp(what, "churn")) { churn(atoi(argv[2])); return 0; }
    void *tiny; CHECK(cuModuleGetFunction, &tiny, module, "tiny_muxflow_us5");
    if (!strcmp(what, "hold")) { /* Allocates, launches and frees until it is killed; some of it lives longer than the rest. */
        ptr kept[8] = {0}; puts("up"); fflush(stdout);
        for (unsigned i = 0;; i++) {
            ptr p; size_t size = (size_t)(1 + i % 7) << 21;
            int r = CALL(cuMemAlloc_v2, &p, size);
            if (r) { printf("failed %d\n", r); return 3; }
            for (int k = 0; k < 50; k++) if ((r = CALL(cuLaunchKernel, tiny, 40, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL))) { printf("failed %d\n", r); return 3; }
            if (i % 3 == 0 && (r = CALL(cuCtxSynchronize))) { printf("failed %d\n", r); return 3; }
            if (i % 5 == 0) { ptr old = kept[i / 5 % 8]; kept[i / 5 % 8] = p; p = old; }
            if (p && (r = CALL(cuMemFree_v2, p))) { printf("failed %d\n", r); return 3; }
        }
    }
    if (!strcmp(what, "wild") || !strcmp(what, "odd")) { /* Stores four bytes outside of all memory, or at an address that is not aligned. */
        ptr bad = 0x10; void *f, *args[] = {&bad}; CHECK(cuModuleGetFunction, &f, module, "wild");
        if (*what == 'o') { CHECK(cuMemAlloc_v2, &bad, (size_t)64); bad += 2; }
        CHECK(cuLaunchKernel, f, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL); printf("%d\n", CALL(cuCtxSynchronize)); return 0; }
    if (!strcmp(what, "heir")) { /* Holds memory, and so does nobody else: its child only has what fork gave it. */
        ptr p; CHECK(cuMemAlloc_v2, &p, (size_t)64 << 20); pid_t child = fork();
        if (child) { printf("%d\n", child); fflush(stdout); }
        for (;;) pause(); }
    if (!strcmp(what, "again")) { /* As busy, and once more for each line that comes in. */
        void *work, *e1, *e2; int n = atoi(argv[2]); float ms; char line[16];
        CHECK(cuModuleGetFunction, &work, module, "work_muxflow_us1000_f40_o50_i60_b30"); CHECK(cuEventCreate, &e1, 0); CHECK(cuEventCreate, &e2, 0);
        do {
            CHECK(cuEventRecord, e1, NULL); for (int i = 0; i < n; i++) CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL);
            CHECK(cuEventRecord, e2, NULL); CHECK(cuEventSynchronize, e2); CHECK(cuEventElapsedTime, &ms, e1, e2);
            printf("%f\n", ms); fflush(stdout);
        } while (fgets(line, sizeof line, stdin));
        return 0; }
    if (!strcmp(what, "facts")) { /* SMs, compute capability, MiB. */
        int sms, major, minor; size_t bytes; CHECK(cuDeviceGetAttribute, &sms, 16, 0); CHECK(cuDeviceGetAttribute, &major, 75, 0);
        CHECK(cuDeviceGetAttribute, &minor, 76, 0); CHECK(cuDeviceTotalMem_v2, &bytes, 0); printf("%d %d.%d %zu\n", sms, major, minor, bytes >> 20); return 0; }
    if (!strcmp(what, "busy") || !strcmp(what, "hot")) { /* Milliseconds of device time for n kernels of 1 ms, in one stream; hot ones draw all the power there is. */
        void *work, *e1, *e2; int n = atoi(argv[2]); float ms;
        CHECK(cuModuleGetFunction, &work, module, *what == 'h' ? "hot_muxflow_us1000_f40_o100_i100_b90" : "work_muxflow_us1000_f40_o50_i60_b30");
        CHECK(cuEventCreate, &e1, 0); CHECK(cuEventCreate, &e2, 0); CHECK(cuEventRecord, e1, NULL);
        for (int i = 0; i < n; i++) CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL);
        CHECK(cuEventRecord, e2, NULL); CHECK(cuEventSynchronize, e2); CHECK(cuEventElapsedTime, &ms, e1, e2);
        printf("%f\n", ms); return 0; }
    if (!strcmp(what, "push")) { /* Pushes n kernels of 1 ms and waits for none of them; what waiting gives is said for a line that comes in. */
        void *work; int n = atoi(argv[2]); char line[16];
        CHECK(cuModuleGetFunction, &work, module, "work_muxflow_us1000_f40_o50_i60_b30");
        for (int i = 0; i < n; i++) CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL);
        puts("pushed"); fflush(stdout); fgets(line, sizeof line, stdin); printf("%d\n", CALL(cuCtxSynchronize)); return 0; }
    if (!strcmp(what, "steps")) { /* Milliseconds of device time for n kernels of 1 ms, each waited for. */
        void *work, *e1, *e2; float ms; CHECK(cuModuleGetFunction, &work, module, "work_muxflow_us1000_f40_o50_i60_b30"); CHECK(cuEventCreate, &e1, 0); CHECK(cuEventCreate, &e2, 0);
        CHECK(cuEventRecord, e1, NULL);
        for (int n = atoi(argv[2]); n; n--) { CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL); CHECK(cuCtxSynchronize); }
        CHECK(cuEventRecord, e2, NULL); CHECK(cuEventSynchronize, e2); CHECK(cuEventElapsedTime, &ms, e1, e2); printf("%f\n", ms); return 0; }
    if (!strcmp(what, "march")) { /* Kernels of 1 ms, each waited for; a line for every fifth. */
        void *work; CHECK(cuModuleGetFunction, &work, module, "work_muxflow_us1000_f40_o50_i60_b30");
        for (unsigned i = 0;; i++) { CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL); CHECK(cuCtxSynchronize); if (i % 5 == 0) { puts("on"); fflush(stdout); } } }
    if (!strcmp(what, "bursts")) { /* Works and rests by turns, never twice the same. */
        void *work; CHECK(cuModuleGetFunction, &work, module, "work_muxflow_us1000_f40_o50_i60_b30"); puts("up"); fflush(stdout);
        for (unsigned i = 1;; i++) {
            for (unsigned n = 5 + i * 17 % 41; n; n--) CHECK(cuLaunchKernel, work, 40, 1, 1, 256, 1, 1, 0, NULL, NULL, NULL);
            CHECK(cuCtxSynchronize); usleep(i * 29 % 53 * 1000); } }
    if (!strcmp(what, "upload")) { /* Copies to the device and nothing back. */
        size_t size = 64 << 20; void *host; ptr p; CHECK(cuMemHostAlloc, &host, size, 0); CHECK(cuMemAlloc_v2, &p, size); puts("up"); fflush(stdout);
        for (;;) { CHECK(cuMemcpyHtoDAsync_v2, p, host, size, NULL); CHECK(cuCtxSynchronize); } }
    if (!strcmp(what, "take")) { /* What allocations of so many MiB give, one after the other. */
        for (int i = 2; i < argc; i++) { ptr p; printf("%d ", CALL(cuMemAlloc_v2, &p, (size_t)atoi(argv[i]) << 20)); }
        puts(""); return 0; }
    if (!strcmp(what, "launch") || !strcmp(what, "arguments")) { /* Nanoseconds of one launch, in a burst that fits the queue, and of launch with wait: of a kernel without arguments, or of vadd with four. */
        int (*launch)() = sym("cuLaunchKernel"); int (*wait)() = sym("cuCtxSynchronize"); int bursts = atoi(argv[2]), n = 40 * 64; double best = 1e9, sum = 0;
        ptr a, b, c; CHECK(cuMemAlloc_v2, &a, (size_t)n * 4); CHECK(cuMemAlloc_v2, &b, (size_t)n * 4); CHECK(cuMemAlloc_v2, &c, (size_t)n * 4);
        void *args[] = {&a, &b, &c, &n}, *f = *what == 'a' ? vadd : tiny, **given = *what == 'a' ? args : NULL;
        for (int i = 0; i < bursts; i++) {
            double t = now(); for (int k = 0; k < 900; k++) launch(f, 40, 1, 1, 64, 1, 1, 0, NULL, given, NULL);
            double ns = (now() - t) / 900 * 1e9; sum += ns; if (ns < best) best = ns; wait(); }
        double t = now(); for (int i = 0; i < 200; i++) { launch(f, 40, 1, 1, 64, 1, 1, 0, NULL, given, NULL); wait(); }
        printf("%.0f %.0f %.1f\n", best, sum / bursts, (now() - t) / 200 * 1e6); return 0; }
    return 2;
}
