//! The fast loop: samples in, laws of `policy` asked, control block written. It calls no driver and waits
//! for nobody: it reads memory, and of the job's processes whether they live.
//!
//! It runs on its own beat and not on that of the sensors: when these fall silent, the laws must see
//! time pass. From the moment a sample is published to the moment its consequence stands in the
//! control block passes at most one tick and the time of one turn; both are measured.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Limits};
use muxflow_policy::node::builtin::GpuLaws;
use muxflow_policy::node::fault::Fault;
use muxflow_policy::node::forecast::{ActivityForecaster, ForecastParams};
use muxflow_policy::node::gate::{LaunchBudget, LaunchGate, LoadReading};
use muxflow_policy::node::health::{
    DisableReason, HealthEvent, HealthMachine, HealthParams, Transition,
};
use muxflow_policy::node::quota::QuotaParams;
use muxflow_policy::node::rate::{LaunchLimits, UNLIMITED};
use muxflow_policy::node::share::ShareParams;
use muxflow_policy::node::split::{ActivitySplit, ActivityWindow, OnlineActivity, SplitParams};
use muxflow_types::{Bytes, GpuSample, HealthState, JobId, Micros, Percent, SmCount};
use serde::Deserialize;

use super::{ActiveJob, Event, GpuShared, Order, eviction};
use crate::breaker::Ground;
use crate::control_block::JobCounts;
use crate::monitor::{self, Published, SensorFailure};

/// Everything that the laws of one GPU need.
#[derive(Debug, Clone)]
pub struct ControlParams {
    /// What depends on its type.
    pub laws: GpuLaws,
    /// Times of the health machine.
    pub health: HealthParams,
    /// Telling online from offline use.
    pub split: SplitParams,
    /// Forecasts of what the service needs.
    pub forecast: ForecastParams,
    /// How much is lent.
    pub share: ShareParams,
    /// How much memory is lent.
    pub quota: QuotaParams,
    /// What the service's latency is held against.
    pub slo: Option<Micros>,
    /// At most this much offline work may wait in front of the service.
    pub queue_for: Micros,
    /// The beat of the loop.
    pub tick: Duration,
    /// Defences that are switched off, for experiments only.
    pub defences: Defences,
}

/// What protects the service. All on, except in experiments that show what each is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Defences {
    /// The launch gate follows the load.
    pub gate: bool,
    /// Offline work is evicted on Overlimit.
    pub eviction: bool,
    /// Offline memory is capped.
    pub quota: bool,
    /// Work in flight ends before a process does.
    pub clean_stop: bool,
    /// Errors are answered.
    pub error_response: bool,
    /// A job with a process on the GPU that the interposer does not hold is stopped.
    pub ungated_stop: bool,
    /// Jobs leave a host that is short of memory.
    pub host_eviction: bool,
}

impl Default for Defences {
    fn default() -> Self {
        Defences {
            gate: true,
            eviction: true,
            quota: true,
            clean_stop: true,
            error_response: true,
            ungated_stop: true,
            host_eviction: true,
        }
    }
}

/// What the slow loop tells the fast one.
#[derive(Debug, Clone)]
pub enum HealthOrder {
    /// The device is unavailable.
    Disable(DisableReason),
    /// The device is back.
    Enable,
}

/// What a kernel is taken to last where the interposer could not measure it.
const ASSUMED_KERNEL_NS: u64 = 1_000_000;

/// What one turn came to.
#[derive(Debug)]
pub struct Turn {
    /// The state changed.
    pub transition: Option<Transition>,
    /// The job must leave.
    pub evict: bool,
    /// What the job may launch.
    pub budget: LaunchBudget,
    /// The driver no longer finds the device.
    pub device_lost: bool,
    /// When the sample was taken that this turn acted upon; none when it had no new one.
    pub new_sample: Option<Micros>,
}

/// The laws of one GPU, joined.
#[derive(Debug)]
pub struct ControlLoop {
    params: ControlParams,
    health: HealthMachine,
    gate: LaunchGate,
    forecaster: ActivityForecaster,
    split: ActivitySplit,
    /// Whom the gate let through last: for another one it opens from zero.
    gate_of: Option<JobId>,
    /// Whose activity is told apart, and whether the interposer knows how long its kernels take.
    split_of: Option<(JobId, bool)>,
    last_count: u64,
    last_refresh: Micros,
    last_launches: u64,
    look_until: Option<Micros>,
    /// From when to when the last look was to be.
    last_look: Option<(Micros, Micros)>,
    /// The job has launched since the last look: without that there is nothing to tell apart.
    launched: bool,
    /// Since when the gate has been closed with nothing in flight.
    quiet_since: Option<Micros>,
    online: Option<OnlineActivity>,
    load: Option<f64>,
    newest: Option<GpuSample>,
}

