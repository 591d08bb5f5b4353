//! The slow loop of one GPU: runs its workloads, keeps MPS alive, and answers errors.
//!
//! It takes orders from a channel and looks around every few milliseconds. It may wait for a stop, a
//! restart of MPS or a probe; orders queue up meanwhile, and the fast loop goes on.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muxflow_policy::node::fault::{Fault, ResponseTable};
use muxflow_policy::node::repair::{Evidence, Repair};
use muxflow_policy::node::xid::RecoveryAction;
use muxflow_policy::retry::RetryParams;
use muxflow_types::{JobId, Micros, ServiceId};

use super::control::{Defences, HealthOrder};
use super::guest::Guest;
use super::serving::ServerSeen;
use super::{Event, GpuShared, Order, StopReason};
use crate::blame::Blame;
use crate::breaker::EvictionBreaker;
use crate::error::AgentError;
use crate::keeper::ChildProgram;
use crate::launch::{Exit, Launch};
use crate::logs::LogLimits;
use crate::monitor;
use crate::mps::daemon::MpsDaemon;
use crate::runner::{Runner, Running};

/// What a supervisor is made from.
#[derive(Debug, Clone)]
pub struct SupervisorParams {
    /// Control blocks are made here: a memory file system.
    pub run_dir: PathBuf,
    /// What must be remembered of this GPU over a restart.
    pub state_dir: PathBuf,
    /// Variables of the agent that workloads get.
    pub pass_env: Vec<String>,
    /// The interposer's library.
    pub interposer: PathBuf,
    /// How the agent starts its children.
    pub child: ChildProgram,
    /// What follows from each error.
    pub errors: ResponseTable,
    /// Waits of what fails again and again.
    pub retry: RetryParams,
    /// Output of workloads.
    pub logs: LogLimits,
    /// How long a client may take to attach.
    pub probe_limit: Duration,
    /// A probe is made this often, errors or not.
    pub probe_every: Duration,
    /// MPS is asked how it is this often.
    pub mps_every: Duration,
    /// A GPU process of a job must have registered within this time.
    pub register_within: Duration,
    /// How long a stop may take once the GPU is faulty: the service waits for it.
    pub fault_stop: Duration,
    /// Have the driver cap memory too; none does so where the driver can.
    pub driver_memory_limit: Option<bool>,
    /// What protects the service.
    pub defences: Defences,
}

/// The service of a GPU.
#[derive(Debug)]
pub(super) struct Online {
    pub(super) service: ServiceId,
    pub(super) launch: Launch,
    pub(super) running: Option<Running>,
    pub(super) latency_file: Option<PathBuf>,
    pub(super) failures: u32,
    pub(super) not_before: Option<Instant>,
}

/// The job of a GPU.
#[derive(Debug)]
pub(super) struct Offline {
    pub(super) job: JobId,
    pub(super) running: Running,
    pub(super) reason: Option<StopReason>,
    pub(super) kill_at: Option<Instant>,
    /// GPU processes of the job that are not registered, and since when.
    pub(super) strangers: BTreeMap<u32, Instant>,
}

/// What all supervisors of a node share.
#[derive(Debug, Clone)]
pub struct NodeShared {
    /// Starts processes.
    pub runner: Arc<Runner>,
    /// Who was to blame for errors.
    pub blame: Arc<Blame>,
    /// Holds mass evictions back.
    pub breaker: Arc<Mutex<EvictionBreaker>>,
    /// How many jobs run on the node and are not being stopped.
    pub running_jobs: Arc<AtomicUsize>,
    /// Where events go.
    pub tell: Sender<(String, Event)>,
}

