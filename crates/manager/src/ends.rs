//! What happened to runs: the events of the node, written down, and after a restart what is found of
//! the runs of before.

use std::sync::atomic::Ordering;
use std::time::Duration;

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::launch::Exit;
use muxflow_api::jobs::JobState;
use muxflow_policy::retry::{FailureHistory, RetryParams};
use muxflow_store::events::NewEvent;
use muxflow_store::jobs::JobRow;
use muxflow_types::{HealthState, JobId, Micros};

use crate::clock;
use crate::error::Result;
use crate::lifecycle::{End, Happening, Wish};
use crate::manager::{Manager, advance, wish};
use crate::views;

/// A job that a GPU refused is not offered again before this.
const AFTER_REFUSAL: Micros = Micros::from_secs(2);

/// Why a job with a deadline has failed.
pub const DEADLINE_PASSED: &str = "its deadline has passed";

/// How a run ended, in the words of the life cycle and for people.
pub fn end_of(exit: &Exit, reason: Option<&StopReason>, may_retry: bool) -> (End, String) {
    let natural = match (exit.code, exit.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => "nobody saw how it ended".to_owned(),
    };
    if exit.code == Some(0) && exit.is_by_itself() {
        return (End::Finished, natural);
    }
    let asked = reason.filter(|reason| !matches!(reason, StopReason::Shutdown));
    // The kernel may have killed a child that the program did without, or one that was told to leave.
    if exit.out_of_memory && exit.code != Some(0) && exit.stop.is_none() && asked.is_none() {
        let text = format!("out of host memory ({natural})");
        return (End::Failed { retry: may_retry }, text);
    }
    match (asked, exit.stop) {
        (Some(reason), _) => (End::Stopped, format!("stopped: {reason}")),
        (None, Some(_)) => (End::Stopped, "stopped: the manager left".to_owned()),
        (None, None) if exit.code.is_none() && exit.signal.is_none() => (End::Stopped, natural),
        (None, None) => (End::Failed { retry: may_retry }, natural),
    }
}

/// One failure more: the next try comes later, or never.
fn count_failure(row: &mut JobRow, now: Micros, retry: &RetryParams) {
    let mut history = FailureHistory::restore(row.failures, row.last_failure);
    let seed = u64::try_from(row.number).unwrap_or(0);
    row.not_before = history.fail(now, retry, seed);
    row.failures += 1;
    row.last_failure = now;
    row.fail_prone |= history.is_fail_prone(now, retry);
}

fn told(kind: &'static str, gpu: &str, job: Option<&JobId>, text: String) -> NewEvent {
    NewEvent {
        at: clock::now(),
        kind,
        gpu: Some(gpu.to_owned()),
        job: job.map(|job| job.as_str().to_owned()),
        service: None,
        text,
    }
}

impl Manager {
    /// A run has ended: writes down what that means. News of an older run is none.
    pub fn run_ended(
        &self,
        job: &JobId,
        exit: &Exit,
        reason: Option<&StopReason>,
        fail_prone: bool,
        retry: &RetryParams,
    ) -> Result<Option<JobRow>> {
        let Some(row) = self.store().job(job)? else { return Ok(None) };
        let retries = views::submit_of(&row)?.retries;
        let run = if exit.run == 0 { row.run } else { exit.run };
        let how = |row: &JobRow| end_of(exit, reason, row.failures < retries);
        self.end_run(job, run, retry, how, |row| {
            row.exit_code = exit.code;
            row.exit_signal = exit.signal;
            row.fail_prone |= fail_prone;
        })
    }

    /// A run that never began because of its own program or directory: that is a failure of the job.
    pub fn run_unstartable(
        &self,
        job: &JobId,
        run: u64,
        why: &str,
        retry: &RetryParams,
    ) -> Result<Option<JobRow>> {
        let Some(row) = self.store().job(job)? else { return Ok(None) };
        let retries = views::submit_of(&row)?.retries;
        let how = |row: &JobRow| {
            let end = End::Failed { retry: row.failures < retries };
            (end, format!("could not be started: {why}"))
        };
        self.end_run(job, run, retry, how, |_| {})
    }

