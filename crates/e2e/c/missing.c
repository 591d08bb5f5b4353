/* What the driver lacks must stay missing, on every way to it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
int main(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *found;
    int (*gpa)(const char *, void **, int, uint64_t, int *) = dlsym(driver, "cuGetProcAddress_v2");
    int status = -1;
    printf("dlsym %s\n", dlsym(driver, "cuMemAllocAsync") ? "yes" : "no");
    printf("default %s\n", dlsym(RTLD_DEFAULT, "cuMemAllocAsync") ? "yes" : "no");
    gpa("cuMemAllocAsync", &found, 13040, 0, &status);
    printf("gpa %s %d\n", found ? "yes" : "no", status);
    gpa("cuNonsense", &found, 13040, 0, &status);
    printf("nonsense %s %d\n", found ? "yes" : "no", status);
    gpa("", &found, 0, 0, &status);
    printf("empty %s %d\n", found ? "yes" : "no", status);
    return 0;
}
