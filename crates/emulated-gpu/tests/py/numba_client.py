"""numba-cuda: machine code is timed, copies are exact, memory errors are clean."""
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
assert np.array_equal(on_device.copy_to_host(), x)
assert out.copy_to_host().shape == x.shape
free, total = cuda.current_context().get_memory_info()
assert 0 < free < total
start, end = cuda.event(), cuda.event()
start.record()
scale[4, 256](on_device, out)
end.record()
end.synchronize()
assert cuda.event_elapsed_time(start, end) > 0
try:
    cuda.device_array(1 << 42, dtype=np.uint8)
    raise AssertionError("too much memory was given")
except Exception as error:
    assert "OUT_OF_MEMORY" in str(error), error
print("ok")
