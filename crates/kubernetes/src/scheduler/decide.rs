//! From a plan to requests, with no choices left for whoever sends them.
//!
//! A plan says what should hold; a cluster gets there in steps. A pod cannot be moved: it is evicted,
//! its controller creates another one, and that one is planned in the next cycle. A GPU whose pod was
//! evicted is taken until the pod is gone, so nothing is bound to it in the same cycle.

use std::collections::{BTreeMap, BTreeSet};

use muxflow_types::{
    Assignment, Change, ClusterPlan, Eviction, EvictionReason, GpuId, HealthState, WaitReason,
};

use super::pods::{Hold, PodName};
use super::snapshot::{Assembled, Planned};
use crate::names;
use crate::quantity;

/// One request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// Bind a waiting pod.
    Bind { pod: PodName, node: String, gpu: GpuId, annotations: BTreeMap<String, String> },
    /// Evict a running pod, with the word and the sentence of its event; forced, when it could not have
    /// stayed.
    Evict { pod: PodName, reason: &'static str, note: String, forced: bool },
    /// Say why a pod waits.
    Wait { pod: PodName, note: String },
    /// Say why a running pod is not moved, and what its owner can do about it.
    Held { pod: PodName, hold: Hold, note: String },
}

/// All requests of a cycle, in the order in which they are to be sent: evictions free what is in
/// danger, bindings use what is free, explanations can wait.
pub(crate) fn decide(mut world: Assembled, plan: &ClusterPlan) -> Vec<Action> {
    let mut actions = Vec::new();
    count_places(&mut world);
    let occupied: BTreeSet<GpuId> =
        world.snapshot.gpus.iter().filter(|g| g.running.is_some()).map(|g| g.gpu.clone()).collect();
    for (pod, gpu) in &world.doubled {
        let note = format!("another pod holds GPU {gpu}; this one is evicted to be placed anew");
        actions.push(Action::Evict {
            pod: pod.clone(),
            reason: "GpuTakenTwice",
            note,
            forced: true,
        });
    }
    for eviction in &plan.evictions {
        if let Some(planned) = world.pods.get(&eviction.job) {
            actions.push(evict(planned, eviction));
        }
    }
    let mut told: Vec<Action> = Vec::new();
    for assignment in &plan.assignments {
        let Some(planned) = world.pods.get(&assignment.job).cloned() else { continue };
        match &assignment.change {
            Change::Stay => {}
            Change::Restart | Change::Move { .. } => {
                actions.push(relocate(&world, &planned, assignment));
            }
            Change::Start if occupied.contains(&assignment.gpu) => {
                let note = format!(
                    "GPU {} is planned for it and will be free once the pod on it has left",
                    assignment.gpu
                );
                told.push(Action::Wait { pod: planned.pod, note });
            }
            Change::Start => match bind(&mut world, &planned, assignment) {
                Ok(action) => actions.push(action),
                Err(note) => told.push(Action::Wait { pod: planned.pod, note }),
            },
        }
    }
    // Asked once for each requirement: thousands of pods may wait for the same reason.
    let mut reasons: BTreeMap<usize, Option<String>> = BTreeMap::new();
    for waiting in &plan.waiting {
        let Some(planned) = world.pods.get(&waiting.job) else { continue };
        if planned.running.is_some() {
            continue; // Being evicted; its successor will be told.
        }
        let note = match waiting.reason {
            WaitReason::NoGpus if world.taken > 0 => {
                format!("all {} GPUs that are reported carry a job", world.taken)
            }
            WaitReason::NoGpuOfType => reasons
                .entry(planned.requirement)
                .or_insert_with(|| world.node_reason(planned.requirement))
                .clone()
                .unwrap_or_else(|| waiting.reason.to_string()),
            _ => waiting.reason.to_string(),
        };
        told.push(Action::Wait { pod: planned.pod.clone(), note });
    }
    told.extend(world.held.iter().map(held_back));
    for (pod, why) in &world.refused {
        told.push(Action::Wait { pod: pod.clone(), note: why.clone() });
    }
    actions.append(&mut told);
    actions
}

/// Who runs keeps its place on its node until it is gone, whatever the plan says.
fn count_places(world: &mut Assembled) {
    for planned in world.pods.values() {
        let node = planned.running.as_ref().and_then(|node| world.nodes.get_mut(node));
        let held = world.requirements[planned.requirement].requests.get(names::OFFLINE_RESOURCE);
        if let (Some(node), Some(held)) = (node, held) {
            *node.free.entry(names::OFFLINE_RESOURCE.to_owned()).or_default() -= held;
        }
    }
}

