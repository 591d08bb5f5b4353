//! One plan, made off the runtime's threads. Whatever goes wrong with it, the replica lives on to plan
//! what comes next.

use std::sync::Arc;

use muxflow_policy::cluster::{Memory, Planner, lint};
use muxflow_predictor::Registry;
use muxflow_types::ClusterPlan;

use super::snapshot::Assembled;
use crate::Error;

/// Plans with what the last plan left, and whose speeds are in it. `None` when there is no plan or it
/// breaks its own rules: then nothing is changed.
pub(crate) async fn plan(
    planner: &Planner,
    kept: &mut (Memory, Arc<Registry>),
    world: Assembled,
    speeds: Arc<Registry>,
) -> Option<(Assembled, ClusterPlan)> {
    let planner = planner.clone();
    let (mut memory, of) = std::mem::take(kept);
    if !Arc::ptr_eq(&of, &speeds) {
        memory = Memory::default();
    }
    let planning = tokio::task::spawn_blocking(move || {
        let plan = planner.plan_next(&mut memory, &world.snapshot, &*speeds)?;
        let findings = lint(&world.snapshot, &plan, planner.parameters());
        Ok::<_, Error>((world, plan, findings, (memory, speeds)))
    });
    let (world, plan, findings) = match planning.await {
        Ok(Ok((world, plan, findings, memory))) => {
            *kept = memory;
            (world, plan, findings)
        }
        Ok(Err(error)) => {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "there is no plan; nothing is changed"
            );
            return None;
        }
        Err(error) => {
            tracing::error!(%error, "the planner broke down; nothing is changed");
            return None;
        }
    };
    for finding in &findings {
        tracing::error!(%finding, "the plan breaks a rule and is not carried out");
    }
    findings.is_empty().then_some((world, plan))
}
