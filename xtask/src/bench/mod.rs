//! `cargo xtask bench AREA`: each area prints the table that stands in `docs/benchmarks.md`.

mod emulated;
mod kubernetes;
mod manager;
mod matching;

use clap::Subcommand;

use crate::workbench::Passed;

/// What is measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Area {
    /// The manager's API and plans with ten thousand jobs and a thousand GPUs.
    Manager,
    /// Exact matching beside scipy, OR-tools and other crates.
    Matching(matching::MatchingBench),
    /// The emulated GPU: launch cost, idle cost, eight GPUs at once.
    Emulated(emulated::EmulatedBench),
    /// The scheduler on a real API server with fake nodes, beside kube-scheduler.
    Kubernetes(kubernetes::KubernetesBench),
    /// A whole plan, predicting and matching: cold, and after a small change.
    Plan(Passed),
    /// What the interposer costs over a stub driver, and how fast its gate closes.
    Xcuda,
    /// The simulator: its event core, and whole runs by size.
    Sim(Passed),
    /// Predictions of all pairs against the machine's peak and ONNX Runtime.
    Predictor(Passed),
}

/// Measures one area.
pub(crate) fn run(area: Area) -> anyhow::Result<()> {
    match area {
        Area::Manager => manager::run(),
        Area::Matching(bench) => matching::run(&bench),
        Area::Emulated(bench) => emulated::run(&bench),
        Area::Kubernetes(bench) => kubernetes::run(&bench),
        Area::Plan(passed) => passed.bench("plan"),
        Area::Xcuda => e2e("bench_xcuda"),
        Area::Sim(passed) => passed.bench("sim"),
        Area::Predictor(passed) => passed.bench("predictor"),
    }
}

/// Runs a program of `crates/e2e`, which has the stub driver and the interposer at hand.
pub(crate) fn e2e(program: &str) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = std::process::Command::new(cargo)
        .args(["run", "--quiet", "--release", "-p", "muxflow-e2e", "--bin", program])
        .status()?;
    anyhow::ensure!(status.success(), "{program} failed: {status}");
    Ok(())
}
