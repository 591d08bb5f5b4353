//! The paper's model: a multi-layer perceptron trained by momentum SGD with early stopping.
//!
//! "Four layers with hidden size 64×64" is read as four layers of nodes: input, two hidden layers
//! of 64, output, so that one weight matrix is 64 × 64. Any other shape can be trained too.

use std::ops::ControlFlow;

use crate::error::PredictorError;
use crate::gemm::transpose;
use crate::random::Rng;
use crate::simd::matrix_product;

/// One layer of weights.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Inputs.
    pub inputs: usize,
    /// Outputs.
    pub outputs: usize,
    /// `inputs × outputs`, one row per input.
    pub weights: Vec<f32>,
    /// One per output.
    pub biases: Vec<f32>,
}

/// ReLU between the layers, nothing after the last; one output.
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    /// From input to output.
    pub layers: Vec<Layer>,
}

/// How to train.
#[derive(Debug, Clone, PartialEq)]
pub struct MlpOptions {
    /// Nodes of the hidden layers.
    pub hidden: Vec<usize>,
    /// Step width.
    pub learning_rate: f32,
    /// What is kept of the last step.
    pub momentum: f32,
    /// Pull of the weights towards zero.
    pub weight_decay: f32,
    /// Samples in a step.
    pub batch: usize,
    /// Passes over the data at most.
    pub max_epochs: usize,
    /// Passes without a better validation error before it stops.
    pub patience: usize,
    /// Of the initial weights and of the order of the samples.
    pub seed: u64,
}

impl Default for MlpOptions {
    fn default() -> Self {
        MlpOptions {
            hidden: vec![64, 64],
            learning_rate: 0.03,
            momentum: 0.9,
            weight_decay: 1e-3,
            batch: 32,
            max_epochs: 600,
            patience: 60,
            seed: 1,
        }
    }
}

/// One pass over the data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Epoch {
    /// Counted from 1.
    pub number: usize,
    /// Mean absolute error on the training samples, as they were met.
    pub train_error: f64,
    /// Mean absolute error on the validation samples.
    pub validation_error: f64,
}

/// Rows of inputs with their targets.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// Numbers in a row.
    pub width: usize,
    /// All rows, one after the other.
    pub inputs: Vec<f32>,
    /// One target each.
    pub targets: Vec<f32>,
}

impl Rows {
    /// How many rows.
    pub fn len(&self) -> usize {
        self.targets.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.targets.is_empty()
    }
}

impl Mlp {
    /// Random weights, scaled so that signals neither grow nor fade.
    pub fn new(inputs: usize, hidden: &[usize], rng: &mut Rng) -> Self {
        let mut sizes = vec![inputs];
        sizes.extend_from_slice(hidden);
        sizes.push(1);
        let layers = sizes
            .windows(2)
            .map(|pair| {
                let (inputs, outputs) = (pair[0], pair[1]);
                #[expect(clippy::cast_precision_loss, reason = "a count of inputs")]
                let scale = (2.0 / inputs.max(1) as f64).sqrt();
                #[expect(clippy::cast_possible_truncation, reason = "a small random number")]
                let weights =
                    (0..inputs * outputs).map(|_| (rng.normal() * scale) as f32).collect();
                Layer { inputs, outputs, weights, biases: vec![0.0; outputs] }
            })
            .collect();
        Mlp { layers }
    }

    /// Numbers in a row of input.
    pub fn inputs(&self) -> usize {
        self.layers.first().map_or(0, |layer| layer.inputs)
    }

    /// All weights and biases.
    pub fn parameters(&self) -> usize {
        self.layers.iter().map(|l| l.weights.len() + l.biases.len()).sum()
    }

    /// The outputs of all rows.
    pub fn predict(&self, inputs: &[f32], rows: usize) -> Vec<f32> {
        let mut outputs = Vec::with_capacity(rows);
        let width = self.inputs();
        let mut memory = Memory::default();
        let mut done = 0;
        while done < rows {
            let count = 256.min(rows - done);
            memory.forward(self, &inputs[done * width..(done + count) * width], count);
            outputs.extend_from_slice(memory.output());
            done += count;
        }
        outputs
    }

    fn mean_absolute_error(&self, rows: &Rows) -> f64 {
        let outputs = self.predict(&rows.inputs, rows.len());
        mean_absolute(&outputs, &rows.targets)
    }

