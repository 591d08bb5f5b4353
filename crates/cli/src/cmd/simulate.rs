//! `muxflow simulate`: what sharing would give a cluster, policy by policy.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, ValueEnum};
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use muxflow_sim::trace::{JobRow, MultiGpu, read_jobs, read_requests};
use muxflow_sim::{Scenario, compare, policy, predictors, report};

/// What becomes of rows of several GPUs.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum MultiGpuArg {
    /// One job of one GPU.
    One,
    /// As many jobs as GPUs.
    Split,
    /// Left out.
    Drop,
}

impl From<MultiGpuArg> for MultiGpu {
    fn from(arg: MultiGpuArg) -> Self {
        match arg {
            MultiGpuArg::One => MultiGpu::One,
            MultiGpuArg::Split => MultiGpu::Split,
            MultiGpuArg::Drop => MultiGpu::Drop,
        }
    }
}

/// Simulate a cluster for a day: what sharing gains for jobs, and what it costs services.
///
/// Without --trace, jobs are generated like those of the public Philly trace; without --requests,
/// services get generated daily curves. The same seed gives the same result.
#[derive(Debug, Args)]
pub(crate) struct SimulateArgs {
    /// GPUs in the cluster: how many, or how many of each type, as in T4:600,A10:400.
    #[arg(long, default_value = "1000", value_name = "N|TYPE:N,...")]
    gpus: String,
    /// Their type, where --gpus names none.
    #[arg(long, default_value = "T4", value_name = "TYPE")]
    gpu_type: String,
    /// A trace of jobs: own CSV, Philly (CSV or JSON), Muri, Helios or openb; plain or gzipped.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Only this virtual cluster (Philly, Helios) or quality class (openb) of the trace.
    #[arg(long, value_name = "NAME", requires = "trace")]
    group: Option<String>,
    /// What becomes of rows of several GPUs.
    #[arg(long, value_enum, default_value_t = MultiGpuArg::One, requires = "trace")]
    multi_gpu: MultiGpuArg,
    /// Press the trace's arrivals into so many hours.
    #[arg(long, value_name = "HOURS", requires = "trace")]
    arrive_within: Option<f64>,
    /// Cut durations of the trace to so many hours.
    #[arg(long, value_name = "HOURS", requires = "trace")]
    longest: Option<f64>,
    /// Jobs to generate without a trace.
    #[arg(long, default_value_t = 3000, conflicts_with = "trace")]
    jobs: usize,
    /// How much of all GPUs the generated jobs would fill alone over their twelve hours.
    #[arg(long, default_value_t = 0.5, conflicts_with = "trace")]
    fill: f64,
    /// Request rates for the services: own CSV, ServeGen or Azure; the busiest curves are used.
    #[arg(long, value_name = "FILE")]
    requests: Option<PathBuf>,
    /// One policy to run.
    #[arg(long, default_value = "muxflow", conflicts_with = "compare")]
    policy: String,
    /// Policies to put side by side, separated by commas, or `all`.
    #[arg(long, value_name = "POLICIES", value_delimiter = ',', num_args = 1..)]
    compare: Option<Vec<String>>,
    /// Where predicted speeds come from: mlp, kernel, trees, rule, or oracle (the truth, a bound).
    #[arg(long, default_value = "mlp")]
    predictor: String,
    /// Minutes between plans.
    #[arg(long, default_value_t = 15.0, value_name = "MINUTES")]
    interval: f64,
    /// Online metrics are taken over so many hours.
    #[arg(long, default_value_t = 24.0)]
    hours: f64,
    /// No faults strike.
    #[arg(long)]
    no_faults: bool,
    /// Seed of everything random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads; each runs one policy at a time.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Write everything as JSON to this file; `-` writes it to standard output instead of the table.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write the time series as CSV to this file.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write one row for each job as CSV to this file.
    #[arg(long, value_name = "FILE")]
    jobs_csv: Option<PathBuf>,
    /// Write a page with interactive charts to this file.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Runs the command.
pub(crate) fn run(args: SimulateArgs) -> anyhow::Result<ExitCode> {
    let scenario = scenario(&args)?;
    let names = policies(&args)?;
    let types: Vec<_> = scenario.pools.iter().map(|p| p.profile.clone()).collect();
    let predictor = predictors::by_name(&args.predictor, &types, args.seed)?;
    let bars = Bars::new(&names, scenario.jobs.len());
    let results = compare(&scenario, &names, &predictor, args.threads, &|i, at, left| {
        bars.update(i, at, left);
    })?;
    bars.finish();
    let json = report::json(&results, args.seed);
    let mut out = std::io::stdout().lock();
    let to_stdout = args.json.as_deref() == Some(Path::new("-"));
    if to_stdout {
        writeln!(out, "{json}")?;
    } else {
        writeln!(
            out,
            "{}, {} jobs, seed {}; predictor: {}\n",
            cluster(&scenario),
            scenario.jobs.len(),
            args.seed,
            predictor.name
        )?;
        write!(out, "{}", report::comparison(&results, false))?;
        for r in &results {
            writeln!(
                out,
                "\n{}: {}; {} events, {:.1} s planning, {:.1} s the rest",
                r.policy, r.about, r.counts.events, r.spent.planning_s, r.spent.rest_s
            )?;
        }
    }
    if let Some(path) = args.json.as_ref().filter(|_| !to_stdout) {
        write_file(path, &format!("{json}\n"))?;
    }
    if let Some(path) = &args.csv {
        write_file(path, &report::series_csv(&results))?;
    }
    if let Some(path) = &args.jobs_csv {
        write_file(path, &report::jobs_csv(&results))?;
    }
    if let Some(path) = &args.html {
        let note = format!(
            "{}, {} jobs, seed {}. Predictor: {}. A simulation on a modelled GPU, see docs/gpu-model.md.",
            cluster(&scenario),
            scenario.jobs.len(),
            args.seed,
            predictor.name
        );
        write_file(path, &report::page("MuxFlow simulation", &note, &results, args.seed))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn write_file(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

fn policies(args: &SimulateArgs) -> anyhow::Result<Vec<String>> {
    let names = match &args.compare {
        None => vec![args.policy.clone()],
        Some(list) if list.iter().any(|n| n == "all") => {
            policy::names().into_iter().map(str::to_owned).collect()
        }
        Some(list) => list.clone(),
    };
    for name in &names {
        policy::by_name(name, args.seed)?;
    }
    Ok(names)
}

fn scenario(args: &SimulateArgs) -> anyhow::Result<Scenario> {
    for (flag, value) in [
        ("--hours", args.hours),
        ("--interval", args.interval),
        ("--fill", args.fill),
        ("--arrive-within", args.arrive_within.unwrap_or(1.0)),
        ("--longest", args.longest.unwrap_or(1.0)),
    ] {
        if !(value.is_finite() && value > 0.0) {
            bail!("{flag} is {value}; write a number above 0");
        }
    }
    let pools = pools(&args.gpus, &args.gpu_type)?;
    let gpus = pools.iter().map(|(_, n)| n).sum();
    let mut scenario = match &args.trace {
        None => Scenario::generated(gpus, args.jobs, args.fill, args.seed)?,
        Some(path) => {
            let trace = read_jobs(path, args.group.as_deref(), args.multi_gpu.into())?;
            let jobs = fitted(trace.jobs, args.arrive_within, args.longest);
            Scenario::new(&args.gpu_type, gpus, jobs, args.seed)?
        }
    };
    scenario.pools.clear();
    for (gpu_type, n) in &pools {
        scenario.pools.extend(Scenario::new(gpu_type, *n, Vec::new(), args.seed)?.pools);
    }
    if let Some(path) = &args.requests {
        let mut curves = read_requests(path)?;
        curves.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
        for (service, curve) in scenario.services.iter_mut().zip(curves.iter().cycle()) {
            // The trace's shape, at rates that one replica of this service can have.
            let low = service.curve.rates.iter().copied().fold(f64::INFINITY, f64::min);
            service.curve = curve.scaled_between(low, service.curve.peak());
        }
    }
    scenario.interval_s = args.interval * 60.0;
    scenario.horizon_s = args.hours * 3600.0;
    scenario.faults = !args.no_faults;
    Ok(scenario)
}

/// Reads `1000` or `T4:600,A10:400`.
fn pools(text: &str, default_type: &str) -> anyhow::Result<Vec<(String, usize)>> {
    let mut out: Vec<(String, usize)> = Vec::new();
    for item in text.split(',') {
        let (gpu_type, count) = item.split_once(':').unwrap_or((default_type, item));
        let Ok(count) = count.trim().parse::<usize>() else {
            bail!("--gpus {text}: `{item}` is no number of GPUs; write 1000, or T4:600,A10:400");
        };
        let gpu_type = gpu_type.trim().to_owned();
        if out.iter().any(|(t, _)| t.eq_ignore_ascii_case(&gpu_type)) {
            bail!("--gpus {text}: type {gpu_type} stands there twice; add the numbers up");
        }
        out.push((gpu_type, count));
    }
    Ok(out)
}

/// The cluster in words.
fn cluster(scenario: &Scenario) -> String {
    let pool = |p: &muxflow_sim::scenario::Pool| format!("{} {}", p.gpus, p.profile.gpu_type);
    let pools: Vec<String> = scenario.pools.iter().map(pool).collect();
    format!("{} GPUs", pools.join(" and "))
}

/// Presses arrivals and cuts durations.
pub(crate) fn fitted(
    mut jobs: Vec<JobRow>,
    within_hours: Option<f64>,
    longest_hours: Option<f64>,
) -> Vec<JobRow> {
    let last = jobs.iter().map(|j| j.submit_s).fold(0.0, f64::max);
    for j in &mut jobs {
        if let Some(hours) = within_hours
            && last > 0.0
        {
            j.submit_s *= hours * 3600.0 / last;
        }
        if let Some(hours) = longest_hours {
            j.duration_s = j.duration_s.min(hours * 3600.0);
        }
    }
    jobs
}

/// One progress bar for each policy; silent where nobody looks.
struct Bars {
    bars: Vec<ProgressBar>,
    jobs: usize,
}

impl Bars {
    fn new(names: &[String], jobs: usize) -> Self {
        let multi = MultiProgress::new();
        if !std::io::stderr().is_terminal() {
            multi.set_draw_target(ProgressDrawTarget::hidden());
        }
        let style =
            ProgressStyle::with_template("{prefix:18} {bar:30} {pos}/{len} jobs done  {msg}")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = |name: &String| {
            let bar = multi.add(ProgressBar::new(jobs as u64));
            bar.set_style(style.clone());
            bar.set_prefix(name.clone());
            bar
        };
        Bars { bars: names.iter().map(bar).collect(), jobs }
    }

    fn update(&self, run: usize, at_s: f64, left: usize) {
        if let Some(bar) = self.bars.get(run) {
            bar.set_position(self.jobs.saturating_sub(left) as u64);
            bar.set_message(format!("{:.1} h", at_s / 3600.0));
        }
    }

    fn finish(&self) {
        for bar in &self.bars {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_a_number_or_a_list_of_types() {
        let of = |text| pools(text, "T4").map_err(|e| e.to_string());
        assert_eq!(of("1000").unwrap(), [("T4".to_owned(), 1000)]);
        let both = [("t4".to_owned(), 600), ("a10".to_owned(), 400)];
        assert_eq!(of("t4:600,a10:400").unwrap(), both);
        for (bad, word) in [("t4:", "t4:"), ("many", "many"), ("t4:1,T4:2", "twice"), ("", "600")] {
            let e = of(bad).unwrap_err();
            assert!(e.contains("--gpus") && e.contains(word), "{bad}: {e}");
        }
    }
}
