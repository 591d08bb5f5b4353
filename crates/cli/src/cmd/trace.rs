//! `muxflow trace`: makes traces, and shows what is in one.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Subcommand;
use muxflow_sim::trace::{
    GenerateJobs, JobRow, RequestCurve, generate_jobs, generate_requests, read_jobs, read_requests,
    write_jobs, write_requests,
};

use super::simulate::MultiGpuArg;

/// What to do with traces.
#[derive(Debug, Subcommand)]
pub(crate) enum TraceCommand {
    /// Make a trace of jobs like the public Philly trace, in the own CSV format.
    Generate {
        /// How many jobs.
        #[arg(long, default_value_t = 1410)]
        jobs: usize,
        /// They come within so many hours.
        #[arg(long, default_value_t = 12.0)]
        hours: f64,
        /// Cut durations to so many hours.
        #[arg(long, default_value_t = 6.0)]
        longest: f64,
        /// Scale durations to a mean of so many minutes.
        #[arg(long)]
        mean_minutes: Option<f64>,
        /// Make a daily curve of requests instead: LOW-HIGH requests per second.
        #[arg(long, value_name = "LOW-HIGH")]
        requests: Option<String>,
        /// Days of the curve.
        #[arg(long, default_value_t = 1)]
        days: u32,
        /// Seed.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Where to write it; standard output when absent.
        #[arg(long, short)]
        output: Option<PathBuf>,
    },
    /// Show what is in a trace of jobs or of requests.
    Inspect {
        /// The file, plain or gzipped.
        file: PathBuf,
        /// Only this virtual cluster or quality class.
        #[arg(long)]
        group: Option<String>,
        /// What becomes of rows of several GPUs.
        #[arg(long, value_enum, default_value_t = MultiGpuArg::One)]
        multi_gpu: MultiGpuArg,
    },
}

impl TraceCommand {
    /// Runs the command.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            TraceCommand::Generate {
                jobs,
                hours,
                longest,
                mean_minutes,
                requests,
                days,
                seed,
                output,
            } => {
                let mut bytes = Vec::new();
                match requests {
                    Some(range) => {
                        let (low, high) = parse_range(&range)?;
                        let curve = generate_requests("service", low, high, days, seed)?;
                        write_requests(&[curve], &mut bytes)?;
                    }
                    None => {
                        let mean_s = mean_minutes.map(|m| m * 60.0);
                        let longest_s = longest * 3600.0;
                        let g = GenerateJobs { jobs, hours, longest_s, mean_s, seed };
                        write_jobs(&generate_jobs(&g)?, &mut bytes)?;
                    }
                }
                match output {
                    Some(path) => std::fs::write(&path, bytes)
                        .with_context(|| format!("write {}", path.display()))?,
                    None => std::io::stdout().lock().write_all(&bytes)?,
                }
            }
            TraceCommand::Inspect { file, group, multi_gpu } => {
                let text = inspect(&file, group.as_deref(), multi_gpu)?;
                std::io::stdout().lock().write_all(text.as_bytes())?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn parse_range(text: &str) -> anyhow::Result<(f64, f64)> {
    let bad = || format!("`{text}` is no range of rates; write LOW-HIGH, such as 20-190");
    let (low, high) = text.split_once('-').with_context(bad)?;
    Ok((low.trim().parse().with_context(bad)?, high.trim().parse().with_context(bad)?))
}

fn inspect(file: &Path, group: Option<&str>, multi: MultiGpuArg) -> anyhow::Result<String> {
    // A file is tried as jobs first; when it is of no such kind, as requests.
    let jobs = match read_jobs(file, group, multi.into()) {
        Ok(trace) => trace,
        Err(first) => {
            return match read_requests(file) {
                Ok(curves) => Ok(show_requests(&curves)),
                Err(second) if second.to_string().contains("no known kind") => Err(first.into()),
                Err(second) => Err(if first.to_string().contains("no known kind") {
                    second.into()
                } else {
                    first.into()
                }),
            };
        }
    };
    let mut out = format!(
        "{} trace, {} jobs ({} rows without work left out)\n\n",
        jobs.kind,
        jobs.jobs.len(),
        jobs.skipped
    );
    out.push_str(&show_jobs(&jobs.jobs));
    Ok(out)
}

fn show_jobs(jobs: &[JobRow]) -> String {
    let mut durations: Vec<f64> = jobs.iter().map(|j| j.duration_s).collect();
    durations.sort_by(f64::total_cmp);
    let at = |q: usize| durations[(durations.len() - 1) * q / 100];
    let work: f64 = jobs.iter().map(|j| j.duration_s * f64::from(j.gpus)).sum();
    let span = jobs.last().map_or(0.0, |j| j.submit_s);
    let mut out = format!(
        "submitted over {:.1} h; {:.0} GPU-hours in all, {:.1} GPUs on average\n",
        span / 3600.0,
        work / 3600.0,
        if span > 0.0 { work / span } else { 0.0 }
    );
    out.push_str(&format!(
        "duration: median {:.0} s, 90 % below {:.0} s, 99 % below {:.0} s, longest {:.0} s\n\narrivals over time:\n",
        at(50),
        at(90),
        at(99),
        at(100)
    ));
    let mut bins = vec![0.0f64; 48];
    for j in jobs {
        let part = if span > 0.0 { j.submit_s / span } else { 0.0 };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "0 to 1 times 47"
        )]
        let bin = (part * 47.0) as usize;
        bins[bin.min(47)] += 1.0;
    }
    out.push_str(&bars(&bins));
    out.push_str("\njobs by duration (1 s to longest, logarithmic):\n");
    let mut bins = vec![0.0f64; 48];
    let longest = at(100).max(2.0).ln();
    for d in &durations {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a small positive number"
        )]
        let bin = (d.max(1.0).ln() / longest * 47.0) as usize;
        bins[bin.min(47)] += 1.0;
    }
    out.push_str(&bars(&bins));
    out
}

fn show_requests(curves: &[RequestCurve]) -> String {
    let mut out = format!("request rates, {} curves\n\n", curves.len());
    let mut order: Vec<&RequestCurve> = curves.iter().collect();
    order.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
    for c in order.iter().take(5) {
        let n = c.rates.len();
        out.push_str(&format!(
            "{}: mean {:.2}/s, peak {:.2}/s, {n} steps of {:.0} s\n",
            c.name,
            c.mean(),
            c.peak(),
            c.step_s
        ));
        let bins: Vec<f64> = (0..48.min(n))
            .map(|i| {
                let part = &c.rates[i * n / 48.min(n)..((i + 1) * n / 48.min(n)).max(1)];
                part.iter().sum::<f64>() / f64::from(u32::try_from(part.len().max(1)).unwrap_or(1))
            })
            .collect();
        out.push_str(&bars(&bins));
        out.push('\n');
    }
    out
}

/// Heights as block characters, three lines high.
fn bars(values: &[f64]) -> String {
    const BLOCKS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let top = values.iter().copied().fold(0.0, f64::max).max(1e-12);
    let mut out = String::new();
    for line in (0..3).rev() {
        for v in values {
            let eighths = (v / top * 24.0).round() - f64::from(line) * 8.0;
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "clamped to 0 to 8"
            )]
            let i = eighths.clamp(0.0, 8.0) as usize;
            out.push(BLOCKS[i]);
        }
        out.push('\n');
    }
    out
}
