//! What is measured of a run: the paper's metrics, over time and in sum.

use crate::number::{float, mean, quantile};

/// One moment of a run, averaged over the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Point {
    /// Virtual time.
    pub at_s: f64,
    /// Mean latency of all requests.
    pub latency_ms: f64,
    /// The same with no job on any GPU.
    pub alone_ms: f64,
    /// Mean over replicas of their 99th percentile.
    pub p99_ms: f64,
    /// The same with no job on any GPU.
    pub alone_p99_ms: f64,
    /// Mean speed of the jobs that run, against alone.
    pub speed: f64,
    /// Sum of speeds over all GPUs, divided by the GPUs: what offline work gets of the cluster.
    pub oversold_now: f64,
    /// GPU utilisation.
    pub gpu_util: f64,
    /// SM activity.
    pub sm_activity: f64,
    /// Memory in use.
    pub memory: f64,
    /// Jobs that run.
    pub running: f64,
    /// Jobs that wait.
    pub waiting: f64,
    /// Requests in a second over all services.
    pub requests_per_s: f64,
}

/// What came of one job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct JobRecord {
    /// When it came.
    pub submit_s: f64,
    /// When it first ran.
    pub start_s: Option<f64>,
    /// When it was done.
    pub end_s: Option<f64>,
    /// Time alone on the GPU types it ran on.
    pub separate_s: f64,
    /// Time on GPUs, restarts included.
    pub real_s: f64,
    /// How often it was taken off against its will.
    pub evictions: u32,
    /// Whether its user cancelled it.
    pub cancelled: bool,
}

/// Counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Counts {
    /// Times a job was put on a GPU.
    pub executions: u64,
    /// Evictions by health.
    pub evictions: u64,
    /// Moves and restarts by plans.
    pub moves: u64,
    /// Jobs killed by faults.
    pub fault_kills: u64,
    /// Errors that reached a service from its neighbour.
    pub propagated: u64,
    /// Of these, by a signal.
    pub propagated_by_signal: u64,
    /// Of these, errors that reached a critical service.
    pub propagated_to_critical: u64,
    /// Requests that services could not take because an error had reached them.
    pub lost_requests: u64,
    /// Of these, requests of critical services.
    pub lost_critical: u64,
    /// Jobs that were marked as fail-prone.
    pub marked: u64,
    /// GPUs with an error, summed over days.
    pub error_devices: u64,
    /// Of these, errors that come without sharing too.
    pub device_errors: u64,
    /// Plans made.
    pub plans: u64,
    /// Events handled: queue events and changes of single GPUs.
    pub events: u64,
    /// Different states of a GPU that were computed.
    pub outcomes: u64,
    /// Minutes of replicas that got more requests than they can serve.
    pub overloaded_minutes: f64,
}

/// Real time spent, by what on. Not part of a result's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Spent {
    /// Planning: predicting, matching and the rest of it.
    pub planning_s: f64,
    /// Of it, predicting.
    pub predicting_s: f64,
    /// All the rest.
    pub rest_s: f64,
}

/// A run.
#[derive(Debug, Clone, PartialEq)]
pub struct RunResult {
    /// The policy's name.
    pub policy: String,
    /// What it is, in a sentence.
    pub about: String,
    /// Where its predictions come from.
    pub predictor: String,
    /// Over time.
    pub series: Vec<Point>,
    /// Job by job.
    pub jobs: Vec<JobRecord>,
    /// Counts.
    pub counts: Counts,
    /// GPUs of the cluster.
    pub gpus: usize,
    /// Online metrics are taken over this time.
    pub horizon_s: f64,
    /// Slowdown by service, mean: name and ratio.
    pub by_service: Vec<(String, f64)>,
    /// Real time.
    pub spent: Spent,
}

/// The sums that tables print.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Summary {
    /// Mean latency.
    pub latency_ms: f64,
    /// Mean 99th percentile.
    pub p99_ms: f64,
    /// Mean latency against alone: 1.16 is 16 % slower.
    pub slowdown: f64,
    /// The same of the 99th percentile.
    pub p99_slowdown: f64,
    /// Jobs done.
    pub finished: usize,
    /// Jobs not done when the run ended.
    pub unfinished: usize,
    /// Job completion time.
    pub jct_mean_s: f64,
    /// Its median.
    pub jct_median_s: f64,
    /// Its 99th percentile.
    pub jct_p99_s: f64,
    /// Time until the last job was done.
    pub makespan_s: f64,
    /// Mean speed of running jobs, weighed by time.
    pub speed: f64,
    /// Sum of separate times over sum of real times: 0 to 1.
    pub oversold: f64,
    /// While jobs were there to run: GPU utilisation.
    pub gpu_util: f64,
    /// SM activity.
    pub sm_activity: f64,
    /// Memory.
    pub memory: f64,
    /// Evictions by health in a hundred executions.
    pub eviction_pct: f64,
    /// Error devices in a hundred, by day.
    pub error_device_pct: f64,
}

