//! Beyond the paper: plans with several offline jobs on one GPU.
//!
//! What a GPU lends is cut into equal parts, one for each of its jobs, because MPS caps each client
//! alone and not their sum. How fast a job will be is asked of the same predictor as ever, with a
//! neighbour that is the service and the other jobs together. Who goes where is found by
//! [`super::pack`]. Jobs that run stay on their GPU; when the number of jobs there changes, they are
//! restarted with their new part, where that gains more than it costs and within the limit on
//! disruptions.

use std::collections::BTreeMap;
use std::sync::Mutex;

use muxflow_types::{
    Assignment, Bytes, Change, ClusterPlan, ClusterSnapshot, Eviction, EvictionReason, GpuId,
    GpuSnapshot, GpuType, JobSnapshot, OnlineInput, Percent, ProfileRecord, SmCount, SmShare,
    SpeedPredictor, Waiting, WorkloadName,
};

use super::classes::ProfileKey;
use super::fit::{self, Refusal, Terms, refusal, refusal_if};
use super::pack::{Problem, SetValue, solve};
use super::parameters::Parameters;
use super::planner::PlanError;
use super::speeds::{offline_input, online_input};
use super::weights::solo_speed;

/// Changes weighed by local improvement in one plan.
const EFFORT: usize = 200_000;

/// One kind of GPU: one example, by its place in the snapshot.
struct GpuKind {
    example: usize,
}

/// One kind of job: one example, what a unit of its speed counts, and where it runs, if it does.
struct JobKind {
    example: usize,
    worth: f64,
}

/// A job's kind: what runs, how it is treated, and with which share it runs now.
type JobKey =
    (WorkloadName, Vec<(GpuType, ProfileKey)>, u64, u64, bool, Option<SmShare>, Vec<GpuType>);
/// A GPU's kind: type, share, quota and service.
type GpuKey = (GpuType, SmShare, [u64; 2], Option<(ProfileKey, bool, bool)>, bool);
/// A kind of GPU, the number of jobs there, a kind of job, and the kinds of the others.
type SpeedKey = (usize, usize, Vec<usize>);

struct Values<'a> {
    snapshot: &'a ClusterSnapshot,
    terms: Terms,
    predictor: &'a dyn SpeedPredictor,
    parameters: &'a Parameters,
    gpus: Vec<GpuKind>,
    jobs: Vec<JobKind>,
    known: Mutex<BTreeMap<SpeedKey, f64>>,
}

/// What a GPU gives each of `n` jobs.
fn part(share: SmShare, n: usize) -> Option<SmShare> {
    let n = u32::try_from(n).ok()?.max(1);
    SmShare::new(SmCount(share.sms().0 / n), share.total()).ok().filter(|s| s.sms().0 > 0)
}

/// The share of a job among `n` on a GPU, and whether it must be restarted for it. The part on offer
/// moves a little with every forecast; a job that runs keeps what it has while that is near.
fn share_among(gpu: &GpuSnapshot, job: &JobSnapshot, n: usize) -> Option<(SmShare, bool)> {
    let wanted = part(gpu.share, n);
    let Some(has) = job.running_share.filter(|_| job.running_on.is_some()) else {
        return wanted.map(|w| (w, false));
    };
    let Some(wanted) = wanted else { return Some((has, false)) };
    let ratio = has.percent().value() / wanted.percent().value();
    let too_much = n > 1 && ratio > 1.25;
    if too_much || ratio < 0.75 { Some((wanted, true)) } else { Some((has, false)) }
}

/// The service and other jobs as one neighbour.
fn together(online: &ProfileRecord, others: &[&ProfileRecord], cap: f64) -> ProfileRecord {
    let sum = |of: fn(&ProfileRecord) -> Option<Percent>, most: f64| {
        let add = others.iter().filter_map(|p| of(p)).map(|p| p.value().min(most)).sum::<f64>();
        of(online).and_then(|p| Percent::clamped(p.value() + add))
    };
    // Tenants run at the same time or not, independently.
    let idle = |p: &ProfileRecord| 1.0 - p.gpu_util.map_or(0.0, Percent::fraction);
    let busy = 1.0 - others.iter().map(|p| idle(p)).product::<f64>() * idle(online);
    ProfileRecord {
        gpu_util: online.gpu_util.and(Percent::clamped(busy * 100.0)),
        sm_activity: sum(|p| p.sm_activity, cap),
        sm_occupancy: sum(|p| p.sm_occupancy, cap),
        dram_activity: sum(|p| p.dram_activity, 100.0),
        ..online.clone()
    }
}