impl ControlLoop {
    /// Knows nothing yet: closed and Init.
    pub fn new(params: ControlParams, now: Micros) -> Self {
        let mut health = HealthMachine::new(params.laws.thresholds.clone(), params.health, now);
        health.set_slo(params.slo);
        ControlLoop {
            health,
            gate: LaunchGate::new(params.laws.gate),
            forecaster: ActivityForecaster::new(params.forecast, params.share.coverage),
            split: ActivitySplit::new(params.split),
            gate_of: None,
            split_of: None,
            last_count: 0,
            last_refresh: Micros::ZERO,
            last_launches: 0,
            look_until: None,
            last_look: None,
            launched: false,
            quiet_since: None,
            online: None,
            load: None,
            newest: None,
            params,
        }
    }

    /// The present state of health.
    pub fn state(&self) -> HealthState {
        self.health.state()
    }

    /// What an eviction rests on now. Readings may lie, and a job held at its gate harms nobody; but
    /// the memory that it holds comes back only when it goes.
    pub fn eviction_ground(&self) -> Ground {
        if self.health.only_eviction_helps().is_some() {
            return Ground::Memory;
        }
        let certain = self.health.state() == HealthState::Disabled;
        if certain { Ground::Certain } else { Ground::Readings }
    }

    /// What the service's latency is held against from now on.
    pub fn set_slo(&mut self, slo: Option<Micros>) {
        self.health.set_slo(slo);
    }

    /// The slow loop says that the device is gone or back.
    pub fn order(&mut self, now: Micros, order: HealthOrder) -> Option<Transition> {
        let event = match order {
            HealthOrder::Disable(reason) => HealthEvent::Disable(reason),
            HealthOrder::Enable => HealthEvent::Enable,
        };
        self.gate.shut();
        self.health.step(now, event)
    }

    /// One turn. Writes the decision into the job's control block before it returns.
    pub fn turn(
        &mut self,
        now: Micros,
        seen: &Published,
        latency: Option<Micros>,
        job: Option<&ActiveJob>,
    ) -> Turn {
        let fresh = seen.sample.filter(|_| seen.count != self.last_count);
        self.last_count = seen.count;
        let sample = fresh.map(|sample| GpuSample { online_latency: latency, ..sample });
        let transition = match &sample {
            Some(sample) => self.health.step(now, HealthEvent::Sample(sample)),
            None => self.health.step(now, HealthEvent::Tick),
        };
        // What cannot be is dropped whole: it neither keeps the gate open nor teaches anything.
        let sample = sample.filter(|s| self.params.laws.thresholds.glitch(s, now).is_none());
        let counts = job.map(|job| job.block.counts());
        if let Some(sample) = sample {
            self.newest = Some(sample);
            self.split_activity(sample, job, counts);
        }
        let permission = self.health.permission(now);
        let budget = self.budget(now, sample, permission.run, job.map(|job| &job.job));
        let device_lost = matches!(&seen.failure, Some((_, SensorFailure::DeviceLost)));
        if let Some(job) = job {
            self.write(now, job, counts.unwrap_or_default(), budget, device_lost);
        }
        let evict = permission.evict
            && (self.params.defences.eviction || self.health.state() == HealthState::Disabled);
        Turn { transition, evict, budget, device_lost, new_sample: fresh.map(|sample| sample.at) }
    }

    fn budget(
        &mut self,
        now: Micros,
        sample: Option<GpuSample>,
        may_run: bool,
        job: Option<&JobId>,
    ) -> LaunchBudget {
        let reading = sample.and_then(|sample| {
            let load = self.params.laws.clock.load_of(&sample)?;
            self.load = Some(load.value());
            Some(LoadReading { refreshed_at: sample.refreshed_at, load })
        });
        if !self.params.defences.gate {
            let max_in_flight = self.params.laws.gate.max_in_flight;
            return LaunchBudget { fraction: 1.0, max_in_flight, closed: false };
        }
        if self.gate_of.as_ref() != job {
            self.gate.shut();
            self.gate_of = job.cloned();
        }
        if !may_run || job.is_none() {
            return self.gate.hold(now, reading);
        }
        self.gate.step(now, reading)
    }

