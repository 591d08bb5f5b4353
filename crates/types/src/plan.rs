//! What should hold next, as data: complete and printable, so that carrying it out has no choices
//! left.

use std::fmt;

use crate::id::{GpuId, JobId};
use crate::unit::{Bytes, Micros, SmShare};

/// One job on one GPU, with everything needed to start it.
#[derive(Debug, Clone, PartialEq)]
pub struct Assignment {
    /// The job.
    pub job: JobId,
    /// The GPU.
    pub gpu: GpuId,
    /// The share it is started with.
    pub share: SmShare,
    /// The hard cap on its memory.
    pub quota: Bytes,
    /// Speed expected against its speed alone on this GPU type.
    pub predicted_speed: f32,
    /// What this assignment is worth to the scheduler: speed on the reference type, weighed.
    pub weight: f32,
    /// Where it came from, or that it stays.
    pub change: Change,
}

/// What an assignment means for the job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It was waiting and starts.
    Start,
    /// It goes on where it is, with the share it has.
    Stay,
    /// It restarts where it is, because a new share is worth it.
    Restart,
    /// It is checkpointed, stopped there, and started here.
    Move {
        /// The GPU it leaves.
        from: GpuId,
    },
}

/// One job taken off its GPU and not placed again in this plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Eviction {
    /// The job.
    pub job: JobId,
    /// The GPU it leaves.
    pub gpu: GpuId,
    /// Why.
    pub reason: EvictionReason,
}

/// Why a job is taken off a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EvictionReason {
    /// The GPU's health no longer lets offline work run.
    Health,
    /// The GPU is no longer in the snapshot.
    GpuGone,
    /// The job no longer fits: quota, share, user or type.
    NoLongerFits(WaitReason),
    /// A job that counts more takes the place.
    Displaced,
}

/// One job that is not placed, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Waiting {
    /// The job.
    pub job: JobId,
    /// Why.
    pub reason: WaitReason,
}

/// Why a job is not placed. Each GPU is asked the same questions in the order of this list; the
/// reason told is that of the GPU that came furthest, because it is the one to mend first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WaitReason {
    /// The cluster has no GPU at all.
    NoGpus,
    /// No GPU is of a type that the job accepts.
    NoGpuOfType,
    /// GPUs of its type exist, none is Healthy.
    NoHealthyGpu {
        /// How many GPUs of its type are not Healthy.
        unhealthy: usize,
    },
    /// It asks for more memory than any Healthy GPU lends.
    MemoryQuota {
        /// What it asks for.
        asked: Bytes,
        /// The largest quota on offer.
        largest: Bytes,
    },
    /// Every Healthy GPU that could hold it lends no SMs: the services need them all.
    NoShare,
    /// Every Healthy GPU that could hold it has its service outside MPS.
    OutsideMps,
    /// Every Healthy GPU that could hold it serves another user without multi-user mode.
    OtherUser,
    /// It is fail-prone and every GPU that could hold it carries a critical service.
    FailProne,
    /// It cannot be moved, and the GPU it ran on cannot keep it.
    Pinned,
    /// It failed lately and waits for its time.
    BackOff {
        /// How long it must still wait.
        left: Micros,
    },
    /// It could run, but jobs that count more took the places.
    Outranked {
        /// How many GPUs could have held it.
        candidates: usize,
    },
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitReason::NoGpus => write!(f, "the cluster has no GPU; check that the agents report"),
            WaitReason::NoGpuOfType => write!(f, "no GPU is of a type that the job accepts"),
            WaitReason::NoHealthyGpu { unhealthy: 1 } => {
                write!(f, "the only GPU of its type is not Healthy")
            }
            WaitReason::NoHealthyGpu { unhealthy } => {
                write!(f, "none of the {unhealthy} GPUs of its type is Healthy")
            }
            WaitReason::MemoryQuota { asked, largest } => {
                write!(f, "asks for {asked} of memory, the largest quota on offer is {largest}")
            }
            WaitReason::NoShare => {
                write!(f, "the services need all SMs of every GPU that could hold it")
            }
            WaitReason::OutsideMps => {
                write!(f, "the service on every GPU that could hold it runs outside MPS")
            }
            WaitReason::OtherUser => {
                write!(
                    f,
                    "every GPU that could hold it serves another user; its MPS is not multi-user"
                )
            }
            WaitReason::FailProne => {
                write!(
                    f,
                    "it is fail-prone and every GPU that could hold it carries a critical service"
                )
            }
            WaitReason::BackOff { left } => {
                write!(f, "it failed lately and may start again in {left}")
            }
            WaitReason::Pinned => {
                write!(f, "it cannot be moved, and the GPU it ran on cannot keep it")
            }
            WaitReason::Outranked { candidates: 1 } => {
                write!(f, "a job that counts more took the only GPU that could hold it")
            }
            WaitReason::Outranked { candidates } => {
                write!(f, "jobs that count more took all {candidates} GPUs that could hold it")
            }
        }
    }
}

/// What should hold next.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ClusterPlan {
    /// The moment of the snapshot it was made from.
    pub at: Micros,
    /// Who runs where, in the order of the snapshot's GPUs.
    pub assignments: Vec<Assignment>,
    /// Who is taken off, in the order of the snapshot's jobs.
    pub evictions: Vec<Eviction>,
    /// Who waits, in the order of the snapshot's jobs.
    pub waiting: Vec<Waiting>,
    /// Sum of the weights of all assignments.
    pub total_weight: f64,
    /// Whether the matching behind it was proven optimal.
    pub certified: bool,
}

/// What came of one step of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Receipt {
    /// The job.
    pub job: JobId,
    /// The GPU.
    pub gpu: GpuId,
    /// When it was done, or given up.
    pub at: Micros,
    /// The error in words, when it failed.
    pub error: Option<String>,
}
