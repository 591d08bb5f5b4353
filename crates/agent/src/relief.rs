//! Whom a host in distress lets go: one job at a time, and the next only when a reading shows that the
//! first was not enough. To save its state a job may need minutes in which memory is still short.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muxflow_types::JobId;

use crate::gpu::{Order, StopReason};
use crate::handle::Ends;

/// A guest is taken away by others; they get this long beyond its own limits.
const MARGIN: Duration = Duration::from_secs(5);

/// The stop that was asked for last.
#[derive(Debug, Default)]
pub(crate) struct Relief {
    under_way: Option<(JobId, Instant)>,
}

impl Relief {
    /// Whether another job may be asked to leave: not while the last one is on its way out within its
    /// time, nor on the reading that was taken as it went.
    fn may_ask(&mut self, now: Instant, is_there: impl Fn(&JobId) -> bool) -> bool {
        let Some((job, until)) = &self.under_way else { return true };
        if now >= *until || !is_there(job) {
            self.under_way = None;
        }
        false
    }

    /// The host is in distress: the job that holds most of its memory leaves, unless one does so.
    pub(crate) fn relieve(&mut self, targets: &[Ends], cause: &str) {
        let on_gpu = |job: &JobId| {
            targets.iter().any(|(gpu, _)| gpu.job().is_some_and(|active| active.job == *job))
        };
        if !self.may_ask(Instant::now(), on_gpu) {
            return;
        }
        let jobs = targets.iter().filter_map(|(gpu, orders)| {
            let job = gpu.job().filter(|job| !job.stopping.load(Ordering::Acquire))?;
            let pages = job.block.registered().iter().map(|&pid| resident_pages(pid)).sum::<u64>();
            Some((pages, job, orders))
        });
        let Some((_, job, orders)) = jobs.max_by_key(|(pages, ..)| *pages) else { return };
        self.under_way = Some((job.job.clone(), Instant::now() + job.stop.whole() + MARGIN));
        let reason = StopReason::Host(cause.to_owned());
        drop(orders.send(Order::StopOffline { job: None, reason }));
    }
}

fn resident_pages(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    text.split_ascii_whitespace().nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_waits_for_the_first_and_for_a_reading_after_it() {
        let start = Instant::now();
        let until = start + Duration::from_secs(60);
        let leaving = || Relief { under_way: Some((JobId::new("j").unwrap(), until)) };
        assert!(Relief::default().may_ask(start, |_| true), "nobody leaves");
        let mut relief = leaving();
        assert!(!relief.may_ask(start, |_| true) && !relief.may_ask(start, |_| true));
        assert!(!relief.may_ask(start, |_| false), "this reading is from before");
        assert!(relief.may_ask(start, |_| false), "it was not enough");
        let mut relief = leaving();
        assert!(!relief.may_ask(until, |_| true));
        assert!(relief.may_ask(until, |_| true), "one that does not leave keeps nobody");
    }
}
