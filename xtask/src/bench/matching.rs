//! The matching beside other solvers, each measurement in a process of its own, by CPU time.
//!
//! The other crates are built in a workspace of their own (`xtask/bench-matching`), scipy and
//! OR-tools go into a throw-away environment under `target`: the product depends on none of them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;

use crate::ci::root;

/// Settings of the benchmark.
#[derive(Debug, Args)]
pub(crate) struct MatchingBench {
    /// CPU seconds after which another solver is stopped and marked so.
    #[arg(long, default_value_t = 120)]
    limit_s: u64,
    /// Largest instance, by rows.
    #[arg(long, default_value_t = 20_000)]
    max_rows: usize,
    /// Largest instance for the other solvers, by rows.
    #[arg(long, default_value_t = 8_000)]
    max_rows_others: usize,
    /// Only our own solver.
    #[arg(long)]
    alone: bool,
    /// Only instances of this kind: uniform, cluster or replicas.
    #[arg(long)]
    kind: Option<String>,
}

const SIZES: [(usize, usize); 5] =
    [(1_000, 1_000), (1_000, 7_000), (4_000, 4_000), (8_000, 8_000), (20_000, 20_000)];
const KINDS: [&str; 3] = ["uniform", "cluster", "replicas"];
const OTHERS: [&str; 4] = ["scipy", "ortools", "lapjv", "pathfinding"];

/// Where things are made.
struct Place {
    target: PathBuf,
    python: Option<PathBuf>,
}

/// Measures and prints the table.
pub(crate) fn run(bench: &MatchingBench) -> anyhow::Result<()> {
    let place = prepare(bench)?;
    println!(
        "| weights | size | read once, s | ours, s | in reads | memory ÷ matrix | 2 % of rows changed, in reads | scipy | OR-tools | lapjv | pathfinding |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |");
    for kind in KINDS.into_iter().filter(|k| bench.kind.as_deref().is_none_or(|only| only == *k)) {
        for (rows, cols) in SIZES.into_iter().filter(|&(rows, _)| rows <= bench.max_rows) {
            println!("{}", line(bench, &place, kind, rows, cols)?);
        }
    }
    Ok(())
}

