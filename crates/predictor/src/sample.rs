//! Sets of measured pairs of one GPU type.

use std::collections::BTreeSet;

pub use muxflow_types::SpeedSample;
use muxflow_types::{GpuType, WorkloadName};

use crate::error::PredictorError;

/// Measured pairs of one GPU type.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// The GPU type they were measured on.
    pub gpu_type: GpuType,
    /// Where they come from, for the model card.
    pub origin: String,
    /// The pairs.
    pub samples: Vec<SpeedSample>,
}

/// The family of a workload and its batch size, by the convention `family/batch`: two batch sizes
/// of one network are two workloads of one family.
pub fn family_and_batch(name: &WorkloadName) -> (&str, Option<f64>) {
    let text = name.as_str();
    if let Some((family, batch)) = text.rsplit_once('/')
        && !family.is_empty()
        && let Ok(batch) = batch.parse::<u32>()
        && batch > 0
    {
        return (family, Some(f64::from(batch)));
    }
    (text, None)
}

impl Dataset {
    /// The names of all workloads on either side, sorted.
    pub fn workloads(&self) -> BTreeSet<WorkloadName> {
        let both = |s: &SpeedSample| [s.online.workload.clone(), s.offline.workload.clone()];
        self.samples.iter().flat_map(both).collect()
    }

    /// The same data with only these samples.
    pub fn subset(&self, keep: &[usize]) -> Dataset {
        Dataset {
            gpu_type: self.gpu_type.clone(),
            origin: self.origin.clone(),
            samples: keep.iter().map(|&index| self.samples[index].clone()).collect(),
        }
    }

    /// Refuses what no model can learn from.
    pub fn check(&self) -> Result<(), PredictorError> {
        let workloads = self.workloads().len();
        if self.samples.len() < MIN_SAMPLES || workloads < 3 {
            return Err(PredictorError::TooLittleData {
                samples: self.samples.len(),
                workloads,
                needed: MIN_SAMPLES,
            });
        }
        Ok(())
    }

    /// The mean speed.
    pub fn mean_speed(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let count = self.samples.len().max(1) as f64;
        self.samples.iter().map(|s| s.speed).sum::<f64>() / count
    }
}

/// Fewer samples than this teach nothing that the rule does not know.
pub const MIN_SAMPLES: usize = 20;
