//! Utilisation, clocks, power, temperature, errors.

use std::ffi::{c_int, c_uint, c_ulonglong};

use muxflow_abi::nvml::{
    NVML_CLOCK_MEM, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, nvmlUtilization_t,
};
use muxflow_emulated_gpu::wire::Kind;

use crate::ffi::{Answer, Device, Gpu, Out, api};

/// `nvmlTemperature_t` of version 1.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Temperature {
    version: c_uint,
    sensor: c_uint,
    temperature: c_int,
}

fn clock_now(gpu: Gpu, kind: c_int) -> Answer<c_uint> {
    let (_, stats) = gpu.stats()?;
    match kind {
        NVML_CLOCK_MEM => Ok(stats.clock_mhz[1]),
        0 | 1 | 3 => Ok(stats.clock_mhz[0]),
        _ => Err(NVML_ERROR_INVALID_ARGUMENT),
    }
}

fn clock_most(gpu: Gpu, kind: c_int) -> Answer<c_uint> {
    let (device, _) = gpu.stats()?;
    match kind {
        NVML_CLOCK_MEM => Ok(device.facts.memory_mhz),
        0 | 1 | 3 => Ok(device.facts.max_mhz),
        _ => Err(NVML_ERROR_INVALID_ARGUMENT),
    }
}

fn ecc(device: &Device) -> Answer {
    if device.facts.features & 2 == 0 { Err(NVML_ERROR_NOT_SUPPORTED) } else { Ok(()) }
}

