//! The forecaster on real request rates: clients of a public LLM service (Alibaba ServeGen), two weeks
//! in steps of ten minutes. A client's rate stands in for the SM activity of a service: what matters
//! here is how it moves, not what it is.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test fails loudly and shows its table"
)]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::PathBuf;

use muxflow_policy::node::forecast::{ActivityForecaster, Basis, ForecastParams};
use muxflow_types::{Micros, Percent};

const STEP_S: u64 = 600;
const PER_DAY: usize = 144;
const COVERAGE: f64 = 0.95;

#[expect(clippy::disallowed_methods, reason = "a test finds its data")]
fn shared_data() -> PathBuf {
    match std::env::var_os("MUXFLOW_SHARED_DATA") {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data"),
    }
}

/// Request rates by client; `None` when the data is not here.
#[expect(clippy::disallowed_methods, reason = "a test reads its data")]
fn clients() -> Option<BTreeMap<u32, Vec<f64>>> {
    let path = shared_data().join("alibaba-servegen/language_m-small.csv.gz");
    let Ok(file) = std::fs::File::open(&path) else {
        let text = format!(
            "SKIPPED: {} is not there; set MUXFLOW_SHARED_DATA to the folder that holds alibaba-servegen",
            path.display()
        );
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{text}");
        println!("{text}");
        return None;
    };
    let mut text = String::new();
    flate2::read::GzDecoder::new(file).read_to_string(&mut text).unwrap();
    let mut clients: BTreeMap<u32, Vec<f64>> = BTreeMap::new();
    for line in text.lines().skip(1) {
        let mut fields = line.split(',');
        let client = fields.next().unwrap().parse().unwrap();
        let rate = fields.nth(1).unwrap().parse().unwrap();
        clients.entry(client).or_default().push(rate);
    }
    Some(clients)
}

struct Outcome {
    covered: f64,
    lent: f64,
}

fn ours(trace: &[f64], skip: usize) -> Outcome {
    let params = ForecastParams { interval: Micros::from_secs(STEP_S), ..Default::default() };
    let mut forecaster = ActivityForecaster::new(params, COVERAGE);
    let (mut covered, mut lent, mut scored) = (0u32, 0.0, 0u32);
    for (step, &value) in trace.iter().enumerate() {
        let at = Micros::from_secs(step as u64 * STEP_S);
        let demand = forecaster.demand(at);
        if step >= skip {
            assert_eq!(demand.basis, Basis::Errors);
            scored += 1;
            lent += demand.activity.complement().fraction();
            covered += u32::from(value <= demand.activity.fraction() + 1e-9);
        }
        forecaster.observe(at, Percent::from_fraction(value).unwrap());
    }
    Outcome { covered: f64::from(covered) / f64::from(scored), lent: lent / f64::from(scored) }
}

fn last_value_plus(trace: &[f64], margin: f64, skip: usize) -> Outcome {
    let (mut covered, mut lent, mut scored) = (0u32, 0.0, 0u32);
    for pair in trace[skip - 1..].windows(2) {
        let bound = (pair[0] + margin).min(1.0);
        scored += 1;
        lent += 1.0 - bound;
        covered += u32::from(pair[1] <= bound + 1e-9);
    }
    Outcome { covered: f64::from(covered) / f64::from(scored), lent: lent / f64::from(scored) }
}

#[test]
fn the_bound_holds_on_real_request_rates() {
    let Some(clients) = clients() else { return };
    // Two days to learn, twelve to score. Clients that hardly ever ask have nothing to predict.
    let skip = 2 * PER_DAY;
    let busy = |trace: &&Vec<f64>| trace.iter().filter(|r| **r > 0.0).count() * 2 > trace.len();
    let traces: Vec<Vec<f64>> = clients
        .values()
        .filter(busy)
        .map(|trace| {
            let peak = trace.iter().copied().fold(0.0, f64::max);
            trace.iter().map(|rate| rate / peak * 0.9).collect()
        })
        .collect();
    assert!(traces.len() >= 10, "only {} clients", traces.len());
    let count = traces.len() as f64;
    let mean = |of: &dyn Fn(&[f64]) -> f64| traces.iter().map(|t| of(t)).sum::<f64>() / count;
    let worst = |of: &dyn Fn(&[f64]) -> f64| traces.iter().map(|t| of(t)).fold(1.0, f64::min);

    println!("{} clients, coverage asked: {COVERAGE}", traces.len());
    println!("                        covered: mean  worst | lent: mean");
    let outcomes: Vec<Outcome> = traces.iter().map(|trace| ours(trace, skip)).collect();
    let covered = outcomes.iter().map(|o| o.covered).sum::<f64>() / count;
    let covered_worst = outcomes.iter().map(|o| o.covered).fold(1.0, f64::min);
    let lent = outcomes.iter().map(|o| o.lent).sum::<f64>() / count;
    println!("ours                           {covered:.4} {covered_worst:.4} | {lent:.4}");
    let mut equal = None;
    for percent in [2u32, 5, 10, 15, 20, 25, 30] {
        let margin = f64::from(percent) / 100.0;
        let covered_mean = mean(&|t| last_value_plus(t, margin, skip).covered);
        let worst = worst(&|t| last_value_plus(t, margin, skip).covered);
        let lent = mean(&|t| last_value_plus(t, margin, skip).lent);
        println!("last value + {percent:2} points        {covered_mean:.4} {worst:.4} | {lent:.4}");
        if worst >= covered_worst && equal.is_none() {
            equal = Some(lent);
        }
    }
    assert!((covered - COVERAGE).abs() <= 0.01, "mean coverage {covered}");
    assert!(covered_worst >= COVERAGE - 0.03, "worst coverage {covered_worst}");
    // A fixed margin that protects the most restless client as well must lend less to all.
    let equal = equal.unwrap_or(0.0);
    assert!(lent > equal, "lends {lent}; a fixed margin of the same worst case lends {equal}");
}
