//! When a cycle that failed is tried again: a disk that was full for a moment must not keep jobs
//! waiting until the next interval.

use std::time::{Duration, Instant};

/// After the first failure; twice as long after each further one.
const FIRST: Duration = Duration::from_secs(5);
/// At most.
const LONGEST: Duration = Duration::from_secs(300);

/// The failures of the last cycles.
#[derive(Debug, Default)]
pub(super) struct Again {
    failures: u32,
    at: Option<Instant>,
}

impl Again {
    /// A cycle ended at this moment, well or not.
    pub(super) fn note(&mut self, well: bool, now: Instant) {
        if well {
            *self = Again::default();
            return;
        }
        let wait = FIRST.saturating_mul(1 << self.failures.min(16)).min(LONGEST);
        self.failures += 1;
        self.at = Some(now + wait);
    }

    /// When the next cycle is due at the latest: at its time, or to try again.
    pub(super) fn before(&self, next: Instant) -> Instant {
        self.at.map_or(next, |at| at.min(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_until_a_cycle_ends_well() {
        let now = Instant::now();
        let next = now + Duration::from_secs(3600);
        let mut again = Again::default();
        assert_eq!(again.before(next), next);
        for wait_s in [5, 10, 20, 40, 80, 160, 300, 300] {
            again.note(false, now);
            assert_eq!(again.before(next), now + Duration::from_secs(wait_s));
        }
        assert_eq!(again.before(now), now, "the interval does not wait for it");
        again.note(true, now);
        assert_eq!(again.before(next), next);
        again.note(false, now);
        assert_eq!(again.before(next), now + Duration::from_secs(5));
    }
}
