//! Offline work that somebody else starts and ends: a container that the node's kubelet runs.
//!
//! The agent holds its gate and drains it like a job of its own, but sends no signal and waits for no
//! process: whoever runs the container is told that it must leave, says when it is on its way out,
//! and says when it is gone. Until then the gate stays shut, whatever the other side does.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Settings};
use muxflow_types::{Bytes, JobId, SmShare};

use super::culprit::{Recent, Stopped};
use super::outside::is_of_pod;
use super::supervisor::Supervisor;
use super::workloads::uuid_bytes;
use super::{ActiveJob, Event, Order, StopReason};
use crate::cgroup::encode;
use crate::control_block::ControlBlock;
use crate::error::{AgentError, Result};
use crate::handle::AgentHandle;
use crate::mps::control::MpsControl;
use crate::stop::{Act, Sight, Step, StopLimits, StopOrder};

/// A guest to be let in.
#[derive(Debug, Clone, PartialEq)]
pub struct GuestSpec {
    /// Its name.
    pub job: JobId,
    /// The share that it is started with.
    pub share: SmShare,
    /// The hard cap on its memory.
    pub quota: Bytes,
    /// How long each step of its stop may take.
    pub stop: StopLimits,
}

/// Where the answer to an attachment goes: the directory of the control block, or why not.
pub type Answer = Sender<Result<PathBuf>>;

/// The guest of a GPU.
#[derive(Debug)]
pub(super) struct Guest {
    pub(super) job: JobId,
    limits: StopLimits,
    pub(super) stop: Option<(StopOrder, Instant)>,
    /// GPU processes of it that are not registered, and since when.
    pub(super) strangers: BTreeMap<u32, Instant>,
    /// Its registered processes, also those that ended a moment ago.
    pub(super) recent: Recent,
}

impl Supervisor {
    /// Lets a guest in: its control block is there when the answer comes, with the gate closed. A
    /// block that an earlier agent left is taken over, because the guest's processes hold it.
    pub(super) fn attach(&mut self, spec: &GuestSpec) -> Result<PathBuf> {
        let refuse =
            |reason: String| AgentError::Start { workload: spec.job.as_str().to_owned(), reason };
        if let Some(offline) = &self.offline {
            return Err(refuse(format!("job {} is on this GPU", offline.job)));
        }
        let dir = self.params.run_dir.join(encode(self.uuid())).join(encode(spec.job.as_str()));
        match &self.guest {
            Some(guest) if guest.job == spec.job => return Ok(dir),
            Some(guest) => return Err(refuse(format!("{} is on this GPU", guest.job))),
            None => {}
        }
        if self.repair.is_some() {
            return Err(refuse("the GPU is disabled".into()));
        }
        if !self.mps_runs() {
            return Err(refuse("MPS does not run: nothing would hold it to its share".into()));
        }
        let block = match ControlBlock::open(&dir) {
            Ok(block) => {
                // An earlier agent may have left in the middle of a stop that nobody remembers.
                block.set_gate(Gate::Closed);
                block
            }
            Err(_) => {
                let mut settings = Settings {
                    checkpoint_window_ms: spec.stop.checkpoint_ms,
                    drain_limit_ms: spec.stop.drain_ms,
                    ..Settings::default()
                };
                settings.devices[0] = uuid_bytes(self.uuid());
                let capped = if self.params.defences.quota { spec.quota.0 } else { u64::MAX };
                let block = ControlBlock::create(&dir, &settings, capped, None)?;
                // Whom the container runs as is known only once it runs; no other one mounts this.
                block.open_to_all()?;
                block
            }
        };
        let active = ActiveJob::new(spec.job.clone(), block, spec.share, spec.stop);
        self.shared.set_job(Some(Arc::new(active)));
        self.node.breaker().came(spec.job.clone());
        tracing::info!(gpu = self.uuid(), job = %spec.job, share = %spec.share, "guest let in");
        self.guest = Some(Guest {
            job: spec.job.clone(),
            limits: spec.stop,
            stop: None,
            strangers: BTreeMap::new(),
            recent: Recent::default(),
        });
        Ok(dir)
    }

