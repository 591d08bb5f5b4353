//! When a job that failed may be tried again.
//!
//! The wait grows exponentially with each failure up to a cap and is forgotten after a quiet time.
//! A part of it is drawn from a seed, so that jobs which failed together do not come back together;
//! the same job and failure give the same wait on every run.

use muxflow_types::Micros;

/// How waits grow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryParams {
    /// The wait after the first failure.
    pub base: Micros,
    /// Each further failure multiplies the wait by this.
    pub factor: f64,
    /// No wait is longer.
    pub cap: Micros,
    /// The share of the wait that is drawn: 0.2 means between 80 and 100 per cent of it.
    pub jitter: f64,
    /// So long without a failure, and all earlier ones are forgotten.
    pub forget_after: Micros,
    /// From so many failures in a row on, a job counts as fail-prone.
    pub fail_prone_from: u32,
}

impl Default for RetryParams {
    fn default() -> Self {
        RetryParams {
            base: Micros::from_secs(10),
            factor: 2.0,
            cap: Micros::from_secs(1800),
            jitter: 0.2,
            forget_after: Micros::from_secs(7200),
            fail_prone_from: 3,
        }
    }
}

/// A parameter that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} must be {bound}")]
pub struct RetryParamError {
    /// Which one.
    pub field: &'static str,
    /// What is allowed.
    pub bound: &'static str,
}

impl RetryParams {
    /// Refuses waits that do not grow or do not end.
    pub fn check(self) -> Result<Self, RetryParamError> {
        let rules = [
            ("base_s", self.base.0 > 0, "positive"),
            ("factor", (1.0..=100.0).contains(&self.factor), "between 1 and 100"),
            ("cap_s", self.cap >= self.base, "at least base_s"),
            ("jitter", (0.0..=0.9).contains(&self.jitter), "between 0 and 0.9"),
            (
                "forget_after_s",
                self.forget_after > self.cap,
                "longer than cap_s, or failures are forgotten while they are waited for",
            ),
            ("fail_prone_from", self.fail_prone_from > 0, "positive"),
        ];
        match rules.into_iter().find(|(_, good, _)| !good) {
            Some((field, _, bound)) => Err(RetryParamError { field, bound }),
            None => Ok(self),
        }
    }

    /// The wait after so many failures in a row, before the drawn part is taken off.
    pub fn full_wait(&self, failures: u32) -> Micros {
        let Some(exponent) = failures.checked_sub(1) else { return Micros::ZERO };
        let exponent = i32::try_from(exponent).unwrap_or(i32::MAX);
        let seconds = self.base.as_secs_f64() * self.factor.powi(exponent);
        Micros::from_secs_f64(seconds).unwrap_or(self.cap).min(self.cap)
    }

    /// The wait after so many failures in a row of the thing with this seed.
    pub fn wait(&self, failures: u32, seed: u64) -> Micros {
        let full = self.full_wait(failures);
        let drawn = self.jitter * fraction(seed ^ u64::from(failures));
        Micros::from_secs_f64(full.as_secs_f64() * (1.0 - drawn)).unwrap_or(full)
    }
}

/// A number in [0, 1) from a seed (splitmix64's finaliser: every bit of the seed counts).
fn fraction(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    let bits = (z >> 11) as f64;
    bits / 9_007_199_254_740_992.0
}

/// The failures of one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FailureHistory {
    failures: u32,
    last: Micros,
}

impl FailureHistory {
    /// What was stored of a job.
    pub fn restore(failures: u32, last: Micros) -> Self {
        FailureHistory { failures, last }
    }

    /// Failures in a row that are not forgotten at this time.
    pub fn failures(&self, now: Micros, params: &RetryParams) -> u32 {
        if now.since(self.last) >= params.forget_after { 0 } else { self.failures }
    }

    /// When the last one was.
    pub fn last(&self) -> Micros {
        self.last
    }

    /// Takes a failure; says from when on the job may be tried again.
    pub fn fail(&mut self, now: Micros, params: &RetryParams, seed: u64) -> Micros {
        self.failures = self.failures(now, params).saturating_add(1);
        self.last = now;
        now.saturating_add(params.wait(self.failures, seed))
    }

    /// Whether the job fails so often that critical services are kept from it.
    pub fn is_fail_prone(&self, now: Micros, params: &RetryParams) -> bool {
        self.failures(now, params) >= params.fail_prone_from
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn waits_double_up_to_the_cap() {
        let p = RetryParams { jitter: 0.0, ..RetryParams::default() };
        let seconds = |n| p.wait(n, 7).as_secs_f64();
        assert_eq!(
            [0, 1, 2, 3, 8, 9, 40].map(seconds),
            [0.0, 10.0, 20.0, 40.0, 1280.0, 1800.0, 1800.0]
        );
        assert_eq!(seconds(u32::MAX), 1800.0);
    }

    #[test]
    fn failures_are_forgotten_after_a_quiet_time() {
        let p = RetryParams::default();
        let mut history = FailureHistory::default();
        let mut now = Micros::from_secs(100);
        for n in 1..=3 {
            assert!(!history.is_fail_prone(now, &p), "after {} failures", n - 1);
            let until = history.fail(now, &p, 1);
            assert_eq!(history.failures(now, &p), n);
            now = until;
        }
        assert!(history.is_fail_prone(now, &p));
        let quiet = history.last().saturating_add(p.forget_after);
        assert!(!history.is_fail_prone(quiet, &p));
        let until = history.fail(quiet, &p, 1);
        assert!(until.since(quiet) <= p.base, "starts over");
    }

    #[test]
    fn bad_parameters_are_refused_by_name() {
        let good = RetryParams::default();
        assert!(good.check().is_ok());
        for (bad, field) in [
            (RetryParams { base: Micros(0), ..good }, "base_s"),
            (RetryParams { factor: 0.5, ..good }, "factor"),
            (RetryParams { cap: Micros(1), ..good }, "cap_s"),
            (RetryParams { jitter: 1.0, ..good }, "jitter"),
            (RetryParams { forget_after: good.cap, ..good }, "forget_after_s"),
            (RetryParams { fail_prone_from: 0, ..good }, "fail_prone_from"),
        ] {
            assert_eq!(bad.check().unwrap_err().field, field);
        }
    }

    proptest! {
        #[test]
        fn the_drawn_wait_stays_within_its_share(failures in 1u32..100, seed: u64, jitter in 0.0f64..0.9) {
            let p = RetryParams { jitter, ..RetryParams::default() };
            let (wait, full) = (p.wait(failures, seed), p.full_wait(failures));
            prop_assert!(wait <= full);
            prop_assert!(wait.as_secs_f64() >= full.as_secs_f64() * (1.0 - jitter) - 1e-6);
            prop_assert_eq!(wait, p.wait(failures, seed), "the same every time");
        }

        #[test]
        fn different_jobs_come_back_at_different_times(seed: u64) {
            let p = RetryParams::default();
            let waits: std::collections::BTreeSet<_> = (0..50).map(|i| p.wait(5, seed.wrapping_add(i))).collect();
            prop_assert!(waits.len() > 45);
        }
    }
}
