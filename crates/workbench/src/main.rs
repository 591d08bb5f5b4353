//! Tasks that link the libraries of the project: benchmarks of planning, prediction and simulation,
//! the calibration of the GPU model, and the Kubernetes control plane of the tests.
//!
//! `cargo xtask` starts this program. It is a package of its own so that `cargo xtask demo`, the first
//! thing a new user builds, compiles none of it.
//!
//! Absent on purpose: anything that ships, anything that a test needs.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for people at a terminal"
)]

mod calibrate;
mod kubernetes;
mod plan;
mod predictor;
mod sim;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "muxflow-workbench", arg_required_else_help = true)]
struct Workbench {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Measure an area and print its table.
    Bench {
        #[command(subcommand)]
        area: Area,
    },
    /// Fit the GPU model on public measurements; write the profiles and docs/gpu-model.md.
    Calibrate {
        /// Only print the errors; write nothing.
        #[arg(long)]
        check: bool,
    },
    /// A real Kubernetes control plane, the one that the tests use.
    #[command(subcommand)]
    Kubernetes(kubernetes::Action),
}

#[derive(Debug, Subcommand)]
enum Area {
    /// A whole plan, predicting and matching: cold, and after a small change.
    Plan(plan::PlanBench),
    /// Predictions of all pairs against the machine's peak and ONNX Runtime.
    Predictor(predictor::PredictorBench),
    /// The simulator: its event core, and whole runs by size.
    Sim(sim::SimBench),
}

/// The root of the workspace.
fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .ancestors()
        .nth(2)
        .map(PathBuf::from)
        .unwrap_or_default()
}

fn main() -> anyhow::Result<()> {
    match Workbench::parse().task {
        Task::Bench { area: Area::Plan(bench) } => plan::run(&bench),
        Task::Bench { area: Area::Predictor(bench) } => predictor::run(&bench),
        Task::Bench { area: Area::Sim(bench) } => sim::run_bench(&bench),
        Task::Calibrate { check } => calibrate::run(check),
        Task::Kubernetes(action) => kubernetes::run(action),
    }
}
