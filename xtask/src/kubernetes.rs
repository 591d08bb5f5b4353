//! `cargo xtask kubernetes build|test|up|down`: a real control plane at hand, the one that the tests use.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, bail};
use clap::Subcommand;

use crate::workbench::workbench;

/// What to do with it.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
    /// Build it, unless that was done before.
    Build,
    /// Run the scheduler's scenarios on it; these are not part of the plain tests.
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
        Action::Build => workbench(["kubernetes", "build"]),
        Action::Test { words } => {
            workbench(["kubernetes", "build"])?;
            test(&words)
        }
        Action::Up { folder } => workbench(control("up", &folder)),
        Action::Down { folder } => workbench(control("down", &folder)),
    }
}

fn control<'a>(action: &'a str, folder: &'a std::path::Path) -> [&'a std::ffi::OsStr; 4] {
    ["kubernetes".as_ref(), action.as_ref(), "--folder".as_ref(), folder.as_os_str()]
}

/// Whether a control plane was built before or is named; building one takes minutes.
pub(crate) fn at_hand() -> bool {
    if std::env::var_os("MUXFLOW_KUBERNETES_PROGRAM").is_some() {
        return true;
    }
    let cache = std::env::var_os("MUXFLOW_KUBERNETES_CACHE")
        .map_or_else(|| crate::ci::root().join("target/k8s"), PathBuf::from);
    std::fs::read_dir(cache.join("bin")).is_ok_and(|mut files| {
        files.any(|f| f.is_ok_and(|f| f.file_name().to_string_lossy().starts_with("kubernetes-v")))
    })
}

/// Runs the scenarios.
pub(crate) fn test(words: &[String]) -> anyhow::Result<()> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["test", "--locked", "-p", "muxflow-kubernetes", "--test", "cluster", "--"])
        .args(words)
        .current_dir(crate::ci::root())
        .env("MUXFLOW_KUBERNETES_TESTS", "1")
        .status()
        .context("cannot start cargo test")?;
    if !status.success() {
        bail!("the scenarios failed: {status}");
    }
    Ok(())
}
