//! A node as it is in a cluster: a real kubelet, containerd and runc, the agent with its device
//! plugin, emulated GPUs, and pods whose containers are clients of the CUDA driver.
//!
//! One node serves all scenarios, one after the other; so this is a program of its own and not a set
//! of `#[test]`s. `cargo xtask kubernetes test kubelet` runs them. They need root and runc.

#![expect(clippy::unwrap_used, reason = "a test; without libtest the lint does not know")]

mod claims;
mod install;
mod life;
mod pods;
mod scaling;
mod serving;
mod stage;
mod start;

use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use muxflow_test_cluster::{scenarios, skip_or_fail};

use stage::Stage;

type Scenario = for<'a> fn(&'a mut Stage) -> LocalBoxFuture<'a, ()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("kubelet_offers_what_the_plugin_tells", |s| start::capacity(s).boxed_local()),
    ("kubelet_gives_a_service_its_gpu", |s| start::service(s).boxed_local()),
    ("kubelet_gives_pods_that_start_together_the_planned_gpus", |s| {
        start::together(s).boxed_local()
    }),
    ("kubelet_prepares_claims_beside_devices", |s| claims::claims(s).boxed_local()),
    ("kubelet_gives_nobody_a_gpu_that_is_disabled", |s| serving::disabled(s).boxed_local()),
    ("kubelet_rolls_out_and_scales_a_service", |s| serving::rollout(s).boxed_local()),
    ("kubelet_that_restarts_has_its_capacity_back", |s| life::restart(s).boxed_local()),
    ("kubelet_keeps_pods_whose_agent_is_uninstalled", |s| life::agent_updated(s).boxed_local()),
    ("kubelet_deletes_a_pod_that_was_drained", |s| life::deleted(s).boxed_local()),
    ("kubelet_runs_a_job_that_is_held_and_evicted", |s| life::evicted(s).boxed_local()),
];

#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let chosen = scenarios::chosen(SCENARIOS, &arguments);
    if chosen.is_empty() {
        return ExitCode::SUCCESS;
    }
    let command = "cargo xtask kubernetes test kubelet";
    if let Err(end) = scenarios::now(chosen.len(), "with a real kubelet, as root", command) {
        return end;
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
    scenarios::ended(chosen.len(), &failed)
}

#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
async fn run_all(stage: &mut Stage, chosen: &[&(&'static str, Scenario)]) -> Vec<&'static str> {
    let mut failed = Vec::new();
    for (name, scenario) in chosen {
        let started = Instant::now();
        let limit = Duration::from_secs(300);
        let run = async {
            stage.clean().await;
            scenario(stage).await;
        };
        let run = AssertUnwindSafe(tokio::time::timeout(limit, run)).catch_unwind();
        let ok = matches!(run.await, Ok(Ok(())));
        scenarios::told(name, ok, started);
        if !ok {
            println!("{}", stage.told());
            failed.push(*name);
            // It may have failed between the removal and the next installation.
            stage.chart.install().await;
        }
    }
    failed
}
