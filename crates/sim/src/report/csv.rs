//! A result as CSV: one row for each moment, or one for each job.

use crate::metrics::RunResult;

/// All series, one after the other.
pub fn series_csv(results: &[RunResult]) -> String {
    let mut out = String::from(
        "policy,time_s,latency_ms,alone_ms,p99_ms,alone_p99_ms,normalised_throughput,offline_speed_per_gpu,gpu_util,sm_activity,memory,running,waiting,requests_per_s\n",
    );
    for r in results {
        for p in &r.series {
            out.push_str(&format!(
                "{},{:.0},{:.3},{:.3},{:.3},{:.3},{:.4},{:.4},{:.4},{:.4},{:.4},{:.0},{:.0},{:.1}\n",
                r.policy,
                p.at_s,
                p.latency_ms,
                p.alone_ms,
                p.p99_ms,
                p.alone_p99_ms,
                p.speed,
                p.oversold_now,
                p.gpu_util,
                p.sm_activity,
                p.memory,
                p.running,
                p.waiting,
                p.requests_per_s
            ));
        }
    }
    out
}

/// All jobs, one after the other.
pub fn jobs_csv(results: &[RunResult]) -> String {
    let mut out =
        String::from("policy,job,submit_s,start_s,end_s,separate_s,real_s,evictions,cancelled\n");
    let time = |t: Option<f64>| t.map_or(String::new(), |t| format!("{t:.1}"));
    for r in results {
        for (i, j) in r.jobs.iter().enumerate() {
            out.push_str(&format!(
                "{},{i},{:.1},{},{},{:.1},{:.1},{},{}\n",
                r.policy,
                j.submit_s,
                time(j.start_s),
                time(j.end_s),
                j.separate_s,
                j.real_s,
                j.evictions,
                j.cancelled
            ));
        }
    }
    out
}