    fn write(
        &mut self,
        now: Micros,
        job: &ActiveJob,
        counts: JobCounts,
        budget: LaunchBudget,
        device_lost: bool,
    ) {
        job.block.beat();
        if job.stopping.load(Ordering::Acquire) {
            return;
        }
        let mut limits = LaunchLimits::new(budget, counts.ns_per_launch, self.params.queue_for);
        if !self.params.defences.gate {
            limits = LaunchLimits {
                closed: false,
                rate_milli_per_s: UNLIMITED,
                burst: 1 << 20,
                in_flight: 1 << 20,
            };
        }
        let looking = self.look(now, limits.closed);
        if limits.closed || looking || device_lost {
            job.block.steer_gate(Gate::Closed);
            if counts.in_flight == 0 {
                self.quiet_since.get_or_insert(now);
            }
            return;
        }
        self.quiet_since = None;
        job.block.set_limits(&Limits {
            rate_milli_per_s: limits.rate_milli_per_s,
            burst: limits.burst,
            in_flight: limits.in_flight,
        });
        job.block.steer_gate(Gate::Open);
    }

    /// Closes the gate for a moment, now and then, to see the service alone.
    fn look(&mut self, now: Micros, closed_anyway: bool) -> bool {
        if !self.params.defences.gate {
            return false;
        }
        if self.look_until.is_some_and(|until| now >= until) {
            self.look_until = None;
        }
        if self.look_until.is_none()
            && !closed_anyway
            && self.launched
            && let Some(length) = self.split.wants_look(now)
        {
            let until = now.saturating_add(length);
            (self.look_until, self.last_look) = (Some(until), Some((now, until)));
            self.launched = false;
        }
        self.look_until.is_some()
    }

    fn split_activity(
        &mut self,
        sample: GpuSample,
        job: Option<&ActiveJob>,
        counts: Option<JobCounts>,
    ) {
        if sample.refreshed_at <= self.last_refresh {
            return;
        }
        let window = sample.refreshed_at.since(self.last_refresh);
        let began = self.last_refresh;
        self.last_refresh = sample.refreshed_at;
        let Some(total) = sample.sm_activity else { return };
        // What was compared with a guess says nothing once the interposer has measured.
        let of = job.map(|job| job.job.clone());
        let of = of.zip(counts.map(|counts| counts.ns_per_launch > 0));
        if self.split_of != of {
            self.split = ActivitySplit::new(self.params.split);
            self.split_of = of;
            self.last_launches = counts.map_or(0, |counts| counts.launches);
            self.look_until = None;
        }
        let offline = match (job, counts) {
            (Some(job), Some(counts)) => {
                let launches = counts.launches.saturating_sub(self.last_launches);
                self.last_launches = counts.launches;
                self.launched |= launches > 0;
                offline_activity(launches, counts.ns_per_launch, window, job)
            }
            _ => Percent::ZERO,
        };
        let gate_closed = job.is_none() || self.quiet_since.is_some_and(|since| since <= began);
        let at = sample.refreshed_at;
        let has_look = |(from, to): (Micros, Micros)| from < at && to > began;
        if !gate_closed && self.last_look.is_some_and(has_look) {
            // Neither the service alone nor both of them: it says nothing.
            return;
        }
        let online = self.split.observe(ActivityWindow { at, total, offline, gate_closed });
        self.forecaster.observe(at, online.activity);
        self.online = Some(online);
    }

    /// Brings the status up to date.
    pub fn describe(&self, now: Micros, shared: &GpuShared, turn: &Turn, seen: &Published) {
        let permission = self.health.permission(now);
        let demand = self.forecaster.demand(now).activity;
        let sms = SmCount(shared.sms.load(Ordering::Relaxed));
        let job = shared.job();
        let counts = job.as_ref().map(|job| job.block.counts());
        let offline_bytes = Bytes(counts.map_or(0, |counts| counts.charged_bytes));
        let quota = self.newest.and_then(|sample| {
            let online = sample.memory_used?.saturating_sub(offline_bytes);
            Some(self.params.quota.beside(sample.memory_total?, online))
        });
        let mut status = shared.status();
        status.health = self.health.state();
        status.glitches = self.health.glitches();
        let host_calm = shared.host_calm.load(Ordering::Acquire);
        let free = job.is_none() && !status.unsettled && status.outside.is_empty();
        status.placeable = permission.place && host_calm && free;
        status.share = self.params.share.share(demand, sms).ok().filter(|share| share.sms().0 > 0);
        status.quota = quota.unwrap_or(Bytes::ZERO);
        status.budget = turn.budget.fraction;
        status.load = self.load;
        status.online_activity = self.online.map(|o| (o.activity, o.error_points));
        status.demand = Some(demand);
        status.source = seen.source;
        status.counter_age = self.newest.map_or(now, |sample| now.since(sample.refreshed_at));
        status.offline = job.as_ref().map(|job| job.job.clone()).zip(counts);
        if let Some(transition) = turn.transition {
            *status.transitions.entry(transition.to).or_default() += 1;
        }
        if let Some(taken_at) = turn.new_sample {
            status.reaction = monitor::now().since(taken_at);
            status.reaction_max = status.reaction_max.max(status.reaction);
        }
    }
}

