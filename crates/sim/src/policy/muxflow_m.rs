//! MuxFlow-M: without matching, jobs go first in, first out onto random Healthy GPUs; the share is dynamic.

use muxflow_gpu_model::{Rng, Sharing};
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{Policy, dynamic, fifo};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlowM {
    pub(super) rng: Rng,
}

impl Policy for MuxFlowM {
    fn name(&self) -> &'static str {
        "muxflow-m"
    }

    fn about(&self) -> &'static str {
        "dynamic SM share, first in, first out onto random Healthy GPUs"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn share(&self, need: Percent, sms: SmCount, _service: &Service) -> SmShare {
        dynamic(need, sms, 0.0)
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        _predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        Ok(fifo::plan(snapshot, fifo::Order::Random(&mut self.rng)))
    }
}
