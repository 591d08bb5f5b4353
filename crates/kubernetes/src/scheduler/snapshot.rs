//! From the objects of a cluster to the snapshot that the planner reads.
//!
//! The planner knows types of GPUs, not nodes with labels and taints. Nodes that no waiting job can
//! tell apart are alike, so each GPU gets a *kind*: its type, and which of the jobs' different
//! requirements its node meets. A job then accepts the kinds whose nodes it fits. Profiles are told
//! per kind too, so the planner stays as it is on one machine and in the simulator.

use std::cell::LazyCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use muxflow_predictor::Registry;
use muxflow_types::{ClusterSnapshot, GpuId, GpuType, JobId, JobSnapshot, Micros, SmShare};

use super::apart::Rules;
use super::constraint::{self, Obstacle, Requirement};
use super::offer::{self, Kinds, Seen};
use super::pods::{self, Hold, PodName, Wishes};
use super::profiles::Profiles;
use crate::names;
use crate::quantity::{self, Amounts};
use crate::resource::{Gpu, Profile};

/// A pod on a GPU that nobody reports is left alone for so long: its agent may be starting, or somebody
/// has deleted an object that the agent will write again.
const GONE_AFTER: Micros = Micros::from_secs(300);

/// A binding that was made but that the watch has not shown yet.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Assumed {
    pub(crate) node: String,
    pub(crate) gpu: GpuId,
    /// When to believe the watch again, where the API server did not answer: it may have bound the pod
    /// all the same. None for a binding that was made; the watch will show it.
    pub(crate) until: Option<Instant>,
}

/// What the watches show at one moment.
#[derive(Debug)]
pub(crate) struct View<'a> {
    pub(crate) at: Micros,
    pub(crate) scheduler: &'a str,
    /// A GPU whose agent has been silent for longer takes nothing new.
    pub(crate) stale_after: Micros,
    /// Silence is a reason to evict once it was watched for so long.
    pub(crate) listen: Micros,
    /// For how long this leader has watched.
    pub(crate) watched: Micros,
    /// Whether running jobs may be moved and displaced in this cycle.
    pub(crate) reschedule: bool,
    pub(crate) pods: &'a [Arc<Pod>],
    pub(crate) nodes: &'a [Arc<Node>],
    pub(crate) gpus: &'a [Arc<Gpu>],
    pub(crate) profiles: &'a [Arc<Profile>],
    pub(crate) models: &'a Registry,
    pub(crate) jobs: &'a [Arc<Job>],
    pub(crate) assumed: &'a BTreeMap<String, Assumed>,
    /// Pods that are left out of this plan, by uid, and why.
    pub(crate) aside: &'a BTreeMap<String, String>,
    /// GPUs with a pod that nobody reports, and since when.
    pub(crate) missing: &'a BTreeMap<GpuId, Micros>,
}

impl View<'_> {
    fn is_gone(&self, gpu: &GpuId) -> bool {
        self.missing.get(gpu).is_some_and(|since| self.at.since(*since) >= GONE_AFTER)
    }
}

/// A pod in the plan.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) pod: PodName,
    pub(crate) requirement: usize,
    pub(crate) hold: Option<Hold>,
    /// The node on which it is.
    pub(crate) running: Option<String>,
}

/// The snapshot, and what is needed to carry a plan of it out.
#[derive(Debug)]
pub(crate) struct Assembled {
    pub(crate) snapshot: ClusterSnapshot,
    pub(crate) pods: BTreeMap<JobId, Planned>,
    pub(crate) requirements: Vec<Requirement>,
    pub(crate) nodes: BTreeMap<String, NodeView>,
    /// GPUs that are reported but not on offer in this cycle: taken, or about to be free.
    pub(crate) taken: usize,
    /// Pods that have a GPU.
    pub(crate) residents: usize,
    /// GPUs with a pod that nobody reports.
    pub(crate) missing: BTreeSet<GpuId>,
    /// Pods that cannot be planned, and why.
    pub(crate) refused: Vec<(PodName, String)>,
    /// Pods on a GPU that another pod holds.
    pub(crate) doubled: Vec<(PodName, GpuId)>,
    /// Pods that run and whose owner has not been told yet that they are never moved, and why.
    pub(crate) held: Vec<(PodName, Hold)>,
}

