//! The law of the launch gate: from GPU load to how many kernels may pass.
//!
//! A PID controller in its incremental form. The proportional and derivative parts act on the
//! measured load and only the integral part on the distance to the set point, so changing the set
//! point or a gain never makes the budget jump. The budget itself is the integrator and is held
//! between 0 and 1, so nothing winds up. On top of the PID:
//! - it opens no faster than a stated rate, and closes as fast as the PID says;
//! - a load at or over `shut_at` closes it at once, whatever the history;
//! - while nothing may run ([`LaunchGate::hold`]) it is closed and gathers nothing;
//! - without a fresh reading it closes at a stated rate. Absent, repeated and late readings are no
//!   readings: they neither integrate nor keep the gate open;
//!   a repeated refresh can still shut it.
//!
//! When the clock goes backwards, all that was read before counts as absent.

use muxflow_types::Micros;

use super::load::GpuLoad;

/// Loads beyond this are as bad as this: keeps wild readings from overflowing.
const LOAD_CEILING: f64 = 10.0;

/// Parameters of the gate's law.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GateParams {
    /// The load to hold.
    pub set_point: f64,
    /// Budget taken back for each unit of load that is added.
    pub proportional: f64,
    /// Budget moved for each unit of load off the set point, per second.
    pub integral_per_s: f64,
    /// Budget taken back for each unit per second of load slope that is added.
    pub derivative_s: f64,
    /// The budget rises by at most this in a second.
    pub open_rate_per_s: f64,
    /// A load from which the gate shuts at once.
    pub shut_at: f64,
    /// A budget below this counts as closed: a trickle of launches costs more than it brings.
    pub closed_below: f64,
    /// A reading older than this no longer counts.
    pub stale_after: Micros,
    /// Without a fresh reading, an open gate closes over this time.
    pub close_over: Micros,
    /// Bound on work in flight when the gate is fully open.
    pub max_in_flight: u32,
    /// No more than this much work may be in flight, however long its kernels are.
    pub queue_for: Micros,
}

impl Default for GateParams {
    /// Tuned for counters that refresh every 100 ms and a load that follows within 0.2 s; the tests
    /// of this module show how far from that it stays stable.
    fn default() -> Self {
        GateParams {
            set_point: 0.6,
            proportional: 0.4,
            integral_per_s: 2.0,
            derivative_s: 0.01,
            open_rate_per_s: 0.5,
            shut_at: 1.0,
            closed_below: 0.02,
            stale_after: Micros::from_millis(500),
            close_over: Micros::from_millis(500),
            max_in_flight: 256,
            queue_for: Micros::from_millis(10),
        }
    }
}

/// A gate parameter that makes no sense.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{field} is {value}; it must be {bound}")]
pub struct GateParamError {
    /// Which one.
    pub field: &'static str,
    /// What was given.
    pub value: f64,
    /// What is allowed.
    pub bound: &'static str,
}

impl GateParams {
    /// Refuses parameters under which the law would not be a law.
    pub fn check(self) -> Result<Self, GateParamError> {
        let within = |value: f64, low: f64, high: f64| (low..=high).contains(&value);
        let rules = [
            ("set_point", self.set_point, within(self.set_point, 0.01, 2.0), "between 0.01 and 2"),
            ("proportional", self.proportional, within(self.proportional, 0.0, 10.0), "0 to 10"),
            (
                "integral_per_s",
                self.integral_per_s,
                within(self.integral_per_s, 0.001, 100.0),
                "between 0.001 and 100: without it the load never reaches the set point",
            ),
            ("derivative_s", self.derivative_s, within(self.derivative_s, 0.0, 1.0), "0 to 1"),
            (
                "open_rate_per_s",
                self.open_rate_per_s,
                within(self.open_rate_per_s, 0.001, 1000.0),
                "between 0.001 and 1000",
            ),
            (
                "shut_at",
                self.shut_at,
                within(self.shut_at, 0.0, LOAD_CEILING) && self.shut_at > self.set_point,
                "above set_point and at most 10",
            ),
            (
                "closed_below",
                self.closed_below,
                within(self.closed_below, 0.0, 0.5),
                "between 0 and 0.5",
            ),
            (
                "stale_after_ms",
                self.stale_after.as_secs_f64() * 1e3,
                within(self.stale_after.as_secs_f64(), 0.001, 60.0),
                "between 1 and 60000",
            ),
            (
                "close_over_ms",
                self.close_over.as_secs_f64() * 1e3,
                within(self.close_over.as_secs_f64(), 0.001, 60.0),
                "between 1 and 60000",
            ),
            (
                "max_in_flight",
                f64::from(self.max_in_flight),
                within(f64::from(self.max_in_flight), 1.0, 65536.0),
                "between 1 and 65536",
            ),
            (
                "queue_for_ms",
                self.queue_for.as_secs_f64() * 1e3,
                within(self.queue_for.as_secs_f64(), 0.001, 1.0),
                "between 1 and 1000",
            ),
        ];
        match rules.into_iter().find(|(_, _, good, _)| !good) {
            Some((field, value, _, bound)) => Err(GateParamError { field, value, bound }),
            None => Ok(self),
        }
    }
}

