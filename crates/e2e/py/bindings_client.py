"""cuda-bindings with NVRTC: `compute` alone; `fit`, `over` or `loop` under the interposer."""
import ctypes
import sys
import numpy as np
from cuda.bindings import driver, nvrtc

SOURCE = rb"""
extern "C" __global__ void axpy(float a, const float *x, const float *y, float *out, unsigned long long n) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
extern "C" __global__ void sums(const int *in, int *out) {
    __shared__ int tile[128];
    int t = threadIdx.x;
    tile[t] = in[blockIdx.x * 128 + t];
    __syncthreads();
    for (int k = 64; k > 0; k /= 2) { if (t < k) tile[t] += tile[t + k]; __syncthreads(); }
    if (t == 0) atomicAdd(out, tile[0]);
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
module = ok(driver.cuModuleLoadData(ptx))
kernel = ok(driver.cuModuleGetFunction(module, b"axpy"))
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


def computed():
    launch()
    ok(driver.cuMemcpyDtoHAsync(out.ctypes.data, pointers[2], out.nbytes, stream))
    ok(driver.cuStreamSynchronize(stream))
    assert np.array_equal(out, 3 * x + y), out[:8]


mode = sys.argv[1]
if mode == "compute":
    computed()
    sums = ok(driver.cuModuleGetFunction(module, b"sums"))
    values = np.arange(1024, dtype=np.int32)
    ok(driver.cuMemcpyHtoD(pointers[0], values.ctypes.data, values.nbytes))
    ok(driver.cuMemsetD32(pointers[1], 0, 1))
    arguments = ((int(pointers[0]), int(pointers[1])), (ctypes.c_uint64, ctypes.c_uint64))
    ok(driver.cuLaunchKernel(sums, 8, 1, 1, 128, 1, 1, 0, stream, arguments, 0))
    ok(driver.cuStreamSynchronize(stream))
    total = np.zeros(1, dtype=np.int32)
    ok(driver.cuMemcpyDtoH(total.ctypes.data, pointers[1], 4))
    assert total[0] == values.sum(), total
    assert int(driver.cuMemAlloc(1 << 45)[0]) == 2
    print("ok")
elif mode == "fit":
    computed()
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
