//! The slow loop of one GPU: runs its workloads, keeps MPS alive, and answers errors.
//!
//! It takes orders from a channel and looks around every few milliseconds. It may wait for a stop, a
//! restart of MPS or a probe; orders queue up meanwhile, and the fast loop goes on.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use muxflow_policy::node::fault::{Fault, ResponseTable};
use muxflow_policy::node::repair::{Evidence, Repair};
use muxflow_policy::retry::RetryParams;
use muxflow_types::{JobId, Micros, ServiceId};

use super::comebacks::Comebacks;
use super::control::{Defences, HealthOrder};
use super::culprit::{Recent, Stopped, Suspicion};
use super::guest::Guest;
use super::inbox::{Inbox, Next};
use super::returning::ReturnPace;
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
use crate::process::ProcessKey;
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
    pub(super) comebacks: Comebacks,
    /// When its last run began.
    pub(super) started_at_s: u64,
}

/// The job of a GPU.
#[derive(Debug)]
pub(super) struct Offline {
    pub(super) job: JobId,
    pub(super) running: Running,
    pub(super) reason: Option<StopReason>,
    pub(super) kill_at: Option<Instant>,
    /// All of it was killed: it is waited for no more.
    pub(super) killed: bool,
    /// When its keeper, which has not said how it ended, is told to people.
    pub(super) silent_at: Option<Instant>,
    /// Whether errors of this run are laid to it.
    pub(super) suspicion: Suspicion,
    /// GPU processes of the job that are not registered, and since when.
    pub(super) strangers: BTreeMap<u32, Instant>,
    /// Its registered processes, also those that ended a moment ago.
    pub(super) recent: Recent,
}

/// What all supervisors of a node share.
#[derive(Debug, Clone)]
pub struct NodeShared {
    /// Starts processes.
    pub runner: Arc<Runner>,
    /// Who was to blame for errors.
    pub blame: Arc<Blame>,
    /// Knows who runs, and holds mass evictions back.
    pub breaker: Arc<Mutex<EvictionBreaker>>,
    /// What outlives the agent, and where a person leaves marks for it.
    pub state_dir: PathBuf,
    /// Where events go.
    pub tell: Sender<(String, Event)>,
}

