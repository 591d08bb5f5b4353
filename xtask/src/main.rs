//! Tasks of the project, one file each: `cargo xtask ci` is exactly what CI runs.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for people at a terminal"
)]

mod bench;
mod ci;
mod codegen;
mod demo;
mod dist;
mod image;
mod kubernetes;
mod reliability;
mod screenshots;
mod soak;
mod tidy;
mod workbench;

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use clap::{Parser, Subcommand};

/// Tasks of the MuxFlow project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", arg_required_else_help = true)]
struct Xtask {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Measure an area and print its table.
    Bench {
        #[command(subcommand)]
        area: bench::Area,
    },
    /// Everything that CI runs: format, lints, tidy checks, all tests.
    Ci,
    /// Write the tables of `crates/abi` from NVIDIA's public headers.
    Codegen {
        /// Only say whether the committed tables are stale.
        #[arg(long)]
        check: bool,
    },
    /// Fits the GPU model on public measurements; writes the profiles and docs/gpu-model.md.
    Calibrate {
        /// Only print the errors; write nothing.
        #[arg(long)]
        check: bool,
    },
    /// Build the program and everything it starts, and run `muxflow demo`.
    Demo(demo::DemoArgs),
    /// Pack a tarball that works wherever it is unpacked.
    Dist(dist::DistArgs),
    /// Write the container image that the Helm chart names, without a daemon or a network.
    Image(image::ImageArgs),
    /// Print the tables of docs/reliability.md: defences on and off, bursts, every fault.
    Reliability(reliability::ReliabilityArgs),
    /// Long forms of the tests: the whole demo in its time, killed clients of an emulated GPU, signals to a job beside a
    /// service, minutes of watching a GPU, and 200 processes of one job three times.
    Soak(soak::SoakArgs),
    /// A real Kubernetes control plane for tests and for trying things.
    #[command(subcommand)]
    Kubernetes(kubernetes::Action),
    /// Take the pictures of the dashboard in docs/, with headless Chromium.
    Screenshots,
    /// House rules: crate edges, module docs, file lengths, words, links.
    Tidy,
}

/// `cargo run` tells this program about its own package. Build scripts that ask for these variables
/// (ring's does) would then run again under every cargo that is started here, and again when a person
/// types `cargo build`: so this program starts itself once more without them.
fn forget_own_package() -> anyhow::Result<()> {
    let told = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let names: Vec<String> = names.filter(|name| told(name)).collect();
    if names.is_empty() {
        return Ok(());
    }
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    let mut again = Command::new(own);
    again.args(std::env::args_os().skip(1));
    for name in names {
        again.env_remove(name);
    }
    Err(again.exec()).context("cannot start this program again")
}

fn main() -> anyhow::Result<std::process::ExitCode> {
    forget_own_package()?;
    match Xtask::parse().task {
        Task::Bench { area } => bench::run(area),
        Task::Calibrate { check } => {
            workbench::workbench(["calibrate"].into_iter().chain(check.then_some("--check")))
        }
        Task::Ci => ci::run(),
        Task::Codegen { check } => codegen::run(check),
        Task::Demo(args) => return demo::run(&args),
        Task::Dist(args) => dist::run(&args),
        Task::Image(args) => image::run(&args),
        Task::Reliability(args) => reliability::run(&args),
        Task::Soak(args) => soak::run(&args),
        Task::Kubernetes(action) => kubernetes::run(action),
        Task::Screenshots => screenshots::run(),
        Task::Tidy => tidy::run(),
    }?;
    Ok(std::process::ExitCode::SUCCESS)
}
