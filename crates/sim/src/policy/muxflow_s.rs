//! MuxFlow-S: without dynamic SM allocation, the share is fixed at 40 %; jobs are placed by matching.

use muxflow_gpu_model::Sharing;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{FIXED_PCT, Policy, part, planned};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlowS {
    pub(super) matching: planned::Matching,
}

impl Policy for MuxFlowS {
    fn name(&self) -> &'static str {
        "muxflow-s"
    }

    fn about(&self) -> &'static str {
        "SM share fixed at 40 %, matching"
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
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        self.matching.plan(snapshot, predictor)
    }
}