impl Values<'_> {
    fn speed(&self, gpu_kind: usize, job: usize, others: &[usize]) -> f64 {
        let key = (gpu_kind, job, others.to_vec());
        if let Some(&known) = self.known.lock().ok().as_ref().and_then(|k| k.get(&key)) {
            return known;
        }
        let fresh = self.predict(gpu_kind, job, others).unwrap_or(0.0);
        if let Ok(mut known) = self.known.lock() {
            known.insert(key, fresh);
        }
        fresh
    }

    fn predict(&self, gpu_kind: usize, job: usize, others: &[usize]) -> Option<f64> {
        let gpu = &self.snapshot.gpus[self.gpus[gpu_kind].example];
        let share = part(gpu.share, others.len() + 1)?;
        let alone = online_input(gpu, share)?;
        let of = |kind: usize| {
            offline_input(&self.snapshot.jobs[self.jobs[kind].example], &gpu.gpu_type).profile
        };
        let beside: Vec<ProfileRecord> = others.iter().map(|&k| of(k)).collect();
        let beside: Vec<&ProfileRecord> = beside.iter().collect();
        let profile = together(&alone.profile, &beside, share.percent().value());
        let online = OnlineInput { profile, share };
        let offline = offline_input(&self.snapshot.jobs[self.jobs[job].example], &gpu.gpu_type);
        Some(f64::from(self.predictor.predict(&online, &offline).speed))
    }
}

impl SetValue for Values<'_> {
    fn value(&self, gpu_kind: usize, job_kinds: &[usize]) -> Option<f64> {
        let gpu = &self.snapshot.gpus[self.gpus[gpu_kind].example];
        let mut memory = Bytes::ZERO;
        let mut total = 0.0;
        for (i, &kind) in job_kinds.iter().enumerate() {
            let job = &self.snapshot.jobs[self.jobs[kind].example];
            let runs = job.running_on.is_some();
            // Whoever runs is held to its own GPU, so it is here.
            if refusal_if(&self.terms, gpu, job, runs).is_some() {
                return None;
            }
            let (_, restarts) = share_among(gpu, job, job_kinds.len())?;
            memory = memory.saturating_add(job.memory);
            let mut others = job_kinds.to_vec();
            others.remove(i);
            let speed = self.speed(gpu_kind, kind, &others);
            if speed < f64::from(self.parameters.min_speed) && !runs {
                return None;
            }
            let worth = self.jobs[kind].worth * solo_speed(job, &gpu.gpu_type);
            let cost = if restarts { self.parameters.disruption_cost() } else { 0.0 };
            total += speed * worth * (1.0 - cost).max(0.0);
        }
        // One job may use all that the GPU lends it now; several must fit beside each other.
        (job_kinds.len() == 1 || memory <= self.terms.lent(gpu)).then_some(total)
    }
}

fn kind_of<K: Ord>(numbers: &mut BTreeMap<K, usize>, key: K) -> (usize, bool) {
    let next = numbers.len();
    let n = *numbers.entry(key).or_insert(next);
    (n, n == next)
}

