//! Boosted regression trees that split on values and send what is missing to the better side.

use crate::random::Rng;

/// How to grow them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TreesOptions {
    /// How many trees.
    pub rounds: usize,
    /// Levels of a tree.
    pub depth: usize,
    /// What is kept of each tree.
    pub learning_rate: f64,
    /// Share of the samples that each tree sees.
    pub subsample: f64,
    /// Samples in a leaf at least.
    pub min_leaf: usize,
    /// Of the choice of samples.
    pub seed: u64,
}

impl Default for TreesOptions {
    fn default() -> Self {
        TreesOptions {
            rounds: 200,
            depth: 4,
            learning_rate: 0.05,
            subsample: 0.7,
            min_leaf: 3,
            seed: 1,
        }
    }
}

/// A place in a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Node {
    /// The feature to look at; a leaf has none.
    pub feature: Option<u32>,
    /// Up to this value, go left.
    pub threshold: f64,
    /// Where a missing value goes.
    pub missing_left: bool,
    /// The left child; the right one is next to it.
    pub left: u32,
    /// The answer of a leaf.
    pub value: f64,
}

/// A sum of trees over a base.
#[derive(Debug, Clone, PartialEq)]
pub struct Trees {
    /// Numbers in a row.
    pub width: usize,
    /// The answer before the first tree.
    pub base: f64,
    /// The trees, each a list of nodes with the root first.
    pub trees: Vec<Vec<Node>>,
}

const BINS: usize = 64;
const MISSING: u8 = u8::MAX;

/// The features of all rows as bin numbers, one column after the other.
struct Binned {
    rows: usize,
    bins: Vec<u8>,
    cuts: Vec<Vec<f64>>,
}

impl Binned {
    fn new(rows: &[Vec<f64>], width: usize) -> Self {
        let mut bins = vec![MISSING; rows.len() * width];
        let mut cuts = Vec::with_capacity(width);
        for feature in 0..width {
            let mut values: Vec<f64> =
                rows.iter().map(|row| row[feature]).filter(|v| !v.is_nan()).collect();
            values.sort_unstable_by(f64::total_cmp);
            let quantiles: Vec<f64> = if values.is_empty() {
                Vec::new()
            } else {
                (0..=BINS).map(|q| values[q * (values.len() - 1) / BINS]).collect()
            };
            values.dedup();
            let distinct = if values.len() <= BINS { values } else { quantiles };
            let mut cut: Vec<f64> =
                distinct.windows(2).map(|pair| f64::midpoint(pair[0], pair[1])).collect();
            cut.dedup();
            for (row, values) in rows.iter().enumerate() {
                let value = values[feature];
                if !value.is_nan() {
                    let bin = cut.partition_point(|&c| c < value);
                    bins[feature * rows.len() + row] = u8::try_from(bin).unwrap_or(MISSING - 1);
                }
            }
            cuts.push(cut);
        }
        Binned { rows: rows.len(), bins, cuts }
    }

    fn column(&self, feature: usize) -> &[u8] {
        &self.bins[feature * self.rows..(feature + 1) * self.rows]
    }
}

#[derive(Clone, Copy)]
struct Split {
    gain: f64,
    feature: usize,
    bin: usize,
    missing_left: bool,
}

impl Trees {
    /// Grows them on rows in which NaN is missing. The same seed gives the same trees.
    pub fn fit(rows: &[Vec<f64>], targets: &[f64], options: &TreesOptions) -> Self {
        let width = rows.first().map_or(0, Vec::len);
        let binned = Binned::new(rows, width);
        let mut rng = Rng::new(options.seed);
        let mut trees = Vec::with_capacity(options.rounds);
        let mut rest = targets.to_vec();
        for _ in 0..options.rounds {
            let mut chosen: Vec<usize> =
                (0..rows.len()).filter(|_| rng.unit() < options.subsample).collect();
            if chosen.len() < 2 * options.min_leaf {
                chosen = (0..rows.len()).collect();
            }
            let tree = grow(&binned, &rest, chosen, options);
            for (target, row) in rest.iter_mut().zip(rows) {
                *target -= walk(&tree, row);
            }
            trees.push(tree);
        }
        Trees { width, base: 0.0, trees }
    }

    /// The answer for one row.
    pub fn predict(&self, row: &[f64]) -> f64 {
        self.base + self.trees.iter().map(|tree| walk(tree, row)).sum::<f64>()
    }
}

fn walk(tree: &[Node], row: &[f64]) -> f64 {
    let mut node = &tree[0];
    while let Some(feature) = node.feature {
        let value = row[feature as usize];
        let left = if value.is_nan() { node.missing_left } else { value <= node.threshold };
        node = &tree[node.left as usize + usize::from(!left)];
    }
    node.value
}

