"""nvidia-ml-py on an idle T4: what monitoring tools ask."""
import pynvml as n

n.nvmlInit()
assert n.nvmlDeviceGetCount() >= 1
handle = n.nvmlDeviceGetHandleByIndex(0)
assert n.nvmlDeviceGetName(handle) == "Tesla T4"
assert n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(handle))
memory = n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
assert memory.total > memory.free > 0
assert n.nvmlDeviceGetUtilizationRates(handle).gpu == 0
assert n.nvmlDeviceGetPowerUsage(handle) <= n.nvmlDeviceGetEnforcedPowerLimit(handle)
assert n.nvmlDeviceGetComputeRunningProcesses(handle) == []
assert n.nvmlDeviceGetPciInfo(handle).busId.startswith("00000000:3B")
assert n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU) > 0
try:
    n.nvmlDeviceGetFanSpeed(handle)
    raise AssertionError("no fan")
except n.NVMLError_NotSupported:
    pass
n.nvmlShutdown()
print("ok")
