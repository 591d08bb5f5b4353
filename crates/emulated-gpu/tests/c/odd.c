/* Odd but legal uses of the driver interface, and illegal ones: what comes back is what cuda.h says.
   `all` checks within one process; `fatbin FILE` adds with a kernel of one; `lend` and `borrow` share memory and an event between two. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#include "call.h"

typedef unsigned long long ptr;

/* The slow kernel is there to be unfinished when a program looks: on a busy machine that may be late. */
static const char *PTX = ".version 7.0\n.target sm_75\n.address_size 64\n"
".visible .entry slow_muxflow_us2000000() { ret; }\n.visible .entry quick_muxflow_us5() { ret; }\n"
".visible .entry high_muxflow_us1000_f40_o50_i60_b30() { ret; }\n"
/* Counts to n, which takes this machine a while, and stores it. */
".visible .entry count(.param .u64 p, .param .u32 n)\n{ .reg .pred %q; .reg .b32 %r<3>; .reg .b64 %rd;\n"
" ld.param.u64 %rd, [p]; ld.param.u32 %r1, [n]; mov.u32 %r2, 0;\n"
"$again: add.u32 %r2, %r2, 1; setp.lt.u32 %q, %r2, %r1; @%q bra $again; st.global.u32 [%rd], %r2; ret; }\n"
/* Sums the squares of the lanes of a warp in shared memory; the lanes wait for one another between the steps. */
".visible .entry lanes(.param .u64 p)\n{ .reg .pred %q; .reg .b32 %r<8>; .reg .b64 %rd; .shared .align 4 .b8 tile[256];\n"
" ld.param.u64 %rd, [p]; mov.u32 %r1, %tid.x; mul.lo.u32 %r2, %r1, %r1; shl.b32 %r3, %r1, 2; mov.u32 %r4, tile; add.u32 %r3, %r3, %r4;\n"
" st.shared.u32 [%r3], %r2; mov.u32 %r5, 0; st.shared.u32 [%r3+128], %r5; mov.u32 %r5, 64; bar.warp.sync 0xffffffff;\n"
"$step: add.u32 %r6, %r3, %r5; ld.shared.u32 %r6, [%r6]; bar.warp.sync 0xffffffff; ld.shared.u32 %r2, [%r3]; add.u32 %r2, %r2, %r6; st.shared.u32 [%r3], %r2;\n"
" bar.warp.sync 0xffffffff; shr.u32 %r5, %r5, 1; setp.ge.u32 %q, %r5, 4; @%q bra $step;\n"
" setp.eq.u32 %q, %r1, 0; @%q st.global.u32 [%rd], %r2; ret; }\n";
static void *context, *module, *slow, *quick, *high;
static void start(void) {
    load("libcuda.so.1");
    CHECK(cuInit, 0); CHECK(cuDevicePrimaryCtxRetain, &context, 0); CHECK(cuCtxSetCurrent, context);
    CHECK(cuModuleLoadData, &module, PTX);
    CHECK(cuModuleGetFunction, &slow, module, "slow_muxflow_us2000000");
    CHECK(cuModuleGetFunction, &quick, module, "quick_muxflow_us5");
    CHECK(cuModuleGetFunction, &high, module, "high_muxflow_us1000_f40_o50_i60_b30");
}
static int launch(void *f, void *s) { return CALL(cuLaunchKernel, f, 40, 1, 1, 64, 1, 1, 0, s, NULL, NULL); }

static void contexts(void) {
    void *a, *b, *out = NULL, *event, *stream; ptr p;
    CHECK(cuCtxPopCurrent_v2, &out); EXPECT(out == context);
    GIVES(201, cuCtxPopCurrent_v2, &out); GIVES(201, cuMemAlloc_v2, &p, (size_t)4); GIVES(201, cuCtxSynchronize);
    CHECK(cuCtxGetCurrent, &out); EXPECT(out == NULL);
    CHECK(cuCtxCreate_v2, &a, 0, 0); CHECK(cuCtxCreate_v2, &b, 0, 0);
    GIVES(201, cuCtxEnablePeerAccess, b, 0); GIVES(1, cuCtxEnablePeerAccess, a, 1);
    GIVES(217, cuCtxEnablePeerAccess, a, 0); GIVES(705, cuCtxDisablePeerAccess, a);
    CHECK(cuEventCreate, &event, 0); CHECK(cuMemAlloc_v2, &p, (size_t)512);
    /* The one below is ended by somebody else while it lies on the stack. */
    CHECK(cuCtxDestroy_v2, a); GIVES(201, cuCtxPushCurrent_v2, a);
    CHECK(cuCtxPopCurrent_v2, &out); EXPECT(out == b);
    GIVES(709, cuMemAlloc_v2, &p, (size_t)4); GIVES(709, cuCtxSynchronize);
    CHECK(cuCtxPopCurrent_v2, &out); CHECK(cuCtxPushCurrent_v2, context);
    /* An event of one context cannot be recorded by a stream of another. */
    CHECK(cuStreamCreate, &stream, 1); GIVES(400, cuEventRecord, event, stream);
    CHECK(cuCtxDestroy_v2, b); GIVES(201, cuCtxDestroy_v2, b); GIVES(201, cuCtxDestroy_v2, context);
    CHECK(cuStreamDestroy_v2, stream);
    int n; CHECK(cuDeviceGetCount, &n);
    if (n > 1) { /* Peers: one way, once. */
        CHECK(cuCtxCreate_v2, &a, 0, 1); CHECK(cuCtxEnablePeerAccess, context, 0);
        GIVES(704, cuCtxEnablePeerAccess, context, 0);
        CHECK(cuCtxDisablePeerAccess, context); GIVES(705, cuCtxDisablePeerAccess, context);
        CHECK(cuCtxDestroy_v2, a);
    }
    CHECK(cuCtxGetCurrent, &out); EXPECT(out == context);
    GIVES(1, cuMemFree_v2, p); /* It went with its context. */
    /* Attached twice: the second end is the end. */
    CHECK(cuCtxCreate_v2, &a, 0, 0); CHECK(cuCtxAttach, &out, 0); EXPECT(out == a);
    CHECK(cuCtxDetach, a); CHECK(cuCtxSynchronize); CHECK(cuCtxDetach, a); GIVES(201, cuCtxDetach, a);
    CHECK(cuCtxGetCurrent, &out); EXPECT(out == context);
}

