//! How many SMs a GPU lends in the coming interval: what the service leaves.
//!
//! Two knobs per service trade its speed for that of offline work, and both say what they mean.
//! `coverage` is how often the service must find all the SMs that it wants; `allowed_slowdown` is how
//! much slower it may become when it does not find them. A service that wants a share d of the SMs and
//! gets d / (1 + s) of them takes at most 1 + s times as long, because work that is spread over fewer
//! SMs slows down by no more than the ratio of their numbers.
//!
//! MPS fixes the share when a client starts, so this is the share of the next start; the launch gate
//! acts in between.

use muxflow_types::{Percent, SmCount, SmShare, UnitError};

/// How much is lent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShareParams {
    /// How often the service finds all the SMs it wants: a share of intervals.
    pub coverage: f64,
    /// How much slower the service may be where it wants SMs that are lent: 0.1 is ten per cent.
    pub allowed_slowdown: f64,
    /// Never lend more.
    pub max_share: Percent,
    /// Rather lend nothing than less: a handful of SMs costs the service more than it brings.
    pub min_share: Percent,
}

impl Default for ShareParams {
    fn default() -> Self {
        let percent = |value| Percent::new(value).unwrap_or(Percent::ZERO);
        ShareParams {
            coverage: 0.95,
            allowed_slowdown: 0.0,
            max_share: percent(90.0),
            min_share: percent(10.0),
        }
    }
}

/// A share parameter that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} is {value}; it must be {bound}")]
pub struct ShareParamError {
    /// Which one.
    pub field: &'static str,
    /// What was given.
    pub value: f64,
    /// What is allowed.
    pub bound: &'static str,
}

impl ShareParams {
    /// Refuses knobs out of range.
    pub fn check(self) -> Result<Self, ShareParamError> {
        let (most, least) = (self.max_share.value(), self.min_share.value());
        let coverage_pct = self.coverage * 100.0;
        let slowdown_pct = self.allowed_slowdown * 100.0;
        let rules = [
            (
                "coverage_pct",
                coverage_pct,
                (50.0..=99.9).contains(&coverage_pct),
                "between 50 and 99.9",
            ),
            (
                "allowed_slowdown_pct",
                slowdown_pct,
                (0.0..=100.0).contains(&slowdown_pct),
                "between 0 and 100",
            ),
            ("min_share_pct", least, least <= most, "at most max_share_pct"),
        ];
        match rules.into_iter().find(|(_, _, good, _)| !good) {
            Some((field, value, _, bound)) => Err(ShareParamError { field, value, bound }),
            None => Ok(self),
        }
    }

    /// The whole SMs that may be lent beside a service which wants this activity.
    pub fn share(&self, demand: Percent, total: SmCount) -> Result<SmShare, UnitError> {
        let kept = demand.value() / (1.0 + self.allowed_slowdown.max(0.0));
        let lent = Percent::clamped(100.0 - kept).unwrap_or(Percent::ZERO);
        let lent = if lent > self.max_share { self.max_share } else { lent };
        let share = SmShare::from_percent(lent, total)?;
        if share.percent() < self.min_share {
            return SmShare::new(SmCount(0), total);
        }
        Ok(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const T4: SmCount = SmCount(40);

    fn sms(params: ShareParams, demand: f64) -> u32 {
        params.share(Percent::new(demand).unwrap(), T4).unwrap().sms().0
    }

    #[test]
    fn the_examples_of_the_paper() {
        // Service A uses 20 % of the SMs and C gets 80 %; B uses 80 % and D gets 20 %.
        let p = ShareParams::default();
        assert_eq!(sms(p, 20.0), 32);
        assert_eq!(sms(p, 80.0), 8);
    }

    #[test]
    fn bounds_and_whole_sms() {
        let p = ShareParams::default();
        assert_eq!(sms(p, 0.0), 36, "never more than 90 %");
        assert_eq!(sms(p, 39.0), 24, "24.4 SMs are 24");
        assert_eq!(sms(p, 90.0), 4);
        assert_eq!(sms(p, 91.0), 0, "less than 10 % is nothing");
        assert_eq!(sms(p, 100.0), 0);
        assert!(p.share(Percent::ZERO, SmCount(0)).is_err());
    }

    #[test]
    fn an_allowed_slowdown_lends_more() {
        let p = ShareParams { allowed_slowdown: 0.25, ..ShareParams::default() };
        // 60 % wanted, 48 % kept: 1.25 times as long.
        assert_eq!(sms(p, 60.0), 20);
        assert_eq!(sms(ShareParams::default(), 60.0), 16);
    }

    #[test]
    fn bad_knobs_are_refused_by_name() {
        let good = ShareParams::default();
        assert!(good.check().is_ok());
        for (bad, field) in [
            (ShareParams { coverage: 0.2, ..good }, "coverage_pct"),
            (ShareParams { coverage: f64::NAN, ..good }, "coverage_pct"),
            (ShareParams { allowed_slowdown: -0.1, ..good }, "allowed_slowdown_pct"),
            (ShareParams { min_share: Percent::new(95.0).unwrap(), ..good }, "min_share_pct"),
        ] {
            assert_eq!(bad.check().unwrap_err().field, field);
        }
    }

    proptest! {
        #[test]
        fn more_demand_never_lends_more_and_the_service_keeps_its_part(
            a in 0.0f64..=100.0, b in 0.0f64..=100.0, total in 1u32..200, slowdown in 0.0f64..1.0,
        ) {
            let p = ShareParams { allowed_slowdown: slowdown, ..ShareParams::default() };
            let share = |d: f64| p.share(Percent::new(d).unwrap(), SmCount(total)).unwrap();
            prop_assert!(share(a.max(b)) <= share(a.min(b)));
            let kept = 100.0 - share(a).percent().value();
            prop_assert!(kept * (1.0 + slowdown) >= a - 1e-3);
        }
    }
}
