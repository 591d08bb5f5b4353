//! How many replicas a load needs: a pure law.
//!
//! Load is the number of requests under way at once, averaged over a few seconds. By Little's law that
//! is rate × latency, so it grows both when more is asked and when answers slow down. More replicas
//! come at once; fewer only after the load has been low enough for a while, one at a time.

use muxflow_types::Micros;

/// Bounds and times of the law.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ScaleParams {
    /// Never fewer.
    pub min: u32,
    /// Never more.
    pub max: u32,
    /// Requests under way that one replica carries well.
    pub load_per_replica: f64,
    /// The load is averaged over about this time.
    pub smooth_over: Micros,
    /// So long must the load have been low before a replica goes.
    pub calm_for: Micros,
}

/// The law's memory.
#[derive(Debug, Clone)]
pub struct Scaler {
    params: ScaleParams,
    wanted: u32,
    average: Option<f64>,
    last: Micros,
    low_since: Option<Micros>,
}

impl Scaler {
    /// Starts at the lower bound.
    pub fn new(params: ScaleParams) -> Self {
        let wanted = params.min;
        Scaler { params, wanted, average: None, last: Micros::ZERO, low_since: None }
    }

    /// Takes up where another left off with so many replicas: they stay until the load is known to be
    /// low, as after any other fall of the load.
    pub fn resume(&mut self, found: u32) {
        self.wanted = found.clamp(self.params.min, self.params.max);
    }

    /// Other bounds or times. What is known of the load stays: a service under load that is declared
    /// again needs its replicas as before.
    pub fn change(&mut self, params: ScaleParams) {
        self.params = params;
        self.wanted = self.wanted.clamp(params.min, params.max);
        self.low_since = None;
    }

    /// How many replicas are wanted.
    pub fn wanted(&self) -> u32 {
        self.wanted
    }

    /// The averaged load.
    pub fn load(&self) -> f64 {
        self.average.unwrap_or(0.0)
    }

    fn needed(&self, load: f64) -> u32 {
        let count = (load / self.params.load_per_replica).ceil().clamp(0.0, 1e6);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let count = count as u32;
        count.clamp(self.params.min, self.params.max)
    }

    /// Takes the load of this moment.
    pub fn step(&mut self, now: Micros, outstanding: u32) -> u32 {
        let outstanding = f64::from(outstanding);
        let passed = now.since(self.last).as_secs_f64();
        self.last = now;
        let weight = (passed / self.params.smooth_over.as_secs_f64().max(1e-3)).clamp(0.0, 1.0);
        let average = match self.average {
            None => outstanding,
            Some(old) => old + (outstanding - old) * weight,
        };
        self.average = Some(average);
        // A service with no replica yet has its requests wait at the front: one of them is enough.
        let awake = u32::from(outstanding > 0.0).min(self.params.max);
        let needed = self.needed(average).max(awake);
        if needed > self.wanted {
            self.wanted = needed;
            self.low_since = None;
        } else if needed < self.wanted && self.needed(average * 1.25) < self.wanted {
            let since = *self.low_since.get_or_insert(now);
            if now.since(since) >= self.params.calm_for {
                self.wanted -= 1;
                self.low_since = Some(now);
            }
        } else {
            self.low_since = None;
        }
        self.wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(min: u32, max: u32) -> ScaleParams {
        ScaleParams {
            min,
            max,
            load_per_replica: 2.0,
            smooth_over: Micros::from_secs(2),
            calm_for: Micros::from_secs(30),
        }
    }

    fn run(scaler: &mut Scaler, from_ms: u64, for_ms: u64, load: u32) -> u32 {
        for at in (from_ms..from_ms + for_ms).step_by(100) {
            scaler.step(Micros::from_millis(at), load);
        }
        scaler.wanted()
    }

    #[test]
    fn up_at_once_and_down_when_calm() {
        let mut scaler = Scaler::new(params(1, 4));
        assert_eq!(run(&mut scaler, 0, 5_000, 1), 1);
        assert_eq!(run(&mut scaler, 5_000, 10_000, 7), 4);
        assert_eq!(run(&mut scaler, 15_000, 20_000, 1), 4, "not calm for long enough");
        assert_eq!(run(&mut scaler, 35_000, 200_000, 1), 1, "one at a time to the lower bound");
    }

    #[test]
    fn new_bounds_keep_what_is_known_of_the_load() {
        let mut scaler = Scaler::new(params(1, 4));
        assert_eq!(run(&mut scaler, 0, 10_000, 7), 4);
        scaler.change(params(1, 8));
        assert_eq!(scaler.wanted(), 4, "the same load needs the same replicas");
        assert!(scaler.load() > 6.0);
        scaler.change(params(1, 3));
        assert_eq!(scaler.wanted(), 3);
        scaler.change(params(5, 8));
        assert_eq!(scaler.wanted(), 5);
    }

    #[test]
    fn what_was_found_stays_until_it_has_been_calm() {
        for (found, wanted) in [(0, 1), (3, 3), (9, 4)] {
            let mut scaler = Scaler::new(params(1, 4));
            scaler.resume(found);
            assert_eq!(scaler.wanted(), wanted);
            assert_eq!(run(&mut scaler, 1_000, 29_000, 0), wanted, "nobody has asked yet");
            assert_eq!(run(&mut scaler, 30_000, 200_000, 0), 1);
        }
    }

    #[test]
    fn nobody_asks_nobody_runs_where_that_is_allowed() {
        let mut scaler = Scaler::new(params(0, 2));
        assert_eq!(run(&mut scaler, 0, 1_000, 0), 0);
        assert_eq!(scaler.step(Micros::from_millis(1_100), 1), 1);
    }

    proptest! {
        #[test]
        fn bounds_hold_and_it_settles(min in 0u32..4, more in 0u32..5, loads in proptest::collection::vec(0u32..200, 1..100), last in 0u32..20) {
            let max = (min + more).max(1);
            let mut scaler = Scaler::new(params(min, max));
            let mut at = 0;
            for load in loads {
                at += 500;
                let wanted = scaler.step(Micros::from_millis(at), load);
                prop_assert!((min..=max).contains(&wanted));
            }
            // Under a steady load it comes to rest where the load is carried.
            run(&mut scaler, at, 600_000, last);
            let rest = scaler.wanted();
            prop_assert!(f64::from(rest) * 2.0 >= f64::from(last) || rest == max);
            prop_assert_eq!(run(&mut scaler, at + 600_000, 60_000, last), rest);
        }
    }
}
