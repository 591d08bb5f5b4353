"""nvidia-ml-py under the interposer: with the clamp, memory is the quota."""
import sys
import pynvml as n

n.nvmlInit()
handle = n.nvmlDeviceGetHandleByIndex(0)
for memory in (n.nvmlDeviceGetMemoryInfo(handle), n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)):
    assert memory.total == int(sys.argv[2]), memory.total
    assert memory.free <= memory.total
n.nvmlShutdown()
print("ok")
