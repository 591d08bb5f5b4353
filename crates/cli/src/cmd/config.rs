//! `muxflow config`: check the configuration of the node laws, or print the default.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;
use muxflow_policy::node::config::{DEFAULT_TEXT, NodeConfig};

/// What to do with a configuration.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a file; says what is wrong, where, and what would be right.
    Check {
        /// The file, in TOML.
        file: PathBuf,
    },
    /// Print every field with its default and what it means.
    Print,
}

impl ConfigCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            ConfigCommand::Check { file } => check(&file)?,
            ConfigCommand::Print => write_out(DEFAULT_TEXT)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn check(file: &Path) -> anyhow::Result<()> {
    let name = file.display();
    let text = std::fs::read_to_string(file).with_context(|| {
        format!("cannot read {name}; `muxflow config print > FILE` writes one to start from")
    })?;
    let config = NodeConfig::parse(&text).with_context(|| format!("cannot use {name}"))?;
    let types: Vec<_> = config.gpus.keys().map(|gpu_type| gpu_type.as_str()).collect();
    write_out(&format!(
        "{name} is sound: GPU types {}; {} services with knobs of their own\n",
        types.join(", "),
        config.services.len()
    ))
}

/// Like `print!`, but a closed pipe is an error and not a panic.
fn write_out(text: &str) -> anyhow::Result<()> {
    use std::io::Write;
    std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write to standard output")
}
