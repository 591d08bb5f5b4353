//! `muxflow demo`: emulated GPUs, real services and jobs, a burst and two errors; three times: the
//! services alone, with MuxFlow, and without protection.
//!
//! Two processes: this one prints, waits and cleans up; the other runs inside the emulated node, where
//! agent and services cannot tell its GPUs from real ones, and leaves its result as a file.

mod jobs;
mod load;
mod report;
mod scenario;
mod stage;
mod sweep;
mod view;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use muxflow_agent::cgroup::Cgroups;
use muxflow_agent::sys;
use tokio::net::TcpSocket;

use crate::installed;
use report::PhaseResult;
use scenario::{Offline, Phase, Programs, Served};
use sweep::Traces;

/// Show what sharing gains and what it costs the service, on emulated GPUs with real processes.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// How long the day lasts in each of the three phases.
    #[arg(long, default_value_t = DAY_S)]
    seconds: f64,
    /// Device seconds per second: below 1, kernels take longer, and a busy machine disturbs less.
    #[arg(long, default_value_t = 0.5)]
    time_factor: f64,
    /// Seed of the moments at which requests come.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Port of the dashboard; 0 picks one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Write every number to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run this phase; the demo starts itself with it.
    #[arg(long, hide = true)]
    inside: Option<PathBuf>,
}

/// A day, by default: three of them, with the time to start and to end each, are under three minutes.
const DAY_S: f64 = 40.0;
/// The whole demo needs this many GPUs.
const GPUS: u32 = 4;
/// One job more than there are GPUs, so that one waits.
const JOBS: u32 = 5;
/// How long the inner process may take to clean up after it was asked to stop.
const LEAVE_WITHIN: Duration = Duration::from_secs(25);

pub(crate) fn run(args: &DemoArgs) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.inside {
        return match stage::run(file) {
            Err(error) if error.is::<stage::Interrupted>() => Ok(ExitCode::from(130)),
            outcome => outcome.map(|()| ExitCode::SUCCESS),
        };
    }
    anyhow::ensure!(
        (5.0..=3600.0).contains(&args.seconds),
        "--seconds {}: a day lasts between 5 and 3600 seconds",
        args.seconds
    );
    anyhow::ensure!(
        (0.01..=10.0).contains(&args.time_factor),
        "--time-factor {}: it must lie between 0.01 and 10",
        args.time_factor
    );
    let (programs, door) = (programs()?, Door::open(args.port)?);
    let began = Instant::now();
    let ends = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
    let signals = sys::signal_fd(&ends).context("cannot watch for signals")?;
    sys::become_subreaper().context("cannot become the reaper of orphans")?;
    let traces = traces()?;
    let outcome = phases(args, &programs, &traces, &door, &signals);
    let kept = traces.sweep();
    for what in &kept {
        say(&format!("could not be removed: {what}"));
    }
    match outcome? {
        None => {
            say("interrupted; nothing is left behind");
            Ok(ExitCode::from(130))
        }
        Some(results) => {
            finish(args, &results)?;
            say(&format!("The demo took {:.0} s.", began.elapsed().as_secs_f64()));
            Ok(if kept.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
    }
}

/// A reader that is gone is no reason to leave things behind.
fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    drop(writeln!(out, "{text}").and_then(|()| out.flush()));
}

/// Whoever read this has seen enough (`| head`).
fn nobody_reads() -> bool {
    let mut out = libc::pollfd { fd: libc::STDOUT_FILENO, events: 0, revents: 0 };
    // SAFETY: one descriptor that lives through the call, which does not wait.
    let ready = unsafe { libc::poll(&mut out, 1, 0) };
    ready > 0 && out.revents & libc::POLLERR != 0
}

fn programs() -> anyhow::Result<Programs> {
    Ok(Programs {
        node: installed::program("muxflow-emulated-node")?,
        fault: installed::program("muxflow-emulated-fault")?,
        inference: installed::program("muxflow-example-inference")?,
        training: installed::program("muxflow-example-training")?,
        interposer: installed::interposer()?,
    })
}

