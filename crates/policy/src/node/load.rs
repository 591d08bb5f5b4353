//! GPU load: SM activity weighed by how far the SM clock has fallen (equations 1 and 2 of the
//! paper).
//!
//! High utilisation is wanted, a low clock is not, and one follows from the other. The load joins
//! them in one number that the launch gate can hold: below the clock threshold it rises steeply,
//! above it the load is discounted a little.
//!
//! Cases that the paper leaves open:
//! - a clock above the highest one counts as the highest, or the discount would grow without end;
//! - when the threshold is the highest clock, nothing lies above it and the factor there is 1;
//! - without a clock or an SM activity there is no load: the gate treats that as a missing sample.

use muxflow_types::{GpuSample, MegaHertz, Percent};

/// How many times `low_gain` must at least exceed `high_gain`: the paper's "much larger".
pub const MIN_GAIN_RATIO: f64 = 5.0;

/// SM activity × clock factor. 1 is a GPU whose SMs are all busy at the threshold clock; it can be
/// more.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct GpuLoad(f64);

impl GpuLoad {
    /// A load; `None` when it is negative, infinite or not a number.
    pub fn new(value: f64) -> Option<Self> {
        (value.is_finite() && value >= 0.0).then_some(GpuLoad(value))
    }

    /// As a number.
    pub fn value(self) -> f64 {
        self.0
    }
}

/// Parameters that do not make a clock law.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ClockLawError {
    /// A threshold of zero or beyond the highest clock.
    #[error(
        "the clock threshold of {threshold} must lie between 1 MHz and the highest clock of {highest}"
    )]
    Threshold {
        /// What was given.
        threshold: MegaHertz,
        /// The bound.
        highest: MegaHertz,
    },
    /// A gain for high clocks that would make the load negative or grow with the clock.
    #[error("high_gain is {value}; it must lie between 0 and 0.9")]
    HighGain {
        /// What was given.
        value: f64,
    },
    /// A gain for low clocks that is not much larger than the one for high clocks.
    #[error(
        "low_gain is {low}; it must be positive, finite and at least {MIN_GAIN_RATIO} times high_gain ({high})"
    )]
    LowGain {
        /// What was given.
        low: f64,
        /// The gain for high clocks.
        high: f64,
    },
}

/// The clock factor a_C of one GPU type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockLaw {
    threshold: MegaHertz,
    highest: MegaHertz,
    low_gain: f64,
    high_gain: f64,
}

impl ClockLaw {
    /// Checks the parameters: T_SM, C_H, a_L, a_H in the words of the paper.
    pub fn new(
        threshold: MegaHertz,
        highest: MegaHertz,
        low_gain: f64,
        high_gain: f64,
    ) -> Result<Self, ClockLawError> {
        if threshold.0 == 0 || threshold > highest {
            return Err(ClockLawError::Threshold { threshold, highest });
        }
        if !(0.0..=0.9).contains(&high_gain) {
            return Err(ClockLawError::HighGain { value: high_gain });
        }
        if !(low_gain.is_finite() && low_gain > 0.0 && low_gain >= MIN_GAIN_RATIO * high_gain) {
            return Err(ClockLawError::LowGain { low: low_gain, high: high_gain });
        }
        Ok(ClockLaw { threshold, highest, low_gain, high_gain })
    }

    /// A law that ships with the program; a test holds it against [`ClockLaw::new`].
    pub(crate) const fn built_in(threshold: u32, highest: u32) -> Self {
        let (threshold, highest) = (MegaHertz(threshold), MegaHertz(highest));
        ClockLaw { threshold, highest, low_gain: 4.0, high_gain: 0.2 }
    }

    /// T_SM: below this clock, raising it counts more than filling the GPU.
    pub fn threshold(&self) -> MegaHertz {
        self.threshold
    }

    /// C_H: the highest SM clock of the GPU type.
    pub fn highest(&self) -> MegaHertz {
        self.highest
    }

    /// a_L and a_H.
    pub fn gains(&self) -> (f64, f64) {
        (self.low_gain, self.high_gain)
    }

    /// a_C. Continuous and never rising with the clock; 1 at the threshold.
    pub fn factor(&self, clock: MegaHertz) -> f64 {
        let threshold = f64::from(self.threshold.0);
        let clock = f64::from(clock.0.min(self.highest.0));
        if clock < threshold {
            return 1.0 + self.low_gain * (threshold - clock) / threshold;
        }
        let span = f64::from(self.highest.0) - threshold;
        if span > 0.0 { 1.0 - self.high_gain * (clock - threshold) / span } else { 1.0 }
    }

