"""pycuda under the interposer: linked against libcuda.so.1 by name, and the oldest interfaces."""
import sys
import numpy as np
import pycuda.driver as drv

drv.init()
context = drv.Device(0).make_context()
mode = sys.argv[1]
if mode == "fit":
    data = np.arange(1024, dtype=np.float32)
    memory = drv.mem_alloc(data.nbytes)
    drv.memcpy_htod(memory, data)
    back = np.empty_like(data)
    drv.memcpy_dtoh(back, memory)
    assert np.array_equal(back, data)
    free, total = drv.mem_get_info()
    assert total == int(sys.argv[2]) and free < total
    print("ok")
elif mode == "over":
    try:
        drv.mem_alloc(int(sys.argv[2]))
        print("given")
    except drv.MemoryError:
        print("refused", 2)
else:
    stream = drv.Stream()
    memory = drv.mem_alloc(1 << 20)
    print("looping", flush=True)
    while True:
        drv.memset_d8(memory, 0, 1 << 20)
context.pop()
