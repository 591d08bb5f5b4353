//! The scheduler on a real API server with fake nodes, beside the one that Kubernetes ships.

use std::process::Command;

use clap::Args;

/// How large.
#[derive(Debug, Args)]
pub(crate) struct KubernetesBench {
    /// Nodes, with eight GPUs each.
    #[arg(long, default_value_t = 2500)]
    nodes: usize,
    /// Pods that wait; each takes one GPU. With more of them than GPUs, the rest goes on waiting.
    #[arg(long, default_value_t = 10_000)]
    pods: usize,
    /// Status writes per second, of all agents together. Real agents write a GPU of which nothing has
    /// changed that matters every 60 to 120 s; 20,000 GPUs make that 220 a second.
    #[arg(long, default_value_t = 220)]
    reports: usize,
    /// Without optimisation of this project's own code, to save a build.
    #[arg(long)]
    dev: bool,
}

/// Measures and prints the table.
pub(crate) fn run(bench: &KubernetesBench) -> anyhow::Result<()> {
    anyhow::ensure!(bench.nodes > 0 && bench.pods > 0, "--nodes and --pods must be at least 1");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["test", "--locked", "--test", "scenarios"])
        // With --workspace, nothing is built twice that other tests have built.
        .args(if bench.dev {
            &["--workspace"][..]
        } else {
            &["--release", "-p", "muxflow-kubernetes"]
        })
        .args(["--", "bench"])
        .args([bench.nodes, bench.pods, bench.reports].map(|number| number.to_string()))
        .env(crate::kubernetes::SCENARIOS, "1")
        .current_dir(crate::ci::root())
        .status()?;
    anyhow::ensure!(status.success(), "the benchmark failed: {status}");
    Ok(())
}
