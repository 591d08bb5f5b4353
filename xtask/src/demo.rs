//! `cargo xtask demo`: builds the program with everything that it starts, and runs `muxflow demo`.

use std::process::{Command, ExitCode};

use anyhow::Context;
use clap::Args;

use crate::ci::{cargo, root};

/// What to build and what to pass on.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Only build.
    #[arg(long)]
    build_only: bool,
    /// Arguments of `muxflow demo`, such as `--seconds 20`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

/// Packages whose programs and libraries the demo needs beside the program itself.
pub(crate) const PACKAGES: [&str; 7] = [
    "muxflow-cli",
    // Its keeper is in the program; named, because the tests build it too, and with another choice
    // of packages cargo would compile all that they share once more.
    "muxflow-agent",
    "muxflow-emulated-gpu",
    "muxflow-emulated-cuda",
    "muxflow-emulated-nvml",
    "muxflow-emulated-dcgm",
    "muxflow-examples",
];

/// Builds all of it. The dev profile, because it is built sooner; what must be fast is optimised there
/// too.
fn build() -> anyhow::Result<()> {
    let mut arguments = vec!["build", "--locked"];
    for package in PACKAGES {
        arguments.extend(["-p", package]);
    }
    cargo(&arguments)?;
    cargo(&["build", "--locked", "--profile", "xcuda", "-p", "muxflow-xcuda"])
}

/// Where cargo puts things.
pub(crate) fn target() -> std::path::PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), Into::into)
}

pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    build()?;
    if args.build_only {
        return Ok(ExitCode::SUCCESS);
    }
    // Ctrl-C is for the demo, which cleans up; this program waits for it.
    ignore_interrupts();
    let program = target().join("debug/muxflow");
    let status = Command::new(&program)
        .arg("demo")
        .args(&args.rest)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}

extern "C" fn nothing(_: i32) {}

fn ignore_interrupts() {
    let handler: extern "C" fn(i32) = nothing;
    // SAFETY: the handler does nothing at all; unlike an ignored signal, it is not inherited.
    unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
}
