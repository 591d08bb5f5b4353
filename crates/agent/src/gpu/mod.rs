//! One GPU: a fast loop that holds its gate, and a slow loop that runs its workloads and repairs it.
//!
//! The two share little: the job that is on the GPU with its control block, and a channel each way.
//! The fast loop ([`control`]) touches memory only and never waits; the slow one ([`supervisor`]) may
//! wait for processes, for MPS and for a probe, and nothing that protects the service depends on it.

pub mod control;
pub mod guest;
mod leaving;
mod outside;
pub mod response;
mod serving;
pub mod supervisor;
pub mod workloads;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use muxflow_policy::node::fault::{Action, Fault};
use muxflow_policy::node::health::Transition;
use muxflow_types::{Bytes, HealthState, JobId, Micros, Percent, ServiceId, SmShare};

use crate::breaker::Ground;
use crate::cgroup::Limits;
use crate::control_block::{ControlBlock, JobCounts};
use crate::error::{AgentError, Result};
use crate::launch::{self, Exit};
use crate::monitor::nvml::GpuFacts;
use crate::monitor::{ActivitySource, Monitor};
use crate::stop::StopLimits;

/// An online service to run on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineSpec {
    /// Its name.
    pub service: ServiceId,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables it asks for.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// User and group; none means the agent's.
    pub user: Option<(u32, u32)>,
    /// Its control group.
    pub limits: Limits,
    /// A file in which it writes its latency at the SLO percentile, in microseconds.
    pub latency_file: Option<PathBuf>,
    /// How long it may take to leave.
    pub grace_ms: u64,
}

/// An offline job to run on a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct OfflineSpec {
    /// Its name.
    pub job: JobId,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables it asks for.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// User and group; none means the agent's.
    pub user: Option<(u32, u32)>,
    /// Its control group.
    pub limits: Limits,
    /// The share it starts with; none takes what the GPU offers now.
    pub share: Option<SmShare>,
    /// The hard cap on its memory; none takes what the GPU offers now.
    pub quota: Option<Bytes>,
    /// How long each step of its stop may take.
    pub stop: StopLimits,
}

impl OfflineSpec {
    /// Which start of the job this is; 0 when nobody counts.
    pub fn run_number(&self) -> u64 {
        launch::run_number(&self.env)
    }
}

/// Why offline work is stopped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StopReason {
    /// The GPU's health.
    Health(String),
    /// The host is in distress.
    Host(String),
    /// The manager, or whoever asked through it.
    Asked,
    /// An error on the GPU.
    Fault(Fault),
    /// The agent leaves.
    Shutdown,
}

impl fmt::Display for StopReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopReason::Health(cause) => write!(f, "health: {cause}"),
            StopReason::Host(cause) => write!(f, "host: {cause}"),
            StopReason::Asked => f.write_str("asked"),
            StopReason::Fault(fault) => write!(f, "fault {fault}"),
            StopReason::Shutdown => f.write_str("the agent leaves"),
        }
    }
}

impl StopReason {
    /// One word for metrics.
    pub fn word(&self) -> &'static str {
        match self {
            StopReason::Health(_) => "health",
            StopReason::Host(_) => "host",
            StopReason::Asked => "asked",
            StopReason::Fault(_) => "fault",
            StopReason::Shutdown => "shutdown",
        }
    }
}

/// What the slow loop of a GPU is told.
#[derive(Debug)]
pub enum Order {
    /// Run this service.
    StartOnline(Box<OnlineSpec>),
    /// Stop this service and do not start it again; another one that is there stays.
    StopOnline(ServiceId),
    /// Run this job.
    StartOffline(Box<OfflineSpec>),
    /// Let a guest in, and answer.
    Attach(Box<guest::GuestSpec>, guest::Answer),
    /// A guest is gone.
    Detach(JobId),
    /// Stop the job, if it is this one or none is named.
    StopOffline {
        /// Which.
        job: Option<JobId>,
        /// Why.
        reason: StopReason,
    },
    /// The fast loop wants the job gone.
    Evict {
        /// In words.
        cause: String,
        /// What it rests on: readings may be held back.
        ground: Ground,
    },
    /// An error was seen.
    Fault(FaultSeen),
    /// Whose the error was that was seen a moment ago.
    Blame(FaultSeen),
    /// An operator reset the GPU.
    GpuWasReset,
    /// Stop offline work and end the loop; online goes on.
    Shutdown,
}

/// An error with what is known of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaultSeen {
    /// When.
    pub at: Micros,
    /// What.
    pub fault: Fault,
    /// The process that is blamed.
    pub pid: Option<u32>,
}

