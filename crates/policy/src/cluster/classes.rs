//! Equal GPUs and equal jobs, collapsed.
//!
//! Thousands of GPUs run replicas of the same few services and lend whole SMs, and thousands of jobs
//! run the same few programs. Two GPUs that differ in nothing that a decision looks at are one
//! class, and so are two jobs; the matching is then solved over classes with counts, exactly, and
//! only one pair of each two classes is predicted.
//!
//! A job that runs keeps the class of its GPU in its own class. Staying is worth more than coming,
//! but only on its own GPU; since at most one job runs on each GPU, as many jobs as the solution
//! keeps in a class can each stay where it is, and what is left of the class is free for others.

use std::collections::BTreeMap;

use muxflow_types::{
    ClusterSnapshot, GpuId, GpuSnapshot, GpuType, HealthState, JobId, JobSnapshot, ProfileRecord,
    SmShare, WorkloadName,
};

use super::fit::Terms;
use super::parameters::Parameters;

/// A profile by its bits, so that it can be a key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ProfileKey(WorkloadName, [Option<u64>; 6]);

impl ProfileKey {
    pub(super) fn new(p: &ProfileRecord) -> Self {
        let pct = |v: Option<muxflow_types::Percent>| v.map(|v| v.value().to_bits());
        ProfileKey(
            p.workload.clone(),
            [
                pct(p.gpu_util),
                pct(p.sm_activity),
                pct(p.sm_occupancy),
                pct(p.dram_activity),
                p.solo_time.map(|t| t.0),
                p.memory.map(|b| b.0),
            ],
        )
    }
}

/// All that a fit asks of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GpuFitKey {
    gpu_type: GpuType,
    /// Kept by residents, and lent to newcomers.
    quota: [u64; 2],
    health: HealthState,
    lends: bool,
    online: Option<(bool, bool, Option<u32>)>,
    multi_user: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GpuKey {
    /// Set where nothing is collapsed.
    single: Option<GpuId>,
    fit: GpuFitKey,
    share: SmShare,
    online: Option<ProfileKey>,
}

/// All that a fit asks of a job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct JobFitKey {
    gpu_types: Vec<GpuType>,
    memory: u64,
    fail_prone: bool,
    uid: Option<u32>,
    held: bool,
    not_before: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct JobKey {
    /// Set where nothing is collapsed.
    single: Option<JobId>,
    fit: JobFitKey,
    workload: WorkloadName,
    profiles: Vec<(GpuType, ProfileKey)>,
    solo_speed: Vec<(GpuType, u64)>,
    worth: u64,
    current: Option<usize>,
    running_share: Option<SmShare>,
    pinned: bool,
}

/// One kind of GPU: members by their place in the snapshot, in that order.
#[derive(Debug)]
pub(super) struct GpuClass {
    pub(super) members: Vec<usize>,
    pub(super) fit: usize,
}

/// One kind of job.
#[derive(Debug)]
pub(super) struct JobClass {
    /// In the order of submission, so that equals are served first come, first served.
    pub(super) members: Vec<usize>,
    pub(super) fit: usize,
    /// The class of the GPU that each member runs on.
    pub(super) current: Option<usize>,
    /// Priority times aging: how much one unit of its speed counts.
    pub(super) worth: f64,
}

/// Members that are alike as far as fits go, and their counts.
#[derive(Debug)]
pub(super) struct FitClass {
    /// One member, by its place in the snapshot.
    pub(super) example: usize,
    /// How many there are.
    pub(super) count: usize,
}

/// The snapshot, collapsed.
#[derive(Debug)]
pub(super) struct Classes<'a> {
    pub(super) snapshot: &'a ClusterSnapshot,
    /// Whether equals were collapsed at all.
    pub(super) collapsed: bool,
    pub(super) terms: Terms,
    pub(super) gpus: Vec<GpuClass>,
    pub(super) jobs: Vec<JobClass>,
    pub(super) gpu_fits: Vec<FitClass>,
    pub(super) job_fits: Vec<FitClass>,
    /// The place of every GPU in the snapshot.
    pub(super) gpu_index: BTreeMap<&'a GpuId, usize>,
}

fn gpu_fit_key(g: &GpuSnapshot, terms: &Terms) -> GpuFitKey {
    GpuFitKey {
        gpu_type: g.gpu_type.clone(),
        quota: [g.quota.0, terms.lent(g).0],
        health: g.health,
        lends: g.share.sms().0 > 0,
        online: g.online.as_ref().map(|o| (o.in_mps, o.critical, o.uid)),
        multi_user: g.multi_user,
    }
}

