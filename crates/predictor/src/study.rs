//! The paper's study of the perceptron's shape: test error by epoch for other hidden sizes and other
//! numbers of layers.

use std::ops::ControlFlow;

use crate::error::PredictorError;
use crate::mlp::{Epoch, Mlp, MlpOptions};
use crate::model::MlpModel;
use crate::sample::Dataset;
use crate::validate::{FoldBy, folds};

/// Which figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Study {
    /// Hidden size 64 to 1024, four layers.
    Hidden,
    /// Two to eight layers, hidden size 64.
    Layers,
}

/// One line of the figure.
#[derive(Debug, Clone, PartialEq)]
pub struct StudyLine {
    /// Its name.
    pub name: String,
    /// The hidden layers.
    pub hidden: Vec<usize>,
    /// Weights and biases.
    pub parameters: usize,
    /// Training and test error of each epoch.
    pub curve: Vec<Epoch>,
}

impl StudyLine {
    /// The least test error.
    pub fn best(&self) -> f64 {
        self.curve.iter().map(|e| e.validation_error).fold(f64::INFINITY, f64::min)
    }
}

/// The shapes of a figure: a layer is a layer of nodes, input and output counted.
pub fn shapes(study: Study) -> Vec<(String, Vec<usize>)> {
    match study {
        Study::Hidden => {
            [64, 128, 256, 512, 1024].map(|size| (format!("{size}×{size}"), vec![size; 2])).to_vec()
        }
        Study::Layers => {
            (2..=8).map(|layers| (format!("{layers} layers"), vec![64; layers - 2])).collect()
        }
    }
}

/// Trains one shape for `epochs` epochs on four fifths of the pairs, and tests it on the rest after
/// each. There is no early stopping: the figure shows the whole curve.
pub fn run_shape(
    data: &Dataset,
    (name, hidden): (String, Vec<usize>),
    epochs: usize,
    seed: u64,
    progress: impl FnMut(Epoch) -> ControlFlow<()>,
) -> Result<StudyLine, PredictorError> {
    data.check()?;
    let split = folds(data, FoldBy::Pair { folds: 5, seed });
    let fold = split.first().ok_or_else(|| PredictorError::Dataset {
        source_name: data.origin.clone(),
        problem: "too few different pairs to hold some back for testing".to_owned(),
    })?;
    let model = MlpModel::encoders(&data.subset(&fold.train));
    let options =
        MlpOptions { hidden, max_epochs: epochs, patience: epochs, seed, ..MlpOptions::default() };
    let (train, test) = (model.rows(data, &fold.train), model.rows(data, &fold.test));
    let (net, curve) = Mlp::train(&train, &test, &options, progress)?;
    Ok(StudyLine { name, hidden: options.hidden, parameters: net.parameters(), curve })
}
