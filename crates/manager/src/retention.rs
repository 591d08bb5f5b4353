//! Keeps the state directory from growing without end: old events, jobs that ended long ago with their
//! output, and speeds that were seen often enough since are removed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_types::Micros;

use crate::clock;
use crate::error::Result;
use crate::manager::Manager;

/// Between two sweeps; the first comes as long after the start.
const EVERY: Duration = Duration::from_secs(600);
/// Events that are kept.
const EVENTS: u64 = 100_000;
/// Speeds that were seen: of each pair of a service and a program, and of each GPU type.
const SPEEDS: (u64, u64) = (200, 10_000);
/// Jobs that are removed in one transaction, so that nobody waits long for the store.
const AT_ONCE: usize = 200;

impl Manager {
    /// Sweeps every now and then until the manager leaves.
    pub fn keep_tidy(&self, leave: &AtomicBool) {
        let mut next = Instant::now() + EVERY;
        while !leave.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(200));
            if Instant::now() < next {
                continue;
            }
            if let Err(error) = self.sweep(clock::now(), leave) {
                tracing::warn!(error = error.in_full(), "old jobs and events are not removed");
            }
            next = Instant::now() + EVERY;
        }
    }

    /// Removes what is older or more than is to be kept; says how many jobs. Jobs that have not ended
    /// are never removed.
    pub fn sweep(&self, now: Micros, leave: &AtomicBool) -> Result<usize> {
        self.store().trim_events(EVENTS)?;
        self.store().trim_observed(SPEEDS.0, SPEEDS.1)?;
        let before = Micros(now.0.saturating_sub(self.settings.keep_jobs_for.0));
        let (mut removed, mut kept) = (0, 0);
        while !leave.load(Ordering::Acquire) {
            // Those that could not be removed are the first to be named again.
            let limit = AT_ONCE + kept;
            let mut ids = self.reader().old_jobs(before, self.settings.keep_jobs, limit)?;
            let named = ids.len();
            // Their output goes first: what the store does not know of, no sweep would find again.
            kept = 0;
            ids.retain(|id| match self.node.forget(id) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(job = %id, error, "the output of an old job is not removed");
                    kept += 1;
                    false
                }
            });
            removed += self.store().delete_ended(&ids)?;
            if named < limit || ids.is_empty() {
                break;
            }
        }
        if removed > 0 {
            tracing::info!(jobs = removed, "jobs that ended long ago were removed");
        }
        Ok(removed)
    }
}