impl RunResult {
    /// The sums.
    pub fn summary(&self) -> Summary {
        let online: Vec<&Point> = self.series.iter().filter(|p| p.at_s <= self.horizon_s).collect();
        let weigh = |value: &dyn Fn(&Point) -> f64, weight: &dyn Fn(&Point) -> f64| {
            let total: f64 = online.iter().map(|p| weight(p)).sum();
            if total > 0.0 {
                online.iter().map(|p| value(p) * weight(p)).sum::<f64>() / total
            } else {
                0.0
            }
        };
        let requests = |p: &Point| p.requests_per_s;
        let even = |_: &Point| 1.0;
        let latency_ms = weigh(&|p| p.latency_ms, &requests);
        let p99_ms = weigh(&|p| p.p99_ms, &requests);
        let done: Vec<&JobRecord> = self.jobs.iter().filter(|j| !j.cancelled).collect();
        let mut jct: Vec<f64> =
            done.iter().filter_map(|j| j.end_s.map(|e| e - j.submit_s)).collect();
        jct.sort_by(f64::total_cmp);
        let (separate, real) =
            self.jobs.iter().fold((0.0, 0.0), |(s, r), j| (s + j.separate_s, r + j.real_s));
        let days = (self.horizon_s / 86_400.0).max(1e-9);
        let hundred = |part: u64, of: f64| if of > 0.0 { part as f64 / of * 100.0 } else { 0.0 };
        Summary {
            latency_ms,
            p99_ms,
            slowdown: ratio(latency_ms, weigh(&|p| p.alone_ms, &requests)),
            p99_slowdown: ratio(p99_ms, weigh(&|p| p.alone_p99_ms, &requests)),
            finished: jct.len(),
            unfinished: done.len() - jct.len(),
            jct_mean_s: mean(&jct),
            jct_median_s: quantile(&jct, 0.5),
            jct_p99_s: quantile(&jct, 0.99),
            makespan_s: self.jobs.iter().filter_map(|j| j.end_s).fold(0.0, f64::max),
            speed: weigh(&|p| p.speed, &|p| p.running),
            oversold: ratio_or_zero(separate, real),
            gpu_util: weigh(&|p| p.gpu_util, &even),
            sm_activity: weigh(&|p| p.sm_activity, &even),
            memory: weigh(&|p| p.memory, &even),
            eviction_pct: hundred(self.counts.evictions, self.counts.executions as f64),
            error_device_pct: hundred(self.counts.error_devices, float(self.gpus) * days),
        }
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 1.0 }
}

fn ratio_or_zero(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(separate_s: f64, real_s: f64) -> JobRecord {
        JobRecord {
            submit_s: 10.0,
            start_s: Some(20.0),
            end_s: Some(20.0 + real_s),
            separate_s,
            real_s,
            evictions: 0,
            cancelled: false,
        }
    }

    fn run(jobs: Vec<JobRecord>) -> RunResult {
        RunResult {
            policy: String::new(),
            about: String::new(),
            predictor: String::new(),
            series: Vec::new(),
            jobs,
            counts: Counts::default(),
            gpus: 2,
            horizon_s: 100.0,
            by_service: Vec::new(),
            spent: Spent::default(),
        }
    }

    #[test]
    fn oversold_is_separate_time_over_real_time() {
        let sold = run(vec![job(30.0, 60.0), job(60.0, 90.0)]).summary();
        assert!((sold.oversold - 0.6).abs() < 1e-12, "not the paper's 150 / 90: {sold:?}");
        assert!((sold.jct_mean_s - 85.0).abs() < 1e-12, "{sold:?}");
        assert!((sold.makespan_s - 110.0).abs() < 1e-12, "{sold:?}");
        let idle = run(Vec::new()).summary();
        assert!(idle.oversold.abs() < 1e-12, "nothing ran: {idle:?}");
    }
}
