//! `muxflow replay`: makes a saved plan again, and says whether it is the same.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use muxflow_api::cluster::PlanRecord;
use muxflow_manager::scheduler::record::replay;

use super::connect::ConnectArgs;

/// Make a plan again from its record, byte for byte. The manager keeps the last one as
/// `last-plan.json` in its state directory.
#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// The record; without it, the manager's last plan.
    file: Option<PathBuf>,
    /// Save the record here first.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<ExitCode> {
    let record: PlanRecord = match &args.file {
        None => args.connect.client()?.get("/v1/plan/record")?,
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            serde_json::from_str(&text)
                .with_context(|| format!("{} is not the record of a plan", path.display()))?
        }
    };
    if let Some(path) = &args.save {
        std::fs::write(path, serde_json::to_vec_pretty(&record)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    let again = replay(&record)?;
    println!("{again}");
    if again != record.plan {
        bail!("the plan made again is not the one in the record: other program, or a bug");
    }
    Ok(ExitCode::SUCCESS)
}
