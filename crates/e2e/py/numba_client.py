"""numba-cuda, whose machine code is timed only: `timed` alone; `fit`, `over` or `loop` under the
interposer. Launches by cuLaunchKernelEx."""
import sys
import numpy as np
from numba import cuda


@cuda.jit
def scale(x, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i] = 2 * x[i]


x = np.arange(1000, dtype=np.float32)
on_device, out = cuda.to_device(x), cuda.device_array_like(x)
scale[4, 256](on_device, out)
cuda.synchronize()
mode = sys.argv[1]
if mode == "timed":
    assert np.array_equal(on_device.copy_to_host(), x)
    assert out.copy_to_host().shape == x.shape
    start, end = cuda.event(), cuda.event()
    start.record()
    scale[4, 256](on_device, out)
    end.record()
    end.synchronize()
    assert cuda.event_elapsed_time(start, end) > 0
    try:
        cuda.device_array(1 << 42, dtype=np.uint8)
        print("given")
    except Exception as error:
        print("ok" if "OUT_OF_MEMORY" in str(error) else error)
elif mode == "fit":
    assert np.array_equal(on_device.copy_to_host(), x)
    free, total = cuda.current_context().get_memory_info()
    assert total == int(sys.argv[2]) and free < total, (free, total)
    print("ok")
elif mode == "over":
    try:
        cuda.device_array(int(sys.argv[2]), dtype=np.uint8)
        print("given")
    except Exception as error:
        print("refused", 2 if "OUT_OF_MEMORY" in str(error) else error)
else:
    print("looping", flush=True)
    while True:
        scale[4, 256](on_device, out)
