//! A plan made again from its record: the same snapshot, settings and models give the same plan,
//! byte for byte.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use muxflow_api::cluster::PlanRecord;
use muxflow_policy::cluster::{Parameters, Planner};
use muxflow_predictor::{Registry, file};
use muxflow_types::{GpuType, Micros, Percent};

use crate::error::{ManagerError, Result};

/// The form of a record.
pub const VERSION: u32 = 1;

/// Plans a record again.
pub fn replay(record: &PlanRecord) -> Result<String> {
    if record.version != VERSION {
        return Err(ManagerError::invalid(
            "version",
            format!(
                "the record is of form {}, and this program knows form {VERSION}",
                record.version
            ),
        ));
    }
    let snapshot = muxflow_api::snapshot::parse(&record.snapshot)
        .map_err(|error| ManagerError::invalid("snapshot", error.to_string()))?;
    let parameters = Parameters {
        interval: Micros(record.interval_us),
        restart_cost: Micros(record.restart_cost_us),
        max_disruption: Percent::new(record.max_disruption_pct)
            .map_err(|error| ManagerError::invalid("max_disruption_pct", error.to_string()))?,
        ..Parameters::default()
    };
    let mut registry = Registry::default();
    for (name, text) in &record.models {
        let field = || format!("models.{name}");
        let gpu_type = GpuType::new(name)
            .map_err(|error| ManagerError::invalid(field(), error.to_string()))?;
        let bytes = BASE64
            .decode(text)
            .map_err(|error| ManagerError::invalid(field(), error.to_string()))?;
        let model = file::from_bytes_for(&bytes, &gpu_type)
            .map_err(|error| ManagerError::invalid(field(), error.to_string()))?;
        registry.insert(model);
    }
    let plan = Planner::new(parameters)?.plan(&snapshot, &registry)?;
    Ok(muxflow_api::plan::render(&plan))
}

/// A model as it stands in a record.
pub fn model_text(bytes: &[u8]) -> String {
    BASE64.encode(bytes)
}
