//! What the node's side of a cluster needs of the executor of its GPUs, and the agent as that.

use std::path::PathBuf;
use std::time::Duration;

use muxflow_agent::cgroup::encode;
use muxflow_agent::config::AgentConfig;
use muxflow_agent::error::AgentError;
use muxflow_agent::gpu::guest::GuestSpec;
use muxflow_agent::gpu::{Order, StopReason};
use muxflow_agent::handle::AgentHandle;
use muxflow_types::{HealthState, JobId};

use crate::resource::{SampleStatus, State};

/// A GPU of this node.
#[derive(Debug, Clone, PartialEq)]
pub struct LocalGpu {
    /// Its UUID.
    pub uuid: String,
    /// Its kind.
    pub gpu_type: String,
    /// Its PCI address without the function.
    pub pci: String,
    /// All its memory.
    pub memory_bytes: u64,
    /// Where its MPS daemon listens; none without MPS.
    pub mps_pipe: Option<PathBuf>,
    /// Whether that daemon serves every user.
    pub multi_user: bool,
}

/// What is known of a GPU now.
#[derive(Debug, Clone, PartialEq)]
pub struct Reading {
    /// Of its health machine.
    pub state: State,
    /// Why it is not well, in words.
    pub reason: Option<String>,
    /// SMs; 0 until they were counted.
    pub sms: u32,
    /// SMs that a job would get.
    pub share_sms: u32,
    /// Memory that a job would get.
    pub quota_bytes: u64,
    /// SM activity that the service will need.
    pub demand_pct: f64,
    /// The service's part of SM activity.
    pub online_activity_pct: Option<f64>,
    /// Memory that the service holds: all that is in use but the job's.
    pub online_memory_bytes: u64,
    /// The last sample.
    pub sample: SampleStatus,
    /// The guest that is on it.
    pub guest: Option<JobId>,
    /// Whether a guest may come now: a GPU that is well may yet cool down after an illness, or its
    /// host may have no room.
    pub placeable: bool,
    /// Processes on it that are outside MPS, beside which nobody can be.
    pub outside: Vec<u32>,
}

/// Why a guest was not let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotLetIn {
    /// The GPU does not take it; why, in words.
    Refused(String),
    /// Nobody has answered; it may be let in another time.
    NoAnswer(String),
}

impl NotLetIn {
    /// For people.
    pub fn words(self) -> String {
        match self {
            NotLetIn::Refused(why) | NotLetIn::NoAnswer(why) => why,
        }
    }
}

/// The executor of a node's GPUs, as far as a cluster is concerned.
pub trait Executor: Send + Sync + 'static {
    /// All GPUs of the node.
    fn gpus(&self) -> Vec<LocalGpu>;
    /// What is known of one now.
    fn read(&self, uuid: &str) -> Option<Reading>;
    /// Lets a guest in; the directory of its control block, or why not. May block for seconds.
    fn attach(&self, uuid: &str, guest: GuestSpec) -> Result<PathBuf, NotLetIn>;
    /// The guest is on its way out: drain it.
    fn drain(&self, uuid: &str, guest: &JobId, reason: &str);
    /// The guest is gone.
    fn detach(&self, uuid: &str, guest: &JobId);
    /// The guest need not leave any more.
    fn relent(&self, uuid: &str);
    /// Namespaces of process ids from which the guest's processes have registered.
    fn namespaces(&self, uuid: &str) -> Vec<u64>;
}

/// The agent of this node as an executor.
#[derive(Debug)]
pub struct LocalAgent {
    handle: AgentHandle,
    run_dir: PathBuf,
    mps: bool,
    multi_user: bool,
}

/// How long a GPU may take to let a guest in: it may be in the middle of a probe.
const ATTACH_WITHIN: Duration = Duration::from_secs(20);

impl LocalAgent {
    /// An agent that was started with this configuration.
    pub fn new(handle: AgentHandle, config: &AgentConfig) -> Self {
        LocalAgent {
            handle,
            run_dir: config.run_dir.clone(),
            mps: config.mps.is_some(),
            multi_user: config.mps.as_ref().is_some_and(|mps| mps.multi_user),
        }
    }
}

