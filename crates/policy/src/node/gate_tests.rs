//! The gate against a simulated plant, and against readings that are not what they should be.

use super::*;
use proptest::prelude::*;

fn reading(at_ms: u64, load: f64) -> Option<LoadReading> {
    Some(LoadReading {
        refreshed_at: Micros::from_millis(at_ms),
        load: GpuLoad::new(load).unwrap(),
    })
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(ms)
}

/// A GPU whose load follows `online + gain × budget` with a lag, seen through a counter that is
/// refreshed every 100 ms with the mean of the last 100 ms and delivered late.
struct Plant {
    gain: f64,
    lag_s: f64,
    late_ms: u64,
    load: f64,
    window: Vec<f64>,
    counters: Vec<(u64, f64)>,
}

impl Plant {
    const STEP_MS: u64 = 5;
    const REFRESH_MS: u64 = 100;

    fn new(gain: f64, lag_s: f64, late_ms: u64) -> Self {
        Plant { gain, lag_s, late_ms, load: 0.0, window: Vec::new(), counters: Vec::new() }
    }

    /// Runs the gate against the plant; gives (ms, true load, budget) at each step.
    fn run(
        &mut self,
        gate: &mut LaunchGate,
        until_ms: u64,
        online: impl Fn(u64) -> f64,
        set_point: impl Fn(u64) -> f64,
    ) -> Vec<(u64, f64, f64)> {
        let mut trace = Vec::new();
        for now in (0..until_ms / Self::STEP_MS).map(|step| step * Self::STEP_MS) {
            gate.retune(GateParams { set_point: set_point(now), ..*gate.params() });
            let seen = self.counters.iter().rev().find(|(at, _)| at + self.late_ms <= now);
            let budget = gate.step(ms(now), seen.and_then(|&(at, load)| reading(at, load)));
            let target = online(now) + self.gain * budget.fraction;
            let dt = Self::STEP_MS as f64 / 1e3;
            self.load += (target - self.load) * (dt / self.lag_s).min(1.0);
            self.window.push(self.load);
            if now % Self::REFRESH_MS == 0 && now > 0 {
                let mean = self.window.iter().sum::<f64>() / self.window.len() as f64;
                self.counters.push((now, mean));
                self.window.clear();
            }
            trace.push((now, self.load, budget.fraction));
        }
        trace
    }
}

/// The last moment at which the load is further than `band` from `target`.
fn settled_after(trace: &[(u64, f64, f64)], from_ms: u64, target: f64, band: f64) -> u64 {
    trace
        .iter()
        .filter(|(at, load, _)| *at >= from_ms && (load - target).abs() > band)
        .map(|(at, _, _)| at - from_ms)
        .next_back()
        .unwrap_or(0)
}

#[test]
fn settles_on_the_set_point_of_very_different_jobs() {
    let p = GateParams::default();
    println!("gain  lag_ms late_ms | settle_ms overshoot");
    for (gain, lag_s, late_ms) in [
        (0.5, 0.05, 0),
        (0.8, 0.05, 20),
        (0.8, 0.2, 100),
        (1.0, 0.1, 50),
        (1.5, 0.1, 50),
        (2.0, 0.05, 20),
        (2.5, 0.1, 100),
    ] {
        let mut gate = LaunchGate::new(p);
        let trace = Plant::new(gain, lag_s, late_ms).run(&mut gate, 20_000, |_| 0.2, |_| 0.6);
        let settle = settled_after(&trace, 0, 0.6, 0.05);
        let peak = trace.iter().map(|t| t.1).fold(0.0, f64::max);
        println!("{gain:4} {:6} {late_ms:7} | {settle:9} {:.3}", lag_s * 1e3, peak - 0.6);
        assert!(settle <= 3_000, "gain {gain} lag {lag_s} late {late_ms}: settles in {settle} ms");
        assert!(peak <= 0.6 * 1.05, "gain {gain} lag {lag_s} late {late_ms}: peak {peak}");
    }
}

