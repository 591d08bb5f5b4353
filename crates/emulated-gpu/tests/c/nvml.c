/* An NVML client with its own declarations: `event` waits for one XID, `ask GPU` asks how it does and for its UUID, `again N` starts
   and ends the library, `pcie` says what goes over the bus, `poll SECONDS` asks every millisecond and prints what is new. */
#include <dirent.h>
#include <time.h>
#include <unistd.h>

#include "call.h"

struct event { void *device; unsigned long long type, data; unsigned instance, compute; };
struct sample { unsigned pid; unsigned long long at_us; unsigned sm, memory, encoder, decoder; };

static int open_files(void) { int n = 0; DIR *d = opendir("/proc/self/fd"); while (readdir(d)) n++; closedir(d); return n; }
static double now_ms(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e3 + t.tv_nsec / 1e6; }

static void again(int times) {
    int before = open_files();
    for (int i = 0; i < times; i++) {
        void *set, *device; unsigned count; CHECK(nvmlInit_v2); CHECK(nvmlDeviceGetCount_v2, &count); CHECK(nvmlDeviceGetHandleByIndex_v2, count - 1, &device);
        if (i % 10 == 0) { CHECK(nvmlEventSetCreate, &set); CHECK(nvmlDeviceRegisterEvents, device, 8ULL, set); } /* never freed */
        CHECK(nvmlShutdown);
    }
    printf("%d\n", open_files() - before);
}

static void poll_all(void *device, double seconds) {
    double began = now_ms(); unsigned long long seen = 0; unsigned last[3] = {-1, -1, -1};
    while (now_ms() - began < seconds * 1e3) {
        struct sample samples[16]; unsigned room = 16, values[3], rates[2];
        int code = CALL(nvmlDeviceGetProcessUtilization, device, samples, &room, seen);
        if (code == 0) { seen = samples[0].at_us; printf("process %llu %u\n", seen, samples[0].sm); } else EXPECT(code == 6);
        CHECK(nvmlDeviceGetUtilizationRates, device, rates); values[0] = rates[0];
        CHECK(nvmlDeviceGetClockInfo, device, 1, &values[1]); CHECK(nvmlDeviceGetPowerUsage, device, &values[2]);
        for (int i = 0; i < 3; i++) if (values[i] != last[i]) { last[i] = values[i]; printf("%s 0 %u\n", (char *[]){"utilisation", "clock", "power"}[i], values[i]); }
        usleep(1000);
    }
    printf("elapsed 0 %.0f\n", now_ms() - began);
}

int main(int argc, char **argv) {
    load("libnvidia-ml.so.1");
    if (argc > 2 && !strcmp(argv[1], "again")) { again(atoi(argv[2])); return 0; }
    CHECK(nvmlInit_v2);
    if (argc > 2 && !strcmp(argv[1], "ask")) {
        void *device; unsigned use[2]; char uuid[96]; int named = -1;
        int code = CALL(nvmlDeviceGetHandleByIndex_v2, atoi(argv[2]), &device);
        if (argc > 3) { puts("open"); fflush(stdout); getchar(); } /* The handle is there; now it may break. */
        if (!code) { named = CALL(nvmlDeviceGetUUID, device, uuid, 96); code = CALL(nvmlDeviceGetUtilizationRates, device, use); }
        if (argc > 3) printf("%d ", named);
        printf("%d\n", code);
        return 0;
    }
    void *device, *set; struct event event;
    CHECK(nvmlDeviceGetHandleByIndex_v2, 0, &device);
    if (argc > 1 && !strcmp(argv[1], "processes")) { /* Processes of the plain list, then clients of MPS. */
        struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } list[16]; unsigned n = 16;
        CHECK(nvmlDeviceGetComputeRunningProcesses_v3, device, &n, list); for (unsigned i = 0; i < n; i++) printf("%u ", list[i].pid); n = 16;
        printf("| "); CHECK(nvmlDeviceGetMPSComputeRunningProcesses_v3, device, &n, list); for (unsigned i = 0; i < n; i++) printf("%u ", list[i].pid);
        puts(""); return 0; }
    if (argc > 1 && !strcmp(argv[1], "memory")) { /* Bytes that are free, in use, and held by the first process. */
        struct { unsigned version; unsigned long long total, reserved, free, used; } all = {40 | 2 << 24}; CHECK(nvmlDeviceGetMemoryInfo_v2, device, &all);
        struct { unsigned pid; unsigned long long bytes; unsigned instance, compute; } list[16]; unsigned n = 16; CHECK(nvmlDeviceGetComputeRunningProcesses_v3, device, &n, list);
        printf("%llu %llu %llu\n", all.free, all.used, n ? list[0].bytes : 0); return 0; }
    if (argc > 2 && !strcmp(argv[1], "poll")) { poll_all(device, atof(argv[2])); return 0; }
    if (argc > 1 && !strcmp(argv[1], "pcie")) { unsigned tx, rx; CHECK(nvmlDeviceGetPcieThroughput, device, 0, &tx); CHECK(nvmlDeviceGetPcieThroughput, device, 1, &rx); printf("%u %u\n", tx, rx); return 0; }
    CHECK(nvmlEventSetCreate, &set);
    CHECK(nvmlDeviceRegisterEvents, device, 8ULL, set);
    puts("ready"); fflush(stdout);
    CHECK(nvmlEventSetWait_v2, set, &event, 20000);
    /* Uncorrected errors since the start; a GPU that is gone cannot say. */
    unsigned long long errors = 0; int code = CALL(nvmlDeviceGetTotalEccErrors, device, 1, 0, &errors);
    printf("%llu %d %llu\n", event.data, code, errors);
    CHECK(nvmlEventSetFree, set);
    CHECK(nvmlShutdown);
    return 0;
}