/* What a call has read when it returns, and what lies beyond an allocation. */
static void uploads(void) {
    void *count, *lanes; ptr p, a, b; unsigned n = 60000, got[1024], mine[1024], sum = 0;
    CHECK(cuModuleGetFunction, &count, module, "count"); CHECK(cuModuleGetFunction, &lanes, module, "lanes");
    CHECK(cuMemAlloc_v2, &p, sizeof mine); void *args[] = {&p, &n};
    for (int i = 0; i < 1024; i++) mine[i] = i;
    CHECK(cuLaunchKernel, count, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL);
    CHECK(cuMemcpyHtoD_v2, p, mine, sizeof mine); memset(mine, 0xff, sizeof mine);
    CHECK(cuMemcpyDtoH_v2, got, p, sizeof got); for (unsigned i = 0; i < 1024; i++) EXPECT(got[i] == i);
    CHECK(cuLaunchKernel, count, 1, 1, 1, 1, 1, 1, 0, NULL, args, NULL); CHECK(cuMemcpyDtoH_v2, got, p, (size_t)8); EXPECT(got[0] == n && got[1] == 1);
    CHECK(cuLaunchKernel, lanes, 1, 1, 1, 32, 1, 1, 0, NULL, args, NULL); CHECK(cuMemcpyDtoH_v2, got, p, (size_t)4);
    for (unsigned i = 0; i < 32; i++) sum += i * i;
    EXPECT(got[0] == sum); CHECK(cuMemFree_v2, p);
    CHECK(cuMemAlloc_v2, &a, (size_t)512); CHECK(cuMemAlloc_v2, &b, (size_t)512);
    GIVES(1, cuMemcpyHtoD_v2, a < b ? a : b, mine, (size_t)1024); GIVES(1, cuMemsetD8_v2, a < b ? a : b, 0, (size_t)1024); CHECK(cuMemFree_v2, a); CHECK(cuMemFree_v2, b);
}

static int elsewhere(void *(*run)(void *), void *with) {
    pthread_t t; void *r; pthread_create(&t, NULL, run, with); pthread_join(t, &r); return (int)(intptr_t)r;
}

/* A capture that nobody can end any more is over. */
static void *leaves_a_capture(void *unused) {
    CHECK(cuCtxSetCurrent, context); CHECK(cuStreamBeginCapture_v2, (void *)2, 0); return NULL;
}
static void abandoned(void) {
    void *s, *other, *e, *a, *g; ptr p; int status;
    CHECK(cuStreamCreate, &s, 1); CHECK(cuStreamCreate, &other, 1); CHECK(cuEventCreate, &e, 2);
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuEventRecord, e, s); CHECK(cuStreamWaitEvent, other, e, 0); CHECK(cuStreamDestroy_v2, s);
    CHECK(cuMemAlloc_v2, &p, (size_t)512); CHECK(cuMemFree_v2, p); CHECK(cuStreamIsCapturing, other, &status); EXPECT(status == 0); EXPECT(!launch(quick, other));
    /* Without one that only joined, it is spoiled, and ends as such. */
    CHECK(cuStreamCreate, &s, 1); CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuEventRecord, e, s); CHECK(cuStreamWaitEvent, other, e, 0); CHECK(cuStreamDestroy_v2, other);
    GIVES(901, cuStreamEndCapture, s, &g); CHECK(cuMemAlloc_v2, &p, (size_t)512); CHECK(cuMemFree_v2, p); CHECK(cuStreamDestroy_v2, s);
    /* With its context, and with its thread. */
    CHECK(cuCtxCreate_v2, &a, 0, 0); CHECK(cuStreamCreate, &s, 1); CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuCtxDestroy_v2, a);
    CHECK(cuMemAlloc_v2, &p, (size_t)512); CHECK(cuMemFree_v2, p);
    EXPECT(elsewhere(leaves_a_capture, NULL) == 0); CHECK(cuMemAlloc_v2, &p, (size_t)512); CHECK(cuMemFree_v2, p);
}

/* More of them, one after the other, than there are places or descriptors. */
struct prop { int type, handles, loc, id; void *meta; unsigned char flags[8]; };
static void many(void) {
    void *s1, *s2, *e; struct prop prop = {1, 1, 1, 0}; ptr handle, va; size_t size = 2 << 20, free_before, free_after, total;
    CHECK(cuMemGetInfo_v2, &free_before, &total); CHECK(cuMemAddressReserve, &va, size, (size_t)0, 0ULL, 0ULL);
    for (int i = 0; i < 3000; i++) {
        CHECK(cuMemCreate, &handle, size, &prop, 0ULL); CHECK(cuMemMap, va, size, (size_t)0, handle, 0ULL); CHECK(cuMemRelease, handle); CHECK(cuMemUnmap, va, size);
    }
    /* Only where it was reserved, where nothing is, and given back as it came. */
    ptr other, p; CHECK(cuMemCreate, &handle, size, &prop, 0ULL); CHECK(cuMemCreate, &other, size, &prop, 0ULL); CHECK(cuMemAlloc_v2, &p, 2 * size);
    CHECK(cuMemMap, va, size, (size_t)0, handle, 0ULL); GIVES(1, cuMemMap, va, size, (size_t)0, other, 0ULL); GIVES(1, cuMemMap, va + size, size, (size_t)0, other, 0ULL);
    GIVES(1, cuMemMap, (p + size - 1) & ~(ptr)(size - 1), size, (size_t)0, other, 0ULL); GIVES(1, cuMemMap, va, size, ~(size_t)0, other, 0ULL);
    GIVES(1, cuMemAddressFree, va, size); CHECK(cuMemUnmap, va, size); GIVES(1, cuMemAddressFree, va, size / 2); GIVES(1, cuMemAddressFree, p, 2 * size);
    CHECK(cuMemRelease, handle); CHECK(cuMemRelease, other); CHECK(cuMemFree_v2, p); GIVES(2, cuMemAllocAsync, &p, ~(size_t)0, NULL);
    CHECK(cuMemAddressFree, va, size); CHECK(cuMemGetInfo_v2, &free_after, &total); EXPECT(free_after == free_before);
    CHECK(cuStreamCreate, &s1, 1); CHECK(cuStreamCreate, &s2, 1);
    for (int i = 0; i < 70000; i++) {
        EXPECT(!launch(quick, s1)); CHECK(cuEventCreate, &e, 0); CHECK(cuEventRecord, e, s1); CHECK(cuStreamWaitEvent, s2, e, 0); CHECK(cuEventDestroy_v2, e);
    }
    CHECK(cuCtxSynchronize);
}