    /// Lets a guest in and says so. Where nobody waits for the answer any more, nobody would ever see
    /// the guest off: it is not let in.
    pub(super) fn answer_attach(&mut self, spec: &GuestSpec, answer: &Answer) {
        let was_here = self.guest.is_some();
        let attached = self.attach(spec);
        let let_in = attached.is_ok() && !was_here;
        if answer.send(attached).is_err() && let_in {
            tracing::warn!(gpu = self.uuid(), job = %spec.job, "a guest was let in too late");
            self.detach(&spec.job);
        }
    }

    /// The guest is gone.
    pub(super) fn detach(&mut self, job: &JobId) {
        let Some(guest) = self.guest.take_if(|guest| guest.job == *job) else { return };
        if guest.stop.is_none() {
            // Ended by itself: perhaps of an error that is told in a moment.
            self.last_stopped = Some(Stopped::guest(&guest));
        }
        let active = self.shared.job();
        self.shared.set_job(None);
        self.node.breaker().left(job);
        tracing::info!(gpu = self.uuid(), job = %job, "guest gone");
        if let Some(active) = active {
            active.block.set_gate(Gate::Closed);
            drop(std::fs::remove_dir_all(active.block.dir()));
        }
    }

    /// Has whoever runs the guest take it away; the gate is shut already. False without a guest.
    pub(super) fn wish_guest_away(&self, cause: &str) -> bool {
        self.tell_guest(cause, false)
    }

    fn tell_guest(&self, cause: &str, drained: bool) -> bool {
        let Some(guest) = &self.guest else { return false };
        if guest.stop.is_none() {
            tracing::info!(gpu = self.uuid(), job = %guest.job, cause, "guest must leave");
            let (job, cause) = (guest.job.clone(), cause.to_owned());
            self.tell(Event::GuestMustLeave { job, cause, drained });
        }
        true
    }

    /// The guest is on its way out: drains it, so that no signal meets work in flight.
    ///
    /// Where the agent itself wants it gone, the service waits for what it holds: it gets no longer to
    /// save its state than a job of this machine, however long a grace period somebody gave it.
    pub(super) fn stop_guest(&mut self, job: Option<&JobId>, reason: &StopReason) {
        let urgent = job.is_none() && !matches!(reason, StopReason::Host(_));
        let checkpoint_ms = if urgent { StopLimits::default().checkpoint_ms } else { u64::MAX };
        self.stop_guest_within(job, reason, checkpoint_ms);
    }

    /// The same, with at most so long to save its state, also for one that is on its way out already.
    pub(super) fn stop_guest_within(
        &mut self,
        job: Option<&JobId>,
        reason: &StopReason,
        checkpoint_ms: u64,
    ) {
        let is_it = |guest: &&Guest| job.is_none_or(|job| *job == guest.job);
        let Some(guest) = self.guest.as_ref().filter(is_it) else { return };
        if guest.stop.is_none() && !guest.strangers.is_empty() {
            // They cannot be drained, and whoever takes the guest away sends them a signal.
            let strangers: Vec<u32> = guest.strangers.keys().copied().collect();
            self.cut_off(&strangers);
        }
        if job.is_none() {
            // Nobody outside asked for it, so somebody outside must be told.
            self.tell_guest(&reason.to_string(), true);
        }
        let Some(guest) = &mut self.guest else { return };
        if let Some((order, _)) = &mut guest.stop {
            order.hasten(checkpoint_ms);
            return;
        }
        tracing::info!(job = %guest.job, reason = %reason, "guest is drained");
        let checkpoint_ms = guest.limits.checkpoint_ms.min(checkpoint_ms);
        let (order, first) = StopOrder::begin(StopLimits { checkpoint_ms, ..guest.limits }, 0);
        guest.stop = Some((order, Instant::now()));
        *self.shared.status().stops.entry(reason.word()).or_default() += 1;
        if let Some(active) = self.shared.job() {
            guest.recent.see(active.block.registered(), Instant::now());
            self.last_stopped = Some(Stopped::guest(guest));
            active.stopping.store(true, Ordering::Release);
            if let Act::SetGate(gate) = first {
                active.block.set_gate(gate);
            }
        }
    }

