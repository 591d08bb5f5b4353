//! The kernel model: the analytic rule, per-workload and per-family offsets of both sides, a smooth
//! function of each side's solo features, and their product, all learned at once.
//!
//! Its strength is the workload that nobody has seen. A network must squeeze such a workload
//! through weights tuned to others; here its unknown offsets are simply zero, what is known of the
//! other side stays, and the smooth part fills in as far as its features reach. It is a Gaussian
//! process whose kernel is a sum over sides of (same workload + same family + near in features),
//! plus a product over sides of the same, fitted by one Cholesky factorisation: no epochs, no seed.
//!
//! The product kernel of the offline side is held to [`RANK`] landmarks, so that a prediction for
//! one pair is one dot product of that length between a row that depends on the online half and a
//! row that depends on the offline half.

use std::collections::BTreeMap;

use crate::error::PredictorError;
use crate::feature::{Half, SideEncoder, halves};
use crate::linear::{Square, dot};
use crate::random::Rng;
use crate::rule::rule_speed;
use crate::sample::Dataset;

/// Length of the dot product of one prediction.
pub const RANK: usize = 64;
/// The factorisation is cubic in the samples; more than this many are thinned out by a fixed seed.
pub const MAX_SAMPLES: usize = 3_000;

/// Weights of the kernel's parts, as shares of the variance of what is to be explained.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// One side: same workload.
    pub workload: f64,
    /// One side: same family.
    pub family: f64,
    /// One side: same family and near.
    pub family_near: f64,
    /// One side: near.
    pub near: f64,
    /// The product of both sides.
    pub product: f64,
    /// In the product: same workload, same family, near.
    pub product_parts: [f64; 3],
    /// What no feature explains.
    pub noise: f64,
    /// How far "near" reaches, in standard deviations.
    pub reach: f64,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            workload: 0.1,
            family: 0.3,
            family_near: 0.3,
            near: 0.6,
            product: 0.9,
            product_parts: [0.15, 0.5, 0.4],
            noise: 0.1,
            reach: 1.0,
        }
    }
}

/// A half of a training pair, or of a pair to predict.
#[derive(Debug, Clone, PartialEq)]
pub struct Anchor {
    /// Its encoded features.
    pub row: Vec<f64>,
    /// Its number among the known workloads; unknown ones have none.
    pub workload: Option<u32>,
    /// Its number among the known families.
    pub family: Option<u32>,
}

/// One side of the kernel.
#[derive(Debug, Clone, PartialEq)]
pub struct Side {
    /// From a half to numbers.
    pub encoder: SideEncoder,
    /// Known workloads.
    pub workloads: Vec<String>,
    /// Known families.
    pub families: Vec<String>,
    /// The different halves of the training data.
    pub anchors: Vec<Anchor>,
    /// What each adds on its own.
    pub weights: Vec<f64>,
}

impl Side {
    fn fit(halves: &[Half]) -> (Self, Vec<usize>) {
        let encoder = SideEncoder::fit(halves).without_batch();
        let mut workloads: Vec<String> =
            halves.iter().map(|h| h.workload.as_str().to_owned()).collect();
        workloads.sort_unstable();
        workloads.dedup();
        let mut families: Vec<String> = halves.iter().map(|h| h.family().to_owned()).collect();
        families.sort_unstable();
        families.dedup();
        let mut side =
            Side { encoder, workloads, families, anchors: Vec::new(), weights: Vec::new() };
        let mut seen: BTreeMap<(Option<u32>, Vec<u64>), usize> = BTreeMap::new();
        let places = halves
            .iter()
            .map(|half| {
                let anchor = side.locate(half);
                let key = (anchor.workload, anchor.row.iter().map(|v| v.to_bits()).collect());
                *seen.entry(key).or_insert_with(|| {
                    side.anchors.push(anchor);
                    side.anchors.len() - 1
                })
            })
            .collect();
        (side, places)
    }

