//! Latencies in buckets, kept in windows, so that percentiles speak of the last seconds only.
//!
//! Buckets grow by 5 %, so a percentile is at most 5 % too high; a window costs three kilobytes.

use muxflow_types::Micros;

const BUCKETS: usize = 340;
const SMALLEST_US: f64 = 10.0;
const GROWTH: f64 = 1.05;

/// Counts of latencies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: vec![0; BUCKETS], total: 0 }
    }
}

fn bucket(latency: Micros) -> usize {
    #[expect(clippy::cast_precision_loss, reason = "a latency needs no 53 bits")]
    let us = (latency.0 as f64).max(SMALLEST_US);
    let steps = ((us / SMALLEST_US).ln() / GROWTH.ln()).ceil();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and held below"
    )]
    let index = steps as usize;
    index.min(BUCKETS - 1)
}

impl Histogram {
    /// One more.
    pub fn add(&mut self, latency: Micros) {
        self.counts[bucket(latency)] += 1;
        self.total += 1;
    }

    /// All of another.
    pub fn merge(&mut self, other: &Histogram) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
    }

    /// How many.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The latency that `quantile` of all do not exceed, at most 5 % too high; none of none.
    pub fn quantile(&self, quantile: f64) -> Option<Micros> {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "counts of requests"
        )]
        let rank = ((self.total as f64 * quantile.clamp(0.0, 1.0)).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        let exponent = i32::try_from(found).unwrap_or(i32::MAX);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at most an hour in microseconds"
        )]
        Some(Micros((SMALLEST_US * GROWTH.powi(exponent)) as u64))
    }

    fn clear(&mut self) {
        self.counts.fill(0);
        self.total = 0;
    }
}

/// The last seconds, in slices that are thrown away one by one, and everything since the start.
#[derive(Debug, Clone)]
pub struct LatencyWindow {
    slice: Micros,
    slices: Vec<(u64, Histogram)>,
    ever: Histogram,
}

impl LatencyWindow {
    /// Looks back `slices` × `slice`.
    pub fn new(slice: Micros, slices: usize) -> Self {
        let slice = Micros(slice.0.max(1));
        let slices = vec![(u64::MAX, Histogram::default()); slices.max(1)];
        LatencyWindow { slice, slices, ever: Histogram::default() }
    }

    /// How far back it looks.
    pub fn length(&self) -> Micros {
        Micros(self.slice.0.saturating_mul(self.slices.len() as u64))
    }

    /// A request ended now.
    pub fn add(&mut self, now: Micros, latency: Micros) {
        let number = now.0 / self.slice.0;
        #[expect(clippy::cast_possible_truncation, reason = "a remainder of a length")]
        let index = (number % self.slices.len() as u64) as usize;
        let (of, histogram) = &mut self.slices[index];
        if *of != number {
            *of = number;
            histogram.clear();
        }
        histogram.add(latency);
        self.ever.add(latency);
    }

    /// What ended within the window.
    pub fn recent(&self, now: Micros) -> Histogram {
        let number = now.0 / self.slice.0;
        let oldest = number.saturating_sub(self.slices.len() as u64 - 1);
        let mut sum = Histogram::default();
        for (_, histogram) in self.slices.iter().filter(|(of, _)| (oldest..=number).contains(of)) {
            sum.merge(histogram);
        }
        sum
    }

    /// What ended since the start.
    pub fn ever(&self) -> &Histogram {
        &self.ever
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_window_forgets() {
        let mut window = LatencyWindow::new(Micros::from_secs(1), 3);
        window.add(Micros::from_millis(100), Micros::from_millis(5));
        window.add(Micros::from_millis(2_900), Micros::from_millis(50));
        assert_eq!(window.recent(Micros::from_millis(2_950)).total(), 2);
        assert_eq!(window.recent(Micros::from_millis(3_100)).total(), 1);
        assert_eq!(window.recent(Micros::from_secs(60)).total(), 0);
        assert_eq!(window.recent(Micros::from_secs(60)).quantile(0.5), None);
        assert_eq!(window.ever().total(), 2);
        window.add(Micros::from_secs(60), Micros::from_millis(1));
        assert_eq!(window.recent(Micros::from_secs(60)).total(), 1, "an old slice is not counted");
    }

    proptest! {
        #[test]
        fn quantiles_are_near_the_true_ones(
            mut values in proptest::collection::vec(10u64..30_000_000, 1..300),
            quantile in 0.0f64..=1.0,
        ) {
            let mut histogram = Histogram::default();
            for value in &values {
                histogram.add(Micros(*value));
            }
            values.sort_unstable();
            #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small counts")]
            let rank = ((values.len() as f64 * quantile).ceil() as usize).max(1);
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let truth = values[rank - 1] as f64;
            #[expect(clippy::cast_precision_loss, reason = "small")]
            let said = histogram.quantile(quantile).unwrap().0 as f64;
            prop_assert!(said >= truth * 0.999 - 1.0 && said <= truth * 1.051 + 1.0, "{said} for {truth}");
        }
    }
}