    /// Ends a run, if that is the one that the job is at: asked where nobody can begin another.
    fn end_run(
        &self,
        job: &JobId,
        run: u64,
        retry: &RetryParams,
        how: impl FnOnce(&JobRow) -> (End, String),
        edit: impl FnOnce(&mut JobRow),
    ) -> Result<Option<JobRow>> {
        let now = clock::now();
        self.change(|change| {
            let Some(mut row) = change.job(job)?.filter(|row| row.run == run) else {
                return Ok(None);
            };
            let (end, words) = how(&row);
            let stepped = advance(change, &mut row, Happening::Ended(end), now, |row| {
                row.reason = match (wish(row, now), end) {
                    (Wish::Cancel, _) => format!("{} ({words})", row.reason),
                    (Wish::Expire, End::Stopped | End::Failed { .. }) => {
                        format!("{DEADLINE_PASSED} ({words})")
                    }
                    (Wish::Expire | Wish::None, _) => words,
                };
                edit(row);
                if matches!(end, End::Failed { .. }) {
                    count_failure(row, now, retry);
                }
            })?;
            Ok(stepped.then_some(row))
        })
    }

    /// A run never began, through no fault of the job.
    pub fn run_refused(&self, job: &JobId, run: u64, why: &str) -> Result<Option<JobRow>> {
        let now = clock::now();
        self.change(|change| {
            let Some(mut row) = change.job(job)?.filter(|row| row.run == run) else {
                return Ok(None);
            };
            let stepped = advance(change, &mut row, Happening::Refused, now, |row| {
                row.reason = format!("could not be started: {why}");
                row.not_before = now.saturating_add(AFTER_REFUSAL);
            })?;
            Ok(stepped.then_some(row))
        })
    }

    /// Takes note of one event of the node.
    pub fn note_event(&self, gpu: &str, event: Event, retry: &RetryParams) -> Result<()> {
        match event {
            Event::JobStarted { job, share, quota, .. } => {
                self.change(|change| {
                    let Some(mut row) = change.job(&job)? else { return Ok(()) };
                    if JobState::parse(&row.state).is_some_and(JobState::holds_gpu) {
                        row.share = Some((share.sms().0, share.total().0));
                        row.quota_bytes = Some(quota.0);
                        change.put(&row)?;
                    }
                    Ok(())
                })?;
            }
            Event::JobRefused { job, run, unstartable, reason } => {
                if unstartable {
                    self.run_unstartable(&job, run, &reason, retry)?;
                } else {
                    self.run_refused(&job, run, &reason)?;
                }
                self.wake(format!("{job} was refused"));
            }
            Event::JobEnded { job, exit, reason, fail_prone, .. } => {
                self.run_ended(&job, &exit, reason.as_ref(), fail_prone, retry)?;
                let protects = |reason: &&StopReason| {
                    matches!(
                        reason,
                        StopReason::Health(_) | StopReason::Host(_) | StopReason::Fault(_)
                    )
                };
                if let Some(reason) = reason.as_ref().filter(protects) {
                    self.evictions.fetch_add(1, Ordering::Relaxed);
                    self.tell(told("eviction", gpu, Some(&job), format!("{job}: {reason}")));
                }
                self.wake(format!("{job} ended"));
            }
            Event::Health(transition) => {
                let text = format!("{} → {}: {}", transition.from, transition.to, transition.cause);
                self.tell(told("health", gpu, None, text));
                if matches!(transition.to, HealthState::Healthy | HealthState::Overlimit) {
                    self.wake(format!("{gpu} is {}", transition.to));
                }
            }
            Event::Fault { seen, actions, took } => {
                self.faults.fetch_add(1, Ordering::Relaxed);
                let done: Vec<&str> = actions.iter().map(|action| action.as_str()).collect();
                let text = format!("{}: {} in {took}", seen.fault, done.join(", "));
                self.tell(told("fault", gpu, None, text));
            }
            // Only a node of a cluster lets guests in.
            Event::GuestMustLeave { .. } => {}
            Event::Alert(text) => self.tell(told("alert", gpu, None, text)),
            Event::OnlineStarted { service, pid, adopted } => {
                let how = if adopted { "found running" } else { "started" };
                let text = format!("{service} {how} as process {pid}");
                let name = Some(service.as_str().to_owned());
                self.tell(NewEvent { service: name, ..told("service", gpu, None, text) });
                self.wake(format!("{service} runs on {gpu}"));
            }
            Event::OnlineEnded { service, exit } => {
                let (_, words) = end_of(&exit, None, false);
                let name = Some(service.as_str().to_owned());
                let text = format!("{service}: {words}");
                self.tell(NewEvent { service: name, ..told("service", gpu, None, text) });
            }
        }
        Ok(())
    }

    /// Reads the node's events until `leave` says so.
    pub fn pump(&self, retry: &RetryParams, leave: &std::sync::atomic::AtomicBool) {
        while !leave.load(Ordering::Acquire) {
            let Some((gpu, event)) = self.node.next_event(Duration::from_millis(200)) else {
                continue;
            };
            self.until_written(|| self.note_event(&gpu, event.clone(), retry));
        }
    }