/// What the agent tells whoever listens.
#[derive(Debug, Clone)]
pub enum Event {
    /// A GPU changed its state of health.
    Health(Transition),
    /// A service runs.
    OnlineStarted {
        /// Which.
        service: ServiceId,
        /// Its process.
        pid: u32,
        /// It was found running, not started.
        adopted: bool,
    },
    /// A service ended.
    OnlineEnded {
        /// Which.
        service: ServiceId,
        /// How.
        exit: Exit,
    },
    /// A job runs.
    JobStarted {
        /// Which.
        job: JobId,
        /// Its process.
        pid: u32,
        /// The share it got.
        share: SmShare,
        /// The quota it got.
        quota: Bytes,
    },
    /// A job could not be started.
    JobRefused {
        /// Which.
        job: JobId,
        /// Which start of it; 0 when nobody counts.
        run: u64,
        /// Its own program or directory is to blame: no other GPU would start it either.
        unstartable: bool,
        /// Why.
        reason: String,
    },
    /// A job ended.
    JobEnded {
        /// Which.
        job: JobId,
        /// How.
        exit: Exit,
        /// Why it was stopped, when it was.
        reason: Option<StopReason>,
        /// It should be queued again.
        requeue: bool,
        /// It was to blame for errors so often of late that it counts as fail-prone.
        fail_prone: bool,
    },
    /// A guest must leave: its gate is shut, and whoever runs it must take it away.
    GuestMustLeave {
        /// Which.
        job: JobId,
        /// Why, in words.
        cause: String,
        /// It is being drained already, and cannot stay even if the cause goes away.
        drained: bool,
    },
    /// An error was handled.
    Fault {
        /// What was seen.
        seen: FaultSeen,
        /// What was done.
        actions: Vec<Action>,
        /// How long that took.
        took: Micros,
    },
    /// Something a person must see.
    Alert(String),
}

/// The job on a GPU, as both loops see it.
#[derive(Debug)]
pub struct ActiveJob {
    /// Which.
    pub job: JobId,
    /// Its control block.
    pub block: ControlBlock,
    /// The share it was started with.
    pub share: SmShare,
    /// How long each step of its stop may take.
    pub stop: StopLimits,
    /// Its keeper stops it: the gate is the keeper's.
    pub stopping: AtomicBool,
    /// The fast loop has asked for its eviction.
    pub evict_asked: AtomicBool,
}

/// What both loops of a GPU share.
#[derive(Debug)]
pub struct GpuShared {
    /// What the GPU is.
    pub facts: GpuFacts,
    /// Its sensors.
    pub monitor: Monitor,
    job: Mutex<Option<Arc<ActiveJob>>>,
    status: Mutex<GpuStatus>,
    /// SMs of the GPU; 0 until a probe has told.
    pub sms: std::sync::atomic::AtomicU32,
    /// The service's latency; 0 when it reports none.
    pub latency_us: AtomicU64,
    /// What it is held against; 0 leaves it to the laws.
    pub slo_us: AtomicU64,
    /// Whoever declared the service wants fail-prone jobs kept away from it.
    pub critical: AtomicBool,
    /// The host is not in distress, and was not of late.
    pub host_calm: AtomicBool,
}

impl GpuShared {
    /// For a GPU with these sensors.
    pub fn new(facts: GpuFacts, monitor: Monitor) -> Self {
        let status = GpuStatus::unknown(&facts);
        GpuShared {
            facts,
            monitor,
            job: Mutex::new(None),
            status: Mutex::new(status),
            sms: std::sync::atomic::AtomicU32::new(0),
            latency_us: AtomicU64::new(0),
            slo_us: AtomicU64::new(0),
            critical: AtomicBool::new(false),
            host_calm: AtomicBool::new(true),
        }
    }

