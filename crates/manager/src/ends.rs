//! What happened to runs: the events of the node, written down, and after a restart what is found of
//! the runs of before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::launch::Exit;
use muxflow_api::jobs::JobState;
use muxflow_policy::retry::{FailureHistory, RetryParams};
use muxflow_store::events::NewEvent;
use muxflow_store::jobs::JobRow;
use muxflow_types::{HealthState, JobId, Micros};

use crate::clock;
use crate::ending::{Doing, Ending, Patience, Why, ending_of, setbacks, words_of};
use crate::error::Result;
use crate::lifecycle::{End, Happening, Wish};
use crate::manager::{Manager, advance, wish};
use crate::views;

/// A job that a GPU refused is not offered again before this; twice as long each time, up to the cap.
const AFTER_REFUSAL: Micros = Micros::from_secs(2);
/// GPUs recover: nobody waits longer for that.
const AFTER_REFUSALS: Micros = Micros::from_secs(300);

/// Blame for a run comes within this of its end.
const BLAME_WITHIN: Micros = Micros::from_secs(60);

/// Attempts to write down what happened, some minutes in all; after that, what comes next is tried.
const MOST_ATTEMPTS: u32 = 60;

/// Why a job with a deadline has failed.
pub const DEADLINE_PASSED: &str = "its deadline has passed";

fn seed_of(row: &JobRow) -> u64 {
    u64::try_from(row.number).unwrap_or(0)
}

/// One failure more: the next try comes later, or never.
fn count_failure(row: &mut JobRow, now: Micros, retry: &RetryParams) {
    let mut history = FailureHistory::restore(row.failures, row.last_failure);
    row.not_before = history.fail(now, retry, seed_of(row));
    row.failures += 1;
    row.last_failure = now;
    row.fail_prone |= history.is_fail_prone(now, retry);
}

/// One setback more: it comes back, later each time.
fn count_setback(row: &mut JobRow, now: Micros, held: Micros, retry: &RetryParams) {
    row.setbacks = setbacks(row.setbacks, held, retry).saturating_add(1);
    row.not_before = now.saturating_add(retry.wait(row.setbacks, seed_of(row)));
}

