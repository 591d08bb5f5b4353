//! `muxflow up`: agent and manager of this machine, in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Args;
use muxflow_agent::{descriptors, sys};
use muxflow_manager::config::UpConfig;
use muxflow_manager::hosting::Hosting;
use muxflow_manager::up::Up;

use super::agent::child_program;

/// Manage this machine: share its GPUs between services and jobs.
#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    /// The configuration; without one everything has its default. `config/up.toml` lists all.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Plan and report: no job and no replica of a service is started, stopped or moved. MPS daemons
    /// and attach probes are started all the same.
    #[arg(long)]
    shadow: bool,
}

pub(crate) fn run(args: &UpArgs) -> anyhow::Result<ExitCode> {
    crate::logging::start("info");
    let mut config = match &args.config {
        Some(path) => UpConfig::read(path)?,
        None => UpConfig::built_in()?,
    };
    config.settings.shadow |= args.shadow;
    if let Err(error) = descriptors::raise() {
        tracing::warn!(error = %error, "the limit on open files stays as it is");
    }
    // Before any thread starts, so that all of them leave these signals to this one.
    let signals =
        sys::signal_fd(&[libc::SIGTERM, libc::SIGINT]).context("cannot watch for signals")?;
    let mut hosting = None;
    let up = Up::start(&config, child_program()?, |agent, _| {
        let hosted = hosting.insert(Hosting::start(agent, &config)?);
        Ok(hosted.extras())
    })?;
    if let Some(server) = up.server() {
        tracing::info!(socket = %server.socket().display(), "the manager listens");
        if let Some(address) = server.address() {
            tracing::info!(%address, "and on TCP, with a token");
            tracing::info!(
                "the dashboard is at http://{address}/dashboard#token=TOKEN, with a token of the configuration"
            );
        } else {
            tracing::info!(
                "no dashboard: set `listen` and a [[token]] in the configuration for one"
            );
        }
    }
    if sys::own_uid() != 0 {
        tracing::warn!(
            "not root: jobs run as this user, and only this user can submit; limits on memory and processors need root or a delegated control group"
        );
    }
    if config.settings.shadow {
        tracing::warn!("shadow mode: plans are made and reported, nothing is carried out");
    }
    loop {
        use std::os::fd::{AsFd, AsRawFd};
        let limit = std::time::Duration::from_secs(1);
        drop(sys::poll_readable(&[signals.as_raw_fd()], limit));
        if sys::take_signal(signals.as_fd()).is_some() {
            break;
        }
    }
    tracing::info!(
        "leaving: jobs are stopped in order; services go on, their ports are closed until the next start"
    );
    drop(hosting);
    up.shutdown();
    Ok(ExitCode::SUCCESS)
}
