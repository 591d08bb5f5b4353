//! A node as it is in a cluster: a real kubelet, containerd and runc, the agent with its device
//! plugin, emulated GPUs, and pods whose containers are clients of the CUDA driver.
//!
//! One node serves all scenarios, one after the other; so this is a program of its own and not a set
//! of `#[test]`s. `cargo xtask kubernetes test kubelet` runs them. They need root and runc.

#![expect(clippy::unwrap_used, reason = "a test; without libtest the lint does not know")]

mod life;
mod pods;
mod stage;
mod start;

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use muxflow_test_cluster::skip_or_fail;

use stage::Stage;

/// As for the scenarios without a kubelet.
const OPT_IN: &str = "MUXFLOW_KUBERNETES_TESTS";

type Scenario = for<'a> fn(&'a mut Stage) -> LocalBoxFuture<'a, ()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("kubelet_offers_what_the_plugin_tells", |s| start::capacity(s).boxed_local()),
    ("kubelet_gives_a_service_its_gpu", |s| start::service(s).boxed_local()),
    ("kubelet_gives_pods_that_start_together_the_planned_gpus", |s| {
        start::together(s).boxed_local()
    }),
    ("kubelet_that_restarts_has_its_capacity_back", |s| life::restart(s).boxed_local()),
    ("kubelet_deletes_a_pod_that_was_drained", |s| life::deleted(s).boxed_local()),
    ("kubelet_runs_a_job_that_is_held_and_evicted", |s| life::evicted(s).boxed_local()),
];

#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.iter().any(|a| a == "--list") {
        for (name, _) in SCENARIOS {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let words: Vec<&String> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let wanted = |name: &str| words.is_empty() || words.iter().any(|w| name.contains(w.as_str()));
    let chosen: Vec<_> = SCENARIOS.iter().filter(|(name, _)| wanted(name)).collect();
    if chosen.is_empty() {
        return ExitCode::SUCCESS;
    }
    if std::env::var_os(OPT_IN).is_none_or(|word| word != "1") {
        return not_now(chosen.len());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let started = Instant::now();
    let mut stage = match runtime.block_on(Stage::start()) {
        Ok(stage) => stage,
        Err(error) => {
            skip_or_fail("the scenarios with a kubelet", &error);
            return ExitCode::SUCCESS;
        }
    };
    println!("node up after {:.1} s", started.elapsed().as_secs_f64());
    let failed = runtime.block_on(run_all(&mut stage, &chosen));
    println!("{} scenarios, {} failed: {failed:?}", chosen.len(), failed.len());
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What a plain `cargo test` does: it says so, and with `CI=true` that is a failure, unless the
/// scenarios are a later step.
#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
fn not_now(scenarios: usize) -> ExitCode {
    if std::env::var(OPT_IN).is_ok_and(|word| word == "later") {
        println!("\n{scenarios} scenarios with a real kubelet: a later step\n");
        return ExitCode::SUCCESS;
    }
    println!(
        "\n*** NOT RUN: {scenarios} scenarios with a real kubelet; run them with `cargo xtask kubernetes test kubelet` as root or set {OPT_IN}=1\n"
    );
    let ci = std::env::var("CI").is_ok_and(|word| word == "true");
    if ci { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
async fn run_all(stage: &mut Stage, chosen: &[&(&'static str, Scenario)]) -> Vec<&'static str> {
    let mut failed = Vec::new();
    for (name, scenario) in chosen {
        let started = Instant::now();
        stage.clean().await;
        let limit = Duration::from_secs(240);
        let run = AssertUnwindSafe(tokio::time::timeout(limit, scenario(stage))).catch_unwind();
        let ok = matches!(run.await, Ok(Ok(())));
        let word = if ok { "ok" } else { "FAILED" };
        println!("test {name} ... {word} ({:.1} s)", started.elapsed().as_secs_f64());
        if !ok {
            println!("{}", stage.told());
            failed.push(*name);
        }
    }
    failed
}