    /// Drives the stop of a guest. Its signals come from elsewhere.
    pub(super) fn look_after_guest(&mut self) {
        let Some(active) = self.shared.job() else { return };
        let Some(guest) = &mut self.guest else { return };
        guest.recent.see(active.block.registered(), Instant::now());
        let Some((order, began)) = &mut guest.stop else { return };
        let answers = active.block.answers();
        let sight = Sight {
            main_alive: true,
            live: answers.live,
            drained: answers.drained,
            released: answers.released,
        };
        let elapsed_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        for act in order.advance(elapsed_ms, sight) {
            match act {
                Act::SetGate(gate) => active.block.set_gate(gate),
                Act::TerminateClients => self.cut_off(&active.block.lagging()),
                Act::SignalProgram | Act::KillGroup => {}
            }
        }
    }

    fn cut_off(&self, processes: &[u32]) {
        let Some(daemon) = &self.daemon else { return };
        let (spec, limit) = (daemon.spec(), Duration::from_secs(2));
        let control = MpsControl::new(spec.program.clone(), spec.pipe_dir(), limit);
        if let Err(error) = control.terminate_clients(processes) {
            tracing::warn!(gpu = self.uuid(), error = %error, "cannot cut off a guest's clients");
        }
    }

    /// For errors: the guest must let go of the GPU now, with no time to save anything, and then leave.
    /// What it has not done within `limit` goes on after that.
    pub(super) fn stop_guest_and_wait(&mut self, reason: &StopReason, limit: Duration) {
        if self.guest.is_none() {
            return;
        }
        self.stop_guest_within(None, reason, 0);
        let deadline = Instant::now() + limit;
        while self.guest_holds_on() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            self.look_after_guest();
        }
    }

    /// Whether a guest that is stopped may still have a context.
    fn guest_holds_on(&self) -> bool {
        let stop = self.guest.as_ref().and_then(|guest| guest.stop.as_ref());
        stop.is_some_and(|(order, _)| order.step() < Step::Kill)
    }

    /// The guest that a process belongs to.
    pub(super) fn guest_of(&self, pid: u32) -> Option<JobId> {
        let guest = self.guest.as_ref()?;
        let active = self.shared.job()?;
        let theirs = active.block.registered().contains(&pid)
            || guest.recent.contains(pid)
            || is_of_pod(pid, active.job.as_str());
        theirs.then(|| guest.job.clone())
    }

    /// The agent leaves: a guest stays where it is, held at its gate, until the next agent comes.
    pub(super) fn leave_guest(&mut self) {
        if self.guest.is_some()
            && let Some(active) = self.shared.job()
        {
            active.stopping.store(true, Ordering::Release);
            active.block.steer_gate(Gate::Closed);
        }
    }
}

impl AgentHandle {
    /// Lets a guest in and waits for its control block, for at most `limit`.
    pub fn attach(&self, uuid: &str, guest: GuestSpec, limit: Duration) -> Result<PathBuf> {
        let job = guest.job.as_str().to_owned();
        let (answer, answered) = mpsc::channel();
        self.order(uuid, Order::Attach(Box::new(guest), answer))?;
        answered.recv_timeout(limit).unwrap_or_else(|_| {
            Err(AgentError::NoAnswer { workload: job, gpu: uuid.to_owned(), limit })
        })
    }

    /// The guest could not be taken away and need not leave any more: the next time is told anew.
    pub fn relent(&self, uuid: &str) {
        if let Some(job) = self.shared(uuid).and_then(|gpu| gpu.job()) {
            job.evict_asked.store(false, Ordering::Release);
        }
    }
}
