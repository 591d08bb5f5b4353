//! From a snapshot to a plan to what happens.

use std::time::Instant;

use muxflow_types::{Change, ClusterPlan};

use crate::engine::Engine;
use crate::error::SimError;

impl Engine<'_> {
    pub(crate) fn plan(&mut self) -> Result<(), SimError> {
        let at_s = self.now_s();
        let snapshot = self.snapshot()?;
        let begun = Instant::now();
        let plan = self
            .policy
            .plan(&snapshot, self.predictor)
            .map_err(|reason| SimError::Plan { at_s, reason })?;
        self.planning_s += begun.elapsed().as_secs_f64();
        self.counts.plans += 1;
        self.apply(&plan);
        Ok(())
    }

    /// Carries a plan out: first all stops, then all starts.
    pub(crate) fn apply(&mut self, plan: &ClusterPlan) {
        for e in &plan.evictions {
            if let Some(&g) = self.gpu_of.get(&e.gpu) {
                self.counts.moves += 1;
                self.stop(g, false);
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
                    self.stop(g, false);
                    starts.push((g, j, a.share));
                }
                Change::Move { from } => {
                    self.counts.moves += 1;
                    if let Some(&old) = self.gpu_of.get(from) {
                        self.stop(old, false);
                    }
                    starts.push((g, j, a.share));
                }
            }
        }
        for (g, j, share) in starts {
            if self.gpus[g].running.is_none() && !self.gpus[g].down {
                self.start(g, j, share);
            }
        }
    }
}
