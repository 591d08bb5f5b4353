//! One threshold for the whole cluster: the loop of MuxFlow-budget, but every service is held to the
//! budget of the strictest, because one number must protect all.

use muxflow_gpu_model::Sharing;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use super::budgets::Budgets;
use super::{Policy, planned};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct MuxFlowThreshold {
    matching: planned::Matching,
    budgets: Budgets,
}

impl Policy for MuxFlowThreshold {
    fn name(&self) -> &'static str {
        "muxflow-threshold"
    }

    fn about(&self) -> &'static str {
        "the loop of muxflow-budget with one slowdown threshold for all services, the strictest"
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn observe(&mut self, services: &[Service], slower: &[f64]) {
        let strictest = services.iter().map(|s| s.slowdown_budget).fold(f64::INFINITY, f64::min);
        self.budgets.observe(services, slower, |_| strictest);
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