    /// U_GPU = U_SM × a_C.
    pub fn load(&self, sm_activity: Percent, clock: MegaHertz) -> GpuLoad {
        GpuLoad(sm_activity.fraction() * self.factor(clock))
    }

    /// The load of a sample; `None` when its SM activity or its clock is missing.
    pub fn load_of(&self, sample: &GpuSample) -> Option<GpuLoad> {
        Some(self.load(sample.sm_activity?, sample.sm_clock?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_types::Micros;
    use proptest::prelude::*;

    fn law() -> ClockLaw {
        ClockLaw::new(MegaHertz(1200), MegaHertz(1600), 4.0, 0.2).unwrap()
    }

    fn pct(v: f64) -> Percent {
        Percent::new(v).unwrap()
    }

    #[test]
    fn both_branches_follow_the_paper() {
        let law = law();
        assert_eq!(law.factor(MegaHertz(600)), 1.0 + 4.0 * 0.5);
        assert_eq!(law.factor(MegaHertz(1200)), 1.0);
        assert_eq!(law.factor(MegaHertz(1400)), 1.0 - 0.2 * 0.5);
        assert_eq!(law.factor(MegaHertz(1600)), 0.8);
        assert_eq!(law.load(pct(50.0), MegaHertz(600)).value(), 1.5);
    }

    #[test]
    fn the_open_cases_are_closed() {
        let law = law();
        assert_eq!(law.factor(MegaHertz(2000)), law.factor(MegaHertz(1600)), "held at the highest");
        assert_eq!(law.factor(MegaHertz(0)), 5.0);
        let flat = ClockLaw::new(MegaHertz(1600), MegaHertz(1600), 4.0, 0.2).unwrap();
        assert_eq!(flat.factor(MegaHertz(1600)), 1.0, "no 0/0 when the threshold is the highest");
        assert_eq!(flat.factor(MegaHertz(1700)), 1.0);
        let mut sample = GpuSample::empty(Micros(1));
        sample.sm_activity = Some(pct(40.0));
        assert_eq!(law.load_of(&sample), None, "no clock, no load");
        sample.sm_clock = Some(MegaHertz(1200));
        assert_eq!(law.load_of(&sample).unwrap().value(), 0.4);
        sample.sm_activity = None;
        assert_eq!(law.load_of(&sample), None);
    }

    #[test]
    fn parameters_that_contradict_the_paper_are_refused() {
        let bad = |t, h, l, g| ClockLaw::new(MegaHertz(t), MegaHertz(h), l, g).unwrap_err();
        assert!(matches!(bad(0, 1600, 4.0, 0.2), ClockLawError::Threshold { .. }));
        assert!(matches!(bad(1601, 1600, 4.0, 0.2), ClockLawError::Threshold { .. }));
        assert!(matches!(bad(1200, 1600, 4.0, 0.95), ClockLawError::HighGain { .. }));
        assert!(matches!(bad(1200, 1600, 4.0, f64::NAN), ClockLawError::HighGain { .. }));
        assert!(matches!(bad(1200, 1600, 0.9, 0.2), ClockLawError::LowGain { .. }));
        assert!(matches!(bad(1200, 1600, f64::INFINITY, 0.2), ClockLawError::LowGain { .. }));
        assert!(matches!(bad(1200, 1600, 0.0, 0.0), ClockLawError::LowGain { .. }));
        assert!(bad(1200, 1600, 0.9, 0.2).to_string().contains("at least 5 times"));
    }

    proptest! {
        #[test]
        fn the_factor_never_rises_with_the_clock_and_never_jumps(
            threshold in 1u32..2000, above in 0u32..800, clock in 0u32..3000,
            high in 0.0f64..=0.9, ratio in 5.0f64..50.0,
        ) {
            let law = ClockLaw::new(
                MegaHertz(threshold), MegaHertz(threshold + above), (high * ratio).max(0.1), high,
            ).unwrap();
            let (here, next) = (law.factor(MegaHertz(clock)), law.factor(MegaHertz(clock + 1)));
            prop_assert!(here > 0.0 && here.is_finite());
            prop_assert!(next <= here, "rises from {here} to {next}");
            let steepest = (law.low_gain / f64::from(threshold)).max(law.high_gain / f64::from(above.max(1)));
            prop_assert!(here - next <= steepest + 1e-9, "jumps from {here} to {next}");
            prop_assert_eq!(law.factor(MegaHertz(threshold)), 1.0);
        }
    }
}
