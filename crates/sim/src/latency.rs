//! Latency of a service that batches what waits: requests come at random (Poisson), the GPU takes
//! all that wait, up to a largest batch, and a batch of n takes `s·(1 + c·(n − 1))`.
//!
//! The number left waiting when a batch ends is a Markov chain; its stationary distribution gives,
//! for a request that arrives at a random moment, how long it waits and how large its batch is. All
//! times scale with s, so one table over the load λ·s serves every rate and every slowdown. Service
//! times are taken as constant: what the tail owes to chance in the GPU itself is not in here.

use std::collections::VecDeque;

use muxflow_gpu_model::Rng;

use crate::number::{float, index, mean, quantile};

/// What a table says at one load, in units of s.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct QueueAnswer {
    /// Mean time from arrival to the end of its batch.
    pub mean: f64,
    /// The 99th percentile of the same.
    pub p99: f64,
    /// Mean size of a batch.
    pub batch: f64,
    /// Whether more comes than can be served.
    pub overloaded: bool,
}

/// Answers for one service over all loads.
#[derive(Debug, Clone)]
pub struct QueueTable {
    largest_load: f64,
    points: Vec<QueueAnswer>,
}

const POINTS: usize = 96;
/// Close to capacity the queue is without bound; the table ends here.
const END: f64 = 0.97;

impl QueueTable {
    /// Solves the chain at all loads. `batch_cost` is c, `max_batch` the largest batch.
    pub fn new(batch_cost: f64, max_batch: usize) -> Self {
        let max_batch = max_batch.max(1);
        let largest = float(max_batch);
        let capacity = largest / (1.0 + batch_cost * (largest - 1.0));
        let largest_load = capacity * END;
        // Each load starts from the solution of the one before it.
        let mut chance = vec![0.0; 6 * max_batch + 60];
        chance[0] = 1.0;
        let points = (0..=POINTS)
            .map(|i| {
                let load = largest_load * float(i) / float(POINTS);
                solve(load, batch_cost, max_batch, &mut chance)
            })
            .collect();
        QueueTable { largest_load, points }
    }

    /// The answer at a load λ·s, straight between two solved ones.
    pub fn at(&self, load: f64) -> QueueAnswer {
        if load >= self.largest_load {
            // Overloaded: the queue grows while it lasts; stated as a steep, bounded penalty.
            let mut last = self.points[POINTS];
            let beyond = (load / self.largest_load).min(2.0).powi(6);
            last.mean *= beyond;
            last.p99 *= beyond;
            last.overloaded = load > self.largest_load;
            return last;
        }
        let place = (load / self.largest_load * float(POINTS)).max(0.0);
        let low = index(place).min(POINTS - 1);
        let part = place - float(low);
        let (a, b) = (self.points[low], self.points[low + 1]);
        let mix = |x: f64, y: f64| x + (y - x) * part;
        QueueAnswer {
            mean: mix(a.mean, b.mean),
            p99: mix(a.p99, b.p99),
            batch: mix(a.batch, b.batch),
            overloaded: false,
        }
    }
}

fn poisson(mean: f64, length: usize) -> Vec<f64> {
    let mut out = Vec::with_capacity(length);
    let mut p = (-mean).exp();
    for k in 0..length {
        out.push(p);
        p *= mean / (float(k) + 1.0);
        // The rest of the tail weighs nothing; the caller normalises.
        if float(k) > mean && p < 1e-13 {
            break;
        }
    }
    out
}

fn solve(load: f64, c: f64, max_batch: usize, chance: &mut [f64]) -> QueueAnswer {
    if load <= 0.0 {
        return QueueAnswer { mean: 1.0, p99: 1.0, batch: 1.0, overloaded: false };
    }
    let states = chance.len();
    let time = |n: usize| 1.0 + c * (float(n) - 1.0);
    let arrivals: Vec<Vec<f64>> =
        (0..=max_batch).map(|n| poisson(load * time(n.max(1)), states)).collect();
    // What a batch that starts with k waiting takes, and what it leaves.
    let takes = |k: usize| k.clamp(1, max_batch);
    let leaves = |k: usize| k.saturating_sub(max_batch);
    for _ in 0..1500 {
        let mut next = vec![0.0; states];
        for (k, p) in chance.iter().enumerate().filter(|(_, p)| **p > 1e-14) {
            let (n, rest) = (takes(k), leaves(k));
            for (more, q) in arrivals[n].iter().enumerate() {
                next[(rest + more).min(states - 1)] += p * q;
            }
        }
        let total: f64 = next.iter().sum();
        let mut change = 0.0;
        for (old, new) in chance.iter_mut().zip(&next) {
            change += (*old - new / total).abs();
            *old = new / total;
        }
        if change < 1e-7 {
            break;
        }
    }
    tagged(load, chance, time, takes, leaves, max_batch)
}

