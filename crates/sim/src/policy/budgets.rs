//! The closed loop of `policy` for each service: what MuxFlow-threshold and MuxFlow-budget share.

use muxflow_policy::node::budget::BudgetLaw;
use muxflow_policy::node::gate::GateParams;
use muxflow_policy::node::share::ShareParams;
use muxflow_types::{Percent, SmCount, SmShare};

use super::part;
use crate::scenario::Service;

/// One law for each service.
#[derive(Debug, Default)]
pub(super) struct Budgets {
    laws: Vec<(String, BudgetLaw)>,
}

impl Budgets {
    /// Takes how much slower each service was, against what `budget` allows it.
    pub(super) fn observe(
        &mut self,
        services: &[Service],
        slower: &[f64],
        budget: impl Fn(&Service) -> f64,
    ) {
        if self.laws.len() != services.len() {
            self.laws = services.iter().map(|s| (s.name.clone(), BudgetLaw::default())).collect();
        }
        for (((_, law), service), slower) in self.laws.iter_mut().zip(services).zip(slower) {
            law.step(*slower, budget(service));
        }
    }

    /// Where the gate holds the load beside this service.
    pub(super) fn set_point(&self, service: usize) -> Option<f64> {
        let gate = GateParams::default();
        self.laws.get(service).map(|(_, law)| law.set_point(gate.set_point, gate.shut_at))
    }

    /// What is lent beside this service.
    pub(super) fn share(&self, need: Percent, sms: SmCount, service: &Service) -> SmShare {
        let law = self.laws.iter().find(|(name, _)| *name == service.name).map(|l| l.1);
        law.unwrap_or_default()
            .share(&ShareParams::default(), need, sms)
            .unwrap_or_else(|_| part(sms, Percent::ZERO))
    }
}
