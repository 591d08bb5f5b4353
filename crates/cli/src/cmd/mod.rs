//! One module per subcommand. Add a variant here and a file beside it.

mod config;
mod plan;

use std::process::ExitCode;

use clap::Subcommand;

/// What the program can be asked to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Check or print the configuration of the node laws.
    #[command(subcommand)]
    Config(config::ConfigCommand),
    Plan(plan::PlanArgs),
}

impl Command {
    /// Does it; the exit code is the answer where a command has one beside success and failure.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Command::Config(command) => command.run(),
            Command::Plan(args) => plan::run(args),
        }
    }
}
