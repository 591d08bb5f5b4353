//! `muxflow logs`: the output of a job.

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::LogPiece;

use super::connect::{ConnectArgs, job_id, path_of};
use super::patience;

/// Print the output of a job.
#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Go on until the job has ended; exit code 2 when the manager is not there at the beginning, or
    /// cannot be reached for two minutes later on.
    #[arg(long, short)]
    follow: bool,
    /// Its errors instead of its output.
    #[arg(long)]
    stderr: bool,
    /// The job: `job-1`, or just `1`.
    job: String,
}

/// Runs it.
pub(crate) fn run(args: &LogsArgs) -> anyhow::Result<ExitCode> {
    let client = args.connect.client()?;
    if args.follow {
        patience::reach(&client)?;
    }
    let stream = if args.stderr { "stderr" } else { "stdout" };
    let wait_ms = if args.follow { 10_000 } else { 0 };
    let mut offset = 0;
    let mut out = std::io::stdout().lock();
    let path =
        format!("{}/logs?stream={stream}&limit=1048576&wait_ms={wait_ms}", path_of(&args.job));
    loop {
        let from = format!("{path}&offset={offset}");
        let piece: LogPiece =
            if args.follow { patience::get(&client, &from)? } else { client.get(&from)? };
        if piece.offset > offset {
            missing(piece.offset - offset);
        }
        // Whoever read this may have gone.
        if out.write_all(piece.text.as_bytes()).and_then(|()| out.flush()).is_err() {
            return Ok(ExitCode::SUCCESS);
        }
        let nothing = piece.text.is_empty();
        offset = piece.next_offset;
        if piece.end || (nothing && !args.follow) {
            if offset == 0 {
                silent(args, stream);
            }
            return Ok(ExitCode::SUCCESS);
        }
    }
}

#[expect(clippy::print_stderr, reason = "a word to the reader, beside the output")]
fn silent(args: &LogsArgs, stream: &str) {
    let job = job_id(&args.job);
    let other = if args.stderr { "" } else { " --stderr" };
    eprintln!(
        "muxflow: {job} has written nothing to {stream}; see `muxflow logs{other} {job}`, or `muxflow describe {job}` for where it is"
    );
}

#[expect(clippy::print_stderr, reason = "a word to the reader, beside the output")]
fn missing(bytes: u64) {
    eprintln!("muxflow: {bytes} bytes of output are no longer kept; what is kept follows");
}
