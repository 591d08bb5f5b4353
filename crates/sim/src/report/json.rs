//! A result as JSON, with everything that a table or chart shows, and nothing that depends on the
//! machine: the same seed gives the same bytes.

use serde_json::{Value, json as object};

use super::thinned;
use crate::metrics::RunResult;

/// All runs of one scenario.
pub fn json(results: &[RunResult], seed: u64) -> Value {
    object!({
        "seed": seed,
        "runs": results.iter().map(one).collect::<Vec<_>>(),
    })
}

/// Six significant figures: more is noise and makes files large.
fn short(x: f64) -> Value {
    if x == 0.0 || !x.is_finite() {
        return object!(0);
    }
    let text = format!("{x:.5e}");
    text.parse::<f64>().map_or(Value::Null, |v| object!(v))
}

fn one(r: &RunResult) -> Value {
    let s = r.summary();
    let c = &r.counts;
    let points = thinned(r);
    let series = |f: fn(&crate::metrics::Point) -> f64| -> Vec<Value> {
        points.iter().map(|p| short(f(p))).collect()
    };
    object!({
        "policy": r.policy,
        "about": r.about,
        "predictor": r.predictor,
        "gpus": r.gpus,
        "horizon_s": short(r.horizon_s),
        "summary": {
            "latency_ms": short(s.latency_ms),
            "p99_ms": short(s.p99_ms),
            "slowdown": short(s.slowdown),
            "p99_slowdown": short(s.p99_slowdown),
            "finished": s.finished,
            "unfinished": s.unfinished,
            "jct_mean_s": short(s.jct_mean_s),
            "jct_median_s": short(s.jct_median_s),
            "jct_p99_s": short(s.jct_p99_s),
            "makespan_s": short(s.makespan_s),
            "normalised_throughput": short(s.speed),
            "oversold": short(s.oversold),
            "gpu_util": short(s.gpu_util),
            "sm_activity": short(s.sm_activity),
            "memory": short(s.memory),
            "eviction_pct": short(s.eviction_pct),
            "error_device_pct": short(s.error_device_pct),
        },
        "counts": {
            "executions": c.executions,
            "evictions": c.evictions,
            "moves": c.moves,
            "fault_kills": c.fault_kills,
            "propagated_errors": c.propagated,
            "propagated_by_signal": c.propagated_by_signal,
            "error_devices": c.error_devices,
            "plans": c.plans,
            "events": c.events,
            "overloaded_replica_minutes": c.overloaded_minutes,
        },
        "slowdown_by_service": r.by_service.iter()
            .map(|(name, ratio)| object!({"service": name, "slowdown": short(*ratio)}))
            .collect::<Vec<_>>(),
        "series": {
            "time_s": series(|p| p.at_s),
            "latency_ms": series(|p| p.latency_ms),
            "alone_ms": series(|p| p.alone_ms),
            "p99_ms": series(|p| p.p99_ms),
            "alone_p99_ms": series(|p| p.alone_p99_ms),
            "normalised_throughput": series(|p| p.speed),
            "offline_speed_per_gpu": series(|p| p.oversold_now),
            "gpu_util": series(|p| p.gpu_util),
            "sm_activity": series(|p| p.sm_activity),
            "memory": series(|p| p.memory),
            "running": series(|p| p.running),
            "waiting": series(|p| p.waiting),
            "requests_per_s": series(|p| p.requests_per_s),
        },
    })
}
