//! Test bed, comparison, ablation, errors, overhead and deployment.

use super::{PaperOptions, TRACES, generated};
use crate::compare::compare;
use crate::error::SimError;
use crate::metrics::{RunResult, Summary};
use crate::predictors::NamedPredictor;
use crate::report::render;
use crate::scenario::Scenario;

pub(super) fn runs(
    scenario: &Scenario,
    names: &[&str],
    predictor: &NamedPredictor,
    threads: usize,
) -> Result<Vec<RunResult>, SimError> {
    let names: Vec<String> = names.iter().map(|n| (*n).to_owned()).collect();
    compare(scenario, &names, predictor, threads, &|_, _, _| {})
}

pub(super) fn cells<const N: usize>(row: [&str; N]) -> Vec<String> {
    row.map(str::to_owned).to_vec()
}

/// Figure of the test bed: twelve hours, Online-only against MuxFlow.
pub(super) fn testbed(
    options: &PaperOptions,
    predictor: &NamedPredictor,
) -> Result<String, SimError> {
    let mut scenario = generated(options, TRACES[3].1, 3)?;
    scenario.horizon_s = 12.0 * 3600.0;
    let r = runs(&scenario, &["online-only", "muxflow"], predictor, options.threads)?;
    let (alone, ours) = (r[0].summary(), r[1].summary());
    let peak = r[1].series.iter().map(|p| p.speed).fold(0.0, f64::max);
    let times = |a: f64, b: f64| format!("{:.1}×", a / b.max(1e-9));
    let rows = vec![
        cells(["metric", "published", "ours"]),
        cells(["mean latency", "+16.0 %", &format!("{:+.1} %", (ours.slowdown - 1.0) * 100.0)]),
        cells([
            "99th percentile",
            "+15.3 %",
            &format!("{:+.1} %", (ours.p99_slowdown - 1.0) * 100.0),
        ]),
        cells([
            "GPU given to offline work (oversold)",
            "up to 86.42 %",
            &format!("{:.1} % (at most {:.1} %)", ours.oversold * 100.0, peak * 100.0),
        ]),
        cells(["GPU utilisation", "4.0×", &times(ours.gpu_util, alone.gpu_util)]),
        cells(["SM activity", "4.7×", &times(ours.sm_activity, alone.sm_activity)]),
        cells(["GPU memory", "1.5×", &times(ours.memory, alone.memory)]),
        cells(["executions evicted", "1.5 %", &format!("{:.2} %", ours.eviction_pct)]),
        cells(["errors that reached a service", "0", &r[1].counts.propagated.to_string()]),
    ];
    Ok(format!(
        "## Test bed, 12 hours

{}
The size of the slowdown follows from the interference and the wait for blocks that our T4 was given, see the head of this page; that it comes out near the published one was not fitted. Our services start from higher use (GPU utilisation {:.0} % alone), so that ratios are smaller. That nothing is evicted has three reasons. The gate is taken as settled, so SM activity and clock never pass their limits, where a real gate is late by a tenth of a second. Health is shown the p99 that a rate has in the long run, once a minute; the real agent sees that of the last requests, which wanders, and evicts after 0.3 s over the limit. And bursts end at the highest rate of the service, where its p99 is still far below 120 % of what it may be (translation alone: 96 ms of 200). Bursts themselves are not missing: ours (60 % more for a few minutes) take 0.4 % of the time; of the eight largest clients of ServeGen's m-small, seven have 0 to 0.4 % of their ten-minute windows 60 % above the hour's median and one has 3.5 %, and a minute of Azure's conversations is never more than 29 % above the ten minutes around it (Azure's code completions, 2.5 requests a second, reach twelve times; we have no such service). Memory that grows, which evicts too, is not simulated.

",
        render(&rows, true),
        alone.gpu_util * 100.0
    ))
}

const COMPARED: [&str; 7] = [
    "online-only",
    "time-sharing",
    "pb-time-sharing",
    "muxflow",
    "muxflow-s",
    "muxflow-m",
    "muxflow-s-m",
];