    /// A half in the terms of this side.
    pub fn locate(&self, half: &Half) -> Anchor {
        let find = |names: &[String], name: &str| {
            names.binary_search_by(|known| known.as_str().cmp(name)).ok().map(number)
        };
        Anchor {
            row: self.encoder.encode_numeric(half),
            workload: find(&self.workloads, half.workload.as_str()),
            family: find(&self.families, half.family()),
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an index among the samples")]
fn number(index: usize) -> u32 {
    index as u32
}

impl Shape {
    /// Same workload, same family, nearness.
    fn parts(&self, a: &Anchor, b: &Anchor) -> (f64, f64, f64) {
        let known = |x: Option<u32>, y: Option<u32>| f64::from(u8::from(x.is_some() && x == y));
        let near = if a.row.is_empty() {
            1.0
        } else {
            #[expect(clippy::cast_precision_loss, reason = "a count of features")]
            let width = a.row.len() as f64;
            let distance: f64 = a.row.iter().zip(&b.row).map(|(x, y)| (x - y).powi(2)).sum();
            (-distance / (2.0 * self.reach * self.reach * width)).exp()
        };
        (known(a.workload, b.workload), known(a.family, b.family), near)
    }

    fn alone(&self, a: &Anchor, b: &Anchor) -> f64 {
        let (workload, family, near) = self.parts(a, b);
        self.workload * workload
            + self.family * family
            + self.family_near * family * near
            + self.near * near
    }

    fn in_product(&self, a: &Anchor, b: &Anchor) -> f64 {
        let (workload, family, near) = self.parts(a, b);
        let [p_workload, p_family, p_near] = self.product_parts;
        p_workload * workload + p_family * family + p_near * near
    }
}

/// A fitted kernel model.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelModel {
    /// The kernel's weights.
    pub shape: Shape,
    /// The online side.
    pub online: Side,
    /// The offline side.
    pub offline: Side,
    /// Places of the landmarks among the offline anchors.
    pub landmarks: Vec<usize>,
    /// One row of [`KernelModel::landmarks`] weights for each online anchor.
    pub product: Vec<f64>,
    /// The constant, and the weight of the rule's speed.
    pub trend: [f64; 2],
    /// Speeds outside were not seen and are not predicted.
    pub range: [f64; 2],
}

/// What a prediction needs of one half: see [`KernelModel::online_half`].
#[derive(Debug, Clone)]
pub struct Prepared {
    /// What the half adds on its own.
    pub alone: f64,
    /// Its row of the dot product.
    pub row: Vec<f64>,
}

impl KernelModel {
    /// Fits it; deterministic.
    pub fn fit(data: &Dataset, shape: Shape) -> Result<Self, PredictorError> {
        let thinned;
        let data = if data.samples.len() > MAX_SAMPLES {
            let mut order: Vec<usize> = (0..data.samples.len()).collect();
            Rng::new(0).shuffle(&mut order);
            order.truncate(MAX_SAMPLES);
            order.sort_unstable();
            thinned = data.subset(&order);
            &thinned
        } else {
            data
        };
        let (online_halves, offline_halves) = halves(data);
        let (mut online, online_at) = Side::fit(&online_halves);
        let (mut offline, offline_at) = Side::fit(&offline_halves);
        let rule: Vec<f64> =
            data.samples.iter().map(|s| rule_speed(&s.online, s.share, &s.offline)).collect();
        let speeds: Vec<f64> = data.samples.iter().map(|s| s.speed).collect();
        let trend = fit_line(&rule, &speeds);
        let rest: Vec<f64> =
            speeds.iter().zip(&rule).map(|(y, r)| y - trend[0] - trend[1] * r).collect();
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let variance = (dot(&rest, &rest) / rest.len() as f64).max(1e-6);

        let landmarks = landmarks(&shape, &offline.anchors);
        let (factor, features) = landmark_features(&shape, &offline.anchors, &landmarks)?;
        let mut gram = Square::zeros(data.samples.len());
        fill_gram(&mut gram, &shape, (&online, &online_at), (&offline, &offline_at), &features);
        let failed = || PredictorError::Diverged { model: "kernel", place: "the factor".into() };
        if !gram.factor() {
            return Err(failed());
        }
        let mut alpha = rest;
        gram.solve(&mut alpha);
        if !alpha.iter().all(|a| a.is_finite()) {
            return Err(failed());
        }

        let rank = landmarks.len();
        online.weights = vec![0.0; online.anchors.len()];
        offline.weights = vec![0.0; offline.anchors.len()];
        let mut product = vec![0.0; online.anchors.len() * rank];
        for ((&on, &off), a) in online_at.iter().zip(&offline_at).zip(&alpha) {
            online.weights[on] += a;
            offline.weights[off] += a;
            let row = &mut product[on * rank..(on + 1) * rank];
            for (target, z) in row.iter_mut().zip(&features[off]) {
                *target += shape.product * a * z;
            }
        }
        for row in product.chunks_exact_mut(rank) {
            factor.solve_upper(row);
        }
        let low = speeds.iter().copied().fold(1.0, f64::min);
        let spread = variance.sqrt();
        let range = [(low - spread).max(0.0), 1.0];
        Ok(KernelModel { shape, online, offline, landmarks, product, trend, range })
    }

    /// All that predictions with this online half share.
    pub fn online_half(&self, half: &Half) -> Prepared {
        let anchor = self.online.locate(half);
        let rank = self.landmarks.len();
        let mut row = vec![0.0; rank];
        let mut alone = 0.0;
        for (index, (known, weight)) in
            self.online.anchors.iter().zip(&self.online.weights).enumerate()
        {
            alone += weight * self.shape.alone(&anchor, known);
            let near = self.shape.in_product(&anchor, known);
            if near > 1e-9 {
                for (target, w) in row.iter_mut().zip(&self.product[index * rank..]) {
                    *target += near * w;
                }
            }
        }
        Prepared { alone, row }
    }

    /// All that predictions with this offline half share.
    pub fn offline_half(&self, half: &Half) -> Prepared {
        let anchor = self.offline.locate(half);
        let alone = self
            .offline
            .anchors
            .iter()
            .zip(&self.offline.weights)
            .map(|(known, weight)| weight * self.shape.alone(&anchor, known))
            .sum();
        let row = self
            .landmarks
            .iter()
            .map(|&at| self.shape.in_product(&anchor, &self.offline.anchors[at]))
            .collect();
        Prepared { alone, row }
    }

    /// One speed from two halves and the rule's speed for the pair.
    pub fn combine(&self, online: &Prepared, offline: &Prepared, rule: f64) -> f64 {
        let sum = self.trend[0]
            + self.trend[1] * rule
            + online.alone
            + offline.alone
            + dot(&online.row, &offline.row);
        sum.clamp(self.range[0], self.range[1])
    }
}

/// The least-squares line through the rule's speeds, never falling: the rule may be deaf, it is not
/// reversed.
pub(crate) fn fit_line(x: &[f64], y: &[f64]) -> [f64; 2] {
    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    let count = x.len() as f64;
    let (mean_x, mean_y) = (x.iter().sum::<f64>() / count, y.iter().sum::<f64>() / count);
    let spread: f64 = x.iter().map(|v| (v - mean_x).powi(2)).sum();
    let joint: f64 = x.iter().zip(y).map(|(a, b)| (a - mean_x) * (b - mean_y)).sum();
    let slope = if spread > 1e-9 { (joint / spread).clamp(0.0, 2.0) } else { 0.0 };
    [mean_y - slope * mean_x, slope]
}

/// The anchors that between them say most about the others (pivoted Cholesky).
fn landmarks(shape: &Shape, anchors: &[Anchor]) -> Vec<usize> {
    let mut left: Vec<f64> = anchors.iter().map(|a| shape.in_product(a, a)).collect();
    let mut columns: Vec<Vec<f64>> = Vec::new();
    let mut chosen = Vec::new();
    while chosen.len() < RANK.min(anchors.len()) {
        let Some((pivot, &size)) = left.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)) else {
            break;
        };
        if size < 1e-6 {
            break;
        }
        let root = size.sqrt();
        let column: Vec<f64> = anchors
            .iter()
            .enumerate()
            .map(|(index, anchor)| {
                let known: f64 = columns.iter().map(|c| c[index] * c[pivot]).sum();
                (shape.in_product(anchor, &anchors[pivot]) - known) / root
            })
            .collect();
        for (rest, value) in left.iter_mut().zip(&column) {
            *rest -= value * value;
        }
        left[pivot] = 0.0;
        columns.push(column);
        chosen.push(pivot);
    }
    chosen
}

