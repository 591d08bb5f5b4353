//! The paper's study of the perceptron's shape: hidden sizes from 64 to 1024 and two to eight layers.

use std::ops::ControlFlow;

use muxflow_gpu_model::GpuProfile;
use muxflow_predictor::study::{Study, run_shape, shapes};

use crate::error::SimError;
use crate::predictors::dataset;
use crate::report::render;

/// Pairs, of which a fifth is for testing.
const PAIRS: usize = 2000;
/// Passes over the data; the paper's figures end about there.
const EPOCHS: usize = 100;
/// Epochs whose test error is shown.
const SHOWN: [usize; 5] = [1, 3, 10, 30, EPOCHS];

/// Both figures as tables of points on their curves.
pub(super) fn all(
    profile: &GpuProfile,
    seed: u64,
    say: &mut dyn FnMut(&str),
) -> Result<String, SimError> {
    let data = dataset(profile, PAIRS, seed)?;
    let mut out = format!(
        "## The perceptron's shape

Mean absolute error on 400 of 2,000 pairs of the modelled T4, trained on the others, after so many of {EPOCHS} epochs, without early stopping. A layer is a layer of nodes, input and output counted; four layers of hidden size 64 are the paper's.
`muxflow evaluate --gpu-model 2000 --gpu-type T4 --study hidden` (or `layers`) draws the whole curves.

"
    );
    for study in [Study::Hidden, Study::Layers] {
        let head = ["shape", "weights"].into_iter().map(str::to_owned);
        let epochs = SHOWN.iter().map(|e| format!("epoch {e}"));
        let mut rows = vec![head.chain(epochs).chain(["least".to_owned()]).collect::<Vec<_>>()];
        for shape in shapes(study) {
            say(&shape.0);
            let line = run_shape(&data, shape, EPOCHS, seed, |_| ControlFlow::Continue(()))
                .map_err(|e| SimError::Predictor { reason: e.to_string() })?;
            let mut row = vec![line.name.clone(), line.parameters.to_string()];
            for epoch in SHOWN {
                let error = line.curve.get(epoch - 1).map_or(f64::NAN, |e| e.validation_error);
                row.push(format!("{error:.4}"));
            }
            row.push(format!("{:.4}", line.best()));
            rows.push(row);
        }
        out.push_str(&render(&rows, true));
        out.push('\n');
    }
    out.push_str(
        "Published: hidden sizes from 64 to 1024 end alike, and four layers are best; the text gives no numbers.\n\n",
    );
    Ok(out)
}
