//! First in, first out: what the baselines and MuxFlow-M do instead of matching. Jobs that run stay;
//! jobs that wait take free GPUs in the order that they came.

use muxflow_gpu_model::Rng;
use muxflow_types::{
    Assignment, Change, ClusterPlan, ClusterSnapshot, Eviction, EvictionReason, GpuSnapshot,
    JobSnapshot, WaitReason, Waiting,
};

/// How GPUs are taken.
pub(super) enum Order<'a> {
    /// In the order of the snapshot.
    AsListed,
    /// At random.
    Random(&'a mut Rng),
}

/// The plan of the rule above. A GPU is free when a job may be there at all and none runs.
pub(super) fn plan(snapshot: &ClusterSnapshot, order: Order<'_>) -> ClusterPlan {
    let mut plan = ClusterPlan { at: snapshot.at, certified: true, ..ClusterPlan::default() };
    let index: std::collections::BTreeMap<_, _> =
        snapshot.gpus.iter().enumerate().map(|(i, g)| (&g.gpu, i)).collect();
    let mut taken = vec![false; snapshot.gpus.len()];
    let mut placed = vec![false; snapshot.jobs.len()];
    for (j, job) in snapshot.jobs.iter().enumerate() {
        let Some(on) = &job.running_on else { continue };
        match index.get(on).copied() {
            Some(g) if snapshot.gpus[g].health.allows_running() => {
                taken[g] = true;
                placed[j] = true;
                let share = job.running_share.unwrap_or(snapshot.gpus[g].share);
                plan.assignments.push(assign(snapshot, g, j, share, Change::Stay));
            }
            known => {
                let reason =
                    if known.is_some() { EvictionReason::Health } else { EvictionReason::GpuGone };
                plan.evictions.push(Eviction { job: job.job.clone(), gpu: on.clone(), reason });
            }
        }
    }
    let lends = |g: &GpuSnapshot| g.health.allows_placement() && g.share.sms().0 > 0;
    let mut free: Vec<usize> =
        (0..snapshot.gpus.len()).filter(|&g| !taken[g] && lends(&snapshot.gpus[g])).collect();
    if let Order::Random(rng) = order {
        rng.shuffle(&mut free);
    }
    free.reverse();
    let mut waiting: Vec<usize> = (0..snapshot.jobs.len()).filter(|&j| !placed[j]).collect();
    waiting.sort_by_key(|&j| (snapshot.jobs[j].submitted_at, j));
    let mut passed_over: Vec<usize> = Vec::new();
    for j in waiting {
        let job = &snapshot.jobs[j];
        let mut found = None;
        if job.running_on.is_none() && job.not_before <= snapshot.at {
            // The first GPU that takes it; those it cannot use stay for the next job.
            while let Some(g) = free.pop() {
                if takes(&snapshot.gpus[g], job) {
                    found = Some(g);
                    break;
                }
                passed_over.push(g);
            }
            while let Some(g) = passed_over.pop() {
                free.push(g);
            }
        }
        match found {
            Some(g) => {
                let share = snapshot.gpus[g].share;
                plan.assignments.push(assign(snapshot, g, j, share, Change::Start));
            }
            None => plan.waiting.push(Waiting {
                job: job.job.clone(),
                reason: WaitReason::Outranked { candidates: snapshot.gpus.len() },
            }),
        }
    }
    plan.assignments.sort_by_key(|a| index.get(&a.gpu).copied());
    plan.total_weight = plan.assignments.iter().map(|a| f64::from(a.weight)).sum();
    plan
}

/// Whether a GPU that lends takes this very job.
fn takes(gpu: &GpuSnapshot, job: &JobSnapshot) -> bool {
    let typed = job.gpu_types.is_empty() || job.gpu_types.contains(&gpu.gpu_type);
    let critical = gpu.online.as_ref().is_some_and(|o| o.critical);
    typed && job.memory <= gpu.quota && !(critical && job.fail_prone)
}

fn assign(
    snapshot: &ClusterSnapshot,
    gpu: usize,
    job: usize,
    share: muxflow_types::SmShare,
    change: Change,
) -> Assignment {
    let g: &GpuSnapshot = &snapshot.gpus[gpu];
    Assignment {
        job: snapshot.jobs[job].job.clone(),
        gpu: g.gpu.clone(),
        share,
        quota: g.quota,
        // No speed is predicted here.
        predicted_speed: 0.0,
        weight: 0.0,
        change,
    }
}
