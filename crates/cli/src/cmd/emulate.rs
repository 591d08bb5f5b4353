//! `muxflow emulate`: runs any program on emulated GPUs.
//!
//! The work is done by `muxflow-emulated-node`, a program of its own, so that nothing of the
//! emulation is linked into this one.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::Args;

use crate::installed;

/// Run a command on emulated GPUs: `muxflow emulate --gpus t4x4 -- python train.py`.
#[derive(Debug, Args)]
pub(crate) struct EmulateArgs {
    /// Which GPUs: t4, a10, v100, a100, h100 or a profile file, with counts, such as t4x4,a10.
    #[arg(long, default_value = "t4")]
    gpus: String,
    /// Device seconds per second: 10 runs ten times as fast as real GPUs.
    #[arg(long, default_value_t = 1.0)]
    time_factor: f64,
    /// Seed of everything random.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Directory of the node; a temporary one when left out.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// The command and its arguments.
    #[arg(required = true, last = true)]
    command: Vec<String>,
}

pub(crate) fn run(args: &EmulateArgs) -> anyhow::Result<ExitCode> {
    let program = installed::program("muxflow-emulated-node")?;
    let mut command = Command::new(&program);
    command.args(["--gpus", &args.gpus]);
    command.args(["--time-factor", &args.time_factor.to_string()]);
    command.args(["--seed", &args.seed.to_string()]);
    if let Some(dir) = &args.dir {
        command.arg("--dir").arg(dir);
    }
    let error = command.arg("--").args(&args.command).exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
