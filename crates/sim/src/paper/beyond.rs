//! What goes beyond the paper, and what each part of it gains.

use muxflow_gpu_model::{Rng, WorkloadShape};
use muxflow_policy::cluster::pack::{Problem, SetValue, exhaustive, rounds, solve};

use super::evaluation::{cells, runs};
use super::{PaperOptions, TRACES, generated};
use crate::error::SimError;
use crate::metrics::RunResult;
use crate::number::float;
use crate::predictors::NamedPredictor;
use crate::report::render;
use crate::scenario::Scenario;

/// All of it.
pub(super) fn all(options: &PaperOptions, predictor: &NamedPredictor) -> Result<String, SimError> {
    Ok(format!(
        "{}{}{}",
        packing(options, predictor)?,
        budgets(options, predictor)?,
        fail_prone(options, predictor)?
    ))
}

/// Trace D with twice the jobs: a backlog, so that there is something to pack.
pub(super) fn backlog(options: &PaperOptions) -> Result<Scenario, SimError> {
    let mut scenario = generated(options, TRACES[3].1, 3)?;
    let jobs = scenario.jobs.clone();
    for (i, more) in jobs.iter().enumerate() {
        let mut again = more.clone();
        again.id = format!("{}-again-{i}", again.id);
        scenario.jobs.push(again);
    }
    scenario.jobs.sort_by(|a, b| a.submit_s.total_cmp(&b.submit_s));
    Ok(scenario)
}

/// A random small case: what each job is worth alone on each GPU, and what is left of it beside
/// each other job.
struct SmallCase {
    alone: Vec<Vec<f64>>,
    beside: Vec<Vec<f64>>,
}

impl SmallCase {
    fn draw(gpus: usize, jobs: usize, rng: &mut Rng) -> Self {
        let mut rows = |n: usize, m: usize, low: f64, high: f64| -> Vec<Vec<f64>> {
            (0..n).map(|_| (0..m).map(|_| rng.between(low, high)).collect()).collect()
        };
        SmallCase { alone: rows(gpus, jobs, 0.3, 1.0), beside: rows(jobs, jobs, 0.35, 0.75) }
    }
}

impl SetValue for SmallCase {
    fn value(&self, gpu: usize, jobs: &[usize]) -> Option<f64> {
        let worth = |i: usize| {
            let others = jobs.iter().enumerate().filter(|(k, _)| *k != i);
            self.alone[gpu][jobs[i]]
                * others.map(|(_, &b)| self.beside[jobs[i]][b]).product::<f64>()
        };
        Some((0..jobs.len()).map(worth).sum())
    }
}

/// How far the heuristic is from the best on small cases: mean and worst ratio, of the matching
/// rounds alone and of the whole.
fn distance(cases: usize, seed: u64) -> Result<[(f64, f64); 2], SimError> {
    let fail =
        |e: muxflow_policy::cluster::PlanError| SimError::Predictor { reason: e.to_string() };
    let mut rng = Rng::fork(seed, 71);
    let mut out = [(0.0, 1.0f64); 2];
    for _ in 0..cases {
        let case = SmallCase::draw(3, 7, &mut rng);
        let (gpus, jobs): (Vec<usize>, Vec<usize>) = ((0..3).collect(), (0..7).collect());
        let problem =
            Problem { gpu_kinds: &gpus, job_kinds: &jobs, most: 2, held: &[], values: &case };
        let best = exhaustive(&problem).total;
        let found = [
            rounds(&problem).map_err(|e| fail(e.into()))?.total,
            solve(&problem, 100_000).map_err(|e| fail(e.into()))?.total,
        ];
        for (sum, found) in out.iter_mut().zip(found) {
            sum.0 += found / best / float(cases);
            sum.1 = sum.1.min(found / best);
        }
    }
    Ok(out)
}