/// The way to the dashboard, the same in all phases.
struct Door {
    port: u16,
    /// Who has it may do everything in the manager: nobody can guess it, and no process of ours carries
    /// it, so that a browser with it in its arguments is not taken for one.
    token: String,
    /// Keeps the port from others between two phases: bound, and nobody listens on it.
    _held: TcpSocket,
}

impl Door {
    fn open(port: u16) -> anyhow::Result<Self> {
        let failed = || format!("--port {port}: the dashboard cannot have it; name another one");
        let held = TcpSocket::new_v4().with_context(failed)?;
        // The manager may bind it too then; a port that is picked for somebody else is never this one.
        held.set_reuseaddr(true).with_context(failed)?;
        held.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).with_context(failed)?;
        let port = held.local_addr().with_context(failed)?.port();
        Ok(Door { port, token: random_token()?, _held: held })
    }
}

fn random_token() -> anyhow::Result<String> {
    const SOURCE: &str = "/dev/urandom";
    let mut bytes = [0; 16];
    let read = std::fs::File::open(SOURCE).and_then(|mut source| source.read_exact(&mut bytes));
    read.with_context(|| format!("cannot read {SOURCE}"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Everything of this demo is under one name of its own.
fn traces() -> anyhow::Result<Traces> {
    let label = format!("muxflow-demo-{}-{:x}", std::process::id(), sys::monotonic_ns());
    let base = std::env::temp_dir().join(&label);
    // Control blocks and the sockets of MPS must be on a memory file system.
    let run = Path::new("/dev/shm").join(&label);
    for dir in [&base, &run] {
        // The token is in there.
        let made = std::fs::DirBuilder::new().mode(0o700).create(dir);
        made.with_context(|| format!("cannot make {}", dir.display()))?;
    }
    Ok(Traces { label, dirs: vec![base, run] })
}

fn explain(traces: &Traces, args: &DemoArgs) {
    say(&format!(
        "MuxFlow demo: {GPUS} emulated T4s, 3 services under a day of requests in {:.0} s, {JOBS} training jobs.",
        args.seconds
    ));
    say(
        "A burst of 5 times the requests at 10:00, a job that breaks the GPU's context at 15:00, SIGTERM to a job at 19:00.",
    );
    say(
        "GPUs are emulated; every process is real, and every number below comes from what these processes did.",
    );
    let groups = Cgroups::detect(&traces.label);
    for lacking in groups.shortcomings() {
        say(&format!("NOTE: {lacking}"));
    }
}

fn phases(
    args: &DemoArgs,
    programs: &Programs,
    traces: &Traces,
    door: &Door,
    signals: &OwnedFd,
) -> anyhow::Result<Option<Vec<PhaseResult>>> {
    explain(traces, args);
    let mut services = scenario::services();
    let mut results: Vec<PhaseResult> = Vec::new();
    for (number, offline) in
        [Offline::None, Offline::Protected, Offline::Bare].into_iter().enumerate()
    {
        let dir = traces.dirs[0].join(number.to_string());
        std::fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let run_dir = traces.dirs[1].join(number.to_string());
        let phase = Phase {
            offline,
            day_s: args.seconds,
            seed: args.seed,
            services: services.clone(),
            jobs: if offline == Offline::Bare { GPUS } else { JOBS },
            solo_per_s: results.first().and_then(|first| first.solo_per_s),
            dir: dir.clone(),
            run_dir,
            label: traces.label.clone(),
            programs: programs.clone(),
            port: door.port,
            token: door.token.clone(),
        };
        say(&format!("\n{}. {}", number + 1, offline.title()));
        let Some(result) = one(args, &phase, signals)? else { return Ok(None) };
        if results.is_empty() {
            promise(&mut services, &result);
        }
        results.push(result);
    }
    Ok(Some(results))
}

/// The SLO of a service: twice the 99th percentile that it has alone on this very machine.
fn promise(services: &mut [Served], alone: &PhaseResult) {
    for (service, seen) in services.iter_mut().zip(&alone.services) {
        let slo_ms = (2.0 * seen.p99_ms).ceil().max(20.0);
        service.slo_ms = Some(slo_ms);
        say(&format!(
            "  {}: p99 {:.1} ms alone, so its SLO is {slo_ms:.0} ms",
            service.name, seen.p99_ms
        ));
    }
}

/// Runs one phase; none when it was interrupted.
fn one(args: &DemoArgs, phase: &Phase, signals: &OwnedFd) -> anyhow::Result<Option<PhaseResult>> {
    let file = phase.dir.join("phase.json");
    std::fs::write(&file, serde_json::to_string_pretty(phase)?)
        .context("cannot write the phase")?;
    let own = std::env::current_exe().context("cannot find the path of this program")?;
    let mut child = Command::new(&phase.programs.node)
        .args(["--gpus", &format!("t4x{GPUS}")])
        .args(["--time-factor", &args.time_factor.to_string()])
        .args(["--seed", &args.seed.to_string()])
        .arg("--dir")
        .arg(phase.dir.join("node"))
        .arg("--")
        .arg(own)
        .args(["demo", "--inside"])
        .arg(&file)
        // A terminal's Ctrl-C reaches this process alone, which passes it on to the right one.
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot run {}", phase.programs.node.display()))?;
    let (ended, asked) = wait(&mut child, phase, signals)?;
    if asked {
        return Ok(None);
    }
    let path = phase.dir.join("result.json");
    let Ok(text) = std::fs::read_to_string(&path) else {
        let log = std::fs::read_to_string(phase.dir.join("demo.log")).unwrap_or_default();
        let tail: Vec<&str> = log.lines().rev().take(15).collect();
        let tail: Vec<&str> = tail.into_iter().rev().collect();
        anyhow::bail!(
            "the phase ended with {ended} and no result; the end of its log:\n{}",
            tail.join("\n")
        );
    };
    Ok(Some(serde_json::from_str(&text).context("the result cannot be read")?))
}

/// Waits for the phase; passes a signal on to the process inside the node.
fn wait(
    child: &mut Child,
    phase: &Phase,
    signals: &OwnedFd,
) -> anyhow::Result<(std::process::ExitStatus, bool)> {
    let mut asked: Option<Instant> = None;
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, asked.is_some()));
        }
        if asked.is_none() && (sys::take_signal(signals.as_fd()).is_some() || nobody_reads()) {
            asked = Some(Instant::now());
        }
        if let Some(since) = asked {
            let inner = std::fs::read_to_string(phase.dir.join("inner.pid")).ok();
            if let Some(pid) = inner.and_then(|text| text.trim().parse().ok())
                && !told
            {
                told = sys::kill(pid, libc::SIGTERM).is_ok();
            }
            if since.elapsed() > LEAVE_WITHIN {
                // What it leaves is swept up.
                drop(sys::kill_group(child.id(), libc::SIGKILL));
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn finish(args: &DemoArgs, results: &[PhaseResult]) -> anyhow::Result<()> {
    say(&format!("\n{}", report::table(results)));
    say(
        "Slow-down is against the services alone. Oversold GPU is the time that jobs would have needed alone,",
    );
    say(
        "divided by the time they were on GPUs. An error is contained when no request failed because of it.",
    );
    say("A service that lost its context to an error is started again: its p99 holds that time.");
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(results)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The promise of the README, as far as the plan goes: `cargo xtask soak` holds a whole one to it.
    #[test]
    fn the_plan_of_the_demo_is_under_three_minutes() {
        /// Seconds to start and to end a phase; about half of it was seen on two busy cores.
        const AROUND_S: f64 = 15.0;
        let plan_s = stage::SOLO_S + 3.0 * (DAY_S + AROUND_S);
        assert!(plan_s < 180.0, "{plan_s} s");
    }
}
