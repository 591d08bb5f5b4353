//! The emulated GPU: what a launch costs its caller, what an idle device costs, and how many GPUs
//! fit on this machine.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, anyhow, bail};
use clap::Args;

/// Launch cost, idle cost, eight GPUs at once.
#[derive(Debug, Args)]
pub(crate) struct EmulatedBench {
    /// Bursts of 900 launches.
    #[arg(long, default_value_t = 300)]
    bursts: u32,
}

const PACKAGES: [&str; 8] = [
    "-p",
    "muxflow-emulated-gpu",
    "-p",
    "muxflow-emulated-cuda",
    "-p",
    "muxflow-emulated-nvml",
    "-p",
    "muxflow-emulated-dcgm",
];

/// Runs the client on a node; what it printed.
fn run_on(built: &Path, gpus: &str, script: &str) -> anyhow::Result<String> {
    let output = Command::new(built.join("muxflow-emulated-node"))
        .args(["--gpus", gpus, "--", "sh", "-c", script])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run muxflow-emulated-node")?;
    if !output.status.success() {
        bail!("`{script}` on {gpus} failed: {}", output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Ticks of processor time (10 ms each) of all device processes of a node.
const TICKS: &str = "for p in $(pgrep -P $PPID muxflow-emulate); do cut -d' ' -f14,15 /proc/$p/stat; \
                     done | awk '{s += $1 + $2} END {print s + 0}'";

pub(crate) fn run(args: &EmulatedBench) -> anyhow::Result<()> {
    let mut build = vec!["build", "--release", "--quiet"];
    build.extend(PACKAGES);
    crate::ci::cargo(&build)?;
    let root = crate::ci::root();
    let built: PathBuf = root.join("target/release");
    let client = built.join("emulated-client");
    let status = Command::new("cc")
        .args(["-O2", "-w", "-o"])
        .arg(&client)
        .arg(root.join("crates/emulated-gpu/tests/c/client.c"))
        .arg("-ldl")
        .status()
        .context("cannot run cc")?;
    if !status.success() {
        bail!("the client does not compile: {status}");
    }
    let client = client.display();
    let launches = |what: &str| -> anyhow::Result<[f64; 3]> {
        let line = run_on(&built, "t4", &format!("{what} {}", args.bursts))?;
        let numbers: Vec<f64> = line.split(' ').filter_map(|w| w.parse().ok()).collect();
        numbers.try_into().map_err(|_| anyhow!("odd answer: {line}"))
    };
    let [best, mean, round_trip] = launches(&format!("{client} launch"))?;
    // Timed only, so that the launch is measured and not the sum.
    let vadd = format!("MUXFLOW_EMULATED_COMPUTE_LIMIT=0 {client} arguments");
    let [best_vadd, mean_vadd, _] = launches(&vadd)?;
    println!("| measure | value |\n| --- | --- |");
    println!("| `cuLaunchKernel`, best burst of 900 | {best:.0} ns |");
    println!("| `cuLaunchKernel`, mean of {} bursts | {mean:.0} ns |", args.bursts);
    println!(
        "| the same of PTX with four arguments, best, mean | {best_vadd:.0} ns, {mean_vadd:.0} ns |"
    );
    println!("| launch of a 5 µs kernel and wait for it | {round_trip:.1} µs |");
    let idle = format!("sleep 1; a=$({TICKS}); sleep 10; b=$({TICKS}); echo $((b - a))");
    let ticks = run_on(&built, "t4x8", &idle)?;
    println!("| processor time of eight idle devices in 10 s | {ticks} ticks of 10 ms |");
    let eight = format!(
        "for g in 0 1 2 3 4 5 6 7; do for i in 1 2; do \
         CUDA_VISIBLE_DEVICES=$g {client} busy 500 & done; done; wait"
    );
    let began = Instant::now();
    let times = run_on(&built, "t4x8", &eight)?;
    let wall = began.elapsed();
    let times: Vec<f64> = times.lines().filter_map(|l| l.parse().ok()).collect();
    let longest = times.iter().copied().fold(0.0, f64::max);
    println!(
        "| 8 GPUs × 2 processes × 500 kernels of 1 ms: longest device time, wall time | {longest:.0} ms, {:.0} ms |",
        wall.as_secs_f64() * 1e3
    );
    Ok(())
}