/// The slow loop of one GPU.
#[derive(Debug)]
pub struct Supervisor {
    pub(super) params: SupervisorParams,
    pub(super) shared: Arc<GpuShared>,
    pub(super) node: NodeShared,
    pub(super) to_fast: Sender<HealthOrder>,
    pub(super) daemon: Option<MpsDaemon>,
    pub(super) online: Option<Online>,
    pub(super) offline: Option<Offline>,
    pub(super) guest: Option<Guest>,
    pub(super) repair: Option<Repair>,
    pub(super) evidence: Evidence,
    /// Errors seen before this were mended by what was done then.
    pub(super) mended_at: Micros,
    /// The job that was stopped last, with the processes it had: for blame that comes after.
    pub(super) last_stopped: Option<(JobId, Vec<u32>)>,
    /// Whether the driver caps memory, once it was asked.
    pub(super) caps_memory: Option<bool>,
    /// The MPS server as it was last seen.
    pub(super) mps: ServerSeen,
    /// Processes that are not ours, and since when.
    pub(super) others: BTreeMap<u32, Instant>,
    pub(super) next_mps: Instant,
    pub(super) next_probe: Instant,
    next_look: Instant,
    /// The device was gone when it was last looked at.
    pub(super) was_lost: bool,
    /// When the driver last asked for a recovery.
    pub(super) asked_at: Micros,
}

const TICK: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_millis(250);

impl Supervisor {
    /// For one GPU.
    pub fn new(
        params: SupervisorParams,
        shared: Arc<GpuShared>,
        node: NodeShared,
        to_fast: Sender<HealthOrder>,
        daemon: Option<MpsDaemon>,
    ) -> Self {
        let now = Instant::now();
        Supervisor {
            next_probe: now + params.probe_every,
            params,
            shared,
            node,
            to_fast,
            daemon,
            online: None,
            offline: None,
            guest: None,
            repair: None,
            evidence: Evidence::default(),
            mended_at: Micros::ZERO,
            last_stopped: None,
            caps_memory: None,
            mps: ServerSeen::default(),
            others: BTreeMap::new(),
            next_mps: now,
            next_look: now,
            was_lost: false,
            asked_at: Micros::ZERO,
        }
    }

    pub(super) fn uuid(&self) -> &str {
        &self.shared.facts.uuid
    }

    pub(super) fn tell(&self, event: Event) {
        // Nobody listens any more when the agent leaves.
        drop(self.node.tell.send((self.uuid().to_owned(), event)));
    }

    pub(super) fn alert(&self, text: String) {
        tracing::error!(gpu = self.uuid(), "{text}");
        self.tell(Event::Alert(text));
    }

