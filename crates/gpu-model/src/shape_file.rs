//! The TOML form of a list of workloads.

use serde::Deserialize;

use muxflow_types::{Bytes, WorkloadName};

use crate::error::ModelError;
use crate::shape::{Phase, WorkloadShape};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    workload: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    phase: PhaseName,
    busy_ms: f64,
    host_gap_ms: f64,
    kernels: u32,
    sm_fill: f64,
    occupancy: f64,
    issue: f64,
    bandwidth: f64,
    memory_mib: u64,
    #[serde(default)]
    batch_cost: f64,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum PhaseName {
    Training,
    Inference,
}

pub(crate) fn read(text: &str) -> Result<Vec<WorkloadShape>, ModelError> {
    let file: File = toml::from_str(text)
        .map_err(|e| ModelError::Syntax { what: "workload list", reason: e.to_string() })?;
    file.workload.iter().map(check).collect()
}

fn check(e: &Entry) -> Result<WorkloadShape, ModelError> {
    let subject = format!("workload `{}`", e.name);
    let within = |field: &'static str, value: f64, low: f64, high: f64| {
        if (low..=high).contains(&value) {
            Ok(value)
        } else {
            Err(ModelError::Range { subject: subject.clone(), field, value, low, high })
        }
    };
    let name = WorkloadName::new(&e.name)
        .map_err(|why| ModelError::Name { subject: subject.clone(), reason: why.to_string() })?;
    within("kernels", f64::from(e.kernels), 1.0, 1e6)?;
    Ok(WorkloadShape {
        name,
        phase: match e.phase {
            PhaseName::Training => Phase::Training,
            PhaseName::Inference => Phase::Inference,
        },
        busy_us: within("busy_ms", e.busy_ms, 0.001, 1e7)? * 1e3,
        host_gap_us: within("host_gap_ms", e.host_gap_ms, 0.0, 1e7)? * 1e3,
        kernels: e.kernels,
        sm_fill: within("sm_fill", e.sm_fill, 0.1, 1e5)?,
        occupancy: within("occupancy", e.occupancy, 0.0, 1.0)?,
        issue: within("issue", e.issue, 0.0, 1.0)?,
        bandwidth: within("bandwidth", e.bandwidth, 0.0, 1.0)?,
        memory: Bytes::from_mib(e.memory_mib.min(1 << 30)),
        batch_cost: within("batch_cost", e.batch_cost, 0.0, 1.0)?,
    })
}