/* Memory by descriptor between two processes: it lives as long as one of them has it. */
static void imported(int fd, ptr *handle, ptr *va) {
    CHECK(cuMemImportFromShareableHandle, handle, (void *)(intptr_t)fd, 1);
    CHECK(cuMemAddressReserve, va, (size_t)2 << 20, (size_t)0, 0ULL, 0ULL); CHECK(cuMemMap, *va, (size_t)2 << 20, (size_t)0, *handle, 0ULL);
}
static unsigned word(ptr at) { unsigned got = 0; CHECK(cuMemcpyDtoH_v2, &got, at, (size_t)4); return got; }
static void descriptor(void) {
    int to[2], from[2], fd = -1; char go = 1, path[64]; size_t size = 2 << 20; ptr h1, h2, a1, a2; struct prop prop = {1, 1, 1, 0};
    EXPECT(!pipe(to) && !pipe(from)); pid_t owner = getpid(), child = fork(); start();
    if (!child) {
        EXPECT(read(to[0], &fd, sizeof fd) == sizeof fd); snprintf(path, sizeof path, "/proc/%d/fd/%d", owner, fd);
        fd = open(path, O_RDWR); EXPECT(fd >= 0); imported(fd, &h1, &a1); imported(fd, &h2, &a2); close(fd);
        EXPECT(word(a1) == 11 && word(a2) == 11); CHECK(cuMemsetD32_v2, a1 + 4, 12, (size_t)1);
        CHECK(cuMemUnmap, a1, size); CHECK(cuMemRelease, h1); EXPECT(write(from[1], &go, 1) == 1);
        EXPECT(read(to[0], &go, 1) == 1); EXPECT(word(a2) == 11 && word(a2 + 4) == 12); /* The owner has let it go. */
        CHECK(cuMemUnmap, a2, size); CHECK(cuMemRelease, h2); _exit(0);
    }
    CHECK(cuMemCreate, &h1, size, &prop, 0ULL); CHECK(cuMemExportToShareableHandle, &fd, h1, 1, 0ULL);
    CHECK(cuMemAddressReserve, &a1, size, (size_t)0, 0ULL, 0ULL); CHECK(cuMemMap, a1, size, (size_t)0, h1, 0ULL); CHECK(cuMemsetD32_v2, a1, 11, (size_t)1);
    CHECK(cuCtxSynchronize); EXPECT(write(to[1], &fd, sizeof fd) == sizeof fd); EXPECT(read(from[0], &go, 1) == 1);
    EXPECT(word(a1) == 11 && word(a1 + 4) == 12); /* The other has let one of its two go. */
    close(fd); CHECK(cuMemUnmap, a1, size); CHECK(cuMemRelease, h1); EXPECT(write(to[1], &go, 1) == 1);
    int status = 1; EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

/* Milliseconds of ten kernels of 1 ms in a context with so many SMs. */
static float in_context(unsigned sms) {
    unsigned list[] = {0, sms}; void *c, *m, *f, *e1, *e2; float ms; CHECK(cuCtxCreate_v3, &c, list, 1, 0, 0);
    CHECK(cuModuleLoadData, &m, PTX); CHECK(cuModuleGetFunction, &f, m, "high_muxflow_us1000_f40_o50_i60_b30"); CHECK(cuEventCreate, &e1, 0); CHECK(cuEventCreate, &e2, 0);
    CHECK(cuEventRecord, e1, NULL); for (int i = 0; i < 10; i++) EXPECT(!launch(f, NULL)); CHECK(cuEventRecord, e2, NULL);
    CHECK(cuEventSynchronize, e2); CHECK(cuEventElapsedTime, &ms, e1, e2); CHECK(cuCtxDestroy_v2, c); return ms;
}

/* The least of three: what this machine is away counts, too. */
static float least(unsigned sms) {
    float all = in_context(sms); for (int i = 0; i < 2; i++) { float ms = in_context(sms); if (ms < all) all = ms; }
    return all;
}

/* Each thread has a default stream of its own, and takes it along. */
static void *in_own_stream(void *unused) {
    CHECK(cuCtxSetCurrent, context);
    return (void *)(intptr_t)CALL(cuLaunchKernel_ptsz, quick, 40, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL);
}
static void threads(void) {
    for (int i = 0; i < 2200; i++) { pthread_t t; void *r; EXPECT(!pthread_create(&t, NULL, in_own_stream, NULL)); pthread_join(t, &r); EXPECT(r == NULL); }
    /* So does a stream that is destroyed while it works. */
    for (int i = 0; i < 2200; i++) { void *s; CHECK(cuStreamCreate, &s, 1); EXPECT(!launch(quick, s)); CHECK(cuStreamDestroy_v2, s); }
}

static void events(void) {
    void *e, *f, *t, *s1, *s2; float ms;
    GIVES(1, cuEventCreate, &e, 4); GIVES(1, cuEventCreate, &e, 8); GIVES(1, cuEventCreate, NULL, 0);
    CHECK(cuEventCreate, &e, 0); CHECK(cuEventCreate, &f, 0); CHECK(cuEventCreate, &t, 2);
    CHECK(cuStreamCreate, &s1, 1); CHECK(cuStreamCreate, &s2, 1);
    CHECK(cuEventQuery, e); CHECK(cuEventSynchronize, e); CHECK(cuStreamWaitEvent, s1, e, 0); /* never recorded */
    GIVES(400, cuEventElapsedTime, &ms, e, f);
    CHECK(cuEventRecord, t, s1); CHECK(cuEventRecord, e, s1); GIVES(400, cuEventElapsedTime, &ms, t, e);
    /* Across streams: the second stands still until the first has come there. */
    EXPECT(!launch(slow, s1)); CHECK(cuEventRecord, f, s1); CHECK(cuStreamWaitEvent, s2, f, 0); EXPECT(!launch(quick, s2));
    GIVES(600, cuStreamQuery, s2); GIVES(600, cuEventQuery, f); GIVES(600, cuEventElapsedTime, &ms, e, f);
    CHECK(cuStreamSynchronize, s2); CHECK(cuEventQuery, f);
    CHECK(cuEventElapsedTime, &ms, e, f); EXPECT(ms >= 2000.0 && ms < 60000.0);
    CHECK(cuEventElapsedTime, &ms, f, e); EXPECT(ms <= -2000.0);
    /* Recorded again while somebody waits for the first time: that one counts. */
    EXPECT(!launch(slow, s1)); CHECK(cuEventRecord, f, s1); CHECK(cuStreamWaitEvent, s2, f, 0);
    EXPECT(!launch(slow, s1)); CHECK(cuEventRecord, f, s1);
    CHECK(cuStreamSynchronize, s2); GIVES(600, cuEventQuery, f);
    /* Destroyed while it is pending: the work goes on. */
    CHECK(cuEventDestroy_v2, f); GIVES(400, cuEventDestroy_v2, f); GIVES(400, cuEventRecord, f, s1);
    CHECK(cuStreamSynchronize, s1);
    GIVES(1, cuStreamWaitEvent, s1, e, 1); GIVES(1, cuEventRecordWithFlags, e, s1, 1);
    CHECK(cuStreamDestroy_v2, s1); CHECK(cuStreamDestroy_v2, s2); GIVES(400, cuStreamDestroy_v2, s2); GIVES(400, cuStreamQuery, s1);
    CHECK(cuEventSynchronize, e); /* its stream is gone, its mark stays */
}

static volatile int called; static volatile int seen_code, inner_code;
static void callback(void *stream, int status, void *data) {
    size_t f, t; seen_code = status; inner_code = CALL(cuMemGetInfo_v2, &f, &t); called += (int)(intptr_t)data;
}
static void function(void *data) { inner_code = CALL(cuCtxSynchronize); called += (int)(intptr_t)data; }
static void callbacks(void) {
    void *s; CHECK(cuStreamCreate, &s, 0);
    called = 0; EXPECT(!launch(slow, s));
    CHECK(cuStreamAddCallback, s, callback, (void *)1, 0); CHECK(cuLaunchHostFunc, s, function, (void *)10);
    EXPECT(called == 0); GIVES(1, cuStreamAddCallback, s, NULL, NULL, 0); GIVES(1, cuLaunchHostFunc, s, NULL, NULL);
    CHECK(cuStreamSynchronize, s); EXPECT(called == 11 && seen_code == 0 && inner_code == 800);
    /* A stream that goes away does what it was told. */
    EXPECT(!launch(slow, s)); CHECK(cuStreamAddCallback, s, callback, (void *)100, 0); CHECK(cuStreamDestroy_v2, s);
    for (int i = 0; i < 2000 && called != 111; i++) usleep(5000);
    EXPECT(called == 111);
}

static void *from_another_thread(void *s) { void *g; return (void *)(intptr_t)CALL(cuStreamEndCapture, s, &g); }
static void *allocates(void *mode) {
    ptr p; int m = (int)(intptr_t)mode; CHECK(cuCtxSetCurrent, context);
    CHECK(cuThreadExchangeStreamCaptureMode, &m);
    int r = CALL(cuMemAlloc_v2, &p, (size_t)512);
    if (!r) CHECK(cuMemFree_v2, p);
    return (void *)(intptr_t)r;
}
static void spoiled(void *s) { /* Only its end is left, and gives nothing. */
    int status; void *g = &g; CHECK(cuStreamIsCapturing, s, &status); EXPECT(status == 2);
    EXPECT(launch(quick, s) == 901); GIVES(901, cuStreamEndCapture, s, &g); EXPECT(g == NULL);
    CHECK(cuStreamIsCapturing, s, &status); EXPECT(status == 0);
}
static void capture(void) {
    void *s, *other, *blocking, *e, *outside, *g, *g2; int status; ptr p, q; size_t n;
    CHECK(cuStreamCreate, &s, 1); CHECK(cuStreamCreate, &other, 1); CHECK(cuStreamCreate, &blocking, 0);
    CHECK(cuEventCreate, &e, 2); CHECK(cuEventCreate, &outside, 2); CHECK(cuMemAlloc_v2, &q, (size_t)512);
    GIVES(401, cuStreamEndCapture, s, &g); GIVES(900, cuStreamBeginCapture_v2, NULL, 0); GIVES(1, cuStreamBeginCapture_v2, s, 3);
    /* What is not allowed inside. */
    CHECK(cuStreamBeginCapture_v2, s, 0); GIVES(401, cuStreamBeginCapture_v2, s, 0); GIVES(900, cuStreamSynchronize, s); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 0); GIVES(900, cuStreamQuery, s); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 0); GIVES(900, cuStreamAddCallback, s, callback, NULL, 0); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 0); GIVES(900, cuMemAlloc_v2, &p, (size_t)512); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 1); GIVES(900, cuMemFree_v2, q); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 2); GIVES(900, cuCtxSynchronize); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuEventRecord, e, s); GIVES(900, cuEventQuery, outside); spoiled(s);
    GIVES(907, cuEventQuery, e); GIVES(907, cuEventSynchronize, e); GIVES(907, cuStreamWaitEvent, other, e, 0);
    CHECK(cuStreamIsCapturing, other, &status); EXPECT(status == 0);
    /* Relaxed: allocating is allowed, and another thread may end it. */
    CHECK(cuStreamBeginCapture_v2, s, 2); CHECK(cuMemAlloc_v2, &p, (size_t)512); CHECK(cuMemFree_v2, p);
    EXPECT(elsewhere(from_another_thread, s) == 0);
    CHECK(cuStreamBeginCapture_v2, s, 1); EXPECT(elsewhere(from_another_thread, s) == 908);
    EXPECT(elsewhere(allocates, (void *)0) == 0); CHECK(cuStreamEndCapture, s, &g);
    CHECK(cuStreamBeginCapture_v2, s, 0); EXPECT(elsewhere(allocates, (void *)1) == 0); EXPECT(elsewhere(allocates, (void *)0) == 900); spoiled(s);
    /* Borders: what was recorded outside stays there, the legacy stream does not look in. */
    CHECK(cuEventRecord, outside, other); CHECK(cuStreamBeginCapture_v2, s, 0); GIVES(905, cuStreamWaitEvent, s, outside, 0); spoiled(s);
    EXPECT(!launch(quick, NULL)); CHECK(cuStreamBeginCapture_v2, blocking, 0); EXPECT(launch(quick, NULL) == 906); spoiled(blocking);
    CHECK(cuStreamBeginCapture_v2, blocking, 2); GIVES(906, cuStreamIsCapturing, NULL, &status);
    CHECK(cuStreamIsCapturing, blocking, &status); EXPECT(status == 1); CHECK(cuStreamEndCapture, blocking, &g); CHECK(cuGraphDestroy, g);
    /* Fork and join. */
    CHECK(cuStreamBeginCapture_v2, s, 0); EXPECT(!launch(quick, s)); CHECK(cuEventRecord, e, s);
    CHECK(cuStreamWaitEvent, other, e, 0); EXPECT(!launch(quick, other)); GIVES(904, cuStreamEndCapture, s, &g);
    CHECK(cuStreamIsCapturing, other, &status); EXPECT(status == 0);
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuEventRecord, e, s); CHECK(cuStreamWaitEvent, other, e, 0); GIVES(903, cuStreamEndCapture, other, &g); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuEventRecord, e, s); CHECK(cuStreamBeginCapture_v2, other, 0);
    GIVES(902, cuStreamWaitEvent, other, e, 0); spoiled(other); spoiled(s);
    CHECK(cuStreamBeginCapture_v2, s, 0); EXPECT(!launch(quick, s)); CHECK(cuEventRecord, e, s);
    CHECK(cuStreamWaitEvent, other, e, 0); EXPECT(!launch(quick, other)); CHECK(cuEventRecord, e, other);
    CHECK(cuStreamWaitEvent, s, e, 0); EXPECT(!launch(quick, s)); CHECK(cuStreamEndCapture, s, &g);
    CHECK(cuGraphGetNodes, g, NULL, &n); EXPECT(n == 3); CHECK(cuGraphGetEdges, g, NULL, NULL, &n); EXPECT(n == 3);
    /* An event as a node of the graph. */
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuEventRecordWithFlags, outside, s, 1); CHECK(cuStreamWaitEvent, s, outside, 1);
    CHECK(cuStreamEndCapture, s, &g2); CHECK(cuGraphGetNodes, g2, NULL, &n); EXPECT(n == 2);
    CHECK(cuGraphDestroy, g); CHECK(cuGraphDestroy, g2); CHECK(cuMemFree_v2, q);
    CHECK(cuStreamDestroy_v2, s); CHECK(cuStreamDestroy_v2, other); CHECK(cuStreamDestroy_v2, blocking);
}

