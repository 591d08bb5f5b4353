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

/// Fewer requests than this within a window say nothing of the latency.
const ENOUGH: u64 = 20;

/// The percentile that is held against the SLO: the 99th, but with few requests the slowest one is
/// left out, or a single hiccup would count as the rule. `late` are the ages of requests that got no
/// answer, or have none yet, and are past the SLO already. Too few requests say nothing, unless more
/// of them got no answer than got one: that is a service that stands still, not one that idles.
pub fn slo_latency(answered: &Histogram, late: &Histogram, window: Micros) -> Option<Micros> {
    let lasting = late.quantile(1.0).is_some_and(|oldest| oldest >= window);
    let stands_still = late.total() > answered.total() && (late.total() > 1 || lasting);
    let mut all = answered.clone();
    all.merge(late);
    if all.total() < ENOUGH && !stands_still {
        return None;
    }
    #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
    let left_out = (1.5 / all.total() as f64).max(0.01);
    all.quantile(1.0 - left_out)
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

    #[test]
    fn a_service_that_stands_still_is_late_and_one_that_idles_is_not() {
        let many = |count: usize, ms: u64| {
            let mut histogram = Histogram::default();
            (0..count).for_each(|_| histogram.add(Micros::from_millis(ms)));
            histogram
        };
        let window = Micros::from_secs(5);
        let told = |answered: &Histogram, late: &Histogram| slo_latency(answered, late, window);
        let late_by = |told: Option<Micros>| told.is_some_and(|t| t >= Micros::from_millis(1_900));
        assert_eq!(told(&many(0, 0), &many(0, 0)), None);
        assert_eq!(told(&many(19, 5), &many(0, 0)), None, "too few");
        assert!(told(&many(100, 5), &many(1, 2_000)).unwrap() < Micros::from_millis(6));
        assert!(late_by(told(&many(100, 5), &many(4, 2_000))));
        assert!(late_by(told(&many(0, 0), &many(2, 2_000))), "both hang");
        assert_eq!(told(&many(5, 5), &many(2, 2_000)), None, "most are answered");
        assert_eq!(told(&many(0, 0), &many(1, 2_000)), None, "a single one may be a hiccup");
        assert!(late_by(told(&many(0, 0), &many(1, 6_000))), "not for that long");
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
