/* dlsym under both of its versions, and look-ups that are not the interposer's business. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
void *dlsym_old(void *, const char *);
void *dlsym_new(void *, const char *);
__asm__(".symver dlsym_old, dlsym@GLIBC_2.2.5");
__asm__(".symver dlsym_new, dlsym@GLIBC_2.34");
static void try(const char *label, void *(*look)(void *, const char *), void *driver) {
    int (*init)(unsigned) = look(driver, "cuInit");
    int (*alloc)(uint64_t *, size_t) = look(driver, "cuMemAlloc_v2");
    uint64_t p;
    init(0);
    printf("%s %d\n", label, alloc(&p, 2 << 20));
}
int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    try("old", dlsym_old, driver);
    try("new", dlsym_new, driver);
    /* RTLD_NEXT from the program itself: the true caller is the program, so libc's malloc is next. */
    printf("next %s\n", dlsym_new(RTLD_NEXT, "malloc") == dlsym_new(dlopen("libc.so.6", RTLD_NOW), "malloc") ? "ok" : "wrong");
    printf("own %s\n", dlsym_new(RTLD_DEFAULT, "cudnnCreate") == 0 ? "ok" : "wrong");
    return 0;
}