static void graphs(void) {
    void *g, *h, *a, *b, *c, *exec, *exec2, *s, *nodes[4]; size_t n = 4; ptr p;
    struct { int result; void *node, *from; } info;
    CHECK(cuStreamCreate, &s, 1); CHECK(cuGraphCreate, &g, 0);
    CHECK(cuGraphAddEmptyNode, &a, g, NULL, (size_t)0); CHECK(cuGraphAddEmptyNode, &b, g, &a, (size_t)1);
    GIVES(1, cuGraphAddDependencies, g, &a, &a, (size_t)1); GIVES(1, cuGraphAddDependencies, g, &a, &b, (size_t)1);
    GIVES(1, cuGraphRemoveDependencies, g, &b, &a, (size_t)1);
    CHECK(cuGraphAddDependencies, g, &b, &a, (size_t)1); GIVES(1, cuGraphInstantiateWithFlags, &exec, g, 0ULL); /* a circle */
    CHECK(cuGraphRemoveDependencies, g, &b, &a, (size_t)1);
    CHECK(cuGraphInstantiateWithFlags, &exec, g, 0ULL); CHECK(cuGraphInstantiateWithFlags, &exec2, g, 0ULL);
    /* Changed after it was made: the old executable does not know. */
    CHECK(cuGraphClone, &h, g); CHECK(cuGraphExecUpdate_v2, exec, h, &info); EXPECT(info.result == 0);
    CHECK(cuGraphAddEmptyNode, &c, h, NULL, (size_t)0);
    GIVES(910, cuGraphExecUpdate_v2, exec, h, &info); EXPECT(info.result == 2 && info.node == NULL);
    CHECK(cuGraphDestroyNode, c); CHECK(cuGraphGetNodes, h, nodes, &n); EXPECT(n == 2);
    CHECK(cuGraphRemoveDependencies, h, &nodes[0], &nodes[1], (size_t)1);
    GIVES(910, cuGraphExecUpdate_v2, exec, h, &info); EXPECT(info.result == 2 && info.node == nodes[1]);
    CHECK(cuGraphAddDependencies, h, &nodes[0], &nodes[1], (size_t)1); CHECK(cuGraphDestroyNode, nodes[1]);
    CHECK(cuMemAlloc_v2, &p, (size_t)64);
    struct { ptr to; size_t pitch; unsigned value, element; size_t width, height; } set = {p, 0, 7, 4, 16, 1};
    CHECK(cuGraphAddMemsetNode, &c, h, &nodes[0], (size_t)1, &set, context);
    GIVES(910, cuGraphExecUpdate_v2, exec, h, &info); EXPECT(info.result == 3 && info.node == c);
    CHECK(cuGraphDestroy, g); GIVES(400, cuGraphInstantiateWithFlags, &exec2, g, 0ULL);
    CHECK(cuGraphLaunch, exec, s); CHECK(cuGraphLaunch, exec2, s); CHECK(cuGraphExecDestroy, exec); GIVES(400, cuGraphLaunch, exec, s);
    unsigned got[16]; CHECK(cuGraphInstantiateWithFlags, &exec, h, 0ULL); CHECK(cuGraphLaunch, exec, s); CHECK(cuStreamSynchronize, s);
    CHECK(cuMemcpyDtoH_v2, got, p, (size_t)64); EXPECT(got[0] == 7 && got[15] == 7);
    CHECK(cuGraphExecDestroy, exec); CHECK(cuGraphExecDestroy, exec2); CHECK(cuGraphDestroy, h); CHECK(cuMemFree_v2, p);
    /* With memory of its own it can be there once, and keeps its nodes. */
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuMemAllocAsync, &p, (size_t)4096, s); CHECK(cuMemFreeAsync, p, s); CHECK(cuStreamEndCapture, s, &g);
    n = 4; CHECK(cuGraphGetNodes, g, nodes, &n); EXPECT(n == 2); GIVES(1, cuGraphDestroyNode, nodes[0]);
    CHECK(cuGraphInstantiateWithFlags, &exec, g, 0ULL); GIVES(1, cuGraphInstantiateWithFlags, &exec2, g, 0ULL);
    CHECK(cuGraphExecDestroy, exec); CHECK(cuGraphInstantiateWithFlags, &exec, g, 0ULL); CHECK(cuGraphLaunch, exec, s);
    CHECK(cuStreamSynchronize, s); CHECK(cuGraphExecDestroy, exec); CHECK(cuGraphDestroy, g); CHECK(cuStreamDestroy_v2, s);
}

