//! From the objects of a cluster to the snapshot that the planner reads.
//!
//! The planner knows types of GPUs, not nodes with labels and taints. Nodes that no waiting job can
//! tell apart are alike, so each GPU gets a *kind*: its type, and which of the jobs' different
//! requirements its node meets. A job then accepts the kinds whose nodes it fits. Profiles are told
//! per kind too, so the planner stays as it is on one machine and in the simulator.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod};
use muxflow_types::{
    Bytes, ClusterSnapshot, GpuId, GpuSnapshot, GpuType, HealthState, JobId, JobSnapshot, Micros,
    NodeId, OnlineSnapshot, Percent, ProfileRecord, ServiceId, SmCount, SmShare, WorkloadName,
};

use super::constraint::{self, Obstacle, Requirement};
use super::pods::{self, Hold, PodName, Wishes};
use crate::names;
use crate::quantity::{self, Amounts};
use crate::resource::{Gpu, GpuStatus, OnlineStatus, Profile, State};

/// A binding that was made but that the watch has not shown yet.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Assumed {
    pub(crate) node: String,
    pub(crate) gpu: GpuId,
}

/// What the watches show at one moment.
#[derive(Debug)]
pub(crate) struct View<'a> {
    pub(crate) at: Micros,
    pub(crate) scheduler: &'a str,
    /// A GPU whose agent has been silent for longer takes nothing new.
    pub(crate) stale_after: Micros,
    /// Whether running jobs may be moved and displaced in this cycle.
    pub(crate) reschedule: bool,
    pub(crate) pods: &'a [Arc<Pod>],
    pub(crate) nodes: &'a [Arc<Node>],
    pub(crate) gpus: &'a [Arc<Gpu>],
    pub(crate) profiles: &'a [Arc<Profile>],
    pub(crate) jobs: &'a [Arc<Job>],
    pub(crate) assumed: &'a BTreeMap<String, Assumed>,
}

/// A pod in the plan.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) pod: PodName,
    pub(crate) requirement: usize,
    pub(crate) hold: Option<Hold>,
    pub(crate) running: bool,
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
    /// Pods that cannot be planned, and why.
    pub(crate) refused: Vec<(PodName, String)>,
    /// Pods on a GPU that another, older pod holds.
    pub(crate) doubled: Vec<(PodName, GpuId)>,
}

/// A node and what is free on it.
#[derive(Debug, Clone)]
pub(crate) struct NodeView {
    pub(crate) node: Arc<Node>,
    pub(crate) free: Amounts,
}

/// A pod with a GPU.
#[derive(Debug)]
struct Resident<'a> {
    pod: &'a Arc<Pod>,
    leaving: bool,
}

/// Reads everything.
pub(crate) fn assemble(view: &View<'_>) -> Assembled {
    let jobs: BTreeMap<String, Arc<Job>> =
        view.jobs.iter().filter_map(|j| Some((j.metadata.uid.clone()?, j.clone()))).collect();
    let (residents, doubled) = residents(view);
    let mut out = Assembled {
        snapshot: ClusterSnapshot {
            at: view.at,
            reference_type: reference_type(view),
            gpus: Vec::new(),
            jobs: Vec::new(),
        },
        pods: BTreeMap::new(),
        requirements: Vec::new(),
        nodes: BTreeMap::new(),
        taken: 0,
        refused: Vec::new(),
        doubled,
    };
    let candidates = candidates(view, &residents, &jobs, &mut out);
    if candidates.is_empty() {
        return out; // As it is most of the time; the rest is the larger part of the work.
    }
    out.nodes = node_views(view);
    let profiles = Profiles::new(view.profiles);
    let kinds = offer(view, &residents, &profiles, &mut out);
    for candidate in candidates {
        let job = candidate.snapshot(&out, &kinds, &profiles, view.at);
        out.snapshot.jobs.push(job);
    }
    out
}

