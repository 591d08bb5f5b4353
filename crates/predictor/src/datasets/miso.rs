//! MISO's measurements (SoCC '22) on A100.
//!
//! [`read`] makes samples of the iteration times on MIG slices, joined with the solo utilisation:
//! the speed of a workload on a part of the GPU with nobody beside it, against the whole GPU. The
//! online half of these samples is an idle GPU. A slice cuts memory bandwidth too, which an MPS
//! share does not: use them to judge how models follow the share, not to train for production.
//!
//! [`read_mixes`] reads the speeds of seven co-running jobs under MPS at 100, 50 and 14 % of active
//! threads. Each job is scaled by its own best of the three and has no name, so these are no
//! samples; they show how the share acts on mixes.

use std::collections::{BTreeMap, BTreeSet};

use muxflow_types::{Bytes, GpuType, Micros, Percent, ProfileRecord, WorkloadName};
use serde_json::Value;

use crate::error::PredictorError;
use crate::sample::{Dataset, SpeedSample};

fn refuse(source_name: &str, problem: impl Into<String>) -> PredictorError {
    PredictorError::Dataset { source_name: source_name.to_owned(), problem: problem.into() }
}

/// Sevenths of the GPU's SMs in a slice such as `3g.20gb`.
fn slice(name: &str) -> Option<u8> {
    name.split_once('g')?.0.parse().ok().filter(|n| (1..=7).contains(n))
}

/// The median seconds of an iteration after the first epoch, which warms up.
fn median_time(epochs: &Value) -> Option<f64> {
    let epochs = epochs.as_object()?;
    let of = |skip_first: bool| -> Vec<f64> {
        epochs
            .iter()
            .filter(|(epoch, _)| !skip_first || epoch.as_str() != "0")
            .filter_map(|(_, times)| times.as_array())
            .flatten()
            .filter_map(Value::as_f64)
            .filter(|time| *time > 0.0)
            .collect()
    };
    let mut times = of(true);
    if times.is_empty() {
        times = of(false);
    }
    times.sort_unstable_by(f64::total_cmp);
    times.get(times.len() / 2).copied()
}

fn solo_profile(
    profiles: &Value,
    model: &str,
    batch: &str,
    gpu_type: &GpuType,
    solo_s: f64,
) -> Result<ProfileRecord, String> {
    let name = WorkloadName::new(&format!("{model}/{batch}")).map_err(|e| e.to_string())?;
    let metric = |metric: &str| profiles.get(model)?.get(metric)?.get(batch)?.as_f64();
    let mut record = ProfileRecord::unknown(name, gpu_type.clone());
    record.gpu_util = metric("util_sm").and_then(Percent::clamped);
    record.dram_activity = metric("util_mem").and_then(Percent::clamped);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "mebibytes")]
    let mib = |value: f64| Bytes::from_mib(value.max(0.0) as u64);
    record.memory = metric("memory").map(mib);
    record.solo_time = Some(Micros::from_secs_f64(solo_s).map_err(|e| e.to_string())?);
    Ok(record)
}

/// Samples from `mig_iteration_times.json` and `solo_profiles_a100.json`.
pub fn read(times: &str, profiles: &str, source_name: &str) -> Result<Dataset, PredictorError> {
    let json = |text: &str| -> Result<Value, PredictorError> {
        serde_json::from_str(text).map_err(|e| refuse(source_name, format!("not JSON: {e}")))
    };
    let (times, profiles) = (json(times)?, json(profiles)?);
    let times = times.as_object().ok_or_else(|| refuse(source_name, "not an object of slices"))?;
    let mut by_workload: BTreeMap<(&str, &str), BTreeMap<u8, f64>> = BTreeMap::new();
    for (key, epochs) in times {
        let parts: Vec<&str> = key.split('/').collect();
        let &[slice_name, model, batch] = parts.as_slice() else {
            return Err(refuse(source_name, format!("`{key}` is not slice/model/batch")));
        };
        let sevenths = slice(slice_name)
            .ok_or_else(|| refuse(source_name, format!("`{slice_name}` is not a MIG slice")))?;
        if let Some(time) = median_time(epochs) {
            by_workload.entry((model, batch)).or_default().insert(sevenths, time);
        }
    }
    let gpu_type = GpuType::new("A100").map_err(|e| refuse(source_name, e.to_string()))?;
    let idle_name = WorkloadName::new("idle").map_err(|e| refuse(source_name, e.to_string()))?;
    let mut idle = ProfileRecord::unknown(idle_name, gpu_type.clone());
    idle.gpu_util = Some(Percent::ZERO);
    idle.dram_activity = Some(Percent::ZERO);
    let mut samples = Vec::new();
    for ((model, batch), slices) in by_workload {
        let Some(&whole) = slices.get(&7) else { continue };
        let offline = solo_profile(&profiles, model, batch, &gpu_type, whole)
            .map_err(|problem| refuse(source_name, format!("{model}/{batch}: {problem}")))?;
        for (&sevenths, &time) in slices.iter().filter(|(s, _)| **s < 7) {
            samples.push(SpeedSample {
                online: idle.clone(),
                offline: offline.clone(),
                share: Percent::clamped(f64::from(sevenths) / 7.0 * 100.0),
                speed: (whole / time).min(1.0),
                at: Micros::ZERO,
            });
        }
    }
    Ok(Dataset { gpu_type, origin: format!("MISO, MIG slices, {source_name}"), samples })
}

/// Speeds of seven jobs at 100, 50 and 14 % of active threads.
pub type Mix = [[f64; 7]; 3];

/// The different mixes in `mps_speed_input.npy`, jobs in a fixed order.
pub fn read_mixes(npy: &[u8], source_name: &str) -> Result<Vec<Mix>, PredictorError> {
    let header = npy
        .get(10..)
        .filter(|_| npy.starts_with(b"\x93NUMPY\x01"))
        .ok_or_else(|| refuse(source_name, "not a NumPy array of version 1"))?;
    let length = usize::from(u16::from_le_bytes([npy[8], npy[9]]));
    let (text, body) = header
        .split_at_checked(length)
        .ok_or_else(|| refuse(source_name, "it ends inside its header"))?;
    let text = String::from_utf8_lossy(text);
    if !text.contains("'<f8'") || !text.contains("False") || !text.contains(", 3, 7)") {
        return Err(refuse(source_name, format!("expected n×3×7 doubles in C order, not {text}")));
    }
    let numbers: Vec<f64> =
        body.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect();
    let mut seen = BTreeSet::new();
    let mut mixes = Vec::new();
    for mix in numbers.as_chunks::<21>().0 {
        let mut jobs: Vec<[u64; 3]> =
            (0..7).map(|job| [0, 1, 2].map(|level| mix[level * 7 + job].to_bits())).collect();
        jobs.sort_unstable();
        if seen.insert(jobs.clone()) {
            let mut out: Mix = [[0.0; 7]; 3];
            for (job, levels) in jobs.iter().enumerate() {
                for (level, bits) in levels.iter().enumerate() {
                    out[level][job] = f64::from_bits(*bits);
                }
            }
            mixes.push(out);
        }
    }
    Ok(mixes)
}