impl Assembled {
    /// Whether nothing is to be done for anybody.
    pub(crate) fn is_idle(&self) -> bool {
        self.pods.is_empty()
            && self.refused.is_empty()
            && self.doubled.is_empty()
            && self.held.is_empty()
    }
}

/// A node and what is free on it.
#[derive(Debug, Clone)]
pub(crate) struct NodeView {
    pub(crate) node: Arc<Node>,
    pub(crate) free: Amounts,
}

/// A pod with a GPU.
#[derive(Debug)]
pub(crate) struct Resident<'a> {
    pub(crate) pod: &'a Arc<Pod>,
    pub(crate) leaving: bool,
}

/// Reads everything.
pub(crate) fn assemble(view: &View<'_>) -> Assembled {
    let jobs: BTreeMap<String, Arc<Job>> =
        view.jobs.iter().filter_map(|j| Some((j.metadata.uid.clone()?, j.clone()))).collect();
    let seen = offer::seen(view);
    let (residents, doubled) = residents(view, &seen);
    let mut out = Assembled {
        snapshot: ClusterSnapshot {
            at: view.at,
            reference_type: offer::reference_type(view),
            gpus: Vec::new(),
            jobs: Vec::new(),
        },
        pods: BTreeMap::new(),
        requirements: Vec::new(),
        nodes: BTreeMap::new(),
        taken: 0,
        residents: residents.len(),
        missing: BTreeSet::new(),
        refused: Vec::new(),
        doubled,
        held: Vec::new(),
    };
    let candidates = candidates(view, &seen, &residents, &jobs, &mut out);
    if candidates.is_empty() {
        return out; // As it is most of the time; the rest is the larger part of the work.
    }
    out.nodes = node_views(view, &out.pods);
    let profiles = Profiles::new(view.profiles, view.models);
    let kinds = offer::offer(&seen, &residents, &profiles, &mut out);
    for candidate in candidates {
        let job = candidate.snapshot(&out, &kinds, &profiles, view.at);
        out.snapshot.jobs.push(job);
    }
    out
}

/// What each node has free: allocatable less what all pods on it ask for, those included that are
/// only assumed there. The places of pods that are planned in this cycle count as free here, because
/// the plan may give them to others; whoever binds counts them again.
fn node_views(view: &View<'_>, planned: &BTreeMap<JobId, Planned>) -> BTreeMap<String, NodeView> {
    let mut nodes: BTreeMap<String, NodeView> = BTreeMap::new();
    for node in view.nodes {
        let Some(name) = node.metadata.name.clone() else { continue };
        let free = quantity::amounts(node.status.as_ref().and_then(|s| s.allocatable.as_ref()));
        nodes.insert(name, NodeView { node: node.clone(), free });
    }
    let movable: BTreeSet<&str> = planned
        .iter()
        .filter(|(_, planned)| planned.running.is_some())
        .map(|(id, _)| id.as_str())
        .collect();
    for pod in view.pods.iter().filter(|p| !pods::is_finished(p)) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let assumed = view.assumed.get(uid).map(|a| a.node.as_str());
        let Some(node) = pods::node(pod).or(assumed).and_then(|n| nodes.get_mut(n)) else {
            continue;
        };
        let mut taken = constraint::requests(pod);
        if movable.contains(uid) {
            taken.remove(names::OFFLINE_RESOURCE);
        }
        quantity::subtract(&mut node.free, &taken);
    }
    nodes
}

pub(crate) type Residents<'a> = BTreeMap<GpuId, Resident<'a>>;

/// Who is on which GPU. Where two pods claim one, the one that the GPU's agent names stays, and else the
/// older: who has let a pod in knows better than what somebody writes on it. Nor can a pod be on a GPU of
/// another node, whatever is written.
fn residents<'a>(
    view: &View<'a>,
    seen: &BTreeMap<&str, Seen<'_>>,
) -> (Residents<'a>, Vec<(PodName, GpuId)>) {
    let mut claims: Vec<(&Arc<Pod>, GpuId)> = Vec::new();
    for pod in
        view.pods.iter().filter(|p| pods::is_ours(p, view.scheduler) && !pods::is_finished(p))
    {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let named = pods::node(pod).and_then(|node| {
            let gpu = GpuId::new(pods::annotation(pod, names::GPU)?).ok()?;
            seen.get(gpu.as_str()).is_none_or(|s| s.node() == node).then_some(gpu)
        });
        if let Some(gpu) = named.or_else(|| view.assumed.get(uid).map(|a| a.gpu.clone())) {
            claims.push((pod, gpu));
        }
    }
    claims.sort_by_cached_key(|(pod, gpu)| {
        let status = seen.get(gpu.as_str()).and_then(|seen| seen.gpu.status.as_ref());
        let named = status.and_then(|s| s.job.as_deref()?.split_once('/'));
        let own = pod.metadata.namespace.as_deref().zip(pod.metadata.name.as_deref());
        (named.is_none() || named != own, pods::created_at(pod), pod.metadata.uid.clone())
    });
    let mut residents = Residents::new();
    let mut doubled = Vec::new();
    for (pod, gpu) in claims {
        let leaving = pods::is_leaving(pod);
        match residents.get_mut(&gpu) {
            None => {
                residents.insert(gpu, Resident { pod, leaving });
            }
            Some(_) if !leaving => doubled.push((PodName::of(pod), gpu)),
            Some(_) => {}
        }
    }
    (residents, doubled)
}