/// The factor of the landmarks' own kernel, and each anchor in terms of the landmarks.
fn landmark_features(
    shape: &Shape,
    anchors: &[Anchor],
    landmarks: &[usize],
) -> Result<(Square, Vec<Vec<f64>>), PredictorError> {
    let mut factor = Square::zeros(landmarks.len());
    for (row, &a) in landmarks.iter().enumerate() {
        for (column, &b) in landmarks.iter().enumerate() {
            factor.row_mut(row)[column] = shape.in_product(&anchors[a], &anchors[b]);
        }
        factor.row_mut(row)[row] += 1e-6;
    }
    if !factor.factor() {
        return Err(PredictorError::Diverged { model: "kernel", place: "the landmarks".into() });
    }
    let features = anchors
        .iter()
        .map(|anchor| {
            let mut row: Vec<f64> =
                landmarks.iter().map(|&l| shape.in_product(anchor, &anchors[l])).collect();
            factor.solve_lower(&mut row);
            row
        })
        .collect();
    Ok((factor, features))
}

/// The kernel between all samples, lower half, with the noise on the diagonal.
fn fill_gram(
    gram: &mut Square,
    shape: &Shape,
    (online, online_at): (&Side, &[usize]),
    (offline, offline_at): (&Side, &[usize]),
    features: &[Vec<f64>],
) {
    let table = |anchors: &[Anchor], value: &dyn Fn(&Anchor, &Anchor) -> f64| {
        let mut table = Square::zeros(anchors.len());
        for (i, a) in anchors.iter().enumerate() {
            for (j, b) in anchors[..=i].iter().enumerate() {
                let k = value(a, b);
                table.row_mut(i)[j] = k;
                table.row_mut(j)[i] = k;
            }
        }
        table
    };
    let online_alone = table(&online.anchors, &|a, b| shape.alone(a, b));
    let online_product = table(&online.anchors, &|a, b| shape.in_product(a, b));
    let offline_alone = table(&offline.anchors, &|a, b| shape.alone(a, b));
    let mut offline_product = Square::zeros(features.len());
    for (i, a) in features.iter().enumerate() {
        for (j, b) in features[..=i].iter().enumerate() {
            let k = dot(a, b);
            offline_product.row_mut(i)[j] = k;
            offline_product.row_mut(j)[i] = k;
        }
    }
    for (n, (&on, &off)) in online_at.iter().zip(offline_at).enumerate() {
        let (on_alone, on_product) = (online_alone.row(on), online_product.row(on));
        let (off_alone, off_product) = (offline_alone.row(off), offline_product.row(off));
        let row = gram.row_mut(n);
        for (m, (&on2, &off2)) in online_at.iter().zip(offline_at).take(n + 1).enumerate() {
            row[m] = on_alone[on2]
                + off_alone[off2]
                + shape.product * on_product[on2] * off_product[off2];
        }
        row[n] += shape.noise;
    }
}
