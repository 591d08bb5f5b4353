//! `cargo xtask kubernetes build|test|up|down`: a real control plane at hand, the one that the tests use.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::Subcommand;

use crate::workbench::workbench;

/// Whether the scenarios run in a plain test of the workspace.
pub(crate) const SCENARIOS: &str = "MUXFLOW_KUBERNETES_TESTS";

/// What to do with it.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Build it, unless that was done before.
    Build,
    /// Run the scenarios on it, those with a kubelet too; these are not part of the plain tests.
    Test {
        /// Only scenarios whose name contains one of these words.
        words: Vec<String>,
    },
    /// Start it and leave it running.
    Up {
        /// Where its state goes; must not exist yet.
        #[arg(long, default_value = "target/k8s/cluster")]
        folder: PathBuf,
    },
    /// Stop what `up` started and remove its state.
    Down {
        /// As given to `up`.
        #[arg(long, default_value = "target/k8s/cluster")]
        folder: PathBuf,
    },
}

/// Does it.
pub(crate) fn run(action: Action) -> anyhow::Result<()> {
    match action {
        Action::Build => build(),
        Action::Test { words } => {
            build()?;
            test(&words)
        }
        Action::Up { folder } => workbench(control("up", &folder)),
        Action::Down { folder } => workbench(control("down", &folder)),
    }
}

fn control<'a>(action: &'a str, folder: &'a std::path::Path) -> [&'a std::ffi::OsStr; 4] {
    ["kubernetes".as_ref(), action.as_ref(), "--folder".as_ref(), folder.as_os_str()]
}

/// Builds it, unless that was done before; says where it is.
fn build() -> anyhow::Result<()> {
    println!("{}", muxflow_control_plane::find_or_build()?.display());
    println!("{}", muxflow_control_plane::find_or_build_runtime()?.display());
    Ok(())
}

/// Runs the scenarios.
pub(crate) fn test(words: &[String]) -> anyhow::Result<()> {
    // With --workspace, crates have the features that all tests have, and nothing is built twice.
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["test", "--locked", "--workspace", "--test", "scenarios", "--test", "kubelet", "--"])
        .args(words)
        .current_dir(crate::ci::root())
        .env(SCENARIOS, "1")
        .status()
        .context("cannot start cargo test")?;
    if !status.success() {
        bail!("the scenarios failed: {status}");
    }
    Ok(())
}
