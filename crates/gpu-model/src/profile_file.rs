//! The TOML form of a GPU profile: read as typed, then checked field by field.

use serde::Deserialize;

use muxflow_types::{Bytes, GpuType, Micros};

use crate::error::ModelError;
use crate::fault::FaultRates;
use crate::power::PowerModel;
use crate::profile::{Contention, GpuProfile, RefreshPeriods, TimeSlicing};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    sms: u32,
    memory_mib: u64,
    context_memory_mib: u64,
    bandwidth_gb_s: f64,
    compute_tflops: f64,
    warps_per_sm: u32,
    compute_capability: [u32; 2],
    power: PowerTable,
    contention: ContentionTable,
    time_slicing: SlicingTable,
    refresh_ms: RefreshTable,
    faults: FaultTable,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PowerTable {
    max_mhz: u32,
    min_mhz: u32,
    step_mhz: u32,
    clock_period_ms: f64,
    idle_w: f64,
    sm_w: f64,
    dram_w: f64,
    limit_w: f64,
    exponent: f64,
    ambient_c: f64,
    celsius_per_w: f64,
    thermal_time_s: f64,
    throttle_c: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ContentionTable {
    bandwidth_saturation_share: f64,
    residency_weight: f64,
    dram_interference: f64,
    cache_interference: f64,
    #[serde(default)]
    block_hold: f64,
    idle_issue_power: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SlicingTable {
    slice_us: f64,
    switch_us: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RefreshTable {
    profiling: u64,
    utilisation: u64,
    clock: u64,
    power: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultTable {
    device_error_per_day: f64,
    mps_crash_per_day: f64,
    mps_hang_per_day: f64,
    xid31_per_day: f64,
    kill_propagates: f64,
}

struct Checker {
    subject: String,
}

impl Checker {
    fn within(
        &self,
        field: &'static str,
        value: f64,
        low: f64,
        high: f64,
    ) -> Result<f64, ModelError> {
        if (low..=high).contains(&value) {
            Ok(value)
        } else {
            Err(ModelError::Range { subject: self.subject.clone(), field, value, low, high })
        }
    }
}

pub(crate) fn read(text: &str) -> Result<GpuProfile, ModelError> {
    let file: File = toml::from_str(text)
        .map_err(|e| ModelError::Syntax { what: "GPU profile", reason: e.to_string() })?;
    let subject = format!("GPU profile `{}`", file.name);
    let gpu_type = GpuType::new(&file.name)
        .map_err(|e| ModelError::Name { subject: subject.clone(), reason: e.to_string() })?;
    let check = Checker { subject };
    check.within("sms", f64::from(file.sms), 1.0, 4096.0)?;
    check.within("warps_per_sm", f64::from(file.warps_per_sm), 1.0, 1024.0)?;
    #[expect(clippy::cast_precision_loss, reason = "only for the range check")]
    check.within("memory_mib", file.memory_mib as f64, 256.0, 4.0e6)?;
    #[expect(clippy::cast_precision_loss, reason = "only for the range check")]
    check.within(
        "context_memory_mib",
        file.context_memory_mib as f64,
        0.0,
        file.memory_mib as f64 / 4.0,
    )?;
    Ok(GpuProfile {
        gpu_type,
        sms: file.sms,
        memory: Bytes::from_mib(file.memory_mib),
        context_memory: Bytes::from_mib(file.context_memory_mib),
        bandwidth_gb_s: check.within("bandwidth_gb_s", file.bandwidth_gb_s, 1.0, 1e5)?,
        compute_tflops: check.within("compute_tflops", file.compute_tflops, 0.01, 1e5)?,
        warps_per_sm: file.warps_per_sm,
        compute_capability: (file.compute_capability[0], file.compute_capability[1]),
        power: power(&check, &file.power)?,
        contention: contention(&check, &file.contention)?,
        time_slicing: TimeSlicing {
            slice_us: check.within("slice_us", file.time_slicing.slice_us, 1.0, 1e6)?,
            switch_us: check.within("switch_us", file.time_slicing.switch_us, 0.0, 1e5)?,
        },
        refresh: RefreshPeriods {
            profiling: Micros::from_millis(file.refresh_ms.profiling),
            utilisation: Micros::from_millis(file.refresh_ms.utilisation),
            clock: Micros::from_millis(file.refresh_ms.clock),
            power: Micros::from_millis(file.refresh_ms.power),
        },
        faults: faults(&check, &file.faults)?,
    })
}

fn power(check: &Checker, t: &PowerTable) -> Result<PowerModel, ModelError> {
    let max = f64::from(t.max_mhz);
    check.within("max_mhz", max, f64::from(t.min_mhz), 10_000.0)?;
    check.within("min_mhz", f64::from(t.min_mhz), 1.0, max)?;
    check.within("step_mhz", f64::from(t.step_mhz), 1.0, max)?;
    Ok(PowerModel {
        max_mhz: t.max_mhz,
        min_mhz: t.min_mhz,
        step_mhz: t.step_mhz,
        clock_period_us: check.within("clock_period_ms", t.clock_period_ms, 0.1, 1e4)? * 1e3,
        idle_w: check.within("idle_w", t.idle_w, 0.0, 1e4)?,
        sm_w: check.within("sm_w", t.sm_w, 0.0, 1e4)?,
        dram_w: check.within("dram_w", t.dram_w, 0.0, 1e4)?,
        limit_w: check.within("limit_w", t.limit_w, t.idle_w, 1e4)?,
        exponent: check.within("exponent", t.exponent, 1.0, 4.0)?,
        ambient_c: check.within("ambient_c", t.ambient_c, -20.0, 60.0)?,
        celsius_per_w: check.within("celsius_per_w", t.celsius_per_w, 0.0, 10.0)?,
        thermal_time_s: check.within("thermal_time_s", t.thermal_time_s, 0.1, 1e4)?,
        throttle_c: check.within("throttle_c", t.throttle_c, t.ambient_c, 150.0)?,
    })
}

fn contention(check: &Checker, t: &ContentionTable) -> Result<Contention, ModelError> {
    let share = t.bandwidth_saturation_share;
    Ok(Contention {
        bandwidth_saturation_share: check.within("bandwidth_saturation_share", share, 0.01, 1.0)?,
        residency_weight: check.within("residency_weight", t.residency_weight, 0.0, 1.0)?,
        dram_interference: check.within("dram_interference", t.dram_interference, 0.0, 10.0)?,
        cache_interference: check.within("cache_interference", t.cache_interference, 0.0, 10.0)?,
        block_hold: check.within("block_hold", t.block_hold, 0.0, 1.0)?,
        idle_issue_power: check.within("idle_issue_power", t.idle_issue_power, 0.0, 1.0)?,
    })
}

fn faults(check: &Checker, t: &FaultTable) -> Result<FaultRates, ModelError> {
    Ok(FaultRates {
        device_error_per_day: check.within(
            "device_error_per_day",
            t.device_error_per_day,
            0.0,
            1e3,
        )?,
        mps_crash_per_day: check.within("mps_crash_per_day", t.mps_crash_per_day, 0.0, 1e3)?,
        mps_hang_per_day: check.within("mps_hang_per_day", t.mps_hang_per_day, 0.0, 1e3)?,
        xid31_per_day: check.within("xid31_per_day", t.xid31_per_day, 0.0, 1e3)?,
        kill_propagates: check.within("kill_propagates", t.kill_propagates, 0.0, 1.0)?,
    })
}
