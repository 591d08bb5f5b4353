//! Plans by exact matching: the manager's own planner, with its memory from plan to plan and its
//! lint after every plan.

use muxflow_policy::cluster::{Memory, Parameters, Planner, lint};
use muxflow_types::{ClusterPlan, ClusterSnapshot, SpeedPredictor};

/// The planner of the real manager.
#[derive(Debug)]
pub(super) struct Matching {
    planner: Option<Planner>,
    memory: Memory,
}

impl Matching {
    pub(super) fn new() -> Self {
        Matching { planner: Planner::new(Parameters::default()).ok(), memory: Memory::default() }
    }

    /// The same with no classes of equals.
    pub(super) fn without_classes() -> Self {
        let parameters = Parameters { collapse: false, ..Parameters::default() };
        Matching { planner: Planner::new(parameters).ok(), memory: Memory::default() }
    }

    pub(super) fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        let planner = self.planner.as_ref().ok_or("the planner's settings make no sense")?;
        let plan =
            planner.plan_next(&mut self.memory, snapshot, predictor).map_err(|e| e.to_string())?;
        match lint(snapshot, &plan, planner.parameters()).first() {
            Some(finding) => Err(format!("the plan fails its lint: {finding}")),
            None => Ok(plan),
        }
    }
}
