//! `muxflow agent`: runs the executor of this node in the foreground.

mod kubernetes;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use muxflow_agent::agent::{Agent, NamedGpu};
use muxflow_agent::config::AgentConfig;
use muxflow_agent::gpu::{Event, Order};
use muxflow_agent::queue::{JobQueue, Left};
use muxflow_agent::{child, descriptors, monitor, sys};

/// Run this node: watch its GPUs, keep MPS alive, run services and jobs.
#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// The agent's configuration file; without one, everything has its default and nothing runs.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Leave when all jobs of the file are finished.
    #[arg(long)]
    until_done: bool,
    #[command(flatten)]
    cluster: kubernetes::ClusterArgs,
}

/// A process that the agent starts for itself.
#[derive(Debug, Args)]
pub(crate) struct ChildArgs {
    /// `keep DIR` or `probe`.
    #[arg(trailing_var_arg = true)]
    words: Vec<std::ffi::OsString>,
}

/// Reads the configuration that `--config` names, or the defaults.
pub(crate) fn read_config(path: Option<&PathBuf>) -> anyhow::Result<AgentConfig> {
    Ok(match path {
        Some(path) => AgentConfig::read(path)?,
        None => AgentConfig::built_in()?,
    })
}

/// How the agent starts itself again.
pub(crate) fn child_program() -> anyhow::Result<(PathBuf, Vec<String>)> {
    let program = std::env::current_exe().context("cannot find the path of this program")?;
    Ok((program, vec!["agent-child".into()]))
}

/// Runs a child of the agent.
pub(crate) fn run_child(args: ChildArgs) -> ExitCode {
    child::main(args.words)
}

pub(crate) fn run(args: &AgentArgs) -> anyhow::Result<ExitCode> {
    crate::logging::start("info");
    let config = read_config(args.config.as_ref())?;
    if let Err(error) = descriptors::raise() {
        tracing::warn!(error = %error, "the limit on open files stays as it is");
    }
    // Before any thread starts, so that all of them leave these signals to this one.
    let signals =
        sys::signal_fd(&[libc::SIGTERM, libc::SIGINT]).context("cannot watch for signals")?;
    if args.cluster.kubernetes {
        return kubernetes::run(&args.cluster, config, &signals);
    }
    let agent = Agent::start(&config, child_program()?)?;
    if let Some(address) = agent.metrics_address() {
        tracing::info!(%address, "metrics");
    }
    start_services(&agent, &config)?;
    let mut queue = queue_of(&agent, &config);
    loop {
        use std::os::fd::AsFd;
        if sys::take_signal(signals.as_fd()).is_some() {
            break;
        }
        for uuid in agent.gpus() {
            let Some(status) = agent.status(uuid) else { continue };
            if let Some(spec) = queue.next_for(&status, monitor::now()) {
                agent.order(uuid, Order::StartOffline(Box::new(spec)))?;
            }
        }
        if let Some((_, event)) = agent.next_event(Duration::from_millis(100)) {
            take_note(&mut queue, event);
        }
        let (waiting, running, _) = queue.counts();
        if args.until_done && waiting + running == 0 {
            break;
        }
    }
    agent.shutdown();
    Ok(if queue.given_up() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The jobs of the file that are still to be done: those that an earlier agent brought to their end
/// are not begun again, and those that are on their way out not before they are gone.
fn queue_of(agent: &Agent, config: &AgentConfig) -> JobQueue {
    let mut queue = JobQueue::new(config.offline.clone(), config.laws.retry);
    let handle = agent.handle();
    let done = queue.leave_out(|spec| {
        let exit = handle.last_exit(spec.job.as_str()).ok().flatten();
        exit.is_some_and(|exit| exit.is_finished() && exit.fingerprint == spec.fingerprint())
    });
    for job in done {
        tracing::info!(job = %job, "finished before; give it another name to run it again");
    }
    for (job, _) in handle.found() {
        queue.hold(job);
    }
    while let Some((_, event)) = agent.next_event(Duration::ZERO) {
        take_note(&mut queue, event);
    }
    queue
}

fn start_services(agent: &Agent, config: &AgentConfig) -> anyhow::Result<()> {
    for (gpu, spec) in &config.online {
        let named = agent.named_gpu(gpu).with_context(|| format!("service {}", spec.service))?;
        let uuid = match named {
            NamedGpu::Usable(uuid) => uuid,
            NamedGpu::Unusable(why) => {
                // The others go on.
                tracing::error!(service = %spec.service, gpu, why, "a configured service goes without its GPU; restart the agent when it is back");
                continue;
            }
        };
        // Another service may have been found there: that one stays, and the rest goes on.
        if let Err(error) = agent.order(uuid, Order::StartOnline(Box::new(spec.clone()))) {
            tracing::error!(service = %spec.service, error = %error, "a configured service was not started");
        }
    }
    Ok(())
}

fn take_note(queue: &mut JobQueue, event: Event) {
    let now = monitor::now();
    match event {
        Event::JobEnded { job, exit, reason, requeue, blamed, .. } => {
            let how = match (requeue, reason.is_some() && !blamed) {
                (false, _) => Left::Finished,
                (true, true) => Left::Evicted,
                // One that broke something waits like one that failed.
                (true, false) => Left::Failed,
            };
            tracing::info!(job = %job, code = exit.code, signal = exit.signal, ?how, "job left");
            queue.left(&job, how, now);
        }
        Event::JobBlamed { job, fault, .. } => {
            tracing::warn!(job = %job, %fault, "job left, and is to blame for an error");
            queue.blame(&job, now);
        }
        Event::JobRefused { job, unstartable: true, reason, .. } => {
            tracing::error!(job = %job, reason, "job given up");
            queue.left(&job, Left::GivenUp, now);
        }
        Event::JobRefused { job, .. } => queue.left(&job, Left::Failed, now),
        _ => {}
    }
}
