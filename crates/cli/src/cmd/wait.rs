//! `muxflow wait`: until jobs have ended.

use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::{JobState, JobView};

use super::connect::{ConnectArgs, jobs_of, path_of};
use super::patience;

/// Wait until jobs or arrays of jobs have ended. Exit code 1 when one of them did not end well, 2 when
/// the manager is not there at the beginning, or could not be reached for two minutes later on.
#[derive(Debug, Args)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// The jobs: `job-1`, or just `1`.
    #[arg(required = true)]
    jobs: Vec<String>,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &WaitArgs) -> anyhow::Result<ExitCode> {
    let client = args.connect.client()?;
    patience::reach(&client)?;
    let mut all_well = true;
    for typed in &args.jobs {
        for job in jobs_of(&client, typed)? {
            let ended = loop {
                let seen: JobView =
                    patience::get(&client, &format!("{}?wait_ms=20000", path_of(&job)))?;
                if seen.state.is_final() {
                    break seen;
                }
            };
            println!("{job} {}: {}", ended.state, ended.reason);
            all_well &= ended.state == JobState::Done;
        }
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