/// What each node has free: allocatable less what all pods on it ask for, those included that are
/// only assumed there. Places for offline work are not counted down: a GPU is one place, and whether
/// it is taken is known better from the GPU itself.
fn node_views(view: &View<'_>) -> BTreeMap<String, NodeView> {
    let mut nodes: BTreeMap<String, NodeView> = BTreeMap::new();
    for node in view.nodes {
        let Some(name) = node.metadata.name.clone() else { continue };
        let free = quantity::amounts(node.status.as_ref().and_then(|s| s.allocatable.as_ref()));
        nodes.insert(name, NodeView { node: node.clone(), free });
    }
    for pod in view.pods.iter().filter(|p| !pods::is_finished(p)) {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let assumed = view.assumed.get(uid).map(|a| a.node.as_str());
        let Some(node) = pods::node(pod).or(assumed).and_then(|n| nodes.get_mut(n)) else {
            continue;
        };
        let mut taken = constraint::requests(pod);
        taken.remove(names::OFFLINE_RESOURCE);
        quantity::subtract(&mut node.free, &taken);
    }
    nodes
}

type Residents<'a> = BTreeMap<GpuId, Resident<'a>>;

/// Who is on which GPU. Where two pods claim one, the older stays.
fn residents<'a>(view: &View<'a>) -> (Residents<'a>, Vec<(PodName, GpuId)>) {
    let mut claims: Vec<(&Arc<Pod>, GpuId)> = Vec::new();
    for pod in
        view.pods.iter().filter(|p| pods::is_ours(p, view.scheduler) && !pods::is_finished(p))
    {
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let named = pods::node(pod)
            .and_then(|_| pods::annotation(pod, names::GPU))
            .and_then(|g| GpuId::new(g).ok());
        if let Some(gpu) = named.or_else(|| view.assumed.get(uid).map(|a| a.gpu.clone())) {
            claims.push((pod, gpu));
        }
    }
    claims.sort_by_key(|(pod, _)| (pods::created_at(pod), pod.metadata.uid.clone()));
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
    residents: &Residents<'_>,
    jobs: &BTreeMap<String, Arc<Job>>,
    out: &mut Assembled,
) -> Vec<Candidate> {
    let health: BTreeMap<&str, HealthState> =
        view.gpus.iter().map(|g| (g.spec.uuid.as_str(), state(g, view))).collect();
    let places: BTreeMap<Option<&str>, &GpuId> =
        residents.iter().map(|(gpu, r)| (r.pod.metadata.uid.as_deref(), gpu)).collect();
    let mut candidates = Vec::new();
    for pod in view.pods.iter().filter(|p| pods::is_ours(p, view.scheduler)) {
        if pods::is_finished(pod) || pods::is_leaving(pod) || pods::is_gated(pod) {
            continue;
        }
        let name = PodName::of(pod);
        let on = places.get(&pod.metadata.uid.as_deref()).copied();
        if on.is_none() && pods::node(pod).is_some() {
            continue; // Bound by somebody else, or doubled: nothing here to plan.
        }
        // Between two reschedulings, a job that may run where it is is left alone.
        let may_run = |gpu: &GpuId| health.get(gpu.as_str()).is_none_or(|h| h.allows_running());
        if on.is_some_and(|gpu| !view.reschedule && may_run(gpu)) {
            continue;
        }
        if on.is_none()
            && let Some(why) = constraint::unsupported(pod)
        {
            out.refused.push((name, why));
            continue;
        }
        let wishes = match pods::wishes(pod) {
            Ok(wishes) => wishes,
            Err(why) => {
                out.refused.push((name, why));
                continue;
            }
        };
        let Some(id) = pods::job_id(&name) else { continue };
        let requirement = intern(&mut out.requirements, Requirement::of(pod));
        let hold = pods::hold(pod, jobs);
        let planned = Planned { pod: name, requirement, hold, running: on.is_some() };
        out.pods.insert(id.clone(), planned);
        candidates.push(Candidate {
            id,
            wishes,
            requirement,
            priority: pods::weight(pod),
            created_at: pods::created_at(pod),
            uid: pods::runs_as(pod),
            running: on.map(|gpu| (gpu.clone(), pods::bound_share(pod))),
            pinned: hold.is_some(),
        });
    }
    candidates
}

fn intern(requirements: &mut Vec<Requirement>, requirement: Requirement) -> usize {
    match requirements.iter().position(|r| *r == requirement) {
        Some(known) => known,
        None => {
            requirements.push(requirement);
            requirements.len() - 1
        }
    }
}

