//! The laws of a node joined as an agent joins them, on a simulated GPU whose counters refresh every
//! 100 ms: what happens to the offline work, and how soon, when the service wants its GPU back.

#![expect(clippy::unwrap_used, reason = "a test fails loudly")]

use muxflow_policy::node::builtin::{GpuLaws, laws_of};
use muxflow_policy::node::gate::{LaunchBudget, LaunchGate, LoadReading};
use muxflow_policy::node::health::{HealthEvent, HealthMachine, HealthParams};
use muxflow_types::{Bytes, GpuSample, GpuType, HealthState, MegaHertz, Micros, Percent};

const POLL_MS: u64 = 20;
const REFRESH_MS: u64 = 100;

/// One moment of the run.
#[derive(Debug, Clone, Copy)]
struct Moment {
    at_ms: u64,
    state: HealthState,
    budget: LaunchBudget,
    activity: f64,
}

struct Node {
    laws: GpuLaws,
    health: HealthMachine,
    gate: LaunchGate,
    evicted: bool,
}

impl Node {
    fn new() -> Self {
        let laws = laws_of(&GpuType::new("T4").unwrap()).unwrap();
        let health =
            HealthMachine::new(laws.thresholds.clone(), HealthParams::default(), Micros::ZERO);
        Node { health, gate: LaunchGate::new(laws.gate), laws, evicted: false }
    }

    /// Runs against a service of this activity (0 to 1) beside a job that could fill the GPU.
    fn run(&mut self, until_ms: u64, online: impl Fn(u64) -> f64) -> Vec<Moment> {
        let mut moments = Vec::new();
        let mut window = Vec::new();
        let mut sample = GpuSample::empty(Micros::ZERO);
        let mut budget = LaunchBudget::CLOSED;
        for at_ms in (0..until_ms / POLL_MS).map(|step| step * POLL_MS) {
            let now = Micros::from_millis(at_ms);
            let offline = if self.evicted { 0.0 } else { budget.fraction };
            let activity = (online(at_ms) + offline).min(1.0);
            window.push(activity);
            if at_ms % REFRESH_MS == 0 {
                let mean = window.iter().sum::<f64>() / window.len() as f64;
                window.clear();
                sample = reading(now, mean);
            }
            sample.at = now;
            self.health.step(now, HealthEvent::Sample(&sample));
            let permission = self.health.permission(now);
            self.evicted = (self.evicted || permission.evict) && !permission.place;
            let load = self.laws.clock.load_of(&sample);
            let load = load.map(|load| LoadReading { refreshed_at: sample.refreshed_at, load });
            budget = match permission.run && !self.evicted {
                true => self.gate.step(now, load),
                false => self.gate.hold(now, load),
            };
            moments.push(Moment { at_ms, state: self.health.state(), budget, activity });
        }
        moments
    }
}

/// A T4 whose clock falls from its highest to 1000 MHz as its SMs fill.
fn reading(now: Micros, activity: f64) -> GpuSample {
    let clock = 1590.0 - 590.0 * ((activity - 0.6) / 0.4).clamp(0.0, 1.0);
    let mhz = (0..=1590u32).rev().find(|&m| f64::from(m) <= clock).unwrap_or(0);
    GpuSample {
        gpu_util: Some(Percent::FULL),
        sm_activity: Percent::clamped(activity * 100.0),
        sm_clock: Some(MegaHertz(mhz)),
        memory_used: Some(Bytes::from_gib(10)),
        memory_total: Some(Bytes::from_gib(15)),
        ..GpuSample::empty(now)
    }
}

fn after(moments: &[Moment], from_ms: u64, what: impl Fn(&Moment) -> bool) -> u64 {
    moments.iter().find(|m| m.at_ms >= from_ms && what(m)).unwrap().at_ms - from_ms
}

#[test]
fn a_quiet_service_is_filled_up_and_stays_healthy() {
    let moments = Node::new().run(30_000, |_| 0.2);
    let settled: Vec<_> = moments.iter().filter(|m| m.at_ms > 10_000).collect();
    assert!(settled.iter().all(|m| m.state == HealthState::Healthy && !m.budget.closed));
    let mean = settled.iter().map(|m| m.activity).sum::<f64>() / settled.len() as f64;
    assert!((0.6..0.8).contains(&mean), "the GPU is filled to {mean}");
}

#[test]
fn a_burst_that_fills_the_gpu_stops_the_job_at_once_and_then_evicts_it() {
    let burst = |at| if (20_000..30_000).contains(&at) { 1.0 } else { 0.2 };
    let moments = Node::new().run(70_000, burst);
    let held = after(&moments, 20_000, |m| m.budget.closed);
    let evicted = after(&moments, 20_000, |m| m.state == HealthState::Overlimit);
    println!("full burst: launches stop after {held} ms, eviction after {evicted} ms");
    assert!(held <= 2 * REFRESH_MS, "held after {held} ms");
    assert!(evicted <= 2 * REFRESH_MS + 400, "evicted after {evicted} ms");
    let closed_until = 20_000 + evicted + 30_000;
    let during = |m: &&Moment| m.at_ms >= 20_000 + held && m.at_ms < closed_until;
    assert!(moments.iter().filter(during).all(|m| m.budget.closed), "for the whole period");
    assert_eq!(moments.last().unwrap().state, HealthState::Healthy, "and it recovers");
}

#[test]
fn a_burst_that_leaves_room_slows_the_job_and_keeps_it() {
    let burst = |at| if (20_000..30_000).contains(&at) { 0.55 } else { 0.2 };
    let mut node = Node::new();
    let moments = node.run(40_000, burst);
    assert!(moments.iter().all(|m| m.state != HealthState::Overlimit) && !node.evicted);
    let room = after(&moments, 20_000, |m| m.activity < 0.9);
    println!("part burst: the service has room after {room} ms");
    assert!(room <= 300, "room after {room} ms");
    let mut late = moments.iter().filter(|m| (25_000..30_000).contains(&m.at_ms));
    assert!(late.all(|m| m.activity < 0.8), "the load is held during the burst");
    assert_eq!(moments.last().unwrap().state, HealthState::Healthy);
}