fn state(health: HealthState) -> State {
    match health {
        HealthState::Init => State::Init,
        HealthState::Healthy => State::Healthy,
        HealthState::Unhealthy => State::Unhealthy,
        HealthState::Overlimit => State::Overlimit,
        HealthState::Disabled => State::Disabled,
    }
}

impl Executor for LocalAgent {
    fn gpus(&self) -> Vec<LocalGpu> {
        let local = |gpu: &std::sync::Arc<muxflow_agent::gpu::GpuShared>| {
            let dir = self.run_dir.join("mps").join(encode(&gpu.facts.uuid)).join("pipe");
            LocalGpu {
                uuid: gpu.facts.uuid.clone(),
                gpu_type: gpu.facts.gpu_type.to_string(),
                pci: gpu.facts.pci.clone(),
                memory_bytes: gpu.facts.memory.0,
                mps_pipe: self.mps.then_some(dir),
                multi_user: self.multi_user,
            }
        };
        self.handle.gpus().iter().filter_map(|uuid| self.handle.shared(uuid)).map(local).collect()
    }

    fn read(&self, uuid: &str) -> Option<Reading> {
        let gpu = self.handle.shared(uuid)?;
        let status = gpu.status().clone();
        let seen = gpu.monitor.published();
        let sample = seen.sample;
        let offline_bytes = status.offline.as_ref().map_or(0, |(_, counts)| counts.charged_bytes);
        let used_bytes = sample.and_then(|s| s.memory_used).map(|bytes| bytes.0);
        let can_attach = status.attach.is_none_or(|(can, _)| can);
        let reason = match seen.failure {
            Some((_, failure)) => Some(failure.to_string()),
            None if !can_attach => Some("a client cannot attach to it".to_owned()),
            None => None,
        };
        Some(Reading {
            state: state(status.health),
            reason,
            sms: gpu.sms.load(std::sync::atomic::Ordering::Relaxed),
            share_sms: status.share.map_or(0, |share| share.sms().0),
            quota_bytes: status.quota.0,
            demand_pct: status.demand.map_or(100.0, |demand| demand.value()),
            online_activity_pct: status.online_activity.map(|(activity, _)| activity.value()),
            online_memory_bytes: used_bytes.unwrap_or(0).saturating_sub(offline_bytes),
            sample: SampleStatus {
                gpu_util_pct: sample.and_then(|s| s.gpu_util).map(|p| p.value()),
                sm_activity_pct: sample.and_then(|s| s.sm_activity).map(|p| p.value()),
                sm_clock_mhz: sample.and_then(|s| s.sm_clock).map(|clock| f64::from(clock.0)),
                memory_used_bytes: used_bytes,
            },
            guest: status.offline.map(|(job, _)| job),
            placeable: status.placeable,
            outside: status.outside,
        })
    }

    fn attach(&self, uuid: &str, guest: GuestSpec) -> Result<PathBuf, NotLetIn> {
        self.handle.attach(uuid, guest, ATTACH_WITHIN).map_err(|error| match error {
            AgentError::NoAnswer { .. } => NotLetIn::NoAnswer(error.to_string()),
            _ => NotLetIn::Refused(error.to_string()),
        })
    }

    fn drain(&self, uuid: &str, guest: &JobId, reason: &str) {
        let reason = StopReason::Health(reason.to_owned());
        drop(self.handle.order(uuid, Order::StopOffline { job: Some(guest.clone()), reason }));
    }

    fn detach(&self, uuid: &str, guest: &JobId) {
        drop(self.handle.order(uuid, Order::Detach(guest.clone())));
    }

    fn relent(&self, uuid: &str) {
        self.handle.relent(uuid);
    }

    fn namespaces(&self, uuid: &str) -> Vec<u64> {
        let Some(job) = self.handle.shared(uuid).and_then(|gpu| gpu.job()) else {
            return Vec::new();
        };
        let mut found = Vec::new();
        job.block.job().each(|counters| {
            if !found.contains(&counters.pid_namespace) {
                found.push(counters.pid_namespace);
            }
        });
        found
    }
}