/// A kind of GPU, its real type, and the requirements that its nodes meet.
#[derive(Debug)]
struct Kinds {
    kinds: BTreeMap<GpuType, (GpuType, BTreeSet<usize>)>,
    kind_of_gpu: BTreeMap<GpuId, GpuType>,
}

/// Puts the GPUs that can be planned with into the snapshot.
fn offer(
    view: &View<'_>,
    residents: &Residents<'_>,
    profiles: &Profiles,
    out: &mut Assembled,
) -> Kinds {
    let mut kinds = Kinds { kinds: BTreeMap::new(), kind_of_gpu: BTreeMap::new() };
    let mut numbers: BTreeMap<(GpuType, BTreeSet<usize>), usize> = BTreeMap::new();
    let mut met: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    let mut sorted: Vec<&Arc<Gpu>> = view.gpus.iter().collect();
    sorted.sort_by(|a, b| a.spec.uuid.cmp(&b.spec.uuid));
    for gpu in sorted {
        let Some(status) = &gpu.status else { continue };
        let Some(node) = out.nodes.get(&gpu.spec.node) else { continue };
        let Some(basic) = Basic::of(gpu, status) else { continue };
        let resident = residents.get(&basic.id);
        // Taken until a pod that leaves is gone, by a pod that is left alone in this cycle, or by
        // somebody whom the API server no longer knows.
        let planned = |r: &Resident<'_>| {
            pods::job_id(&PodName::of(r.pod)).filter(|id| !r.leaving && out.pods.contains_key(id))
        };
        let running = resident.and_then(planned);
        if running.is_none() && (resident.is_some() || status.job.is_some()) {
            out.taken += 1;
            continue;
        }
        let signature = met.entry(gpu.spec.node.as_str()).or_insert_with(|| {
            (0..out.requirements.len())
                .filter(|&r| out.requirements[r].obstacle(&node.node, &node.free).is_none())
                .collect()
        });
        let key = (basic.gpu_type.clone(), signature.clone());
        let next = numbers.len();
        let number = *numbers.entry(key).or_insert(next);
        let Ok(kind) = GpuType::new(&format!("{}:{number}", basic.gpu_type)) else { continue };
        kinds.kinds.insert(kind.clone(), (basic.gpu_type.clone(), signature.clone()));
        kinds.kind_of_gpu.insert(basic.id.clone(), kind.clone());
        let online = status.online.as_ref().and_then(|o| online(o, &basic.gpu_type, profiles));
        out.snapshot.gpus.push(GpuSnapshot {
            gpu: basic.id,
            node: basic.node,
            gpu_type: kind,
            sms: basic.share.total(),
            memory: Bytes(gpu.spec.memory_bytes),
            health: state(gpu, view),
            online,
            share: basic.share,
            quota: Bytes(status.quota_bytes),
            running,
            multi_user: status.multi_user,
        });
    }
    kinds
}

/// The parts of a GPU that must be readable.
struct Basic {
    id: GpuId,
    node: NodeId,
    gpu_type: GpuType,
    share: SmShare,
}

impl Basic {
    fn of(gpu: &Gpu, status: &GpuStatus) -> Option<Self> {
        let share = SmShare::new(SmCount(status.share_sms), SmCount(gpu.spec.sms)).ok()?;
        Some(Basic {
            id: GpuId::new(&gpu.spec.uuid).ok()?,
            node: NodeId::new(&gpu.spec.node).ok()?,
            gpu_type: GpuType::new(&gpu.spec.gpu_type).ok()?,
            share,
        })
    }
}

/// The state that counts: an old status is no proof of health, and no reason to evict either, because
/// the launch gate on the node has closed by itself.
fn state(gpu: &Gpu, view: &View<'_>) -> HealthState {
    let Some(status) = &gpu.status else { return HealthState::Init };
    let age = view.at.0.saturating_sub(pods::micros(status.observed_at.0).0);
    match status.state {
        State::Healthy if age > view.stale_after.0 => HealthState::Unhealthy,
        State::Healthy => HealthState::Healthy,
        State::Unhealthy => HealthState::Unhealthy,
        State::Overlimit => HealthState::Overlimit,
        State::Disabled => HealthState::Disabled,
        State::Init => HealthState::Init,
    }
}