/// A job to be planned.
#[derive(Debug)]
struct Candidate {
    id: JobId,
    wishes: Wishes,
    requirement: usize,
    priority: u32,
    created_at: Micros,
    uid: Option<u32>,
    running: Option<(GpuId, Option<SmShare>)>,
    pinned: bool,
}

fn candidates(
    view: &View<'_>,
    seen: &BTreeMap<&str, Seen<'_>>,
    residents: &Residents<'_>,
    jobs: &BTreeMap<String, Arc<Job>>,
    out: &mut Assembled,
) -> Vec<Candidate> {
    let places: BTreeMap<Option<&str>, &GpuId> =
        residents.iter().map(|(gpu, r)| (r.pod.metadata.uid.as_deref(), gpu)).collect();
    let rules = LazyCell::new(|| Rules::of(view.pods, view.nodes));
    let mut numbers = BTreeMap::new();
    let mut candidates = Vec::new();
    for pod in view.pods.iter().filter(|p| pods::is_ours(p, view.scheduler)) {
        if pods::is_finished(pod) || pods::is_leaving(pod) || pods::is_gated(pod) {
            continue;
        }
        let name = PodName::of(pod);
        let on = places.get(&pod.metadata.uid.as_deref()).copied();
        let node = pods::node(pod);
        if on.is_some() != node.is_some() {
            // Bound by somebody else, or doubled: nothing here to plan. Or bound just now, or perhaps:
            // the watch will show it.
            continue;
        }
        let here = on.and_then(|gpu| seen.get(gpu.as_str()));
        let hold = || pods::hold(pod, jobs);
        if let Some(gpu) = on {
            // Asked in each cycle, for as long as the pod does not say it: what was said once may not
            // have arrived.
            if !pods::knows_it_stays(pod) && hold() == Some(Hold::CountsAsFailure) {
                out.held.push((name.clone(), Hold::CountsAsFailure));
            }
            let left_alone = match here {
                None => {
                    out.missing.insert(gpu.clone());
                    !view.is_gone(gpu)
                }
                // Between two reschedulings, a job that may run where it is is left alone; and one that
                // nobody may displace always is, or its GPU would be planned for others in vain.
                Some(seen) => {
                    let stays = !view.reschedule || (hold().is_some() && !endangers(pod, seen));
                    stays && seen.health.allows_running()
                }
            };
            if left_alone {
                continue;
            }
        }
        if on.is_none() && view.reschedule && pods::displaces_nobody(pod) {
            continue; // Its turn is between two reschedulings, when only what is free is given away.
        }
        if on.is_none()
            && let Some(why) = constraint::unsupported(pod)
        {
            out.refused.push((name, why));
            continue;
        }
        if on.is_none()
            && let Some(why) = view.aside.get(&name.uid)
        {
            out.refused.push((name, why.clone()));
            continue;
        }
        let wishes = match pods::wishes(pod) {
            Ok(wishes) => wishes,
            // What somebody writes on a pod that runs is no longer a wish.
            Err(_) if on.is_some() => Wishes::unreadable(pod),
            Err(why) => {
                out.refused.push((name, why));
                continue;
            }
        };
        let Some(id) = pods::job_id(&name) else { continue };
        let requirement = intern(&mut out.requirements, &mut numbers, Requirement::of(pod, &rules));
        let hold = hold();
        let planned = Planned { pod: name, requirement, hold, running: node.map(str::to_owned) };
        out.pods.insert(id.clone(), planned);
        let share = pods::bound_share(pod)
            .filter(|share| here.is_none_or(|seen| seen.sms() == share.total()));
        candidates.push(Candidate {
            id,
            wishes,
            requirement,
            priority: pods::weight(pod),
            created_at: pods::created_at(pod),
            uid: pods::runs_as(pod),
            running: on.map(|gpu| (gpu.clone(), share)),
            pinned: hold.is_some(),
        });
    }
    candidates
}

