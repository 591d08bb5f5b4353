//! `muxflow describe`: everything about one job.

use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::{JobDetail, JobState};

use super::connect::{ConnectArgs, ago, path_of, span};
use crate::table::Table;

/// Show one job: where it is or why it waits, what speed was predicted and what was seen.
#[derive(Debug, Args)]
pub(crate) struct DescribeArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// The job: `job-1`, or just `1`.
    job: String,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &DescribeArgs) -> anyhow::Result<ExitCode> {
    let detail: JobDetail =
        args.connect.client()?.get(&format!("{}/detail", path_of(&args.job)))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&detail)?);
    } else {
        print!("{}", text(&detail));
    }
    Ok(ExitCode::SUCCESS)
}

fn speed(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

/// How far a deadline is, in either direction.
fn distance(deadline_us: u64, now_us: u64) -> String {
    match deadline_us.checked_sub(now_us) {
        Some(left) => format!("in {}", span(left)),
        None => format!("passed {} ago", span(now_us - deadline_us)),
    }
}

fn text(detail: &JobDetail) -> String {
    let job = &detail.job;
    let mut lines = vec![
        format!("{} {}", job.id, job.name.as_deref().unwrap_or("")).trim_end().to_owned(),
        format!("  command    {}", job.submit.command.join(" ")),
        format!("  in         {}", job.submit.cwd),
        format!("  user       {}", job.user),
        format!("  workload   {}", job.workload),
        format!("  state      {}, since {}", job.state, ago(job.changed_us)),
    ];
    match (job.state, &job.gpu) {
        (JobState::Submitted | JobState::Queued, _) => {
            let why = job.reason.strip_prefix("waits ").unwrap_or(&job.reason);
            lines.push(format!("  waits      {why}"));
        }
        (_, Some(gpu)) => {
            lines.push(format!("  on GPU     {gpu}, start {}", job.run));
            lines.push(format!(
                "  speed      predicted {}, seen {} (1 is as fast as alone), {} iterations per second",
                speed(job.predicted_speed),
                speed(job.seen_speed),
                speed(job.iterations_per_s)
            ));
            if !job.reason.is_empty() {
                lines.push(format!("  note       {}", job.reason));
            }
        }
        _ => lines.push(format!("  because    {}", job.reason)),
    }
    lines.push(format!("  waited     {} in all", span(job.waited_us)));
    if job.failures > 0 {
        lines.push(format!("  failures   {}, with {} retries", job.failures, job.submit.retries));
    }
    if let Some(deadline) = job.deadline_us.filter(|_| !job.state.is_final()) {
        lines.push(format!("  deadline   {}", distance(deadline, muxflow_manager::clock::now().0)));
    }
    let mut out = lines.join("\n");
    out.push('\n');
    if !detail.runs.is_empty() {
        let mut table = Table::new(&[">START", "FOR", "GPU", ">PREDICTED", ">SEEN", "OUTCOME"]);
        for run in &detail.runs {
            let outcome = if run.ended_us.is_some() { run.outcome.as_str() } else { "runs" };
            table.row([
                run.run.to_string(),
                run.purpose.clone(),
                run.gpu.clone(),
                speed(run.predicted_speed),
                speed(run.seen_speed.or(job.seen_speed.filter(|_| run.run == job.run))),
                outcome.to_owned(),
            ]);
        }
        out.push('\n');
        out.push_str(&table.render());
    }
    if !detail.candidates.is_empty() {
        let mut table = Table::new(&["COULD BE ON", ">SHARE %", ">SPEED", ">± 1 SD", "GIVEN TO"]);
        for place in &detail.candidates {
            table.row([
                place.gpu.clone(),
                format!("{:.0}", place.share_pct),
                format!("{:.3}", place.predicted_speed),
                format!("{:.3}", place.uncertainty),
                place.given_to.clone().unwrap_or_else(|| "nobody".to_owned()),
            ]);
        }
        out.push('\n');
        out.push_str(&table.render());
    }
    if !detail.refusals.is_empty() {
        let mut table = Table::new(&[">GPUS", "REFUSE IT BECAUSE"]);
        for (why, count) in &detail.refusals {
            table.row([count.to_string(), why.clone()]);
        }
        out.push('\n');
        out.push_str(&table.render());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_ahead_or_has_passed() {
        assert_eq!(distance(400_000_000, 100_000_000), "in 5 min");
        assert_eq!(distance(100_000_000, 400_000_000), "passed 5 min ago");
        assert_eq!(distance(7, 7), "in 0 s");
    }
}
