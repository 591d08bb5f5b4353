//! How the job of a GPU leaves: stopped by its keeper, waited for, and taken off the GPU.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::culprit::Stopped;
use super::supervisor::{Offline, Supervisor};
use super::workloads::STOP_MARGIN;
use super::{Event, StopReason};
use crate::launch::{Exit, Kind};
use crate::stop::{Step, StepTaken};

/// An agent that leaves waits no longer than this for a job to save its state; `TimeoutStopSec` of
/// its unit is longer.
const LEAVE_WITHIN: Duration = Duration::from_secs(60);

/// Once all of a job is gone, its keeper writes down how it ended within this time, or something keeps
/// it from that: a full disk. The service may wait meanwhile.
const SAYS_WITHIN: Duration = Duration::from_millis(300);
/// A keeper that is silent for longer than this is told to people.
const SILENT_AFTER: Duration = Duration::from_secs(5);

impl Offline {
    /// Kills all of it; true when nothing of it is left.
    pub(super) fn kill(&mut self) -> bool {
        (self.killed, self.kill_at) = (true, None);
        self.silent_at = Some(Instant::now() + SILENT_AFTER);
        self.running.kill()
    }

    /// Within this time the keeper has stopped it, however long each step takes.
    pub(super) fn stop_takes(&self) -> Duration {
        self.running.launch.stop.whole() + STOP_MARGIN
    }
}

/// Work or a context was there when the time of the step was over.
fn was_forced(taken: &StepTaken) -> bool {
    taken.timed_out && taken.step != Step::Checkpoint
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
        self.node.breaker().left(&offline.job);
        *self.shared.status().stops.entry(reason.word()).or_default() += 1;
        offline.reason = Some(reason);
        let mut pids = offline.running.processes();
        pids.push(offline.running.main().pid);
        self.last_stopped = Some(Stopped::of(offline, pids));
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

    /// Stops the job and waits for it; what does not leave within `limit` is killed. A keeper may
    /// still be there then, which cannot write down how the job ended: only it knows, so it is waited
    /// for elsewhere, by this agent or the next.
    pub(super) fn stop_offline_and_wait(&mut self, reason: StopReason, limit: Duration) {
        let leaves = matches!(reason, StopReason::Shutdown);
        if !leaves {
            self.stop_guest_and_wait(&reason, limit);
        }
        self.begin_stop(reason);
        let Some(offline) = &mut self.offline else { return };
        // One error may follow another: what was killed for the first is not waited for again.
        let limit = if offline.killed { Duration::ZERO } else { limit };
        if let Ok(Some(exit)) = offline.running.wait(limit) {
            return self.tell_stopped(exit);
        }
        if offline.killed {
            return;
        }
        let gone = offline.kill();
        self.next_probe = Instant::now();
        let limit = if gone && !leaves { SAYS_WITHIN } else { SILENT_AFTER };
        if let Ok(Some(exit)) = offline.running.wait(limit) {
            self.tell_stopped(exit);
        }
    }

    /// A job of which nothing is left, and whose keeper does not say how it ended: told once.
    pub(super) fn mind_silence(&mut self) {
        let Some(offline) = &mut self.offline else { return };
        if offline.silent_at.take_if(|at| Instant::now() > *at).is_some() {
            let job = offline.job.clone();
            self.alert(format!(
                "job {job}: its keeper cannot say how it ended (is the disk full?); the GPU takes no other job until it does"
            ));
        }
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
        self.mind_force(&exit);
        let Some(mut offline) = self.take_offline() else { return };
        self.blame_late(&mut offline);
        self.tell(Event::JobEnded {
            fail_prone: self.node.blame.is_fail_prone(&offline.job),
            job: offline.job,
            blamed: offline.suspicion.blames(exit.is_finished()),
            requeue: !exit.is_finished(),
            exit,
            reason: offline.reason,
        });
    }

    /// A stop that ended by force may have wedged MPS: a client tries it out soon.
    pub(super) fn mind_force(&mut self, exit: &Exit) {
        if exit.steps.iter().any(was_forced) {
            self.next_probe = Instant::now();
        }
    }

    /// Takes the job off the GPU once it has ended; its control block goes.
    pub(super) fn take_offline(&mut self) -> Option<Offline> {
        let offline = self.offline.take()?;
        let mut pids = self.shared.job().map(|job| job.block.owners()).unwrap_or_default();
        self.shared.set_job(None);
        if let Some(dir) = &offline.running.launch.control_dir {
            drop(std::fs::remove_dir_all(dir));
        }
        drop(self.node.runner.settle(Kind::Offline, &offline.running.launch.name));
        if offline.reason.is_none() {
            // Ended by itself: perhaps of an error that is told in a moment.
            pids.push(offline.running.main().pid);
            self.last_stopped = Some(Stopped::of(&offline, pids));
            self.node.breaker().left(&offline.job);
        }
        Some(offline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_steps_that_left_work_behind_are_force() {
        let taken = |step, timed_out| StepTaken { step, took_ms: 1, timed_out };
        for step in [Step::Drain, Step::Release, Step::Terminate] {
            assert!(was_forced(&taken(step, true)), "{step:?}");
            assert!(!was_forced(&taken(step, false)), "{step:?}");
        }
        assert!(!was_forced(&taken(Step::Checkpoint, true)), "it saved nothing, drained as it was");
    }
}
