//! `muxflow agent --kubernetes`: the same agent as the executor of a cluster's node. Pods are let in
//! instead of jobs from a file, and the kubelet starts and ends their processes.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use muxflow_agent::agent::Agent;
use muxflow_agent::config::AgentConfig;
use muxflow_agent::gpu::Event;
use muxflow_agent::http::PageServer;
use muxflow_agent::{metrics, sys};
use muxflow_kubernetes::connect::connect;
use muxflow_kubernetes::dra::driver::Sockets;
use muxflow_kubernetes::node::executor::LocalAgent;
use muxflow_kubernetes::node::ground::Wish;
use muxflow_kubernetes::node::{Node, Settings};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// What a node of a cluster needs beside the agent's configuration.
#[derive(Debug, Args)]
pub(crate) struct ClusterArgs {
    /// Be the executor of a node of a Kubernetes cluster: device plugin, GPU objects, evictions.
    #[arg(long)]
    pub(super) kubernetes: bool,
    /// The name of this node in the cluster.
    #[arg(long, env = "MUXFLOW_NODE", value_name = "NAME", requires = "kubernetes")]
    node_name: Option<String>,
    /// How to reach the cluster; without it KUBECONFIG, ~/.kube/config or the pod's account.
    #[arg(long, value_name = "FILE", requires = "kubernetes")]
    kubeconfig: Option<PathBuf>,
    /// The kubelet's folder.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_dir: PathBuf,
    /// Where the container runtime looks for CDI devices.
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    cdi_dir: PathBuf,
    /// The container runtime knows no CDI: give everything at allocation, and evict pods that were
    /// given another GPU than the planned one.
    #[arg(long)]
    no_cdi: bool,
    /// Be a driver for resource claims (DRA) too, where the cluster has them: Kubernetes 1.34 and
    /// later.
    #[arg(long, conflicts_with = "no_cdi")]
    dra: bool,
    /// Seconds between two reports of a GPU of which nothing has changed that matters.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    report_every: u64,
    /// Seconds that offline pods are held at their gates for while no agent is here; then they end.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    hold_for: u64,
}

/// Runs until SIGINT or SIGTERM. Pods stay: online ones go on, offline ones are held at their gates
/// until the next agent comes, for `--hold-for` at most.
pub(super) fn run(
    args: &ClusterArgs,
    mut config: AgentConfig,
    signals: &OwnedFd,
) -> anyhow::Result<ExitCode> {
    if !config.online.is_empty() || !config.offline.is_empty() {
        bail!(
            "with --kubernetes the cluster says what runs: remove [[online]] and [[offline]] from the configuration"
        );
    }
    let Some(node) = &args.node_name else {
        bail!("--kubernetes needs --node-name, or MUXFLOW_NODE from the pod's spec.nodeName");
    };
    let page_address = config.metrics.take();
    let mut settings = Settings::new(node);
    settings.report_every = Duration::from_secs(args.report_every.max(1));
    settings.places.cdi = (!args.no_cdi).then(|| args.cdi_dir.clone());
    settings.places.state = config.state_dir.clone();
    settings.places.plugins = args.kubelet_dir.join("device-plugins");
    settings.places.pod_resources = args.kubelet_dir.join("pod-resources/kubelet.sock");
    settings.dra = args.dra.then(|| Sockets::under(&args.kubelet_dir));
    settings.places.host.interposer = install(&config)?;
    settings.places.host.hold_for = Duration::from_secs(args.hold_for);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let client = runtime.block_on(connect(args.kubeconfig.as_deref()))?;
    let agent = Agent::start(&config, super::child_program()?)?;
    let handle = agent.handle();
    let executor = Arc::new(LocalAgent::new(handle.clone(), &config));
    let (wish, wishes) = unbounded_channel();
    let mut node = runtime.block_on(Node::start(client, &settings, executor, wishes))?;
    let services = node.metrics();
    let page = move || {
        let gpus = handle.gpus().iter().filter_map(|uuid| handle.shared(uuid));
        let mut text = metrics::render(gpus.map(Arc::as_ref));
        text.push_str(&services());
        text
    };
    let page = page_address.map(|address| PageServer::start(&address, page)).transpose()?;
    if let Some(page) = &page {
        tracing::info!(address = %page.address(), "metrics");
    }
    let ended = follow(&agent, &mut node, &wish, signals);
    runtime.block_on(node.stop());
    agent.shutdown();
    ended.context("the agent must be started anew").map(|()| ExitCode::SUCCESS)
}

/// Tells the cluster what the agent tells, until a signal comes; an error when a part of the node's side
/// has ended before.
fn follow(
    agent: &Agent,
    node: &mut Node,
    wish: &UnboundedSender<Wish>,
    signals: &OwnedFd,
) -> Result<(), muxflow_kubernetes::Error> {
    while sys::take_signal(signals.as_fd()).is_none() {
        node.check()?;
        let event = agent.next_event(Duration::from_millis(100));
        match event {
            Some((_, Event::GuestMustLeave { job, cause, drained })) => {
                let why = cause;
                // The other side is gone only when everything ends.
                drop(wish.send(Wish { job, reason: "GpuOverlimit", why, while_ill: !drained }));
            }
            Some((gpu, Event::GuestBlamed { job, fault, pid })) => {
                node.blame(&job, &format!("its process {pid} caused {fault} on GPU {gpu}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Puts the interposer where containers can be given it: a file of the host, on a file system that
/// allows execution, replaced whole so that running jobs keep theirs.
fn install(config: &AgentConfig) -> anyhow::Result<PathBuf> {
    let to = config.state_dir.join("lib/libxcuda.so");
    let put = |to: &Path| -> std::io::Result<()> {
        std::fs::create_dir_all(to.parent().unwrap_or(Path::new("/")))?;
        let beside = to.with_extension("new");
        std::fs::copy(&config.interposer, &beside)?;
        std::fs::rename(&beside, to)
    };
    put(&to).with_context(|| {
        format!(
            "cannot copy the interposer {} to {}; set `interposer` in the agent's configuration",
            config.interposer.display(),
            to.display()
        )
    })?;
    Ok(to)
}
