//! `cargo xtask reliability`: prints the tables of `docs/reliability.md`, with real processes on an
//! emulated GPU.

use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};

/// What is measured.
#[derive(Debug, Args)]
pub(crate) struct ReliabilityArgs {
    /// One table; all of them without it.
    #[arg(long)]
    only: Option<Table>,
    /// How often a burst is made and a signal sent.
    #[arg(long, default_value_t = 20)]
    rounds: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Table {
    /// Each defence on and off.
    Defences,
    /// The service's latency through a burst, and how fast the agent gets out of the way.
    Bursts,
    /// Each fault of the emulated GPU.
    Faults,
    /// Signals to the job, a killed agent, what watching costs.
    Rest,
}

struct Part {
    table: Table,
    head: &'static str,
    tests: &'static [&'static str],
    /// Tests that only this command runs.
    ignored: bool,
}

/// What is neither a defence, a burst nor a fault of its own.
const REST: &[&str] = &[
    "reliability::",
    "behaviour::",
    "mends::",
    "strangers::",
    "sensors::",
    "ends::",
    "room::",
    "parties::",
];

const PARTS: &[Part] = &[
    Part {
        table: Table::Defences,
        head: "| defence | what was measured | on | off |\n| --- | --- | --- | --- |",
        tests: &["defences::", "host::", "driver_side::"],
        ignored: false,
    },
    Part {
        table: Table::Bursts,
        head: "| service | traffic | requests | p50 (ms) | p99 (ms) | p50 on the device (ms) | p99 on the device (ms) |\n| --- | --- | --- | --- | --- | --- | --- |",
        tests: &["burst::latency_through_a_burst"],
        ignored: true,
    },
    Part {
        table: Table::Bursts,
        head: "| event | p50 | p99 |\n| --- | --- | --- |",
        tests: &[
            "burst::reaction_to_five_times_the_traffic",
            "burst::reaction_to_bursts_beyond_the_gpu",
        ],
        ignored: true,
    },
    Part {
        table: Table::Faults,
        head: "| fault | requests that failed | longest time without service (s) | requests served in 14 s | restarts of the service | the job | the GPU then |\n| --- | --- | --- | --- | --- | --- | --- |",
        tests: &["faults::the_table_of_faults"],
        ignored: true,
    },
    Part { table: Table::Rest, head: "", tests: REST, ignored: false },
];

/// Prints the tables.
pub(crate) fn run(args: &ReliabilityArgs) -> anyhow::Result<()> {
    for part in PARTS.iter().filter(|part| args.only.is_none_or(|only| only == part.table)) {
        println!("{}", part.head);
        for line in measured(part.tests, part.ignored, args.rounds)? {
            println!("{line}");
        }
        println!();
    }
    Ok(())
}

/// Runs tests of `crates/e2e/tests/agent`, one at a time, and takes what they measured.
pub(crate) fn measured(tests: &[&str], ignored: bool, rounds: u32) -> anyhow::Result<Vec<String>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["test", "--quiet", "-p", "muxflow-e2e", "--test", "agent", "--"])
        .args(["--nocapture", "--test-threads=1"])
        .args(tests)
        .env("MUXFLOW_TEST_ROUNDS", rounds.to_string())
        .current_dir(crate::ci::root())
        .stderr(Stdio::inherit());
    if ignored {
        command.args(["--ignored", "--exact"]);
    }
    let output = command.output().context("cannot start cargo")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("{tests:?} failed: {}\n{text}", output.status);
    }
    let after = |line: &str| line.split_once("MEASURED ").map(|(_, rest)| rest.to_owned());
    Ok(text.lines().filter_map(after).collect())
}
