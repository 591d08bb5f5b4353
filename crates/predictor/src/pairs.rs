//! All pairs of two lists at once: what depends on one half is computed once, the rest in blocks.

use muxflow_types::PairSpeeds;

use crate::feature::Half;
use crate::kernel_model::KernelModel;
use crate::model::{MlpModel, TreesModel};
use crate::rule::{self, OfflineHalf, OnlineHalf};
use crate::simd::{CACHE_LINE, InstructionSet, PackedLayer, join_halves, weighted_sum};

/// One list of halves with what the rule needs of each.
pub(crate) struct Halves<R> {
    pub(crate) halves: Vec<Half>,
    pub(crate) rule: Vec<R>,
    /// Where only the rule can answer: nothing is known of this half.
    pub(crate) unknown: Vec<bool>,
}

pub(crate) type OnlineHalves = Halves<OnlineHalf>;
pub(crate) type OfflineHalves = Halves<OfflineHalf>;

#[expect(clippy::cast_possible_truncation, reason = "speeds and standardised features")]
pub(crate) fn narrow(value: f64) -> f32 {
    value as f32
}

/// Numbers in a page. To a processor, a load and a store that lie a multiple of it apart look alike
/// at first, and the load waits.
const PAGE: usize = 1024;

/// How many numbers of a buffer to skip so that it lies half a page from another; less than
/// [`PAGE`].
fn half_a_page_from(other: &[f32], buffer: &[f32]) -> usize {
    let bytes = other.as_ptr().addr().wrapping_sub(buffer.as_ptr().addr());
    (bytes / size_of::<f32>()).wrapping_add(PAGE / 2) % PAGE
}

/// How many numbers of a buffer lie before its first cache line; at most [`CACHE_LINE`].
fn to_cache_line(buffer: &[f32]) -> usize {
    buffer.as_ptr().align_offset(size_of::<[f32; CACHE_LINE]>()).min(CACHE_LINE)
}

/// Columns in blocks of lanes: for each block, for each feature, one number per lane.
struct Panels {
    block: usize,
    features: usize,
    values: Vec<f32>,
    /// Where in `values` the first block begins: on a cache line, as a load across two costs two.
    start: usize,
}

impl Panels {
    fn new(block: usize, features: usize, columns: &[Vec<f32>]) -> Self {
        let size = columns.len().div_ceil(block) * features * block;
        let mut values = vec![0.0; size + CACHE_LINE];
        let start = to_cache_line(&values);
        for (column, row) in columns.iter().enumerate() {
            let start = start + column / block * features * block + column % block;
            for (feature, value) in row.iter().enumerate() {
                values[start + feature * block] = *value;
            }
        }
        Panels { block, features, values, start }
    }

    fn panel(&self, index: usize) -> &[f32] {
        let size = self.features * self.block;
        let first = self.start + index * size;
        &self.values[first..first + size]
    }

    /// Calls `run` for every block that the columns `first..first + out.len()` touch, with the
    /// block that comes after it (or itself), and copies the part that was asked for.
    fn fill(&self, first: usize, out: &mut [f32], mut run: impl FnMut(&[f32], &[f32], &mut [f32])) {
        let last = (first + out.len()).saturating_sub(1) / self.block;
        let mut answers = vec![0.0; self.block];
        let mut written = 0;
        while written < out.len() {
            let column = first + written;
            let (index, lane) = (column / self.block, column % self.block);
            let count = (self.block - lane).min(out.len() - written);
            run(self.panel(index), self.panel((index + 1).min(last)), &mut answers);
            out[written..written + count].copy_from_slice(&answers[lane..lane + count]);
            written += count;
        }
    }
}

/// Where one side is unknown, the rule answers in place of the model.
fn rule_where_unknown(
    online: &OnlineHalves,
    offline: &OfflineHalves,
    row: usize,
    first: usize,
    out: &mut [f32],
) {
    let all = online.unknown[row];
    for (index, speed) in out.iter_mut().enumerate() {
        if all || offline.unknown[first + index] {
            *speed = rule::speed(online.rule[row], offline.rule[first + index]);
        }
    }
}

