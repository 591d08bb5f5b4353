//! Can pairs be ruled out without being predicted? An upper bound of the speed of one GPU with a
//! whole group of similar jobs, by interval arithmetic through the network, tried and measured.
//!
//! What it gave is in `docs/benchmarks.md`; the scheduler does not use it.

use muxflow_types::{OfflineInput, OnlineInput, SpeedPredictor};

use crate::feature::Half;
use crate::model::{MlpModel, Model};
use crate::pairs::narrow;
use crate::rule::{self, OfflineHalf, OnlineHalf};
use crate::trained::TrainedModel;

/// What a bound would have saved.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Share of pairs whose bound is below the speeds of their GPU's best jobs.
    pub below_best: f64,
    /// Share of pairs whose bound is below a fixed floor.
    pub below_floor: f64,
    /// Bounds computed for each pair ruled out by the best jobs; each costs two network runs.
    pub bounds_per_saved: f64,
}

/// Similar jobs with the hull of their inputs.
struct Group {
    members: Vec<usize>,
    low: Vec<f32>,
    high: Vec<f32>,
    rule: OfflineHalf,
}

/// Jobs sorted by their program and SM time, cut into equal groups.
fn group(model: &MlpModel, offline: &[OfflineInput], count: usize) -> Vec<Group> {
    let rows: Vec<Vec<f32>> = offline
        .iter()
        .map(|job| {
            let row = model.offline.encode(&Half::new(&job.profile, None));
            row.into_iter().map(narrow).collect()
        })
        .collect();
    let mut order: Vec<usize> = (0..offline.len()).collect();
    order.sort_by(|&a, &b| {
        let key = |i: usize| (&offline[i].profile.workload, offline[i].profile.solo_time);
        key(a).cmp(&key(b)).then_with(|| {
            rows[a]
                .iter()
                .zip(&rows[b])
                .map(|(x, y)| x.total_cmp(y))
                .find(|o| o.is_ne())
                .unwrap_or(a.cmp(&b))
        })
    });
    order
        .chunks(offline.len().div_ceil(count.max(1)).max(1))
        .map(|members| {
            let hull = |pick: fn(f32, f32) -> f32| {
                let mut hull = rows[members[0]].clone();
                for &member in members {
                    for (bound, value) in hull.iter_mut().zip(&rows[member]) {
                        *bound = pick(*bound, *value);
                    }
                }
                hull
            };
            // The rule is fastest for the least SM time and the least memory time.
            let mut rule = OfflineHalf::new(&offline[members[0]].profile);
            for &member in members {
                let other = OfflineHalf::new(&offline[member].profile);
                rule.sm_time = rule.sm_time.min(other.sm_time);
                rule.memory_time = rule.memory_time.min(other.memory_time);
            }
            Group { members: members.to_vec(), low: hull(f32::min), high: hull(f32::max), rule }
        })
        .collect()
}

/// The largest output of the network over a box of inputs, or more.
fn upper(model: &MlpModel, mut low: Vec<f32>, mut high: Vec<f32>) -> f32 {
    let last = model.net.layers.len().saturating_sub(1);
    for (number, layer) in model.net.layers.iter().enumerate() {
        let (mut next_low, mut next_high) = (layer.biases.clone(), layer.biases.clone());
        for (input, weights) in layer.weights.chunks_exact(layer.outputs).enumerate() {
            for (output, weight) in weights.iter().enumerate() {
                let (a, b) = (weight * low[input], weight * high[input]);
                next_low[output] += a.min(b);
                next_high[output] += a.max(b);
            }
        }
        if number < last {
            for value in next_low.iter_mut().chain(&mut next_high) {
                *value = value.max(0.0);
            }
        }
        (low, high) = (next_low, next_high);
    }
    high.first().copied().unwrap_or(1.0)
}

/// Tries the bound: `best` is how many jobs of each GPU must be known exactly, `floor` a speed below
/// which a pair is not worth planning. `None` for a model that is not a perceptron.
pub fn try_bound(
    trained: &TrainedModel,
    online: &[OnlineInput],
    offline: &[OfflineInput],
    groups: usize,
    best: usize,
    floor: f32,
) -> Option<Outcome> {
    let Model::Mlp(model) = &trained.model else { return None };
    let groups = group(model, offline, groups);
    let pairs = trained.prepare(online, offline);
    let (mut below_best, mut below_floor, mut bounds) = (0usize, 0usize, 0usize);
    let mut speeds = vec![0.0; offline.len()];
    for (row, input) in online.iter().enumerate() {
        pairs.fill(row, 0, &mut speeds);
        let mut sorted = speeds.clone();
        sorted.sort_unstable_by(|a, b| b.total_cmp(a));
        let threshold = sorted.get(best.min(sorted.len()).saturating_sub(1)).copied()?;
        let share = input.share.percent();
        let half = model.online.encode(&Half::new(&input.profile, Some(share)));
        let half: Vec<f32> = half.into_iter().map(narrow).collect();
        let rule_half = OnlineHalf::new(&input.profile, narrow(share.fraction()));
        for group in &groups {
            bounds += 1;
            let with = |side: &[f32]| [half.as_slice(), side].concat();
            let rule = narrow(model.trend[1]) * rule::speed(rule_half, group.rule);
            let bound =
                upper(model, with(&group.low), with(&group.high)) + narrow(model.trend[0]) + rule;
            for &member in &group.members {
                debug_assert!(speeds[member] <= bound.clamp(0.0, 1.0) + 1e-4);
                below_best += usize::from(bound < threshold);
                below_floor += usize::from(bound < floor);
            }
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "counts of pairs")]
    let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
    let all = online.len() * offline.len();
    Some(Outcome {
        below_best: share(below_best, all),
        below_floor: share(below_floor, all),
        bounds_per_saved: share(bounds, below_best),
    })
}
