//! The `muxflow` program: reads arguments, calls the library that does the work, prints.
//!
//! Each subcommand is one module under `cmd`. Nothing here decides anything about GPUs or jobs, and
//! nothing here links `xcuda` or `emulated-gpu`: their exported symbols would end up in the program.

mod cmd;
mod installed;
mod speed_model;
mod table;
mod weights;

use std::process::ExitCode;

use clap::Parser;

/// Fill idle GPUs with offline jobs, and keep the online service safe.
#[derive(Debug, Parser)]
#[command(name = "muxflow", version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: cmd::Command,
}

#[expect(clippy::print_stderr, reason = "this is where errors reach the person who typed")]
fn main() -> ExitCode {
    match Cli::parse().command.run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("muxflow: {error:#}");
            ExitCode::FAILURE
        }
    }
}
