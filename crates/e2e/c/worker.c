/* A client of the driver API that works until it is told to leave: one kernel after another, each
 * waited for, with a pause in between. Used as service (it records latencies) and as job.
 *
 * worker KERNEL_US SM_FILL PAUSE_FILE RECORD_FILE
 *   PAUSE_FILE   microseconds between two kernels, read again and again
 *   RECORD_FILE  one line per kernel: time since boot in us, latency in us; `-` records nothing
 * Leaves with 3 on an error of the driver, which it prints. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static unsigned long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (unsigned long long)t.tv_sec * 1000000ull + (unsigned long long)t.tv_nsec / 1000;
}

static long pause_us(const char *path) {
    FILE *f = fopen(path, "r");
    long us = 1000;
    if (f) { if (fscanf(f, "%ld", &us) != 1) us = 1000; fclose(f); }
    return us;
}

#define CALL(name, ...) do { \
    int (*f)() = (int (*)())dlsym(cuda, name); \
    int r = f ? f(__VA_ARGS__) : -1; \
    if (r) { fprintf(stderr, "%s %d\n", name, r); return 3; } } while (0)

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    char name[128], ptx[512];
    snprintf(name, sizeof name, "k_muxflow_us%s_f%s", argv[1], argv[2]);
    snprintf(ptx, sizeof ptx, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s()\n{\nret;\n}\n", name);
    int device = 0;
    void *context = 0, *module = 0, *function = 0;
    CALL("cuInit", 0);
    CALL("cuDeviceGet", &device, 0);
    CALL("cuDevicePrimaryCtxRetain", &context, device);
    CALL("cuCtxSetCurrent", context);
    CALL("cuModuleLoadData", &module, ptx);
    CALL("cuModuleGetFunction", &function, module, name);
    FILE *record = strcmp(argv[4], "-") ? fopen(argv[4], "a") : 0;
    long pause = pause_us(argv[3]);
    unsigned long long checked = now_us();
    puts("ready");
    fflush(stdout);
    for (;;) {
        unsigned long long start = now_us();
        CALL("cuLaunchKernel", function, 40, 1, 1, 256, 1, 1, 0, (void *)0, (void *)0, (void *)0);
        CALL("cuCtxSynchronize");
        unsigned long long end = now_us();
        if (record) { fprintf(record, "%llu %llu\n", end, end - start); fflush(record); }
        if (end - checked > 20000) { pause = pause_us(argv[3]); checked = end; }
        if (pause > 0) {
            struct timespec t = { pause / 1000000, (pause % 1000000) * 1000 };
            nanosleep(&t, 0);
        }
    }
}
