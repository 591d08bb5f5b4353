//! One module per subcommand. Add a variant here and a file beside it.

use std::process::ExitCode;

use clap::Subcommand;

/// What the program can be asked to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {}

impl Command {
    /// Does it; the exit code is the answer where a command has one beside success and failure.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {}
    }
}