    /// Runs until it is told to shut down.
    pub fn run(&mut self, orders: &Receiver<Order>) {
        self.start_mps();
        self.remember_repair();
        self.probe();
        loop {
            match orders.recv_timeout(TICK) {
                Ok(Order::Shutdown) | Err(RecvTimeoutError::Disconnected) => break,
                Ok(order) => self.obey(order),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.look_after_workloads();
            if Instant::now() >= self.next_look {
                self.next_look = Instant::now() + LOOK_EVERY;
                self.mps.forget_who_left();
                self.look_for_strangers();
                self.look_outside();
                self.reclaim();
                self.read_latency();
                self.watch_return();
            }
            self.watch_mps();
        }
        self.leave_guest();
        self.leave_offline();
    }

    fn obey(&mut self, order: Order) {
        // Whoever comes may be of another user, and the server of the user before then goes.
        self.mps.forget_who_left();
        match order {
            Order::StartOnline(spec) => self.start_online(&spec),
            Order::StopOnline(service) => self.stop_online(&service),
            Order::StartOffline(spec) => {
                if let Err(error) = self.start_offline(&spec) {
                    let (job, run) = (spec.job.clone(), spec.run_number());
                    let unstartable = matches!(error, AgentError::Unstartable { .. });
                    let reason = error.to_string();
                    tracing::warn!(gpu = self.uuid(), job = %job, run, reason, "job refused");
                    self.tell(Event::JobRefused { job, run, unstartable, reason });
                }
            }
            Order::Attach(spec, answer) => self.answer_attach(&spec, &answer),
            Order::Detach(job) => self.detach(&job),
            Order::StopOffline { job, reason } => {
                self.stop_guest(job.as_ref(), &reason);
                let wanted = |offline: &Offline| job.as_ref().is_none_or(|j| *j == offline.job);
                if self.offline.as_ref().is_some_and(wanted) {
                    self.begin_stop(reason);
                }
            }
            Order::Evict { cause, ground } => self.evict(cause, ground),
            Order::Fault(seen) => self.answer(seen),
            Order::Blame(seen) => self.blame_for(seen),
            Order::GpuWasReset => self.evidence.gpu_reset_at = Some(monitor::now()),
            Order::Shutdown => {}
        }
    }

    fn read_latency(&mut self) {
        // Without a file, the latency is told by whoever stands in front of the service.
        let file = self.online.as_ref().and_then(|online| online.latency_file.as_ref());
        let Some(path) = file else { return };
        let latency = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
        self.shared.latency_us.store(latency.unwrap_or(0), Ordering::Relaxed);
    }

    /// A disabled GPU returns when what it waits for has happened.
    fn watch_return(&mut self) {
        let published = self.shared.monitor.published();
        let lost =
            published.failure.is_some_and(|(_, why)| why == monitor::SensorFailure::DeviceLost);
        let asked = |what| !matches!(what, None | Some(RecoveryAction::None));
        // Only what was read after the driver had asked says that it no longer does.
        let read_at = published.processes.as_ref().map_or(Micros::ZERO, |(at, _)| *at);
        let recovery = published.recovery.filter(|_| read_at > self.asked_at);
        let no_more = asked(self.evidence.recovery) && !asked(recovery);
        if (self.was_lost && !lost) || (no_more && recovery.is_some()) {
            // A device that was gone and is back has been reset, and so has one whose driver asked
            // for it and no longer does.
            self.evidence.gpu_reset_at = Some(monitor::now());
        }
        if recovery.is_some() {
            self.evidence.recovery = recovery;
        }
        self.was_lost = lost;
        let mark = self.params.state_dir.join("gpu-was-reset");
        if mark.exists() {
            drop(fs::remove_file(&mark));
            self.evidence.gpu_reset_at = Some(monitor::now());
        }
        let Some(repair) = self.repair else { return };
        if lost {
            return;
        }
        let only_probe_missing = matches!(
            repair.done(&self.evidence),
            Err(muxflow_policy::node::repair::StillWaiting::Probe)
        );
        if only_probe_missing {
            self.start_mps();
            self.probe();
        }
        if repair.done(&self.evidence).is_ok() {
            self.repair = None;
            drop(fs::remove_file(self.repair_file()));
            tracing::info!(gpu = self.uuid(), "the GPU has returned");
            drop(self.to_fast.send(HealthOrder::Enable));
        }
    }

    pub(super) fn repair_file(&self) -> PathBuf {
        self.params.state_dir.join("repair.json")
    }

    /// Ends of processes, restarts of the service, and stops that take too long.
    fn look_after_workloads(&mut self) {
        self.look_after_guest();
        if let Some(online) = &mut self.online {
            let ended = online.running.as_mut().map(Running::poll_exit);
            match ended {
                Some(Ok(Some(exit))) => self.online_ended(exit),
                Some(Err(error)) => tracing::warn!(error = %error, "cannot look after a service"),
                Some(Ok(None)) => {}
                None => self.restart_online_when_due(),
            }
        }
        self.shared.status().unsettled = self.unrest().is_some();
        if let Some(offline) = &mut self.offline {
            if offline.kill_at.is_some_and(|at| Instant::now() > at) {
                tracing::warn!(job = %offline.job, "its stop takes too long: killing it");
                offline.running.kill();
                offline.kill_at = None;
            }
            match offline.running.poll_exit() {
                Ok(Some(exit)) => self.offline_ended(exit),
                Ok(None) => {}
                Err(error) => tracing::warn!(error = %error, "cannot look after a job"),
            }
        }
    }

    /// The job has ended: answers for it, if it did so by itself.
    fn offline_ended(&mut self, exit: Exit) {
        let Some(offline) = self.take_offline() else { return };
        let fault = match (offline.reason.is_some() || exit.stop.is_some(), &exit) {
            (true, _) | (false, Exit { code: Some(0), .. }) => None,
            (false, Exit { signal: Some(signal), .. }) => Some(Fault::from_signal(*signal)),
            (false, _) => Some(Fault::ExitCode),
        };
        let finished = exit.code == Some(0) && offline.reason.is_none() && exit.stop.is_none();
        let job = offline.job.clone();
        self.tell(Event::JobEnded {
            fail_prone: self.node.blame.is_fail_prone(&job),
            job,
            exit,
            reason: offline.reason,
            requeue: !finished,
        });
        if let Some(fault) = fault {
            self.see(fault, Some(offline.running.main().pid));
        }
    }
}
