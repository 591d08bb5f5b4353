//! `muxflow submit`: hands a job to the manager.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use muxflow_api::jobs::{ArrayRange, Checkpoint, JobSubmit, Submitted};
use muxflow_types::Bytes;

use super::connect::ConnectArgs;

/// Submit an offline job: `muxflow submit -- python train.py`.
#[derive(Debug, Args)]
pub(crate) struct SubmitArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// A name for people.
    #[arg(long)]
    name: Option<String>,
    /// A variable of the job: NAME=VALUE, or NAME to pass this shell's on. May be given often.
    #[arg(long, short, value_name = "NAME[=VALUE]")]
    env: Vec<String>,
    /// Where it runs; here when left out.
    #[arg(long, value_name = "DIR")]
    cwd: Option<PathBuf>,
    /// Device memory it needs, such as 4GiB.
    #[arg(long, value_name = "SIZE")]
    memory: Option<String>,
    /// 1 is normal; larger counts more.
    #[arg(long, default_value_t = 1)]
    priority: u32,
    /// Seconds, or 30m, 12h, 2d, in which it must have ended.
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Where it saves its state; told to it in MUXFLOW_CHECKPOINT_DIR.
    #[arg(long, value_name = "DIR")]
    checkpoint_dir: Option<PathBuf>,
    /// The signal that asks it to save its state and leave: TERM, INT, HUP, USR1 or USR2.
    #[arg(long, value_name = "SIGNAL")]
    checkpoint_signal: Option<String>,
    /// Seconds that saving may take.
    #[arg(long, value_name = "SECONDS")]
    checkpoint_within: Option<u64>,
    /// How often it may fail and be tried again.
    #[arg(long, default_value_t = 0)]
    retries: u32,
    /// One job for each index, such as 0-99; it is in MUXFLOW_ARRAY_INDEX.
    #[arg(long, value_name = "FIRST-LAST")]
    array: Option<String>,
    /// How many GPUs; a job gets one.
    #[arg(long, default_value_t = 1)]
    gpus: u32,
    /// GPU types it may use, such as T4; any when left out.
    #[arg(long, value_name = "TYPE", value_delimiter = ',')]
    gpu_type: Vec<String>,
    /// Processors it may use, such as 0-3.
    #[arg(long)]
    cpus: Option<String>,
    /// Host memory it may use, such as 8GiB.
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<String>,
    /// Print the answer as JSON.
    #[arg(long)]
    json: bool,
    /// The program and its arguments.
    #[arg(trailing_var_arg = true, required = true)]
    command: Vec<String>,
}

fn size(field: &str, text: Option<&String>) -> anyhow::Result<Option<u64>> {
    text.map(|text| Ok(Bytes::parse(text).with_context(|| field.to_owned())?.0)).transpose()
}

/// Seconds from `90`, `30m`, `12h` or `2d`.
fn seconds(text: &str) -> anyhow::Result<u64> {
    let digits = text.trim_end_matches(char::is_alphabetic);
    let factor = match &text[digits.len()..] {
        "" | "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        unit => bail!("--deadline: `{unit}` is no unit of time; write s, m, h or d"),
    };
    let count: u64 =
        digits.parse().with_context(|| format!("--deadline: `{text}` is no length of time"))?;
    count.checked_mul(factor).context("--deadline: that is too long")
}

fn array(text: &str) -> anyhow::Result<ArrayRange> {
    let ends = text.split_once('-').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let (first, last) =
        ends.with_context(|| format!("--array: `{text}` is no range such as 0-99"))?;
    Ok(ArrayRange { first, last })
}

impl SubmitArgs {
    fn environment(&self) -> anyhow::Result<BTreeMap<String, String>> {
        let mut env = BTreeMap::new();
        for given in &self.env {
            let (name, value) = match given.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.to_owned()),
                None => {
                    let value = std::env::var(given)
                        .with_context(|| format!("--env {given}: it is not set here"))?;
                    (given.clone(), value)
                }
            };
            env.insert(name, value);
        }
        Ok(env)
    }

    fn checkpoint(&self) -> Option<Checkpoint> {
        let any = self.checkpoint_dir.is_some()
            || self.checkpoint_signal.is_some()
            || self.checkpoint_within.is_some();
        any.then(|| Checkpoint {
            dir: self
                .checkpoint_dir
                .as_ref()
                .and_then(|dir| std::path::absolute(dir).ok().map(|dir| dir.display().to_string())),
            signal: self.checkpoint_signal.clone().unwrap_or_else(|| "TERM".to_owned()),
            window_s: self.checkpoint_within.unwrap_or(10),
        })
    }

    fn job(&self) -> anyhow::Result<JobSubmit> {
        let cwd = match &self.cwd {
            Some(dir) => std::path::absolute(dir)?,
            None => std::env::current_dir().context("cannot tell where this is")?,
        };
        Ok(JobSubmit {
            name: self.name.clone(),
            command: self.command.clone(),
            env: self.environment()?,
            cwd: cwd.display().to_string(),
            memory_bytes: size("--memory", self.memory.as_ref())?,
            priority: self.priority,
            deadline_s: self.deadline.as_deref().map(seconds).transpose()?,
            checkpoint: self.checkpoint(),
            retries: self.retries,
            array: self.array.as_deref().map(array).transpose()?,
            gpus: self.gpus,
            gpu_types: self.gpu_type.clone(),
            cpus: self.cpus.clone(),
            host_memory_bytes: size("--host-memory", self.host_memory.as_ref())?,
        })
    }
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: SubmitArgs) -> anyhow::Result<ExitCode> {
    let job = args.job()?;
    let made: Submitted = args.connect.client()?.post("/v1/jobs", &job)?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&made)?);
    } else if let [one] = made.jobs.as_slice() {
        println!("{one}");
    } else {
        println!("{} ({} jobs)", made.id, made.jobs.len());
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_ranges_are_read() {
        assert_eq!(seconds("90").unwrap(), 90);
        assert_eq!(seconds("30m").unwrap(), 1800);
        assert_eq!(seconds("2d").unwrap(), 172_800);
        for wrong in ["", "x", "5y", "-1", "99999999999999999999d"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
        assert_eq!(array("3-7").unwrap(), ArrayRange { first: 3, last: 7 });
        assert!(array("3").is_err() && array("a-b").is_err());
    }
}
