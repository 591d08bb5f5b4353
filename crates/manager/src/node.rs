//! The node as the manager sees it: what its GPUs are like, and what can be asked of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use muxflow_abi::control::rhythm::BUCKETS;
use muxflow_agent::control_block::JobCounts;
use muxflow_agent::gpu::{Event, OfflineSpec};
use muxflow_agent::launch::Exit;
use muxflow_types::{
    Bytes, GpuId, GpuSample, GpuType, HealthState, JobId, Micros, Percent, ServiceId, SmCount,
    SmShare,
};

/// The service on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineSight {
    /// Which.
    pub service: ServiceId,
    /// Its process.
    pub pid: Option<u32>,
    /// The user it runs as.
    pub uid: Option<u32>,
    /// Latency that it reports.
    pub latency: Option<Micros>,
    /// Fail-prone jobs are to be kept away from it.
    pub critical: bool,
}

/// One GPU at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuSight {
    /// Which.
    pub gpu: GpuId,
    /// Its number on the machine.
    pub index: u32,
    /// Its type.
    pub gpu_type: GpuType,
    /// What the driver calls it.
    pub name: String,
    /// Its SMs; 0 while nobody has asked it.
    pub sms: SmCount,
    /// Its memory.
    pub memory: Bytes,
    /// State of health.
    pub health: HealthState,
    /// A new job may be placed.
    pub placeable: bool,
    /// Share that a job would get.
    pub share: Option<SmShare>,
    /// Memory that a job would get.
    pub quota: Bytes,
    /// The launch budget of offline work.
    pub budget: f64,
    /// GPU load as the gate sees it.
    pub load: Option<f64>,
    /// The service.
    pub online: Option<OnlineSight>,
    /// The service's part of SM activity.
    pub online_activity: Option<Percent>,
    /// What the service will need.
    pub demand: Option<Percent>,
    /// The job, with its counters.
    pub offline: Option<(JobId, JobCounts)>,
    /// The newest sample; its times are the node's own.
    pub sample: Option<GpuSample>,
    /// Processes on it that are neither ours nor under our MPS server.
    pub outside_mps: Vec<u32>,
    /// What such a process must be started with to come under it.
    pub mps_pipe_dir: Option<PathBuf>,
    /// Its MPS server serves every user.
    pub multi_user: bool,
    /// Stops of offline work, by reason.
    pub stops: BTreeMap<String, u64>,
    /// Errors seen, by name.
    pub faults: BTreeMap<String, u64>,
    /// How often MPS was started.
    pub mps_starts: u64,
    /// How often the service was restarted.
    pub online_restarts: u64,
}

/// What the interposer has counted for the job on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Rhythm {
    /// The job.
    pub job: JobId,
    /// When it was read, on the node's clock.
    pub at: Micros,
    /// Launches by hash of the kernel.
    pub launches: [u32; BUCKETS],
    /// The most memory it held.
    pub peak: Bytes,
}

/// What the manager asks of a node. Orders come back at once; what came of them is an event.
pub trait NodePort: Send + Sync {
    /// All GPUs.
    fn look(&self) -> Vec<GpuSight>;
    /// Starts a run of a job.
    fn start(&self, gpu: &GpuId, spec: OfflineSpec) -> Result<(), String>;
    /// Stops a job in the clean order.
    fn stop(&self, gpu: &GpuId, job: &JobId) -> Result<(), String>;
    /// The next event, for at most this long.
    fn next_event(&self, limit: Duration) -> Option<(String, Event)>;
    /// Runs of an earlier manager that were found on their way out; an event will tell their end.
    fn found(&self) -> Vec<(JobId, u64)>;
    /// How the last run of a job ended, when that is written down; it names the run.
    fn last_exit(&self, job: &JobId) -> Option<Exit>;
    /// The file of a job's output, `stdout` or `stderr`.
    fn log_file(&self, job: &JobId, stream: &str) -> PathBuf;
    /// How much room the output of a job takes, all of its files; 0 when that cannot be seen.
    fn output_bytes(&self, job: &JobId) -> u64;
    /// Removes what is left of a job that has ended: its output. That there is nothing is no error.
    fn forget(&self, job: &JobId) -> Result<(), String>;
    /// What the job on a GPU has launched.
    fn rhythm(&self, gpu: &GpuId) -> Option<Rhythm>;
    /// Samples of a GPU, the last `span` of them, oldest first.
    fn samples(&self, gpu: &GpuId, span: Micros) -> Vec<GpuSample>;
}
