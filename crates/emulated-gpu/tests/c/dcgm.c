/* A DCGM client with its own declarations: prints fields of all GPUs, one line each. */
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

int main(void) {
    load("libdcgm.so.4");
    size_t handle, group, fields, one; unsigned ids[32]; int count, seen = 0;
    unsigned short wanted[] = {50, 203, 252, 100, 155, 230, 1001, 1002, 1003, 1004, 1005, 9999};
    CHECK(dcgmInit); EXPECT(CALL(dcgmConnect, "127.0.0.1", &handle) == -21); CHECK(dcgmStartEmbedded, 2, &handle);
    CHECK(dcgmGetAllSupportedDevices, handle, ids, &count); printf("%d GPUs\n", count);
    CHECK(dcgmGroupCreate, handle, 0, "all", &group);
    CHECK(dcgmFieldGroupCreate, handle, 12, wanted, "fields", &fields);
    CHECK(dcgmWatchFields, handle, group, fields, 100000LL, 10.0, 10); CHECK(dcgmUpdateAllFields, handle, 1);
    CHECK(dcgmGetLatestValues_v2, handle, group, fields, print, &seen); EXPECT(seen == count);
    /* A group of one, and asking without a group. */
    CHECK(dcgmGroupCreate, handle, 1, "one", &one); CHECK(dcgmGroupAddDevice, handle, one, 0U);
    seen = 0; fflush(stdout); CHECK(dcgmGetLatestValues_v2, handle, one, fields, print, &seen); EXPECT(seen == 1);
    static struct value values[2]; CHECK(dcgmGetLatestValuesForFields, handle, 0, wanted, 2U, values);
    EXPECT(values[0].field == 50 && values[0].kind == 's' && values[1].field == 203 && values[1].kind == 'i');
    EXPECT(CALL(dcgmGetLatestValuesForFields, handle, 99, wanted, 2U, values) == -1);
    CHECK(dcgmGroupDestroy, handle, group); CHECK(dcgmFieldGroupDestroy, handle, fields);
    CHECK(dcgmStopEmbedded, handle); CHECK(dcgmShutdown);
    return 0;
}