struct box { size_t x, y, z, lod; unsigned type; const void *host; ptr device; void *array, *reserved; size_t pitch, height; };
/* What nodes were told can be read back, and set again. */
struct kernel { void *function; unsigned grid[3], block[3], shared; void **params, **extra, *kernel, *context; };
static void told(void) {
    void *g, *h, *n, *m, *c, *exec, *s, *count, *e1, *e2, *out, *copy; ptr p; unsigned first = 10, second = 20, got[4] = {0};
    CHECK(cuMemAlloc_v2, &p, (size_t)64); CHECK(cuGraphCreate, &g, 0); CHECK(cuStreamCreate, &s, 1); CHECK(cuEventCreate, &e1, 2); CHECK(cuEventCreate, &e2, 2);
    CHECK(cuModuleGetFunction, &count, module, "count"); void *args[] = {&p, &first}; struct kernel k = {count, {1, 1, 1}, {1, 1, 1}, 0, args}, back; memset(&back, 0xee, sizeof back);
    CHECK(cuGraphAddKernelNode_v2, &n, g, NULL, (size_t)0, &k); first = 11; CHECK(cuGraphKernelNodeGetParams, n, &back);
    EXPECT(back.function == count && back.block[2] == 1 && *(ptr *)back.params[0] == p && *(unsigned *)back.params[1] == 10 && (intptr_t)back.context == (intptr_t)0xeeeeeeeeeeeeeeee);
    CHECK(cuGraphKernelNodeGetParams_v2, n, &back); EXPECT(back.context == NULL && *(unsigned *)back.params[1] == 10);
    void *others[] = {back.params[0], &second}; back.params = others; CHECK(cuGraphKernelNodeSetParams_v2, n, &back);
    struct { ptr to; size_t pitch; unsigned value, element; size_t width, height; } set = {p + 4, 8, 7, 4, 1, 1}, set2; CHECK(cuGraphAddMemsetNode, &m, g, NULL, (size_t)0, &set, context);
    CHECK(cuGraphMemsetNodeGetParams, m, &set2); EXPECT(!memcmp(&set, &set2, sizeof set)); GIVES(1, cuGraphMemsetNodeGetParams, n, &set2); GIVES(1, cuGraphKernelNodeGetParams, m, &back);
    struct { void *f, *data; } host = {function, (void *)1}, host2; CHECK(cuGraphAddHostNode, &c, g, NULL, (size_t)0, &host); CHECK(cuGraphHostNodeGetParams, c, &host2); EXPECT(!memcmp(&host, &host2, sizeof host));
    /* A copy that was captured, put into the graph as it was read. */
    struct { struct box src, dst; size_t width, height, depth; } box; void *order[] = {n, m};
    CHECK(cuStreamBeginCapture_v2, s, 0); CHECK(cuMemcpyDtoDAsync_v2, p + 8, p, (size_t)8, s); CHECK(cuStreamEndCapture, s, &h); size_t one = 1; CHECK(cuGraphGetNodes, h, &copy, &one);
    CHECK(cuGraphMemcpyNodeGetParams, copy, &box); EXPECT(box.src.device == p && box.dst.device == p + 8 && box.width == 8); CHECK(cuGraphAddMemcpyNode, &c, g, order, (size_t)2, &box, context);
    /* Events, and the same node in a clone. */
    CHECK(cuGraphAddEventRecordNode, &m, g, &c, (size_t)1, e1); CHECK(cuGraphEventRecordNodeGetEvent, m, &out); EXPECT(out == e1); GIVES(1, cuGraphEventWaitNodeGetEvent, m, &out); CHECK(cuGraphEventRecordNodeSetEvent, m, e2); CHECK(cuGraphEventRecordNodeGetEvent, m, &out); EXPECT(out == e2);
    CHECK(cuGraphDestroy, h); CHECK(cuGraphClone, &h, g); CHECK(cuGraphNodeFindInClone, &copy, m, h); CHECK(cuGraphEventRecordNodeGetEvent, copy, &out); EXPECT(copy != m && out == e2); GIVES(1, cuGraphNodeFindInClone, &out, m, g);
    called = 0; CHECK(cuGraphInstantiateWithFlags, &exec, g, 0ULL); CHECK(cuGraphExecEventRecordNodeSetEvent, exec, m, e1); GIVES(1, cuGraphExecEventWaitNodeSetEvent, exec, m, e1);
    CHECK(cuGraphLaunch, exec, s); CHECK(cuStreamSynchronize, s); CHECK(cuMemcpyDtoH_v2, got, p, (size_t)16); EXPECT(got[0] == 20 && got[1] == 7 && got[2] == 20 && got[3] == 7 && called == 1);
    CHECK(cuGraphExecDestroy, exec); CHECK(cuGraphDestroy, g); CHECK(cuGraphDestroy, h); CHECK(cuStreamDestroy_v2, s); CHECK(cuMemFree_v2, p);
}

