//! The health of one GPU: five states (the paper's SysMonitor), driven by samples, by time and by
//! device events.
//!
//! | from | to | when |
//! | --- | --- | --- |
//! | Init | Healthy | every judged metric is Fine for `recover_after` |
//! | Init | Unhealthy | a complete, fresh sample is not Fine |
//! | Healthy | Unhealthy | a metric reaches its Unhealthy threshold, or no fresh sample for `stale_after` |
//! | Init, Healthy, Unhealthy | Overlimit | a metric passes its Overlimit threshold, and stays there for `confirm_after` unless it is memory |
//! | Unhealthy | Overlimit | no fresh sample for `lost_after` |
//! | Unhealthy | Healthy | every judged metric is Fine for `recover_after` |
//! | Overlimit | Unhealthy | its period is over, and a fresh sample is below every Overlimit threshold |
//! | any | Disabled | a device event says so |
//! | Disabled | Init | the GPU has returned |
//!
//! Reaction and eviction are two things. From the very sample that passes an Overlimit threshold,
//! offline work may not *run* ([`Permission::run`]), so the launch gate is shut at once. The
//! *eviction* waits for `confirm_after`, because one 100 ms window of full SM activity is what a
//! healthy burst of requests looks like, a shut gate already protects the service, and an eviction
//! costs the job its restart and the GPU its back-off. Memory is evicted at once: a paused job still
//! holds it.
//!
//! Bad news is believed from every possible sample, good news only from complete and fresh ones.
//! Impossible samples (see [`Thresholds::glitch`]) are dropped and count as missing, so one of them
//! does nothing, and a run of them is silence. When the clock goes back, nothing read before counts
//! as fresh any more and all waiting times start over.

mod metric;
mod params;

use std::collections::VecDeque;
use std::fmt;

use muxflow_types::{GpuSample, HealthState, Micros};

pub use metric::{Bands, BandsError, Finding, Glitch, Judgement, Level, Metric, Thresholds};
pub use params::{HealthParamError, HealthParams};

use super::fault::Fault;

/// Why a GPU is disabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisableReason {
    /// The response to this fault says so.
    Fault(Fault),
    /// An operator said so.
    Operator,
}

/// What happens to the machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum HealthEvent<'a> {
    /// A sample arrived.
    Sample(&'a GpuSample),
    /// Time passed.
    Tick,
    /// The device is unavailable.
    Disable(DisableReason),
    /// The device is back.
    Enable,
}

/// Why the state changed, as data.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Cause {
    /// This metric, at this value, against this threshold.
    Reading(Finding),
    /// Every judged metric has been Fine for so long.
    AllFine {
        /// How long.
        lasted: Micros,
    },
    /// No fresh and complete sample.
    NoFreshSample {
        /// How long.
        lasted: Micros,
        /// How long it may be.
        limit: Micros,
    },
    /// The clock went back, so nothing that was read before counts as fresh.
    ClockWentBack,
    /// The Overlimit period is over and nothing is over its limit.
    PeriodOver {
        /// How long it was.
        period: Micros,
    },
    /// A device event.
    Disabled(DisableReason),
    /// The device is back.
    Enabled,
}

/// One change of state.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transition {
    /// When.
    pub at: Micros,
    /// From.
    pub from: HealthState,
    /// To.
    pub to: HealthState,
    /// Why.
    pub cause: Cause,
    /// On entering Overlimit: how often within the window, this time included, and for how long.
    pub overlimit: Option<(usize, Micros)>,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Reading(Finding { metric, value, threshold, level }) => {
                let word = match (level, metric.low_is_bad()) {
                    (Level::Over, false) => "is over",
                    (Level::Over, true) => "is under",
                    _ => "has reached",
                };
                write!(f, "{metric} {value:.1} {word} {threshold:.1}")
            }
            Cause::AllFine { lasted } => write!(f, "all metrics fine for {lasted}"),
            Cause::NoFreshSample { lasted, limit } => {
                write!(f, "no fresh sample for {lasted}, limit {limit}")
            }
            Cause::ClockWentBack => write!(f, "the clock went back"),
            Cause::PeriodOver { period } => write!(f, "period of {period} is over"),
            Cause::Disabled(DisableReason::Fault(fault)) => write!(f, "disabled by {fault}"),
            Cause::Disabled(DisableReason::Operator) => write!(f, "disabled by an operator"),
            Cause::Enabled => write!(f, "device is back"),
        }
    }
}

impl fmt::Display for Transition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}: {}", self.from, self.to, self.cause)?;
        match self.overlimit {
            Some((entries, period)) => write!(f, "; entry {entries}, for {period}"),
            None => Ok(()),
        }
    }
}

/// What offline work may do right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permission {
    /// A new job may be placed.
    pub place: bool,
    /// The job that is here may launch kernels.
    pub run: bool,
    /// The job that is here must leave.
    pub evict: bool,
}

/// More entries than this are all served with the capped period.
const MAX_ENTRIES: usize = 256;

