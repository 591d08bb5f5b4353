//! Beyond the paper: in place of one rule for all services, each service states how much slower it may become, and lends by that.

use muxflow_gpu_model::Sharing;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::{Policy, dynamic, planned};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlowBudget {
    pub(super) matching: planned::Matching,
}

impl Policy for MuxFlowBudget {
    fn name(&self) -> &'static str {
        "muxflow-budget"
    }

    fn about(&self) -> &'static str {
        "beyond the paper: each service has its own slowdown budget"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn share(&self, need: Percent, sms: SmCount, service: &Service) -> SmShare {
        dynamic(need, sms, service.slowdown_budget)
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        self.matching.plan(snapshot, predictor)
    }
}
