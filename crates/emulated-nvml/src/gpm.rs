//! GPM: means between two samples, on profiles that have it.

use std::ffi::{c_char, c_uint};

use muxflow_abi::nvml::{
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NO_DATA, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS,
    nvmlGpmMetric_t, nvmlGpmMetricsGetHead_t, nvmlGpmSupport_t,
};
use muxflow_emulated_gpu::facts::Stats;

use crate::ffi::{Answer, Gpu, Out, api};

/// A sample: counters at a moment.
#[derive(Debug, Default)]
struct Sample {
    stats: Option<Stats>,
}

/// A handle from C.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
struct Handle(*mut Sample);

impl Handle {
    fn get(self) -> Answer<Stats> {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: made by `nvmlGpmSampleAlloc` and not freed yet, as the C interface demands.
        unsafe { (*self.0).stats }.ok_or(NVML_ERROR_INVALID_ARGUMENT)
    }
}

/// A metric over the time between two samples, in NVML's units. The counters refresh once per period:
/// two samples of the same period have no time between them.
fn metric(id: c_uint, a: &Stats, b: &Stats) -> Answer<f64> {
    let of = |i: usize, scale: f64| {
        let seconds = (b.profiling_time_ns as f64 - a.profiling_time_ns as f64) / 1e9;
        if seconds <= 0.0 {
            return Err(NVML_ERROR_NO_DATA);
        }
        Ok((b.profiling_sums[i] - a.profiling_sums[i]) / seconds * scale)
    };
    let mean = |i: usize| of(i, 100.0).map(|percent| percent.clamp(0.0, 100.0));
    match id {
        1 => mean(0),
        2 => mean(1),
        3 => mean(2),
        4 => mean(1).map(|percent| percent * 0.2),
        5 => mean(3),
        10 => mean(4),
        20 => of(6, 1e-6),
        21 => of(5, 1e-6),
        _ => Err(NVML_ERROR_NOT_SUPPORTED),
    }
}

fn name(id: c_uint) -> *mut c_char {
    let text = match id {
        1 => c"GRAPHICS_UTIL",
        2 => c"SM_UTIL",
        3 => c"SM_OCCUPANCY",
        4 => c"INTEGER_UTIL",
        5 => c"ANY_TENSOR_UTIL",
        10 => c"DRAM_BW_UTIL",
        20 => c"PCIE_TX_PER_SEC",
        21 => c"PCIE_RX_PER_SEC",
        _ => c"",
    };
    text.as_ptr().cast_mut()
}

api! {
    fn nvmlGpmQueryDeviceSupport(gpu: Gpu, out: Out<nvmlGpmSupport_t>) {
        let device = gpu.reach()?;
        let mut support = out.get()?;
        support.isSupportedDevice = device.facts.features & 1;
        out.put(support)
    }
    fn nvmlGpmSampleAlloc(out: Out<Handle>) { out.put(Handle(Box::into_raw(Box::default()))) }
    fn nvmlGpmSampleFree(sample: Handle) {
        if sample.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: made by `nvmlGpmSampleAlloc`; the caller gives it up.
        drop(unsafe { Box::from_raw(sample.0) });
        Ok(())
    }
    fn nvmlGpmSampleGet(gpu: Gpu, sample: Handle) {
        let (device, stats) = gpu.stats()?;
        if device.facts.features & 1 == 0 {
            return Err(NVML_ERROR_NOT_SUPPORTED);
        }
        if sample.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: made by `nvmlGpmSampleAlloc` and used by this caller alone.
        unsafe { (*sample.0).stats = Some(stats) };
        Ok(())
    }
    fn nvmlGpmMetricsGet(request: Out<nvmlGpmMetricsGetHead_t>) {
        let head = request.get()?;
        let a = Handle(head.sample1.cast()).get()?;
        let b = Handle(head.sample2.cast()).get()?;
        // SAFETY: the list follows the head in the caller's structure.
        let list = unsafe { request.raw().add(1).cast::<nvmlGpmMetric_t>() };
        for i in 0..(head.numMetrics as usize).min(477) {
            // SAFETY: the caller says that so many entries are there.
            let entry = unsafe { &mut *list.add(i) };
            match metric(entry.metricId, &a, &b) {
                Ok(value) => {
                    entry.value = value;
                    entry.nvmlReturn = NVML_SUCCESS;
                    entry.shortName = name(entry.metricId);
                    entry.longName = name(entry.metricId);
                    entry.unit = if entry.metricId >= 20 { c"MiB/sec" } else { c"%" }.as_ptr().cast_mut();
                }
                Err(error) => entry.nvmlReturn = error,
            }
        }
        Ok(())
    }
}
