//! Honest validation: what is tested was never trained on, not even in part.
//!
//! By pairs, both directions and all shares of two workloads stay together. By workload or family,
//! every sample that names the one left out, on either side, is tested and not trained on.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::PredictorError;
use crate::model::{FitOptions, Model, ModelKind};
use crate::random::Rng;
use crate::sample::{Dataset, family_and_batch};

/// What is left out at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FoldBy {
    /// Pairs at random, in so many folds.
    Pair {
        /// How many folds.
        folds: usize,
        /// Of the assignment of pairs to folds.
        seed: u64,
    },
    /// One workload, on both sides.
    Workload,
    /// One family of workloads (all batch sizes of one network), on both sides.
    Family,
    /// Workloads in at most so many groups, for a quicker answer to the same question.
    WorkloadGroups {
        /// How many groups.
        groups: usize,
    },
}

/// One split.
#[derive(Debug, Clone, PartialEq)]
pub struct Fold {
    /// What was left out.
    pub left_out: String,
    /// Indices to train on.
    pub train: Vec<usize>,
    /// Indices to test on.
    pub test: Vec<usize>,
}

/// All splits of a kind; none has an empty side.
pub fn folds(data: &Dataset, by: FoldBy) -> Vec<Fold> {
    let family = |name: &muxflow_types::WorkloadName| family_and_batch(name).0.to_owned();
    let labels: Vec<[String; 2]> = match by {
        FoldBy::Pair { folds, seed } => pair_labels(data, folds, seed),
        FoldBy::Workload => both(data, |name| name.as_str().to_owned()),
        FoldBy::Family => both(data, family),
        FoldBy::WorkloadGroups { groups } => {
            let families: BTreeSet<String> = data.workloads().iter().map(family).collect();
            let names: Vec<String> = if families.len() >= 4 {
                families.into_iter().collect()
            } else {
                data.workloads().iter().map(|n| n.as_str().to_owned()).collect()
            };
            let number: BTreeMap<&str, usize> =
                names.iter().enumerate().map(|(i, n)| (n.as_str(), i % groups.max(1))).collect();
            both(data, |name| {
                let key = number.get(name.as_str()).or_else(|| number.get(family(name).as_str()));
                format!("group {}", key.copied().unwrap_or(0))
            })
        }
    };
    let all: BTreeSet<&String> = labels.iter().flatten().collect();
    all.into_iter()
        .map(|left_out| {
            let (test, train) =
                (0..labels.len()).partition(|&index| labels[index].contains(left_out));
            Fold { left_out: left_out.clone(), train, test }
        })
        .filter(|fold| !fold.train.is_empty() && !fold.test.is_empty())
        .collect()
}

fn both(
    data: &Dataset,
    label: impl Fn(&muxflow_types::WorkloadName) -> String,
) -> Vec<[String; 2]> {
    data.samples.iter().map(|s| [label(&s.online.workload), label(&s.offline.workload)]).collect()
}

fn pair_labels(data: &Dataset, folds: usize, seed: u64) -> Vec<[String; 2]> {
    let key = |index: usize| {
        let sample = &data.samples[index];
        let (a, b) = (sample.online.workload.clone(), sample.offline.workload.clone());
        if a < b { (a, b) } else { (b, a) }
    };
    let unique: BTreeSet<_> = (0..data.samples.len()).map(key).collect();
    let mut order: Vec<usize> = (0..unique.len()).collect();
    Rng::new(seed).shuffle(&mut order);
    let fold_of: BTreeMap<_, usize> =
        unique.into_iter().zip(order).map(|(pair, at)| (pair, at % folds.max(2))).collect();
    (0..data.samples.len())
        .map(|index| {
            let label = format!("fold {}", fold_of.get(&key(index)).copied().unwrap_or(0));
            [label.clone(), label]
        })
        .collect()
}

/// How much of a pair the training data had seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Familiarity {
    /// Both workloads, each on its side.
    Both,
    /// One of the two.
    One,
    /// Neither.
    Neither,
}

/// One test answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Residual {
    /// Index of the sample.
    pub sample: usize,
    /// Index of the fold.
    pub fold: usize,
    /// What the model said.
    pub predicted: f64,
    /// Said minus measured.
    pub error: f64,
    /// What the model knew.
    pub familiarity: Familiarity,
}