/// Adds the rule's part to the model's, and holds the sum within a range.
fn add_rule(
    online: &OnlineHalves,
    offline: &OfflineHalves,
    (row, first): (usize, usize),
    trend: f32,
    range: [f32; 2],
    out: &mut [f32],
) {
    let online = online.rule[row];
    if trend > 0.0 {
        for (speed, offline) in out.iter_mut().zip(&offline.rule[first..]) {
            *speed += trend * rule::speed(online, *offline);
        }
    }
    for speed in out {
        *speed = speed.clamp(range[0], range[1]);
    }
}

/// Pairs of a perceptron: the first layer's halves are ready, the other layers run in blocks.
pub(crate) struct MlpPairs {
    set: InstructionSet,
    online: OnlineHalves,
    offline: OfflineHalves,
    online_first: Vec<Vec<f32>>,
    offline_first: Panels,
    middle: Vec<PackedLayer>,
    last: Vec<f32>,
    last_bias: f32,
    width: usize,
    /// One layer only: no hidden nodes to hold at zero.
    linear: bool,
    /// The weight of the rule's speed.
    trend: f32,
}

impl MlpPairs {
    pub(crate) fn new(
        model: &MlpModel,
        online: OnlineHalves,
        offline: OfflineHalves,
        set: InstructionSet,
    ) -> Self {
        let split = model.online.width();
        let empty = (Vec::new(), Vec::new(), 1);
        let (first_weights, first_biases, width) =
            model.net.layers.first().map_or(empty, |first| {
                (first.weights.clone(), first.biases.clone(), first.outputs)
            });
        let half = |row: &[f64], weights: &[f32], biases: Option<&[f32]>| {
            let mut sums = biases.map_or_else(|| vec![0.0; width], <[f32]>::to_vec);
            for (value, line) in row.iter().zip(weights.chunks_exact(width)) {
                for (sum, weight) in sums.iter_mut().zip(line) {
                    *sum += narrow(*value) * weight;
                }
            }
            sums
        };
        let (online_weights, offline_weights) = first_weights.split_at(split * width);
        let online_first = online
            .halves
            .iter()
            .map(|h| half(&model.online.encode(h), online_weights, Some(&first_biases)))
            .collect();
        let offline_first: Vec<Vec<f32>> = offline
            .halves
            .iter()
            .map(|h| half(&model.offline.encode(h), offline_weights, None))
            .collect();
        let hidden = model.net.layers.len().saturating_sub(2);
        let mut inputs = width;
        let middle = model
            .net
            .layers
            .iter()
            .skip(1)
            .take(hidden)
            .map(|layer| {
                let packed = PackedLayer::new(inputs, layer.outputs, &layer.weights, &layer.biases);
                inputs = layer.outputs;
                packed
            })
            .collect::<Vec<_>>();
        let nodes = middle.last().map_or(width, PackedLayer::outputs);
        let (mut last, last_bias) = match model.net.layers.last() {
            Some(layer) if model.net.layers.len() > 1 => (layer.weights.clone(), layer.biases[0]),
            // A single layer is linear: the halves' only output is the answer.
            _ => (vec![1.0], 0.0),
        };
        last.resize(nodes, 0.0);
        let last_bias = last_bias + narrow(model.trend[0]);
        MlpPairs {
            set,
            online,
            offline,
            online_first,
            offline_first: Panels::new(set.block(), width, &offline_first),
            middle,
            last,
            last_bias,
            width,
            linear: model.net.layers.len() < 2,
            trend: narrow(model.trend[1]),
        }
    }

    /// Floating-point operations of one pair, counting a multiply-add as two.
    pub(crate) fn flops_per_pair(model: &MlpModel) -> u64 {
        let first = model.net.layers.first().map_or(0, |layer| layer.outputs);
        let rest: usize = model.net.layers.iter().skip(1).map(|l| 2 * l.inputs * l.outputs).sum();
        (rest + 2 * first) as u64
    }
}

