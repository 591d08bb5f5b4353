//! The GPUs that can be planned with, as the planner sees them.
//!
//! Each GPU gets a *kind*: its type, and which of the jobs' different requirements its node meets.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use muxflow_types::{
    Bytes, GpuId, GpuSnapshot, GpuType, HealthState, NodeId, OnlineSnapshot, Percent, ServiceId,
    SmCount, SmShare, WorkloadName,
};

use super::pods::{self, PodName};
use super::profiles::Profiles;
use super::snapshot::{Assembled, Resident, Residents, View};
use crate::resource::{Gpu, GpuStatus, MEMORY_STEP, OnlineStatus, State};

/// Stands for a name that cannot be one.
const UNNAMED: &str = "unnamed";

/// What the snapshot is made with of a GPU whose agent has told all that is needed.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) gpu: &'a Arc<Gpu>,
    pub(crate) health: HealthState,
    basic: Basic,
}

impl Seen<'_> {
    pub(crate) fn node(&self) -> &str {
        &self.gpu.spec.node
    }

    pub(crate) fn sms(&self) -> SmCount {
        self.basic.share.total()
    }
}

/// All GPUs that are reported in full and whose node is there, by id.
pub(crate) fn seen<'a>(view: &View<'a>) -> BTreeMap<&'a str, Seen<'a>> {
    let nodes: BTreeSet<&str> =
        view.nodes.iter().filter_map(|n| n.metadata.name.as_deref()).collect();
    let mut all = BTreeMap::new();
    for gpu in view.gpus.iter().filter(|g| nodes.contains(g.spec.node.as_str())) {
        let Some(status) = &gpu.status else { continue };
        let Some(basic) = Basic::of(gpu, status) else { continue };
        let health = state(status, view);
        all.insert(gpu.spec.uuid.as_str(), Seen { gpu, health, basic });
    }
    all
}

/// The parts of a GPU that must be readable.
#[derive(Debug)]
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

/// The state that counts here.
///
/// An agent that lives evicts by itself, with a breaker against sensors that lie, and holds at its
/// gate whom it does not evict: whatever it says, here that only means that nothing new is placed.
/// The same holds for one that has just started and does not know yet, and for an old status: it is
/// no proof of health, and no reason to evict either, because the launch gate on the node has closed
/// by itself. Only where the last word of an agent that is silent was that offline work must leave,
/// nobody else is there to see to it; and a leader that has just begun has not heard the silence: while
/// there was no API server, agents had nobody to tell.
fn state(status: &GpuStatus, view: &View<'_>) -> HealthState {
    let age = view.at.0.saturating_sub(pods::micros(status.observed_at.0).0);
    let silent = age > view.stale_after.0;
    let heard = silent && view.watched >= view.listen;
    match status.state {
        State::Healthy if !silent => HealthState::Healthy,
        State::Overlimit if heard => HealthState::Overlimit,
        State::Disabled if heard => HealthState::Disabled,
        _ => HealthState::Unhealthy,
    }
}

/// A kind of GPU, its real type, and the requirements that its nodes meet.
#[derive(Debug, Default)]
pub(crate) struct Kinds {
    pub(crate) kinds: BTreeMap<GpuType, (GpuType, usize)>,
    pub(crate) kind_of_gpu: BTreeMap<GpuId, GpuType>,
    /// Sets of requirements, by number: thousands of nodes meet the same.
    pub(crate) met: Vec<BTreeSet<usize>>,
}

/// Which set of requirements each node meets.
#[derive(Default)]
struct Met<'a> {
    of_node: BTreeMap<&'a str, usize>,
    numbers: BTreeMap<BTreeSet<usize>, usize>,
}

impl<'a> Met<'a> {
    fn number(&mut self, node: &'a str, out: &Assembled) -> Option<usize> {
        if let Some(&known) = self.of_node.get(node) {
            return Some(known);
        }
        let place = out.nodes.get(node)?;
        let met = (0..out.requirements.len())
            .filter(|&r| out.requirements[r].obstacle(&place.node, &place.free).is_none())
            .collect();
        let next = self.numbers.len();
        let number = *self.numbers.entry(met).or_insert(next);
        self.of_node.insert(node, number);
        Some(number)
    }

