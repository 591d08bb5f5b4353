//! What a phase came to, and the closing table.

use serde::{Deserialize, Serialize};

use super::scenario::Offline;
use crate::table::Table;

/// What one service saw.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ServiceResult {
    pub(super) name: String,
    pub(super) requests: u64,
    pub(super) failed: u64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    /// Share of requests that were answered within the SLO; none while there is no SLO.
    pub(super) within_slo: Option<f64>,
    pub(super) slo_ms: Option<f64>,
}

/// An error that was made on purpose.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Injected {
    pub(super) what: String,
    /// The service on the GPU where it was made.
    pub(super) beside: String,
    pub(super) at_s: f64,
    /// Requests to that service that failed in the seconds after it.
    pub(super) failed_after: u64,
    /// How long a replica of that service was out in the seconds after it.
    pub(super) out_ms: u64,
}

/// What a phase came to. Every number was measured on processes that ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PhaseResult {
    pub(super) offline: Offline,
    pub(super) day_s: f64,
    pub(super) gpus: u32,
    pub(super) services: Vec<ServiceResult>,
    /// Iterations that jobs got done.
    pub(super) iterations: u64,
    /// Seconds that jobs were on GPUs, added up.
    pub(super) on_gpu_s: f64,
    /// Iterations per second of a job alone on a GPU.
    pub(super) solo_per_s: Option<f64>,
    pub(super) gpu_util_pct: f64,
    pub(super) sm_activity_pct: f64,
    pub(super) evictions: u64,
    pub(super) injected: Vec<Injected>,
    pub(super) replica_restarts: u64,
    /// Seconds that replicas were out, added up.
    pub(super) replicas_out_s: f64,
}

impl PhaseResult {
    fn requests(&self) -> (u64, u64) {
        let sum = |of: fn(&ServiceResult) -> u64| self.services.iter().map(of).sum();
        (sum(|s| s.requests), sum(|s| s.failed))
    }

    /// Time that jobs would have needed alone, divided by the time they took: ΣT_sep / ΣT_real.
    pub(super) fn oversold(&self) -> Option<f64> {
        let solo = self.solo_per_s.filter(|rate| *rate > 0.0)?;
        #[expect(clippy::cast_precision_loss, reason = "counts of iterations")]
        let alone_s = self.iterations as f64 / solo;
        (self.on_gpu_s > 0.0).then(|| alone_s / self.on_gpu_s)
    }

    /// Work done, as so many GPUs that do nothing else.
    fn dedicated_gpus(&self) -> Option<f64> {
        let solo = self.solo_per_s.filter(|rate| *rate > 0.0)?;
        #[expect(clippy::cast_precision_loss, reason = "counts of iterations")]
        Some(self.iterations as f64 / solo / self.day_s)
    }

    fn contained(&self) -> usize {
        self.injected.iter().filter(|one| one.failed_after == 0).count()
    }
}

fn times(value: f64, alone: f64) -> String {
    if alone > 0.0 {
        format!("{value:.1} ms ({:.2}x)", value / alone)
    } else {
        format!("{value:.1} ms")
    }
}

type Cell = Box<dyn Fn(&PhaseResult) -> String>;

fn service_rows(alone: &PhaseResult, rows: &mut Vec<(String, Cell)>) {
    for (index, service) in alone.services.iter().enumerate() {
        let (p50, p99) = (service.p50_ms, service.p99_ms);
        let of = move |result: &PhaseResult| result.services.get(index).cloned();
        let name = &service.name;
        rows.push((
            format!("{name}: p50"),
            Box::new(move |r| of(r).map_or_else(String::new, |s| times(s.p50_ms, p50))),
        ));
        rows.push((
            format!("{name}: p99"),
            Box::new(move |r| of(r).map_or_else(String::new, |s| times(s.p99_ms, p99))),
        ));
        rows.push((
            format!("{name}: within its SLO"),
            Box::new(move |r| {
                let Some(s) = of(r) else { return String::new() };
                match (s.within_slo, s.slo_ms) {
                    (Some(share), Some(slo)) => format!("{:.2} % of {slo:.0} ms", share * 100.0),
                    _ => "-".into(),
                }
            }),
        ));
    }
}

/// The table: one column for each phase, the first being the services alone.
pub(super) fn table(results: &[PhaseResult]) -> String {
    let Some(alone) = results.first() else { return String::new() };
    let mut rows: Vec<(String, Cell)> = vec![
        ("requests".into(), Box::new(|r| r.requests().0.to_string())),
        ("requests that failed".into(), Box::new(|r| r.requests().1.to_string())),
    ];
    service_rows(alone, &mut rows);
    let dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let rest: Vec<(&str, Cell)> = vec![
        ("GPU utilisation", Box::new(|r| format!("{:.0} %", r.gpu_util_pct))),
        ("SM activity", Box::new(|r| format!("{:.0} %", r.sm_activity_pct))),
        ("offline iterations", Box::new(|r| r.iterations.to_string())),
        (
            "offline work, in GPUs of its own",
            Box::new(move |r| dash(r.dedicated_gpus().map(|g| format!("{g:.2} of {}", r.gpus)))),
        ),
        ("oversold GPU", Box::new(move |r| dash(r.oversold().map(|o| format!("{o:.2}"))))),
        ("evictions", Box::new(|r| r.evictions.to_string())),
        (
            "errors contained",
            Box::new(|r| match r.injected.len() {
                0 => "-".into(),
                all => format!("{} of {all}", r.contained()),
            }),
        ),
        ("replicas restarted", Box::new(|r| r.replica_restarts.to_string())),
        ("replicas out of service", Box::new(|r| format!("{:.1} s", r.replicas_out_s))),
    ];
    rows.extend(rest.into_iter().map(|(name, cell)| (name.to_owned(), cell)));
    let mut table = Table::new(&["", ">services alone", ">with MuxFlow", ">without protection"]);
    for (name, cell) in rows {
        table.row(std::iter::once(name).chain(results.iter().map(cell)));
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(offline: Offline, p99_ms: f64) -> PhaseResult {
        PhaseResult {
            offline,
            day_s: 40.0,
            gpus: 4,
            services: vec![ServiceResult {
                name: "a".into(),
                requests: 100,
                failed: 1,
                p50_ms: 10.0,
                p99_ms,
                within_slo: Some(0.995),
                slo_ms: Some(40.0),
            }],
            iterations: 300,
            on_gpu_s: 120.0,
            solo_per_s: Some(5.0),
            gpu_util_pct: 50.0,
            sm_activity_pct: 40.0,
            evictions: 1,
            injected: vec![Injected {
                what: "x".into(),
                beside: "web".into(),
                at_s: 1.0,
                failed_after: 0,
                out_ms: 5,
            }],
            replica_restarts: 0,
            replicas_out_s: 0.2,
        }
    }

    #[test]
    fn the_table_compares_with_the_services_alone() {
        let text = table(&[result(Offline::None, 20.0), result(Offline::Protected, 30.0)]);
        assert!(text.contains("30.0 ms (1.50x)"), "{text}");
        assert!(text.contains("99.50 % of 40 ms"), "{text}");
        // 300 iterations at 5 per second are 60 s alone; they took 120 s on GPUs.
        assert!(text.contains("0.50") && text.contains("1.50 of 4"), "{text}");
        assert_eq!(table(&[]), "");
        let none = PhaseResult { on_gpu_s: 0.0, ..result(Offline::None, 1.0) };
        assert_eq!(none.oversold(), None);
    }
}