/// Why a job waits or has ended after a run that ended so: somebody's wish counts more than how that
/// came about, and so does what was written down when it was asked to leave.
fn reason_after(row: &JobRow, end: End, words: String, keeps: bool, now: Micros) -> String {
    match (wish(row, now), end) {
        (Wish::Cancel, _) => format!("{} ({words})", row.reason),
        (Wish::Expire, End::Stopped | End::Failed { .. }) => format!("{DEADLINE_PASSED} ({words})"),
        (Wish::None, End::Stopped) if keeps => row.reason.clone(),
        (Wish::Expire | Wish::None, _) => words,
    }
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

/// Tries again while the disk is full: what happened must not be forgotten. Whoever leaves does
/// not wait for that: what is lost here is found again by the sweep or after a restart. Says whether
/// it is written.
fn until_written(leave: &AtomicBool, attempts: u32, mut write: impl FnMut() -> Result<()>) -> bool {
    let mut wait = Duration::from_millis(100);
    for attempt in 1..=attempts {
        let Err(error) = write() else { return true };
        tracing::error!(error = error.in_full(), attempt, "cannot write down what happened");
        let next = Instant::now() + wait;
        while Instant::now() < next {
            if leave.load(Ordering::Acquire) {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        wait = (wait * 2).min(Duration::from_secs(5));
    }
    false
}

impl Manager {
    /// A run has ended: writes down what that means. News of an older run is none.
    pub fn run_ended(
        &self,
        job: &JobId,
        exit: &Exit,
        why: &Why<'_>,
        retry: &RetryParams,
    ) -> Result<Option<JobRow>> {
        let Some(row) = self.store().job(job)? else { return Ok(None) };
        let retries = views::submit_of(&row)?.retries;
        let run = if exit.run == 0 { row.run } else { exit.run };
        let now = clock::now();
        let how = |row: &JobRow| {
            ending_of(exit, why.reason, why.blamed, Patience::of(row, retries, retry, now))
        };
        self.end_run(job, run, retry, how, |row| {
            row.exit_code = exit.code;
            row.exit_signal = exit.signal;
            row.fail_prone |= why.fail_prone;
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
            Ending { end, words: format!("could not be started: {why}"), doing: Doing::Own }
        };
        self.end_run(job, run, retry, how, |_| {})
    }

    /// Ends a run, if that is the one that the job is at: asked where nobody can begin another.
    fn end_run(
        &self,
        job: &JobId,
        run: u64,
        retry: &RetryParams,
        how: impl FnOnce(&JobRow) -> Ending,
        edit: impl FnOnce(&mut JobRow),
    ) -> Result<Option<JobRow>> {
        let now = clock::now();
        self.change(|change| {
            let Some(mut row) = change.job(job)?.filter(|row| row.run == run) else {
                return Ok(None);
            };
            let Ending { end, words, doing } = how(&row);
            // Whoever asked it to leave wrote down why, and that is why it waits now.
            let is_told = row.state == JobState::Checkpointing.as_str() && !row.reason.is_empty();
            let held = now.since(row.changed_at);
            let stepped = advance(change, &mut row, Happening::Ended(end), now, |row| {
                let keeps = doing == Doing::Asked && is_told;
                row.reason = reason_after(row, end, words, keeps, now);
                edit(row);
                row.refusals = 0;
                match doing {
                    Doing::Setback => count_setback(row, now, held, retry),
                    Doing::Own | Doing::Asked => row.setbacks = 0,
                }
                if matches!(end, End::Failed { .. }) {
                    count_failure(row, now, retry);
                }
            })?;
            Ok(stepped.then_some(row))
        })
    }

    /// The driver names the culprit of an error after the end of its run was written down: that run has
    /// failed. Work that is done is not begun again: its output is what the error left of it.
    pub fn run_blamed(
        &self,
        job: &JobId,
        run: u64,
        fault: &str,
        retry: &RetryParams,
    ) -> Result<Option<JobRow>> {
        let Some(row) = self.store().job(job)? else { return Ok(None) };
        let retries = views::submit_of(&row)?.retries;
        let now = clock::now();
        self.change(|change| {
            let is_its = |row: &JobRow| run == 0 || row.run == run;
            let Some(mut row) = change.job(job)?.filter(is_its) else { return Ok(None) };
            // A number is given to another process in time.
            if now.since(row.changed_at) > BLAME_WITHIN {
                return Ok(None);
            }
            // A run fails once, for whatever reasons.
            let counted = row.failures > 0 && row.last_failure == row.changed_at;
            let happening = Happening::Blamed { retry: counted || row.failures < retries };
            let stepped = advance(change, &mut row, happening, now, |row| {
                row.reason = format!("{}; it is to blame for {fault}", row.reason);
                row.setbacks = 0;
                if !counted {
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
                let words = format!("could not be started: {why}");
                row.reason = reason_after(row, End::Stopped, words, false, now);
                let doubled = AFTER_REFUSAL.0 << row.refusals.min(16);
                row.refusals = row.refusals.saturating_add(1);
                row.not_before = now.saturating_add(Micros(doubled).min(AFTER_REFUSALS));
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
            Event::JobEnded { job, exit, reason, fail_prone, blamed, .. } => {
                let why = Why { reason: reason.as_ref(), blamed, fail_prone };
                self.run_ended(&job, &exit, &why, retry)?;
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
            Event::JobBlamed { job, run, fault } => {
                let text = format!("{job}: {fault}, for which it is to blame");
                self.run_blamed(&job, run, &fault.to_string(), retry)?;
                self.tell(told("fault", gpu, Some(&job), text));
            }
            // Only a node of a cluster lets guests in.
            Event::GuestMustLeave { .. } | Event::GuestBlamed { .. } => {}
            Event::Alert(text) => self.tell(told("alert", gpu, None, text)),
            Event::OnlineStarted { service, pid, adopted } => {
                let how = if adopted { "found running" } else { "started" };
                let text = format!("{service} {how} as process {pid}");
                let name = Some(service.as_str().to_owned());
                self.tell(NewEvent { service: name, ..told("service", gpu, None, text) });
                self.wake(format!("{service} runs on {gpu}"));
            }
            Event::OnlineEnded { service, exit } => {
                let name = Some(service.as_str().to_owned());
                let text = format!("{service}: {}", words_of(&exit));
                self.tell(NewEvent { service: name, ..told("service", gpu, None, text) });
            }
        }
        Ok(())
    }

    /// Reads the node's events until `leave` says so.
    pub fn pump(&self, retry: &RetryParams, leave: &AtomicBool) {
        let mut attempts = MOST_ATTEMPTS;
        while !leave.load(Ordering::Acquire) {
            let Some((gpu, event)) = self.node.next_event(Duration::from_millis(200)) else {
                continue;
            };
            let write = || self.note_event(&gpu, event.clone(), retry);
            // Where one could not be written for minutes, the next do not wait as long each.
            attempts = if until_written(leave, attempts, write) { MOST_ATTEMPTS } else { 1 };
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
            self.run_ended(&row.id, &exit, &Why::default(), retry)?;
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
