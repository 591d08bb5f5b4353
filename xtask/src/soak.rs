//! `cargo xtask soak`: what tests do a few times, done long enough to find what is rare.

use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

/// How long.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Clients of an emulated GPU that are killed at random moments.
    #[arg(long, default_value_t = 1000)]
    kills: u32,
}

/// Runs the long forms of the tests that kill.
pub(crate) fn run(args: &SoakArgs) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let test = ["test", "-p", "muxflow-emulated-gpu", "--test", "driver", "killed_at_any_time"];
    println!("killing {} clients of an emulated GPU", args.kills);
    let status = Command::new(cargo)
        .args(test)
        .env("MUXFLOW_KILLS", args.kills.to_string())
        .current_dir(crate::ci::root())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("the soak failed: {status}");
    }
    println!("200 processes of one job under the interposer, three times");
    crate::bench::e2e("soak")
}
