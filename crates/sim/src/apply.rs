//! From a snapshot to a plan to what happens.

use std::time::Instant;

use muxflow_types::{Change, ClusterPlan};

use crate::engine::Engine;
use crate::error::SimError;
use crate::timed::Timed;

impl Engine<'_> {
    pub(crate) fn plan(&mut self) -> Result<(), SimError> {
        let at_s = self.now_s();
        let snapshot = self.snapshot()?;
        let slower: Vec<f64> = self
            .measured
            .iter_mut()
            .map(|sums| {
                let (shared, alone) = std::mem::take(sums);
                if alone > 0.0 { shared / alone - 1.0 } else { 0.0 }
            })
            .collect();
        self.policy.observe(&self.scenario.services, &slower);
        let begun = Instant::now();
        let timed = Timed::new(self.predictor);
        let plan = self
            .policy
            .plan(&snapshot, &timed)
            .map_err(|reason| SimError::Plan { at_s, reason })?;
        self.planning_s += begun.elapsed().as_secs_f64();
        self.predicting_s += timed.spent_s();
        self.counts.plans += 1;
        self.apply(&plan);
        Ok(())
    }

    /// Carries a plan out: first all stops, then all starts.
    pub(crate) fn apply(&mut self, plan: &ClusterPlan) {
        for e in &plan.evictions {
            if let (Some(&g), Some(&j)) = (self.gpu_of.get(&e.gpu), self.job_of.get(&e.job)) {
                self.counts.moves += 1;
                self.stop_job(g, j);
            }
        }
        let mut starts = Vec::new();
        for a in &plan.assignments {
            let (Some(&g), Some(&j)) = (self.gpu_of.get(&a.gpu), self.job_of.get(&a.job)) else {
                continue;
            };
            match &a.change {
                Change::Stay => {}
                Change::Start => starts.push((g, j, a.share)),
                Change::Restart => {
                    self.counts.moves += 1;
                    self.stop_job(g, j);
                    starts.push((g, j, a.share));
                }
                Change::Move { from } => {
                    self.counts.moves += 1;
                    if let Some(&old) = self.gpu_of.get(from) {
                        self.stop_job(old, j);
                    }
                    starts.push((g, j, a.share));
                }
            }
        }
        for (g, j, share) in starts {
            let room = self.gpus[g].running.len() < self.policy.most_jobs();
            if room && !self.gpus[g].down {
                self.start(g, j, share);
            }
        }
    }
}
