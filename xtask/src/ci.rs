//! `cargo xtask ci`: the one test command.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, bail};

/// The root of the workspace.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().map(PathBuf::from).unwrap_or_default()
}

/// Runs cargo in the root and fails when it fails.
pub(crate) fn cargo(args: &[&str]) -> anyhow::Result<()> {
    println!("$ cargo {}", args.join(" "));
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(args)
        .current_dir(root())
        .status()
        .with_context(|| format!("cannot start cargo {}", args.join(" ")))?;
    if !status.success() {
        bail!("cargo {} failed: {status}", args.join(" "));
    }
    Ok(())
}

/// All checks and all tests.
pub(crate) fn run() -> anyhow::Result<()> {
    cargo(&["fmt", "--all", "--check"])?;
    super::tidy::run()?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])?;
    cargo(&["test", "--workspace", "--locked"])?;
    Ok(())
}