fn online(o: &OnlineStatus, gpu_type: &GpuType, profiles: &Profiles) -> Option<OnlineSnapshot> {
    let workload = WorkloadName::new(&o.workload).ok()?;
    Some(OnlineSnapshot {
        service: ServiceId::new(&o.service).ok()?,
        profile: profiles.get(&workload, gpu_type),
        predicted_sm_activity: Percent::clamped(o.predicted_sm_activity_pct)?,
        memory: Bytes(o.memory_bytes),
        critical: o.critical,
        uid: o.uid,
        in_mps: o.in_mps,
    })
}

/// The type on which solo speeds are 1: that of the profile which says so, else the commonest.
fn reference_type(view: &View<'_>) -> GpuType {
    let by_profile = view
        .profiles
        .iter()
        .find(|p| p.spec.solo_speed.is_some_and(|s| (s - 1.0).abs() < 1e-9))
        .and_then(|p| GpuType::new(&p.spec.gpu_type).ok());
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for gpu in view.gpus {
        *counts.entry(&gpu.spec.gpu_type).or_default() += 1;
    }
    let commonest =
        || counts.iter().max_by_key(|(_, n)| **n).and_then(|(t, _)| GpuType::new(t).ok());
    by_profile.or_else(commonest).unwrap_or_else(|| match GpuType::new("none") {
        Ok(none) => none,
        Err(_) => unreachable!("a plain word is a GPU type"),
    })
}

/// Profiles by workload and type.
struct Profiles(BTreeMap<(WorkloadName, GpuType), (ProfileRecord, Option<f64>)>);

impl Profiles {
    fn new(objects: &[Arc<Profile>]) -> Self {
        let mut map = BTreeMap::new();
        for object in objects {
            let spec = &object.spec;
            let (Ok(workload), Ok(gpu_type)) =
                (WorkloadName::new(&spec.workload), GpuType::new(&spec.gpu_type))
            else {
                continue;
            };
            let percent = |v: Option<f64>| v.and_then(Percent::clamped);
            let record = ProfileRecord {
                workload: workload.clone(),
                gpu_type: gpu_type.clone(),
                gpu_util: percent(spec.gpu_util_pct),
                sm_activity: percent(spec.sm_activity_pct),
                sm_occupancy: percent(spec.sm_occupancy_pct),
                dram_activity: percent(spec.dram_activity_pct),
                solo_time: spec.solo_time_us.map(Micros),
                memory: spec.memory_bytes.map(Bytes),
            };
            let speed = spec.solo_speed.filter(|s| s.is_finite() && *s > 0.0);
            map.insert((workload, gpu_type), (record, speed));
        }
        Profiles(map)
    }

    fn get(&self, workload: &WorkloadName, gpu_type: &GpuType) -> ProfileRecord {
        match self.0.get(&(workload.clone(), gpu_type.clone())) {
            Some((record, _)) => record.clone(),
            None => ProfileRecord::unknown(workload.clone(), gpu_type.clone()),
        }
    }

    fn speed(&self, workload: &WorkloadName, gpu_type: &GpuType) -> Option<f64> {
        self.0.get(&(workload.clone(), gpu_type.clone())).and_then(|(_, speed)| *speed)
    }
}

impl Candidate {
    fn snapshot(
        self,
        out: &Assembled,
        kinds: &Kinds,
        profiles: &Profiles,
        at: Micros,
    ) -> JobSnapshot {
        let own = self.running.as_ref().and_then(|(gpu, _)| kinds.kind_of_gpu.get(gpu));
        let wanted =
            |t: &GpuType| self.wishes.gpu_types.is_empty() || self.wishes.gpu_types.contains(t);
        let mut gpu_types: Vec<GpuType> = kinds
            .kinds
            .iter()
            .filter(|(kind, (real, met))| {
                Some(*kind) == own || (wanted(real) && met.contains(&self.requirement))
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
        let waited =
            if self.running.is_some() { 0 } else { at.0.saturating_sub(self.created_at.0) };
        JobSnapshot {
            job: self.id,
            workload: workload.clone(),
            profiles: accepted
                .iter()
                .map(|(kind, real)| ((*kind).clone(), profiles.get(workload, real)))
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