/// The latency of a request that arrives at a random moment: within a batch of some state, or while
/// the GPU is idle.
fn tagged(
    load: f64,
    chance: &[f64],
    time: impl Fn(usize) -> f64,
    takes: impl Fn(usize) -> usize,
    leaves: impl Fn(usize) -> usize,
    max_batch: usize,
) -> QueueAnswer {
    let idle = chance[0] / load;
    let busy: f64 = chance.iter().enumerate().map(|(k, p)| p * time(takes(k))).sum();
    let largest = float(max_batch);
    let mut latencies: Vec<(f64, f64)> = vec![(1.0, idle / (idle + busy))];
    let slices = 12;
    for (k, p) in chance.iter().enumerate().filter(|(_, p)| **p > 1e-9) {
        let (d, rest) = (time(takes(k)), leaves(k));
        for slice in 0..slices {
            let u = d * (float(slice) + 0.5) / float(slices);
            let weight = p * d / float(slices) / (idle + busy);
            for (before, q) in poisson(load * u, 40).into_iter().enumerate() {
                if q < 1e-6 {
                    continue;
                }
                let ahead = rest + before;
                let full = ahead / max_batch;
                // Its own batch: those ahead of it that are left, itself, and who comes until then.
                let wait = (d - u) + float(full) * time(max_batch);
                let own = (float(ahead % max_batch) + 1.0 + load * wait).min(largest);
                let service = 1.0 + (time(2) - 1.0) * (own - 1.0);
                latencies.push((wait + service, weight * q));
            }
        }
    }
    latencies.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = latencies.iter().map(|l| l.1).sum();
    let mean = latencies.iter().map(|l| l.0 * l.1).sum::<f64>() / total;
    let mut seen = 0.0;
    let p99 = latencies
        .iter()
        .find(|l| {
            seen += l.1;
            seen >= 0.99 * total
        })
        .map_or(mean, |l| l.0);
    let batch = chance.iter().enumerate().map(|(k, p)| p * float(takes(k))).sum();
    QueueAnswer { mean, p99, batch, overloaded: false }
}

/// The same service, request by request: what the table is checked against.
pub fn exact(
    load: f64,
    batch_cost: f64,
    max_batch: usize,
    requests: usize,
    seed: u64,
) -> QueueAnswer {
    let mut rng = Rng::new(seed);
    let mut arrival = 0.0;
    let mut waiting: VecDeque<f64> = VecDeque::new();
    let mut now = 0.0;
    let mut latencies = Vec::with_capacity(requests);
    let mut batches = Vec::new();
    let mut next = rng.exponential(1.0 / load);
    while latencies.len() < requests {
        if waiting.is_empty() {
            arrival += next;
            next = rng.exponential(1.0 / load);
            now = f64::max(now, arrival);
            waiting.push_back(arrival);
        }
        while arrival + next <= now {
            arrival += next;
            next = rng.exponential(1.0 / load);
            waiting.push_back(arrival);
        }
        let n = waiting.len().min(max_batch.max(1));
        now += 1.0 + batch_cost * (float(n) - 1.0);
        batches.push(float(n));
        for came in waiting.drain(..n) {
            latencies.push(now - came);
        }
    }
    let mean_latency = mean(&latencies);
    latencies.sort_by(f64::total_cmp);
    QueueAnswer {
        mean: mean_latency,
        p99: quantile(&latencies, 0.99),
        batch: mean(&batches),
        overloaded: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_agrees_with_request_by_request() {
        for (c, b) in [(0.3, 8), (0.7, 4), (0.0, 16), (1.0, 1), (0.45, 8)] {
            let table = QueueTable::new(c, b);
            let capacity = float(b) / (1.0 + c * (float(b) - 1.0));
            for share in [0.1, 0.3, 0.5, 0.7, 0.85] {
                let load = capacity * share;
                let said = table.at(load);
                let seen = exact(load, c, b, 300_000, 7);
                let what = format!("c {c} batch {b} load {share}: {said:?} {seen:?}");
                assert!((said.mean / seen.mean - 1.0).abs() < 0.05, "{what}");
                assert!((said.p99 / seen.p99 - 1.0).abs() < 0.10, "{what}");
                assert!((said.batch / seen.batch - 1.0).abs() < 0.05, "{what}");
            }
        }
    }

    #[test]
    fn beyond_capacity_is_said() {
        let t = QueueTable::new(1.0, 1);
        assert!(t.at(1.2).overloaded);
        assert!(t.at(1.2).mean > t.at(0.9).mean);
        assert_eq!(t.at(0.0).mean, 1.0);
    }
}
