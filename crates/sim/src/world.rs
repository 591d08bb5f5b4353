//! The state of a simulated cluster.

use muxflow_gpu_model::WorkloadShape;
use muxflow_policy::node::health::HealthMachine;
use muxflow_policy::retry::FailureHistory;
use muxflow_types::{GpuId, JobId, NodeId, SmShare};

use crate::outcome::Outcome;

/// A job on a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Running {
    pub(crate) job: usize,
    pub(crate) share: SmShare,
    /// It makes progress from here on.
    pub(crate) ready_s: f64,
    /// Its progress is accounted up to here.
    pub(crate) settled_s: f64,
    /// Progress in solo seconds on the reference type per second.
    pub(crate) rate: f64,
    /// Events of an earlier stay on this GPU are ignored.
    pub(crate) stay: u32,
}

/// One GPU.
pub(crate) struct Gpu {
    pub(crate) id: GpuId,
    pub(crate) node: NodeId,
    pub(crate) pool: usize,
    pub(crate) service: usize,
    /// How busy this replica is against the average, by class.
    pub(crate) class: usize,
    /// At most as many as the policy puts on one GPU.
    pub(crate) running: Vec<Running>,
    pub(crate) stays: u32,
    pub(crate) health: Option<HealthMachine>,
    pub(crate) down: bool,
    pub(crate) outcome: Outcome,
    /// The day on which an error was last counted here.
    pub(crate) error_day: Option<u64>,
}

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    Unborn,
    Profiling,
    Waiting,
    Running(usize),
    Done,
    Cancelled,
}

/// One job.
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) workload: usize,
    pub(crate) submit_s: f64,
    pub(crate) duration_s: f64,
    /// Solo seconds on the reference type that are left.
    pub(crate) left_s: f64,
    pub(crate) stage: Stage,
    pub(crate) start_s: Option<f64>,
    pub(crate) end_s: Option<f64>,
    pub(crate) separate_s: f64,
    pub(crate) real_s: f64,
    pub(crate) evictions: u32,
    pub(crate) failures: FailureHistory,
    pub(crate) not_before_s: f64,
    /// Waiting since.
    pub(crate) since_s: f64,
    pub(crate) waited_s: f64,
    /// Its user cancels it when so much is left.
    pub(crate) cancel_at_left_s: f64,
    /// Whether it breaks again and again and takes its neighbours along; no policy sees this.
    pub(crate) breaks: bool,
}

/// How busy replicas are against the average: load balancing is never even.
pub(crate) const REPLICA_CLASSES: [f64; 7] = [0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15];

/// Workloads of a scenario, in the order of first use.
pub(crate) struct Workloads {
    pub(crate) shapes: Vec<WorkloadShape>,
    /// Speed alone on each pool against the reference type.
    pub(crate) solo: Vec<Vec<f64>>,
}