static void memory(void) {
    ptr p, q; size_t pitch; void *s, *pool, *first; size_t big = (size_t)8 << 20;
    GIVES(1, cuMemAlloc_v2, &p, (size_t)0); GIVES(1, cuMemAllocManaged, &p, (size_t)0, 1); GIVES(1, cuMemAllocManaged, &p, (size_t)64, 4);
    GIVES(1, cuMemAllocManaged, &p, (size_t)64, 3); GIVES(1, cuMemAllocPitch_v2, &p, &pitch, (size_t)100, (size_t)4, 3);
    CHECK(cuMemFree_v2, (ptr)0); CHECK(cuMemAlloc_v2, &p, (size_t)1000);
    GIVES(1, cuMemFree_v2, p + 8); GIVES(1, cuMemsetD32_v2, p + 2, 1, (size_t)4); GIVES(1, cuMemsetD16_v2, p + 1, 1, (size_t)4);
    GIVES(1, cuMemsetD8_v2, p, 1, (size_t)1001); CHECK(cuMemFree_v2, p); GIVES(1, cuMemFree_v2, p);
    /* Managed memory at odd addresses, from both sides. */
    CHECK(cuStreamCreate, &s, 1); CHECK(cuMemAllocManaged, &p, (size_t)4099, 1);
    memset((char *)p + 1, 3, 4098); CHECK(cuMemsetD8_v2, p + 3, 9, (size_t)4095);
    CHECK(cuMemcpy, p + 1, p + 4093, (size_t)6); CHECK(cuCtxSynchronize); char *c = (char *)p; EXPECT(c[1] == 9 && c[5] == 9 && c[6] == 3 && c[7] == 9);
    CHECK(cuStreamAttachMemAsync, s, p, (size_t)0, 4); CHECK(cuStreamAttachMemAsync, s, p, (size_t)4099, 1); GIVES(1, cuStreamAttachMemAsync, s, p, (size_t)64, 1);
    GIVES(1, cuStreamAttachMemAsync, NULL, p, (size_t)0, 4); GIVES(1, cuMemcpy, p + 4090, p, (size_t)10); CHECK(cuMemFree_v2, p);
    CHECK(cuMemAlloc_v2, &p, (size_t)64); GIVES(1, cuStreamAttachMemAsync, s, p, (size_t)0, 1); CHECK(cuMemFree_v2, p);
    /* Registered memory: no overlap, by its start. */
    char *m = malloc(16384); CHECK(cuMemHostRegister_v2, m, (size_t)8192, 0); GIVES(712, cuMemHostRegister_v2, m + 4096, (size_t)8192, 0);
    GIVES(712, cuMemHostRegister_v2, m, (size_t)8192, 0); GIVES(713, cuMemHostUnregister, m + 4096); GIVES(1, cuMemFreeHost, m);
    CHECK(cuMemHostUnregister, m); GIVES(713, cuMemHostUnregister, m);
    CHECK(cuMemHostRegister_v2, m + 8192, (size_t)4096, 0); GIVES(712, cuMemHostRegister_v2, m, (size_t)16384, 0); CHECK(cuMemHostUnregister, m + 8192);
    /* Attributes of a pointer that nobody knows. */
    int type = 5, managed = 5; unsigned which[] = {2, 8}; void *to[] = {&type, &managed};
    GIVES(1, cuPointerGetAttribute, &type, 2, (ptr)(uintptr_t)m); CHECK(cuPointerGetAttributes, 2, which, to, (ptr)(uintptr_t)m); EXPECT(type == 0 && managed == 0);
    free(m);
    /* Pools: trimmed, they keep what is in use and what was said. */
    struct { int alloc, handles, type, id; void *security; size_t max; unsigned short usage; unsigned char rest[54]; } props = {1, 0, 1, 0};
    unsigned long long keep = ~0ULL, reserved, used;
    CHECK(cuDeviceGetDefaultMemPool, &first, 0); GIVES(1, cuMemPoolDestroy, first);
    CHECK(cuMemPoolCreate, &pool, &props); CHECK(cuMemPoolSetAttribute, pool, 4, &keep); GIVES(1, cuMemPoolSetAttribute, pool, 6, &keep);
    CHECK(cuMemAllocFromPoolAsync, &p, big, pool, s); CHECK(cuMemAllocFromPoolAsync, &q, big, pool, s); CHECK(cuMemFreeAsync, q, s); CHECK(cuStreamSynchronize, s);
    CHECK(cuMemPoolGetAttribute, pool, 5, &reserved); CHECK(cuMemPoolGetAttribute, pool, 7, &used); EXPECT(reserved >= 2 * big && used >= big && used < 2 * big);
    CHECK(cuMemPoolTrimTo, pool, (size_t)0); CHECK(cuMemPoolGetAttribute, pool, 5, &reserved); EXPECT(reserved >= big && reserved < 2 * big);
    CHECK(cuMemsetD8Async, p, 1, big, s); CHECK(cuDeviceSetMemPool, 0, pool);
    /* Destroyed while some of it is in use: that is freed when it is freed. */
    CHECK(cuMemPoolDestroy, pool); GIVES(400, cuMemPoolTrimTo, pool, (size_t)0); GIVES(400, cuMemAllocFromPoolAsync, &q, big, pool, s);
    CHECK(cuMemAllocAsync, &q, big, s); CHECK(cuMemFreeAsync, q, s); CHECK(cuMemFreeAsync, p, s); CHECK(cuStreamSynchronize, s); GIVES(1, cuMemFreeAsync, p, s);
    CHECK(cuStreamDestroy_v2, s);
}