/// Whether a job may not be beside the service of its GPU, and must leave though nobody brings it back.
fn endangers(pod: &Pod, seen: &Seen<'_>) -> bool {
    let online = seen.gpu.status.as_ref().and_then(|status| status.online.as_ref());
    let fail_prone = pods::annotation(pod, names::FAIL_PRONE) == Some("true");
    online.is_some_and(|o| !o.in_mps || (o.critical && fail_prone))
}

/// The number of a requirement; pods that ask for the same share one.
fn intern(
    requirements: &mut Vec<Requirement>,
    numbers: &mut BTreeMap<String, usize>,
    requirement: Requirement,
) -> usize {
    *numbers.entry(format!("{requirement:?}")).or_insert_with(|| {
        requirements.push(requirement);
        requirements.len() - 1
    })
}

impl Candidate {
    fn snapshot(
        self,
        out: &Assembled,
        kinds: &Kinds,
        profiles: &Profiles<'_>,
        at: Micros,
    ) -> JobSnapshot {
        let own = self.running.as_ref().and_then(|(gpu, _)| kinds.kind_of_gpu.get(gpu));
        let wanted =
            |t: &GpuType| self.wishes.gpu_types.is_empty() || self.wishes.gpu_types.contains(t);
        let mut gpu_types: Vec<GpuType> = kinds
            .kinds
            .iter()
            .filter(|(kind, (real, met))| {
                Some(*kind) == own || (wanted(real) && kinds.met[*met].contains(&self.requirement))
            })
            .map(|(kind, _)| kind.clone())
            .collect();
        if gpu_types.is_empty() {
            // An empty list means any; this one accepts none of those on offer.
            gpu_types.push(out.snapshot.reference_type.clone());
        }
        let workload = &self.wishes.workload;
        let accepted: Vec<(&GpuType, &GpuType)> = gpu_types
            .iter()
            .filter_map(|kind| kinds.kinds.get(kind).map(|(real, _)| (kind, real)))
            .collect();
        let known = profiles.known(workload, accepted.iter().map(|(_, real)| *real));
        let waited =
            if self.running.is_some() { 0 } else { at.0.saturating_sub(self.created_at.0) };
        JobSnapshot {
            job: self.id,
            workload: known,
            profiles: accepted
                .iter()
                .map(|(kind, real)| ((*kind).clone(), profiles.get(workload, real, kind)))
                .collect(),
            solo_speed: accepted
                .iter()
                .filter_map(|(kind, real)| Some(((*kind).clone(), profiles.speed(workload, real)?)))
                .collect(),
            memory: self.wishes.memory,
            priority: self.priority,
            submitted_at: self.created_at,
            waited: Micros(waited),
            running_on: self.running.as_ref().map(|(gpu, _)| gpu.clone()),
            running_share: self.running.and_then(|(_, share)| share),
            gpu_types,
            fail_prone: self.wishes.fail_prone,
            not_before: Micros::ZERO,
            pinned: self.pinned,
            uid: self.uid,
        }
    }
}

impl Assembled {
    /// Why no node with a GPU takes the pod, as Kubernetes would tell it; `None` when one does.
    pub(crate) fn node_reason(&self, requirement: usize) -> Option<String> {
        let requirement = self.requirements.get(requirement)?;
        let mut counts: BTreeMap<Obstacle, usize> = BTreeMap::new();
        let names: BTreeSet<&str> = self.snapshot.gpus.iter().map(|g| g.node.as_str()).collect();
        let total = names.len();
        for name in names {
            let node = self.nodes.get(name)?;
            let obstacle = requirement.obstacle(&node.node, &node.free)?;
            *counts.entry(obstacle).or_default() += 1;
        }
        let list: Vec<String> = counts.iter().map(|(o, n)| format!("{n} {o}")).collect();
        (total > 0).then(|| format!("of {total} nodes with a GPU to lend: {}", list.join(", ")))
    }
}

#[cfg(test)]
#[path = "snapshot_tests.rs"]
mod tests;
