//! How soon a service comes back: at once, unless that was tried again and again.
//!
//! Two things end a service. It ends by itself, which counts against it; or an error took its context,
//! which mostly is the doing of the job beside it. But a service that strikes the GPU by itself, alone
//! and right after each start, would be started again for ever, and MPS with it.

use std::time::Duration;

/// A service that ran this long did not fail at its start.
pub(super) const SETTLED_AFTER_S: u64 = 60;

/// So often a service that was alone on its GPU comes back at once after errors.
const AT_ONCE: u32 = 3;

/// Waits of a service that ends again and again: at once, then growing to half a minute.
pub(super) fn back_off(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        n => Duration::from_millis(250).saturating_mul(1 << n.min(7)).min(Duration::from_secs(30)),
    }
}

/// How often errors ended a service that was alone, before it had run for a while.
#[derive(Debug, Default)]
pub(super) struct Comebacks {
    times: u32,
}

impl Comebacks {
    /// An error took the context of a service that had run for `ran_s`: how long until the next start.
    pub(super) fn wait_after(&mut self, ran_s: u64, alone: bool) -> Duration {
        if ran_s > SETTLED_AFTER_S {
            self.times = 0;
        }
        if !alone {
            // The job that was there may be to blame, and waits by itself.
            return Duration::ZERO;
        }
        self.times = self.times.saturating_add(1);
        back_off(self.times.saturating_sub(AT_ONCE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_comes_back_at_once_and_then_more_slowly() {
        assert_eq!(back_off(0), Duration::ZERO);
        assert_eq!(back_off(1), Duration::from_millis(500));
        assert_eq!(back_off(u32::MAX), Duration::from_secs(30));
    }

    #[test]
    fn one_that_strikes_the_gpu_after_each_start_is_not_restarted_without_end() {
        let mut comebacks = Comebacks::default();
        for _ in 0..AT_ONCE {
            assert_eq!(comebacks.wait_after(1, true), Duration::ZERO);
        }
        let waits: Vec<Duration> = (0..20).map(|_| comebacks.wait_after(1, true)).collect();
        assert!(waits.is_sorted() && waits[0] > Duration::ZERO, "{waits:?}");
        assert_eq!(waits.last(), Some(&Duration::from_secs(30)));
        assert_eq!(
            comebacks.wait_after(SETTLED_AFTER_S + 1, true),
            Duration::ZERO,
            "it had settled"
        );
        for _ in 0..20 {
            assert_eq!(comebacks.wait_after(1, false), Duration::ZERO, "a job was there");
        }
        assert_eq!(
            comebacks.wait_after(1, true),
            Duration::ZERO,
            "which does not count against it"
        );
    }
}