fn job_fit_key(j: &JobSnapshot, snapshot: &ClusterSnapshot) -> JobFitKey {
    let mut gpu_types = j.gpu_types.clone();
    gpu_types.sort();
    gpu_types.dedup();
    JobFitKey {
        gpu_types,
        memory: j.memory.0,
        fail_prone: j.fail_prone,
        uid: j.uid,
        held: j.pinned && j.running_on.is_some(),
        not_before: if j.not_before > snapshot.at { j.not_before.0 } else { 0 },
    }
}

/// The number of a key, given out in the order of first appearance.
fn number<K: Ord>(numbers: &mut BTreeMap<K, usize>, key: K) -> (usize, bool) {
    let next = numbers.len();
    let n = *numbers.entry(key).or_insert(next);
    (n, n == next)
}

fn fit_number<K: Ord>(
    numbers: &mut BTreeMap<K, usize>,
    fits: &mut Vec<FitClass>,
    key: K,
    example: usize,
) -> usize {
    let (fit, new) = number(numbers, key);
    if new {
        fits.push(FitClass { example, count: 0 });
    }
    fits[fit].count += 1;
    fit
}

impl<'a> Classes<'a> {
    /// Collapses a snapshot.
    pub(super) fn new(snapshot: &'a ClusterSnapshot, parameters: &Parameters) -> Self {
        let terms = parameters.terms(snapshot);
        let mut gpus: Vec<GpuClass> = Vec::new();
        let (mut gpu_fits, mut job_fits) = (Vec::new(), Vec::new());
        let mut gpu_index = BTreeMap::new();
        let mut class_of_gpu = Vec::with_capacity(snapshot.gpus.len());
        let (mut gpu_keys, mut fit_numbers) = (BTreeMap::new(), BTreeMap::new());
        for (i, g) in snapshot.gpus.iter().enumerate() {
            gpu_index.insert(&g.gpu, i);
            let fit_key = gpu_fit_key(g, &terms);
            let fit = fit_number(&mut fit_numbers, &mut gpu_fits, fit_key.clone(), i);
            let key = GpuKey {
                single: (!parameters.collapse).then(|| g.gpu.clone()),
                fit: fit_key,
                share: g.share,
                online: g.online.as_ref().map(|o| ProfileKey::new(&o.profile)),
            };
            let (class, new) = number(&mut gpu_keys, key);
            if new {
                gpus.push(GpuClass { members: Vec::new(), fit });
            }
            gpus[class].members.push(i);
            class_of_gpu.push(class);
        }
        let mut jobs: Vec<JobClass> = Vec::new();
        let (mut job_keys, mut fit_numbers) = (BTreeMap::new(), BTreeMap::new());
        for (i, j) in snapshot.jobs.iter().enumerate() {
            let fit_key = job_fit_key(j, snapshot);
            let fit = fit_number(&mut fit_numbers, &mut job_fits, fit_key.clone(), i);
            let current =
                j.running_on.as_ref().and_then(|on| gpu_index.get(on)).map(|&g| class_of_gpu[g]);
            let worth = f64::from(j.priority) * parameters.aging(j.waited);
            let key = JobKey {
                single: (!parameters.collapse).then(|| j.job.clone()),
                fit: fit_key,
                workload: j.workload.clone(),
                profiles: j.profiles.iter().map(|(t, p)| (t.clone(), ProfileKey::new(p))).collect(),
                solo_speed: j.solo_speed.iter().map(|(t, s)| (t.clone(), s.to_bits())).collect(),
                worth: worth.to_bits(),
                current,
                running_share: j.running_share,
                pinned: j.pinned,
            };
            let (class, new) = number(&mut job_keys, key);
            if new {
                jobs.push(JobClass { members: Vec::new(), fit, current, worth });
            }
            jobs[class].members.push(i);
        }
        for class in &mut jobs {
            class.members.sort_by_key(|&i| (snapshot.jobs[i].submitted_at, i));
        }
        let collapsed = parameters.collapse;
        Classes { collapsed, snapshot, terms, gpus, jobs, gpu_fits, job_fits, gpu_index }
    }

    /// One GPU of a class.
    pub(super) fn gpu(&self, class: usize) -> &'a GpuSnapshot {
        &self.snapshot.gpus[self.gpus[class].members[0]]
    }

    /// One job of a class.
    pub(super) fn job(&self, class: usize) -> &'a JobSnapshot {
        &self.snapshot.jobs[self.jobs[class].members[0]]
    }
}
