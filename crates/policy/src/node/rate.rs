//! From a launch budget to the numbers that the interposer applies: kernels per second, and how many
//! may be under way.
//!
//! A budget is a share of the GPU's time. The interposer counts kernels, and reports how long one takes
//! while its pipe is full; the rate is the budget divided by that. The bound on work in flight is a
//! bound on time as well: however long a kernel is, no more than `queue_for` of work may wait in front
//! of the service when the gate closes.

use muxflow_types::Micros;

use super::gate::LaunchBudget;

/// No limit on the rate.
pub const UNLIMITED: u64 = u64::MAX;
/// Kernels in flight until the interposer has measured how long one takes. No rate can be told before
/// that: a guess that is ten times too short would let ten times the budget through. So few fill the
/// pipe at once, which is what measures them.
const UNMEASURED_IN_FLIGHT: u64 = 4;

/// What the agent writes into the control block for one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchLimits {
    /// No launch may pass.
    pub closed: bool,
    /// Kernels per second, in thousandths; [`UNLIMITED`] is no limit.
    pub rate_milli_per_s: u64,
    /// Kernels that may start at once after a pause.
    pub burst: u64,
    /// Kernels that may be in flight.
    pub in_flight: u64,
}

impl LaunchLimits {
    /// Nothing passes.
    pub const CLOSED: LaunchLimits =
        LaunchLimits { closed: true, rate_milli_per_s: 0, burst: 0, in_flight: 0 };

    /// The limits for a job whose kernels last so long (zero: not known yet), with at most `queue_for`
    /// of its work in flight.
    pub fn new(budget: LaunchBudget, kernel_ns: u64, queue_for: Micros) -> Self {
        if budget.closed {
            return Self::CLOSED;
        }
        let queue_ns = queue_for.0.saturating_mul(1_000);
        let by_count = u64::from(budget.max_in_flight).max(1);
        let Some(by_time) = queue_ns.checked_div(kernel_ns) else {
            let in_flight = by_count.min(UNMEASURED_IN_FLIGHT);
            let rate_milli_per_s = UNLIMITED;
            return LaunchLimits { closed: false, rate_milli_per_s, burst: in_flight, in_flight };
        };
        let in_flight = by_count.min(by_time).max(1);
        let rate_milli_per_s = if budget.fraction >= 1.0 {
            UNLIMITED
        } else {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "a fraction of at most 10^12, and rates need no more than 53 bits"
            )]
            let rate = (budget.fraction.max(0.0) * 1e12 / kernel_ns as f64) as u64;
            rate.max(1)
        };
        LaunchLimits { closed: false, rate_milli_per_s, burst: in_flight, in_flight }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn budget(fraction: f64) -> LaunchBudget {
        LaunchBudget { fraction, max_in_flight: 256, closed: false }
    }

    const QUEUE: Micros = Micros::from_millis(10);

    #[test]
    fn half_a_budget_is_half_the_kernels() {
        let limits = LaunchLimits::new(budget(0.5), 1_000_000, QUEUE);
        assert_eq!(limits.rate_milli_per_s, 500_000, "500 kernels of 1 ms each second");
        assert_eq!(limits.in_flight, 10, "10 ms of work");
        let short = LaunchLimits::new(budget(0.5), 10_000, QUEUE);
        assert_eq!((short.rate_milli_per_s, short.in_flight), (50_000_000, 256));
        let long = LaunchLimits::new(budget(0.5), 80_000_000, QUEUE);
        assert_eq!(
            (long.rate_milli_per_s, long.in_flight),
            (6_250, 1),
            "one is always let through"
        );
    }

    #[test]
    fn full_and_closed() {
        assert_eq!(LaunchLimits::new(budget(1.0), 0, QUEUE).rate_milli_per_s, UNLIMITED);
        assert_eq!(LaunchLimits::new(LaunchBudget::CLOSED, 5, QUEUE), LaunchLimits::CLOSED);
        let unmeasured = LaunchLimits::new(budget(0.1), 0, QUEUE);
        assert_eq!((unmeasured.rate_milli_per_s, unmeasured.in_flight), (UNLIMITED, 4));
    }

    proptest! {
        #[test]
        fn the_rate_never_asks_for_more_time_than_the_budget(fraction in 0.0001f64..1.0, kernel_ns in 1u64..10_000_000_000) {
            let limits = LaunchLimits::new(budget(fraction), kernel_ns, QUEUE);
            let busy = limits.rate_milli_per_s as f64 / 1e3 * kernel_ns as f64 / 1e9;
            prop_assert!(busy <= fraction * (1.0 + 1e-9) || limits.rate_milli_per_s == 1);
            prop_assert!(limits.in_flight >= 1 && limits.in_flight <= 256);
            prop_assert!(limits.in_flight == 1 || limits.in_flight * kernel_ns <= 10_000_000);
        }
    }
}
