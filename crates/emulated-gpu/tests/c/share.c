/* An event of two processes: `record` records one behind work without end and gives its handle away,
   `await` waits for the one whose handle it reads, in a stream and at once. */
#include <unistd.h>

#include "call.h"

static const char *PTX = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry endless_muxflow_us3600000000_f10() { ret; }\n";
struct handle { char bytes[64]; };

static void record(void) {
    void *module, *f, *s, *event; struct handle handle;
    CHECK(cuModuleLoadData, &module, PTX); CHECK(cuModuleGetFunction, &f, module, "endless_muxflow_us3600000000_f10");
    CHECK(cuStreamCreate, &s, 1); CHECK(cuEventCreate, &event, 6); CHECK(cuIpcGetEventHandle, &handle, event);
    CHECK(cuLaunchKernel, f, 40, 1, 1, 64, 1, 1, 0, s, NULL, NULL); CHECK(cuEventRecord, event, s);
    EXPECT(fwrite(&handle, 64, 1, stdout) == 1); fflush(stdout); for (;;) pause();
}

static void await(void) {
    struct handle handle; void *s, *event; int (*open_event)(void **, struct handle) = sym("cuIpcOpenEventHandle");
    EXPECT(fread(&handle, 64, 1, stdin) == 1); EXPECT(open_event(&event, handle) == 0);
    CHECK(cuStreamCreate, &s, 1); CHECK(cuStreamWaitEvent, s, event, 0); GIVES(600, cuEventQuery, event); GIVES(600, cuStreamQuery, s);
    puts("waits"); fflush(stdout); int at_once = CALL(cuEventSynchronize, event); printf("%d %d\n", at_once, CALL(cuStreamSynchronize, s));
}

int main(int argc, char **argv) {
    void *context; load("libcuda.so.1");
    CHECK(cuInit, 0); CHECK(cuDevicePrimaryCtxRetain, &context, 0); CHECK(cuCtxSetCurrent, context);
    if (argc > 1 && !strcmp(argv[1], "record")) record(); else await();
    return 0;
}