fn prepare(bench: &MatchingBench) -> anyhow::Result<Place> {
    let target = root().join("target/bench-matching");
    std::fs::create_dir_all(target.join("data")).context("cannot make target/bench-matching")?;
    eprintln!("building the measuring programs");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let manifest = root().join("xtask/bench-matching/Cargo.toml");
    succeed(
        Command::new(cargo)
            .args(["build", "--release", "--locked", "--quiet", "--manifest-path"])
            .arg(manifest)
            .env("CARGO_TARGET_DIR", &target),
    )?;
    if bench.alone {
        return Ok(Place { target, python: None });
    }
    let venv = target.join("venv");
    let python = venv.join("bin/python");
    let works = Command::new(&python)
        .args(["-c", "import numpy, scipy, ortools"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|s| s.success());
    if !works {
        eprintln!("installing scipy and OR-tools into {}", venv.display());
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
        succeed(
            Command::new(&python).args(["-m", "pip", "-q", "install", "numpy", "scipy", "ortools"]),
        )?;
    }
    Ok(Place { target, python: Some(python) })
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let status = command.status().with_context(|| format!("cannot start {command:?}"))?;
    if !status.success() {
        bail!("{command:?} failed: {status}");
    }
    Ok(())
}

/// One line of the table.
fn line(
    bench: &MatchingBench,
    place: &Place,
    kind: &str,
    rows: usize,
    cols: usize,
) -> anyhow::Result<String> {
    let file = place.target.join(format!("data/{kind}-{rows}x{cols}.f32"));
    let instance = [kind.to_owned(), rows.to_string(), cols.to_string(), "1".to_owned()];
    eprintln!("{kind} {rows} × {cols}: ours");
    let program = place.target.join("release/ours");
    let ours = measure(Command::new(program).args(&instance).arg(&file), u64::MAX)?
        .context("our own solver has no limit")?;
    let number = |value: &Value, name: &str| value[name].as_f64().unwrap_or(f64::NAN);
    let (unit_s, ours_s) = (number(&ours, "stream_s"), number(&ours, "cpu_s"));
    let memory = number(&ours, "peak_bytes") / (4.0 * rows as f64 * cols as f64);
    let warm = ours["warm_s"].as_f64().map_or("-".to_owned(), |s| format!("{:.0}", s / unit_s));
    let mut out = format!(
        "| {kind} | {rows} × {cols} | {unit_s:.4} | {ours_s:.3} | {:.0} | {memory:.2} | {warm}",
        ours_s / unit_s
    );
    for other in OTHERS {
        let cell = match other_solver(bench, place, other, &instance, &file)? {
            Outcome::NotRun(why) => why,
            Outcome::Stopped => {
                let least = bench.limit_s as f64 / ours_s;
                format!("stopped at {} s (> {least:.0}×)", bench.limit_s)
            }
            Outcome::Done { cpu_s, value } => {
                let wanted = number(&ours, "value");
                if (value - wanted).abs() > 1e-6 * wanted.abs() {
                    bail!("{other} finds {value} where we prove {wanted}");
                }
                format!("{cpu_s:.2} s ({:.1}×)", cpu_s / ours_s)
            }
        };
        out.push_str(" | ");
        out.push_str(&cell);
    }
    out.push_str(" |");
    Ok(out)
}

enum Outcome {
    NotRun(String),
    Stopped,
    Done { cpu_s: f64, value: f64 },
}

fn other_solver(
    bench: &MatchingBench,
    place: &Place,
    other: &str,
    instance: &[String; 4],
    file: &Path,
) -> anyhow::Result<Outcome> {
    let (rows, cols): (usize, usize) = (instance[1].parse()?, instance[2].parse()?);
    let Some(python) = &place.python else { return Ok(Outcome::NotRun("not run".into())) };
    if rows > bench.max_rows_others {
        return Ok(Outcome::NotRun("not run".into()));
    }
    if rows != cols && matches!(other, "ortools" | "lapjv") {
        return Ok(Outcome::NotRun("square only".into()));
    }
    eprintln!("{} {rows} × {cols}: {other}", instance[0]);
    let mut command = if matches!(other, "scipy" | "ortools") {
        let mut command = Command::new(python);
        command.arg(root().join("xtask/bench-matching/references.py"));
        command.args([other, &instance[1], &instance[2]]).arg(file);
        command.env("OMP_NUM_THREADS", "1");
        command
    } else {
        let mut command = Command::new(place.target.join("release/crates"));
        command.arg(other).args(instance).arg(file);
        command
    };
    Ok(match measure(&mut command, bench.limit_s)? {
        None => Outcome::Stopped,
        Some(found) => Outcome::Done {
            cpu_s: found["cpu_s"].as_f64().context("no cpu_s")?,
            value: found["value"].as_f64().context("no value")?,
        },
    })
}

/// Runs a measuring program; nothing when it used more CPU time than the limit.
fn measure(command: &mut Command, limit_s: u64) -> anyhow::Result<Option<Value>> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command:?}"))?;
    loop {
        if let Some(status) = child.try_wait()? {
            let output = child.wait_with_output()?;
            if !status.success() {
                bail!("{command:?} failed: {status}");
            }
            return serde_json::from_slice(&output.stdout)
                .with_context(|| format!("{command:?} printed no JSON"))
                .map(Some);
        }
        if cpu_s(child.id()).is_some_and(|used| used > limit_s) {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// User and system time of a process so far, from /proc, in seconds.
fn cpu_s(pid: u32) -> Option<u64> {
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
    Some(ticks / TICKS_PER_SECOND)
}
