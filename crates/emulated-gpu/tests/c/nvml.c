/* An NVML client with its own declarations: `event` waits for one XID, `ask GPU` asks how it does. */
#include "call.h"

struct event { void *device; unsigned long long type, data; unsigned instance, compute; };

int main(int argc, char **argv) {
    load("libnvidia-ml.so.1");
    CHECK(nvmlInit_v2);
    if (argc > 2 && !strcmp(argv[1], "ask")) {
        void *device; unsigned use[2];
        int code = CALL(nvmlDeviceGetHandleByIndex_v2, atoi(argv[2]), &device);
        if (!code) code = CALL(nvmlDeviceGetUtilizationRates, device, use);
        printf("%d\n", code);
        return 0;
    }
    void *device, *set; struct event event;
    CHECK(nvmlDeviceGetHandleByIndex_v2, 0, &device);
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
