//! `cargo xtask dist`: a tarball that works wherever it is unpacked.
//!
//! | in the tarball | what |
//! | --- | --- |
//! | `bin/muxflow` | the program |
//! | `lib/muxflow/` | the interposer; the emulated GPU and the examples, which the demo starts |
//! | `lib/systemd/system/` | the unit |
//! | `share/man/man1`, completions for bash, zsh and fish | made by the program itself |
//! | `share/doc/muxflow/` | licence, README, configuration with every default |
//!
//! The emulated `nvidia-cuda-mps-control` is kept out of `bin`: there it could take the place of the
//! real one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use clap::Args;

use crate::ci::{cargo, root};
use crate::demo::{PACKAGES, target};

/// How to build and where to put it.
#[derive(Debug, Args)]
pub(crate) struct DistArgs {
    /// Cargo profile of everything but the interposer, which has its own.
    #[arg(long, default_value = "release")]
    profile: String,
    /// Directory for the tarball.
    #[arg(long, default_value = "target/dist")]
    out: PathBuf,
    /// Fail when the build takes more CPU time; for a build of everything, `cargo clean` first.
    #[arg(long, value_name = "MINUTES")]
    limit_cpu_min: Option<f64>,
}

/// What goes into `lib/muxflow` beside the interposer.
const PARTS: [&str; 10] = [
    "muxflow-emulated-node",
    "muxflow-emulated-device",
    "muxflow-emulated-fault",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "libmuxflow_emulated_cuda.so",
    "libmuxflow_emulated_nvml.so",
    "libmuxflow_emulated_dcgm.so",
    "muxflow-example-inference",
    "muxflow-example-training",
];

pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    if let Some(dir) = to.parent() {
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    }
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

pub(crate) fn run_program(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Builds everything in a profile, and the interposer in its own; where the programs are then.
pub(crate) fn build(profile: &str) -> anyhow::Result<PathBuf> {
    let mut words = vec!["build", "--locked", "--profile", profile];
    for package in PACKAGES {
        words.extend(["-p", package]);
    }
    cargo(&words)?;
    cargo(&["build", "--locked", "--profile", "xcuda", "-p", "muxflow-xcuda"])?;
    Ok(target().join(if profile == "dev" { "debug" } else { profile }))
}

/// Where the build of the interposer is.
pub(crate) fn interposer() -> PathBuf {
    target().join("xcuda/libxcuda.so")
}

/// What a clean build may take.
const CLEAN_BUILD_CPU_MIN: u32 = 15;

/// CPU time of all processes that this one started and waited for, and of those that these did.
fn children_cpu_s() -> f64 {
    // SAFETY: all zero is a usage of nothing, and the call writes to the one that it is given.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage);
        usage
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// Builds, lays out and packs; prints the path of the tarball.
pub(crate) fn run(args: &DistArgs) -> anyhow::Result<()> {
    let before_s = children_cpu_s();
    let built = build(&args.profile)?;
    let build_s = children_cpu_s() - before_s;
    let name = format!("muxflow-{}-{}-linux", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH);
    let out = if args.out.is_absolute() { args.out.clone() } else { root().join(&args.out) };
    let tree = out.join(&name);
    if tree.exists() {
        fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))?;
    }
    copy(&built.join("muxflow"), &tree.join("bin/muxflow"))?;
    for part in PARTS {
        copy(&built.join(part), &tree.join("lib/muxflow").join(part))?;
    }
    copy(&interposer(), &tree.join("lib/muxflow/libxcuda.so"))?;
    let unit = "muxflow.service";
    copy(&root().join("deploy/systemd").join(unit), &tree.join("lib/systemd/system").join(unit))?;
    for file in ["LICENSE", "README.md"] {
        copy(&root().join(file), &tree.join("share/doc/muxflow").join(file))?;
    }
    for file in fs::read_dir(root().join("config"))?.flatten() {
        copy(&file.path(), &tree.join("share/doc/muxflow").join(file.file_name()))?;
    }
    run_program(Command::new(tree.join("bin/muxflow")).arg("manual").arg(tree.join("share")))?;
    let tarball = out.join(format!("{name}.tar.gz"));
    run_program(
        Command::new("tar")
            .args([
                "--sort=name",
                "--owner=0",
                "--group=0",
                "--numeric-owner",
                "--mtime=@0",
                "-czf",
            ])
            .arg(&tarball)
            .arg("-C")
            .arg(&out)
            .arg(&name),
    )?;
    let bytes = fs::metadata(&tarball)?.len();
    println!("{} ({:.1} MB)", tarball.display(), bytes as f64 / 1e6);
    println!(
        "the build took {:.1} CPU-minutes; `cargo clean` and `--limit-cpu-min {CLEAN_BUILD_CPU_MIN}` hold a clean one to what it may take",
        build_s / 60.0
    );
    within(build_s, args.limit_cpu_min)
}

/// Whether a build took no longer than it may.
fn within(build_s: f64, limit_cpu_min: Option<f64>) -> anyhow::Result<()> {
    let Some(limit_min) = limit_cpu_min else { return Ok(()) };
    let took_min = build_s / 60.0;
    ensure!(
        took_min <= limit_min,
        "the build took {took_min:.1} CPU-minutes, more than {limit_min}; `cargo build --timings` shows where they went"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_takes_too_long_fails_where_it_is_held_to_it() {
        assert!(within(60.0 * 60.0, None).is_ok());
        assert!(within(14.9 * 60.0, Some(15.0)).is_ok());
        let error = within(15.2 * 60.0, Some(15.0)).unwrap_err().to_string();
        assert!(error.contains("15.2 CPU-minutes, more than 15"), "{error}");
    }
}