static void copies(void) {
    enum { W = 7, H = 5, D = 3, P = 16, R = 8 };
    unsigned char from[P * R * 4], to[W * H * D]; struct { struct box src, dst; size_t width, height, depth; } c; ptr p;
    for (size_t i = 0; i < sizeof from; i++) from[i] = (unsigned char)(i * 37);
    CHECK(cuMemAlloc_v2, &p, sizeof from); CHECK(cuMemcpyHtoD_v2, p, from, sizeof from);
    memset(&c, 0, sizeof c); c.src.type = 2; c.src.device = p; c.src.pitch = P; c.src.height = R; c.src.x = 3; c.src.y = 2; c.src.z = 1;
    c.dst.type = 1; c.dst.host = to; c.dst.pitch = W; c.dst.height = H; c.width = W; c.height = H; c.depth = D;
    memset(to, 0, sizeof to); CHECK(cuMemcpy3D_v2, &c);
    for (int z = 0; z < D; z++) for (int y = 0; y < H; y++) for (int x = 0; x < W; x++)
        EXPECT(to[(z * H + y) * W + x] == from[((z + 1) * R + y + 2) * P + x + 3]);
    c.src.pitch = 9; GIVES(1, cuMemcpy3D_v2, &c); c.src.pitch = P; c.src.height = 6; GIVES(1, cuMemcpy3D_v2, &c); c.src.height = R;
    c.src.lod = 1; GIVES(1, cuMemcpy3D_v2, &c); c.src.lod = 0; c.src.z = 2; GIVES(1, cuMemcpy3D_v2, &c); /* beyond the end */
    c.src.z = 1; c.src.type = 9; GIVES(1, cuMemcpy3D_v2, &c); c.src.type = 2; c.depth = 0; CHECK(cuMemcpy3D_v2, &c);
    c.depth = (size_t)1 << 60; c.height = (size_t)1 << 60; GIVES(1, cuMemcpy3D_v2, &c);
    c.src.height = c.dst.height = 0; c.src.pitch = c.dst.pitch = 0; c.src.x = c.src.y = 0; c.width = 1; GIVES(1, cuMemcpy3D_v2, &c);
    /* Nodes of a graph keep to their memory too. */
    void *g, *node, *exec; struct { ptr to; size_t pitch; unsigned value, element; size_t width, height; } set = {p, 16, 7, 4, 4, 32}; CHECK(cuGraphCreate, &g, 0);
    memset(&c, 0, sizeof c); c.src.type = 2; c.src.device = p; c.src.pitch = P; c.dst.type = 1; c.dst.host = to; c.dst.pitch = W; c.width = W; c.height = H; c.depth = 1;
    CHECK(cuGraphAddMemcpyNode, &node, g, NULL, (size_t)0, &c, context); CHECK(cuGraphInstantiateWithFlags, &exec, g, 0ULL);
    c.src.device = p + sizeof from - P; GIVES(1, cuGraphAddMemcpyNode, &node, g, NULL, (size_t)0, &c, context);
    GIVES(1, cuGraphMemcpyNodeSetParams, node, &c); GIVES(1, cuGraphExecMemcpyNodeSetParams, exec, node, &c, context);
    CHECK(cuGraphAddMemsetNode, &node, g, NULL, (size_t)0, &set, context); set.height = 33; GIVES(1, cuGraphAddMemsetNode, &node, g, NULL, (size_t)0, &set, context);
    set.height = (size_t)1 << 62; GIVES(1, cuGraphMemsetNodeSetParams, node, &set); set.height = 1; set.to = p + 2; GIVES(1, cuGraphMemsetNodeSetParams, node, &set);
    CHECK(cuGraphExecDestroy, exec); CHECK(cuGraphDestroy, g); CHECK(cuMemFree_v2, p);
}

static void launches(void) {
    void *module, *f; ptr p;
    GIVES(1, cuLaunchKernel, quick, 0, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL); GIVES(1, cuLaunchKernel, quick, 1, 1, 1, 2048, 1, 1, 0, NULL, NULL, NULL);
    GIVES(1, cuLaunchKernel, quick, 1, 1, 1, 64, 1, 1, 1 << 20, NULL, NULL, NULL); GIVES(400, cuLaunchKernel, NULL, 1, 1, 1, 64, 1, 1, 0, NULL, NULL, NULL);
    GIVES(200, cuModuleLoadData, &module, "neither text nor code"); GIVES(218, cuModuleLoadData, &module, ".version 7.0\n.target sm_75\n.address_size 64\n.entry broken( {");
    CHECK(cuModuleLoadData, &module, PTX); GIVES(500, cuModuleGetGlobal_v2, &p, NULL, module, "nothing");
    CHECK(cuModuleUnload, module); GIVES(400, cuModuleGetFunction, &f, module, "quick_muxflow_us5"); GIVES(400, cuModuleUnload, module);
}