api! {
    fn nvmlDeviceGetUtilizationRates(gpu: Gpu, out: Out<nvmlUtilization_t>) {
        let [gpu, memory] = gpu.stats()?.1.utilisation_pct;
        out.put(nvmlUtilization_t { gpu, memory })
    }
    fn nvmlDeviceGetEncoderUtilization, nvmlDeviceGetDecoderUtilization, nvmlDeviceGetJpgUtilization, nvmlDeviceGetOfaUtilization(gpu: Gpu, out: Out<c_uint>, period_us: Out<c_uint>) {
        let (device, _) = gpu.stats()?;
        out.put(0)?;
        period_us.put(device.facts.refresh_ms[1] * 1000)
    }
    fn nvmlDeviceGetClockInfo(gpu: Gpu, kind: c_int, out: Out<c_uint>) {
        out.put(clock_now(gpu, kind)?)
    }
    fn nvmlDeviceGetMaxClockInfo(gpu: Gpu, kind: c_int, out: Out<c_uint>) {
        out.put(clock_most(gpu, kind)?)
    }
    fn nvmlDeviceGetMaxCustomerBoostClock(gpu: Gpu, kind: c_int, out: Out<c_uint>) {
        out.put(clock_most(gpu, kind)?)
    }
    fn nvmlDeviceGetApplicationsClock, nvmlDeviceGetDefaultApplicationsClock(gpu: Gpu, kind: c_int, out: Out<c_uint>) {
        out.put(clock_most(gpu, kind)?)
    }
    fn nvmlDeviceGetClock(gpu: Gpu, kind: c_int, which: c_int, out: Out<c_uint>) {
        out.put(if which == 0 { clock_now(gpu, kind)? } else { clock_most(gpu, kind)? })
    }
    fn nvmlDeviceGetPowerUsage(gpu: Gpu, out: Out<c_uint>) { out.put(gpu.stats()?.1.power_mw[0]) }
    fn nvmlDeviceGetPowerManagementLimit, nvmlDeviceGetEnforcedPowerLimit(gpu: Gpu, out: Out<c_uint>) {
        out.put(gpu.stats()?.1.power_mw[1])
    }
    fn nvmlDeviceGetPowerManagementDefaultLimit(gpu: Gpu, out: Out<c_uint>) {
        out.put(gpu.reach()?.facts.power_limit_mw[1])
    }
    fn nvmlDeviceGetPowerManagementLimitConstraints(gpu: Gpu, least: Out<c_uint>, most: Out<c_uint>) {
        let limit = gpu.reach()?.facts.power_limit_mw[1];
        least.put(limit * 6 / 10)?;
        most.put(limit)
    }
    fn nvmlDeviceSetPowerManagementLimit(gpu: Gpu, milliwatts: c_uint) {
        let (device, _) = gpu.stats()?;
        let limit = device.facts.power_limit_mw[1];
        if milliwatts < limit * 6 / 10 || milliwatts > limit {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        device.ask(Kind::Set, &[1, milliwatts.into()]).map(drop)
    }
    fn nvmlDeviceGetPowerManagementMode(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(1)
    }
    fn nvmlDeviceGetPowerState, nvmlDeviceGetPerformanceState(gpu: Gpu, out: Out<c_int>) {
        let (_, stats) = gpu.stats()?;
        out.put(if stats.throttle_reasons & 1 == 1 { 8 } else { 0 })
    }
    fn nvmlDeviceGetTotalEnergyConsumption(gpu: Gpu, out: Out<c_ulonglong>) {
        out.put(gpu.stats()?.1.energy_mj)
    }
    fn nvmlDeviceGetTemperature(gpu: Gpu, sensor: c_int, out: Out<c_uint>) {
        if sensor != 0 {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        out.put(gpu.stats()?.1.temperature_c)
    }
    fn nvmlDeviceGetTemperatureV(gpu: Gpu, out: Out<Temperature>) {
        let mut value = out.get()?;
        value.temperature = gpu.stats()?.1.temperature_c.cast_signed();
        out.put(value)
    }
    fn nvmlDeviceGetTemperatureThreshold(gpu: Gpu, kind: c_int, out: Out<c_uint>) {
        let [slow, stop] = gpu.reach()?.facts.temperature_limits_c;
        match kind {
            0 => out.put(stop),
            1 | 3 => out.put(slow),
            _ => Err(NVML_ERROR_NOT_SUPPORTED),
        }
    }
    fn nvmlDeviceGetCurrentClocksThrottleReasons, nvmlDeviceGetCurrentClocksEventReasons(gpu: Gpu, out: Out<c_ulonglong>) {
        out.put(gpu.stats()?.1.throttle_reasons.into())
    }
    fn nvmlDeviceGetSupportedClocksThrottleReasons, nvmlDeviceGetSupportedClocksEventReasons(gpu: Gpu, out: Out<c_ulonglong>) {
        gpu.reach()?;
        out.put(0x1ff)
    }
    fn nvmlDeviceGetPcieThroughput(gpu: Gpu, which: c_int, out: Out<c_uint>) {
        // Kilobytes per second over a short while: two readings of the counter. 0 is what the GPU sends.
        let index = usize::from(which == 0);
        let (_, first) = gpu.stats()?;
        std::thread::sleep(std::time::Duration::from_millis(20));
        let (_, second) = gpu.stats()?;
        let bytes = second.pcie_bytes[index].saturating_sub(first.pcie_bytes[index]);
        let ns = second.time_ns.saturating_sub(first.time_ns).max(1);
        out.put((bytes.saturating_mul(1_000_000) / ns) as c_uint)
    }
    fn nvmlDeviceGetEccMode(gpu: Gpu, now: Out<c_uint>, later: Out<c_uint>) {
        ecc(gpu.reach()?)?;
        now.put(1)?;
        later.put(1)
    }
    fn nvmlDeviceGetTotalEccErrors(gpu: Gpu, kind: c_uint, _counter: c_uint, out: Out<c_ulonglong>) {
        let (device, stats) = gpu.stats()?;
        ecc(device)?;
        out.put(stats.ecc_errors[usize::from(kind == 0)].into())
    }
    fn nvmlDeviceGetMemoryErrorCounter(gpu: Gpu, kind: c_uint, _counter: c_uint, _place: c_uint, out: Out<c_ulonglong>) {
        let (device, stats) = gpu.stats()?;
        ecc(device)?;
        out.put(stats.ecc_errors[usize::from(kind == 0)].into())
    }
    fn nvmlDeviceGetRemappedRows(gpu: Gpu, corrected: Out<c_uint>, uncorrected: Out<c_uint>, pending: Out<c_uint>, failed: Out<c_uint>) {
        let (device, stats) = gpu.stats()?;
        if device.facts.capability[0] < 8 {
            return Err(NVML_ERROR_NOT_SUPPORTED);
        }
        let [a, b] = stats.remapped_rows;
        corrected.put(a)?;
        uncorrected.put(b)?;
        pending.put(c_uint::from(a + b > 0))?;
        failed.put(0)
    }
    fn nvmlDeviceGetRetiredPagesPendingStatus(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(0)
    }
}