    /// The job that is on it.
    pub fn job(&self) -> Option<Arc<ActiveJob>> {
        self.job.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts a job on it, or takes it off.
    pub fn set_job(&self, job: Option<Arc<ActiveJob>>) {
        *self.job.lock().unwrap_or_else(PoisonError::into_inner) = job;
    }

    /// Its status, to read or to write.
    pub fn status(&self) -> MutexGuard<'_, GpuStatus> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is known of a GPU: for the manager's snapshot, metrics and `muxflow agent`.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuStatus {
    /// Its UUID.
    pub uuid: String,
    /// State of health.
    pub health: HealthState,
    /// Changes of state, by where they led to.
    pub transitions: BTreeMap<HealthState, u64>,
    /// Impossible samples that were dropped.
    pub glitches: u64,
    /// Whether a new job may be placed.
    pub placeable: bool,
    /// Share that a job would get now.
    pub share: Option<SmShare>,
    /// Quota that a job would get now.
    pub quota: Bytes,
    /// The launch budget in force: 0 to 1.
    pub budget: f64,
    /// GPU load as the gate sees it.
    pub load: Option<f64>,
    /// The service's part of SM activity, and how far off it may be, in points.
    pub online_activity: Option<(Percent, f64)>,
    /// What the service will need.
    pub demand: Option<Percent>,
    /// Where SM activity comes from.
    pub source: ActivitySource,
    /// Age of the slowest counter.
    pub counter_age: Micros,
    /// From the moment a sample was taken to the decision in the control block, for the last one.
    pub reaction: Micros,
    /// The longest of these so far.
    pub reaction_max: Micros,
    /// The service that the GPU was given to, whether it runs at this moment or not.
    pub claimed: Option<ServiceId>,
    /// Nothing is placed: the service that the GPU was given to does not run, or it ended again and
    /// again and has not run for long since.
    pub unsettled: bool,
    /// The service that runs.
    pub online: Option<(ServiceId, u32)>,
    /// The job, with its counters.
    pub offline: Option<(JobId, JobCounts)>,
    /// Errors seen, by name.
    pub faults: BTreeMap<String, u64>,
    /// Stops of offline work, by reason.
    pub stops: BTreeMap<&'static str, u64>,
    /// Evictions held back by the breaker.
    pub held: u64,
    /// Times that MPS was started.
    pub mps_starts: u64,
    /// Whether a client could attach when it was last tried, and how long it took.
    pub attach: Option<(bool, Micros)>,
    /// Times that the service was restarted.
    pub online_restarts: u64,
    /// Processes on the GPU that are neither ours nor clients of our MPS server.
    pub outside: Vec<u32>,
}

impl GpuStatus {
    /// Takes note, when an order is given, of whose the GPU is: orders are carried out later, and two
    /// services must not both believe that it is theirs.
    pub fn claim(&mut self, order: &Order) -> Result<()> {
        match (order, &self.claimed) {
            (Order::StartOnline(spec), Some(other)) if *other != spec.service => {
                let reason = format!("GPU {} was given to service {other}", self.uuid);
                return Err(AgentError::Start { workload: spec.service.to_string(), reason });
            }
            (Order::StartOnline(spec), _) => self.claimed = Some(spec.service.clone()),
            (Order::StopOnline(service), Some(owner)) if owner == service => self.claimed = None,
            _ => {}
        }
        Ok(())
    }

    /// Nothing is known yet.
    pub fn unknown(facts: &GpuFacts) -> Self {
        GpuStatus {
            uuid: facts.uuid.clone(),
            health: HealthState::Init,
            transitions: BTreeMap::new(),
            glitches: 0,
            placeable: false,
            share: None,
            quota: Bytes::ZERO,
            budget: 0.0,
            load: None,
            online_activity: None,
            demand: None,
            source: ActivitySource::None,
            counter_age: Micros::ZERO,
            reaction: Micros::ZERO,
            reaction_max: Micros::ZERO,
            claimed: None,
            unsettled: false,
            online: None,
            offline: None,
            faults: BTreeMap::new(),
            stops: BTreeMap::new(),
            held: 0,
            mps_starts: 0,
            attach: None,
            online_restarts: 0,
            outside: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(name: &str) -> Order {
        Order::StartOnline(Box::new(OnlineSpec {
            service: ServiceId::new(name).unwrap(),
            argv: vec!["serve".into()],
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            latency_file: None,
            grace_ms: 0,
        }))
    }

    #[test]
    fn a_gpu_is_one_services_from_the_order_on() {
        let facts = GpuFacts {
            uuid: "GPU-1".into(),
            gpu_type: muxflow_types::GpuType::new("T4").unwrap(),
            name: "T4".into(),
            pci: "0000:01:00".into(),
            memory: Bytes::from_gib(15),
            highest_clock: None,
        };
        let mut status = GpuStatus::unknown(&facts);
        let stop = |name| Order::StopOnline(ServiceId::new(name).unwrap());
        status.claim(&start("web")).unwrap();
        status.claim(&start("web")).unwrap();
        let error = status.claim(&start("rank-0")).unwrap_err().to_string();
        assert!(error.contains("rank-0") && error.contains("given to service web"), "{error}");
        // One that was refused cannot take the other's place away.
        status.claim(&stop("rank-0")).unwrap();
        assert_eq!(status.claimed.as_ref().map(ServiceId::as_str), Some("web"));
        status.claim(&stop("web")).unwrap();
        status.claim(&start("rank-0")).unwrap();
    }
}
