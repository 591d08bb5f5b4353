//! `muxflow wait`: until jobs have ended.

use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::{JobState, JobView};

use super::connect::{ConnectArgs, path_of};

/// Wait until jobs have ended. Fails when one of them did not end well.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// The jobs.
    #[arg(required = true)]
    jobs: Vec<String>,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &WaitArgs) -> anyhow::Result<ExitCode> {
    let client = args.connect.client()?;
    let mut all_well = true;
    for job in &args.jobs {
        let ended = loop {
            let seen: JobView = client.get(&format!("{}?wait_ms=20000", path_of(job)))?;
            if seen.state.is_final() {
                break seen;
            }
        };
        println!("{job} {}: {}", ended.state, ended.reason);
        all_well &= ended.state == JobState::Done;
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