    /// Trains until the validation error no longer falls; the best weights seen are kept. The
    /// callback sees every epoch and may stop it.
    pub fn train(
        train: &Rows,
        validation: &Rows,
        options: &MlpOptions,
        mut progress: impl FnMut(Epoch) -> ControlFlow<()>,
    ) -> Result<(Mlp, Vec<Epoch>), PredictorError> {
        let mut rng = Rng::new(options.seed);
        let mut net = Mlp::new(train.width, &options.hidden, &mut rng);
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let mean = train.targets.iter().sum::<f32>() / train.len().max(1) as f32;
        if let Some(last) = net.layers.last_mut() {
            last.biases.fill(mean);
        }
        let mut state = Training::new(&net);
        let mut order: Vec<usize> = (0..train.len()).collect();
        let (mut best, mut best_error, mut best_epoch) = (net.clone(), f64::INFINITY, 0);
        let mut curve = Vec::new();
        for number in 1..=options.max_epochs {
            rng.shuffle(&mut order);
            let train_error = state.pass(&mut net, train, &order, options);
            let validation_error = if validation.is_empty() {
                train_error
            } else {
                net.mean_absolute_error(validation)
            };
            if !train_error.is_finite() || !validation_error.is_finite() {
                let place = format!("epoch {number}");
                return Err(PredictorError::Diverged { model: "MLP", place });
            }
            let epoch = Epoch { number, train_error, validation_error };
            curve.push(epoch);
            if validation_error < best_error {
                (best, best_error, best_epoch) = (net.clone(), validation_error, number);
            }
            if progress(epoch).is_break() || number - best_epoch >= options.patience {
                break;
            }
        }
        Ok((best, curve))
    }
}

fn mean_absolute(outputs: &[f32], targets: &[f32]) -> f64 {
    let sum: f64 = outputs.iter().zip(targets).map(|(o, t)| f64::from((o - t).abs())).sum();
    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    let count = targets.len().max(1) as f64;
    sum / count
}

/// The values of all nodes for one batch.
#[derive(Debug, Default)]
struct Memory {
    values: Vec<Vec<f32>>,
}

impl Memory {
    fn forward(&mut self, net: &Mlp, inputs: &[f32], rows: usize) {
        self.values.resize(net.layers.len() + 1, Vec::new());
        self.values[0].clear();
        self.values[0].extend_from_slice(inputs);
        let last = net.layers.len().saturating_sub(1);
        for (index, layer) in net.layers.iter().enumerate() {
            let (before, after) = self.values.split_at_mut(index + 1);
            let out = &mut after[0];
            out.clear();
            for _ in 0..rows {
                out.extend_from_slice(&layer.biases);
            }
            let shape = [rows, layer.inputs, layer.outputs];
            matrix_product(shape, &before[index], &layer.weights, out, true);
            if index < last {
                for value in out.iter_mut() {
                    *value = value.max(0.0);
                }
            }
        }
    }

    fn output(&self) -> &[f32] {
        self.values.last().map_or(&[], Vec::as_slice)
    }
}

/// Gradients of all layers, in the order of the layers: weights, biases.
type Gradients = Vec<(Vec<f32>, Vec<f32>)>;

#[derive(Debug)]
struct Training {
    velocity: Gradients,
    gradients: Gradients,
    memory: Memory,
    turned: Vec<f32>,
}

impl Training {
    fn new(net: &Mlp) -> Self {
        let zeros: Gradients = net
            .layers
            .iter()
            .map(|l| (vec![0.0; l.weights.len()], vec![0.0; l.biases.len()]))
            .collect();
        Training {
            velocity: zeros.clone(),
            gradients: zeros,
            memory: Memory::default(),
            turned: Vec::new(),
        }
    }

    fn pass(&mut self, net: &mut Mlp, rows: &Rows, order: &[usize], options: &MlpOptions) -> f64 {
        let mut error = 0.0;
        let (mut inputs, mut targets) = (Vec::new(), Vec::new());
        for batch in order.chunks(options.batch.max(1)) {
            inputs.clear();
            targets.clear();
            for &row in batch {
                inputs.extend_from_slice(&rows.inputs[row * rows.width..(row + 1) * rows.width]);
                targets.push(rows.targets[row]);
            }
            self.gradient(net, &inputs, &targets);
            #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
            let count = batch.len() as f64;
            error += mean_absolute(self.memory.output(), &targets) * count;
            self.step(net, options);
        }
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let count = order.len().max(1) as f64;
        error / count
    }

    /// Half the mean squared error's gradient for one batch.
    fn gradient(&mut self, net: &Mlp, inputs: &[f32], targets: &[f32]) {
        let rows = targets.len();
        self.memory.forward(net, inputs, rows);
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let scale = 1.0 / rows.max(1) as f32;
        let mut delta: Vec<f32> =
            self.memory.output().iter().zip(targets).map(|(o, t)| (o - t) * scale).collect();
        for (index, layer) in net.layers.iter().enumerate().rev() {
            let (weights, biases) = &mut self.gradients[index];
            let input = &self.memory.values[index];
            self.turned.resize(input.len(), 0.0);
            transpose([rows, layer.inputs], input, &mut self.turned);
            let shape = [layer.inputs, rows, layer.outputs];
            matrix_product(shape, &self.turned, &delta, weights, false);
            biases.fill(0.0);
            for row in delta.chunks_exact(layer.outputs) {
                for (bias, d) in biases.iter_mut().zip(row) {
                    *bias += d;
                }
            }
            if index == 0 {
                break;
            }
            self.turned.resize(layer.weights.len(), 0.0);
            transpose([layer.inputs, layer.outputs], &layer.weights, &mut self.turned);
            let mut below = vec![0.0; rows * layer.inputs];
            let shape = [rows, layer.outputs, layer.inputs];
            matrix_product(shape, &delta, &self.turned, &mut below, false);
            for (d, value) in below.iter_mut().zip(input) {
                if *value <= 0.0 {
                    *d = 0.0;
                }
            }
            delta = below;
        }
    }

