//! The manager under a full queue: runs the large form of its scale test and prints what it measured.

use std::process::Command;

use anyhow::{Context, bail};

/// Runs it.
pub(super) fn run() -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["test", "--release", "-p", "muxflow-manager", "--test", "scale", "--"])
        .args(["--ignored", "--exact", "large", "--nocapture"])
        .current_dir(crate::ci::root())
        .output()
        .context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("the benchmark failed:\n{text}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    println!("| measure | value |\n| --- | --- |");
    for line in text.lines().filter_map(|line| line.strip_prefix("BENCH ")) {
        println!("{line}");
    }
    Ok(())
}
