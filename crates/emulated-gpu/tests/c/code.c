/* Code that comes as a library, as machine code, and with much shared memory. */
#define _GNU_SOURCE
#include <stdint.h>

#include "call.h"

typedef unsigned long long ptr;
enum { N = 1000 };

static const char *PTX = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry quick_muxflow_us5() { ret; }\n";
static void *context;

/* Machine code as far as the driver reads it: for each kernel a section of code, which never runs, and one
   that says where its parameters are. */
struct param { unsigned short offset, bytes; };
#define THREE {{0, 8}, {8, 8}, {16, 8}, {24, 4}}
#define SCALED {{0, 4}, {8, 8}, {16, 8}, {24, 4}}
/* Doubles, another order, templates, and names that only begin like one are timed only. */
static const struct code { const char *name; struct param params[4]; int computes; } KERNELS[] = {
    {"vadd", THREE, 1}, {"_Z4vaddPKfS0_Pfi", THREE, 1}, {"_Z6vecAddPfS_S_i", THREE, 1}, {"_Z4vaddPKdS0_Pdi", THREE}, {"_Z4vaddIfEvPKT_S2_PS0_i", THREE},
    {"vaddition", THREE}, {"_Z5vadd2PKfS0_Pfi", THREE}, {"saxpy", SCALED, 1}, {"_Z5saxpyfPKfPfi", SCALED, 1}, {"_Z5saxpydPKdPdi", SCALED}, {"_Z5saxpyifPfS_", SCALED},
};
enum { COUNT = sizeof KERNELS / sizeof *KERNELS, SECTIONS = 2 + 2 * COUNT, CODE = 128, INFO = 4 * 16 };
static unsigned char image[8192];
static void put(size_t at, size_t bytes, unsigned long long value) { memcpy(image + at, &value, bytes); }
static void section(int i, size_t name, unsigned kind, size_t offset, size_t bytes) {
    size_t at = 64 + 64 * (size_t)i; put(at, 4, name); put(at + 4, 4, kind); put(at + 24, 8, offset); put(at + 32, 8, bytes);
}
static void assemble(void) {
    size_t strings = 64 + 64 * SECTIONS, text = 1, body = strings + 1024;
    memcpy(image, "\177ELF\2\1\1", 7); put(18, 2, 190); put(40, 8, 64); put(58, 2, 64); put(60, 2, SECTIONS); put(62, 2, 1);
    for (int k = 0; k < COUNT; k++) {
        section(2 + 2 * k, text, 1, body, CODE); body += CODE; text += sprintf((char *)image + strings + text, ".text.%s", KERNELS[k].name) + 1;
        section(3 + 2 * k, text, 0x70000000, body, INFO); text += sprintf((char *)image + strings + text, ".nv.info.%s", KERNELS[k].name) + 1;
        for (int i = 0; i < 4; i++, body += 16) {
            put(body, 4, 12 << 16 | 0x17 << 8 | 4); put(body + 8, 2, i); put(body + 10, 2, KERNELS[k].params[i].offset); put(body + 14, 2, KERNELS[k].params[i].bytes << 2);
        }
    }
    section(1, 0, 3, strings, text); EXPECT(body <= sizeof image && text <= 1024);
}

static void *library;
static void *kernel(const char *name) {
    void *k, *f; const char *said; CHECK(cuLibraryGetKernel, &k, library, name); CHECK(cuKernelGetFunction, &f, k);
    CHECK(cuKernelGetName, &said, k); EXPECT(!strcmp(said, name)); return f;
}
static float x[N], y[N], z[N];
/* What is in c after a kernel of four arguments. */
static void run(void *f, void **args, ptr c) {
    CHECK(cuLaunchKernel, f, 4, 1, 1, 256, 1, 1, 0, NULL, args, NULL); CHECK(cuMemcpyDtoH_v2, z, c, sizeof z);
}
static void machine(void) {
    ptr a, b, c; int n = N; float factor = 3; unsigned count; void *k, *all[COUNT], *module; assemble();
    for (int i = 0; i < N; i++) { x[i] = i; y[i] = 0.5f * i; }
    CHECK(cuMemAlloc_v2, &a, sizeof x); CHECK(cuMemAlloc_v2, &b, sizeof x); CHECK(cuMemAlloc_v2, &c, sizeof x);
    CHECK(cuMemcpyHtoD_v2, a, x, sizeof x); CHECK(cuMemcpyHtoD_v2, b, y, sizeof x); void *args[] = {&a, &b, &c, &n}, *scaled[] = {&factor, &a, &c, &n};
    CHECK(cuLibraryLoadData, &library, image, NULL, NULL, 0, NULL, NULL, 0); GIVES(500, cuLibraryGetKernel, &k, library, "nobody");
    CHECK(cuLibraryGetKernelCount, &count, library); EXPECT(count == COUNT); CHECK(cuLibraryEnumerateKernels, all, count, library); CHECK(cuLibraryGetModule, &module, library);
    for (int i = 0; i < COUNT; i++) {
        int adds = KERNELS[i].params[0].bytes == 8; float scale = !KERNELS[i].computes ? 0 : adds ? 1 : factor;
        CHECK(cuMemcpyHtoD_v2, c, y, sizeof x); run(kernel(KERNELS[i].name), adds ? args : scaled, c);
        for (int j = 0; j < N; j++) EXPECT(z[j] == scale * x[j] + y[j]);
    }
    /* Fewer than there are threads, and no more than was said. */
    n = 10; CHECK(cuMemsetD8_v2, c, 0, sizeof x); run(kernel("vadd"), args, c); EXPECT(z[9] == x[9] + y[9] && z[10] == 0);
    CHECK(cuLibraryUnload, library); GIVES(400, cuLibraryGetKernel, &k, library, "vadd");
    CHECK(cuMemFree_v2, a); CHECK(cuMemFree_v2, b); CHECK(cuMemFree_v2, c);
}

/* More than 48 KiB only for who asked for it. */
static void shared(void) {
    void *module, *f; int bytes; CHECK(cuModuleLoadData, &module, PTX); CHECK(cuModuleGetFunction, &f, module, "quick_muxflow_us5");
    CHECK(cuFuncGetAttribute, &bytes, 8, f); EXPECT(bytes == 48 << 10); CHECK(cuLaunchKernel, f, 1, 1, 1, 64, 1, 1, bytes, NULL, NULL, NULL);
    GIVES(1, cuLaunchKernel, f, 1, 1, 1, 64, 1, 1, bytes + 4, NULL, NULL, NULL); CHECK(cuFuncSetAttribute, f, 8, 64 << 10);
    CHECK(cuLaunchKernel, f, 1, 1, 1, 64, 1, 1, 64 << 10, NULL, NULL, NULL); GIVES(1, cuFuncSetAttribute, f, 8, 1 << 20); CHECK(cuCtxSynchronize); CHECK(cuModuleUnload, module);
}

int main(void) {
    load("libcuda.so.1"); CHECK(cuInit, 0); CHECK(cuDevicePrimaryCtxRetain, &context, 0); CHECK(cuCtxSetCurrent, context);
    machine(); shared();
    puts("ok");
    return 0;
}
