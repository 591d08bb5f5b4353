//! Memory of a GPU as a whole.

use muxflow_abi::nvml::{
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH, nvmlBAR1Memory_t, nvmlMemory_t, nvmlMemory_v2_t,
    struct_version,
};

use crate::ffi::{Answer, Gpu, Out, api};

/// Total, reserved, free, used.
fn memory(gpu: Gpu) -> Answer<[u64; 4]> {
    let (device, stats) = gpu.stats()?;
    let [usable, reserved] = device.facts.memory_bytes;
    Ok([usable + reserved, reserved, usable.saturating_sub(stats.used_bytes), stats.used_bytes])
}

api! {
    fn nvmlDeviceGetMemoryInfo(gpu: Gpu, out: Out<nvmlMemory_t>) {
        let [total, reserved, free, used] = memory(gpu)?;
        // The first version counts the reserve as used.
        out.put(nvmlMemory_t { total, free, used: used + reserved })
    }
    fn nvmlDeviceGetMemoryInfo_v2(gpu: Gpu, out: Out<nvmlMemory_v2_t>) {
        let version = out.get()?.version;
        if version != struct_version(size_of::<nvmlMemory_v2_t>(), 2) {
            return Err(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
        }
        let [total, reserved, free, used] = memory(gpu)?;
        out.put(nvmlMemory_v2_t { version, total, reserved, free, used })
    }
    fn nvmlDeviceGetBAR1MemoryInfo(gpu: Gpu, out: Out<nvmlBAR1Memory_t>) {
        gpu.reach()?;
        let total = 256 << 20;
        out.put(nvmlBAR1Memory_t { bar1Total: total, bar1Free: total - (5 << 20), bar1Used: 5 << 20 })
    }
}
