//! `cargo xtask bench AREA`: each area prints the table that stands in `docs/benchmarks.md`.

mod plan;

use clap::Subcommand;

/// What is measured.
#[derive(Debug, Subcommand)]
pub(crate) enum Area {
    /// A whole plan, predicting and matching: cold, and after a small change.
    Plan(plan::PlanBench),
}

/// Measures one area.
pub(crate) fn run(area: Area) -> anyhow::Result<()> {
    match area {
        Area::Plan(bench) => plan::run(&bench),
    }
}
