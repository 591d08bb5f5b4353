//! Whose activity is it? Under MPS the counters show the GPU as a whole, and the share that may be lent
//! depends on the service alone.
//!
//! The interposer knows how busy the offline work kept the GPU, as far as that can be told from
//! outside the kernels. Short windows with the gate closed show the service alone. Comparing the two
//! sides of such a window tells by which factor the interposer's figure is off; between windows, the
//! service is the total less the corrected offline part. Each side is averaged: one refresh of a
//! counter holds a handful of the service's requests, by chance some more or some fewer. How far
//! predictions of such averages have been off is kept and reported with each estimate.
//!
//! While nothing has been compared yet, or not for long, the whole activity counts as the service's:
//! that lends too little, never too much. A closed window shows the service undisturbed, so its
//! slow-down by the offline work is not part of the figure; the latency in the health machine is.

use std::collections::VecDeque;

use muxflow_types::{Micros, Percent};

/// How the two are told apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SplitParams {
    /// Close the gate for a look this often.
    pub look_every: Micros,
    /// For this long: the work in flight must end and a counter must be refreshed twice.
    pub look_for: Micros,
    /// A comparison counts only between windows this close to each other.
    pub pair_within: Micros,
    /// Comparisons older than this no longer count.
    pub forget_after: Micros,
    /// Weight of the newest comparison.
    pub weight: f64,
}

impl Default for SplitParams {
    /// 300 ms in 15 s: two per cent of the offline work's time.
    fn default() -> Self {
        SplitParams {
            look_every: Micros::from_secs(15),
            look_for: Micros::from_millis(300),
            pair_within: Micros::from_secs(2),
            forget_after: Micros::from_secs(120),
            weight: 0.15,
        }
    }
}

/// A parameter of the split that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} must be {bound}")]
pub struct SplitParamError {
    /// Which one.
    pub field: &'static str,
    /// What is allowed.
    pub bound: &'static str,
}

impl SplitParams {
    /// Refuses looks that never end or never count.
    pub fn check(self) -> Result<Self, SplitParamError> {
        let rules = [
            ("look_for_ms", self.look_for.0 > 0, "positive"),
            (
                "look_every_ms",
                self.look_every.0 >= self.look_for.0.saturating_mul(10),
                "at least ten times look_for_ms, or looking costs more than a tenth",
            ),
            ("pair_within_ms", self.pair_within >= self.look_for, "at least look_for_ms"),
            (
                "forget_after_ms",
                self.forget_after > self.look_every,
                "longer than look_every_ms, or each look is forgotten before the next",
            ),
            ("weight", self.weight > 0.0 && self.weight <= 1.0, "above 0 and at most 1"),
        ];
        match rules.into_iter().find(|(_, good, _)| !good) {
            Some((field, _, bound)) => Err(SplitParamError { field, bound }),
            None => Ok(self),
        }
    }
}

/// Comparisons before the correction is trusted.
const NEEDED: u32 = 3;
/// Offline activity below this says nothing about the factor.
const LEAST_OFFLINE: f64 = 0.03;
/// The reported error is this many standard deviations, and more while few comparisons tell them.
const DEVIATIONS: f64 = 2.0;
/// Windows that a side of a comparison is averaged over, at most.
const MOST_WINDOWS: usize = 64;

/// One refresh of the activity counter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActivityWindow {
    /// When it ended.
    pub at: Micros,
    /// SM activity of the whole GPU.
    pub total: Percent,
    /// SM activity of the offline work by the interposer's count: busy time × its share of the SMs.
    pub offline: Percent,
    /// The gate was closed and nothing was in flight during the whole window.
    pub gate_closed: bool,
}

/// What the figure of the service rests on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitBasis {
    /// The service ran alone in this window.
    Alone,
    /// The total less the corrected offline part.
    Corrected,
    /// No comparison yet: all of it counts as the service's.
    Unknown,
}

/// The service's part.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnlineActivity {
    /// SM activity of the service.
    pub activity: Percent,
    /// It may be off by this much, in points; about nineteen times in twenty it is not.
    pub error_points: f64,
    /// What it rests on.
    pub basis: SplitBasis,
}

/// Tells the service's activity from the whole, on one GPU with one offline job.
#[derive(Debug, Clone)]
pub struct ActivitySplit {
    params: SplitParams,
    /// True offline activity for each unit of the interposer's figure.
    factor: f64,
    /// Mean square of what predictions of later comparisons were off by.
    variance: f64,
    compared: u32,
    last_look: Option<Micros>,
    last_at: Option<Micros>,
    /// Open windows before the look that comes next, oldest first.
    open: VecDeque<ActivityWindow>,
    /// Closed windows of the look that goes on.
    closed: VecDeque<ActivityWindow>,
}

/// Mean total and mean offline activity, as fractions.
fn means(windows: &VecDeque<ActivityWindow>) -> Option<(f64, f64)> {
    let count = f64::from(u32::try_from(windows.len()).ok().filter(|count| *count > 0)?);
    let sum = |of: fn(&ActivityWindow) -> Percent| -> f64 {
        windows.iter().map(|window| of(window).fraction()).sum()
    };
    Some((sum(|window| window.total) / count, sum(|window| window.offline) / count))
}