/// A Job that would pay for a move is told so while it runs: its owner can do something about it.
fn held_back((pod, hold): &(PodName, Hold)) -> Action {
    let note = format!("it will not be moved to a faster GPU: {}", hold.words());
    Action::Held { pod: pod.clone(), hold: *hold, note }
}

fn evict(planned: &Planned, eviction: &Eviction) -> Action {
    let pod = planned.pod.clone();
    let gpu = &eviction.gpu;
    let (reason, note) = match &eviction.reason {
        EvictionReason::Health => ("GpuOverlimit", ill(gpu)),
        EvictionReason::GpuGone => ("GpuGone", format!("GPU {gpu} is no longer reported")),
        EvictionReason::NoLongerFits(why) => {
            ("NoLongerFits", format!("it no longer fits GPU {gpu}: {why}"))
        }
        EvictionReason::Displaced => {
            if let Some(hold) = planned.hold {
                let note =
                    format!("a job that counts more would take its place, but {}", hold.words());
                return Action::Held { pod, hold, note };
            }
            ("Displaced", format!("a job that counts more takes GPU {gpu}"))
        }
    };
    let warning = match planned.hold {
        Some(hold) => format!("{note} ({})", hold.words()),
        None => note,
    };
    let forced = eviction.reason != EvictionReason::Displaced;
    Action::Evict { pod, reason, note: warning, forced }
}

/// Why a pod leaves a GPU whose agent cannot see to it.
fn ill(gpu: &GpuId) -> String {
    format!("the last word of the agent of GPU {gpu} was that offline work leaves")
}

fn relocate(world: &Assembled, planned: &Planned, assignment: &Assignment) -> Action {
    let pod = planned.pod.clone();
    if let Change::Move { from } = &assignment.change
        && !health(world, from).is_none_or(HealthState::allows_running)
    {
        let note = format!("{}; GPU {} is free", ill(from), assignment.gpu);
        return Action::Evict { pod, reason: "GpuOverlimit", note, forced: true };
    }
    if let Some(hold) = planned.hold {
        let note = format!("GPU {} would be faster, but {}", assignment.gpu, hold.words());
        return Action::Held { pod, hold, note };
    }
    let (reason, note) = match &assignment.change {
        Change::Move { from } => (
            "Moved",
            format!(
                "leaves GPU {from}: it is predicted to run at {:.2} of its speed alone on GPU {}",
                assignment.predicted_speed, assignment.gpu
            ),
        ),
        _ => (
            "ShareChanged",
            format!("restarts to use {} on GPU {}", assignment.share, assignment.gpu),
        ),
    };
    Action::Evict { pod, reason, note, forced: false }
}

/// The state of a GPU of the snapshot, whose GPUs are sorted by id.
fn health(world: &Assembled, gpu: &GpuId) -> Option<HealthState> {
    let gpus = &world.snapshot.gpus;
    gpus.binary_search_by(|g| g.gpu.cmp(gpu)).ok().map(|i| gpus[i].health)
}

/// A binding, if the node still has room after those before it; else why not.
fn bind(
    world: &mut Assembled,
    planned: &Planned,
    assignment: &Assignment,
) -> Result<Action, String> {
    let pod = planned.pod.clone();
    let gpus = &world.snapshot.gpus; // Sorted by id.
    let place = gpus.binary_search_by(|g| g.gpu.cmp(&assignment.gpu));
    let node = place.map(|i| gpus[i].node.as_str().to_owned()).unwrap_or_default();
    let requirement = &world.requirements[planned.requirement];
    let obstacle = match world.nodes.get(&node) {
        Some(view) => requirement.obstacle(&view.node, &view.free),
        None => None,
    };
    if let Some(obstacle) = obstacle {
        return Err(format!(
            "GPU {} is free, but its node {node} is now {obstacle}",
            assignment.gpu
        ));
    }
    if let Some(view) = world.nodes.get_mut(&node) {
        quantity::subtract(&mut view.free, &requirement.requests);
    }
    let share = assignment.share;
    let annotations = BTreeMap::from([
        (names::GPU.to_owned(), assignment.gpu.to_string()),
        (names::SHARE.to_owned(), format!("{}/{}", share.sms().0, share.total().0)),
        (names::QUOTA.to_owned(), assignment.quota.0.to_string()),
        (names::SPEED.to_owned(), format!("{:.3}", assignment.predicted_speed)),
    ]);
    Ok(Action::Bind { pod, node, gpu: assignment.gpu.clone(), annotations })
}
