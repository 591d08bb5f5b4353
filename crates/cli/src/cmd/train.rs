//! `muxflow train`: choose and fit a speed model for one GPU type.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use muxflow_predictor::model::ModelKind;
use muxflow_predictor::select::{Progress, SelectOptions, Selection, Verdict, judge, select};
use muxflow_predictor::{Dataset, TrainedModel, file};
use muxflow_store::{ModelId, NewModel, Store};
use muxflow_types::Micros;

use crate::speed_model::card::{candidates_table, card};
use crate::speed_model::chart::{Line, line_chart};
use crate::speed_model::files::{checksum, model_path, read_model, write_whole};
use crate::speed_model::source::SourceArgs;

/// Train a speed model on measured pairs, and take it into use where it is better.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// Folder for the model, its card and its learning curve.
    #[arg(long, value_name = "DIR", default_value = "models")]
    out: PathBuf,
    /// The kinds that may win: mean, rule, kernel, hybrid, mlp, trees.
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    kinds: Vec<String>,
    /// Hidden layers of the perceptron.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [64, 64])]
    hidden: Vec<usize>,
    /// Passes over the data at most.
    #[arg(long, default_value_t = 600)]
    epochs: usize,
    /// Threads to use.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// The kinds named on the command line, all when none is.
pub(crate) fn kinds(names: &[String]) -> anyhow::Result<Vec<ModelKind>> {
    if names.is_empty() {
        return Ok(ModelKind::ALL.to_vec());
    }
    let known = || ModelKind::ALL.map(ModelKind::name).join(", ");
    names
        .iter()
        .map(|name| {
            ModelKind::parse(name)
                .with_context(|| format!("--kinds: no kind `{name}`; there are {}", known()))
        })
        .collect()
}

impl TrainArgs {
    fn options(&self) -> anyhow::Result<SelectOptions> {
        let mut options = SelectOptions {
            kinds: kinds(&self.kinds)?,
            seed: self.source.seed,
            threads: self.threads,
            ..SelectOptions::default()
        };
        if self.hidden.iter().any(|nodes| !(1..=4096).contains(nodes)) || self.hidden.len() > 16 {
            bail!("--hidden: up to 16 layers of 1 to 4096 nodes, not {:?}", self.hidden);
        }
        options.fit.mlp.hidden.clone_from(&self.hidden);
        options.fit.mlp.max_epochs = self.epochs.max(1);
        Ok(options)
    }
}

/// A bar for the kinds, then for the epochs of a perceptron that won.
fn run_select(data: &Dataset, options: &SelectOptions) -> anyhow::Result<Selection> {
    let bar = ProgressBar::new(options.kinds.len() as u64);
    let style = ProgressStyle::with_template("{msg:28} [{bar:32}] {pos}/{len} {elapsed}")
        .context("the progress bar's template")?;
    bar.set_style(style);
    let mut report = |progress: Progress| {
        match progress {
            Progress::Validating { kind, done, .. } => {
                bar.set_message(format!("cross-validating {kind}"));
                bar.set_position(done as u64);
            }
            Progress::Epoch(epoch) => {
                bar.set_length(options.fit.mlp.max_epochs as u64);
                bar.set_message(format!("fitting, error {:.4}", epoch.validation_error));
                bar.set_position(epoch.number as u64);
            }
        }
        ControlFlow::Continue(())
    };
    let selection = select(data, options, &mut report);
    bar.finish_and_clear();
    Ok(selection?)
}

/// What is in use now: a model, its checksum, and its row where it is from the store.
struct InUse {
    model: TrainedModel,
    checksum: String,
    row: Option<ModelId>,
}

