//! What a GPU does with a service and, perhaps, a job: the truth of `gpu-model`, with the launch
//! gate settled and latencies from the queueing model, remembered by what it depends on.
//!
//! The gate's law runs every 100 ms; here it is taken as settled: the gate stands where the load
//! equals its set point, or is fully open when the load stays below.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use muxflow_gpu_model::{GpuProfile, Group, Placed, Sharing, WorkloadShape, group};
use muxflow_policy::node::builtin::GpuLaws;
use muxflow_types::{MegaHertz, Percent};

use crate::latency::QueueTable;

/// Offline jobs that a simulated GPU can hold.
pub const MOST_JOBS: usize = 2;

/// What holds on a GPU until something changes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Outcome {
    /// Mean latency of the service.
    pub latency_ms: f64,
    /// Its 99th percentile.
    pub p99_ms: f64,
    /// Speed of each job against alone on this type.
    pub speeds: [f64; MOST_JOBS],
    /// Where the gate stands.
    pub gate: f64,
    /// Share of time with a kernel running.
    pub gpu_util: f64,
    /// SM activity.
    pub sm_activity: f64,
    /// SM activity that the service causes alone.
    pub online_sm_activity: f64,
    /// SM clock.
    pub clock_mhz: f64,
    /// Power.
    pub power_w: f64,
    /// Whether the service gets more than it can serve.
    pub overloaded: bool,
}

/// How a policy lets tenants share, as far as the GPU is concerned.
#[derive(Debug, Clone, PartialEq)]
pub struct Mode {
    /// Space or time.
    pub sharing: Sharing,
    /// Whether the launch gate holds the load.
    pub gated: bool,
}

#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u64(u64::from(*b));
        }
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x517c_c1b7_2722_0a95);
    }
}

/// What an outcome depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutcomeKey {
    /// Which pool (GPU type).
    pub pool: usize,
    /// Which service.
    pub service: usize,
    /// Request rate, in steps of [`RATE_STEP`].
    pub rate_step: u32,
    /// The jobs: which workload, and its SMs.
    pub jobs: [Option<(usize, u32)>; MOST_JOBS],
    /// Where the gate holds the load, in steps of [`SET_POINT_STEP`]; 0 is the common law's.
    pub set_point: u32,
}

impl OutcomeKey {
    fn packed(self) -> u64 {
        let job = |j: Option<(usize, u32)>| {
            j.map_or(0, |(w, sms)| (w as u64 + 1) << 10 | (u64::from(sms) & 0x3ff))
        };
        (self.pool as u64) << 61
            | (self.service as u64 & 0x3f) << 55
            | (u64::from(self.rate_step) & 0xfff) << 43
            | job(self.jobs[0]) << 25
            | job(self.jobs[1]) << 7
            | (u64::from(self.set_point) & 0x7f)
    }

    /// Refuses scenarios of more kinds than a key can tell apart.
    pub(crate) fn check(
        pools: usize,
        services: usize,
        workloads: usize,
        sms: u32,
    ) -> Result<(), crate::error::SimError> {
        for (field, value, most) in [
            ("GPU types", pools, 8),
            ("services", services, 64),
            ("workloads", workloads, 255),
            ("SMs", sms as usize, 1023),
        ] {
            if value > most {
                return Err(crate::error::SimError::Setting {
                    field,
                    value: value.to_string(),
                    reason: "the simulator tells apart 8 GPU types, 64 services, 255 workloads and 1023 SMs",
                });
            }
        }
        Ok(())
    }
}

/// Rates are told apart in steps of this size (1 %).
pub const RATE_STEP: f64 = 0.01;
/// Set points of the gate are told apart in steps of this size.
pub const SET_POINT_STEP: f64 = 0.01;

/// The step of a set point; never 0, which means the common one.
pub fn set_point_step(set_point: f64) -> u32 {
    u32::try_from(crate::number::index((set_point / SET_POINT_STEP).round()))
        .unwrap_or(1)
        .clamp(1, 127)
}

/// The step of a rate.
pub fn rate_step(rate: f64) -> u32 {
    if rate < 1e-3 {
        return 0;
    }
    u32::try_from(crate::number::index(((rate / 1e-3).ln() / RATE_STEP).round()))
        .unwrap_or(u32::MAX)
        + 1
}

/// The rate of a step.
pub fn rate_of(step: u32) -> f64 {
    if step == 0 { 0.0 } else { 1e-3 * (f64::from(step - 1) * RATE_STEP).exp() }
}

/// One pool as outcomes need it.
pub(crate) struct PoolTruth {
    pub(crate) profile: GpuProfile,
    pub(crate) laws: Option<GpuLaws>,
}

/// One service as outcomes need it.
pub(crate) struct ServiceTruth {
    pub(crate) shape: WorkloadShape,
    pub(crate) table: Arc<QueueTable>,
}

/// Remembers outcomes.
pub(crate) struct Outcomes {
    mode: Mode,
    pools: Vec<PoolTruth>,
    services: Vec<ServiceTruth>,
    workloads: Vec<Vec<Placed>>,
    known: HashMap<u64, Outcome, BuildHasherDefault<Mix>>,
}

