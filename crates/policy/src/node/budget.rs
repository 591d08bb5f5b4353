//! Beyond the paper: how much a service lends, steered by how much slower it may become.
//!
//! The paper has one rule for all services (lend what the forecast leaves, hold the GPU load at one
//! set point) and leaves open how to choose the threshold for each service. Here the choice is a
//! closed loop: what the service loses beside its neighbours is measured (its latency against the
//! same with the gate closed for a short window), compared with its budget, and one number, the
//! level, is moved. At level ½ the service lends as the paper's rule says; below, it lends a part of
//! those SMs and the gate holds a lower load; above, the gate holds a higher one, up to what
//! health still calls well.
//!
//! What a tolerant service lends above the rule is the gate's alone. SMs are lent for as long as a
//! job stays, and a quiet night would lend what the morning needs; the gate takes back at once. And
//! a load that the watch evicts for is nobody's gain, whatever the budget says.

use muxflow_types::{Percent, SmCount, SmShare, UnitError};

use super::share::ShareParams;

/// Where the paper's rule stands.
const NEUTRAL: f64 = 0.5;
/// How far one step moves the level upwards.
const RAISE: f64 = 0.05;
/// How far one step moves it downwards at least, and for each budget of excess.
const LOWER: f64 = 0.1;
/// The level is raised while less than this part of the budget is used: between the two it rests.
const FILL: f64 = 0.8;

/// How much one service lends.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BudgetLaw {
    level: f64,
}

impl Default for BudgetLaw {
    fn default() -> Self {
        BudgetLaw { level: NEUTRAL }
    }
}

impl BudgetLaw {
    /// The level: 0 lends least, 1 most.
    pub fn level(&self) -> f64 {
        self.level
    }

    /// Takes one measurement: how much slower the service was (0.1 is 10 %), and how much it may be.
    /// What is no number is no measurement.
    pub fn step(&mut self, slower: f64, budget: f64) {
        if !(slower.is_finite() && budget.is_finite()) {
            return;
        }
        let budget = budget.max(1e-3);
        let change = if slower > budget {
            -LOWER * (slower / budget - 1.0).clamp(1.0, 4.0)
        } else if slower < FILL * budget {
            RAISE
        } else {
            0.0
        };
        self.level = (self.level + change).clamp(0.0, 1.0);
    }

    /// The SMs to lend beside a service that will need this activity: what the rule says from ½ on,
    /// less below, nothing at 0. It is what the planner sees, so jobs go where more is lent; a job
    /// that is here already is held by the gate.
    pub fn share(
        &self,
        params: &ShareParams,
        demand: Percent,
        total: SmCount,
    ) -> Result<SmShare, UnitError> {
        let rule = params.share(demand, total)?;
        let part = (self.level / NEUTRAL).min(1.0);
        let sms =
            (1..=rule.sms().0).rev().find(|n| f64::from(*n) <= f64::from(rule.sms().0) * part);
        let share = SmShare::new(SmCount(sms.unwrap_or(0)), total)?;
        if share.percent() < params.min_share {
            return SmShare::new(SmCount(0), total);
        }
        Ok(share)
    }

    /// The GPU load that the gate holds, where the common set point is `base` and `most` the load
    /// up to which health has no complaint: half of `base` at level 0, `base` at ½, `most` at 1.
    pub fn set_point(&self, base: f64, most: f64) -> f64 {
        let above = (self.level - NEUTRAL).max(0.0) / (1.0 - NEUTRAL);
        base * (0.5 + self.level.min(NEUTRAL)) + (most - base).max(0.0) * above
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_middle_is_the_common_rule() {
        let law = BudgetLaw::default();
        let params = ShareParams::default();
        for demand in [5.0, 20.0, 60.0] {
            let demand = Percent::new(demand).unwrap();
            let total = SmCount(40);
            assert_eq!(
                law.share(&params, demand, total).unwrap(),
                params.share(demand, total).unwrap()
            );
        }
        assert!((law.set_point(0.6, 0.7) - 0.6).abs() < 1e-12);
    }

    #[test]
    fn a_quiet_night_does_not_lend_what_the_morning_needs() {
        let mut law = BudgetLaw::default();
        for _ in 0..40 {
            law.step(0.0, 0.3);
        }
        let (params, demand) = (ShareParams::default(), Percent::new(40.0).unwrap());
        let lent = law.share(&params, demand, SmCount(40)).unwrap();
        assert_eq!(lent, params.share(demand, SmCount(40)).unwrap(), "the forecast is kept");
        assert!((law.set_point(0.6, 0.7) - 0.7).abs() < 1e-12, "the gate lends more");
        assert!((law.set_point(0.6, 0.5) - 0.6).abs() < 1e-12, "or as much as for all");
    }

    #[test]
    fn whoever_is_over_budget_lends_less_and_then_nothing() {
        let mut law = BudgetLaw::default();
        let (params, demand) = (ShareParams::default(), Percent::new(20.0).unwrap());
        let mut lent = Vec::new();
        for _ in 0..6 {
            lent.push(law.share(&params, demand, SmCount(40)).unwrap().sms().0);
            law.step(0.03, 0.02);
        }
        assert_eq!(lent, [32, 25, 19, 12, 6, 0]);
    }

    #[test]
    fn a_service_that_reacts_settles_inside_its_budget() {
        // The slowdown grows with the level; budgets on both sides of the start.
        for budget in [0.02, 0.1, 0.4] {
            let mut law = BudgetLaw::default();
            let slower = |level: f64| 0.6 * level * level;
            for _ in 0..60 {
                law.step(slower(law.level()), budget);
            }
            let mut over = 0;
            for _ in 0..40 {
                law.step(slower(law.level()), budget);
                over += u32::from(slower(law.level()) > budget * 1.5);
            }
            assert!(over < 10, "budget {budget}: over it {over} times of 40");
        }
    }

    proptest! {
        #[test]
        fn whatever_is_measured_the_level_stays_in_range(
            steps in proptest::collection::vec((any::<f64>(), any::<f64>()), 0..50),
            demand in 0.0f64..=100.0,
        ) {
            let mut law = BudgetLaw::default();
            for (slower, budget) in steps {
                law.step(slower, budget);
                prop_assert!((0.0..=1.0).contains(&law.level()));
                prop_assert!((0.3..=0.7).contains(&law.set_point(0.6, 0.7)));
                let demand = Percent::new(demand).unwrap();
                prop_assert!(law.share(&ShareParams::default(), demand, SmCount(40)).is_ok());
            }
        }
    }
}
