//! `muxflow jobs`: the queue.

use std::process::ExitCode;

use clap::Args;
use muxflow_api::jobs::JobList;

use super::connect::{ConnectArgs, ago, escaped, job_id};
use crate::table::Table;

/// List jobs, newest first.
#[derive(Debug, Args)]
pub(crate) struct JobsArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// States, with commas between; `open` is all that have not ended.
    #[arg(long, value_name = "STATE,…")]
    state: Option<String>,
    /// Only those of this array.
    #[arg(long, value_name = "JOB")]
    array: Option<String>,
    /// Only mine.
    #[arg(long)]
    mine: bool,
    /// At most so many.
    #[arg(long, short = 'n', default_value_t = 50)]
    limit: usize,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &JobsArgs) -> anyhow::Result<ExitCode> {
    let client = args.connect.client()?;
    let mut jobs = Vec::new();
    let mut before = None;
    while jobs.len() < args.limit {
        let mut path = format!("/v1/jobs?limit={}", (args.limit - jobs.len()).min(500));
        if let Some(state) = &args.state {
            path.push_str(&format!("&state={}", escaped(state)));
        }
        if let Some(array) = &args.array {
            path.push_str(&format!("&array={}", escaped(&job_id(array))));
        }
        if args.mine {
            path.push_str("&user=me");
        }
        if let Some(before) = before {
            path.push_str(&format!("&before={before}"));
        }
        let page: JobList = client.get(&path)?;
        jobs.extend(page.items);
        before = page.next;
        if before.is_none() {
            break;
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&jobs)?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut table = Table::new(&["JOB", "NAME", "USER", "STATE", "GPU", ">SPEED", ">AGE", "WHY"]);
    for job in &jobs {
        let speed = match (job.seen_speed, job.predicted_speed) {
            (Some(seen), _) => format!("{seen:.2}"),
            (None, Some(predicted)) if job.gpu.is_some() => format!("~{predicted:.2}"),
            _ => "-".to_owned(),
        };
        table.row([
            job.id.clone(),
            job.name.clone().unwrap_or_else(|| job.submit.command[0].clone()),
            job.user.clone(),
            if job.cancelling { "cancelling".to_owned() } else { job.state.to_string() },
            job.gpu.as_deref().map_or("-", |gpu| gpu.get(..12).unwrap_or(gpu)).to_owned(),
            speed,
            ago(job.submitted_us),
            job.reason.clone(),
        ]);
    }
    print!("{}", table.render());
    if jobs.is_empty() {
        say(nothing(args));
    }
    if before.is_some() {
        println!("… and more; -n shows more of them");
    }
    Ok(ExitCode::SUCCESS)
}

#[expect(clippy::print_stderr, reason = "a word to the reader, beside the table")]
fn say(word: &str) {
    eprintln!("{word}");
}

/// Why no job is listed, and what to do next.
fn nothing(args: &JobsArgs) -> &'static str {
    if args.limit == 0 {
        "-n 0 lists none; `muxflow jobs` lists the newest"
    } else if args.state.is_some() || args.array.is_some() || args.mine {
        "no job is like that; `muxflow jobs` lists the newest of all"
    } else {
        "no jobs yet; submit one with `muxflow submit -- COMMAND`"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: JobsArgs,
    }

    #[test]
    fn who_sees_no_job_is_told_why() {
        let told = |line: &[&str]| {
            let line = Line::try_parse_from([&["jobs"], line].concat()).unwrap();
            nothing(&line.args)
        };
        assert!(told(&[]).starts_with("no jobs yet"));
        for none in [&["-n", "0"][..], &["--limit", "0", "--mine"]] {
            assert!(told(none).starts_with("-n 0"), "{none:?}: there may be many");
        }
        // As the dashboard names it.
        for filter in [&["--state", "open", "-n", "10000"][..], &["--array", "1"], &["--mine"]] {
            assert!(told(filter).starts_with("no job is like that"), "{filter:?}");
        }
    }
}
