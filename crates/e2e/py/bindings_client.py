"""cuda-bindings with NVRTC under the interposer: `fit`, `over` or `loop`."""
import ctypes
import sys
import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = rb"""
extern "C" __global__ void axpy(float a, const float *x, const float *y, float *out, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
"""


def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


program = ok(nvrtc.nvrtcCreateProgram(SOURCE, b"t.cu", 0, [], []))
flags = [b"--gpu-architecture=compute_75"]
ok(nvrtc.nvrtcCompileProgram(program, len(flags), flags))
ptx = b" " * ok(nvrtc.nvrtcGetPTXSize(program))
ok(nvrtc.nvrtcGetPTX(program, ptx))
ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
kernel = ok(driver.cuModuleGetFunction(ok(driver.cuModuleLoadData(ptx)), b"axpy"))
n = 4096
x, y = np.arange(n, dtype=np.float32), np.full(n, 0.25, dtype=np.float32)
out = np.zeros(n, dtype=np.float32)
pointers = [ok(driver.cuMemAlloc(x.nbytes)) for _ in range(3)]
stream = ok(driver.cuStreamCreate(0))
for pointer, data in zip(pointers, (x, y)):
    ok(driver.cuMemcpyHtoDAsync(pointer, data.ctypes.data, data.nbytes, stream))
arguments = (3.0, *[int(p) for p in pointers], n)
kinds = (ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)


def launch():
    ok(driver.cuLaunchKernel(kernel, n // 256, 1, 1, 256, 1, 1, 0, stream, (arguments, kinds), 0))


mode = sys.argv[1]
if mode == "fit":
    launch()
    ok(driver.cuMemcpyDtoHAsync(out.ctypes.data, pointers[2], out.nbytes, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert np.array_equal(out, 3 * x + y)
    free, total = ok(driver.cuMemGetInfo())
    assert total == int(sys.argv[2]) and free < total, (free, total)
    print("ok")
elif mode == "over":
    error, _ = driver.cuMemAlloc(int(sys.argv[2]))
    print("refused", int(error))
    error, _ = driver.cuMemAllocAsync(int(sys.argv[2]), stream)
    print("refused", int(error))
else:
    print("looping", flush=True)
    while True:
        launch()
