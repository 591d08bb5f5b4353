//! Results as a table for a terminal, as JSON, as CSV, and as one HTML page that needs nothing else.

mod csv;
mod html;
mod json;
mod table;

pub use csv::{jobs_csv, series_csv};
pub use html::page;
pub use json::json;
pub use table::{Column, comparison, render};

use crate::metrics::{Point, RunResult};
use crate::number::{float, index};

/// At most this many points of a series are written; more cannot be seen.
pub(crate) const MOST_POINTS: usize = 720;

/// A series thinned by averaging equal stretches.
pub(crate) fn thinned(result: &RunResult) -> Vec<Point> {
    let all = &result.series;
    if all.len() <= MOST_POINTS {
        return all.clone();
    }
    let per = float(all.len()) / float(MOST_POINTS);
    let mut out = Vec::with_capacity(MOST_POINTS);
    for i in 0..MOST_POINTS {
        let from = index(float(i) * per);
        let to = index((float(i) + 1.0) * per).clamp(from + 1, all.len());
        let part = &all[from..to];
        let n = float(part.len());
        let mean = |f: fn(&Point) -> f64| part.iter().map(f).sum::<f64>() / n;
        out.push(Point {
            at_s: part[0].at_s,
            latency_ms: mean(|p| p.latency_ms),
            alone_ms: mean(|p| p.alone_ms),
            p99_ms: mean(|p| p.p99_ms),
            alone_p99_ms: mean(|p| p.alone_p99_ms),
            speed: mean(|p| p.speed),
            oversold_now: mean(|p| p.oversold_now),
            gpu_util: mean(|p| p.gpu_util),
            sm_activity: mean(|p| p.sm_activity),
            memory: mean(|p| p.memory),
            running: mean(|p| p.running),
            waiting: mean(|p| p.waiting),
            requests_per_s: mean(|p| p.requests_per_s),
        });
    }
    out
}