fn packing(options: &PaperOptions, predictor: &NamedPredictor) -> Result<String, SimError> {
    let cases = 500;
    let [first, whole] = distance(cases, options.seed)?;
    let r = runs(&backlog(options)?, &["muxflow", "muxflow-packed"], predictor, options.threads)?;
    let mut rows = vec![cells([
        "policy",
        "mean JCT",
        "median JCT",
        "99th percentile JCT",
        "makespan",
        "speed of all jobs together, first 12 h",
        "slowdown of services",
        "evicted",
    ])];
    for x in &r {
        let s = x.summary();
        let early: Vec<f64> =
            x.series.iter().filter(|p| p.at_s <= 12.0 * 3600.0).map(|p| p.oversold_now).collect();
        rows.push(vec![
            x.policy.clone(),
            hours(s.jct_mean_s),
            hours(s.jct_median_s),
            hours(s.jct_p99_s),
            hours(s.makespan_s),
            format!("{:.1} % of the GPUs", crate::number::mean(&early) * 100.0),
            format!("{:+.1} %", (s.slowdown - 1.0) * 100.0),
            format!("{:.2} %", s.eviction_pct),
        ]);
    }
    let (a, b) = (r[0].summary().jct_mean_s, r[1].summary().jct_mean_s);
    let shapes = WorkloadShape::built_in_list()?;
    let least = shapes.iter().map(|s| s.memory.0 >> 20).min().unwrap_or(0);
    Ok(format!(
        "## Beyond the paper: several jobs on one GPU

The paper puts at most one job beside a service, because with three workloads on a GPU the choice is NP-hard. `muxflow-packed` puts up to two: exact matchings in rounds, then local improvement, from two starts (`crates/policy/src/cluster/pack.rs`). What a GPU lends is cut into equal parts, since MPS caps each client alone; memory is lent up to the reserve instead of 40 %, or two jobs would never fit.

Distance from the best found by trying all, {cases} random cases of 3 GPUs and 7 jobs: matching rounds alone reach {:.2} % of it on average and {:.1} % at worst; with local improvement {:.2} % and {:.1} %.

Trace D with every job twice, so that jobs queue:

{}
Mean JCT {:.1} % {} with two jobs on a GPU. Each job is slower beside another one, so the gain is there only while jobs queue, and tails can grow: a job that got half a GPU keeps it until a restart pays. On a T4 only services with little memory leave room for two of our training jobs (each needs more than 5 GiB; the smallest service holds {} MiB), so most GPUs still hold one.

",
        first.0 * 100.0,
        first.1 * 100.0,
        whole.0 * 100.0,
        whole.1 * 100.0,
        render(&rows, true),
        (1.0 - b / a).abs() * 100.0,
        if b < a { "less" } else { "MORE" },
        least,
    ))
}

fn hours(seconds: f64) -> String {
    format!("{:.2} h", seconds / 3600.0)
}

