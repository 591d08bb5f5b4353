//! Whether a job may be on a GPU at all. One rule, asked by the planner, the lint and the explainer,
//! so that they cannot disagree.

use muxflow_types::{Bytes, GpuSnapshot, JobSnapshot, Micros, WaitReason};

use crate::node::quota::QuotaParams;

/// What a fit depends on beside the two.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// The moment.
    pub at: Micros,
    /// How much memory may be lent.
    pub quota: QuotaParams,
}

impl Terms {
    /// What a GPU lends to a newcomer: its quota, or what the service and the reserve leave of it.
    pub fn lent(&self, gpu: &GpuSnapshot) -> Bytes {
        let online = gpu.online.as_ref().map_or(Bytes::ZERO, |o| o.memory);
        let left =
            gpu.memory.saturating_sub(self.quota.kept_free(gpu.memory)).saturating_sub(online);
        gpu.quota.min(left)
    }
}

/// What stands against a job on a GPU, in the order in which it is asked. A later refusal means
/// that the GPU came closer to holding the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// The GPU is of a type that the job does not accept.
    Type,
    /// The GPU's health forbids it.
    Health,
    /// The job asks for more memory than the GPU lends.
    Memory,
    /// The GPU lends no SMs.
    NoShare,
    /// The service on it runs outside MPS.
    OutsideMps,
    /// Its MPS server serves another user.
    OtherUser,
    /// A fail-prone job beside a critical service.
    FailProne,
    /// The job cannot be moved, and runs elsewhere.
    Pinned,
    /// The job failed lately and must wait.
    BackOff,
}

impl Refusal {
    /// A few words for a table.
    pub fn words(self) -> &'static str {
        match self {
            Refusal::Type => "wrong GPU type",
            Refusal::Health => "not Healthy",
            Refusal::Memory => "memory quota too small",
            Refusal::NoShare => "lends no SMs",
            Refusal::OutsideMps => "service outside MPS",
            Refusal::OtherUser => "MPS serves another user",
            Refusal::FailProne => "fail-prone job, critical service",
            Refusal::Pinned => "job cannot be moved",
            Refusal::BackOff => "job waits after a failure",
        }
    }
}

/// Whether the job is on this GPU now.
pub fn runs_here(gpu: &GpuSnapshot, job: &JobSnapshot) -> bool {
    job.running_on.as_ref() == Some(&gpu.gpu)
}

/// Why the job may not be on the GPU in the coming interval; `None` when it may.
///
/// A job that is already there may stay on an Unhealthy GPU and beside a service that now leaves no
/// SMs (the launch gate holds it back); a job that comes may not.
pub fn refusal(terms: &Terms, gpu: &GpuSnapshot, job: &JobSnapshot) -> Option<Refusal> {
    refusal_if(terms, gpu, job, runs_here(gpu, job))
}

/// The same, for a job that is taken to be here, or taken to come from elsewhere. Classes of equal
/// GPUs ask this way: what holds for one member as a newcomer's place holds for all.
pub(super) fn refusal_if(
    terms: &Terms,
    gpu: &GpuSnapshot,
    job: &JobSnapshot,
    here: bool,
) -> Option<Refusal> {
    if !job.gpu_types.is_empty() && !job.gpu_types.contains(&gpu.gpu_type) {
        return Some(Refusal::Type);
    }
    let healthy = if here { gpu.health.allows_running() } else { gpu.health.allows_placement() };
    if !healthy {
        return Some(Refusal::Health);
    }
    // A resident keeps the quota it was started with; its GPU's health watches what is really held.
    if job.memory > if here { gpu.quota } else { terms.lent(gpu) } {
        return Some(Refusal::Memory);
    }
    if gpu.share.sms().0 == 0 && !here {
        return Some(Refusal::NoShare);
    }
    if let Some(online) = &gpu.online {
        if !online.in_mps {
            return Some(Refusal::OutsideMps);
        }
        if let (Some(theirs), Some(ours)) = (online.uid, job.uid)
            && theirs != ours
            && !gpu.multi_user
        {
            return Some(Refusal::OtherUser);
        }
        if online.critical && job.fail_prone {
            return Some(Refusal::FailProne);
        }
    }
    if job.pinned && job.running_on.is_some() && !here {
        return Some(Refusal::Pinned);
    }
    if !here && job.not_before > terms.at {
        return Some(Refusal::BackOff);
    }
    None
}

/// Why a job waits, from what every GPU said: the refusal of the GPU that came furthest. Each GPU
/// comes with how many there are like it.
pub(super) fn wait_reason<'a>(
    terms: &Terms,
    gpus: impl Iterator<Item = (&'a GpuSnapshot, usize)>,
    job: &JobSnapshot,
) -> WaitReason {
    let mut furthest: Option<Refusal> = None;
    let (mut candidates, mut total, mut unhealthy) = (0, 0, 0);
    let mut largest = Bytes::ZERO;
    for (gpu, count) in gpus {
        total += count;
        match refusal_if(terms, gpu, job, false) {
            None => candidates += count,
            Some(why) => {
                furthest = furthest.max(Some(why));
                if why == Refusal::Health {
                    unhealthy += count;
                }
                if why == Refusal::Memory {
                    largest = largest.max(terms.lent(gpu));
                }
            }
        }
    }
    if total == 0 {
        return WaitReason::NoGpus;
    }
    if candidates > 0 {
        return WaitReason::Outranked { candidates };
    }
    match furthest {
        None | Some(Refusal::Type) => WaitReason::NoGpuOfType,
        Some(Refusal::Health) => WaitReason::NoHealthyGpu { unhealthy },
        Some(Refusal::Memory) => WaitReason::MemoryQuota { asked: job.memory, largest },
        Some(Refusal::NoShare) => WaitReason::NoShare,
        Some(Refusal::OutsideMps) => WaitReason::OutsideMps,
        Some(Refusal::OtherUser) => WaitReason::OtherUser,
        Some(Refusal::FailProne) => WaitReason::FailProne,
        Some(Refusal::Pinned) => WaitReason::Pinned,
        Some(Refusal::BackOff) => WaitReason::BackOff { left: job.not_before.since(terms.at) },
    }
}
