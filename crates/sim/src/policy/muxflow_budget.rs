//! Beyond the paper: each service states how much slower it may become, and lends by that.

use muxflow_gpu_model::Sharing;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::budgets::Budgets;
use super::{Policy, planned};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MuxFlowBudget {
    matching: planned::Matching,
    budgets: Budgets,
}

impl Policy for MuxFlowBudget {
    fn name(&self) -> &'static str {
        "muxflow-budget"
    }

    fn about(&self) -> &'static str {
        "beyond the paper: each service lends by its own slowdown budget"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn observe(&mut self, services: &[Service], slower: &[f64]) {
        self.budgets.observe(services, slower, |s| s.slowdown_budget);
    }

    fn set_point(&self, service: usize) -> Option<f64> {
        self.budgets.set_point(service)
    }

    fn share(&self, need: Percent, sms: SmCount, service: &Service) -> SmShare {
        self.budgets.share(need, sms, service)
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        self.matching.plan(snapshot, predictor)
    }
}