struct TraceResult {
    name: String,
    jobs: usize,
    summaries: Vec<Summary>,
    planning_s: f64,
    plans: u64,
}

fn one_trace(
    name: &str,
    scenario: &Scenario,
    options: &PaperOptions,
    predictor: &NamedPredictor,
) -> Result<TraceResult, SimError> {
    let results = runs(scenario, &COMPARED, predictor, options.threads)?;
    Ok(TraceResult {
        name: name.to_owned(),
        jobs: scenario.jobs.len(),
        planning_s: results[3].spent.planning_s,
        plans: results[3].counts.plans,
        summaries: results.iter().map(RunResult::summary).collect(),
    })
}

/// Comparison with related work, ablation and overhead, on all traces.
pub(super) fn traces(
    options: &PaperOptions,
    predictor: &NamedPredictor,
    say: &mut dyn FnMut(&str),
) -> Result<String, SimError> {
    let mut all = Vec::new();
    for (i, (name, jobs)) in TRACES.iter().enumerate() {
        say(&format!("trace {name}"));
        let scenario = generated(options, *jobs, i as u64)?;
        all.push(one_trace(name, &scenario, options, predictor)?);
    }
    for (name, jobs) in &options.real {
        say(&format!("real trace {name}"));
        let scenario = Scenario::new("T4", options.gpus, jobs.clone(), options.seed)?;
        all.push(one_trace(name, &scenario, options, predictor)?);
    }
    Ok(format!("{}{}{}{}", comparison(&all), ablation(&all), trends(&all), overhead(&all)))
}

fn comparison(all: &[TraceResult]) -> String {
    let mut rows = vec![cells([
        "trace",
        "jobs",
        "slowdown: time-sharing",
        "PB",
        "MuxFlow",
        "JCT against MuxFlow: time-sharing",
        "PB",
        "oversold: time-sharing",
        "PB",
        "MuxFlow",
    ])];
    for t in all {
        let s = &t.summaries;
        let slow = |i: usize| format!("{:+.1} %", (s[i].slowdown - 1.0) * 100.0);
        let jct = |i: usize| format!("{:.2}×", s[i].jct_mean_s / s[3].jct_mean_s.max(1e-9));
        let sold = |i: usize| format!("{:.1} %", s[i].oversold * 100.0);
        rows.push(vec![
            t.name.clone(),
            t.jobs.to_string(),
            slow(1),
            slow(2),
            slow(3),
            jct(1),
            jct(2),
            sold(1),
            sold(2),
            sold(3),
        ]);
    }
    format!(
        "## Comparison with related work

{}
Published: JCT of the baselines 1.10 to 2.24 times MuxFlow's, oversold GPU 1.08 to 1.97 times as much with MuxFlow, slowdown below 20 % with MuxFlow and up to 50 % with time-sharing. Oversold is corrected to Σ separate time / Σ real time. Time-sharing gives equal slices, PB-time-sharing slices six times as long to the service (the paper gives no number); both place first in, first out.

",
        render(&rows, true)
    )
}

fn ablation(all: &[TraceResult]) -> String {
    let mut rows = vec![cells([
        "trace",
        "JCT against MuxFlow: -S",
        "-M",
        "-S-M",
        "oversold: MuxFlow",
        "-S",
        "-M",
        "-S-M",
        "slowdown: MuxFlow",
        "-S",
        "-M",
        "-S-M",
    ])];
    for t in all {
        let s = &t.summaries;
        let mut row = vec![t.name.clone()];
        row.extend(
            [4, 5, 6].map(|i| format!("{:.3}×", s[i].jct_mean_s / s[3].jct_mean_s.max(1e-9))),
        );
        row.extend([3, 4, 5, 6].map(|i| format!("{:.1} %", s[i].oversold * 100.0)));
        row.extend([3, 4, 5, 6].map(|i| format!("{:+.2} %", (s[i].slowdown - 1.0) * 100.0)));
        rows.push(row);
    }
    format!(
        "## Ablation: mechanisms for offline efficiency

-S fixes the share at 40 %, -M places first in, first out onto random Healthy GPUs, -S-M does both.

{}
",
        render(&rows, true)
    )
}