impl ActivitySplit {
    /// Knows nothing yet; make a new one for each job.
    pub fn new(params: SplitParams) -> Self {
        ActivitySplit {
            params,
            factor: 1.0,
            variance: 0.0,
            compared: 0,
            last_look: None,
            last_at: None,
            open: VecDeque::new(),
            closed: VecDeque::new(),
        }
    }

    /// For how long the gate should be closed now, when it is time for a look.
    pub fn wants_look(&self, now: Micros) -> Option<Micros> {
        // The first looks come faster, so that a job is not taken for the service for a minute.
        let every = match self.compared {
            0..NEEDED => Micros(self.params.look_every.0 / 10),
            _ => self.params.look_every,
        };
        let due = self.last_look.is_none_or(|last| now < last || now.since(last) >= every);
        due.then_some(self.params.look_for)
    }

    /// Takes one refresh of the counter. Repeated and late ones change nothing.
    pub fn observe(&mut self, window: ActivityWindow) -> OnlineActivity {
        let new = self.last_at.is_none_or(|last| window.at > last);
        if new {
            self.last_at = Some(window.at);
        }
        if window.gate_closed {
            if new {
                self.last_look = Some(window.at);
                // A gate that stays shut for other reasons is no longer look.
                let began = self.closed.front().map_or(window.at, |first| first.at);
                if window.at.since(began) <= self.params.pair_within {
                    keep(&mut self.closed, window);
                }
            }
            return OnlineActivity {
                activity: window.total,
                error_points: 0.0,
                basis: SplitBasis::Alone,
            };
        }
        if new {
            if !self.closed.is_empty() {
                self.compare();
            }
            keep(&mut self.open, window);
        }
        self.estimate(window)
    }

    /// One comparison for each look: its closed windows against the open ones before it.
    fn compare(&mut self) {
        let mut open = std::mem::take(&mut self.open);
        let closed = std::mem::take(&mut self.closed);
        let Some(began) = closed.front().map(|window| window.at) else { return };
        open.retain(|window| began.since(window.at) <= self.params.pair_within);
        let (Some((total, offline)), Some((alone, _))) = (means(&open), means(&closed)) else {
            return;
        };
        if offline < LEAST_OFFLINE {
            return;
        }
        let truth = (total - alone).max(0.0);
        let off_by = truth - self.factor * offline;
        let seen = (truth / offline).min(4.0);
        // Means at first, so that the first comparison does not weigh for ever. It was compared with
        // nothing, so it says nothing of the error.
        let weight_after = |count: u32| self.params.weight.max(1.0 / f64::from(count + 1));
        let (of_factor, of_error) =
            (weight_after(self.compared), weight_after(self.compared.saturating_sub(1)));
        if self.compared > 0 {
            self.variance += of_error * (off_by * off_by - self.variance);
        }
        self.factor += of_factor * (seen - self.factor);
        self.compared = self.compared.saturating_add(1);
    }

    fn estimate(&self, open: ActivityWindow) -> OnlineActivity {
        let recent = self
            .last_look
            .is_some_and(|look| open.at >= look && open.at.since(look) <= self.params.forget_after);
        if self.compared < NEEDED || !recent {
            return OnlineActivity {
                activity: open.total,
                error_points: open.total.value(),
                basis: SplitBasis::Unknown,
            };
        }
        let offline = self.factor * open.offline.value();
        let activity = Percent::clamped(open.total.value() - offline).unwrap_or(open.total);
        let deviations = DEVIATIONS + 2.0 / f64::from(self.compared - 1);
        // The service's part is at least nothing and at most the whole.
        let furthest = activity.value().max(open.total.value() - activity.value());
        let error_points = (deviations * self.variance.sqrt() * 100.0).min(furthest);
        OnlineActivity { activity, error_points, basis: SplitBasis::Corrected }
    }
}

