/* A service and a job whose every figure is device time, for the comparison with the simulator.
 *
 * paced serve FACTOR KERNEL COUNT ARRIVALS
 *   At each time of the file ARRIVALS (device microseconds since the epoch) one request comes: COUNT
 *   kernels in one stream. Prints "request ARRIVED ENDED" for each.
 * paced train FACTOR KERNEL COUNT GAP_US
 *   Iterations of COUNT kernels, GAP_US of device time apart, until it is told to leave. Prints
 *   "kernels N ENDED" for each group of them.
 *
 * FACTOR is device seconds per second. When it is up it prints "ready", and reads the epoch, a time of
 * the monotonic clock in nanoseconds. Printed times are device milliseconds since the epoch, taken from
 * events. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GROUP 10
#define MOST 4096

typedef unsigned long long u64;
static void *cuda;
static double factor, base_ms;
static u64 epoch_ns;
static void *base, *function, *work, *beside;

static u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}

static void sleep_until_ns(u64 at) {
    struct timespec t = { (time_t)(at / 1000000000ull), (long)(at % 1000000000ull) };
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0)) { }
}

static u64 host_ns(double device_ms) { return epoch_ns + (u64)(device_ms * 1e6 / factor); }

#define CALL(name, ...) do { \
    int (*f)() = (int (*)())dlsym(cuda, name); \
    int r = f ? f(__VA_ARGS__) : -1; \
    if (r) { fprintf(stderr, "%s %d\n", name, r); exit(3); } } while (0)

static double device_ms(void *event) {
    float ms = 0;
    CALL("cuEventElapsedTime_v2", &ms, base, event);
    return base_ms + ms;
}

static int is_done(void *event) {
    static int (*query)(void *);
    if (!query) query = (int (*)(void *))dlsym(cuda, "cuEventQuery");
    return query(event) == 0;
}

/* Ties the events' clock to the host's: an event that was recorded within a short time. */
static void tie(void) {
    for (int tries = 0; tries < 1000; tries++) {
        u64 before = now_ns();
        CALL("cuEventRecord", base, beside);
        u64 after = now_ns();
        if (after - before > 50000) continue;
        CALL("cuEventSynchronize", base);
        double middle = ((double)before + (double)after) / 2;
        base_ms = (middle - (double)epoch_ns) / 1e6 * factor;
        return;
    }
    fprintf(stderr, "the clocks cannot be tied\n");
    exit(3);
}

static void launch(void) {
    static int (*f)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    if (!f) f = dlsym(cuda, "cuLaunchKernel");
    int r = f(function, 40, 1, 1, 256, 1, 1, 0, work, 0, 0);
    if (r) { fprintf(stderr, "cuLaunchKernel %d\n", r); exit(3); }
}

struct mark { void *first, *last; };
static struct mark marks[MOST];
static unsigned head, tail;

static struct mark *next_mark(void) {
    if (head - tail == MOST) { fprintf(stderr, "too far behind\n"); exit(3); }
    struct mark *m = &marks[head++ % MOST];
    if (!m->first) { CALL("cuEventCreate", &m->first, 0); CALL("cuEventCreate", &m->last, 0); }
    return m;
}

static void report(int service) {
    for (; tail != head && is_done(marks[tail % MOST].last); tail++) {
        struct mark *m = &marks[tail % MOST];
        if (service) printf("request %.4f %.4f\n", device_ms(m->first), device_ms(m->last));
        else printf("kernels %d %.4f\n", GROUP, device_ms(m->last));
    }
    fflush(stdout);
}

static void serve(int count, const char *path) {
    FILE *file = fopen(path, "r");
    double us;
    if (!file) { perror(path); exit(2); }
    while (fscanf(file, "%lf", &us) == 1) {
        u64 at = host_ns(us / 1e3);
        for (u64 now; (now = now_ns()) < at; report(1)) {
            u64 soon = now + 20000000;
            sleep_until_ns(at < soon ? at : soon);
        }
        struct mark *m = next_mark();
        CALL("cuEventRecord", m->first, beside);
        for (int k = 0; k < count; k++) launch();
        CALL("cuEventRecord", m->last, work);
    }
    CALL("cuStreamSynchronize", work);
    report(1);
}

static void train(int count, double gap_us) {
    for (;;) {
        struct mark *m = 0;
        for (int k = 1; k <= count; k++) {
            launch();
            if (k % GROUP == 0) {
                m = next_mark();
                CALL("cuEventRecord", m->last, work);
                report(0);
            }
        }
        CALL("cuStreamSynchronize", work);
        double end_ms = device_ms(m->last);
        report(0);
        sleep_until_ns(host_ns(end_ms + gap_us / 1e3));
    }
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    factor = atof(argv[2]);
    int count = atoi(argv[4]);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    char ptx[512];
    snprintf(ptx, sizeof ptx, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s()\n{\nret;\n}\n", argv[3]);
    int device = 0;
    void *context = 0, *module = 0;
    CALL("cuInit", 0);
    CALL("cuDeviceGet", &device, 0);
    CALL("cuDevicePrimaryCtxRetain", &context, device);
    CALL("cuCtxSetCurrent", context);
    CALL("cuModuleLoadData", &module, ptx);
    CALL("cuModuleGetFunction", &function, module, argv[3]);
    CALL("cuStreamCreate", &work, 1);
    CALL("cuStreamCreate", &beside, 1);
    CALL("cuEventCreate", &base, 0);
    puts("ready");
    fflush(stdout);
    if (scanf("%llu", &epoch_ns) != 1) return 2;
    tie();
    if (strcmp(argv[1], "serve") == 0) serve(count, argv[5]);
    else train(count, atof(argv[5]));
    return 0;
}