/// Plans with at most `most` jobs on a GPU. The plan is not certified: no proof of optimality
/// exists for sets.
pub fn plan_packed(
    snapshot: &ClusterSnapshot,
    predictor: &dyn SpeedPredictor,
    parameters: &Parameters,
    most: usize,
) -> Result<ClusterPlan, PlanError> {
    parameters.check()?;
    let terms = parameters.terms(snapshot);
    let (gpus, gpu_kinds) = gpu_kinds(snapshot, &terms);
    let (jobs, job_kinds) = job_kinds(snapshot, parameters);
    let index: BTreeMap<&GpuId, usize> =
        snapshot.gpus.iter().enumerate().map(|(i, g)| (&g.gpu, i)).collect();
    let mut held = vec![Vec::new(); snapshot.gpus.len()];
    let mut leaves: Vec<(usize, EvictionReason)> = Vec::new();
    for (j, job) in snapshot.jobs.iter().enumerate() {
        let Some(on) = &job.running_on else { continue };
        match index.get(on) {
            None => leaves.push((j, EvictionReason::GpuGone)),
            Some(&g) => match refusal(&terms, &snapshot.gpus[g], job) {
                None => held[g].push(j),
                Some(Refusal::Health) => leaves.push((j, EvictionReason::Health)),
                Some(_) => {
                    let all = snapshot.gpus.iter().map(|g| (g, 1));
                    let why = fit::wait_reason(&terms, all, job);
                    leaves.push((j, EvictionReason::NoLongerFits(why)));
                }
            },
        }
    }
    let values =
        Values { snapshot, terms, predictor, parameters, gpus, jobs, known: Mutex::default() };
    let mut free: Vec<usize> = (0..snapshot.jobs.len()).collect();
    // First come, first served among equals.
    free.sort_by_key(|&j| (snapshot.jobs[j].submitted_at, j));
    let place: Vec<usize> = {
        let mut place = vec![0; free.len()];
        for (at, &j) in free.iter().enumerate() {
            place[j] = at;
        }
        place
    };
    let sorted_kinds: Vec<usize> = free
        .iter()
        .map(|&j| if leaves.iter().any(|l| l.0 == j) { usize::MAX } else { job_kinds[j] })
        .collect();
    let held_sorted: Vec<Vec<usize>> =
        held.iter().map(|set| set.iter().map(|&j| place[j]).collect()).collect();
    let problem = Problem {
        gpu_kinds: &gpu_kinds,
        job_kinds: &sorted_kinds,
        most,
        held: &held_sorted,
        values: &Guarded(&values),
    };
    let packing = solve(&problem, EFFORT)?;
    let sets: Vec<Vec<usize>> =
        packing.sets.iter().map(|set| set.iter().map(|&i| free[i]).collect()).collect();
    Ok(write(snapshot, &values, &gpu_kinds, &job_kinds, sets, &leaves))
}

/// Jobs that must leave in this plan are worth nothing anywhere.
struct Guarded<'a, 'b>(&'a Values<'b>);

impl SetValue for Guarded<'_, '_> {
    fn value(&self, gpu_kind: usize, job_kinds: &[usize]) -> Option<f64> {
        if job_kinds.contains(&usize::MAX) { None } else { self.0.value(gpu_kind, job_kinds) }
    }
}

fn gpu_kinds(snapshot: &ClusterSnapshot, terms: &Terms) -> (Vec<GpuKind>, Vec<usize>) {
    let mut numbers: BTreeMap<GpuKey, usize> = BTreeMap::new();
    let mut kinds = Vec::new();
    let of = snapshot.gpus.iter().enumerate().map(|(i, g)| {
        let online = g.online.as_ref().map(|o| (ProfileKey::new(&o.profile), o.critical, o.in_mps));
        let key = (
            g.gpu_type.clone(),
            g.share,
            [g.quota.0, terms.lent(g).0],
            online,
            g.health.allows_placement(),
        );
        let (kind, new) = kind_of(&mut numbers, key);
        if new {
            kinds.push(GpuKind { example: i });
        }
        kind
    });
    let of = of.collect();
    (kinds, of)
}

fn job_kinds(snapshot: &ClusterSnapshot, parameters: &Parameters) -> (Vec<JobKind>, Vec<usize>) {
    let mut numbers: BTreeMap<(JobKey, bool, u64), usize> = BTreeMap::new();
    let mut kinds = Vec::new();
    let of = snapshot.jobs.iter().enumerate().map(|(i, j)| {
        let worth = f64::from(j.priority) * parameters.aging(j.waited);
        let profiles = j.profiles.iter().map(|(t, p)| (t.clone(), ProfileKey::new(p))).collect();
        let key: JobKey = (
            j.workload.clone(),
            profiles,
            worth.to_bits(),
            j.memory.0,
            j.fail_prone,
            j.running_share,
            j.gpu_types.clone(),
        );
        let back_off = if j.not_before > snapshot.at { j.not_before.0 } else { 0 };
        let (kind, new) = kind_of(&mut numbers, (key, j.running_on.is_some(), back_off));
        if new {
            kinds.push(JobKind { example: i, worth });
        }
        kind
    });
    let of = of.collect();
    (kinds, of)
}

