//! `cargo xtask soak`: what tests do a few times, done long enough to find what is rare.

use std::process::Command;

use anyhow::{Context, bail};
use clap::Args;

use crate::reliability::measured;

/// How long.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Clients of an emulated GPU that are killed at random moments.
    #[arg(long, default_value_t = 1000)]
    kills: u32,
    /// SIGTERM and SIGINT to a job in the middle of work, beside a service that must lose nothing.
    #[arg(long, default_value_t = 1000)]
    signals: u32,
    /// Bursts of traffic, each of which must shut the gate.
    #[arg(long, default_value_t = 3)]
    bursts: u32,
    /// Minutes of watching a GPU, in which the memory of the agent must stay flat.
    #[arg(long, default_value_t = 10)]
    minutes: u32,
    /// kill -9 of the manager at random moments of a busy run.
    #[arg(long, default_value_t = 200)]
    manager_kills: u32,
    /// Processes of one job under the interposer that allocate, fork, exec and are killed at random.
    #[arg(long, default_value_t = 200)]
    processes: u32,
    /// How long they are killed, each of three times.
    #[arg(long, default_value_t = 20)]
    seconds: u32,
    /// Leave them out.
    #[arg(long)]
    without_chaos: bool,
    /// Seconds that the demo may take; 0 leaves it out.
    #[arg(long, default_value_t = 180)]
    demo_s: u64,
}

/// Runs the long forms of the tests.
pub(crate) fn run(args: &SoakArgs) -> anyhow::Result<()> {
    if args.demo_s > 0 {
        println!("the demo, in at most {} s", args.demo_s);
        crate::demo::run_within(args.demo_s)?;
    }
    if args.kills > 0 {
        println!("killing {} clients of an emulated GPU", args.kills);
        kill_clients(args.kills)?;
    }
    if args.signals > 0 {
        println!("{} signals to a job in the middle of work", args.signals);
        let test = "reliability::signals_to_the_job_in_the_middle_of_work_cost_the_service_nothing";
        print_all(&measured(&[test], false, args.signals)?);
    }
    if args.bursts > 0 {
        println!("{} bursts of traffic", args.bursts);
        let test = "burst::reaction_to_five_times_the_traffic";
        print_all(&measured(&[test], true, args.bursts)?);
    }
    if args.minutes > 0 {
        println!("watching a GPU for {} minutes", args.minutes);
        let test = "behaviour::watching_a_gpu_costs_little_and_memory_stays_flat";
        print_all(&measured(&[test], false, args.minutes * 60)?);
    }
    if args.manager_kills > 0 {
        println!("killing the manager {} times", args.manager_kills);
        kill_manager(args.manager_kills)?;
    }
    if !args.without_chaos {
        println!("{} processes of one job under the interposer, three times", args.processes);
        chaos(args.processes, args.seconds)?;
    }
    Ok(())
}

/// What it says is kept in `target/chaos.txt` too: it takes long, and comes of chance.
fn chaos(processes: u32, seconds: u32) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["run", "--quiet", "-p", "muxflow-e2e", "--bin", "soak", "--"])
        .args([processes.to_string(), seconds.to_string()])
        .current_dir(crate::ci::root())
        .output()
        .context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    println!("{text}");
    let kept = crate::ci::root().join("target/chaos.txt");
    std::fs::write(&kept, text.as_bytes()).with_context(|| kept.display().to_string())?;
    if !output.status.success() {
        bail!("the soak failed: {}; see {}", output.status, kept.display());
    }
    Ok(())
}

fn print_all(lines: &[String]) {
    for line in lines {
        println!("  {line}");
    }
}

fn kill_manager(kills: u32) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["test", "-p", "muxflow-e2e", "--test", "manager", "kills", "--", "--nocapture"])
        .env("MUXFLOW_MANAGER_KILLS", kills.to_string())
        .current_dir(crate::ci::root())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("the soak failed: {status}");
    }
    Ok(())
}

fn kill_clients(kills: u32) -> anyhow::Result<()> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let test = ["test", "-p", "muxflow-emulated-gpu", "--test", "driver", "killed_at_any_time"];
    let status = Command::new(cargo)
        .args(test)
        .env("MUXFLOW_KILLS", kills.to_string())
        .current_dir(crate::ci::root())
        .status()
        .context("cannot start cargo")?;
    if !status.success() {
        bail!("the soak failed: {status}");
    }
    Ok(())
}