/// The machine of one GPU.
#[derive(Debug, Clone)]
pub struct HealthMachine {
    thresholds: Thresholds,
    params: HealthParams,
    slo: Option<Micros>,
    state: HealthState,
    last_step: Micros,
    /// Order of samples: `(refreshed_at, at)` of the newest one that was judged.
    newest: Option<(Micros, Micros)>,
    /// When the counters of the last complete sample were refreshed.
    fresh_as_of: Option<Micros>,
    /// Since when nothing complete has come, while `fresh_as_of` is empty.
    blind_since: Micros,
    /// The worst reading that no complete sample has taken back.
    finding: Option<Finding>,
    over_since: Option<Micros>,
    /// Refresh time of the first sample in the unbroken run of Fine ones.
    fine_since: Option<Micros>,
    entries: VecDeque<Micros>,
    /// Start and length of the last Overlimit period.
    hold: Option<(Micros, Micros)>,
    /// The clock went back and no complete sample has come since.
    clock_jumped: bool,
    glitches: u64,
}

impl HealthMachine {
    /// A machine in Init, which knows nothing.
    pub fn new(thresholds: Thresholds, params: HealthParams, now: Micros) -> Self {
        HealthMachine {
            thresholds,
            params,
            slo: None,
            state: HealthState::Init,
            last_step: now,
            newest: None,
            fresh_as_of: None,
            blind_since: now,
            finding: None,
            over_since: None,
            fine_since: None,
            entries: VecDeque::new(),
            hold: None,
            clock_jumped: false,
            glitches: 0,
        }
    }

    /// The present state.
    pub fn state(&self) -> HealthState {
        self.state
    }

    /// How many impossible samples were dropped.
    pub fn glitches(&self) -> u64 {
        self.glitches
    }

    /// The SLO that reported latencies are held against; zero and `None` mean that none is judged.
    pub fn set_slo(&mut self, slo: Option<Micros>) {
        self.slo = slo;
    }

    /// Takes new thresholds and times, for example from a reloaded configuration. They count from
    /// the next sample on.
    pub fn reconfigure(&mut self, thresholds: Thresholds, params: HealthParams) {
        self.thresholds = thresholds;
        self.params = params;
    }

    /// The metric over its limit that only an eviction brings back, when there is one now.
    pub fn only_eviction_helps(&self) -> Option<Finding> {
        self.finding.filter(|found| found.level == Level::Over && !found.metric.gate_helps())
    }

    /// What offline work may do at this moment. Call it with the time of now, not of the last
    /// sample: samples grow stale between events.
    pub fn permission(&self, now: Micros) -> Permission {
        let level = self.level();
        let known = now >= self.last_step && self.is_fresh(now);
        Permission {
            place: self.state.allows_placement() && known && level < Level::Unhealthy,
            run: self.state.allows_running() && known && level < Level::Over,
            evict: matches!(self.state, HealthState::Overlimit | HealthState::Disabled),
        }
    }

    /// Takes one event; at most one change of state follows.
    pub fn step(&mut self, now: Micros, event: HealthEvent<'_>) -> Option<Transition> {
        if now < self.last_step {
            self.clock_went_back(now);
        }
        self.last_step = now;
        match event {
            HealthEvent::Disable(reason) => {
                return self.change(now, HealthState::Disabled, Cause::Disabled(reason));
            }
            HealthEvent::Enable if self.state == HealthState::Disabled => {
                self.forget_readings(now);
                return self.change(now, HealthState::Init, Cause::Enabled);
            }
            HealthEvent::Sample(sample) if self.state != HealthState::Disabled => {
                self.absorb(now, sample);
            }
            HealthEvent::Sample(_) | HealthEvent::Tick | HealthEvent::Enable => {}
        }
        let (to, cause) = self.next(now)?;
        self.change(now, to, cause)
    }

    fn level(&self) -> Level {
        self.finding.map_or(Level::Fine, |finding| finding.level)
    }

    fn is_fresh(&self, now: Micros) -> bool {
        self.fresh_as_of.is_some_and(|as_of| now.since(as_of) <= self.params.stale_after)
    }

    fn forget_readings(&mut self, now: Micros) {
        self.newest = None;
        self.fresh_as_of = None;
        self.blind_since = now;
        self.fine_since = None;
        self.finding = None;
        self.over_since = None;
        self.clock_jumped = false;
    }

    /// Nothing read before counts as fresh; bad news and waiting times are kept, counted from now.
    fn clock_went_back(&mut self, now: Micros) {
        self.clock_jumped = true;
        self.newest = None;
        self.fresh_as_of = None;
        self.blind_since = now;
        self.fine_since = None;
        self.over_since = self.over_since.map(|since| since.min(now));
        self.hold = self.hold.map(|(start, period)| (start.min(now), period));
        for entry in &mut self.entries {
            *entry = (*entry).min(now);
        }
    }

