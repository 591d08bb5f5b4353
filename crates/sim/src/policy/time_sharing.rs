//! Time-sharing (the paper's Gandiva-like baseline): the driver gives equal slices to both tenants;
//! jobs take GPUs first in, first out. No protection of any kind.

use muxflow_gpu_model::Sharing;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{Policy, everything, fifo};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct TimeSharing;

impl Policy for TimeSharing {
    fn name(&self) -> &'static str {
        "time-sharing"
    }

    fn about(&self) -> &'static str {
        "equal time slices by the driver, first in, first out"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::TimeSlice, gated: false }
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
