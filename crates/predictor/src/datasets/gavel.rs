//! Gavel's measurements (OSDI '20): solo and paired training throughput on K80, P100 and V100.
//!
//! A JSON object: GPU type → `('Model (batch size B)', gpus)` → `null` (solo steps per second) and
//! the other workloads (steps per second of this one, of the other). Zero means that it did not fit
//! or was not measured. The names and the solo throughput are all there is: no utilisation, no
//! share.

use std::collections::BTreeMap;

use muxflow_types::{GpuType, Micros, ProfileRecord, WorkloadName};
use serde_json::Value;

use crate::error::PredictorError;
use crate::sample::{Dataset, SpeedSample};

/// `('ResNet-18 (batch size 16)', 1)` → `ResNet-18/16`; `None` for more than one GPU.
fn single_gpu_workload(key: &str) -> Option<String> {
    let inner = key.strip_prefix("('")?.strip_suffix(", 1)")?.strip_suffix('\'')?;
    Some(match inner.split_once(" (batch size ") {
        Some((family, batch)) => format!("{family}/{}", batch.strip_suffix(')')?),
        None => inner.to_owned(),
    })
}

/// Single-GPU pairs of one GPU type (`k80`, `p100`, `v100`), each in both directions.
pub fn read(text: &str, gpu_type: &str, source_name: &str) -> Result<Dataset, PredictorError> {
    let bad =
        |problem: String| PredictorError::Dataset { source_name: source_name.into(), problem };
    let root: Value = serde_json::from_str(text).map_err(|e| bad(format!("not JSON: {e}")))?;
    let types = root.as_object().ok_or_else(|| bad("not an object of GPU types".into()))?;
    let table = types.get(gpu_type).and_then(Value::as_object).ok_or_else(|| {
        let known: Vec<&str> = types.keys().map(String::as_str).collect();
        bad(format!("no GPU type `{gpu_type}`; there are {}", known.join(", ")))
    })?;
    let gpu = GpuType::new(gpu_type).map_err(|e| bad(e.to_string()))?;

    let mut profiles: BTreeMap<&str, (ProfileRecord, f64)> = BTreeMap::new();
    for (key, row) in table {
        let Some(name) = single_gpu_workload(key) else { continue };
        let solo = row.get("null").and_then(Value::as_f64).unwrap_or(0.0);
        if solo > 0.0 {
            let name = WorkloadName::new(&name).map_err(|e| bad(format!("{key}: {e}")))?;
            let mut profile = ProfileRecord::unknown(name, gpu.clone());
            let time = Micros::from_secs_f64(1.0 / solo).map_err(|e| bad(format!("{key}: {e}")))?;
            profile.solo_time = Some(time);
            profiles.insert(key, (profile, solo));
        }
    }
    let mut samples = Vec::new();
    for (key, (offline, solo)) in &profiles {
        for (other, (online, _)) in &profiles {
            let Some(pair) = table[*key].get(*other) else { continue };
            let speed = |at: usize| pair.get(at).and_then(Value::as_f64);
            let (Some(this), Some(that)) = (speed(0), speed(1)) else {
                return Err(bad(format!("{key} with {other}: expected two numbers, not {pair}")));
            };
            if this > 0.0 && that > 0.0 {
                samples.push(SpeedSample {
                    online: online.clone(),
                    offline: offline.clone(),
                    share: None,
                    speed: (this / solo).min(1.0),
                    at: Micros::ZERO,
                });
            }
        }
    }
    Ok(Dataset { gpu_type: gpu, origin: format!("Gavel, {source_name}, {gpu_type}"), samples })
}