/// The outcome of one cross-validation.
#[derive(Debug, Clone, PartialEq)]
pub struct Validation {
    /// What was tested.
    pub kind: ModelKind,
    /// Names of the folds.
    pub left_out: Vec<String>,
    /// All answers.
    pub residuals: Vec<Residual>,
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0.0), |(sum, count), v| (sum + v, count + 1.0));
    if count > 0.0 { sum / count } else { f64::NAN }
}

impl Validation {
    /// Mean absolute error over all answers.
    pub fn mean_absolute_error(&self) -> f64 {
        mean(self.residuals.iter().map(|r| r.error.abs()))
    }

    /// Mean absolute error of each fold, with the number of answers.
    pub fn by_fold(&self) -> Vec<(String, usize, f64)> {
        self.left_out
            .iter()
            .enumerate()
            .map(|(fold, name)| {
                let of = || self.residuals.iter().filter(|r| r.fold == fold);
                (name.clone(), of().count(), mean(of().map(|r| r.error.abs())))
            })
            .collect()
    }

    /// Root mean square error of the answers of one familiarity.
    pub fn deviation(&self, familiarity: Familiarity) -> Option<f64> {
        let of = || self.residuals.iter().filter(|r| r.familiarity == familiarity);
        (of().count() >= 8).then(|| mean(of().map(|r| r.error.powi(2))).sqrt())
    }

    /// Share of answers within `width` standard deviations, the deviation of each fold being taken
    /// from the other folds.
    pub fn coverage(&self, width: f64) -> f64 {
        let inside = self.residuals.iter().filter(|r| {
            let others = self
                .residuals
                .iter()
                .filter(|o| o.fold != r.fold && o.familiarity == r.familiarity);
            r.error.abs() <= width * mean(others.map(|o| o.error.powi(2))).sqrt()
        });
        mean(std::iter::once(ratio(inside.count(), self.residuals.len())))
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of samples")]
fn ratio(part: usize, whole: usize) -> f64 {
    part as f64 / whole.max(1) as f64
}

/// Fits and tests a kind of model on every fold, on so many threads.
pub fn cross_validate(
    kind: ModelKind,
    data: &Dataset,
    folds: &[Fold],
    options: &FitOptions,
    threads: usize,
) -> Result<Validation, PredictorError> {
    let next = AtomicUsize::new(0);
    let done: Mutex<Vec<Result<Vec<Residual>, PredictorError>>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some(fold) = folds.get(at) else { break };
                    let result = test_fold(kind, data, at, fold, options);
                    match done.lock() {
                        Ok(mut list) => list.push(result),
                        Err(poisoned) => poisoned.into_inner().push(result),
                    }
                }
            });
        }
    });
    let mut residuals = Vec::new();
    for result in done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        residuals.extend(result?);
    }
    residuals.sort_by_key(|r| (r.fold, r.sample));
    let left_out = folds.iter().map(|fold| fold.left_out.clone()).collect();
    Ok(Validation { kind, left_out, residuals })
}

fn test_fold(
    kind: ModelKind,
    data: &Dataset,
    at: usize,
    fold: &Fold,
    options: &FitOptions,
) -> Result<Vec<Residual>, PredictorError> {
    let train = data.subset(&fold.train);
    let (model, _) = Model::fit(kind, &train, options, &mut |_| ControlFlow::Continue(()))?;
    let online: BTreeSet<_> = train.samples.iter().map(|s| &s.online.workload).collect();
    let offline: BTreeSet<_> = train.samples.iter().map(|s| &s.offline.workload).collect();
    let test = |&sample: &usize| {
        let measured = &data.samples[sample];
        let predicted = model.speed(&measured.online, measured.share, &measured.offline);
        let known = usize::from(online.contains(&measured.online.workload))
            + usize::from(offline.contains(&measured.offline.workload));
        Residual {
            sample,
            fold: at,
            predicted,
            error: predicted - measured.speed,
            familiarity: [Familiarity::Neither, Familiarity::One, Familiarity::Both][known],
        }
    };
    Ok(fold.test.iter().map(test).collect())
}
