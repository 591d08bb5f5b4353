/* What the clients of these tests share: a library that is looked up by name, call by call, as a program
 * does that has declarations of its own; and checks that say where they failed. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *lib;
static void load(const char *name) {
    lib = dlopen(name, RTLD_NOW);
    if (!lib) { fprintf(stderr, "%s\n", dlerror()); exit(2); }
}
static void *sym(const char *name) {
    void *s = dlsym(lib, name);
    if (!s) { fprintf(stderr, "no %s\n", name); exit(2); }
    return s;
}
#define CALL(name, ...) ((int (*)())sym(#name))(__VA_ARGS__)
#define GIVES(code, name, ...) do { int r_ = CALL(name, __VA_ARGS__); \
    if (r_ != (code)) { fprintf(stderr, "line %d: " #name " -> %d, not %d\n", __LINE__, r_, (code)); exit(1); } } while (0)
#define CHECK(name, ...) GIVES(0, name, __VA_ARGS__)
#define EXPECT(cond) do { if (!(cond)) { fprintf(stderr, "line %d: " #cond "\n", __LINE__); exit(1); } } while (0)
