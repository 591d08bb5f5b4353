//! Checks a plan against its snapshot before it is carried out, without trusting whoever made it.
//!
//! The planner should never make a plan that fails here. That is why this looks at nothing the
//! planner computed but the plan itself.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use muxflow_types::{
    Assignment, Bytes, Change, ClusterPlan, ClusterSnapshot, EvictionReason, GpuId, GpuSnapshot,
    JobId, JobSnapshot,
};

use super::fit::{Refusal, Terms, refusal};
use super::parameters::Parameters;

/// What is wrong with a plan.
#[derive(Debug, Clone, PartialEq)]
pub enum Finding {
    /// Made from another moment than the snapshot's.
    OtherSnapshot,
    /// An id that the snapshot does not have.
    UnknownJob(JobId),
    /// An id that the snapshot does not have.
    UnknownGpu(GpuId),
    /// Two jobs on one GPU.
    GpuTwice(GpuId),
    /// One job in two places, or both placed and waiting.
    JobTwice(JobId),
    /// A job of the snapshot about which the plan says nothing.
    JobForgotten(JobId),
    /// A job that may not be on that GPU.
    Misfit {
        /// The job.
        job: JobId,
        /// The GPU.
        gpu: GpuId,
        /// Why not.
        why: Refusal,
    },
    /// More SMs than the GPU has, or none.
    BadShare {
        /// The job.
        job: JobId,
        /// The GPU.
        gpu: GpuId,
    },
    /// A quota that, with what the service holds, does not fit the GPU.
    QuotaOverrun {
        /// The GPU.
        gpu: GpuId,
        /// The quota of the plan.
        quota: Bytes,
        /// What the service holds.
        online: Bytes,
        /// What the GPU has.
        total: Bytes,
    },
    /// A change that does not agree with where the job is.
    WrongChange(JobId),
    /// More running jobs disturbed than one plan may.
    TooManyDisruptions {
        /// How many are.
        disturbed: usize,
        /// How many may be.
        limit: usize,
    },
    /// A speed or weight that is no number, or a speed beyond 1.
    BadNumber(JobId),
    /// The matching was not proven optimal.
    NotCertified,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::OtherSnapshot => write!(f, "the plan was made from another snapshot"),
            Finding::UnknownJob(j) => write!(f, "job {j} is not in the snapshot"),
            Finding::UnknownGpu(g) => write!(f, "GPU {g} is not in the snapshot"),
            Finding::GpuTwice(g) => write!(f, "GPU {g} is given to two jobs"),
            Finding::JobTwice(j) => write!(f, "job {j} stands in the plan twice"),
            Finding::JobForgotten(j) => write!(f, "the plan says nothing about job {j}"),
            Finding::Misfit { job, gpu, why } => {
                write!(f, "job {job} may not be on GPU {gpu}: {}", why.words())
            }
            Finding::BadShare { job, gpu } => {
                write!(f, "job {job} gets a share of GPU {gpu} that the GPU does not have")
            }
            Finding::QuotaOverrun { gpu, quota, online, total } => write!(
                f,
                "GPU {gpu}: a quota of {quota} beside a service that holds {online} does not fit {total}"
            ),
            Finding::WrongChange(j) => write!(f, "the plan is wrong about where job {j} is now"),
            Finding::TooManyDisruptions { disturbed, limit } => {
                write!(f, "the plan disturbs {disturbed} running jobs, {limit} are allowed")
            }
            Finding::BadNumber(j) => {
                write!(f, "the speed or weight of job {j} is no sensible number")
            }
            Finding::NotCertified => {
                write!(f, "the matching behind the plan was not proven optimal")
            }
        }
    }
}

/// All that is wrong with a plan; empty when it may be carried out.
pub fn lint(
    snapshot: &ClusterSnapshot,
    plan: &ClusterPlan,
    parameters: &Parameters,
) -> Vec<Finding> {
    let terms = parameters.terms(snapshot);
    let mut findings = Vec::new();
    if plan.at != snapshot.at {
        findings.push(Finding::OtherSnapshot);
    }
    if !plan.certified {
        findings.push(Finding::NotCertified);
    }
    let gpus: BTreeMap<&GpuId, &GpuSnapshot> = snapshot.gpus.iter().map(|g| (&g.gpu, g)).collect();
    let jobs: BTreeMap<&JobId, &JobSnapshot> = snapshot.jobs.iter().map(|j| (&j.job, j)).collect();
    let (mut gpus_seen, mut jobs_seen) = (BTreeSet::new(), BTreeSet::new());
    for a in &plan.assignments {
        if !gpus_seen.insert(&a.gpu) {
            findings.push(Finding::GpuTwice(a.gpu.clone()));
        }
        if !jobs_seen.insert(&a.job) {
            findings.push(Finding::JobTwice(a.job.clone()));
        }
        match (gpus.get(&a.gpu), jobs.get(&a.job)) {
            (Some(gpu), Some(job)) => check_assignment(&terms, a, gpu, job, &mut findings),
            (None, _) => findings.push(Finding::UnknownGpu(a.gpu.clone())),
            (_, None) => findings.push(Finding::UnknownJob(a.job.clone())),
        }
    }
    for w in &plan.waiting {
        if !jobs_seen.insert(&w.job) {
            findings.push(Finding::JobTwice(w.job.clone()));
        }
        if !jobs.contains_key(&w.job) {
            findings.push(Finding::UnknownJob(w.job.clone()));
        }
    }
    findings.extend(
        jobs.keys()
            .filter(|j| !jobs_seen.contains(*j))
            .map(|j| Finding::JobForgotten((*j).clone())),
    );
    check_evictions(plan, &jobs, &mut findings);
    check_disruptions(snapshot, plan, &gpus, parameters, &mut findings);
    findings
}

