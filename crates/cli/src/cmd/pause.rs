//! `muxflow pause` and `muxflow resume`: all offline work at once.

use std::process::ExitCode;

use clap::Args;
use muxflow_api::cluster::PauseView;

use super::connect::ConnectArgs;

/// Nothing but where the manager is.
#[derive(Debug, Args)]
pub(crate) struct PauseArgs {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Runs either.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &PauseArgs, pause: bool) -> anyhow::Result<ExitCode> {
    let path = if pause { "/v1/pause" } else { "/v1/resume" };
    let view: PauseView = args.connect.client()?.post(path, &serde_json::json!({}))?;
    if view.paused {
        println!("paused; {} jobs save their state and leave", view.stopping);
    } else {
        println!("resumed");
    }
    Ok(ExitCode::SUCCESS)
}
