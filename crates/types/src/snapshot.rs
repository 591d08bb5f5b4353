//! The cluster as the scheduler sees it at one moment: all it needs, and nothing that it must ask
//! for while it decides.

use std::collections::BTreeMap;

use crate::health::HealthState;
use crate::id::{GpuId, GpuType, JobId, NodeId, ServiceId, WorkloadName};
use crate::profile::ProfileRecord;
use crate::unit::{Bytes, Micros, Percent, SmCount, SmShare};

/// An online service on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineSnapshot {
    /// Which service.
    pub service: ServiceId,
    /// The service alone on this GPU type.
    pub profile: ProfileRecord,
    /// The SM activity that it will need in the coming interval, at the stated quantile.
    pub predicted_sm_activity: Percent,
    /// Device memory it holds.
    pub memory: Bytes,
    /// Whether fail-prone jobs must stay away.
    pub critical: bool,
    /// The user it runs as; an MPS server without multi-user mode serves one user.
    pub uid: Option<u32>,
    /// Whether it runs under MPS; one that does not cannot share.
    pub in_mps: bool,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSnapshot {
    /// Which GPU.
    pub gpu: GpuId,
    /// On which machine.
    pub node: NodeId,
    /// Of which kind.
    pub gpu_type: GpuType,
    /// How many SMs it has.
    pub sms: SmCount,
    /// How much memory it has.
    pub memory: Bytes,
    /// The state that its health machine is in.
    pub health: HealthState,
    /// The service on it; an online GPU without one is idle.
    pub online: Option<OnlineSnapshot>,
    /// What offline work may use in the coming interval.
    pub share: SmShare,
    /// The hard cap on offline memory.
    pub quota: Bytes,
    /// The job that runs here now.
    pub running: Option<JobId>,
    /// Whether its MPS server serves every user.
    pub multi_user: bool,
}

/// One offline job that is not finished.
#[derive(Debug, Clone, PartialEq)]
pub struct JobSnapshot {
    /// Which job.
    pub job: JobId,
    /// What it runs.
    pub workload: WorkloadName,
    /// The job alone, per GPU type.
    pub profiles: BTreeMap<GpuType, ProfileRecord>,
    /// Speed alone on each GPU type, against the reference type at 1.
    pub solo_speed: BTreeMap<GpuType, f64>,
    /// Device memory it asks for.
    pub memory: Bytes,
    /// Larger counts more; 1 is normal.
    pub priority: u32,
    /// When it came.
    pub submitted_at: Micros,
    /// How long it has waited in all since then, running time left out. It does not shrink when the
    /// job starts, so that a job that waited long is not displaced at once.
    pub waited: Micros,
    /// Where it runs now.
    pub running_on: Option<GpuId>,
    /// The share it was started with: MPS cannot change it while it runs.
    pub running_share: Option<SmShare>,
    /// GPU types it may use; empty means any.
    pub gpu_types: Vec<GpuType>,
    /// Whether it has broken its neighbours or itself often.
    pub fail_prone: bool,
    /// Not to be placed before this time, after failures.
    pub not_before: Micros,
    /// Not to be moved: it cannot checkpoint.
    pub pinned: bool,
    /// The user it runs as.
    pub uid: Option<u32>,
}

/// Everything the scheduler knows when it plans.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterSnapshot {
    /// The moment.
    pub at: Micros,
    /// The GPU type on which solo speeds are 1.
    pub reference_type: GpuType,
    /// All GPUs.
    pub gpus: Vec<GpuSnapshot>,
    /// All jobs that wait or run.
    pub jobs: Vec<JobSnapshot>,
}
