"""pycuda under the interposer: `fit`, `over` or `loop`. Linked against libcuda.so.1 by name."""
import sys
import numpy as np
import pycuda.driver as drv

PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry twice(.param .u64 data, .param .u32 n) {
    .reg .pred %p<2>;
    .reg .f32 %f<3>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [data];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra DONE;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd2, %rd3;
    ld.global.f32 %f1, [%rd4];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd4], %f2;
DONE:
    ret;
}
"""

drv.init()
context = drv.Device(0).make_context()
twice = drv.module_from_buffer(PTX).get_function("twice")
data = np.arange(1000, dtype=np.float32)
memory = drv.mem_alloc(data.nbytes)
drv.memcpy_htod(memory, data)


def launch():
    twice(memory, np.uint32(data.size), grid=(4, 1), block=(256, 1, 1))


mode = sys.argv[1]
if mode == "fit":
    launch()
    back = np.empty_like(data)
    drv.memcpy_dtoh(back, memory)
    assert np.array_equal(back, 2 * data)
    free, total = drv.mem_get_info()
    assert total == int(sys.argv[2]) and free < total, (free, total)
    print("ok")
elif mode == "over":
    for take in (drv.mem_alloc, lambda size: drv.managed_empty(size, np.uint8, mem_flags=drv.mem_attach_flags.GLOBAL)):
        try:
            take(int(sys.argv[2]))
            print("given")
        except drv.MemoryError:
            print("refused", 2)
else:
    print("looping", flush=True)
    while True:
        launch()
context.pop()
