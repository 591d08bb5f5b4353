//! How the job of a GPU leaves: stopped by its keeper, waited for, and taken off the GPU.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::supervisor::{Offline, Supervisor};
use super::workloads::STOP_MARGIN;
use super::{Event, StopReason};
use crate::launch::{Exit, Kind};

/// An agent that leaves waits no longer than this for a job to save its state; `TimeoutStopSec` of
/// its unit is longer.
const LEAVE_WITHIN: Duration = Duration::from_secs(60);

impl Offline {
    /// Within this time the keeper has stopped it, however long each step takes.
    pub(super) fn stop_takes(&self) -> Duration {
        self.running.launch.stop.whole() + STOP_MARGIN
    }
}

impl Supervisor {
    /// Starts the stop of the job and comes back at once.
    pub(super) fn begin_stop(&mut self, reason: StopReason) {
        let Some(offline) = &mut self.offline else { return };
        if offline.reason.is_some() {
            return;
        }
        tracing::info!(job = %offline.job, reason = %reason, "job is stopped");
        // One that leaves no longer counts among those that run.
        self.node.running_jobs.fetch_sub(1, Ordering::Relaxed);
        *self.shared.status().stops.entry(reason.word()).or_default() += 1;
        offline.reason = Some(reason);
        self.last_stopped = Some((offline.job.clone(), offline.running.processes()));
        if let Some(active) = self.shared.job() {
            // From here on the gate belongs to the keeper.
            active.stopping.store(true, Ordering::Release);
        }
        if !self.params.defences.clean_stop {
            offline.running.kill();
            return;
        }
        offline.running.ask_stop();
        offline.kill_at = Some(Instant::now() + offline.stop_takes());
    }

    /// Stops the job and waits for it; what does not leave within `limit` is killed.
    pub(super) fn stop_offline_and_wait(&mut self, reason: StopReason, limit: Duration) {
        if !matches!(reason, StopReason::Shutdown) {
            self.stop_guest_and_wait(&reason, limit);
        }
        self.begin_stop(reason);
        let Some(offline) = &mut self.offline else { return };
        let exit = match offline.running.wait(limit) {
            Ok(Some(exit)) => exit,
            _ => {
                offline.running.kill();
                offline
                    .running
                    .wait(Duration::from_secs(5))
                    .ok()
                    .flatten()
                    .unwrap_or_else(Exit::unknown)
            }
        };
        self.tell_stopped(exit);
    }

    /// The agent leaves: the job is stopped. One that may take long to save its state is left to its
    /// keeper, which needs no agent; the next agent finds it, or how it ended.
    pub(super) fn leave_offline(&mut self) {
        let Some(takes) = self.offline.as_ref().map(Offline::stop_takes) else { return };
        if takes <= LEAVE_WITHIN {
            return self.stop_offline_and_wait(StopReason::Shutdown, takes);
        }
        self.begin_stop(StopReason::Shutdown);
        let Some(offline) = &mut self.offline else { return };
        match offline.running.wait(LEAVE_WITHIN) {
            Ok(Some(exit)) => self.tell_stopped(exit),
            _ => tracing::info!(job = %offline.job, "still saves its state: left to its keeper"),
        }
    }

    fn tell_stopped(&mut self, exit: Exit) {
        let Some(offline) = self.take_offline() else { return };
        self.tell(Event::JobEnded {
            fail_prone: self.node.blame.is_fail_prone(&offline.job),
            job: offline.job,
            exit,
            reason: offline.reason,
            requeue: true,
        });
    }

    /// Takes the job off the GPU once it has ended; its control block goes.
    pub(super) fn take_offline(&mut self) -> Option<Offline> {
        let offline = self.offline.take()?;
        self.shared.set_job(None);
        if let Some(dir) = &offline.running.launch.control_dir {
            drop(std::fs::remove_dir_all(dir));
        }
        drop(self.node.runner.settle(Kind::Offline, &offline.running.launch.name));
        if offline.reason.is_none() {
            // Ended by itself: perhaps of an error that is told in a moment.
            let main = offline.running.main().pid;
            self.last_stopped = Some((offline.job.clone(), vec![main]));
            self.node.running_jobs.fetch_sub(1, Ordering::Relaxed);
        }
        Some(offline)
    }
}
