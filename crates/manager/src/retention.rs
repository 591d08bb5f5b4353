//! Keeps the state directory from growing without end: old events, jobs that ended long ago, or that
//! take too much room, with their output, and speeds that were seen often enough since are removed.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_store::Keep;
use muxflow_types::{JobId, Micros};

use crate::clock;
use crate::error::Result;
use crate::manager::Manager;

/// Between two sweeps; the first comes as long after the start.
const EVERY: Duration = Duration::from_secs(600);
/// A sweep comes early after so many bytes of submissions: who submits and cancels without end fills
/// a disk in less time than that.
const MUCH_TAKEN_IN: u64 = 64 << 20;
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
            let much = self.taken_in.load(Ordering::Relaxed) >= MUCH_TAKEN_IN;
            if Instant::now() < next && !much {
                continue;
            }
            self.taken_in.store(0, Ordering::Relaxed);
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
        let keep = Keep {
            ended_since: Micros(now.0.saturating_sub(self.settings.keep_jobs_for.0)),
            newest: self.settings.keep_jobs,
            bytes_per_user: self.settings.keep_bytes_per_user,
        };
        let (mut removed, mut kept) = (0, 0);
        while !leave.load(Ordering::Acquire) {
            // Those that could not be removed are the first to be named again.
            let limit = AT_ONCE + kept;
            let ids = self.reader().old_jobs(&keep, limit)?;
            let named = ids.len();
            let gone = self.remove(ids)?;
            removed += gone;
            kept = named - gone;
            if named < limit || gone == 0 {
                break;
            }
        }
        for some in self.with_too_much_output()?.chunks(AT_ONCE) {
            if leave.load(Ordering::Acquire) {
                break;
            }
            removed += self.remove(some.to_vec())?;
        }
        if removed > 0 {
            tracing::info!(jobs = removed, "jobs that ended long ago were removed");
        }
        Ok(removed)
    }

    /// Jobs after which others of their user ended that have all the output that is to be kept; the
    /// oldest first.
    fn with_too_much_output(&self) -> Result<Vec<JobId>> {
        let most = self.settings.keep_output_bytes_per_user;
        let mut taken: BTreeMap<u32, u64> = BTreeMap::new();
        let mut over = self.reader().ended_jobs()?;
        over.retain(|(job, uid)| {
            let sum = taken.entry(*uid).or_default();
            *sum = sum.saturating_add(self.node.output_bytes(job));
            *sum > most
        });
        Ok(over.into_iter().rev().map(|(job, _)| job).collect())
    }

    /// Removes jobs that have ended, with their output; says how many.
    fn remove(&self, mut ids: Vec<JobId>) -> Result<usize> {
        // Their output goes first: what the store does not know of, no sweep would find again.
        ids.retain(|id| match self.node.forget(id) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(job = %id, error, "the output of an old job is not removed");
                false
            }
        });
        Ok(self.store().delete_ended(&ids)?)
    }
}
