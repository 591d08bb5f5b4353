//! The times of the health machine, and what makes them consistent.

use muxflow_types::Micros;

/// Times of the health machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HealthParams {
    /// Counters older than this are stale: offline work is held, nothing is placed.
    pub stale_after: Micros,
    /// Without fresh counters for this long, offline work is evicted.
    pub lost_after: Micros,
    /// How long a metric must stay over its limit before offline work is evicted.
    pub confirm_after: Micros,
    /// How long all metrics must be Fine before a GPU is Healthy.
    pub recover_after: Micros,
    /// The period of the first Overlimit.
    pub overlimit_base: Micros,
    /// Each further entry within the window multiplies the period by this.
    pub overlimit_factor: f64,
    /// No period is longer.
    pub overlimit_cap: Micros,
    /// Entries older than this no longer count.
    pub overlimit_window: Micros,
}

impl Default for HealthParams {
    fn default() -> Self {
        HealthParams {
            stale_after: Micros::from_secs(2),
            lost_after: Micros::from_secs(10),
            confirm_after: Micros::from_millis(300),
            recover_after: Micros::from_secs(2),
            overlimit_base: Micros::from_secs(30),
            overlimit_factor: 2.0,
            overlimit_cap: Micros::from_secs(3600),
            overlimit_window: Micros::from_secs(7200),
        }
    }
}

/// Times that contradict each other.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} must be {bound}")]
pub struct HealthParamError {
    /// Which one.
    pub field: &'static str,
    /// What is allowed.
    pub bound: &'static str,
}

impl HealthParams {
    /// Refuses times under which the machine would not protect.
    pub fn check(self) -> Result<Self, HealthParamError> {
        let rules = [
            ("stale_after_ms", self.stale_after.0 > 0, "positive"),
            (
                "lost_after_ms",
                self.lost_after > self.stale_after,
                "longer than stale_after_ms: work is held before it is evicted",
            ),
            ("confirm_after_ms", self.confirm_after <= self.lost_after, "at most lost_after_ms"),
            ("overlimit_base_s", self.overlimit_base.0 > 0, "positive"),
            (
                "overlimit_factor",
                (1.1..=100.0).contains(&self.overlimit_factor),
                "between 1.1 and 100: the period grows with each entry",
            ),
            (
                "overlimit_cap_s",
                self.overlimit_cap >= self.overlimit_base,
                "at least overlimit_base_s",
            ),
            (
                "overlimit_window_s",
                self.overlimit_window >= self.overlimit_cap,
                "at least overlimit_cap_s, or entries are forgotten while they are served",
            ),
        ];
        match rules.into_iter().find(|(_, good, _)| !good) {
            Some((field, _, bound)) => Err(HealthParamError { field, bound }),
            None => Ok(self),
        }
    }

    /// How long the n-th entry within the window lasts at least.
    pub fn period(&self, entries: usize) -> Micros {
        let exponent = i32::try_from(entries.saturating_sub(1)).unwrap_or(i32::MAX);
        let seconds = self.overlimit_base.as_secs_f64() * self.overlimit_factor.powi(exponent);
        // Beyond any number of seconds lies the cap too.
        Micros::from_secs_f64(seconds).unwrap_or(self.overlimit_cap).min(self.overlimit_cap)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_do_not_protect_are_refused_by_name() {
        let good = HealthParams::default();
        assert!(good.check().is_ok());
        for (bad, field) in [
            (HealthParams { stale_after: Micros(0), ..good }, "stale_after_ms"),
            (HealthParams { lost_after: good.stale_after, ..good }, "lost_after_ms"),
            (HealthParams { confirm_after: Micros::from_secs(60), ..good }, "confirm_after_ms"),
            (HealthParams { overlimit_base: Micros(0), ..good }, "overlimit_base_s"),
            (HealthParams { overlimit_factor: 1.0, ..good }, "overlimit_factor"),
            (HealthParams { overlimit_factor: f64::NAN, ..good }, "overlimit_factor"),
            (HealthParams { overlimit_cap: Micros(1), ..good }, "overlimit_cap_s"),
            (
                HealthParams { overlimit_window: Micros::from_secs(60), ..good },
                "overlimit_window_s",
            ),
        ] {
            assert_eq!(bad.check().unwrap_err().field, field);
        }
    }

    #[test]
    fn the_period_doubles_and_stops_at_the_cap() {
        let p = HealthParams::default();
        let seconds = |entries| p.period(entries).as_secs_f64();
        assert_eq!([1, 2, 3, 7, 8, 9].map(seconds), [30.0, 60.0, 120.0, 1920.0, 3600.0, 3600.0]);
        assert_eq!(seconds(usize::MAX), 3600.0, "no overflow");
    }
}