#[test]
fn a_burst_of_the_service_is_given_room_promptly() {
    let p = GateParams::default();
    let mut gate = LaunchGate::new(p);
    let online = |now: u64| if now < 10_000 { 0.2 } else { 0.5 };
    let trace = Plant::new(1.0, 0.05, 20).run(&mut gate, 20_000, online, |_| 0.6);
    let settle = settled_after(&trace, 10_000, 0.6, 0.05);
    assert!(settle <= 1_500, "back at the set point after {settle} ms");
    // A burst that fills the GPU shuts the gate with the first counter that shows it.
    let mut gate = LaunchGate::new(p);
    let online = |now: u64| if now < 10_000 { 0.2 } else { 0.9 };
    let trace = Plant::new(1.0, 0.05, 20).run(&mut gate, 12_000, online, |_| 0.6);
    let shut = trace.iter().find(|t| t.0 >= 10_000 && t.2 == 0.0).unwrap().0 - 10_000;
    assert!(shut <= 225, "shut after {shut} ms: two refreshes and the delivery");
    assert!(trace.iter().filter(|t| t.0 > 10_500).all(|t| t.2 == 0.0), "and stays shut");
}

#[test]
fn saturation_leaves_nothing_to_unwind() {
    // A job that cannot reach the set point keeps the gate fully open for a minute; when the
    // service then comes, the gate must close as promptly as after a second.
    let run = |burst_at: u64| {
        let mut gate = LaunchGate::new(GateParams::default());
        let online = move |now: u64| if now < burst_at { 0.1 } else { 0.7 };
        let trace = Plant::new(0.2, 0.05, 20).run(&mut gate, burst_at + 5_000, online, |_| 0.6);
        assert_eq!(trace.iter().find(|t| t.0 == burst_at - 5).unwrap().2, 1.0, "fully open");
        trace.iter().find(|t| t.0 >= burst_at && t.2 < 0.5).unwrap().0 - burst_at
    };
    assert_eq!(run(5_000), run(60_000));
    assert!(run(60_000) <= 2_500);
}

#[test]
fn a_new_set_point_or_gain_does_not_make_the_budget_jump() {
    let mut gate = LaunchGate::new(GateParams::default());
    let mut plant = Plant::new(1.0, 0.05, 20);
    plant.run(&mut gate, 10_000, |_| 0.2, |_| 0.6);
    let before = gate.budget().fraction;
    assert!(before > 0.3);
    for params in [
        GateParams { set_point: 0.3, ..*gate.params() },
        GateParams { proportional: 5.0, integral_per_s: 10.0, ..*gate.params() },
        GateParams { derivative_s: 0.5, ..*gate.params() },
    ] {
        let mut gate = gate.clone();
        gate.retune(params);
        assert_eq!(gate.budget().fraction, before);
        // The next reading moves it by what one refresh may integrate, not by the new gains.
        let next = gate.step(ms(10_000), reading(10_000, 0.6)).fraction;
        let most = params.integral_per_s * (params.set_point - 0.6f64).abs() * 0.1 + 0.05;
        assert!((next - before).abs() <= most, "{before} -> {next}, at most {most}");
    }
    let mut gate = LaunchGate::new(GateParams::default());
    let trace = Plant::new(1.0, 0.05, 20).run(
        &mut gate,
        20_000,
        |_| 0.2,
        |now| if now < 10_000 { 0.6 } else { 0.4 },
    );
    assert!(settled_after(&trace, 10_000, 0.4, 0.03) <= 3_000);
}

#[test]
fn repeated_and_late_readings_do_not_integrate() {
    let mut gate = LaunchGate::new(GateParams::default());
    gate.step(ms(0), reading(0, 0.1));
    let once = gate.step(ms(100), reading(100, 0.1));
    assert!(!once.closed);
    for now in 101..200 {
        assert_eq!(gate.step(ms(now), reading(100, 0.1)), once, "the same refresh again");
        assert_eq!(gate.step(ms(now), reading(100, 0.9)), once, "even with another load");
        assert_eq!(gate.step(ms(now), reading(50, 0.0)), once, "older than what is known");
        assert_eq!(gate.step(ms(now), reading(now + 1, 0.0)), once, "from the future");
        assert_eq!(gate.step(ms(now), None), once);
    }
    assert!(gate.step(ms(200), reading(200, 0.1)).fraction > once.fraction);
    let alarm = gate.step(ms(201), reading(200, 1.0));
    assert_eq!(alarm, LaunchBudget::CLOSED, "a faster counter of the same refresh may shut it");
}