    fn absorb(&mut self, now: Micros, sample: &GpuSample) {
        if self.thresholds.glitch(sample, now).is_some() {
            self.glitches += 1;
            return;
        }
        let late = |(refreshed_at, at)| sample.refreshed_at < refreshed_at || sample.at < at;
        if self.newest.is_some_and(late) {
            return;
        }
        self.newest = Some((sample.refreshed_at, sample.at));
        let Judgement { worst, missing } = self.thresholds.judge(sample, self.slo);
        let level = worst.map_or(Level::Fine, |finding| finding.level);
        if missing.is_none() {
            let gap = self.fresh_as_of.map(|as_of| sample.refreshed_at.since(as_of));
            if level > Level::Fine {
                self.fine_since = None;
            } else if gap.is_none_or(|gap| gap > self.params.stale_after) {
                self.fine_since = Some(sample.refreshed_at);
            } else {
                self.fine_since = self.fine_since.or(Some(sample.refreshed_at));
            }
            self.fresh_as_of = Some(sample.refreshed_at);
            self.clock_jumped = false;
            self.finding = worst;
        } else if level > self.level() || level == Level::Over {
            self.finding = worst;
            self.fine_since = None;
        }
        self.over_since = match self.level() {
            Level::Over => self.over_since.or(Some(now)),
            _ => None,
        };
    }

    /// The finding that evicts: over its limit, and either confirmed or not to be waited for.
    fn confirmed_over(&self, now: Micros) -> Option<Finding> {
        let finding = self.finding.filter(|finding| finding.level == Level::Over)?;
        let waited = now.since(self.over_since?) >= self.params.confirm_after;
        (waited || !finding.metric.gate_helps()).then_some(finding)
    }

    /// How long all metrics have been Fine, when that is known up to now.
    fn fine_for(&self, now: Micros) -> Option<Micros> {
        let since = self.fine_since.filter(|_| self.is_fresh(now))?;
        Some(self.fresh_as_of?.since(since))
    }

    fn hold_is_over(&self, now: Micros) -> Option<Micros> {
        match self.hold {
            None => Some(Micros::ZERO),
            Some((start, period)) => (now.since(start) >= period).then_some(period),
        }
    }

    fn next(&self, now: Micros) -> Option<(HealthState, Cause)> {
        use HealthState::{Disabled, Healthy, Init, Overlimit, Unhealthy};
        let fresh = self.is_fresh(now);
        let blind_for = now.since(self.fresh_as_of.unwrap_or(self.blind_since));
        let lost = blind_for >= self.params.lost_after;
        let over = self.confirmed_over(now).map(|finding| (Overlimit, Cause::Reading(finding)));
        let recovered = self
            .fine_for(now)
            .filter(|&lasted| lasted >= self.params.recover_after)
            .filter(|_| self.hold_is_over(now).is_some())
            .map(|lasted| (Healthy, Cause::AllFine { lasted }));
        let not_fine = |from: Level| {
            let finding = self.finding.filter(|finding| finding.level >= from);
            finding.map(|finding| (Unhealthy, Cause::Reading(finding)))
        };
        let silent = |to, limit: Micros| {
            let cause = match self.clock_jumped {
                true => Cause::ClockWentBack,
                false => Cause::NoFreshSample { lasted: blind_for, limit },
            };
            (!fresh).then_some((to, cause))
        };
        match self.state {
            Disabled => None,
            Init => over
                .or_else(|| {
                    not_fine(Level::Between).filter(|_| fresh && self.level() < Level::Over)
                })
                .or(recovered),
            Healthy => over
                .or_else(|| not_fine(Level::Unhealthy))
                .or_else(|| silent(Unhealthy, self.params.stale_after)),
            Unhealthy => over
                .or_else(|| silent(Overlimit, self.params.lost_after).filter(|_| lost))
                .or(recovered),
            Overlimit => {
                let period = self.hold_is_over(now)?;
                (fresh && self.level() < Level::Over)
                    .then_some((Unhealthy, Cause::PeriodOver { period }))
            }
        }
    }

    fn change(&mut self, now: Micros, to: HealthState, cause: Cause) -> Option<Transition> {
        let from = self.state;
        if from == to {
            return None;
        }
        self.state = to;
        if from == HealthState::Overlimit && to == HealthState::Unhealthy {
            self.hold = None;
        }
        let overlimit = (to == HealthState::Overlimit).then(|| self.enter_overlimit(now));
        Some(Transition { at: now, from, to, cause, overlimit })
    }

    fn enter_overlimit(&mut self, now: Micros) -> (usize, Micros) {
        let window = self.params.overlimit_window;
        self.entries.retain(|&entry| now.since(entry) < window);
        if self.entries.len() == MAX_ENTRIES {
            self.entries.pop_front();
        }
        self.entries.push_back(now);
        let period = self.params.period(self.entries.len());
        self.hold = Some((now, period));
        (self.entries.len(), period)
    }
}

#[cfg(test)]
mod tests;
