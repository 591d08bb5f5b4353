//! Memory quota: the hard cap on what offline work may hold of a GPU's memory.
//!
//! The paper gives offline work 40 % of the GPU. That is only safe where the service leaves so
//! much, so the plan lint checks each quota against what the service holds.

use std::fmt;

use muxflow_types::{Bytes, Percent};

/// How much offline work may hold, and what nobody may touch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuotaParams {
    /// Share of the GPU's memory that is lent by default.
    pub quota: Percent,
    /// Share that stays free for the driver, contexts and the service's next allocation.
    pub reserve: Percent,
}

impl Default for QuotaParams {
    /// 40 % as in the paper. 12 % are kept free, so that a pair which fills its quota stays below
    /// the Unhealthy threshold of memory and the service can still allocate before Overlimit.
    fn default() -> Self {
        let percent = |value| Percent::new(value).unwrap_or(Percent::ZERO);
        QuotaParams { quota: percent(40.0), reserve: percent(12.0) }
    }
}

/// A quota that does not fit beside the service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuotaOverrun {
    /// What the service holds.
    pub online: Bytes,
    /// What was to be lent.
    pub quota: Bytes,
    /// What must stay free.
    pub reserve: Bytes,
    /// What the GPU has.
    pub total: Bytes,
}

impl QuotaOverrun {
    /// The largest quota that would fit.
    pub fn largest(&self) -> Bytes {
        self.total.saturating_sub(self.reserve).saturating_sub(self.online)
    }
}

impl fmt::Display for QuotaOverrun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a quota of {} does not fit beside {} held by the service and {} kept free on a GPU of {}: lower it to {}",
            self.quota,
            self.online,
            self.reserve,
            self.total,
            self.largest()
        )
    }
}

impl QuotaParams {
    /// What is lent on a GPU of this size when nothing is known of the service.
    pub fn nominal(&self, total: Bytes) -> Bytes {
        total.scaled(self.quota)
    }

    /// What nobody may touch on a GPU of this size.
    pub fn kept_free(&self, total: Bytes) -> Bytes {
        total.scaled(self.reserve)
    }

    /// What is lent beside a service that holds so much: the nominal quota, or what is left.
    pub fn beside(&self, total: Bytes, online: Bytes) -> Bytes {
        let left = total.saturating_sub(self.kept_free(total)).saturating_sub(online);
        self.nominal(total).min(left)
    }

    /// Whether a quota fits beside the service: online + quota + reserve ≤ total.
    pub fn check(&self, total: Bytes, online: Bytes, quota: Bytes) -> Result<(), QuotaOverrun> {
        let reserve = self.kept_free(total);
        let asked = online.saturating_add(quota).saturating_add(reserve);
        if quota == Bytes::ZERO || asked <= total {
            Ok(())
        } else {
            Err(QuotaOverrun { online, quota, reserve, total })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const T4: Bytes = Bytes::from_mib(15_360);

    #[test]
    fn forty_per_cent_unless_the_service_holds_too_much() {
        let law = QuotaParams::default();
        assert_eq!(law.nominal(T4), Bytes::from_mib(6_144));
        assert_eq!(law.beside(T4, Bytes::from_mib(4_000)), Bytes::from_mib(6_144));
        assert_eq!(law.kept_free(T4), Bytes(1_932_735_283));
        assert_eq!(law.beside(T4, Bytes::from_mib(12_000)), Bytes(1_590_480_077));
        assert_eq!(law.beside(T4, Bytes::from_mib(15_000)), Bytes::ZERO);
    }

    #[test]
    fn an_overrun_says_what_would_fit() {
        let law = QuotaParams::default();
        let overrun = law.check(T4, Bytes::from_mib(12_000), Bytes::from_mib(6_144)).unwrap_err();
        assert_eq!(overrun.largest(), law.beside(T4, Bytes::from_mib(12_000)));
        let text = overrun.to_string();
        assert!(text.contains("6.0 GiB") && text.contains("lower it to 1.5 GiB"), "{text}");
        assert_eq!(
            law.check(T4, Bytes(u64::MAX), Bytes(u64::MAX)).unwrap_err().largest(),
            Bytes(0)
        );
        assert!(
            law.check(T4, Bytes(u64::MAX), Bytes::ZERO).is_ok(),
            "nothing lent, nothing overrun"
        );
    }

    proptest! {
        #[test]
        fn what_is_lent_always_passes_the_check(total in 0u64..1 << 40, online in 0u64..1 << 41, pct in 0.0f64..=100.0) {
            let law = QuotaParams { quota: Percent::new(pct).unwrap(), ..QuotaParams::default() };
            let quota = law.beside(Bytes(total), Bytes(online));
            prop_assert!(law.check(Bytes(total), Bytes(online), quota).is_ok());
        }
    }
}
