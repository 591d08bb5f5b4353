//! `cargo xtask kubernetes up|down`: a real control plane at hand, the one that the tests use.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Subcommand;
use muxflow_test_cluster::{Cluster, Lifetime, program};

/// What to do with it.
#[derive(Debug, Subcommand)]
pub(crate) enum Action {
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
        Action::Up { folder } => up(&folder),
        Action::Down { folder } => down(&folder),
    }
}

fn up(folder: &Path) -> anyhow::Result<()> {
    if folder.exists() {
        bail!(
            "{} exists: a cluster may be running; stop it with `cargo xtask kubernetes down`",
            folder.display()
        );
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let folder = folder.canonicalize()?;
    let started = Instant::now();
    let cluster = Cluster::start_in(&folder, Lifetime::Detached)?;
    println!("Kubernetes {} is ready ({:.1} s)", program::VERSION, started.elapsed().as_secs_f64());
    println!("export KUBECONFIG={}", cluster.kubeconfig().display());
    Ok(())
}

fn down(folder: &Path) -> anyhow::Result<()> {
    let list = folder.join("pids");
    let text = fs::read_to_string(&list).with_context(|| {
        format!("cannot read {}: no cluster was started in this folder", list.display())
    })?;
    let ours = program::find_or_build()?.canonicalize()?;
    for line in text.lines().rev() {
        let (id, part) = line.split_once(' ').unwrap_or((line, "?"));
        // A process id is given to others later: only a process that runs our program is stopped.
        let runs = fs::read_link(format!("/proc/{id}/exe")).is_ok_and(|exe| exe == ours);
        if !runs {
            println!("{part} ({id}) is gone already");
            continue;
        }
        let status = Command::new("kill").args(["-9", id]).status().context("cannot run kill")?;
        if !status.success() {
            bail!("cannot stop {part} ({id}): kill says {status}");
        }
        println!("stopped {part} ({id})");
    }
    fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))
}
