//! MuxFlow: the share follows the forecast of what the service needs, jobs are placed by matching.

use muxflow_gpu_model::Sharing;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{Policy, dynamic, planned};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlow {
    pub(super) matching: planned::Matching,
}

impl Policy for MuxFlow {
    fn name(&self) -> &'static str {
        "muxflow"
    }

    fn about(&self) -> &'static str {
        "dynamic SM share, matching"
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
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        self.matching.plan(snapshot, predictor)
    }
}
