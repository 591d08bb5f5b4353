//! A circuit breaker against mass eviction: bad sensor data must not empty a machine.
//!
//! One GPU over its limit is news about that GPU. Many at the same moment are more often a broken
//! sensor, a driver that hangs, or a clock that jumped. When more than the allowed share of the
//! running jobs would be evicted within a window, the breaker opens: evictions by *readings* are held
//! back (launch gates stay shut, so the services are protected all the same) until a calm period or an
//! operator closes it. Evictions for certain reasons (an XID, a lost device, the manager's order)
//! are never held back, and neither are those for memory: a shut gate gives none back.

use std::collections::{BTreeSet, VecDeque};

use muxflow_types::{JobId, Micros};

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
    /// Who runs and is not being stopped. A guest that was told to leave runs until it is gone.
    running: BTreeSet<JobId>,
    evicted: VecDeque<(Micros, JobId)>,
    last_asked: Option<Micros>,
    believed_until: Option<Micros>,
    open: bool,
}

impl EvictionBreaker {
    /// Closed: evictions pass.
    pub fn new(params: BreakerParams) -> Self {
        EvictionBreaker {
            params,
            running: BTreeSet::new(),
            evicted: VecDeque::new(),
            last_asked: None,
            believed_until: None,
            open: false,
        }
    }

    /// A job runs.
    pub fn came(&mut self, job: JobId) {
        self.running.insert(job);
    }

    /// A job is being stopped, or is gone.
    pub fn left(&mut self, job: &JobId) {
        self.running.remove(job);
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

    /// Asks to evict a job.
    pub fn ask(&mut self, now: Micros, ground: Ground, job: &JobId) -> Verdict {
        if self.open && self.last_asked.is_some_and(|last| now.since(last) >= self.params.calm_for)
        {
            self.close();
        }
        if ground != Ground::Readings || self.believed_until.is_some_and(|until| now <= until) {
            return Verdict::Evict;
        }
        self.last_asked = Some(now);
        while self.evicted.front().is_some_and(|(at, _)| now.since(*at) > self.params.window) {
            self.evicted.pop_front();
        }
        if self.open {
            return Verdict::Hold { opened: false };
        }
        // What ran at the start of the window: what runs now and what was evicted since.
        let gone: BTreeSet<&JobId> = self.evicted.iter().map(|(_, job)| job).collect();
        let ran =
            self.running.len() + gone.iter().filter(|job| !self.running.contains(job)).count();
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
        self.evicted.push_back((now, job.clone()));
        Verdict::Evict
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(number: usize) -> JobId {
        JobId::new(&format!("job-{number}")).unwrap()
    }

    fn with(jobs: usize) -> EvictionBreaker {
        let mut breaker = EvictionBreaker::new(BreakerParams::default());
        (0..jobs).for_each(|number| breaker.came(job(number)));
        breaker
    }

    /// Jobs are gone soon after they were told to leave, guests much later: a wave is held all the same.
    #[test]
    fn a_few_pass_and_a_wave_is_held() {
        for leaves_at_once in [true, false] {
            let mut breaker = with(8);
            let now = Micros::from_secs(1);
            let mut ask = |number| {
                let verdict = breaker.ask(now, Ground::Readings, &job(number));
                if verdict == Verdict::Evict && leaves_at_once {
                    breaker.left(&job(number));
                }
                verdict
            };
            let verdicts: Vec<Verdict> = (0..8).map(&mut ask).collect();
            assert_eq!(verdicts[..4], [Verdict::Evict; 4]);
            assert_eq!(verdicts[4], Verdict::Hold { opened: true });
            assert_eq!(verdicts[5..], [Verdict::Hold { opened: false }; 3]);
            let certain = breaker.ask(now, Ground::Certain, &job(5));
            assert_eq!(certain, Verdict::Evict, "an XID is certain");
            let later = Micros::from_secs(200);
            assert_eq!(breaker.ask(later, Ground::Readings, &job(6)), Verdict::Evict, "calm");
            assert!(!breaker.is_open());
        }
    }

    #[test]
    fn who_has_looked_closes_it() {
        let mut breaker = with(8);
        let now = Micros::from_secs(1);
        let ask = |breaker: &mut EvictionBreaker, at| breaker.ask(at, Ground::Readings, &job(0));
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
        let mut breaker = with(1);
        assert_eq!(breaker.ask(Micros(1), Ground::Readings, &job(0)), Verdict::Evict);
        assert_eq!(breaker.ask(Micros(2), Ground::Readings, &job(0)), Verdict::Evict);
    }

    proptest! {
        #[test]
        fn no_window_sees_more_than_the_share(
            jobs in 1usize..50,
            asks in proptest::collection::vec((0u64..5_000_000, 0usize..50, any::<bool>()), 1..200),
        ) {
            let params = BreakerParams::default();
            let mut breaker = with(jobs);
            let mut now = Micros(0);
            let mut passed: Vec<Micros> = Vec::new();
            for (step, number, leaves_at_once) in asks {
                now = now.saturating_add(Micros(step));
                let asked = job(number % jobs);
                if breaker.ask(now, Ground::Readings, &asked) == Verdict::Evict {
                    passed.push(now);
                    let recent = passed.iter().filter(|&&at| now.since(at) <= params.window).count();
                    prop_assert!(recent <= params.always.max(jobs / 2), "{recent} of {jobs}");
                    if leaves_at_once {
                        breaker.left(&asked);
                    }
                }
            }
        }
    }
}