fn check_assignment(
    terms: &Terms,
    a: &Assignment,
    gpu: &GpuSnapshot,
    job: &JobSnapshot,
    findings: &mut Vec<Finding>,
) {
    if let Some(why) = refusal(terms, gpu, job) {
        findings.push(Finding::Misfit { job: a.job.clone(), gpu: a.gpu.clone(), why });
    }
    if a.share.total() != gpu.sms || a.share.sms().0 == 0 && a.change != Change::Stay {
        findings.push(Finding::BadShare { job: a.job.clone(), gpu: a.gpu.clone() });
    }
    let online = gpu.online.as_ref().map_or(Bytes::ZERO, |o| o.memory);
    let overrun = match a.change {
        Change::Stay => a.quota > gpu.quota,
        _ => a.quota > gpu.quota || terms.quota.check(gpu.memory, online, a.quota).is_err(),
    };
    if overrun {
        findings.push(Finding::QuotaOverrun {
            gpu: gpu.gpu.clone(),
            quota: a.quota,
            online,
            total: gpu.memory,
        });
    }
    let agrees = match (&a.change, &job.running_on) {
        (Change::Start, None) => true,
        (Change::Stay | Change::Restart, Some(on)) => *on == a.gpu,
        (Change::Move { from }, Some(on)) => from == on && *on != a.gpu,
        _ => false,
    };
    if !agrees {
        findings.push(Finding::WrongChange(a.job.clone()));
    }
    if !((0.0..=1.0).contains(&a.predicted_speed) && a.weight.is_finite()) {
        findings.push(Finding::BadNumber(a.job.clone()));
    }
}

/// Every running job that is not placed is evicted once, from where it is; nobody else is.
fn check_evictions(
    plan: &ClusterPlan,
    jobs: &BTreeMap<&JobId, &JobSnapshot>,
    findings: &mut Vec<Finding>,
) {
    let mut evicted = BTreeSet::new();
    for e in &plan.evictions {
        let Some(job) = jobs.get(&e.job) else {
            findings.push(Finding::UnknownJob(e.job.clone()));
            continue;
        };
        if !evicted.insert(&e.job) {
            findings.push(Finding::JobTwice(e.job.clone()));
        }
        if job.running_on.as_ref() != Some(&e.gpu) {
            findings.push(Finding::WrongChange(e.job.clone()));
        }
    }
    let placed: BTreeSet<&JobId> = plan.assignments.iter().map(|a| &a.job).collect();
    for (id, job) in jobs {
        let must_leave = job.running_on.is_some() && !placed.contains(*id);
        if must_leave != evicted.contains(*id) {
            findings.push(Finding::WrongChange((*id).clone()));
        }
    }
}

/// Counts running jobs that could have stayed and do not.
fn check_disruptions(
    snapshot: &ClusterSnapshot,
    plan: &ClusterPlan,
    gpus: &BTreeMap<&GpuId, &GpuSnapshot>,
    parameters: &Parameters,
    findings: &mut Vec<Finding>,
) {
    let terms = parameters.terms(snapshot);
    let may_stay: BTreeSet<&JobId> = snapshot
        .jobs
        .iter()
        .filter(|j| {
            let gpu = j.running_on.as_ref().and_then(|on| gpus.get(on));
            gpu.is_some_and(|g| refusal(&terms, g, j).is_none())
        })
        .map(|j| &j.job)
        .collect();
    let stayed = plan
        .assignments
        .iter()
        .filter(|a| a.change == Change::Stay && may_stay.contains(&a.job))
        .count();
    let (disturbed, limit) =
        (may_stay.len() - stayed.min(may_stay.len()), parameters.disruption_limit(may_stay.len()));
    if disturbed > limit {
        findings.push(Finding::TooManyDisruptions { disturbed, limit });
    }
    for e in &plan.evictions {
        let forced = e.reason != EvictionReason::Displaced;
        if forced && may_stay.contains(&e.job) {
            findings.push(Finding::WrongChange(e.job.clone()));
        }
    }
}
