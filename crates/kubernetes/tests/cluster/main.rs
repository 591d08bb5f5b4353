//! The scheduler against a real API server: etcd, API server and controller manager of a current
//! Kubernetes, with nodes and GPUs that the scenarios write.
//!
//! One control plane serves all scenarios, one after the other; so this is a program of its own and
//! not a set of `#[test]`s. `cargo xtask kubernetes test overlimit` runs those whose name contains a
//! word. Called with `scheduler`, the program is a scheduler: the one that a scenario kills.

#![expect(clippy::unwrap_used, reason = "a test; without libtest the lint does not know")]

mod bench;
mod chart;
mod dra;
mod faults;
mod install;
mod node;
mod placing;
mod proxy;
mod rights;
mod world;

use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use kube::Client;
use muxflow_test_cluster::{Cluster, scenarios};

use world::{FakeKubelet, World};

/// What a scenario gets.
pub(crate) struct Stage {
    pub(crate) cluster: Cluster,
    pub(crate) client: Client,
    pub(crate) world: World,
}

impl Stage {
    /// A client for a scheduler: with the rights that the chart gives it and no others.
    pub(crate) async fn limited(&self) -> Client {
        install::limited(self, "muxflow-scheduler").await
    }
}

type Scenario = for<'a> fn(&'a mut Stage) -> LocalBoxFuture<'a, ()>;

const SCENARIOS: &[(&str, Scenario)] = &[
    ("the_definitions_refuse_nonsense", |s| install::definitions(s).boxed_local()),
    ("the_chart_renders_validates_and_leaves_pods_alone", |s| chart::chart(s).boxed_local()),
    ("an_agent_reports_admits_and_evicts_with_its_rights", |s| {
        node::life_of_a_guest(s).boxed_local()
    }),
    ("an_agent_holds_whom_a_budget_keeps", |s| node::a_budget_says_no(s).boxed_local()),
    ("an_agent_that_restarts_loses_nobody", |s| node::restarted(s).boxed_local()),
    ("an_agent_that_leaves_says_so_first", |s| node::leaving(s).boxed_local()),
    ("deleting_a_pod_drains_it", |s| node::deleting_drains(s).boxed_local()),
    ("a_claim_is_allocated_prepared_and_let_go", |s| dra::claims(s).boxed_local()),
    ("gpus_profiles_and_models_print_as_tables", |s| install::table(s).boxed_local()),
    ("a_job_takes_the_best_gpu", |s| placing::best_gpu(s).boxed_local()),
    ("jobs_run_are_evicted_on_overlimit_and_finish", |s| placing::overlimit(s).boxed_local()),
    ("constraints_are_kept_and_named", |s| placing::constraints(s).boxed_local()),
    ("only_pods_that_come_back_are_moved", |s| placing::moving(s).boxed_local()),
    ("a_job_that_pays_for_evictions_is_not_moved", |s| placing::punished(s).boxed_local()),
    ("a_higher_priority_goes_first", |s| placing::priorities(s).boxed_local()),
    ("pods_and_jobs_that_are_held_back_wait", |s| placing::admitted(s).boxed_local()),
    ("a_model_of_the_cluster_predicts", |s| placing::model(s).boxed_local()),
    ("a_scheduler_with_nothing_to_place_rests", |s| placing::idle(s).boxed_local()),
    ("a_quota_is_kept", |s| placing::quota(s).boxed_local()),
    ("a_budget_delays_an_eviction", |s| placing::budget(s).boxed_local()),
    ("a_gpu_held_twice_is_repaired", |s| placing::doubled(s).boxed_local()),
    ("the_leader_is_killed", |s| faults::leader_killed(s).boxed_local()),
    ("the_lease_is_stolen", |s| faults::lease_stolen(s).boxed_local()),
    ("rivals_write_at_the_same_time", |s| faults::rivals(s).boxed_local()),
    ("the_api_server_restarts", |s| faults::api_server_restarts(s).boxed_local()),
    ("the_watches_are_dropped", |s| faults::watches_dropped(s).boxed_local()),
    ("every_right_is_needed_and_enough", |s| rights::needed(s).boxed_local()),
];

#[expect(clippy::print_stdout, reason = "a test program reports on its output")]
fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // RUST_LOG=info shows what the schedulers do.
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(
            std::env::var("RUST_LOG").unwrap_or_else(|_| "off".to_owned()),
        ))
        .with_writer(std::io::stderr)
        .init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    if let [word, kubeconfig, identity] = arguments.as_slice()
        && word == "scheduler"
    {
        runtime.block_on(be_a_scheduler(kubeconfig.into(), identity));
        return ExitCode::SUCCESS;
    }
    let bench = bench::wanted(&arguments);
    let chosen = scenarios::chosen(SCENARIOS, &arguments);
    if chosen.is_empty() && bench.is_none() {
        return ExitCode::SUCCESS;
    }
    let what = "on a real Kubernetes control plane";
    if let Err(end) = scenarios::now(chosen.len(), what, "cargo xtask kubernetes test") {
        return end;
    }
    let started = Instant::now();
    let cluster = match Cluster::start() {
        Ok(cluster) => cluster,
        Err(error) => {
            muxflow_test_cluster::skip_or_fail("the tests on a Kubernetes cluster", &error);
            return ExitCode::SUCCESS;
        }
    };
    println!("control plane up after {:.1} s", started.elapsed().as_secs_f64());
    if let Some(size) = bench {
        runtime.block_on(bench::run(cluster, size));
        return ExitCode::SUCCESS;
    }
    let failed = runtime.block_on(run_all(cluster, &chosen));
    scenarios::ended(chosen.len(), &failed)
}

/// How long a scenario may take, what the one before it left included. One has dozens of programs wait
/// for their refusals, on a machine that may be busy.
fn limit(scenario: &str) -> Duration {
    Duration::from_secs(if scenario.starts_with("every_right") { 600 } else { 180 })
}

async fn run_all(cluster: Cluster, chosen: &[&(&'static str, Scenario)]) -> Vec<&'static str> {
    let client = world::client(&cluster.kubeconfig()).await;
    let mut stage = Stage { world: World::new(&client), client, cluster };
    install::install(&stage).await;
    let mut failed = Vec::new();
    for (name, scenario) in chosen {
        let started = Instant::now();
        let run = async {
            stage.world.clean().await;
            let _kubelet = FakeKubelet::start(stage.client.clone());
            scenario(&mut stage).await;
        };
        let run = AssertUnwindSafe(tokio::time::timeout(limit(name), run)).catch_unwind();
        let ok = matches!(run.await, Ok(Ok(())));
        scenarios::told(name, ok, started);
        if !ok {
            failed.push(*name);
        }
    }
    failed
}

async fn be_a_scheduler(kubeconfig: PathBuf, identity: &str) {
    let client = world::client(&kubeconfig).await;
    let forever = std::future::pending();
    let mut settings = world::settings(identity);
    if identity == "bench" {
        settings.lease = Duration::from_secs(15); // As installed: a busy machine is no dead leader.
        settings.settle = Duration::from_millis(500);
        settings.parameters.interval = muxflow_types::Micros::from_secs(bench::RESCHEDULE_S);
    }
    muxflow_kubernetes::scheduler::run(client, settings, forever).await.unwrap();
}