/// What the agent writes into the control block and the interposer applies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LaunchBudget {
    /// How much of the time launches may pass: 0 to 1.
    pub fraction: f64,
    /// How many launches may be under way at once.
    pub max_in_flight: u32,
    /// No launch may pass.
    pub closed: bool,
}

impl LaunchBudget {
    /// Nothing passes.
    pub const CLOSED: LaunchBudget = LaunchBudget { fraction: 0.0, max_in_flight: 0, closed: true };
}

/// One load, with the time at which its counters were refreshed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadReading {
    /// When the hardware refreshed the slowest counter behind the load.
    pub refreshed_at: Micros,
    /// The load.
    pub load: GpuLoad,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    refreshed_at: Micros,
    load: f64,
    slope_per_s: f64,
}

/// The gate of one GPU.
#[derive(Debug, Clone)]
pub struct LaunchGate {
    params: GateParams,
    fraction: f64,
    seen: Option<Seen>,
    last_step: Option<Micros>,
}

impl LaunchGate {
    /// A gate that is closed until a reading has come.
    pub fn new(params: GateParams) -> Self {
        LaunchGate { params, fraction: 0.0, seen: None, last_step: None }
    }

    /// The parameters in force.
    pub fn params(&self) -> &GateParams {
        &self.params
    }

    /// Changes set point and gains; the budget goes on from where it is.
    pub fn retune(&mut self, params: GateParams) {
        self.params = params;
    }

    /// Closes the gate, for example because the job was stopped; it opens again from zero.
    pub fn shut(&mut self) {
        self.fraction = 0.0;
    }

    /// A turn of the loop in which nothing may pass: health does not let offline work run, or no job
    /// is here. The gate follows the load all the same, but gathers nothing: it opens again from
    /// zero, at its opening rate, and not from what an idle GPU would have added up.
    pub fn hold(&mut self, now: Micros, reading: Option<LoadReading>) -> LaunchBudget {
        self.step(now, reading);
        self.shut();
        LaunchBudget::CLOSED
    }

    /// One turn of the agent's loop, with a reading if there is one. Call it also without, so that
    /// silence closes the gate; call [`LaunchGate::hold`] instead while nothing may run.
    pub fn step(&mut self, now: Micros, reading: Option<LoadReading>) -> LaunchBudget {
        if self.last_step.is_some_and(|last| now < last) {
            self.seen = None;
        }
        let since_last_step = now.since(self.last_step.unwrap_or(now));
        self.last_step = Some(now);
        if let Some(reading) = reading.filter(|r| r.refreshed_at <= now) {
            self.take(reading);
        }
        let fresh = |seen: &Seen| now.since(seen.refreshed_at) <= self.params.stale_after;
        if !self.seen.as_ref().is_some_and(fresh) {
            let closing = since_last_step.as_secs_f64() / self.params.close_over.as_secs_f64();
            self.fraction = (self.fraction - closing).max(0.0);
        }
        self.budget()
    }

    /// What holds now.
    pub fn budget(&self) -> LaunchBudget {
        if self.fraction <= 0.0 || self.fraction < self.params.closed_below {
            return LaunchBudget::CLOSED;
        }
        let in_flight = (self.fraction * f64::from(self.params.max_in_flight)).ceil();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "between 1 and max_in_flight, a u32"
        )]
        let max_in_flight = (in_flight as u32).max(1);
        LaunchBudget { fraction: self.fraction, max_in_flight, closed: false }
    }

    fn take(&mut self, reading: LoadReading) {
        let p = &self.params;
        let load = reading.load.value().min(LOAD_CEILING);
        let Some(last) = self.seen else {
            self.seen = Some(Seen { refreshed_at: reading.refreshed_at, load, slope_per_s: 0.0 });
            if load >= p.shut_at {
                self.fraction = 0.0;
            }
            return;
        };
        if reading.refreshed_at < last.refreshed_at {
            return;
        }
        if reading.refreshed_at == last.refreshed_at {
            // The slowest counter is the same, a faster one may have moved: alarming news count.
            if load >= p.shut_at {
                self.fraction = 0.0;
            }
            return;
        }
        let gap = reading.refreshed_at.since(last.refreshed_at);
        let gap_s = gap.as_secs_f64();
        let slope_per_s = (load - last.load) / gap_s.max(0.01);
        self.seen = Some(Seen { refreshed_at: reading.refreshed_at, load, slope_per_s });
        if load >= p.shut_at {
            self.fraction = 0.0;
            return;
        }
        // After a gap the time in between was not observed; integrate only what may count.
        let dt_s = gap_s.min(p.stale_after.as_secs_f64());
        let change = p.integral_per_s * (p.set_point - load) * dt_s
            - p.proportional * (load - last.load)
            - p.derivative_s * (slope_per_s - last.slope_per_s);
        self.fraction = (self.fraction + change.min(p.open_rate_per_s * dt_s)).clamp(0.0, 1.0);
    }
}

#[cfg(test)]
#[path = "gate_tests.rs"]
mod tests;