/// By how much a trend holds (positive) or not, relative.
type Margin = fn(&[Summary]) -> f64;

/// Margins below this are printed as ties: another seed may turn them.
const TIE: f64 = 0.002;

fn less(a: f64, b: f64) -> f64 {
    1.0 - a / b.max(1e-9)
}

const TRENDS: [(&str, Margin); 7] = [
    ("MuxFlow slows services by less than 20 %", |s| {
        less(s[3].slowdown, 1.2).min(less(s[3].p99_slowdown, 1.2))
    }),
    ("JCT better than time-sharing", |s| less(s[3].jct_mean_s, s[1].jct_mean_s)),
    ("JCT better than PB-time-sharing", |s| less(s[3].jct_mean_s, s[2].jct_mean_s)),
    ("oversold better than both", |s| {
        less(s[1].oversold, s[3].oversold).min(less(s[2].oversold, s[3].oversold))
    }),
    ("-S better than -S-M (JCT and oversold)", |s| {
        less(s[4].jct_mean_s, s[6].jct_mean_s).min(less(s[6].oversold, s[4].oversold))
    }),
    ("-M better than -S-M (JCT and oversold)", |s| {
        less(s[5].jct_mean_s, s[6].jct_mean_s).min(less(s[6].oversold, s[5].oversold))
    }),
    ("MuxFlow better than -S and -M (JCT)", |s| {
        less(s[3].jct_mean_s, s[4].jct_mean_s).min(less(s[3].jct_mean_s, s[5].jct_mean_s))
    }),
];

/// What a margin says; a tie shows nothing either way.
fn verdict(margin: f64) -> &'static str {
    if margin.is_nan() || margin <= -TIE {
        "does NOT hold"
    } else if margin < TIE {
        "tie"
    } else {
        "holds"
    }
}

fn trends(all: &[TraceResult]) -> String {
    let mut rows = vec![
        std::iter::once("trend".to_owned()).chain(all.iter().map(|t| t.name.clone())).collect(),
    ];
    let mut others = Vec::new();
    for (words, margin) in TRENDS {
        let mut row = vec![words.to_owned()];
        for t in all {
            let margin = margin(&t.summaries);
            let said = verdict(margin);
            row.push(format!("{said} ({:+.1} %)", margin * 100.0));
            if said != "holds" {
                others.push(format!("\"{words}\" on {}: {said}", t.name));
            }
        }
        rows.push(row);
    }
    let word = if others.is_empty() {
        "All published trends hold on all traces.".to_owned()
    } else {
        format!("Not shown: {}.", others.join("; "))
    };
    format!(
        "## Published trends

In brackets: by how much, relative, in the metric where it is least. Below {:.1} % either way is a tie and shows nothing.

{}
{word}

",
        TIE * 100.0,
        render(&rows, true)
    )
}

fn overhead(all: &[TraceResult]) -> String {
    let mut rows =
        vec![cells(["trace", "jobs", "plans", "predicting and matching in all", "per plan"])];
    for t in all {
        #[expect(clippy::cast_precision_loss, reason = "a count of plans")]
        let per = t.planning_s / t.plans.max(1) as f64;
        rows.push(vec![
            t.name.clone(),
            t.jobs.to_string(),
            t.plans.to_string(),
            format!("{:.2} s", t.planning_s),
            format!("{:.1} ms", per * 1e3),
        ]);
    }
    format!(
        "## Overhead

{}
Published: below 10 minutes to profile a workload (we charge 5 minutes for the first job of each workload), seconds to predict, minutes to match. Equal GPUs and equal jobs are collapsed into classes here, which is exact; `docs/benchmarks.md` has the matching without classes. Times are wall times of one machine with other work on it, and the only numbers on this page that are not fixed by the seed.

",
        render(&rows, true)
    )
}

