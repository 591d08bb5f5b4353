//! Choosing a model: every kind is cross-validated, the one with the least error on workloads it has
//! never seen is fitted on everything. A new model replaces an old one only where it is better.

use std::ops::ControlFlow;

use crate::error::PredictorError;
use crate::mlp::Epoch;
use crate::model::{FitOptions, Model, ModelKind};
use crate::pairs::narrow;
use crate::random::Rng;
use crate::sample::Dataset;
use crate::trained::{Card, TrainedModel};
use crate::validate::{Familiarity, FoldBy, Validation, cross_validate, folds};

/// What to try, and how hard.
#[derive(Debug, Clone, PartialEq)]
pub struct SelectOptions {
    /// The kinds that may win.
    pub kinds: Vec<ModelKind>,
    /// How each is fitted.
    pub fit: FitOptions,
    /// Folds of random pairs.
    pub pair_folds: usize,
    /// Groups of workloads to leave out.
    pub groups: usize,
    /// Of everything random.
    pub seed: u64,
    /// Threads to use.
    pub threads: usize,
}

impl Default for SelectOptions {
    fn default() -> Self {
        SelectOptions {
            kinds: ModelKind::ALL.to_vec(),
            fit: FitOptions::default(),
            pair_folds: 5,
            groups: 8,
            seed: 1,
            threads: 1,
        }
    }
}

/// One kind's cross-validation.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Which kind.
    pub kind: ModelKind,
    /// On random pairs.
    pub pairs: Validation,
    /// On workloads left out.
    pub unseen: Validation,
}

/// What training tells while it runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Progress {
    /// A kind is being cross-validated.
    Validating {
        /// Which kind.
        kind: ModelKind,
        /// How many kinds are done.
        done: usize,
        /// Of how many.
        of: usize,
    },
    /// The final perceptron passed over the data.
    Epoch(Epoch),
}

/// A trained model and how it was chosen.
#[derive(Debug, Clone, PartialEq)]
pub struct Selection {
    /// The winner, fitted on all samples.
    pub model: TrainedModel,
    /// All kinds, in the order tried.
    pub candidates: Vec<Candidate>,
    /// The learning curve of the perceptron on all samples, whoever won; empty when it was not
    /// among the kinds.
    pub curve: Vec<Epoch>,
}