fn write(
    snapshot: &ClusterSnapshot,
    values: &Values<'_>,
    gpu_kinds: &[usize],
    job_kinds: &[usize],
    sets: Vec<Vec<usize>>,
    leaves: &[(usize, EvictionReason)],
) -> ClusterPlan {
    let mut plan = ClusterPlan { at: snapshot.at, certified: false, ..ClusterPlan::default() };
    let mut placed = vec![false; snapshot.jobs.len()];
    let residents = sets.iter().flatten().filter(|&&j| snapshot.jobs[j].running_on.is_some());
    let mut may_restart = values.parameters.disruption_limit(residents.count());
    for (g, mut set) in sets.into_iter().enumerate() {
        let gpu = &snapshot.gpus[g];
        let restarts = |set: &[usize]| {
            let must = |&&j: &&usize| {
                share_among(gpu, &snapshot.jobs[j], set.len()).is_some_and(|(_, again)| again)
            };
            set.iter().filter(must).count()
        };
        let mut keep = false;
        if restarts(&set) > may_restart {
            // Too many disturbed already: whoever runs here goes on as it is.
            set.retain(|&j| snapshot.jobs[j].running_on.is_some());
            keep = true;
        } else {
            may_restart -= restarts(&set);
        }
        for &j in &set {
            placed[j] = true;
            let assignment = assign(values, gpu_kinds[g], job_kinds, g, &set, j, keep);
            plan.total_weight += f64::from(assignment.weight);
            plan.assignments.push(assignment);
        }
    }
    for (j, reason) in leaves {
        let job = &snapshot.jobs[*j];
        if let Some(gpu) = job.running_on.clone() {
            let reason = reason.clone();
            plan.evictions.push(Eviction { job: job.job.clone(), gpu, reason });
        }
    }
    for (_, job) in snapshot.jobs.iter().enumerate().filter(|(j, _)| !placed[*j]) {
        let examples = values.gpus.iter().map(|k| (&snapshot.gpus[k.example], 1));
        let reason = fit::wait_reason(&values.terms, examples, job);
        plan.waiting.push(Waiting { job: job.job.clone(), reason });
    }
    plan
}

/// One job of the set on a GPU; with `keep`, as it is.
fn assign(
    values: &Values<'_>,
    gpu_kind: usize,
    job_kinds: &[usize],
    g: usize,
    set: &[usize],
    j: usize,
    keep: bool,
) -> Assignment {
    let (gpu, job) = (&values.snapshot.gpus[g], &values.snapshot.jobs[j]);
    let mut others: Vec<usize> = set.iter().filter(|&&o| o != j).map(|&o| job_kinds[o]).collect();
    others.sort_unstable();
    let speed = values.speed(gpu_kind, job_kinds[j], &others);
    let has = job.running_share.unwrap_or(gpu.share);
    let (share, again) = share_among(gpu, job, set.len()).unwrap_or((has, false));
    let change = match &job.running_on {
        None => Change::Start,
        Some(_) if again && !keep => Change::Restart,
        Some(_) => Change::Stay,
    };
    let worth = values.jobs[job_kinds[j]].worth * solo_speed(job, &gpu.gpu_type);
    #[expect(clippy::cast_possible_truncation, reason = "a speed and its weight")]
    let (predicted_speed, weight) = (speed as f32, (speed * worth) as f32);
    Assignment {
        job: job.job.clone(),
        gpu: gpu.gpu.clone(),
        share: if change == Change::Stay { has } else { share },
        // Alone it may use all that is lent; several are capped at what they asked for.
        quota: if set.len() == 1 { gpu.quota } else { job.memory },
        predicted_speed,
        weight,
        change,
    }
}
