//! What a scheduler did, as numbers for a page of metrics.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often it is looked whether a replica hangs.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Counters of one replica.
#[derive(Debug, Default)]
pub struct Counters {
    leads: AtomicBool,
    /// When this replica began to lead, or last finished a look; none while it does not lead.
    looked_at: Mutex<Option<Instant>>,
    looks: AtomicU64,
    cycles: AtomicU64,
    bound: AtomicU64,
    evicted: AtomicU64,
    failed: AtomicU64,
    jobs: AtomicU64,
    gpus: AtomicU64,
    plan_us: AtomicU64,
    cycle_us: AtomicU64,
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Counters {
    pub(crate) fn lead(&self, leads: bool) {
        self.leads.store(leads, Ordering::Relaxed);
        *self.looked_at.lock().unwrap_or_else(PoisonError::into_inner) = leads.then(Instant::now);
    }

    /// What followed from a look at the cluster was done.
    pub(crate) fn looked(&self) {
        *self.looked_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Whether this replica leads and has finished no look for so long.
    pub(crate) fn is_stalled(&self, limit: Duration) -> bool {
        let at = *self.looked_at.lock().unwrap_or_else(PoisonError::into_inner);
        at.is_some_and(|at| at.elapsed() >= limit)
    }

    /// Comes back once this replica hangs: it leads and has finished no look for so long.
    pub async fn hangs(&self, limit: Duration) {
        while !self.is_stalled(limit) {
            tokio::time::sleep(LOOK_EVERY.min(limit / 2)).await;
        }
    }

    /// The whole cluster was looked at.
    pub(crate) fn look(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    /// How often the whole cluster was looked at so far.
    pub fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    /// A cycle is over: bindings, evictions and failures; jobs and GPUs it planned; how long the
    /// plan and all of it took.
    pub(crate) fn cycle(&self, did: [usize; 3], saw: [usize; 2], plan: Duration, all: Duration) {
        self.cycles.fetch_add(1, Ordering::Relaxed);
        for (counter, count) in [&self.bound, &self.evicted, &self.failed].into_iter().zip(did) {
            counter.fetch_add(count as u64, Ordering::Relaxed);
        }
        self.jobs.store(saw[0] as u64, Ordering::Relaxed);
        self.gpus.store(saw[1] as u64, Ordering::Relaxed);
        self.plan_us.store(micros(plan), Ordering::Relaxed);
        self.cycle_us.store(micros(all), Ordering::Relaxed);
    }

    /// Pods bound so far.
    pub fn bound(&self) -> u64 {
        self.bound.load(Ordering::Relaxed)
    }

    /// In Prometheus' text format.
    pub fn page(&self) -> String {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        #[expect(clippy::cast_precision_loss, reason = "a time to be read by people")]
        let seconds = |counter: &AtomicU64| read(counter) as f64 / 1e6;
        let leads = if self.leads.load(Ordering::Relaxed) { 1 } else { 0 };
        let rows = [
            ("muxflow_scheduler_leads", "gauge", "1 for the replica that acts.", leads.to_string()),
            (
                "muxflow_scheduler_looks_total",
                "counter",
                "Times that the whole cluster was looked at.",
                read(&self.looks).to_string(),
            ),
            (
                "muxflow_scheduler_cycles_total",
                "counter",
                "Cycles that planned something.",
                read(&self.cycles).to_string(),
            ),
            (
                "muxflow_scheduler_bound_total",
                "counter",
                "Pods bound.",
                read(&self.bound).to_string(),
            ),
            (
                "muxflow_scheduler_evicted_total",
                "counter",
                "Pods evicted.",
                read(&self.evicted).to_string(),
            ),
            (
                "muxflow_scheduler_failed_total",
                "counter",
                "Requests refused or failed.",
                read(&self.failed).to_string(),
            ),
            (
                "muxflow_scheduler_jobs",
                "gauge",
                "Jobs in the last plan.",
                read(&self.jobs).to_string(),
            ),
            (
                "muxflow_scheduler_gpus",
                "gauge",
                "GPUs in the last plan.",
                read(&self.gpus).to_string(),
            ),
            (
                "muxflow_scheduler_plan_seconds",
                "gauge",
                "Time to the last plan.",
                seconds(&self.plan_us).to_string(),
            ),
            (
                "muxflow_scheduler_cycle_seconds",
                "gauge",
                "Time of the last cycle.",
                seconds(&self.cycle_us).to_string(),
            ),
        ];
        let mut text = String::new();
        for (name, kind, help, value) in rows {
            let _written =
                write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_counts_on_and_shows_the_last_cycle() {
        let counters = Counters::default();
        counters.lead(true);
        for _ in 0..2 {
            counters.cycle([3, 1, 0], [7, 9], Duration::from_millis(5), Duration::from_millis(20));
        }
        let page = counters.page();
        for line in [
            "muxflow_scheduler_bound_total 6",
            "muxflow_scheduler_jobs 7",
            "muxflow_scheduler_cycle_seconds 0.02",
            "muxflow_scheduler_leads 1",
        ] {
            assert!(page.lines().any(|l| l == line), "{line} not in {page}");
        }
        assert_eq!(counters.bound(), 6);
    }

    #[tokio::test]
    async fn a_leader_that_finishes_no_look_hangs() {
        let (counters, limit) = (Counters::default(), Duration::from_millis(300));
        let patience = limit * 3;
        let hangs = || tokio::time::timeout(patience, counters.hangs(limit));
        hangs().await.expect_err("who does not lead has nothing to look at");
        counters.lead(true);
        let looks = async {
            loop {
                tokio::time::sleep(limit / 10).await;
                counters.looked();
            }
        };
        tokio::select! {
            ended = hangs() => ended.expect_err("it looks again and again"),
            () = looks => unreachable!(),
        };
        hangs().await.unwrap();
        counters.lead(false);
        assert!(!counters.is_stalled(limit));
    }
}