/// Cross-validates every kind, picks the one with the least error on workloads left out, and fits it
/// on all samples.
pub fn select(
    data: &Dataset,
    options: &SelectOptions,
    progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Selection, PredictorError> {
    data.check()?;
    let fit = options.fit.clone().with_seed(options.seed);
    let by_pair = folds(data, FoldBy::Pair { folds: options.pair_folds, seed: options.seed });
    let by_group = folds(data, FoldBy::WorkloadGroups { groups: options.groups });
    let mut candidates = Vec::new();
    for (done, &kind) in options.kinds.iter().enumerate() {
        if progress(Progress::Validating { kind, done, of: options.kinds.len() }).is_break() {
            break;
        }
        let run = |folds| cross_validate(kind, data, folds, &fit, options.threads);
        candidates.push(Candidate { kind, pairs: run(&by_pair)?, unseen: run(&by_group)? });
    }
    let best = winner(&candidates).ok_or_else(|| PredictorError::Dataset {
        source_name: data.origin.clone(),
        problem: "no kind of model was tried".to_owned(),
    })?;
    let mut silent = |_| ControlFlow::Continue(());
    let (model, mut curve) =
        Model::fit(best.kind, data, &fit, &mut |epoch| progress(Progress::Epoch(epoch)))?;
    if curve.is_empty() && options.kinds.contains(&ModelKind::Mlp) {
        curve = Model::fit(ModelKind::Mlp, data, &fit, &mut silent)?.1;
    }
    let mean = candidates.iter().find(|c| c.kind == ModelKind::Mean);
    let card = Card {
        origin: data.origin.clone(),
        samples: data.samples.len(),
        seed: options.seed,
        pair_error: best.pairs.mean_absolute_error(),
        unseen_error: best.unseen.mean_absolute_error(),
        mean_unseen_error: mean.map_or(f64::INFINITY, |m| m.unseen.mean_absolute_error()),
        parent: None,
    };
    let deviation = deviations(best);
    let seen = |side: fn(&crate::SpeedSample) -> &str| {
        data.samples.iter().map(|s| side(s).to_owned()).collect()
    };
    let model = TrainedModel {
        gpu_type: data.gpu_type.clone(),
        model,
        online_seen: seen(|s| s.online.workload.as_str()),
        offline_seen: seen(|s| s.offline.workload.as_str()),
        deviation,
        card,
    };
    Ok(Selection { model, candidates, curve })
}

/// The least error among the kinds that the scheduler can use at any size, or, where none of those
/// was tried, among all.
fn winner(candidates: &[Candidate]) -> Option<&Candidate> {
    let usable = || candidates.iter().filter(|c| c.kind.plans_large_clusters());
    let least = |a: &&Candidate, b: &&Candidate| score(a).total_cmp(&score(b));
    usable().min_by(least).or_else(|| candidates.iter().min_by(least))
}

fn score(candidate: &Candidate) -> f64 {
    let error = candidate.unseen.mean_absolute_error();
    // With too few workloads to leave any out, random pairs must do.
    if error.is_nan() { candidate.pairs.mean_absolute_error() } else { error }
}

/// Root mean square errors by familiarity; what was not measured is as wide as the next worse.
fn deviations(candidate: &Candidate) -> [f32; 3] {
    let neither = candidate.unseen.deviation(Familiarity::Neither);
    let one = candidate.unseen.deviation(Familiarity::One);
    let both = candidate.pairs.deviation(Familiarity::Both);
    let widest = [neither, one, both].into_iter().flatten().fold(0.0, f64::max);
    let widest = if widest > 0.0 { widest } else { 0.25 };
    let one = one.unwrap_or(widest);
    // Knowing less never makes one surer.
    let both = both.unwrap_or(one).min(one);
    [both, one, neither.unwrap_or(widest).max(one)].map(narrow)
}

/// Mean absolute error of a model in use on measured pairs.
pub fn error_on(model: &TrainedModel, data: &Dataset) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    let count = data.samples.len().max(1) as f64;
    let sum: f64 = data
        .samples
        .iter()
        .map(|s| (model.model.speed(&s.online, s.share, &s.offline) - s.speed).abs())
        .sum();
    sum / count
}

/// Whether a new way of training may replace a model in use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Mean absolute error of the model in use on the samples held out.
    pub old_error: f64,
    /// Mean absolute error of the challenger, trained without them.
    pub new_error: f64,
    /// How many samples were held out.
    pub held_out: usize,
}

impl Verdict {
    /// A worse or equal model never replaces a better one.
    pub fn replace(&self) -> bool {
        self.held_out > 0 && self.new_error < self.old_error
    }
}

/// Splits off what both models are judged on: the newest tenth, and as many others at random. The
/// pairs of these workloads at other times stay in training: that is how observations come.
pub fn hold_out(data: &Dataset, seed: u64) -> (Dataset, Dataset) {
    let mut order: Vec<usize> = (0..data.samples.len()).collect();
    order.sort_by_key(|&index| data.samples[index].at);
    let part = data.samples.len() / 10;
    let newest = order.split_off(data.samples.len() - part);
    Rng::new(seed).shuffle(&mut order);
    let mut test = order.split_off(order.len().saturating_sub(part));
    test.extend(newest);
    test.sort_unstable();
    order.sort_unstable();
    (data.subset(&order), data.subset(&test))
}

/// Judges a model in use against a challenger of kind `kind` trained on the same samples without the
/// ones held out. The model in use may have been trained on some of those; that favours it.
pub fn judge(
    in_use: &TrainedModel,
    kind: ModelKind,
    data: &Dataset,
    options: &SelectOptions,
) -> Result<Verdict, PredictorError> {
    let (train, test) = hold_out(data, options.seed);
    let fit = options.fit.clone().with_seed(options.seed);
    let (model, _) = Model::fit(kind, &train, &fit, &mut |_| ControlFlow::Continue(()))?;
    let challenger = TrainedModel { model, ..in_use.clone() };
    Ok(Verdict {
        old_error: error_on(in_use, &test),
        new_error: error_on(&challenger, &test),
        held_out: test.samples.len(),
    })
}