/* Milliseconds of 20 kernels of 1 ms in a stream of this priority, beside another one of the other. */
static float beside(int mine, int others) {
    void *a, *b, *e1, *e2; float ms; int least, greatest, got;
    CHECK(cuCtxGetStreamPriorityRange, &least, &greatest); EXPECT(least == 0 && greatest < 0);
    CHECK(cuStreamCreateWithPriority, &a, 1, mine); CHECK(cuStreamCreateWithPriority, &b, 1, others);
    CHECK(cuStreamGetPriority, a, &got); EXPECT(got == (mine < greatest ? greatest : mine > least ? least : mine));
    CHECK(cuEventCreate, &e1, 0); CHECK(cuEventCreate, &e2, 0);
    for (int i = 0; i < 60; i++) EXPECT(!launch(high, b));
    CHECK(cuEventRecord, e1, a); for (int i = 0; i < 20; i++) EXPECT(!launch(high, a)); CHECK(cuEventRecord, e2, a);
    CHECK(cuEventSynchronize, e2); CHECK(cuEventElapsedTime, &ms, e1, e2);
    CHECK(cuStreamSynchronize, b); CHECK(cuStreamDestroy_v2, a); CHECK(cuStreamDestroy_v2, b);
    return ms;
}

/* Gives memory and an event away; records it behind slow work, then waits for the other's record. */
static void lend(void) {
    unsigned char handles[128]; ptr p; void *s, *event, *plain; int got = 0, answer;
    CHECK(cuStreamCreate, &s, 1); CHECK(cuMemAlloc_v2, &p, (size_t)4096); CHECK(cuMemsetD32_v2, p, 1, (size_t)1024);
    CHECK(cuEventCreate, &event, 6); CHECK(cuEventCreate, &plain, 2); GIVES(400, cuIpcGetEventHandle, handles + 64, plain);
    CHECK(cuIpcGetMemHandle, handles, p); CHECK(cuIpcGetEventHandle, handles + 64, event);
    struct { char bytes[64]; } mine; memcpy(&mine, handles + 64, 64);
    int (*open_event)(void **, __typeof__(mine)) = sym("cuIpcOpenEventHandle"); EXPECT(open_event(&plain, mine) == 201);
    CHECK(cuEventQuery, event);
    EXPECT(!launch(slow, s)); CHECK(cuMemsetD32Async, p, 42, (size_t)1024, s); CHECK(cuEventRecord, event, s);
    GIVES(600, cuEventQuery, event);
    EXPECT(fwrite(handles, 1, 128, stdout) == 128); fflush(stdout);
    EXPECT(fread(&answer, 4, 1, stdin) == 1); /* The other has recorded. */
    CHECK(cuStreamWaitEvent, s, event, 0); CHECK(cuMemcpyDtoHAsync_v2, &got, p + 4, (size_t)4, s); CHECK(cuStreamSynchronize, s);
    EXPECT(got == 43); CHECK(cuEventSynchronize, event); CHECK(cuEventDestroy_v2, event); CHECK(cuMemFree_v2, p);
    fprintf(stderr, "ok\n");
}
static void borrow(void) {
    struct { char bytes[64]; } memory, shared; ptr p; void *s, *event; int got = 0, go = 1;
    EXPECT(fread(&memory, 1, 64, stdin) == 64 && fread(&shared, 1, 64, stdin) == 64);
    int (*open_memory)(ptr *, __typeof__(memory), unsigned) = sym("cuIpcOpenMemHandle_v2");
    int (*open_event)(void **, __typeof__(shared)) = sym("cuIpcOpenEventHandle");
    EXPECT(open_memory(&p, memory, 1) == 0); EXPECT(open_event(&event, shared) == 0); EXPECT(open_event(&event, memory) == 1);
    CHECK(cuStreamCreate, &s, 1); CHECK(cuStreamWaitEvent, s, event, 0); CHECK(cuMemcpyDtoHAsync_v2, &got, p, (size_t)4, s); CHECK(cuStreamSynchronize, s);
    EXPECT(got == 42); CHECK(cuEventQuery, event); GIVES(1, cuMemFree_v2, p);
    EXPECT(!launch(slow, s)); CHECK(cuMemsetD32Async, p + 4, 43, (size_t)1, s); CHECK(cuEventRecord, event, s);
    EXPECT(fwrite(&go, 4, 1, stdout) == 1); fflush(stdout);
    CHECK(cuEventSynchronize, event); CHECK(cuIpcCloseMemHandle, p); GIVES(1, cuIpcCloseMemHandle, p); CHECK(cuEventDestroy_v2, event);
}

/* A kernel that adds, out of a fat binary: from its file and from memory. */
static void fatbin(const char *path) {
    enum { N = 1000 }; void *modules[2], *f; static char bytes[1 << 16]; float x[N], y[N], z[N]; ptr a, b, c; int n = N;
    FILE *file = fopen(path, "rb"); EXPECT(file && fread(bytes, 1, sizeof bytes, file) > 64); fclose(file);
    struct { unsigned magic, version; void *data, *more; } wrapper = {0x466243b1, 1, bytes, NULL};
    CHECK(cuModuleLoad, &modules[0], path); CHECK(cuModuleLoadData, &modules[1], &wrapper);
    for (int i = 0; i < N; i++) { x[i] = i; y[i] = 2 * i; }
    CHECK(cuMemAlloc_v2, &a, sizeof x); CHECK(cuMemAlloc_v2, &b, sizeof x); CHECK(cuMemAlloc_v2, &c, sizeof x);
    CHECK(cuMemcpyHtoD_v2, a, x, sizeof x); CHECK(cuMemcpyHtoD_v2, b, y, sizeof x); void *args[] = {&a, &b, &c, &n};
    for (int m = 0; m < 2; m++) {
        CHECK(cuModuleGetFunction, &f, modules[m], "vadd"); CHECK(cuMemsetD8_v2, c, 0, sizeof x);
        CHECK(cuLaunchKernel, f, 4, 1, 1, 256, 1, 1, 0, NULL, args, NULL); CHECK(cuMemcpyDtoH_v2, z, c, sizeof x);
        for (int i = 0; i < N; i++) EXPECT(z[i] == 3 * i);
    }
    /* Spoiled in the middle: no kernel that computes comes of it, and nothing falls. */
    for (int i = 100; i < 300; i++) bytes[i] ^= 0x5a;
    int r = CALL(cuModuleLoadData, &modules[0], bytes); EXPECT(r == 0 || r == 200 || r == 218 || r == 300);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "all";
    if (!strcmp(what, "descriptor")) { descriptor(); puts("ok"); return 0; }
    start();
    if (!strcmp(what, "lend")) { lend(); return 0; }
    if (!strcmp(what, "borrow")) { borrow(); return 0; }
    if (!strcmp(what, "beside")) { printf("%f\n", beside(atoi(argv[2]), atoi(argv[3]))); return 0; }
    if (!strcmp(what, "fatbin")) { fatbin(argv[2]); puts("ok"); return 0; }
    if (!strcmp(what, "threads")) { threads(); puts("ok"); return 0; }
    if (!strcmp(what, "many")) { many(); puts("ok"); return 0; }
    contexts(); EXPECT(least(10) > 1.5f * least(40)); uploads(); events(); callbacks(); capture(); abandoned(); graphs(); told(); memory(); copies(); launches();
    puts("ok");
    return 0;
}