fn in_use(args: &TrainArgs, path: &Path) -> anyhow::Result<Option<InUse>> {
    let gpu_type = args.source.gpu_type()?;
    if let Some(store) = &args.source.store {
        let Some(row) = Store::open(store)?.model_in_use(&gpu_type)? else { return Ok(None) };
        let model = file::from_bytes_for(&row.bytes, &gpu_type)
            .with_context(|| format!("model {} of {}", row.id.0, store.display()))?;
        return Ok(Some(InUse { model, checksum: row.checksum, row: Some(row.id) }));
    }
    if !path.exists() {
        return Ok(None);
    }
    let (model, checksum) = read_model(path, Some(&gpu_type)).with_context(
        || "the model in use cannot be compared with; move it away to train from scratch",
    )?;
    Ok(Some(InUse { model, checksum, row: None }))
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &TrainArgs) -> anyhow::Result<ExitCode> {
    let options = args.options()?;
    let data = args.source.load()?;
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    let path = model_path(&args.out, &data.gpu_type);
    let old = in_use(args, &path)?;
    let mut selection = run_select(&data, &options)?;
    let kind = selection.model.model.kind();
    let verdict = match &old {
        Some(old) => Some(judge(&old.model, kind, &data, &options)?),
        None => None,
    };
    selection.model.card.parent = old.as_ref().map(|old| old.checksum.clone());
    println!("{}: {} samples, {}", data.gpu_type, data.samples.len(), data.origin);
    println!("{}", candidates_table(&selection.candidates, kind.name()));
    let better = verdict.as_ref().is_none_or(Verdict::replace);
    if let Some(v) = &verdict {
        println!(
            "On {} samples held out: {:.4} in use, {:.4} new ({kind}).",
            v.held_out, v.old_error, v.new_error
        );
    }
    let written = write_files(args, &path, &data, &selection, verdict.as_ref(), old.as_ref())?;
    if better {
        println!("In use: {}", written.display());
    } else {
        println!(
            "The model in use is not worse, so it stays. The new one is kept as {}.",
            written.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes model, card and curve, and keeps the model that was replaced; where the new model is.
fn write_files(
    args: &TrainArgs,
    path: &Path,
    data: &Dataset,
    selection: &Selection,
    verdict: Option<&Verdict>,
    old: Option<&InUse>,
) -> anyhow::Result<PathBuf> {
    let bytes = file::to_bytes(&selection.model);
    let sum = checksum(&bytes);
    let better = verdict.is_none_or(Verdict::replace);
    let text = card(selection, data, verdict);
    let target = match old {
        Some(_) if !better => path.with_extension(format!("{sum}.model")),
        Some(old) if path.exists() => {
            let kept = path.with_extension(format!("{}.model", old.checksum));
            std::fs::copy(path, &kept)
                .with_context(|| format!("cannot keep the old model as {}", kept.display()))?;
            path.to_owned()
        }
        _ => path.to_owned(),
    };
    write_whole(&target.with_extension("card.md"), text.as_bytes())?;
    if !selection.curve.is_empty() {
        let line = |name: &str, of: fn(&muxflow_predictor::mlp::Epoch) -> f64| {
            #[expect(clippy::cast_precision_loss, reason = "a count of epochs")]
            let points = selection.curve.iter().map(|e| (e.number as f64, of(e))).collect();
            Line { name: name.to_owned(), points }
        };
        let lines =
            [line("training", |e| e.train_error), line("held back", |e| e.validation_error)];
        let title = format!("Learning curve of the perceptron, {}", data.gpu_type);
        let picture = line_chart(&title, "epoch", "mean absolute error", &lines);
        write_whole(&target.with_extension("curve.svg"), picture.as_bytes())?;
    }
    write_whole(&target, &bytes)?;
    if let Some(store) = &args.source.store {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let new = NewModel {
            gpu_type: &data.gpu_type,
            kind: selection.model.model.kind().name(),
            bytes: &bytes,
            checksum: &sum,
            card: &text,
            unseen_error: selection.model.card.unseen_error,
            parent: old.and_then(|old| old.row),
            created_at: Micros(u64::try_from(now.as_micros()).unwrap_or(u64::MAX)),
        };
        Store::open(store)?.put_model(&new, better)?;
    }
    Ok(target)
}