    /// The sets in the order of their numbers.
    fn sets(self) -> Vec<BTreeSet<usize>> {
        let mut sets: Vec<_> = self.numbers.into_iter().collect();
        sets.sort_by_key(|(_, number)| *number);
        sets.into_iter().map(|(set, _)| set).collect()
    }
}

/// Puts the GPUs that can be planned with into the snapshot, by id.
pub(crate) fn offer<'a>(
    seen: &BTreeMap<&'a str, Seen<'a>>,
    residents: &Residents<'_>,
    profiles: &Profiles<'_>,
    out: &mut Assembled,
) -> Kinds {
    let mut kinds = Kinds::default();
    let mut names: BTreeMap<(GpuType, usize), GpuType> = BTreeMap::new();
    let mut met = Met::default();
    for one in seen.values() {
        let (gpu, basic) = (one.gpu, &one.basic);
        let Some(status) = &gpu.status else { continue };
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
        let Some(signature) = met.number(gpu.spec.node.as_str(), out) else { continue };
        let next = names.len();
        let kind = match names.entry((basic.gpu_type.clone(), signature)) {
            std::collections::btree_map::Entry::Occupied(known) => known.get().clone(),
            std::collections::btree_map::Entry::Vacant(new) => {
                let Ok(kind) = GpuType::new(&format!("{}:{next}", basic.gpu_type)) else {
                    continue;
                };
                kinds.kinds.insert(kind.clone(), (basic.gpu_type.clone(), signature));
                new.insert(kind).clone()
            }
        };
        kinds.kind_of_gpu.insert(basic.id.clone(), kind.clone());
        let service = status.online.as_ref();
        let online = service.and_then(|o| online(o, &basic.gpu_type, &kind, profiles));
        // Whoever is there keeps the quota that it was started with, whatever is lent now.
        let kept = running.as_ref().and(resident).and_then(|r| pods::bound_quota(r.pod));
        let kept = kept.unwrap_or(Bytes::ZERO).min(Bytes(gpu.spec.memory_bytes));
        let lent = Bytes(status.quota_bytes / MEMORY_STEP * MEMORY_STEP);
        out.snapshot.gpus.push(GpuSnapshot {
            gpu: basic.id.clone(),
            node: basic.node.clone(),
            gpu_type: kind,
            sms: basic.share.total(),
            memory: Bytes(gpu.spec.memory_bytes),
            health: one.health,
            online,
            share: basic.share,
            quota: lent.max(kept),
            running,
            multi_user: status.multi_user,
        });
    }
    kinds.met = met.sets();
    kinds
}

/// The real type of a kind.
pub(crate) fn real_type(kind: &GpuType) -> Option<GpuType> {
    let (real, _) = kind.as_str().rsplit_once(':')?;
    GpuType::new(real).ok()
}

/// A service is there whatever it is called: one whose name cannot be read must not look like an idle
/// GPU.
fn online(
    o: &OnlineStatus,
    real: &GpuType,
    kind: &GpuType,
    profiles: &Profiles<'_>,
) -> Option<OnlineSnapshot> {
    let workload = WorkloadName::new(&o.workload).or_else(|_| WorkloadName::new(UNNAMED)).ok()?;
    Some(OnlineSnapshot {
        service: ServiceId::new(&o.service).or_else(|_| ServiceId::new(UNNAMED)).ok()?,
        profile: profiles.get(&workload, real, kind),
        predicted_sm_activity: Percent::clamped(o.predicted_sm_activity_pct)
            .unwrap_or(Percent::FULL),
        // Live bytes would make every GPU a kind of its own.
        memory: Bytes(o.memory_bytes.div_ceil(MEMORY_STEP).saturating_mul(MEMORY_STEP)),
        critical: o.critical,
        uid: o.uid,
        in_mps: o.in_mps,
    })
}

/// The type on which solo speeds are 1: that of the profile which says so, else the commonest.
pub(crate) fn reference_type(view: &View<'_>) -> GpuType {
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
