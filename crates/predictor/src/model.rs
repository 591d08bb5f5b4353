//! The models side by side, behind one way to fit and one way to ask.

use std::fmt;
use std::ops::ControlFlow;

use muxflow_types::{Percent, ProfileRecord};

use crate::error::PredictorError;
use crate::feature::{Half, SOLO_TIME, SideEncoder, halves};
use crate::kernel_model::{KernelModel, Shape, fit_line};
use crate::mlp::{Epoch, Mlp, MlpOptions, Rows};
use crate::rule::rule_speed;
use crate::sample::Dataset;
use crate::trees::{Trees, TreesOptions};
use crate::validate::{FoldBy, folds};

/// A kind of model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ModelKind {
    /// The mean speed of the training data, for every pair: what any model must beat.
    Mean,
    /// The conservative rule as it is.
    Rule,
    /// The rule, offsets per workload and family, smooth functions and their product.
    Kernel,
    /// The rule with boosted trees on its residual.
    Trees,
    /// The rule with a perceptron on its residual.
    Hybrid,
    /// The paper's multi-layer perceptron.
    Mlp,
}

impl ModelKind {
    /// Simpler ones first: at equal error the first wins.
    pub const ALL: [ModelKind; 6] = [
        ModelKind::Mean,
        ModelKind::Rule,
        ModelKind::Kernel,
        ModelKind::Hybrid,
        ModelKind::Mlp,
        ModelKind::Trees,
    ];

    /// Whether all pairs of a large cluster can be asked in time. Trees must be walked for each pair,
    /// some hundred times the work of the others, so they are a reference and not a choice.
    pub fn plans_large_clusters(self) -> bool {
        self != ModelKind::Trees
    }

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            ModelKind::Mean => "mean",
            ModelKind::Rule => "rule",
            ModelKind::Kernel => "kernel",
            ModelKind::Trees => "trees",
            ModelKind::Hybrid => "hybrid",
            ModelKind::Mlp => "mlp",
        }
    }

    /// The kind of this name.
    pub fn parse(name: &str) -> Option<Self> {
        ModelKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for ModelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A perceptron with its encoders.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpModel {
    /// Encodes the online half: the first inputs.
    pub online: SideEncoder,
    /// Encodes the offline half: the other inputs.
    pub offline: SideEncoder,
    /// The network.
    pub net: Mlp,
    /// The constant, and the weight of the rule's speed; both zero for the paper's model.
    pub trend: [f64; 2],
}

/// Trees on what the rule leaves.
#[derive(Debug, Clone, PartialEq)]
pub struct TreesModel {
    /// Which features of the online half.
    pub online: SideEncoder,
    /// Which features of the offline half.
    pub offline: SideEncoder,
    /// The constant, and the weight of the rule's speed.
    pub trend: [f64; 2],
    /// The trees.
    pub trees: Trees,
}

/// A fitted model.
#[derive(Debug, Clone, PartialEq)]
pub enum Model {
    /// See [`ModelKind::Mean`].
    Mean(f64),
    /// See [`ModelKind::Rule`].
    Rule,
    /// See [`ModelKind::Kernel`].
    Kernel(Box<KernelModel>),
    /// See [`ModelKind::Trees`].
    Trees(TreesModel),
    /// See [`ModelKind::Mlp`] and [`ModelKind::Hybrid`].
    Mlp(MlpModel),
}

/// How to fit each kind.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct FitOptions {
    /// The kernel's weights.
    pub shape: Shape,
    /// The trees.
    pub trees: TreesOptions,
    /// The perceptron.
    pub mlp: MlpOptions,
}

impl FitOptions {
    /// The same options with another seed for everything that is random.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.trees.seed = seed;
        self.mlp.seed = seed;
        self
    }
}

/// The rule's speed and the measured one of every sample.
fn rule_and_speeds(data: &Dataset) -> (Vec<f64>, Vec<f64>) {
    let rule = |s: &crate::SpeedSample| rule_speed(&s.online, s.share, &s.offline);
    data.samples.iter().map(|s| (rule(s), s.speed)).unzip()
}

/// Every seventh pair or so is held back to know when to stop.
const STOPPING_FOLDS: usize = 7;

impl MlpModel {
    #[expect(clippy::cast_possible_truncation, reason = "standardised features and speeds")]
    pub(crate) fn rows(&self, data: &Dataset, keep: &[usize]) -> Rows {
        let width = self.online.width() + self.offline.width();
        let mut rows = Rows { width, ..Rows::default() };
        for &index in keep {
            let sample = &data.samples[index];
            let online = self.online.encode(&Half::new(&sample.online, sample.share));
            let offline = self.offline.encode(&Half::new(&sample.offline, None));
            rows.inputs.extend(online.into_iter().chain(offline).map(|v| v as f32));
            let rule = rule_speed(&sample.online, sample.share, &sample.offline);
            let rest = sample.speed - self.trend[0] - self.trend[1] * rule;
            rows.targets.push(rest as f32);
        }
        rows
    }

    /// The encoders of these samples and no network yet.
    pub(crate) fn encoders(data: &Dataset) -> Self {
        let (online, offline) = halves(data);
        MlpModel {
            online: SideEncoder::fit(&online),
            offline: SideEncoder::fit(&offline),
            net: Mlp { layers: Vec::new() },
            trend: [0.0; 2],
        }
    }