fn keep(windows: &mut VecDeque<ActivityWindow>, window: ActivityWindow) {
    if windows.len() == MOST_WINDOWS {
        windows.pop_front();
    }
    windows.push_back(window);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pct(v: f64) -> Percent {
        Percent::clamped(v).unwrap()
    }

    struct Noise(u64);

    impl Noise {
        /// Between -1 and 1.
        fn next(&mut self) -> f64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            f64::from(u32::try_from(self.0 >> 33).unwrap()) / f64::from(1u32 << 30) - 1.0
        }
    }

    /// Plays ten minutes of a service beside a job whose activity is `factor` times what the
    /// interposer counts; gives the mean error, the share within the reported error, and the mean
    /// error of trusting the count as it is.
    fn play(factor: f64, jitter: f64) -> (f64, f64, f64) {
        let mut split = ActivitySplit::new(SplitParams::default());
        let mut noise = Noise(5);
        let (mut ours, mut plain, mut within, mut scored) = (0.0, 0.0, 0.0, 0.0);
        let mut closed_until = 0;
        for step in 0..6_000u64 {
            let now_ms = step * 100;
            let online = 25.0 + 10.0 * (now_ms as f64 / 60_000.0).sin() + jitter * noise.next();
            let counted = 30.0 + 10.0 * (now_ms as f64 / 7_000.0).sin();
            let now = Micros::from_millis(now_ms);
            if let Some(lasting) = split.wants_look(now).filter(|_| now_ms >= closed_until) {
                closed_until = now_ms + lasting.0 / 1000;
            }
            // The window is clean once the work in flight has ended, 100 ms into the look.
            let look = now_ms < closed_until;
            let clean = look && now_ms + 300 >= closed_until + 100;
            let offline = if look { 0.0 } else { counted };
            let window = ActivityWindow {
                at: now,
                total: pct(online + factor * offline),
                offline: pct(offline),
                gate_closed: clean,
            };
            if look && !clean {
                continue;
            }
            let estimate = split.observe(window);
            if estimate.basis == SplitBasis::Corrected && now_ms > 60_000 {
                let error = (estimate.activity.value() - online).abs();
                ours += error;
                plain += (pct(online + factor * offline).value() - offline - online).abs();
                within += if error <= estimate.error_points { 1.0 } else { 0.0 };
                scored += 1.0;
            }
        }
        assert!(scored > 4_000.0, "{scored}");
        (ours / scored, within / scored, plain / scored)
    }

    #[test]
    fn looks_correct_the_count_and_the_reported_error_holds() {
        println!("factor jitter | mean error  within reported | uncorrected");
        for factor in [0.6, 1.0, 1.5] {
            for jitter in [1.0, 4.0] {
                let (error, within, plain) = play(factor, jitter);
                println!("{factor:6} {jitter:6} | {error:10.2} {within:16.3} | {plain:.2}");
                assert!(error <= 1.0 + jitter, "factor {factor} jitter {jitter}: {error}");
                assert!(within >= 0.9, "factor {factor} jitter {jitter}: {within}");
                if factor != 1.0 {
                    assert!(error < plain / 2.0, "{error} against {plain} uncorrected");
                }
            }
        }
    }

    #[test]
    fn everything_is_the_services_until_compared_and_after_forgetting() {
        let mut split = ActivitySplit::new(SplitParams::default());
        let at = |ms| Micros::from_millis(ms);
        let open = |ms| ActivityWindow {
            at: at(ms),
            total: pct(70.0),
            offline: pct(40.0),
            gate_closed: false,
        };
        let closed = |ms| ActivityWindow {
            at: at(ms),
            total: pct(20.0),
            offline: pct(0.0),
            gate_closed: true,
        };
        let first = split.observe(open(0));
        assert_eq!((first.activity, first.basis), (pct(70.0), SplitBasis::Unknown));
        assert_eq!(first.error_points, 70.0);
        for look in 1..=3 {
            split.observe(open(look * 1000));
            let alone = split.observe(closed(look * 1000 + 200));
            assert_eq!((alone.activity, alone.basis), (pct(20.0), SplitBasis::Alone));
        }
        let known = split.observe(open(4_000));
        assert_eq!(known.basis, SplitBasis::Corrected);
        assert!((known.activity.value() - 20.0).abs() < 1e-9, "{known:?}");
        assert_eq!(split.observe(open(3_200 + 120_001)).basis, SplitBasis::Unknown, "forgotten");
    }

    #[test]
    fn repeated_and_late_windows_change_nothing() {
        let mut split = ActivitySplit::new(SplitParams::default());
        let at = |ms| Micros::from_millis(ms);
        let mut twin = split.clone();
        for (ms, gate_closed) in
            [(100, false), (300, true), (400, false), (600, true), (700, false), (900, true)]
        {
            let total = if gate_closed { pct(20.0) } else { pct(60.0) };
            let offline = if gate_closed { pct(0.0) } else { pct(20.0) };
            let window = ActivityWindow { at: at(ms), total, offline, gate_closed };
            split.observe(window);
            for _ in 0..3 {
                twin.observe(window);
                twin.observe(ActivityWindow { at: at(50), total: pct(99.0), ..window });
            }
        }
        let probe = ActivityWindow {
            at: at(1_000),
            total: pct(60.0),
            offline: pct(20.0),
            gate_closed: false,
        };
        assert_eq!(split.observe(probe), twin.observe(probe));
    }

    proptest! {
        #[test]
        fn never_beyond_the_total(
            feed in proptest::collection::vec((0u64..10_000, 0.0f64..=100.0, 0.0f64..=100.0, any::<bool>()), 1..100),
        ) {
            let mut split = ActivitySplit::new(SplitParams::default());
            for (ms, total, offline, gate_closed) in feed {
                let window = ActivityWindow { at: Micros::from_millis(ms), total: pct(total), offline: pct(offline), gate_closed };
                let online = split.observe(window);
                prop_assert!(online.activity <= window.total);
                let furthest = online.activity.value().max(total - online.activity.value());
                prop_assert!((0.0..=furthest).contains(&online.error_points), "{online:?} of {total}");
            }
        }
    }
}
