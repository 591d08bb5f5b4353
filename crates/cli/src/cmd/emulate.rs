//! `muxflow emulate`: runs any program on emulated GPUs.
//!
//! The work is done by `muxflow-emulated-node`, a program of its own, so that nothing of the
//! emulation is linked into this one.

use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};
use clap::Args;

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

const PROGRAM: &str = "muxflow-emulated-node";

/// Beside this program, or where the environment says.
fn find() -> anyhow::Result<PathBuf> {
    if let Some(directory) = std::env::var_os("MUXFLOW_EMULATED_PROGRAMS") {
        let path = PathBuf::from(directory).join(PROGRAM);
        if path.is_file() {
            return Ok(path);
        }
        bail!("{} is not there: MUXFLOW_EMULATED_PROGRAMS points elsewhere", path.display());
    }
    let own = std::env::current_exe().context("cannot find out where this program is")?;
    let path = own.with_file_name(PROGRAM);
    if !path.is_file() {
        bail!(
            "{} is not there: build it with `cargo build -p muxflow-emulated-gpu \
             -p muxflow-emulated-cuda -p muxflow-emulated-nvml -p muxflow-emulated-dcgm`, or set \
             MUXFLOW_EMULATED_PROGRAMS",
            path.display()
        );
    }
    Ok(path)
}

pub(crate) fn run(args: &EmulateArgs) -> anyhow::Result<ExitCode> {
    let program = find()?;
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
