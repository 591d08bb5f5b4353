/* A client of the driver API that works until it is told to leave: one kernel after another, each
 * waited for, with a pause in between. Used as service (it records what came of its requests) and as
 * job.
 *
 * worker KERNEL_US SHAPE PAUSE_FILE RECORD_FILE [OPTION...]
 *   SHAPE        SMs that the kernel fills, and more of its name: `16` or `16_o50_i60_b80`
 *   PAUSE_FILE   microseconds between two kernels, read again and again
 *   RECORD_FILE  one line per request: time since boot in us, latency in us, device time in us; or
 *                the time and `oom` or `error CODE` for one that failed; `-` records nothing
 *   hold=MIB     memory held from the start, in steps of 64 MiB; `most` stops at the first refusal,
 *                `all` when it was refused for half a second
 *   want=FILE    MiB to hold, read again and again: grows by one step of 64 MiB with each request
 *   piece=MIB    memory held from the start, in one piece; without it, it leaves with 4
 *   scratch=MIB  memory taken and given back by each request
 *   ram=MIB      memory of the machine that each request takes and keeps, while its kernel runs
 *   save=S       needs so many seconds to save its state when it is told to leave
 *   stubborn     stays after an error of the driver, with its context, and does nothing more
 * Leaves with 3 on an error of the driver, which it prints. */
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define STEP_MIB 64
#define OUT_OF_MEMORY 2

static void *cuda;
static FILE *record;
static int stubborn, save_s;

static unsigned long long now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (unsigned long long)t.tv_sec * 1000000ull + (unsigned long long)t.tv_nsec / 1000;
}

static long read_number(const char *path, long otherwise) {
    FILE *f = fopen(path, "r");
    long number = otherwise;
    if (f) { if (fscanf(f, "%ld", &number) != 1) number = otherwise; fclose(f); }
    return number;
}

static int failed(const char *name, int code) {
    fprintf(stderr, "%s %d\n", name, code);
    if (record) { fprintf(record, "%llu error %d\n", now_us(), code); fflush(record); }
    while (stubborn) pause();
    return 3;
}

static int (*symbol(const char *name))() { return (int (*)())dlsym(cuda, name); }

#define CALL(name, ...) do { \
    int (*f)() = symbol(name); \
    int r = f ? f(__VA_ARGS__) : -1; \
    if (r) return failed(name, r); } while (0)

/* 1 when there was room. */
static int take(unsigned long long *address, long mib) {
    return symbol("cuMemAlloc_v2")(address, (unsigned long long)mib << 20) == 0;
}

static void out_of_memory(void) {
    if (record) { fprintf(record, "%llu oom\n", now_us()); fflush(record); }
}

static void save(int signal) {
    (void)signal;
    for (unsigned left = (unsigned)save_s; left > 0; left = sleep(left)) {}
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    const char *want = 0, *hold = 0;
    long scratch = 0, piece = 0, ram = 0;
    for (int i = 5; i < argc; i++) {
        if (!strncmp(argv[i], "want=", 5)) want = argv[i] + 5;
        else if (!strncmp(argv[i], "hold=", 5)) hold = argv[i] + 5;
        else if (!strncmp(argv[i], "scratch=", 8)) scratch = atol(argv[i] + 8);
        else if (!strncmp(argv[i], "ram=", 4)) ram = atol(argv[i] + 4);
        else if (!strcmp(argv[i], "stubborn")) stubborn = 1;
        else if (!strncmp(argv[i], "piece=", 6)) piece = atol(argv[i] + 6);
        else if (!strncmp(argv[i], "save=", 5)) save_s = atoi(argv[i] + 5);
        else return 2;
    }
    if (save_s) signal(SIGTERM, save);
    cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!cuda) { fprintf(stderr, "%s\n", dlerror()); return 2; }
    char name[128], ptx[512];
    snprintf(name, sizeof name, "k_muxflow_us%s_f%s", argv[1], argv[2]);
    snprintf(ptx, sizeof ptx, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s()\n{\nret;\n}\n", name);
    int device = 0;
    void *context = 0, *module = 0, *function = 0, *before = 0, *after = 0;
    unsigned long long address;
    CALL("cuInit", 0);
    CALL("cuDeviceGet", &device, 0);
    CALL("cuDevicePrimaryCtxRetain", &context, device);
    CALL("cuCtxSetCurrent", context);
    CALL("cuModuleLoadData", &module, ptx);
    CALL("cuModuleGetFunction", &function, module, name);
    CALL("cuEventCreate", &before, 0);
    CALL("cuEventCreate", &after, 0);
    record = strcmp(argv[4], "-") ? fopen(argv[4], "a") : 0;
    long held = 0;
    if (piece) {
        if (!take(&address, piece)) { out_of_memory(); return 4; }
        held = piece;
    }
    if (hold && !strcmp(hold, "all")) {
        /* Others may hold memory for a moment only: it is not over with the first refusal. */
        for (int refused = 0; refused < 50; ) {
            if (take(&address, STEP_MIB)) { held += STEP_MIB; refused = 0; }
            else { refused++; usleep(10000); }
        }
    } else if (hold && !strcmp(hold, "most")) {
        while (take(&address, STEP_MIB)) held += STEP_MIB;
    } else if (hold) {
        for (long left = atol(hold); left > 0; left -= STEP_MIB) {
            if (take(&address, STEP_MIB)) held += STEP_MIB;
            else out_of_memory();
        }
    }
    long wait = read_number(argv[3], 1000);
    unsigned long long checked = now_us();
    printf("ready, %ld MiB\n", held);
    fflush(stdout);
    for (;;) {
        unsigned long long start = now_us();
        if (want && held < read_number(want, 0)) {
            if (take(&address, STEP_MIB)) held += STEP_MIB;
            else { out_of_memory(); goto next; }
        }
        if (scratch) {
            if (!take(&address, scratch)) { out_of_memory(); goto next; }
        }
        CALL("cuEventRecord", before, (void *)0);
        CALL("cuLaunchKernel", function, 40, 1, 1, 256, 1, 1, 0, (void *)0, (void *)0, (void *)0);
        CALL("cuEventRecord", after, (void *)0);
        if (ram) {
            /* Never given back: that is what it is for. */
            char *more = malloc((size_t)ram << 20);
            for (long at = 0; more && at < ram << 20; at += 4096) ((volatile char *)more)[at] = 1;
        }
        CALL("cuCtxSynchronize");
        unsigned long long end = now_us();
        float ms = 0;
        CALL("cuEventElapsedTime", &ms, before, after);
        if (scratch) CALL("cuMemFree_v2", address);
        if (record) {
            fprintf(record, "%llu %llu %.0f\n", end, end - start, ms * 1000);
            fflush(record);
        }
    next:
        if (now_us() - checked > 20000) { wait = read_number(argv[3], 1000); checked = now_us(); }
        if (wait > 0) {
            struct timespec t = { wait / 1000000, (wait % 1000000) * 1000 };
            nanosleep(&t, 0);
        }
    }
}
