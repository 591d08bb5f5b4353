//! Runs a command on emulated GPUs: what `muxflow emulate` starts.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use muxflow_emulated_gpu::launcher::{Plan, start};
use muxflow_emulated_gpu::node::parse_gpus;
use muxflow_emulated_gpu::sys;

const USAGE: &str = "usage: muxflow-emulated-node --gpus t4x4[,a10,FILE.toml] [--time-factor F] \
                     [--seed N] [--dir DIR] -- COMMAND [ARGUMENT...]";

fn plan() -> Result<(Plan, Vec<String>), String> {
    let built = std::env::current_exe()
        .ok()
        .and_then(|p| p.parent().map(PathBuf::from))
        .ok_or("cannot find out where this program is")?;
    let mut plan = Plan { gpus: Vec::new(), time_factor: 1.0, seed: 0, directory: None, built };
    let mut arguments = std::env::args().skip(1);
    let mut command = Vec::new();
    while let Some(name) = arguments.next() {
        if name == "--" {
            command = arguments.by_ref().collect();
            break;
        }
        let value = arguments.next().ok_or_else(|| format!("{name} needs a value; {USAGE}"))?;
        let bad = |what: &str| format!("{name} {value}: {what}; {USAGE}");
        match name.as_str() {
            "--gpus" => plan.gpus = parse_gpus(&value).map_err(|e| e.to_string())?,
            "--dir" => plan.directory = Some(PathBuf::from(&value)),
            "--seed" => plan.seed = value.parse().map_err(|_| bad("not a number"))?,
            "--time-factor" => {
                plan.time_factor = value.parse().map_err(|_| bad("not a number"))?;
                if !(0.001..=10_000.0).contains(&plan.time_factor) {
                    return Err(bad("it must lie between 0.001 and 10000"));
                }
            }
            _ => return Err(format!("{name} is not known; {USAGE}")),
        }
    }
    if plan.gpus.is_empty() {
        return Err(format!("--gpus is missing; {USAGE}"));
    }
    if command.is_empty() {
        return Err(format!("no command is given; {USAGE}"));
    }
    Ok((plan, command))
}

fn run() -> Result<ExitCode, String> {
    let (plan, command) = plan()?;
    // Whoever ends this program means the command; it goes when the command has gone.
    sys::catch_signals();
    let running = start(&plan).map_err(|e| {
        let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
        format!("{e}{cause}")
    })?;
    if let Some(signal) = sys::early_signal() {
        return Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)));
    }
    let lost = |e: std::io::Error| format!("cannot run {}: {e}", command[0]);
    let mut child = Command::new(&command[0])
        .args(&command[1..])
        .envs(running.environment())
        .spawn()
        .map_err(lost)?;
    sys::hand_signals_to(child.id());
    let status = child.wait().map_err(lost)?;
    sys::hand_signals_to(0);
    drop(running);
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}

#[expect(clippy::print_stderr, reason = "this is where errors reach the person who typed")]
fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("muxflow emulate: {error}");
            ExitCode::FAILURE
        }
    }
}