impl NodeShared {
    /// The breaker, held alone.
    pub(super) fn breaker(&self) -> MutexGuard<'_, EvictionBreaker> {
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The slow loop of one GPU.
#[derive(Debug)]
pub struct Supervisor {
    pub(super) params: SupervisorParams,
    pub(super) shared: Arc<GpuShared>,
    pub(super) node: NodeShared,
    pub(super) inbox: Inbox,
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
    pub(super) last_stopped: Option<Stopped>,
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
    /// When an error last said so.
    pub(super) lost_at: Micros,
    /// When the driver last asked for a recovery.
    pub(super) asked_at: Micros,
    /// When the last client that was tried began to attach.
    pub(super) probe_began: Micros,
    pub(super) pace: ReturnPace,
    /// The service that ran when the GPU had not been reset yet.
    pub(super) served_before: Option<ProcessKey>,
}

const TICK: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_millis(250);

impl Supervisor {
    /// For one GPU.
    pub fn new(
        params: SupervisorParams,
        shared: Arc<GpuShared>,
        node: NodeShared,
        orders: Receiver<Order>,
        to_fast: Sender<HealthOrder>,
        daemon: Option<MpsDaemon>,
    ) -> Self {
        let now = Instant::now();
        Supervisor {
            next_probe: now + params.probe_every,
            params,
            shared,
            node,
            inbox: Inbox::new(orders),
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
            lost_at: Micros::ZERO,
            asked_at: Micros::ZERO,
            probe_began: Micros::ZERO,
            pace: ReturnPace::default(),
            served_before: None,
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
    pub fn run(&mut self) {
        // First what the GPU waits for: an answer to what is found now must not forget it.
        self.remember_repair();
        self.find_mps();
        self.check_attach();
        loop {
            match self.inbox.next(TICK) {
                Next::Order(Order::Shutdown) | Next::Closed => break,
                Next::Order(order) => self.obey(order),
                Next::Nothing => {}
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
            Order::Blame(seen) => self.blame_for(seen, true),
            Order::GpuWasReset => self.evidence.gpu_reset_at = Some(monitor::now()),
            Order::Shutdown => {}
        }
    }

    fn read_latency(&mut self) {
        // Without a file, the latency is told by whoever stands in front of the service.
        let Some(online) = &self.online else { return };
        let Some(path) = &online.latency_file else { return };
        let told = online.running.as_ref().and_then(|_| fresh_latency(path));
        self.shared.latency_us.store(told.unwrap_or(0), Ordering::Relaxed);
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
        // A job that an earlier agent left is on its way out, and unknown to the fast loop.
        let leaves = self.offline.is_some() && self.shared.job().is_none();
        self.shared.status().unsettled = leaves || self.unrest().is_some();
        if let Some(offline) = &mut self.offline {
            if let Some(active) = self.shared.job() {
                offline.recent.see(active.block.registered(), Instant::now());
            }
            if offline.kill_at.is_some_and(|at| Instant::now() > at) {
                tracing::warn!(job = %offline.job, "its stop takes too long: killing it");
                offline.kill();
                self.next_probe = Instant::now();
            }
            match offline.running.poll_exit() {
                Ok(Some(exit)) => self.offline_ended(exit),
                Ok(None) => self.mind_silence(),
                Err(error) => tracing::warn!(error = %error, "cannot look after a job"),
            }
        }
    }

    /// The job has ended: answers for it, if it did so by itself.
    fn offline_ended(&mut self, exit: Exit) {
        let left_for = self.shared.job().and_then(|job| job.left_for.get().cloned());
        if let (Some(offline), Some(cause)) = (&self.offline, left_for)
            && offline.reason.is_none()
        {
            // The fast loop had it stopped, and its order for it waits.
            self.begin_stop(StopReason::Health(cause));
        }
        self.mind_force(&exit);
        let Some(mut offline) = self.take_offline() else { return };
        self.blame_late(&mut offline);
        let fault = match (offline.reason.is_some() || exit.stop.is_some(), &exit) {
            (true, _) | (false, Exit { code: Some(0), .. }) => None,
            (false, Exit { signal: Some(signal), .. }) => Some(Fault::from_signal(*signal)),
            (false, _) => Some(Fault::ExitCode),
        };
        let finished = exit.is_finished();
        let job = offline.job.clone();
        self.tell(Event::JobEnded {
            fail_prone: self.node.blame.is_fail_prone(&job),
            job,
            exit,
            reason: offline.reason,
            requeue: !finished,
            blamed: offline.suspicion.blames(finished),
        });
        if let Some(fault) = fault {
            self.see(fault, Some(offline.running.main().pid));
        }
    }
}

/// A service writes its latency at least this often, or it counts as not told.
const LATENCY_FRESH: Duration = Duration::from_secs(10);

/// What a service wrote of its latency of late. What it wrote before it hung or ended says nothing.
fn fresh_latency(path: &Path) -> Option<u64> {
    let written = fs::metadata(path).and_then(|meta| meta.modified()).ok()?;
    // A file from the future was written by a clock that was set back since.
    let age = written.elapsed().unwrap_or(Duration::ZERO);
    let text = (age <= LATENCY_FRESH).then(|| fs::read_to_string(path).ok()).flatten()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::SystemTime;

    #[test]
    fn a_latency_has_an_age() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("latency");
        assert_eq!(fresh_latency(&path), None, "not there");
        fs::write(&path, "500000\n").unwrap();
        assert_eq!(fresh_latency(&path), Some(500_000));
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(SystemTime::now() - LATENCY_FRESH * 2).unwrap();
        assert_eq!(fresh_latency(&path), None, "of a service that hangs");
        fs::write(&path, "slow").unwrap();
        assert_eq!(fresh_latency(&path), None, "not a number");
    }
}
