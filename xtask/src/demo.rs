//! `cargo xtask demo`: builds the program with everything that it starts, and runs `muxflow demo`.

use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, ensure};
use clap::Args;

use crate::ci::{cargo, root};

/// What to build and what to pass on.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// Only build.
    #[arg(long)]
    build_only: bool,
    /// Fail when the demo itself takes longer than so many seconds; building does not count.
    #[arg(long, value_name = "SECONDS")]
    limit_s: Option<u64>,
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

/// The demo as the README has it, held to the time that the README promises.
pub(crate) fn run_within(limit_s: u64) -> anyhow::Result<()> {
    let args = DemoArgs { build_only: false, limit_s: Some(limit_s), rest: Vec::new() };
    let code = run(&args)?;
    ensure!(code == ExitCode::SUCCESS, "the demo failed");
    Ok(())
}

pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    build()?;
    if args.build_only {
        return Ok(ExitCode::SUCCESS);
    }
    // Ctrl-C is for the demo, which cleans up; this program waits for it.
    ignore_interrupts();
    let program = target().join("debug/muxflow");
    let began = Instant::now();
    let status = Command::new(&program)
        .arg("demo")
        .args(&args.rest)
        .status()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let took_s = began.elapsed().as_secs();
    println!("`muxflow demo` took {took_s} s after the build");
    if let Some(limit_s) = args.limit_s {
        ensure!(took_s <= limit_s, "the demo took {took_s} s, more than {limit_s}");
    }
    Ok(ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)))
}

extern "C" fn nothing(_: i32) {}

fn ignore_interrupts() {
    let handler: extern "C" fn(i32) = nothing;
    // SAFETY: the handler does nothing at all; unlike an ignored signal, it is not inherited.
    unsafe { libc::signal(libc::SIGINT, handler as libc::sighandler_t) };
}
