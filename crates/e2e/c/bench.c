/* Times driver calls in a loop: launch, and alloc+free with so many allocations live. Prints
 * nanoseconds per operation, the least of many rounds. Linked against the driver by name, with true
 * prototypes, so that nothing but the calls is measured. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
typedef uint64_t u64;
static u64 now_ns(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ull + t.tv_nsec; }
/* Rounds are short, so that some of them are not interrupted on a busy machine. */
#define ROUNDS 140
#define EACH 5000
static int (*alloc)(u64 *, size_t), (*drop)(u64), (*set)(u64);
static u64 c;
/* Allocates and frees; the least nanoseconds per pair. */
static double pairs(void) {
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        u64 t = now_ns();
        for (int i = 0; i < EACH; i++) { u64 p; if (alloc(&p, 4096) || drop(p)) exit(4); }
        double each = (now_ns() - t) / (double)EACH;
        if (each < best) best = each;
    }
    return best;
}
static void *other(void *best) { if (set(c)) exit(5); *(double *)best = pairs(); return 0; }
int main(void) {
    void *d = dlopen("libcuda.so.1", RTLD_NOW);
    int (*init)(unsigned) = dlsym(d, "cuInit");
    int (*retain)(u64 *, int) = dlsym(d, "cuDevicePrimaryCtxRetain");
    set = (int (*)(u64))dlsym(d, "cuCtxSetCurrent");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) = dlsym(d, "cuLaunchKernel");
    alloc = (int (*)(u64 *, size_t))dlsym(d, "cuMemAlloc_v2");
    drop = (int (*)(u64))dlsym(d, "cuMemFree_v2");
    if (init(0) || retain(&c, 0) || set(c)) return 1;
    double best = 1e9;
    for (int round = 0; round < ROUNDS; round++) {
        u64 t = now_ns();
        for (int i = 0; i < EACH; i++) if (launch((void *)64, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)) return 2;
        double each = (now_ns() - t) / (double)EACH;
        if (each < best) best = each;
    }
    printf("launch %.2f\n", best);
    static u64 live[100000];
    int counts[] = { 10, 100000 };
    int have = 0;
    for (int k = 0; k < 2; k++) {
        while (have < counts[k]) if (alloc(&live[have++], 4096)) return 3;
        printf("alloc_free_%d %.2f\n", counts[k], pairs());
    }
    /* A second thread of the process, which does not allocate most. */
    pthread_t thread;
    double second;
    if (pthread_create(&thread, 0, other, &second) || pthread_join(thread, 0)) return 6;
    printf("alloc_free_second %.2f\n", second);
    return 0;
}