    fn step(&mut self, net: &mut Mlp, options: &MlpOptions) {
        let (rate, keep, decay) = (options.learning_rate, options.momentum, options.weight_decay);
        for ((layer, velocity), gradient) in
            net.layers.iter_mut().zip(&mut self.velocity).zip(&self.gradients)
        {
            for ((w, v), g) in layer.weights.iter_mut().zip(&mut velocity.0).zip(&gradient.0) {
                *v = keep * *v - rate * (g + decay * *w);
                *w += *v;
            }
            for ((b, v), g) in layer.biases.iter_mut().zip(&mut velocity.1).zip(&gradient.1) {
                *v = keep * *v - rate * g;
                *b += *v;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::cast_possible_truncation, reason = "test data")]
    fn rows(count: usize, width: usize, seed: u64) -> Rows {
        let mut rng = Rng::new(seed);
        let mut rows = Rows { width, ..Rows::default() };
        for _ in 0..count {
            let x: Vec<f32> = (0..width).map(|_| rng.normal() as f32).collect();
            rows.targets.push((0.5 + 0.2 * x[0] - 0.1 * x[1] * x[2]).clamp(0.0, 1.0));
            rows.inputs.extend(x);
        }
        rows
    }

    #[test]
    fn the_gradient_equals_finite_differences() {
        let data = rows(9, 5, 1);
        let mut net = Mlp::new(5, &[7, 6], &mut Rng::new(2));
        let mut state = Training::new(&net);
        state.gradient(&net, &data.inputs, &data.targets);
        let analytic = state.gradients.clone();
        let loss = |net: &Mlp| -> f64 {
            let out = net.predict(&data.inputs, 9);
            let sum: f64 =
                out.iter().zip(&data.targets).map(|(o, t)| f64::from(o - t).powi(2)).sum();
            0.5 * sum / 9.0
        };
        let step = 1e-3f32;
        let mut checked = 0;
        for (layer, slopes) in analytic.iter().enumerate() {
            for weight in 0..net.layers[layer].weights.len() {
                let at = net.layers[layer].weights[weight];
                net.layers[layer].weights[weight] = at + step;
                let up = loss(&net);
                net.layers[layer].weights[weight] = at - step;
                let down = loss(&net);
                net.layers[layer].weights[weight] = at;
                let numeric = (up - down) / (2.0 * f64::from(step));
                let got = f64::from(slopes.0[weight]);
                assert!((numeric - got).abs() < 2e-3, "layer {layer}: {numeric} {got}");
                checked += 1;
            }
            let at = net.layers[layer].biases[0];
            net.layers[layer].biases[0] = at + step;
            let up = loss(&net);
            net.layers[layer].biases[0] = at - step;
            let down = loss(&net);
            net.layers[layer].biases[0] = at;
            let numeric = (up - down) / (2.0 * f64::from(step));
            assert!((numeric - f64::from(slopes.1[0])).abs() < 2e-3);
        }
        assert_eq!(checked, 5 * 7 + 7 * 6 + 6);
    }

    #[test]
    fn training_learns_is_deterministic_and_stops_early() {
        let (train, validation) = (rows(200, 6, 3), rows(150, 6, 4));
        let options = MlpOptions {
            max_epochs: 400,
            patience: 15,
            weight_decay: 1e-5,
            ..MlpOptions::default()
        };
        let run = |seed| {
            let options = MlpOptions { seed, ..options.clone() };
            Mlp::train(&train, &validation, &options, |_| ControlFlow::Continue(())).unwrap()
        };
        let (net, curve) = run(7);
        let best = curve.iter().map(|e| e.validation_error).fold(f64::INFINITY, f64::min);
        assert!(best < 0.08 && curve[0].validation_error > 1.5 * best, "{best}");
        assert!(curve.len() < 400, "no early stop");
        assert_eq!(run(7), (net.clone(), curve));
        assert_ne!(run(8).0, net);
    }

    #[test]
    fn the_callback_can_stop_training_and_divergence_is_an_error() {
        let data = rows(64, 6, 5);
        let stop = |_| ControlFlow::Break(());
        let (_, curve) = Mlp::train(&data, &data, &MlpOptions::default(), stop).unwrap();
        assert_eq!(curve.len(), 1);
        let wild = MlpOptions { learning_rate: 1e9, ..MlpOptions::default() };
        let error = Mlp::train(&data, &data, &wild, |_| ControlFlow::Continue(())).unwrap_err();
        assert!(error.to_string().contains("learning rate"), "{error}");
    }
}
