//! A circuit breaker against mass eviction: bad sensor data must not empty a machine.
//!
//! One GPU over its limit is news about that GPU. Many at the same moment are more often a broken
//! sensor, a driver that hangs, or a clock that jumped. When more than the allowed share of the
//! running jobs would be evicted within a window, the breaker opens: evictions by *readings* are held
//! back (launch gates stay shut, so the services are protected all the same) until a calm period or an
//! operator closes it. Evictions for certain reasons (an XID, a lost device, the manager's order)
//! are never held back, and neither are those for memory: a shut gate gives none back.

use std::collections::VecDeque;

use muxflow_types::Micros;

/// How much eviction is believable.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BreakerParams {
    /// Window in which evictions are counted.
    pub window: Micros,
    /// So many are always allowed.
    pub always: usize,
    /// And so large a share of the jobs that ran: 0 to 1.
    pub share: f64,
    /// It closes again when nothing asked for an eviction for this long.
    pub calm_for: Micros,
}

impl Default for BreakerParams {
    fn default() -> Self {
        BreakerParams {
            window: Micros::from_secs(60),
            always: 2,
            share: 0.5,
            calm_for: Micros::from_secs(120),
        }
    }
}

/// What a request to evict may rest on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// Sensor readings, which may lie.
    Readings,
    /// An event or an order, which does not.
    Certain,
    /// Memory that the service needs: it comes back only when the job goes, so it goes in haste.
    Memory,
}

/// The answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Evict.
    Evict,
    /// Hold the job at its gate instead.
    Hold {
        /// This request opened the breaker: raise an alert.
        opened: bool,
    },
}

/// The breaker of one machine.
#[derive(Debug, Clone)]
pub struct EvictionBreaker {
    params: BreakerParams,
    evicted: VecDeque<Micros>,
    last_asked: Option<Micros>,
    believed_until: Option<Micros>,
    open: bool,
}

impl EvictionBreaker {
    /// Closed: evictions pass.
    pub fn new(params: BreakerParams) -> Self {
        EvictionBreaker {
            params,
            evicted: VecDeque::new(),
            last_asked: None,
            believed_until: None,
            open: false,
        }
    }

    /// Whether it holds evictions back.
    pub fn is_open(&self) -> bool {
        self.open
    }

    /// Somebody has looked, and the sensors are right: it closes, and for one window all pass.
    pub fn believe(&mut self, now: Micros) {
        self.close();
        self.believed_until = Some(now.saturating_add(self.params.window));
    }

    fn close(&mut self) {
        self.open = false;
        self.evicted.clear();
    }

    /// Asks to evict one of `running` jobs.
    pub fn ask(&mut self, now: Micros, ground: Ground, running: usize) -> Verdict {
        if self.open && self.last_asked.is_some_and(|last| now.since(last) >= self.params.calm_for)
        {
            self.close();
        }
        if ground != Ground::Readings || self.believed_until.is_some_and(|until| now <= until) {
            return Verdict::Evict;
        }
        self.last_asked = Some(now);
        while self.evicted.front().is_some_and(|&at| now.since(at) > self.params.window) {
            self.evicted.pop_front();
        }
        if self.open {
            return Verdict::Hold { opened: false };
        }
        // What ran at the start of the window: what runs now and what was evicted since.
        let ran = running + self.evicted.len();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a small number of jobs"
        )]
        let allowed = ((ran as f64 * self.params.share) as usize).max(self.params.always);
        if self.evicted.len() >= allowed {
            self.open = true;
            return Verdict::Hold { opened: true };
        }
        self.evicted.push_back(now);
        Verdict::Evict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_few_pass_and_a_wave_is_held() {
        let mut breaker = EvictionBreaker::new(BreakerParams::default());
        let now = Micros::from_secs(1);
        let verdicts: Vec<Verdict> =
            (0..8).map(|n: usize| breaker.ask(now, Ground::Readings, 8 - n.min(4))).collect();
        assert_eq!(verdicts[..4], [Verdict::Evict; 4]);
        assert_eq!(verdicts[4], Verdict::Hold { opened: true });
        assert_eq!(verdicts[5..], [Verdict::Hold { opened: false }; 3]);
        assert_eq!(breaker.ask(now, Ground::Certain, 4), Verdict::Evict, "an XID is certain");
        let later = Micros::from_secs(200);
        assert_eq!(breaker.ask(later, Ground::Readings, 4), Verdict::Evict, "calm closes it");
        assert!(!breaker.is_open());
    }

    #[test]
    fn who_has_looked_closes_it() {
        let mut breaker = EvictionBreaker::new(BreakerParams::default());
        let now = Micros::from_secs(1);
        let ask = |breaker: &mut EvictionBreaker, at| breaker.ask(at, Ground::Readings, 8);
        while ask(&mut breaker, now) == Verdict::Evict {}
        assert!(breaker.is_open());
        breaker.believe(now);
        assert!(!breaker.is_open());
        for _ in 0..20 {
            assert_eq!(ask(&mut breaker, Micros::from_secs(61)), Verdict::Evict, "all pass");
        }
        let later = Micros::from_secs(62);
        let passed = (0..20).filter(|_| ask(&mut breaker, later) == Verdict::Evict).count();
        assert!(passed < 20 && breaker.is_open(), "after a window it judges again: {passed}");
    }

    #[test]
    fn a_small_machine_may_always_evict() {
        let mut breaker = EvictionBreaker::new(BreakerParams::default());
        assert_eq!(breaker.ask(Micros(1), Ground::Readings, 1), Verdict::Evict);
        assert_eq!(breaker.ask(Micros(2), Ground::Readings, 1), Verdict::Evict);
    }

    proptest! {
        #[test]
        fn no_window_sees_more_than_the_share(
            asks in proptest::collection::vec((0u64..5_000_000, 1usize..50), 1..200),
        ) {
            let params = BreakerParams::default();
            let mut breaker = EvictionBreaker::new(params);
            let mut now = Micros(0);
            let mut passed: Vec<Micros> = Vec::new();
            for (step, running) in asks {
                now = now.saturating_add(Micros(step));
                if breaker.ask(now, Ground::Readings, running) == Verdict::Evict {
                    passed.push(now);
                    let recent = passed.iter().filter(|&&at| now.since(at) <= params.window).count();
                    let ran = running + recent - 1;
                    prop_assert!(recent <= params.always.max(ran / 2), "{recent} of {ran}");
                }
            }
        }
    }
}
