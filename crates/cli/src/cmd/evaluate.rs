//! `muxflow evaluate`: how good each kind of model is, on random pairs and on workloads left out.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use indicatif::ProgressBar;
use muxflow_predictor::Dataset;
use muxflow_predictor::model::{FitOptions, ModelKind};
use muxflow_predictor::select::error_on;
use muxflow_predictor::study::{Study, StudyLine, run_shape, shapes};
use muxflow_predictor::validate::{FoldBy, cross_validate, folds};

use crate::cmd::train::kinds;
use crate::speed_model::card::{error_text, table};
use crate::speed_model::chart::{Line, line_chart};
use crate::speed_model::files::{read_model, write_whole};
use crate::speed_model::source::SourceArgs;

/// Print the error of each kind of model by random pairs and by workloads left out, beside the mean.
#[derive(Debug, Args)]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    source: SourceArgs,
    /// The kinds to try: mean, rule, kernel, hybrid, mlp, trees.
    #[arg(long, value_name = "KIND,…", value_delimiter = ',')]
    kinds: Vec<String>,
    /// Seeds of the kinds that are random; every one is reported.
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 2, 3])]
    seeds: Vec<u64>,
    /// A trained model to test on these samples as it is; samples it was trained on flatter it.
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Instead: the paper's study of the perceptron's shape, as CSV and picture.
    #[arg(long, value_enum)]
    study: Option<StudyName>,
    /// Passes over the data in a study.
    #[arg(long, default_value_t = 100)]
    epochs: usize,
    /// Folder for the study's files.
    #[arg(long, value_name = "DIR", default_value = "study")]
    out: PathBuf,
    /// Threads to use.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum StudyName {
    /// Hidden size 64 to 1024.
    Hidden,
    /// Two to eight layers.
    Layers,
}

/// Runs it.
#[expect(clippy::print_stdout, reason = "the answer of the command")]
pub(crate) fn run(args: &EvaluateArgs) -> anyhow::Result<ExitCode> {
    let data = args.source.load()?;
    data.check()?;
    if let Some(study) = args.study {
        return run_study(args, &data, study);
    }
    println!("{}: {} samples, {}", data.gpu_type, data.samples.len(), data.origin);
    if let Some(path) = &args.model {
        let (model, _) = read_model(path, Some(&data.gpu_type))?;
        println!("{} as it is: mean absolute error {:.4}", path.display(), error_on(&model, &data));
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "Mean absolute error of the normalised speed; what is left out is in neither half of training.\n"
    );
    print!("{}", errors(args, &data)?);
    Ok(ExitCode::SUCCESS)
}

/// The table of all kinds and seeds.
fn errors(args: &EvaluateArgs, data: &Dataset) -> anyhow::Result<String> {
    if args.seeds.is_empty() {
        bail!("--seeds: give at least one");
    }
    let ways = |seed| {
        [FoldBy::Pair { folds: 5, seed }, FoldBy::Workload, FoldBy::Family]
            .map(|by| folds(data, by))
    };
    let runs = kinds(&args.kinds)?
        .into_iter()
        .flat_map(|kind| args.seeds.iter().map(move |seed| (kind, *seed)))
        .collect::<Vec<_>>();
    let bar = ProgressBar::new(runs.len() as u64);
    let mut rows = Vec::new();
    for (kind, seed) in runs {
        bar.set_message(kind.name());
        let options = FitOptions::default().with_seed(seed);
        // Without chance in the model, a seed only shuffles the random pairs.
        let random = matches!(kind, ModelKind::Trees | ModelKind::Mlp | ModelKind::Hybrid);
        let mut row = vec![kind.name().to_owned(), seed.to_string()];
        let mut coverage = String::from("-");
        for (number, folds) in ways(seed).iter().enumerate() {
            if number > 0 && !random && Some(&seed) != args.seeds.first() {
                row.push("same".to_owned());
                continue;
            }
            let result = cross_validate(kind, data, folds, &options, args.threads)?;
            row.push(error_text(result.mean_absolute_error()));
            coverage = format!(
                "{:.0}/{:.0} %",
                100.0 * result.coverage(1.0),
                100.0 * result.coverage(2.0)
            );
        }
        row.push(coverage);
        rows.push(row);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let heads =
        ["model", "seed", "random pairs", "workload left out", "family left out", "within 1/2 σ"];
    Ok(table(&heads, &rows))
}

#[expect(clippy::print_stdout, reason = "the answer of the command")]
fn run_study(args: &EvaluateArgs, data: &Dataset, study: StudyName) -> anyhow::Result<ExitCode> {
    let (study, name, title) = match study {
        StudyName::Hidden => (Study::Hidden, "hidden", "Test error by hidden size, four layers"),
        StudyName::Layers => (Study::Layers, "layers", "Test error by layers, hidden size 64"),
    };
    let shapes = shapes(study);
    let bar = ProgressBar::new((shapes.len() * args.epochs) as u64);
    let mut lines: Vec<StudyLine> = Vec::new();
    for shape in shapes {
        bar.set_message(shape.0.clone());
        let progress = |_| {
            bar.inc(1);
            ControlFlow::Continue(())
        };
        lines.push(run_shape(data, shape, args.epochs.max(1), args.source.seed, progress)?);
    }
    bar.finish_and_clear();
    let mut csv = String::from("shape,parameters,epoch,train_error,test_error\n");
    for line in &lines {
        for epoch in &line.curve {
            writeln!(
                csv,
                "{},{},{},{:.6},{:.6}",
                line.name, line.parameters, epoch.number, epoch.train_error, epoch.validation_error
            )?;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of epochs")]
    let curves: Vec<Line> = lines
        .iter()
        .map(|line| Line {
            name: line.name.clone(),
            points: line.curve.iter().map(|e| (e.number as f64, e.validation_error)).collect(),
        })
        .collect();
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create {}", args.out.display()))?;
    write_whole(&args.out.join(format!("{name}.csv")), csv.as_bytes())?;
    let picture = line_chart(title, "epoch", "mean absolute error", &curves);
    write_whole(&args.out.join(format!("{name}.svg")), picture.as_bytes())?;
    let rows: Vec<Vec<String>> = lines
        .iter()
        .map(|l| vec![l.name.clone(), l.parameters.to_string(), error_text(l.best())])
        .collect();
    println!("{}: {}, random pairs held out, seed {}\n", title, data.origin, args.source.seed);
    println!("{}", table(&["shape", "parameters", "least test error"], &rows));
    println!("Written: {0}/{name}.csv, {0}/{name}.svg", args.out.display());
    Ok(ExitCode::SUCCESS)
}
