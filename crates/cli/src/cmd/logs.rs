//! `muxflow logs`: the output of a job.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::LogPiece;

use super::connect::{ConnectArgs, path_of};

/// Print the output of a job.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Go on until the job has ended.
    #[arg(long, short)]
    follow: bool,
    /// Its errors instead of its output.
    #[arg(long)]
    stderr: bool,
    /// The job.
    job: String,
}

/// Runs it.
pub(crate) fn run(args: &LogsArgs) -> anyhow::Result<ExitCode> {
    let client = args.connect.client()?;
    let stream = if args.stderr { "stderr" } else { "stdout" };
    let wait_ms = if args.follow { 10_000 } else { 0 };
    let mut offset = 0;
    let mut out = std::io::stdout().lock();
    loop {
        let path = path_of(&args.job);
        let piece: LogPiece = client
            .get(&format!("{path}/logs?stream={stream}&offset={offset}&wait_ms={wait_ms}"))?;
        if out.write_all(piece.text.as_bytes()).and_then(|()| out.flush()).is_err() {
            // Whoever read this has gone.
            return Ok(ExitCode::SUCCESS);
        }
        let nothing = piece.text.is_empty();
        offset = piece.next_offset;
        if piece.end || (nothing && !args.follow) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}