impl PairSpeeds for MlpPairs {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        let block = self.set.block();
        let widest =
            self.middle.iter().map(PackedLayer::outputs).max().unwrap_or(0).max(self.width);
        let size = widest * block + PAGE;
        let (mut first, mut second) = (vec![0.0; size], vec![0.0; size]);
        let panels = &self.offline_first.values[self.offline_first.start..];
        let at_first = half_a_page_from(panels, &first);
        let at_second = half_a_page_from(&first[at_first..], &second);
        let (mut values, mut next) = (&mut first[at_first..], &mut second[at_second..]);
        let floor = if self.linear { f32::NEG_INFINITY } else { 0.0 };
        let online = &self.online_first[row];
        self.offline_first.fill(first_column, out, |panel, ahead, answers| {
            join_halves(self.set, online, panel, floor, values);
            let Some((hidden, before)) = self.middle.split_last() else {
                return weighted_sum(self.set, &self.last, values, self.last_bias, answers);
            };
            for layer in before {
                layer.run(self.set, values, next);
                std::mem::swap(&mut values, &mut next);
            }
            let values = (&*values, ahead);
            hidden.run_last(self.set, &self.last, values, self.last_bias, answers);
        });
        add_rule(&self.online, &self.offline, (row, first_column), self.trend, [0.0, 1.0], out);
        rule_where_unknown(&self.online, &self.offline, row, first_column, out);
    }
}

/// Pairs of a kernel model: one dot product each.
pub(crate) struct KernelPairs {
    set: InstructionSet,
    online: OnlineHalves,
    offline: OfflineHalves,
    online_rows: Vec<(f32, Vec<f32>)>,
    /// The landmarks' rows, and what each job adds on its own as one more feature.
    offline_rows: Panels,
    trend: f32,
    range: [f32; 2],
}

impl KernelPairs {
    pub(crate) fn new(
        model: &KernelModel,
        online: OnlineHalves,
        offline: OfflineHalves,
        set: InstructionSet,
    ) -> Self {
        let online_rows = online
            .halves
            .iter()
            .map(|half| {
                let ready = model.online_half(half);
                let mut row: Vec<f32> = ready.row.into_iter().map(narrow).collect();
                row.push(1.0);
                (narrow(model.trend[0] + ready.alone), row)
            })
            .collect();
        let columns: Vec<Vec<f32>> = offline
            .halves
            .iter()
            .map(|half| {
                let ready = model.offline_half(half);
                let mut row: Vec<f32> = ready.row.into_iter().map(narrow).collect();
                row.push(narrow(ready.alone));
                row
            })
            .collect();
        KernelPairs {
            set,
            online_rows,
            offline_rows: Panels::new(set.block(), model.landmarks.len() + 1, &columns),
            trend: narrow(model.trend[1]),
            range: model.range.map(narrow),
            online,
            offline,
        }
    }
}

impl PairSpeeds for KernelPairs {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        let (start, factors) = &self.online_rows[row];
        self.offline_rows.fill(first_column, out, |panel, _, answers| {
            weighted_sum(self.set, factors, panel, *start, answers);
        });
        add_rule(&self.online, &self.offline, (row, first_column), self.trend, self.range, out);
        rule_where_unknown(&self.online, &self.offline, row, first_column, out);
    }
}

/// Pairs of trees: every tree is walked for every pair.
pub(crate) struct TreesPairs<'a> {
    pub(crate) model: &'a TreesModel,
    pub(crate) online: OnlineHalves,
    pub(crate) offline: OfflineHalves,
}

impl PairSpeeds for TreesPairs<'_> {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        let online = &self.online.halves[row];
        for (index, speed) in out.iter_mut().enumerate() {
            let column = first_column + index;
            let rule = rule::speed(self.online.rule[row], self.offline.rule[column]);
            let offline = &self.offline.halves[column];
            *speed = narrow(self.model.speed(online, offline, f64::from(rule)));
        }
        rule_where_unknown(&self.online, &self.offline, row, first_column, out);
    }
}

/// The same speed for all pairs.
pub(crate) struct ConstantPairs {
    pub(crate) speed: f32,
    pub(crate) online: OnlineHalves,
    pub(crate) offline: OfflineHalves,
}

impl PairSpeeds for ConstantPairs {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        out.fill(self.speed);
        rule_where_unknown(&self.online, &self.offline, row, first_column, out);
    }
}