/// Figure of propagated errors: with the exit that drains, and without.
pub(super) fn errors(
    options: &PaperOptions,
    predictor: &NamedPredictor,
) -> Result<String, SimError> {
    let mut gentle = generated(options, TRACES[3].1, 3)?;
    gentle.cancelled = 0.05;
    let rough = Scenario { graceful_exit: false, ..gentle.clone() };
    let of = |s: &Scenario| -> Result<RunResult, SimError> {
        runs(s, &["muxflow-s-m"], predictor, 1)?
            .pop()
            .ok_or(SimError::Predictor { reason: "no run".to_owned() })
    };
    let (with, without) = (of(&gentle)?, of(&rough)?);
    let line = |r: &RunResult| {
        let c = r.counts;
        let share = if c.propagated > 0 {
            format!("{:.1} %", c.propagated_by_signal as f64 / c.propagated as f64 * 100.0)
        } else {
            "-".to_owned()
        };
        [c.propagated.to_string(), c.propagated_by_signal.to_string(), share]
    };
    let (a, b) = (line(&without), line(&with));
    let rows = vec![
        cells(["stops", "errors that reached a service", "by SIGINT or SIGTERM", "share"]),
        cells(["killed (plain MPS)", &a[0], &a[1], &a[2]]),
        cells(["drained first (MuxFlow)", &b[0], &b[1], &b[2]]),
    ];
    Ok(format!(
        "## Propagated errors

One day, 5 % of the jobs cancelled by their users with a signal while they run.

{}
Published: 99 % of propagated errors come from SIGINT and SIGTERM; with graceful exit none is left of these. That a killed client takes its neighbour along half of the time is our assumption; the rates of crashes, hangs and XID 31 follow from the published error devices. The share is therefore a consistency check, not a finding.

",
        render(&rows, true)
    ))
}

/// Figures of the deployment: utilisation and error devices, without dynamic SM and matching.
pub(super) fn deployment(
    options: &PaperOptions,
    predictor: &NamedPredictor,
) -> Result<String, SimError> {
    // As many jobs as keep every GPU busy: production has a backlog.
    let mut scenario = super::beyond::backlog(options)?;
    scenario.horizon_s = 24.0 * 3600.0;
    let r = runs(&scenario, &["online-only", "muxflow-s-m"], predictor, options.threads)?;
    let (alone, ours) = (r[0].summary(), r[1].summary());
    let pair = |a: f64, b: f64| format!("{:.0} → {:.0} %", a * 100.0, b * 100.0);
    let rows = vec![
        cells(["metric", "published", "ours"]),
        cells(["GPU utilisation", "26 → 76 %", &pair(alone.gpu_util, ours.gpu_util)]),
        cells(["SM activity", "16 → 33 %", &pair(alone.sm_activity, ours.sm_activity)]),
        cells(["GPU memory", "42 → 48 %", &pair(alone.memory, ours.memory)]),
        cells([
            "error devices per day",
            "0.7 → below 0.9 %",
            &format!("{:.2} → {:.2} %", alone.error_device_pct, ours.error_device_pct),
        ]),
        cells([
            "latency, mean and 99th percentile",
            "less than 10 ms more",
            &format!(
                "{:.1} ms and {:.1} ms more",
                ours.latency_ms - alone.latency_ms,
                ours.p99_ms - alone.p99_ms
            ),
        ]),
    ];
    Ok(format!(
        "## Production deployment

MuxFlow-S-M (the paper's deployment had neither dynamic SM allocation nor matching), twice the jobs of trace D, one day.

{}
The rates of device errors are inputs of the model, so their row shows only that they arrive where they should. Memory grows more in our simulation than published: our jobs use most of their quota.

",
        render(&rows, true)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_seed_may_turn_is_a_tie() {
        assert_eq!(verdict(less(99.0, 100.0)), "holds");
        assert_eq!(verdict(less(99.9, 100.0)), "tie");
        assert_eq!(verdict(less(100.0, 100.0)), "tie");
        assert_eq!(verdict(less(100.1, 100.0)), "tie");
        assert_eq!(verdict(less(101.0, 100.0)), "does NOT hold");
        assert_eq!(verdict(f64::NAN), "does NOT hold");
    }
}
