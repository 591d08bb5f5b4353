//! Priority-based time-sharing (the paper's AntMan- and PAI-like baseline): slices of the service are
//! [`WEIGHT`] times as long as those of the job; jobs take GPUs first in, first out.

use muxflow_gpu_model::{ClientId, Sharing};
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{Policy, everything, fifo};
use crate::outcome::Mode;
use crate::scenario::Service;

/// How many times as long the slices of the service are. The paper gives no number.
pub(super) const WEIGHT: f64 = 6.0;

/// See the module.
#[derive(Debug)]
pub(super) struct PriorityTimeSharing;

impl Policy for PriorityTimeSharing {
    fn name(&self) -> &'static str {
        "pb-time-sharing"
    }

    fn about(&self) -> &'static str {
        "time slices of the service six times as long, first in, first out"
    }

    fn mode(&self) -> Mode {
        let favoured = vec![ClientId(0)];
        Mode { sharing: Sharing::PriorityTimeSlice { favoured, weight: WEIGHT }, gated: false }
    }

    fn watched(&self) -> bool {
        false
    }

    fn share(&self, _need: Percent, sms: SmCount, _service: &Service) -> SmShare {
        everything(sms)
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        _predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        Ok(fifo::plan(snapshot, fifo::Order::AsListed))
    }
}
