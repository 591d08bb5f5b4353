//! Latencies in buckets that grow by a fixed factor.

/// Counts of latencies.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    longest_us: f64,
}

const SMALLEST_US: f64 = 10.0;
const GROWTH: f64 = 1.05;

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: vec![0; 400], total: 0, longest_us: 0.0 }
    }
}

impl Histogram {
    /// One more latency.
    pub fn add(&mut self, latency_us: f64) {
        let steps = (latency_us.max(SMALLEST_US) / SMALLEST_US).ln() / GROWTH.ln();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "small and not negative"
        )]
        let bucket = (steps as usize).min(self.counts.len() - 1);
        self.counts[bucket] += 1;
        self.total += 1;
        self.longest_us = self.longest_us.max(latency_us);
    }

    /// How many there are.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The latency that `part` (0 to 1) of all stay below, in microseconds.
    pub fn quantile_us(&self, part: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
        let wanted = part * self.total as f64;
        let mut seen = 0.0;
        for (i, count) in self.counts.iter().enumerate() {
            #[expect(clippy::cast_precision_loss, reason = "counts of requests")]
            let count = *count as f64;
            seen += count;
            if seen >= wanted && count > 0.0 {
                let power = i32::try_from(i + 1).unwrap_or(i32::MAX);
                return (SMALLEST_US * GROWTH.powi(power)).min(self.longest_us);
            }
        }
        self.longest_us
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let ms = |part: f64| self.quantile_us(part) / 1e3;
        let (p50, p90, p99) = (ms(0.5), ms(0.9), ms(0.99));
        let longest = self.longest_us / 1e3;
        format!(
            "{} requests, p50 {p50:.2} ms, p90 {p90:.2} ms, p99 {p99:.2} ms, max {longest:.2} ms",
            self.total
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_bucket() {
        let mut histogram = Histogram::default();
        for i in 1..=1000 {
            histogram.add(f64::from(i) * 10.0);
        }
        assert!((histogram.quantile_us(0.5) / 5000.0 - 1.0).abs() < 0.06);
        assert!((histogram.quantile_us(0.99) / 9900.0 - 1.0).abs() < 0.06);
        assert!(histogram.quantile_us(1.0) <= 10_000.0);
    }
}
