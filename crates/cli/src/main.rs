//! The `muxflow` program: reads arguments, calls the library that does the work, prints.
//!
//! Each subcommand is one module under `cmd`. Nothing here decides anything about GPUs or jobs, and
//! nothing here links `xcuda` or `emulated-gpu`: their exported symbols would end up in the program.

mod cmd;
mod installed;
mod logging;
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
    let command = Cli::parse().command;
    if command.only_prints() {
        end_with_the_reader();
    }
    match command.run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("muxflow: {error:#}");
            match error.is::<cmd::patience::Lost>() {
                true => ExitCode::from(cmd::patience::LOST),
                false => ExitCode::FAILURE,
            }
        }
    }
}

/// From here on a reader that has seen enough (`| head`) ends the program, as it ends others. Not for
/// programs that write to pipes of processes they look after.
fn end_with_the_reader() {
    // SAFETY: the default action of a signal touches nothing of this program.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The commands of the README and of the page on one machine, as they are written there.
    #[test]
    fn commands_in_the_documents_are_understood() {
        let texts = [include_str!("../../../README.md"), include_str!("../../../docs/manager.md")]
            .join("\n");
        let mut seen = 0;
        for line in texts.lines() {
            let line = line.trim().trim_start_matches("target/debug/");
            let Some(command) = line.strip_prefix("muxflow ") else { continue };
            let command = command.split(['#', '>', '|']).next().unwrap_or_default();
            let words = std::iter::once("muxflow").chain(command.split_whitespace());
            if let Err(error) = Cli::try_parse_from(words) {
                unreachable!("{line}: {error}");
            }
            seen += 1;
        }
        assert!(seen > 20, "only {seen} commands were found");
    }
}
