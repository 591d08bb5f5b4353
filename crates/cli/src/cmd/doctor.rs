//! `muxflow doctor`: what is wrong on this node, and how to mend it.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use muxflow_agent::doctor::{self, Grade};

use super::agent::{child_program, read_config};

/// Say what is wrong on this node and how to mend it; fails when something is bad.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The agent's configuration file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

#[expect(clippy::print_stdout, reason = "the report is what was asked for")]
pub(crate) fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let config = read_config(args.config.as_ref())?;
    let child = child_program()?;
    crate::end_with_the_reader();
    let (mut bad, mut weak, mut all) = (0, 0, 0);
    doctor::examine(&config, &child, |finding| {
        println!("{:<5} {}: {}", finding.grade.as_str(), finding.subject, finding.seen);
        if let Some(remedy) = &finding.remedy {
            println!("      -> {remedy}");
        }
        all += 1;
        bad += u32::from(finding.grade == Grade::Bad);
        weak += u32::from(finding.grade == Grade::Weak);
    });
    println!("{bad} bad, {weak} weak, {all} in all");
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