/// The interposer counts kernels and knows how long one takes once its pipe was full. For a job that
/// waits for each kernel it never is; its kernels are then taken to last so long, and the looks at
/// the service alone tell by how much that is wrong.
fn offline_activity(launches: u64, kernel_ns: u64, window: Micros, job: &ActiveJob) -> Percent {
    if window.0 == 0 {
        return Percent::ZERO;
    }
    let kernel_ns = if kernel_ns == 0 { ASSUMED_KERNEL_NS } else { kernel_ns };
    #[expect(clippy::cast_precision_loss, reason = "a share of a second")]
    let busy = launches.saturating_mul(kernel_ns) as f64 / (window.0 as f64 * 1e3);
    let share = job.share.percent().value();
    Percent::clamped(busy.min(1.0) * share).unwrap_or(Percent::ZERO)
}

/// Runs the loop until `stop`; the thread of one GPU.
pub fn run(
    shared: &Arc<GpuShared>,
    params: ControlParams,
    orders: &Receiver<HealthOrder>,
    to_slow: &Sender<Order>,
    tell: &Sender<(String, Event)>,
    stop: &AtomicBool,
) {
    let (tick, slo_by_law) = (params.tick, params.slo);
    let uuid = shared.facts.uuid.clone();
    let mut laws = ControlLoop::new(params, monitor::now());
    let mut lost_told = false;
    let mut insisted = None;
    let mut next = Instant::now();
    while !stop.load(Ordering::Acquire) {
        // The clock after the sample: a thread that was held up in between would take it for one that
        // comes from the future.
        let seen = shared.monitor.published();
        let now = monitor::now();
        for order in orders.try_iter() {
            if let Some(transition) = laws.order(now, order) {
                announce(&uuid, shared, tell, transition);
            }
        }
        let latency = Some(shared.latency_us.load(Ordering::Relaxed)).filter(|us| *us > 0);
        let slo = Some(shared.slo_us.load(Ordering::Relaxed)).filter(|us| *us > 0);
        laws.set_slo(slo.map(Micros).or(slo_by_law));
        let job = shared.job();
        let turn = laws.turn(now, &seen, latency.map(Micros), job.as_deref());
        if let Some(transition) = turn.transition {
            tell_transition(&uuid, tell, transition);
        }
        if turn.device_lost && !lost_told {
            let seen = super::FaultSeen { at: now, fault: Fault::DeviceLost, pid: None };
            drop(to_slow.send(Order::Fault(seen)));
        }
        lost_told = turn.device_lost;
        if turn.evict {
            let (ground, state) = (laws.eviction_ground(), laws.state());
            if let Some(order) = eviction::ask(ground, state, job.as_deref(), &mut insisted) {
                drop(to_slow.send(order));
            }
        } else {
            insisted = None;
        }
        laws.describe(now, shared, &turn, &seen);
        next += tick;
        let current = Instant::now();
        next = next.max(current);
        std::thread::sleep(next.saturating_duration_since(current));
    }
}

fn announce(
    uuid: &str,
    shared: &GpuShared,
    tell: &Sender<(String, Event)>,
    transition: Transition,
) {
    *shared.status().transitions.entry(transition.to).or_default() += 1;
    tell_transition(uuid, tell, transition);
}

fn tell_transition(uuid: &str, tell: &Sender<(String, Event)>, transition: Transition) {
    tracing::info!(
        gpu = uuid,
        from = %transition.from,
        to = %transition.to,
        cause = %transition.cause,
        "health changed"
    );
    drop(tell.send((uuid.to_owned(), Event::Health(transition))));
}

#[cfg(test)]
#[path = "control_tests.rs"]
mod tests;
