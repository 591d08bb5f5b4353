/* A driver that returns at once: every exported function succeeds and does next to nothing. It is the
 * hardest reference for overhead, and enough for quota, gate and exit tests. The functions that are not
 * written here are added by the test, one line each.
 *
 * Environment: STUB_KERNEL_US makes each launch take that long on the "device" (one queue for all
 * streams); STUB_LOG names a file to which contexts, and launches in flight at their end, are logged. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef uint64_t u64;
#define API __attribute__((visibility("default")))
#define POOL_GRAIN (2ull << 20)

static u64 next_handle = 0x7f0000000000ull;
static u64 fresh(u64 bytes) { return __atomic_fetch_add(&next_handle, (bytes + 511) & ~511ull, __ATOMIC_RELAXED); }

/* ---- the device: a clock that says when all launched work will be done ---- */
static u64 kernel_ns;
static u64 busy_until, *stamp;
static int wide_open = -1;
static u64 launches;
static u64 calls_beside;
static u64 now_ns(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }
static void init_once(void) {
    if (wide_open >= 0) return;
    const char *us = getenv("STUB_KERNEL_US");
    kernel_ns = us ? strtoull(us, 0, 10) * 1000 : 0;
    wide_open = kernel_ns == 0;
    const char *path = getenv("STUB_STAMP");
    int fd = path ? open(path, O_RDWR) : -1;
    if (fd >= 0) { stamp = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0); close(fd); }
}
static u64 enqueue(u64 cost) {
    u64 now = now_ns(), old = __atomic_load_n(&busy_until, __ATOMIC_RELAXED), end;
    do { end = (old > now ? old : now) + cost; } while (!__atomic_compare_exchange_n(&busy_until, &old, end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return end;
}
/* STUB_STAMP: a file of words: when the last launch came, when the last kernel starts, when the last one
 * ends, and how many launches there were. */
static void stamp_launch(u64 end) {
    if (!stamp) return;
    stamp[0] = now_ns();
    stamp[1] = end - kernel_ns;
    stamp[2] = end;
    stamp[3] = launches;
}
static inline int launched(u64 n) {
    launches += n;
    if (__builtin_expect(wide_open != 1, 0)) { init_once(); if (kernel_ns) stamp_launch(enqueue(n * kernel_ns)); }
    return 0;
}
static void wait_until(u64 end) {
    for (;;) { u64 now = now_ns(); if (now >= end) return; u64 d = end - now; struct timespec t = { d / 1000000000, d % 1000000000 }; nanosleep(&t, 0); }
}
static void log_line(const char *what) {
    const char *path = getenv("STUB_LOG");
    if (!path) return;
    char line[128];
    u64 now = now_ns(), end = __atomic_load_n(&busy_until, __ATOMIC_RELAXED);
    int n = snprintf(line, sizeof line, "%s %d in_flight_us %llu launches %llu\n", what, getpid(), end > now ? (unsigned long long)(end - now) / 1000 : 0ull, (unsigned long long)launches);
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (fd >= 0) { if (write(fd, line, n) < 0) abort(); close(fd); }
}

/* ---- initialisation, devices, contexts ---- */
API int cuInit(unsigned f) { (void)f; init_once(); return 0; }
API int cuDriverGetVersion(int *v) { *v = 13040; return 0; }
API int cuDeviceGetCount(int *n) { const char *c = getenv("STUB_DEVICES"); *n = c ? atoi(c) : 1; return 0; }
API int cuDeviceGet(int *d, int i) { *d = i; return 0; }
API int cuDeviceGetUuid_v2(unsigned char *u, int d) { memset(u, 0x11 * (d + 1), 16); return 0; }
API int cuDeviceGetUuid(unsigned char *u, int d) { return cuDeviceGetUuid_v2(u, d); }
API int cuDeviceTotalMem_v2(size_t *b, int d) { (void)d; *b = 16ull << 30; return 0; }
API int cuDeviceTotalMem(unsigned *b, int d) { (void)d; *b = 0xf0000000u; return 0; }
API int cuMemGetInfo_v2(size_t *f, size_t *t) { if (f) *f = 15ull << 30; if (t) *t = 16ull << 30; return 0; }
API int cuMemGetInfo(unsigned *f, unsigned *t) { if (f) *f = 0xe0000000u; if (t) *t = 0xf0000000u; return 0; }
static __thread int current_device;
static __thread u64 current;
API int cuCtxGetDevice(int *d) { *d = current_device; return 0; }
static int ctx_new(u64 *out, int dev) { *out = current = fresh(4096); current_device = dev; log_line("create"); return 0; }
API int cuCtxCreate(u64 *o, unsigned f, int d) { (void)f; return ctx_new(o, d); }
API int cuCtxCreate_v2(u64 *o, unsigned f, int d) { (void)f; return ctx_new(o, d); }
API int cuCtxCreate_v3(u64 *o, void *p, int n, unsigned f, int d) { (void)p; (void)n; (void)f; return ctx_new(o, d); }
API int cuCtxCreate_v4(u64 *o, void *p, unsigned f, int d) { (void)p; (void)f; return ctx_new(o, d); }
API int cuCtxDestroy_v2(u64 c) { (void)c; log_line("destroy"); return 0; }
API int cuCtxDestroy(u64 c) { return cuCtxDestroy_v2(c); }
static struct { u64 context; int n; } attached[64];
API int cuCtxAttach(u64 *o, unsigned f) { (void)f; *o = current; for (int i = 0; i < 64; i++) if (attached[i].context == current || !attached[i].context) { attached[i].context = current; attached[i].n++; break; } return 0; }
API int cuCtxDetach(u64 c) { for (int i = 0; i < 64; i++) if (attached[i].context == c && attached[i].n) { attached[i].n--; return 0; } return cuCtxDestroy_v2(c); }
static int primary_refs;
API int cuDevicePrimaryCtxRetain(u64 *o, int d) { *o = 0x1000 + d; if (primary_refs++ == 0) log_line("create"); return 0; }
API int cuDevicePrimaryCtxRelease_v2(int d) { (void)d; if (--primary_refs == 0) log_line("destroy"); return 0; }
API int cuGreenCtxCreate(u64 *o, void *r, int d, unsigned f) { u64 c; (void)r; (void)f; *o = fresh(512); return cuDevicePrimaryCtxRetain(&c, d); }
API int cuGreenCtxDestroy(u64 g) { (void)g; return cuDevicePrimaryCtxRelease_v2(0); }
API int cuDevicePrimaryCtxRelease(int d) { return cuDevicePrimaryCtxRelease_v2(d); }
API int cuDevicePrimaryCtxReset_v2(int d) { (void)d; if (primary_refs) { primary_refs = 0; log_line("destroy"); } return 0; }
API int cuDevicePrimaryCtxReset(int d) { return cuDevicePrimaryCtxReset_v2(d); }
API int cuCtxSetCurrent(u64 c) { current = c; if (c >= 0x1000 && c < 0x1010) current_device = (int)(c - 0x1000); return 0; }
API int cuCtxPushCurrent_v2(u64 c) { current = c; return 0; }
API int cuCtxPopCurrent_v2(u64 *c) { if (c) *c = current; return 0; }
API int cuCtxGetCurrent(u64 *c) { *c = current; return 0; }
API int cuCtxSynchronize(void) { wait_until(__atomic_load_n(&busy_until, __ATOMIC_RELAXED)); return 0; }
API int cuStreamSynchronize(u64 s) { (void)s; return cuCtxSynchronize(); }
API int cuStreamCreate(u64 *o, unsigned f) { (void)f; *o = fresh(512); return 0; }

/* ---- memory ---- */
API int cuMemAlloc_v2(u64 *o, size_t n) { *o = fresh(n); return 0; }
API int cuMemAlloc(unsigned *o, unsigned n) { static unsigned at = 512; *o = __atomic_fetch_add(&at, (n + 511) & ~511u, __ATOMIC_RELAXED); return 0; }
API int cuMemFree_v2(u64 p) { (void)p; return 0; }
API int cuMemAllocManaged(u64 *o, size_t n, unsigned f) { (void)f; *o = fresh(n); return 0; }
API int cuMemAllocPitch_v2(u64 *o, size_t *p, size_t w, size_t h, unsigned e) { (void)e; *p = (w + 511) & ~(size_t)511; *o = fresh(*p * h); return 0; }
API int cuMemAllocPitch(unsigned *o, unsigned *p, unsigned w, unsigned h, unsigned e) { (void)e; *p = (w + 511) & ~511u; return cuMemAlloc(o, *p * h); }
API int cuMemCreate(u64 *o, size_t n, const void *p, u64 f) { (void)p; (void)f; *o = fresh(n); return 0; }
static u64 mapped[64][2];
API int cuMemMap(u64 a, size_t n, size_t off, u64 h, u64 f) { static unsigned at; (void)n; (void)off; (void)f; mapped[at % 64][0] = a; mapped[at++ % 64][1] = h; return 0; }
API int cuMemRetainAllocationHandle(u64 *o, u64 a) { for (int i = 0; i < 64; i++) if (mapped[i][0] == a) { *o = mapped[i][1]; return 0; } return 1; }
API int cuMemAddressReserve(u64 *o, size_t n, size_t a, u64 at, u64 f) { (void)a; (void)at; (void)f; *o = fresh(n); return 0; }
#define OUT1(name) API int name(u64 *o) { *o = fresh(512); return 0; }
OUT1(cuArrayCreate) OUT1(cuArrayCreate_v2) OUT1(cuArray3DCreate) OUT1(cuArray3DCreate_v2) OUT1(cuMipmappedArrayCreate)
OUT1(cuImportExternalMemory) OUT1(cuMemImportFromShareableHandle) OUT1(cuModuleLoad) OUT1(cuModuleLoadData) OUT1(cuModuleLoadDataEx)
OUT1(cuModuleLoadFatBinary) OUT1(cuLibraryLoadData) OUT1(cuLibraryLoadFromFile) OUT1(cuGraphAddNode)
OUT1(cuGraphAddNode_v2) OUT1(cuGraphAddNode_v3) OUT1(cuGraphCreate)
OUT1(cuEventCreate)
API int cuIpcGetMemHandle(char *h, u64 p) { memset(h, 0, 64); memcpy(h, &p, 8); return 0; }
struct ipc { char b[64]; };
static u64 ipc_bytes = 1 << 20;
API int cuIpcOpenMemHandle_v2(u64 *o, struct ipc h, unsigned f) { (void)h; (void)f; *o = fresh(ipc_bytes); return 0; }
API int cuIpcOpenMemHandle(u64 *o, struct ipc h, unsigned f) { return cuIpcOpenMemHandle_v2(o, h, f); }
API int cuMemGetAddressRange_v2(u64 *b, size_t *n, u64 p) { if (b) *b = p; if (n) *n = ipc_bytes; return 0; }

/* ---- pools: reserve in grains, keep until trimmed. A destroyed one lives on until the last of it is freed,
 * and nothing may be asked of it: STUB_LOG says so if it is. ---- */
enum { POOLS = 8 };
static struct pool { u64 handle, reserved, used; } pools[POOLS] = { { 0x2000 }, { 0x2001 } };
static u64 sizes[4096][3];
static struct pool *pool_of(u64 handle) {
    for (int i = 0; i < POOLS; i++) if (pools[i].handle == handle) return &pools[i];
    log_line("dead pool");
    return 0;
}
static u64 capturing[64];
static int captures(u64 s) { for (int i = 0; i < 64; i++) if (capturing[i] == s + 1) return i + 1; return 0; }
API int cuDeviceGetMemPool(u64 *o, int d) { *o = 0x2000 + d; return 0; }
API int cuDeviceGetDefaultMemPool(u64 *o, int d) { *o = 0x2000 + d; return 0; }
/* The handle of a destroyed pool is given out again at once, as an allocator would. */
API int cuMemPoolCreate(u64 *o, const void *p) {
    (void)p;
    for (int i = 2; i < POOLS; i++) if (!pools[i].handle) { pools[i] = (struct pool){ *o = 0x3000 + 0x1000 * i }; return 0; }
    return 2;
}
API int cuMemPoolGetAttribute(u64 p, int a, u64 *v) { struct pool *q = pool_of(p); if (!q) return 1; *v = a == 5 ? q->reserved : a == 7 ? q->used : 0; return 0; }
static int pool_alloc(u64 *o, size_t n, u64 p, u64 s) {
    if (captures(s)) { *o = fresh(n); return 0; }
    struct pool *q = pool_of(p);
    if (!q) return 1;
    n = (n + 511) & ~(size_t)511;
    *o = fresh(n); q->used += n;
    if (q->used > q->reserved) q->reserved = (q->used + POOL_GRAIN - 1) / POOL_GRAIN * POOL_GRAIN;
    for (int i = 0; i < 4096; i++) if (!sizes[i][0]) { sizes[i][0] = *o; sizes[i][1] = n; sizes[i][2] = (u64)q; break; }
    return 0;
}
API int cuMemAllocAsync(u64 *o, size_t n, u64 s) { return pool_alloc(o, n, 0x2000, s); }
API int cuMemAllocAsync_ptsz(u64 *o, size_t n, u64 s) { return pool_alloc(o, n, 0x2000, s ? s : 2); }
API int cuMemAllocFromPoolAsync(u64 *o, size_t n, u64 p, u64 s) { return pool_alloc(o, n, p, s); }
API int cuMemAllocFromPoolAsync_ptsz(u64 *o, size_t n, u64 p, u64 s) { return pool_alloc(o, n, p, s ? s : 2); }
API int cuMemFreeAsync(u64 a, u64 s) { (void)s; for (int i = 0; i < 4096; i++) if (sizes[i][0] == a) { if (sizes[i][2]) ((struct pool *)sizes[i][2])->used -= sizes[i][1]; sizes[i][0] = 0; } return 0; }
API int cuMemFreeAsync_ptsz(u64 p, u64 s) { return cuMemFreeAsync(p, s); }
API int cuMemPoolTrimTo(u64 p, size_t keep) { struct pool *q = pool_of(p); if (!q) return 1; u64 low = (q->used + POOL_GRAIN - 1) / POOL_GRAIN * POOL_GRAIN; q->reserved = low > keep ? low : keep; return 0; }
API int cuMemPoolDestroy(u64 p) {
    struct pool *q = pool_of(p);
    if (!q) return 1;
    for (int i = 0; i < 4096; i++) if (sizes[i][2] == (u64)q) sizes[i][2] = 0;
    q->handle = 0;
    return 0;
}

/* ---- launches ---- */
API int cuLaunchKernel(void *f) { (void)f; return launched(1); }
API int cuLaunchKernel_ptsz(void *f) { (void)f; return launched(1); }
API int cuLaunchKernelEx(void *c) { (void)c; return launched(1); }
API int cuLaunchKernelEx_ptsz(void *c) { (void)c; return launched(1); }
API int cuLaunchCooperativeKernel(void *f) { (void)f; return launched(1); }
API int cuLaunchCooperativeKernel_ptsz(void *f) { (void)f; return launched(1); }
API int cuLaunchCooperativeKernelMultiDevice(void *l, unsigned n) { (void)l; return launched(n); }
API int cuGraphLaunch(u64 g) { (void)g; return launched(5); }
API int cuGraphLaunch_ptsz(u64 g) { (void)g; return launched(5); }
API int cuLaunch(void *f) { (void)f; return launched(1); }
API int cuLaunchGrid(void *f) { (void)f; return launched(1); }
API int cuLaunchGridAsync(void *f) { (void)f; return launched(1); }
API int cuGraphGetNodes(u64 g, u64 *n, size_t *c) { (void)g; if (!n) { *c = 6; return 0; } for (size_t i = 0; i < *c; i++) n[i] = i + 1; return 0; }
API int cuGraphNodeGetType(u64 n, int *t) { *t = n == 6 ? 1 : 0; return 0; } /* five kernels, one copy */
API u64 stub_launches(void) { return launches; }
API u64 stub_calls_beside(void) { return calls_beside; }

/* ---- memory of graphs: with STUB_GRAPH_KEEPS it stays reserved until it is trimmed ---- */
static u64 graph_planned, graph_reserved;
API int cuGraphAddMemAllocNode(u64 *o, u64 g, void *d, size_t n, char *p) { (void)g; (void)d; (void)n; *o = fresh(512); graph_planned += *(size_t *)(p + 104); return 0; }
static int instantiate(u64 *o) { *o = fresh(512); if (getenv("STUB_GRAPH_KEEPS")) graph_reserved += graph_planned; graph_planned = 0; return 0; }
API int cuGraphInstantiateWithFlags(u64 *o, u64 g, u64 f) { (void)g; (void)f; return instantiate(o); }
API int cuGraphInstantiate(u64 *o, u64 g) { (void)g; return instantiate(o); }
API int cuGraphInstantiate_v2(u64 *o, u64 g) { (void)g; return instantiate(o); }
API int cuGraphInstantiateWithParams(u64 *o, u64 g) { (void)g; return instantiate(o); }
API int cuGraphInstantiateWithParams_ptsz(u64 *o, u64 g) { (void)g; return instantiate(o); }
API int cuDeviceGetGraphMemAttribute(int d, int a, u64 *v) { (void)d; *v = a == 2 ? graph_reserved : 0; return 0; }
API int cuDeviceGraphMemTrim(int d) { (void)d; graph_reserved = 0; return 0; }

/* ---- capture: 0 is the default stream, 2 that of a thread ---- */
API int cuStreamBeginCapture_v2(u64 s, int m) { (void)m; for (int i = 0; i < 64; i++) if (!capturing[i]) { capturing[i] = s + 1; return 0; } return 2; }
API int cuStreamBeginCapture_v2_ptsz(u64 s, int m) { return cuStreamBeginCapture_v2(s ? s : 2, m); }
API int cuStreamEndCapture(u64 s, u64 *g) { int n = captures(s); if (!n) return 401; capturing[n - 1] = 0; if (g) *g = fresh(512); return 0; }
API int cuStreamEndCapture_ptsz(u64 s, u64 *g) { return cuStreamEndCapture(s ? s : 2, g); }
API int cuStreamIsCapturing(u64 s, int *st) { calls_beside++; *st = captures(s) != 0; return 0; }
API int cuStreamGetCaptureInfo(u64 s, int *st, u64 *id) { int n = captures(s); *st = n != 0; if (id) *id = n; return 0; }
API int cuThreadExchangeStreamCaptureMode(int *m) { *m = 0; return 0; }

/* ---- marks: a thread plays the device's writes ---- */
struct mark { u64 at; uint32_t *where, value; };
static struct mark marks[1 << 14];
static volatile u64 mark_in, mark_out;
static void *player(void *x) {
    (void)x;
    for (;;) {
        if (mark_out == __atomic_load_n(&mark_in, __ATOMIC_ACQUIRE)) { usleep(50); continue; }
        struct mark m = marks[mark_out % (1 << 14)];
        wait_until(m.at);
        __atomic_store_n(m.where, m.value, __ATOMIC_RELEASE);
        mark_out++;
    }
    return 0;
}
API int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { (void)p; (void)n; (void)f; return 0; }
API int cuMemHostGetDevicePointer_v2(u64 *o, void *p, unsigned f) { (void)f; *o = (u64)p; return 0; }
API int cuStreamWriteValue32_v2(u64 s, u64 a, uint32_t v, unsigned f) {
    (void)f; calls_beside++;
    if (captures(s)) log_line("mark in a capture");
    static int without = -1;
    if (without < 0) without = getenv("STUB_NO_WRITE_VALUE") != 0;
    if (without) return 801;
    if (!kernel_ns) { *(uint32_t *)a = v; return 0; }
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static int started;
    pthread_mutex_lock(&lock);
    if (!started) { pthread_t t; started = 1; pthread_create(&t, 0, player, 0); pthread_detach(t); }
    marks[mark_in % (1 << 14)] = (struct mark){ __atomic_load_n(&busy_until, __ATOMIC_RELAXED), (uint32_t *)a, v };
    __atomic_store_n(&mark_in, mark_in + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return 0;
}
static u64 event_at[1 << 16];
API int cuEventRecord(u64 e, u64 s) { (void)s; calls_beside++; event_at[(e >> 9) & 0xffff] = __atomic_load_n(&busy_until, __ATOMIC_RELAXED); return 0; }
API int cuEventQuery(u64 e) { calls_beside++; return now_ns() >= event_at[(e >> 9) & 0xffff] ? 0 : 600; }

/* ---- look-up: by the table that the test writes ---- */
struct row { const char *symbol, *base; int per_thread, since; };
extern const struct row stub_rows[];
static const char *best(const char *name, int version, int per_thread) {
    const struct row *found = 0;
    for (const struct row *r = stub_rows; r->symbol; r++)
        if (!strcmp(r->base, name) && r->per_thread == per_thread && r->since <= version && (!found || r->since > found->since)) found = r;
    return found ? found->symbol : 0;
}
static void *self(void) { static void *h; if (!h) { Dl_info i; dladdr((void *)cuInit, &i); h = dlopen(i.dli_fname, RTLD_NOW | RTLD_NOLOAD); } return h; }
API int cuGetProcAddress_v2(const char *name, void **out, int version, u64 flags, int *status) {
    const char *symbol = flags & 2 ? best(name, version, 1) : 0;
    if (!symbol) symbol = best(name, version, 0);
    *out = symbol ? dlsym(self(), symbol) : 0;
    if (status) *status = *out ? 0 : 1;
    const char *path = getenv("STUB_LOOKUPS");
    if (path) { FILE *f = fopen(path, "a"); fprintf(f, "%s %d %llu\n", name, version, (unsigned long long)flags); fclose(f); }
    return *out ? 0 : status ? 0 : 500;
}
API int cuGetProcAddress(const char *name, void **out, int version, u64 flags) { return cuGetProcAddress_v2(name, out, version, flags, 0); }

/* ---- private tables: what NVIDIA's runtime asks for on its way to its check of the driver. The check
 * itself is not answered: like all else here the functions of its table do nothing, the runtime finds no
 * valid answer and refuses us, as it must. ---- */
static void note_table(const unsigned char *id) {
    const char *path = getenv("STUB_LOOKUPS");
    if (!path) return;
    FILE *f = fopen(path, "a");
    fprintf(f, "table ");
    for (int i = 0; i < 16; i++) fprintf(f, "%02x", id[i]);
    fprintf(f, "\n");
    fclose(f);
}
static int nothing(void) { return 0; }
static int primary(u64 *out, int device) { *out = 0x1000 + device; return 0; }
static char tools_buffer[1024];
static void tools(void **buffer, size_t *n) { *buffer = tools_buffer; *n = sizeof tools_buffer; }
static struct { u64 context; void *key, *value; } kept[64];
static int keep(u64 context, void *key, void *value) {
    for (int i = 0; i < 64; i++) if (!kept[i].key) { kept[i].context = context; kept[i].key = key; kept[i].value = value; return 0; }
    return 2;
}
static int drop(u64 context, void *key) { for (int i = 0; i < 64; i++) if (kept[i].key == key && kept[i].context == context) kept[i].key = 0; return 0; }
static int find(void **value, u64 context, void *key) {
    for (int i = 0; i < 64; i++) if (kept[i].key == key && kept[i].context == context) { *value = kept[i].value; return 0; }
    return 400;
}
#define N (void *)nothing
static const void *const ours[] = { (void *)32, 0, 0, 0 };
static const void *const interface[] = { (void *)104, N, primary, N, N, N, N, N, N, N, N, N, N };
static const void *const hooks[] = { (void *)56, N, tools, N, N, N, tools };
static const void *const tls[] = { (void *)32, N, N, N };
static const void *const unnamed[] = { (void *)128, N, N, N, N, N, N, N, N, N, N, N, N, N, N, N };
static const void *const storage[] = { keep, drop, find, N };
static const void *const checks[] = { (void *)32, N, N, N };
static const struct { unsigned char id[5]; const void *const *table; } tables[] = {
    { { 1, 2, 3 }, ours },
    { { 0x6b, 0xd5, 0xfb, 0x6c, 0x5b }, interface },
    { { 0xa0, 0x94, 0x79, 0x8c, 0x2e }, hooks },
    { { 0x42, 0xd8, 0x5a, 0x81, 0x23 }, tls },
    { { 0x21, 0x31, 0x8c, 0x60, 0x97 }, unnamed },
    { { 0xc6, 0x93, 0x33, 0x6e, 0x11 }, storage },
    { { 0x26, 0x3e, 0x88, 0x60, 0x7c }, checks },
    { { 0xd4, 0x08, 0x20, 0x55, 0xbd }, unnamed },
};
API int cuGetExportTable(const void **t, const unsigned char *id) {
    note_table(id);
    *t = 0;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) if (!memcmp(id, tables[i].id, 5)) *t = tables[i].table;
    return *t ? 0 : 1;
}
