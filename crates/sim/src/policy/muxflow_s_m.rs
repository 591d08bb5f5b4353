//! MuxFlow-S-M: only the protection of services is left; fixed share of 40 %, no matching.

use muxflow_gpu_model::{Rng, Sharing};
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{FIXED_PCT, Policy, fifo, part};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlowSM {
    pub(super) rng: Rng,
}

impl Policy for MuxFlowSM {
    fn name(&self) -> &'static str {
        "muxflow-s-m"
    }

    fn about(&self) -> &'static str {
        "SM share fixed at 40 %, first in, first out onto random Healthy GPUs"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn share(&self, _need: Percent, sms: SmCount, _service: &Service) -> SmShare {
        part(sms, Percent::clamped(FIXED_PCT).unwrap_or(Percent::ZERO))
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        _predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        Ok(fifo::plan(snapshot, fifo::Order::Random(&mut self.rng)))
    }
}