    /// Tries again while the disk is full: what happened must not be forgotten.
    fn until_written(&self, mut write: impl FnMut() -> Result<()>) {
        let mut wait = Duration::from_millis(100);
        for attempt in 1.. {
            let Err(error) = write() else { return };
            tracing::error!(error = error.in_full(), attempt, "cannot write down what happened");
            if attempt == 60 {
                // What is lost here is found again by the sweep or after a restart.
                return;
            }
            std::thread::sleep(wait);
            wait = (wait * 2).min(Duration::from_secs(5));
        }
    }

    /// After a restart, before anything is started: what became of the runs of before.
    pub fn reconcile(&self, retry: &RetryParams) -> Result<()> {
        let found = self.node.found();
        for row in self.reader().open_jobs()? {
            if !views::state_of(&row)?.holds_gpu() {
                continue;
            }
            self.settle(&row, &found, retry, "the manager left before it was started")?;
        }
        Ok(())
    }

    /// What became of one run that nobody looks after.
    pub fn settle(
        &self,
        row: &JobRow,
        found: &[(JobId, u64)],
        retry: &RetryParams,
        otherwise: &str,
    ) -> Result<()> {
        let exit = self.node.last_exit(&row.id).filter(|exit| exit.run == row.run);
        if let Some(exit) = exit {
            self.run_ended(&row.id, &exit, None, false, retry)?;
        } else if found.contains(&(row.id.clone(), row.run)) {
            // Its keeper stops it; an event will tell.
            self.step(&row.id, Happening::AskStop, |row| {
                row.reason = "stopped: the manager left".to_owned();
            })?;
        } else {
            self.run_refused(&row.id, row.run, otherwise)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_agent::launch::StopCause;
    use muxflow_agent::stop::{Step, StepTaken};

    fn exit(code: Option<i32>, signal: Option<i32>, stop: Option<StopCause>) -> Exit {
        Exit { code, signal, stop, ..Exit::unknown() }
    }

    #[test]
    fn ends_are_told_apart() {
        let end = |exit: &Exit, reason: Option<StopReason>| end_of(exit, reason.as_ref(), true).0;
        let asked = Some(StopCause::Asked);
        let retry = End::Failed { retry: true };
        assert_eq!(end(&exit(Some(0), None, None), None), End::Finished);
        assert_eq!(end(&exit(Some(1), None, None), None), retry);
        assert_eq!(end(&exit(None, Some(11), None), None), retry);
        assert_eq!(end(&exit(None, None, None), None), End::Stopped, "nobody saw it");
        assert_eq!(end(&exit(None, Some(15), asked), Some(StopReason::Asked)), End::Stopped);
        assert_eq!(end(&exit(Some(1), None, None), Some(StopReason::Shutdown)), retry);
        let gone = Some(StopCause::AgentGone);
        assert_eq!(end(&exit(None, Some(15), gone), Some(StopReason::Shutdown)), End::Stopped);
        // Told to leave and left with 0: it has saved its state, it is not done.
        let step = |step| StepTaken { step, took_ms: 1, timed_out: false };
        let mut saved = exit(Some(0), None, asked);
        saved.steps = vec![step(Step::Drain), step(Step::Checkpoint), step(Step::Release)];
        assert_eq!(end(&saved, Some(StopReason::Asked)), End::Stopped);
        // Gone before it was told: it is done.
        saved.steps = vec![step(Step::Drain), step(Step::Release)];
        assert_eq!(end(&saved, Some(StopReason::Asked)), End::Finished);
        let oom = |exit: Exit| Exit { out_of_memory: true, ..exit };
        assert_eq!(end(&oom(exit(None, Some(9), None)), None), retry);
        assert_eq!(end(&oom(exit(None, Some(9), None)), Some(StopReason::Shutdown)), retry);
        // A child was killed, and the program did without it; or it was told to leave meanwhile.
        assert_eq!(end(&oom(exit(Some(0), None, None)), None), End::Finished);
        let health = Some(StopReason::Health("GPU is Overlimit".into()));
        assert_eq!(end(&oom(exit(None, Some(9), asked)), health.clone()), End::Stopped);
        assert_eq!(end(&oom(exit(Some(1), None, asked)), None), End::Stopped);
        let (_, words) = end_of(&oom(exit(Some(1), None, None)), None, true);
        assert_eq!(words, "out of host memory (exit code 1)");
        assert_eq!(end_of(&exit(Some(1), None, None), None, false).0, End::Failed { retry: false });
    }
}
