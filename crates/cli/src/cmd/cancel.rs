//! `muxflow cancel`: asks for the end of jobs.

use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::Cancelled;

use super::connect::{ConnectArgs, path_of};

/// Cancel jobs or arrays of jobs. What runs is drained first and then told to leave.
#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// The jobs: `job-1`, or just `1`.
    #[arg(required = true)]
    jobs: Vec<String>,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &CancelArgs) -> anyhow::Result<ExitCode> {
    let client = args.connect.client()?;
    for job in &args.jobs {
        let gone: Cancelled = client.delete(&path_of(job))?;
        match gone.jobs.as_slice() {
            [] => println!("{job} had ended already"),
            [_] => println!("{job} is cancelled"),
            many => println!("{job}: {} jobs are cancelled", many.len()),
        }
    }
    Ok(ExitCode::SUCCESS)
}
