//! `muxflow scheduler`: pairs pods with GPUs on a Kubernetes cluster.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use muxflow_agent::http::PageServer;
use muxflow_kubernetes::connect::connect;
use muxflow_kubernetes::scheduler::{self, Settings};
use muxflow_types::Micros;
use tokio::signal::unix::{SignalKind, signal};

/// A scheduler that hangs ends by itself, where it can, before it is left behind.
const MARGIN: Duration = Duration::from_secs(30);

/// Schedule pods with `schedulerName: muxflow` on a Kubernetes cluster.
#[derive(Debug, Args)]
pub(crate) struct SchedulerArgs {
    /// How to reach the cluster; without it KUBECONFIG, ~/.kube/config or the pod's account.
    #[arg(long)]
    kubeconfig: Option<PathBuf>,
    /// The schedulerName of the pods to place.
    #[arg(long, default_value = muxflow_kubernetes::names::SCHEDULER)]
    scheduler_name: String,
    /// The namespace of the lease by which replicas agree who acts.
    #[arg(long, env = "MUXFLOW_NAMESPACE", default_value = "muxflow")]
    namespace: String,
    /// The name of this replica; in a pod, the name of the pod.
    #[arg(long, env = "MUXFLOW_IDENTITY")]
    identity: Option<String>,
    /// Seconds after which another replica takes over from a dead one.
    #[arg(long, default_value_t = 15, value_name = "SECONDS")]
    lease: u64,
    /// Seconds between two plans that may move running jobs.
    #[arg(long, default_value_t = 900, value_name = "SECONDS")]
    interval: u64,
    /// Seconds after which a GPU whose agent is silent takes no new job; at least twice the agents'
    /// --report-every.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    stale_after: u64,
    /// Address of /metrics and /healthz, such as 0.0.0.0:9471; none serves none.
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,
}

/// Runs until SIGINT or SIGTERM.
pub(crate) fn run(args: SchedulerArgs) -> anyhow::Result<ExitCode> {
    crate::logging::start("muxflow_kubernetes=info,warn");
    let mut settings = Settings::new(&args.namespace, &args.identity.unwrap_or_else(unique_name));
    settings.scheduler = args.scheduler_name;
    settings.lease = Duration::from_secs(args.lease);
    settings.stale_after = Duration::from_secs(args.stale_after);
    settings.listen = settings.stale_after;
    settings.parameters.interval = Micros::from_secs(args.interval);
    let counters = Arc::clone(&settings.counters);
    let page = args.metrics.map(|address| PageServer::start(&address, move || counters.page()));
    let _page = page.transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let ended = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen to SIGINT")?;
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen to SIGTERM")?;
        let stop = async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        let client = connect(args.kubeconfig.as_deref()).await?;
        let (counters, limit) = (Arc::clone(&settings.counters), settings.stall + MARGIN);
        // In a task of its own, so that one that never comes back can be left behind.
        let running = tokio::spawn(scheduler::run(client, settings, stop));
        tokio::select! {
            ended = running => ended.context("the scheduler broke down")??,
            () = counters.hangs(limit) => bail!("the scheduler hangs; it is left behind"),
        }
        Ok(ExitCode::SUCCESS)
    });
    // A plan that never ends must not keep the process.
    runtime.shutdown_background();
    ended
}

/// A name that no other replica has: the machine's, and this process's id.
fn unique_name() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}