fn budgets(options: &PaperOptions, predictor: &NamedPredictor) -> Result<String, SimError> {
    let mut scenario = generated(options, TRACES[3].1, 3)?;
    let strict = 0.02;
    for (service, budget) in scenario.services.iter_mut().zip([strict, 0.3, 0.3]) {
        service.slowdown_budget = budget;
    }
    let names = ["muxflow", "muxflow-threshold", "muxflow-budget"];
    let r = runs(&scenario, &names, predictor, options.threads)?;
    let mut head = cells(["policy", "mean JCT", "99th percentile JCT", "oversold"]);
    for s in &scenario.services {
        head.push(format!("{}, may {:.0} %", s.name, s.slowdown_budget * 100.0));
    }
    head.push("evicted".to_owned());
    let mut rows = vec![head];
    for x in &r {
        let s = x.summary();
        let mut row = vec![
            x.policy.clone(),
            hours(s.jct_mean_s),
            hours(s.jct_p99_s),
            format!("{:.1} %", s.oversold * 100.0),
        ];
        row.extend(x.by_service.iter().map(|(_, slow)| format!("{:+.1} %", (slow - 1.0) * 100.0)));
        row.push(format!("{:.2} %", s.eviction_pct));
        rows.push(row);
    }
    let (plain, one, each) = (r[0].summary(), r[1].summary(), r[2].summary());
    Ok(format!(
        "## Beyond the paper: a slowdown budget for each service

The paper leaves open how to choose the threshold for each service. Both policies below steer how much a service lends (its SM share, and the load that the gate holds) by the slowdown that is measured every 15 minutes; `muxflow-threshold` has one threshold for the whole cluster, which must be that of the strictest service, `muxflow-budget` one for each service. `muxflow` is the paper's rule, which knows no threshold. Trace D; one service may become {:.0} % slower, two may become 30 % slower.

{}
Against one threshold for all, budgets change mean JCT by {:+.1} % and oversold GPU by {:+.1} percentage points. The paper's rule slows the strict service by {:+.1} % where {:.0} % is allowed; a budget holds it at {:+.1} %, for which mean JCT changes by {:+.1} % and oversold GPU by {:+.1} percentage points against that rule. A strict service lends fewer SMs than the rule, which the planner sees, so that jobs go elsewhere; a tolerant one lends a higher load at its gate, and that only up to where health would complain. An earlier version of the law lent SMs beyond the forecast and held loads that the watch evicts for (22 % of executions).

",
        strict * 100.0,
        render(&rows, true),
        (each.jct_mean_s / one.jct_mean_s - 1.0) * 100.0,
        (each.oversold - one.oversold) * 100.0,
        (r[0].by_service[0].1 - 1.0) * 100.0,
        strict * 100.0,
        (r[2].by_service[0].1 - 1.0) * 100.0,
        (each.jct_mean_s / plain.jct_mean_s - 1.0) * 100.0,
        (each.oversold - plain.oversold) * 100.0,
    ))
}

fn fail_prone(options: &PaperOptions, predictor: &NamedPredictor) -> Result<String, SimError> {
    let mut scenario = generated(options, TRACES[3].1, 3)?;
    scenario.fail_prone = 0.05;
    scenario.services[0].critical = true;
    let blind = Scenario { mark_fail_prone: false, ..scenario.clone() };
    let of = |s: &Scenario| -> Result<RunResult, SimError> {
        runs(s, &["muxflow"], predictor, 1)?
            .pop()
            .ok_or(SimError::Predictor { reason: "no run".to_owned() })
    };
    let (without, with) = (of(&blind)?, of(&scenario)?);
    let mut rows = vec![cells([
        "fail-prone jobs",
        "jobs marked",
        "errors that reached a service",
        "of these, the critical one",
        "requests lost",
        "of these, critical",
        "mean JCT",
    ])];
    for (name, x) in [("placed anywhere", &without), ("kept off critical services", &with)] {
        let c = x.counts;
        rows.push(vec![
            name.to_owned(),
            c.marked.to_string(),
            c.propagated.to_string(),
            c.propagated_to_critical.to_string(),
            c.lost_requests.to_string(),
            c.lost_critical.to_string(),
            hours(x.summary().jct_mean_s),
        ]);
    }
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    let saved = 1.0 - with.counts.lost_critical as f64 / without.counts.lost_critical.max(1) as f64;
    Ok(format!(
        "## Beyond the paper: fail-prone jobs off critical services

Assumed: {:.0} % of the jobs break after {:.0} minutes on a GPU on average, again and again, and each time take the service beside them along, which is away for {:.0} s while it restarts; one of the three services is critical. A job is marked after three failures within two hours (the retry rule of the real manager) and then never placed beside a critical service. The first failures of a job cannot be foreseen, so not all losses go away.

{}
Marking saves {:.0} % of the critical service's lost requests.

",
        scenario.fail_prone * 100.0,
        scenario.breaks_after_s / 60.0,
        scenario.outage_s,
        render(&rows, true),
        saved * 100.0
    ))
}
