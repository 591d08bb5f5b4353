//! One GPU: a fast loop that holds its gate, and a slow loop that runs its workloads and repairs it.
//!
//! The two share little: the job that is on the GPU with its control block, and a channel each way.
//! The fast loop ([`control`]) calls no driver and never waits; the slow one ([`supervisor`]) may wait
//! for processes, for MPS and for a probe. What protects the service does not wait for it: the
//! gate is the fast loop's, and so is the order to leave where only leaving helps. What may wait in
//! the slow loop is an eviction of a job that stands at a shut gate.

mod comebacks;
pub mod control;
mod culprit;
mod eviction;
pub mod guest;
mod inbox;
mod leaving;
mod outside;
pub mod response;
mod returning;
mod serving;
pub mod status;
pub mod supervisor;
pub mod workloads;

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use muxflow_policy::node::fault::{Action, Fault};
use muxflow_policy::node::health::Transition;
use muxflow_types::{Bytes, JobId, Micros, ServiceId, SmShare};

use crate::breaker::Ground;
use crate::cgroup::Limits;
use crate::control_block::ControlBlock;
use crate::launch::{self, Exit};
use crate::monitor::Monitor;
use crate::monitor::nvml::GpuFacts;
use crate::stop::StopLimits;
use crate::sys;
pub(crate) use returning::disabled_for;
pub use status::GpuStatus;

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
    /// Refused when the GPU gets to it later than this: whoever ordered it may have given it up, and
    /// started it elsewhere.
    pub not_after: Option<Instant>,
}

impl OfflineSpec {
    /// Which start of the job this is; 0 when nobody counts.
    pub fn run_number(&self) -> u64 {
        launch::run_number(&self.env)
    }

    /// The same for the same work, also in another agent: what runs, where, as whom.
    pub fn fingerprint(&self) -> u64 {
        let text = format!("{:?}{:?}{:?}{:?}", self.argv, self.env, self.cwd, self.user);
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
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
        /// This run broke something: the driver named one of its processes, or told of an XID that
        /// has a culprit and named nobody; or it ran without the interposer or tore its control
        /// block. It must wait before it runs again. One that has finished its work is to blame only
        /// when it was named.
        blamed: bool,
    },
    /// A job whose end was told already broke the GPU: the driver named it only now.
    JobBlamed {
        /// Which.
        job: JobId,
        /// Which start of it; 0 when nobody counts.
        run: u64,
        /// What happened.
        fault: Fault,
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
    /// A guest's process caused an error.
    GuestBlamed {
        /// Which guest.
        job: JobId,
        /// What happened.
        fault: Fault,
        /// The process, by its id here.
        pid: u32,
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
    /// Its eviction was held back, which is counted once.
    pub held: AtomicBool,
    /// Who stops it, where that is a process of ours.
    pub keeper: OnceLock<OwnedFd>,
    /// Why the fast loop had it stopped.
    pub left_for: OnceLock<String>,
}

impl ActiveJob {
    /// A job with this control block.
    pub fn new(job: JobId, block: ControlBlock, share: SmShare, stop: StopLimits) -> Self {
        ActiveJob {
            job,
            block,
            share,
            stop,
            stopping: AtomicBool::new(false),
            evict_asked: AtomicBool::new(false),
            held: AtomicBool::new(false),
            keeper: OnceLock::new(),
            left_for: OnceLock::new(),
        }
    }

    /// Has its keeper stop it, in the clean order; one signal, nothing is waited for.
    fn ask_to_leave(&self, cause: &str) {
        if let Some(keeper) = self.keeper.get()
            && self.left_for.set(cause.to_owned()).is_ok()
        {
            // From here on the gate belongs to the keeper.
            self.stopping.store(true, Ordering::Release);
            drop(sys::pidfd_signal(keeper.as_fd(), libc::SIGTERM));
        }
    }

    /// Has its keeper leave it hardly any time to save its state, also when it is leaving already.
    fn hasten(&self) {
        if let Some(keeper) = self.keeper.get() {
            drop(sys::pidfd_signal(keeper.as_fd(), libc::SIGHUP));
        }
    }
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