#[test]
fn silence_closes_the_gate_at_the_stated_rate() {
    let p = GateParams::default();
    let mut gate = LaunchGate::new(p);
    for t in (0..10_000).step_by(100) {
        gate.step(ms(t), reading(t, 0.1));
    }
    assert_eq!(gate.budget(), LaunchBudget { fraction: 1.0, max_in_flight: 256, closed: false });
    let last = 9_900;
    assert_eq!(gate.step(ms(last + 500), None).fraction, 1.0, "not stale yet");
    let half = gate.step(ms(last + 750), None).fraction;
    assert!((half - 0.5).abs() < 1e-9, "{half}");
    assert_eq!(gate.step(ms(last + 1_000), None), LaunchBudget::CLOSED);
    // A repeated value is silence too.
    assert_eq!(gate.step(ms(last + 1_100), reading(last, 0.1)), LaunchBudget::CLOSED);
}

#[test]
fn a_clock_that_goes_back_counts_as_silence() {
    let mut gate = LaunchGate::new(GateParams::default());
    for t in (50_000..60_000).step_by(100) {
        gate.step(ms(t), reading(t, 0.1));
    }
    assert_eq!(gate.step(ms(1_000), None).fraction, 1.0, "no time has passed yet");
    assert_eq!(gate.step(ms(1_500), None), LaunchBudget::CLOSED, "old readings do not look fresh");
    gate.step(ms(1_600), reading(1_600, 0.1));
    assert!(!gate.step(ms(1_700), reading(1_700, 0.1)).closed, "and it works in the new time");
}

#[test]
fn closed_until_the_first_reading() {
    let mut gate = LaunchGate::new(GateParams::default());
    assert_eq!(gate.step(ms(0), None), LaunchBudget::CLOSED);
}

#[test]
fn a_gate_that_health_holds_shut_gathers_nothing() {
    let p = GateParams::default();
    let mut gate = LaunchGate::new(p);
    for t in (0..60_000).step_by(100) {
        assert_eq!(gate.hold(ms(t), reading(t, 0.1)), LaunchBudget::CLOSED);
    }
    let first = gate.step(ms(60_000), reading(60_000, 0.1)).fraction;
    assert!(
        first <= p.open_rate_per_s * 0.1 + 1e-9,
        "opens from zero, not from a minute's sum: {first}"
    );
    assert_eq!(gate.hold(ms(60_050), None), LaunchBudget::CLOSED, "and shuts at once");
}

#[test]
fn bad_parameters_are_refused_by_name() {
    let good = GateParams::default();
    assert!(good.check().is_ok());
    for (bad, field) in [
        (GateParams { set_point: 0.0, ..good }, "set_point"),
        (GateParams { set_point: f64::NAN, ..good }, "set_point"),
        (GateParams { integral_per_s: 0.0, ..good }, "integral_per_s"),
        (GateParams { proportional: -1.0, ..good }, "proportional"),
        (GateParams { shut_at: 0.5, ..good }, "shut_at"),
        (GateParams { close_over: Micros(0), ..good }, "close_over_ms"),
        (GateParams { max_in_flight: 0, ..good }, "max_in_flight"),
    ] {
        assert_eq!(bad.check().unwrap_err().field, field);
    }
}

proptest! {
    #[test]
    fn no_sequence_of_readings_breaks_the_budget(
        steps in proptest::collection::vec((0u64..5_000, -2_000i64..2_000, 0.0f64..1e12, any::<bool>()), 1..200),
    ) {
        let p = GateParams::default();
        let mut gate = LaunchGate::new(p);
        let mut newest: Option<(u64, f64)> = None;
        let mut last_now = 0;
        for (now, offset, load, silent) in steps {
            let at = now.saturating_add_signed(offset);
            if now < last_now {
                newest = None;
            }
            last_now = now;
            let before = gate.budget();
            let given = if silent { None } else { reading(at, load) };
            if let Some(r) = given && at <= now && newest.is_none_or(|(n, _)| at > n) {
                newest = Some((at, r.load.value()));
            }
            let budget = gate.step(ms(now), given);
            prop_assert!((0.0..=1.0).contains(&budget.fraction));
            prop_assert_eq!(budget.closed, budget.fraction == 0.0);
            prop_assert_eq!(budget.closed, budget.max_in_flight == 0);
            prop_assert!(budget.max_in_flight <= p.max_in_flight);
            match newest {
                Some((at, load)) if now - at <= 500 => {
                    if load >= p.shut_at {
                        prop_assert!(budget.closed, "open at load {load}");
                    }
                }
                // Nothing fresh: never opens further.
                _ => prop_assert!(budget.fraction <= before.fraction.max(p.closed_below)),
            }
        }
    }
}
