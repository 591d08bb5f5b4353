//! Beyond the paper: each service states how much slower it may become, and lends by that; and, to
//! compare with, one threshold for the whole cluster, which must be that of the strictest service.

use muxflow_gpu_model::Sharing;
use muxflow_policy::node::budget::BudgetLaw;
use muxflow_policy::node::builtin::{BUILT_IN_TYPES, laws_of};
use muxflow_policy::node::gate::GateParams;
use muxflow_policy::node::share::ShareParams;
use muxflow_types::{
    ClusterPlan, ClusterSnapshot, GpuType, Percent, SmCount, SmShare, SpeedPredictor,
};

use super::{Policy, part, planned};
use crate::outcome::Mode;
use crate::scenario::Service;

/// See the module.
#[derive(Debug)]
pub(super) struct MuxFlowBudget {
    strictest_for_all: bool,
    matching: planned::Matching,
    laws: Vec<(String, BudgetLaw)>,
    /// The load that no type of GPU complains of.
    most_load: f64,
}

impl MuxFlowBudget {
    /// Each service by its own budget.
    pub(super) fn each() -> Self {
        let laws = BUILT_IN_TYPES.iter().filter_map(|t| laws_of(&GpuType::new(t).ok()?));
        MuxFlowBudget {
            strictest_for_all: false,
            matching: planned::Matching::new(),
            laws: Vec::new(),
            most_load: laws.map(|l| l.most_load()).fold(f64::INFINITY, f64::min),
        }
    }

    /// All services by the smallest budget.
    pub(super) fn strictest() -> Self {
        MuxFlowBudget { strictest_for_all: true, ..Self::each() }
    }
}

impl Policy for MuxFlowBudget {
    fn name(&self) -> &'static str {
        if self.strictest_for_all { "muxflow-threshold" } else { "muxflow-budget" }
    }

    fn about(&self) -> &'static str {
        if self.strictest_for_all {
            "the loop of muxflow-budget with one slowdown threshold for all services, the strictest"
        } else {
            "beyond the paper: each service lends by its own slowdown budget"
        }
    }

    fn mode(&self) -> Mode {
        Mode { sharing: Sharing::Mps, gated: true }
    }

    fn watched(&self) -> bool {
        true
    }

    fn observe(&mut self, services: &[Service], slower: &[f64]) {
        if self.laws.len() != services.len() {
            self.laws = services.iter().map(|s| (s.name.clone(), BudgetLaw::default())).collect();
        }
        let strictest = services.iter().map(|s| s.slowdown_budget).fold(f64::INFINITY, f64::min);
        for (((_, law), service), slower) in self.laws.iter_mut().zip(services).zip(slower) {
            let own = service.slowdown_budget;
            law.step(*slower, if self.strictest_for_all { strictest } else { own });
        }
    }

    fn set_point(&self, service: usize) -> Option<f64> {
        let base = GateParams::default().set_point;
        self.laws.get(service).map(|(_, law)| law.set_point(base, self.most_load))
    }

    fn share(&self, need: Percent, sms: SmCount, service: &Service) -> SmShare {
        let law = self.laws.iter().find(|(name, _)| *name == service.name).map(|l| l.1);
        law.unwrap_or_default()
            .share(&ShareParams::default(), need, sms)
            .unwrap_or_else(|_| part(sms, Percent::ZERO))
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        self.matching.plan(snapshot, predictor)
    }
}
