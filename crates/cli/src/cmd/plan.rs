//! `muxflow plan`: pairs offline jobs with online GPUs from a snapshot file, and says why.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Args;
use muxflow_api::{example, plan as wire_plan, snapshot as wire_snapshot};
use muxflow_policy::cluster::{Explanation, Parameters, Planner, explain, lint};
use muxflow_predictor::Registry;
use muxflow_types::{Change, ClusterPlan, ClusterSnapshot, GpuType, JobId, Micros, Percent};

use crate::speed_model::files::{model_path, read_model};
use crate::table::Table;

/// Pair offline jobs with online GPUs, optimally, from a snapshot of the cluster.
#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The snapshot, as JSON; `-` reads standard input.
    #[arg(required_unless_present = "example")]
    snapshot: Option<PathBuf>,
    /// Print a small snapshot to start from, and stop.
    #[arg(long)]
    example: bool,
    /// Print the plan as JSON.
    #[arg(long)]
    json: bool,
    /// Explain one job: where it could be, who has those places, who refuses it.
    #[arg(long, value_name = "JOB")]
    explain: Option<String>,
    /// The folder that `muxflow train` wrote its models to. GPU types without a model are predicted
    /// by the conservative rule.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,
    /// Seconds between two plans: what a move gains must be gained within it.
    #[arg(long, value_name = "SECONDS", default_value_t = 900)]
    interval: u64,
    /// Seconds that a restart or a move costs a job.
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    restart_cost: u64,
    /// Per cent of the running jobs that one plan may move, restart or displace.
    #[arg(long, value_name = "PER CENT", default_value_t = 10.0)]
    max_disruption: f64,
    /// Threads for predicting and matching.
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// Runs the command.
pub(crate) fn run(args: PlanArgs) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if args.example {
        out.write_all(example::SNAPSHOT.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let path = args.snapshot.clone().unwrap_or_default();
    let snapshot = read(&path)?;
    let parameters = Parameters {
        interval: Micros::from_secs(args.interval),
        restart_cost: Micros::from_secs(args.restart_cost),
        max_disruption: Percent::new(args.max_disruption).context("--max-disruption")?,
        threads: args.threads,
        ..Parameters::default()
    };
    let planner = Planner::new(parameters)?;
    let (predictor, source) = predictor(args.models.as_deref(), &snapshot)?;
    let plan = planner.plan(&snapshot, &predictor)?;
    let findings = lint(&snapshot, &plan, planner.parameters());
    if let Some(job) = &args.explain {
        let id = JobId::new(job).with_context(|| format!("--explain {job}"))?;
        let Some(answer) = explain(&snapshot, &plan, &predictor, planner.parameters(), &id) else {
            bail!(
                "{}: there is no job `{job}`; `muxflow plan` without --explain lists all",
                path.display()
            );
        };
        out.write_all(explained(&answer).as_bytes())?;
    } else if args.json {
        writeln!(out, "{}", wire_plan::render(&plan))?;
    } else {
        out.write_all(table(&snapshot, &plan, &source).as_bytes())?;
    }
    if !findings.is_empty() {
        let words: Vec<_> = findings.iter().map(ToString::to_string).collect();
        bail!("the plan must not be carried out: {}", words.join("; "));
    }
    Ok(ExitCode::SUCCESS)
}

fn read(path: &PathBuf) -> anyhow::Result<ClusterSnapshot> {
    let mut text = String::new();
    if path.as_os_str() == "-" {
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
    } else {
        text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the snapshot {}", path.display()))?;
    }
    wire_snapshot::parse(&text).with_context(|| {
        let shown = if path.as_os_str() == "-" {
            "standard input".into()
        } else {
            path.display().to_string()
        };
        format!("{shown} is not a snapshot (muxflow plan --example prints one)")
    })
}

/// The models of the GPU types in the snapshot, and in words where speeds come from.
fn predictor(
    folder: Option<&Path>,
    snapshot: &ClusterSnapshot,
) -> anyhow::Result<(Registry, String)> {
    let mut registry = Registry::default();
    let Some(folder) = folder else {
        let words = "Speeds by the conservative rule; --models takes trained ones.";
        return Ok((registry, words.to_owned()));
    };
    let types: BTreeSet<&GpuType> = snapshot.gpus.iter().map(|g| &g.gpu_type).collect();
    let mut words = Vec::new();
    for gpu_type in types {
        let path = model_path(folder, gpu_type);
        if path.exists() {
            let (model, checksum) = read_model(&path, Some(gpu_type))?;
            words.push(format!("{gpu_type} by {} {checksum}", model.model.kind().name()));
            registry.insert(model);
        } else {
            words.push(format!("{gpu_type} by the conservative rule (no {})", path.display()));
        }
    }
    Ok((registry, format!("Speeds: {}.", words.join(", "))))
}

fn table(snapshot: &ClusterSnapshot, plan: &ClusterPlan, source: &str) -> String {
    let mut out = String::new();
    let mut t = Table::new(&[
        "GPU", "TYPE", "SERVICE", "JOB", "CHANGE", "SHARE", "QUOTA", ">SPEED", ">WEIGHT",
    ]);
    let gpus: BTreeMap<_, _> = snapshot.gpus.iter().map(|g| (&g.gpu, g)).collect();
    for a in &plan.assignments {
        let gpu = gpus.get(&a.gpu);
        let service =
            gpu.and_then(|g| g.online.as_ref()).map_or("-".to_owned(), |o| o.service.to_string());
        let change = match &a.change {
            Change::Move { from } => format!("move from {from}"),
            other => wire_plan::change_word(other).to_owned(),
        };
        t.row([
            a.gpu.to_string(),
            gpu.map_or(String::new(), |g| g.gpu_type.to_string()),
            service,
            a.job.to_string(),
            change,
            a.share.to_string(),
            a.quota.to_string(),
            format!("{:.3}", a.predicted_speed),
            format!("{:.3}", a.weight),
        ]);
    }
    out.push_str(&t.render());
    if !plan.evictions.is_empty() {
        let mut t = Table::new(&["EVICTED", "FROM", "WHY"]);
        for e in &plan.evictions {
            t.row([e.job.to_string(), e.gpu.to_string(), wire_plan::eviction_words(&e.reason)]);
        }
        out.push('\n');
        out.push_str(&t.render());
    }
    if !plan.waiting.is_empty() {
        let mut t = Table::new(&["WAITING", "WHY"]);
        for w in &plan.waiting {
            t.row([w.job.to_string(), w.reason.to_string()]);
        }
        out.push('\n');
        out.push_str(&t.render());
    }
    out.push_str(&format!(
        "\n{} of {} jobs on {} GPUs, total weight {:.3}, {}.\n{source}\n",
        plan.assignments.len(),
        snapshot.jobs.len(),
        snapshot.gpus.len(),
        plan.total_weight,
        if plan.certified { "proven optimal" } else { "NOT proven optimal" },
    ));
    out
}

fn explained(e: &Explanation) -> String {
    let mut out = match (&e.placed, &e.waiting) {
        (Some((gpu, change)), _) => match change {
            Change::Start => format!("{} starts on {gpu}.\n", e.job),
            Change::Stay => {
                format!("{} stays on {gpu}: no other place gains more than a move costs.\n", e.job)
            }
            Change::Restart => format!(
                "{} restarts on {gpu}: the new share gains more than the restart costs.\n",
                e.job
            ),
            Change::Move { from } => format!(
                "{} moves from {from} to {gpu}: that gains more than the move costs.\n",
                e.job
            ),
        },
        (None, Some(reason)) => format!("{} waits: {reason}.\n", e.job),
        (None, None) => format!("{} is not in the plan.\n", e.job),
    };
    out.push_str(&format!("Its speed counts {:.2} times (priority and waiting time).\n", e.worth));
    if !e.candidates.is_empty() {
        let mut t = Table::new(&[
            "COULD BE ON",
            "SHARE",
            ">SPEED",
            ">± 1 SD",
            ">ON REFERENCE TYPE",
            "GIVEN TO",
        ]);
        for c in e.candidates.iter().take(10) {
            t.row([
                c.gpu.to_string(),
                c.share.to_string(),
                format!("{:.3}", c.prediction.speed),
                format!("{:.3}", c.prediction.uncertainty),
                format!("{:.3}", c.reference_speed),
                c.given_to.as_ref().map_or("nobody".to_owned(), ToString::to_string),
            ]);
        }
        out.push('\n');
        out.push_str(&t.render());
        if e.candidates.len() > 10 {
            out.push_str(&format!("… and {} more\n", e.candidates.len() - 10));
        }
    }
    if !e.refusals.is_empty() {
        let mut t = Table::new(&[">GPUS", "REFUSE IT BECAUSE"]);
        for (why, count) in &e.refusals {
            t.row([count.to_string(), why.words().to_owned()]);
        }
        out.push('\n');
        out.push_str(&t.render());
    }
    out
}
