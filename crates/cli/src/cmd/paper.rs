//! `muxflow paper`: regenerates the figures and tables of the paper.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Args;
use muxflow_sim::paper::{PaperOptions, regenerate};
use muxflow_sim::trace::{MultiGpu, generate::scale_to_mean, read_jobs};

use super::simulate::fitted;

/// Regenerate the figures and tables of the paper, ours beside the published numbers.
#[derive(Debug, Args)]
pub(crate) struct PaperArgs {
    /// GPUs of the simulated cluster; jobs are scaled along.
    #[arg(long, default_value_t = 1000)]
    gpus: usize,
    /// The flattened public Philly trace; its virtual clusters 0e4a51, ee9e8c, 103959 and b436b2
    /// stand in for the paper's traces.
    #[arg(long, value_name = "FILE")]
    philly: Option<PathBuf>,
    /// Only these parts, separated by commas: motivation, errors, testbed, traces, predictor,
    /// studies, deployment, beyond.
    #[arg(long, value_name = "PARTS", value_delimiter = ',')]
    only: Vec<String>,
    /// Seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Where to write the page; standard output when absent.
    #[arg(long, short)]
    output: Option<PathBuf>,
}

/// Virtual clusters whose size is that of the paper's traces.
const VIRTUAL_CLUSTERS: [&str; 4] = ["0e4a51", "ee9e8c", "103959", "b436b2"];

/// Runs the command.
#[expect(clippy::print_stderr, reason = "says what it is doing to the person who waits")]
pub(crate) fn run(args: PaperArgs) -> anyhow::Result<ExitCode> {
    let mut real = Vec::new();
    if let Some(path) = &args.philly {
        for vc in VIRTUAL_CLUSTERS {
            let trace = read_jobs(path, Some(vc), MultiGpu::One)?;
            let mut jobs = fitted(trace.jobs, Some(12.0), Some(6.0));
            // The same load as the generated traces, or nothing would ever wait.
            let count = u32::try_from(jobs.len()).context("too many jobs")?;
            let gpus = u32::try_from(args.gpus).context("too many GPUs")?;
            let mean =
                muxflow_sim::paper::FILL * f64::from(gpus) * 12.0 * 3600.0 / f64::from(count);
            let mut durations: Vec<f64> = jobs.iter().map(|j| j.duration_s).collect();
            scale_to_mean(&mut durations, mean.min(4.0 * 3600.0), 6.0 * 3600.0);
            for (job, duration) in jobs.iter_mut().zip(durations) {
                job.duration_s = duration;
            }
            real.push((format!("Philly {vc}"), jobs));
        }
    }
    let (only, threads) = (args.only, args.threads);
    let options = PaperOptions { gpus: args.gpus, real, only, threads, seed: args.seed };
    let mut page = regenerate(&options, &mut |what| eprintln!("{what} …"))?;
    if args.philly.is_some() {
        page.push_str(
            "## The real virtual clusters\n\nThe rows named Philly are the public trace's virtual clusters of about the paper's sizes, each row one job of one GPU. Unscaled they would keep 20 to 116 of the 1,000 GPUs busy and nothing would ever wait, so arrivals were pressed into twelve hours, durations cut at six hours and scaled to the same load as the generated traces.\n",
        );
    }
    match &args.output {
        Some(path) => {
            std::fs::write(path, page).with_context(|| format!("write {}", path.display()))?;
        }
        None => std::io::stdout().lock().write_all(page.as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}