    /// Trains it; one fold of pairs is held back for early stopping. With `on_rule`, what it learns
    /// is what a line through the rule's speeds leaves.
    pub fn fit(
        data: &Dataset,
        on_rule: bool,
        options: &MlpOptions,
        progress: &mut dyn FnMut(Epoch) -> ControlFlow<()>,
    ) -> Result<(Self, Vec<Epoch>), PredictorError> {
        let mut model = MlpModel::encoders(data);
        if on_rule {
            let (rule, speeds) = rule_and_speeds(data);
            model.trend = fit_line(&rule, &speeds);
        }
        let split = folds(data, FoldBy::Pair { folds: STOPPING_FOLDS, seed: options.seed });
        let everything: Vec<usize> = (0..data.samples.len()).collect();
        let (train, held_back) = split
            .first()
            .map_or((everything.as_slice(), &[][..]), |fold| (&fold.train, &fold.test));
        let (train, held_back) = (model.rows(data, train), model.rows(data, held_back));
        let (net, curve) = Mlp::train(&train, &held_back, options, progress)?;
        model.net = net;
        Ok((model, curve))
    }
}

impl TreesModel {
    fn row(&self, online: &Half, offline: &Half, rule: f64) -> Vec<f64> {
        let mut row = Vec::new();
        self.online.raw(online, &mut row);
        self.offline.raw(offline, &mut row);
        let ratio = match (offline.numeric[SOLO_TIME], online.numeric[SOLO_TIME]) {
            (Some(a), Some(b)) => a - b,
            _ => f64::NAN,
        };
        row.extend([ratio, rule]);
        row
    }

    fn fit(data: &Dataset, options: &TreesOptions) -> Self {
        let (online, offline) = halves(data);
        let mut model = TreesModel {
            online: SideEncoder::fit(&online),
            offline: SideEncoder::fit(&offline),
            trend: [0.0; 2],
            trees: Trees { width: 0, base: 0.0, trees: Vec::new() },
        };
        let (rule, speeds) = rule_and_speeds(data);
        model.trend = fit_line(&rule, &speeds);
        let rest: Vec<f64> = speeds
            .iter()
            .zip(&rule)
            .map(|(speed, r)| speed - model.trend[0] - model.trend[1] * r)
            .collect();
        let rows: Vec<Vec<f64>> = online
            .iter()
            .zip(&offline)
            .zip(&rule)
            .map(|((on, off), &r)| model.row(on, off, r))
            .collect();
        model.trees = Trees::fit(&rows, &rest, options);
        model
    }

    /// The speed of one pair.
    pub fn speed(&self, online: &Half, offline: &Half, rule: f64) -> f64 {
        let sum = self.trend[0]
            + self.trend[1] * rule
            + self.trees.predict(&self.row(online, offline, rule));
        sum.clamp(0.0, 1.0)
    }
}

impl Model {
    /// Fits a model of this kind. The callback sees the perceptron's epochs; the curve is empty for
    /// the kinds that have none.
    pub fn fit(
        kind: ModelKind,
        data: &Dataset,
        options: &FitOptions,
        progress: &mut dyn FnMut(Epoch) -> ControlFlow<()>,
    ) -> Result<(Model, Vec<Epoch>), PredictorError> {
        Ok(match kind {
            ModelKind::Mean => (Model::Mean(data.mean_speed()), Vec::new()),
            ModelKind::Rule => (Model::Rule, Vec::new()),
            ModelKind::Kernel => {
                (Model::Kernel(Box::new(KernelModel::fit(data, options.shape)?)), Vec::new())
            }
            ModelKind::Trees => (Model::Trees(TreesModel::fit(data, &options.trees)), Vec::new()),
            ModelKind::Mlp | ModelKind::Hybrid => {
                let on_rule = kind == ModelKind::Hybrid;
                let (model, curve) = MlpModel::fit(data, on_rule, &options.mlp, progress)?;
                (Model::Mlp(model), curve)
            }
        })
    }

    /// Which kind it is.
    pub fn kind(&self) -> ModelKind {
        match self {
            Model::Mean(_) => ModelKind::Mean,
            Model::Rule => ModelKind::Rule,
            Model::Kernel(_) => ModelKind::Kernel,
            Model::Trees(_) => ModelKind::Trees,
            Model::Mlp(model) if model.trend != [0.0; 2] => ModelKind::Hybrid,
            Model::Mlp(_) => ModelKind::Mlp,
        }
    }

    /// The speed of one pair, between 0 and 1.
    pub fn speed(
        &self,
        online: &ProfileRecord,
        share: Option<Percent>,
        offline: &ProfileRecord,
    ) -> f64 {
        let half = || (Half::new(online, share), Half::new(offline, None));
        match self {
            Model::Mean(mean) => *mean,
            Model::Rule => rule_speed(online, share, offline),
            Model::Kernel(model) => {
                let (on, off) = half();
                let (on, off) = (model.online_half(&on), model.offline_half(&off));
                model.combine(&on, &off, rule_speed(online, share, offline))
            }
            Model::Trees(model) => {
                let (on, off) = half();
                model.speed(&on, &off, rule_speed(online, share, offline))
            }
            Model::Mlp(model) => {
                let (on, off) = half();
                let row = model.online.encode(&on).into_iter().chain(model.offline.encode(&off));
                #[expect(clippy::cast_possible_truncation, reason = "standardised features")]
                let row: Vec<f32> = row.map(|v| v as f32).collect();
                let speed = model.net.predict(&row, 1).first().copied().unwrap_or(0.0);
                let rule = rule_speed(online, share, offline);
                (f64::from(speed) + model.trend[0] + model.trend[1] * rule).clamp(0.0, 1.0)
            }
        }
    }
}
