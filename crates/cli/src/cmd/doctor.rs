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
    let findings = doctor::examine(&config, &child_program()?);
    crate::end_with_the_reader();
    for finding in &findings {
        println!("{:<5} {}: {}", finding.grade.as_str(), finding.subject, finding.seen);
        if let Some(remedy) = &finding.remedy {
            println!("      -> {remedy}");
        }
    }
    let bad = findings.iter().filter(|finding| finding.grade == Grade::Bad).count();
    let weak = findings.iter().filter(|finding| finding.grade == Grade::Weak).count();
    println!("{bad} bad, {weak} weak, {} in all", findings.len());
    Ok(if bad == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
