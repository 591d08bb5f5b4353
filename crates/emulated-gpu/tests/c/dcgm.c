/* A DCGM client with its own declarations: prints fields of all GPUs, one line each; `poll SECONDS` asks every millisecond and
   prints field, stamp and value whenever one of them is new. */
#include <time.h>
#include <unistd.h>

#include "call.h"

struct value { unsigned version; unsigned short field, kind; int status; long long at_us; union { double d; long long i; char s[256]; char room[4096]; } v; };

static int print(unsigned group, unsigned gpu, struct value *values, int count, void *data) {
    EXPECT(group == 1); ++*(int *)data; printf("%u", gpu);
    for (int i = 0; i < count; i++) {
        struct value *v = &values[i];
        if (v->status) printf(" %d=!%d", v->field, v->status);
        else if (v->kind == 's') printf(" %d=%s", v->field, v->v.s);
        else if (v->kind == 'i') printf(" %d=%lld", v->field, v->v.i);
        else printf(" %d=%f", v->field, v->v.d);
    }
    puts(""); return 0;
}

static void poll_all(size_t handle, double seconds) {
    unsigned short fields[] = {100, 155, 203, 1002, 1005}; static struct value now[5], last[5]; time_t end = time(NULL) + (time_t)seconds;
    while (time(NULL) < end) {
        CHECK(dcgmGetLatestValuesForFields, handle, 0, fields, 5U, now);
        for (int i = 0; i < 5; i++) if (!now[i].status && (now[i].at_us != last[i].at_us || now[i].v.i != last[i].v.i)) {
            printf("%d %lld %lld\n", fields[i], now[i].at_us, now[i].v.i); last[i] = now[i]; }
        usleep(1000);
    }
}

int main(int argc, char **argv) {
    load("libdcgm.so.4");
    if (argc > 2) {
        size_t engine, list; unsigned short polled[] = {100, 155, 203, 1002, 1005}; CHECK(dcgmInit); CHECK(dcgmStartEmbedded, 2, &engine);
        CHECK(dcgmFieldGroupCreate, engine, 5, polled, "polled", &list); CHECK(dcgmWatchFields, engine, (size_t)0x7fffffff, list, 1000LL, 10.0, 10);
        poll_all(engine, atof(argv[2])); return 0; }
    size_t handle, group, fields, one; unsigned ids[32]; int count, seen = 0;
    unsigned short wanted[] = {50, 203, 252, 100, 155, 230, 1001, 1002, 1003, 1004, 1005, 1009, 1010, 9999};
    CHECK(dcgmInit); EXPECT(CALL(dcgmConnect, "127.0.0.1", &handle) == -21); CHECK(dcgmStartEmbedded, 2, &handle);
    CHECK(dcgmGetAllSupportedDevices, handle, ids, &count); printf("%d GPUs\n", count);
    CHECK(dcgmGroupCreate, handle, 0, "all", &group);
    CHECK(dcgmFieldGroupCreate, handle, 14, wanted, "fields", &fields);
    /* There is nothing to read before somebody watches, and of nobody that is not there. */
    static struct value values[2]; CHECK(dcgmGetLatestValuesForFields, handle, 0, wanted, 2U, values); EXPECT(values[0].status == -16 && values[1].status == -16);
    EXPECT(CALL(dcgmWatchFields, handle, (size_t)999, fields, 100000LL, 10.0, 10) == -1 && CALL(dcgmWatchFields, handle, group, (size_t)999, 100000LL, 10.0, 10) == -1);
    CHECK(dcgmWatchFields, handle, group, fields, 100000LL, 10.0, 10); CHECK(dcgmUpdateAllFields, handle, 1);
    CHECK(dcgmGetLatestValues_v2, handle, group, fields, print, &seen); EXPECT(seen == count);
    /* A group of one, and asking without a group. */
    CHECK(dcgmGroupCreate, handle, 1, "one", &one); CHECK(dcgmGroupAddDevice, handle, one, 0U); EXPECT(CALL(dcgmGroupAddDevice, handle, one, 64U) == -1);
    seen = 0; fflush(stdout); CHECK(dcgmGetLatestValues_v2, handle, one, fields, print, &seen); EXPECT(seen == 1);
    CHECK(dcgmGetLatestValuesForFields, handle, 0, wanted, 2U, values);
    EXPECT(values[0].status != -16 && values[1].status != -16 && values[0].field == 50 && values[0].kind == 's' && values[1].field == 203 && values[1].kind == 'i');
    EXPECT(CALL(dcgmGetLatestValuesForFields, handle, 99, wanted, 2U, values) == -1);
    CHECK(dcgmUnwatchFields, handle, one, fields); CHECK(dcgmGetLatestValuesForFields, handle, 0, wanted, 2U, values); EXPECT(values[0].status == -16);
    CHECK(dcgmGroupDestroy, handle, group); EXPECT(CALL(dcgmGroupDestroy, handle, group) == -1); CHECK(dcgmFieldGroupDestroy, handle, fields);
    CHECK(dcgmStopEmbedded, handle); CHECK(dcgmShutdown);
    return 0;
}