impl Outcomes {
    pub(crate) fn new(
        mode: Mode,
        pools: Vec<PoolTruth>,
        services: Vec<ServiceTruth>,
        workloads: &[WorkloadShape],
    ) -> Self {
        let placed =
            pools.iter().map(|p| workloads.iter().map(|w| w.on(&p.profile)).collect()).collect();
        Outcomes { mode, pools, services, workloads: placed, known: HashMap::default() }
    }

    /// How many different ones were needed.
    pub(crate) fn distinct(&self) -> usize {
        self.known.len()
    }

    pub(crate) fn get(&mut self, key: OutcomeKey) -> Outcome {
        let packed = key.packed();
        if let Some(known) = self.known.get(&packed) {
            return *known;
        }
        let fresh = self.compute(key);
        self.known.insert(packed, fresh);
        fresh
    }

    fn compute(&self, key: OutcomeKey) -> Outcome {
        let open = self.at_gate(key, 1.0);
        let laws = match (&self.pools[key.pool].laws, key.jobs[0], self.mode.gated) {
            (Some(laws), Some(_), true) => laws,
            _ => return open,
        };
        let set_point = match key.set_point {
            0 => laws.gate.set_point,
            step => f64::from(step) * SET_POINT_STEP,
        };
        let load = |o: &Outcome| {
            let activity = Percent::clamped(o.sm_activity * 100.0).unwrap_or(Percent::FULL);
            let clock = MegaHertz(u32::try_from(crate::number::index(o.clock_mhz)).unwrap_or(0));
            laws.clock.load(activity, clock).value()
        };
        if load(&open) <= set_point {
            return open;
        }
        let (mut low, mut high) = (0.0, 1.0);
        let mut best = self.at_gate(key, 0.0);
        for _ in 0..9 {
            let middle = 0.5 * (low + high);
            let o = self.at_gate(key, middle);
            if load(&o) <= set_point {
                low = middle;
                best = o;
            } else {
                high = middle;
            }
        }
        if low < laws.gate.closed_below { self.at_gate(key, 0.0) } else { best }
    }

    fn at_gate(&self, key: OutcomeKey, gate: f64) -> Outcome {
        let pool = &self.pools[key.pool];
        let service = &self.services[key.service];
        let rate = rate_of(key.rate_step);
        let single = service.shape.on(&pool.profile);
        let job = |&(w, sms): &(usize, u32)| {
            (&self.workloads[key.pool][w], f64::from(sms) / f64::from(pool.profile.sms))
        };
        let offline: Vec<(&Placed, f64)> = key.jobs.iter().flatten().map(job).collect();
        let mut answer = service.table.at(rate * single.busy_us / 1e6);
        let mut result = None;
        for _ in 0..2 {
            let batched = service.shape.with_batch(answer.batch).on(&pool.profile);
            let p = group(
                &pool.profile,
                &self.mode.sharing,
                &Group {
                    online: Some(&batched),
                    batches_per_s: rate / answer.batch,
                    offline: &offline,
                    gate,
                },
            );
            let stretch = p.online_busy_us / batched.busy_us;
            answer = service.table.at(rate * single.busy_us / 1e6 * stretch);
            result = Some((p, stretch));
        }
        let Some((p, stretch)) = result else { return Outcome::default() };
        let unit_ms = single.busy_us / 1e3 * stretch;
        let host_ms = single.host_gap_us / 1e3;
        let alone_activity = (p.gpu.presence.first().copied().unwrap_or(0.0) / stretch
            * (service.shape.with_batch(answer.batch).sm_fill / f64::from(pool.profile.sms))
                .min(1.0))
        .min(1.0);
        let mut speeds = [0.0; MOST_JOBS];
        speeds.iter_mut().zip(&p.offline_speeds).for_each(|(to, from)| *to = *from);
        Outcome {
            latency_ms: host_ms + answer.mean * unit_ms,
            p99_ms: host_ms + answer.p99 * unit_ms,
            speeds,
            gate,
            gpu_util: p.gpu.gpu_util,
            sm_activity: p.gpu.load.sm_activity,
            online_sm_activity: alone_activity,
            clock_mhz: p.gpu.clock_ratio * f64::from(pool.profile.power.max_mhz),
            power_w: p.gpu.power_w,
            overloaded: answer.overloaded,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_survive_their_steps() {
        for rate in [0.5, 1.0, 20.0, 190.0, 5000.0] {
            assert!((rate_of(rate_step(rate)) / rate - 1.0).abs() < RATE_STEP);
        }
        assert_eq!(rate_of(rate_step(0.0)), 0.0);
    }

    #[test]
    fn keys_do_not_collide() {
        let base = OutcomeKey {
            pool: 0,
            service: 1,
            rate_step: 900,
            jobs: [Some((0, 1)), None],
            set_point: 0,
        };
        let others = [
            OutcomeKey { pool: 1, ..base },
            OutcomeKey { service: 2, ..base },
            OutcomeKey { rate_step: 901, ..base },
            OutcomeKey { jobs: [None, None], ..base },
            OutcomeKey { jobs: [Some((0, 2)), None], ..base },
            OutcomeKey { jobs: [Some((1, 1)), None], ..base },
            OutcomeKey { jobs: [Some((0, 1)), Some((0, 1))], ..base },
            OutcomeKey { set_point: 1, ..base },
        ];
        for o in others {
            assert_ne!(o.packed(), base.packed(), "{o:?}");
        }
    }
}