fn grow(data: &Binned, rest: &[f64], chosen: Vec<usize>, options: &TreesOptions) -> Vec<Node> {
    let leaf = |rows: &[usize]| {
        #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
        let count = rows.len() as f64;
        let sum: f64 = rows.iter().map(|&row| rest[row]).sum();
        Node {
            feature: None,
            threshold: 0.0,
            missing_left: false,
            left: 0,
            value: options.learning_rate * sum / (count + 1.0),
        }
    };
    let mut nodes = vec![leaf(&chosen)];
    let mut open = vec![(0usize, chosen, 0usize)];
    while let Some((at, rows, level)) = open.pop() {
        if level >= options.depth {
            continue;
        }
        let Some(split) = best_split(data, rest, &rows, options.min_leaf) else { continue };
        let column = data.column(split.feature);
        let (left, right): (Vec<usize>, Vec<usize>) = rows.iter().partition(|&&row| {
            let bin = column[row];
            if bin == MISSING { split.missing_left } else { usize::from(bin) <= split.bin }
        });
        let child = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        nodes[at].feature = u32::try_from(split.feature).ok();
        // A split that only parts known from missing has no cut: every known value goes left.
        nodes[at].threshold =
            data.cuts[split.feature].get(split.bin).copied().unwrap_or(f64::INFINITY);
        nodes[at].missing_left = split.missing_left;
        nodes[at].left = child;
        for part in [left, right] {
            nodes.push(leaf(&part));
            open.push((nodes.len() - 1, part, level + 1));
        }
    }
    nodes
}

fn best_split(data: &Binned, rest: &[f64], rows: &[usize], min_leaf: usize) -> Option<Split> {
    let total: f64 = rows.iter().map(|&row| rest[row]).sum();
    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    let score = |sum: f64, count: usize| sum * sum / (count as f64 + 1.0);
    let base = score(total, rows.len());
    let mut best: Option<Split> = None;
    for feature in 0..data.cuts.len() {
        let mut sums = [0.0f64; 256];
        let mut counts = [0usize; 256];
        let column = data.column(feature);
        for &row in rows {
            let bin = usize::from(column[row]);
            sums[bin] += rest[row];
            counts[bin] += 1;
        }
        let missing = (sums[usize::from(MISSING)], counts[usize::from(MISSING)]);
        let bins = data.cuts[feature].len() + usize::from(missing.1 > 0);
        let (mut sum, mut count) = (0.0, 0);
        for bin in 0..bins {
            sum += sums[bin];
            count += counts[bin];
            for missing_left in [false, true] {
                if missing_left && missing.1 == 0 {
                    continue;
                }
                let left =
                    if missing_left { (sum + missing.0, count + missing.1) } else { (sum, count) };
                let right = (total - left.0, rows.len() - left.1);
                if left.1 < min_leaf || right.1 < min_leaf {
                    continue;
                }
                let gain = score(left.0, left.1) + score(right.0, right.1) - base;
                if gain > best.map_or(1e-12, |b| b.gain) {
                    best = Some(Split { gain, feature, bin, missing_left });
                }
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(seed: u64) -> (Vec<Vec<f64>>, Vec<f64>) {
        let mut rng = Rng::new(seed);
        let rows: Vec<Vec<f64>> =
            (0..500).map(|_| vec![rng.unit(), rng.unit(), rng.unit()]).collect();
        let targets =
            rows.iter().map(|r| f64::from(u8::from(r[0] > 0.5)) * 0.6 + 0.3 * r[1]).collect();
        (rows, targets)
    }

    fn error(trees: &Trees, rows: &[Vec<f64>], targets: &[f64]) -> f64 {
        rows.iter().zip(targets).map(|(r, t)| (trees.predict(r) - t).abs()).sum::<f64>() / 500.0
    }

    #[test]
    fn trees_learn_steps_and_slopes_and_repeat_by_seed() {
        let (rows, targets) = data(1);
        let trees = Trees::fit(&rows, &targets, &TreesOptions::default());
        let (fresh_rows, fresh_targets) = data(2);
        assert!(error(&trees, &fresh_rows, &fresh_targets) < 0.03);
        assert_eq!(trees, Trees::fit(&rows, &targets, &TreesOptions::default()));
        let other = TreesOptions { seed: 2, ..TreesOptions::default() };
        assert_ne!(trees, Trees::fit(&rows, &targets, &other));
    }

    #[test]
    fn what_is_missing_is_a_value_of_its_own() {
        let (mut rows, mut targets) = data(3);
        for (index, (row, target)) in rows.iter_mut().zip(&mut targets).enumerate() {
            if index % 3 == 0 {
                row[2] = f64::NAN;
                *target += 1.0;
            }
        }
        let trees = Trees::fit(&rows, &targets, &TreesOptions::default());
        assert!(error(&trees, &rows, &targets) < 0.05);
        let gap = trees.predict(&[0.2, 0.5, f64::NAN]) - trees.predict(&[0.2, 0.5, 0.5]);
        assert!((gap - 1.0).abs() < 0.1, "{gap}");
    }
}
