//! The forecaster on synthetic days, on gaps and on nonsense. Real request rates are in
//! `tests/servegen.rs`.

use super::*;
use proptest::prelude::*;

const SLOT_S: u64 = 300;

/// Deterministic noise: roughly normal, mean 0, standard deviation 1.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        (0..12)
            .map(|_| {
                self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                f64::from(u32::try_from(self.0 >> 33).unwrap()) / f64::from(1u32 << 31)
            })
            .sum::<f64>()
            - 6.0
    }
}

/// A service with a day and a night, some noise that lasts for minutes, and rare bursts.
fn diurnal(slots: u64, noise: f64, seed: u64) -> Vec<f64> {
    let mut random = Noise(seed);
    let mut drift = 0.0;
    (0..slots)
        .map(|slot| {
            let phase = (slot % 288) as f64 / 288.0 * std::f64::consts::TAU;
            drift = 0.8 * drift + noise * random.next();
            let burst = if random.next() > 2.8 { 0.15 } else { 0.0 };
            (0.3 - 0.2 * phase.cos() + drift + burst).clamp(0.0, 1.0)
        })
        .collect()
}

struct Outcome {
    covered: f64,
    lent: f64,
}

/// Plays a trace through the forecaster; scores from `skip` on.
fn run(trace: &[f64], coverage: f64, skip: usize) -> Outcome {
    let mut forecaster = ActivityForecaster::new(ForecastParams::default(), coverage);
    let (mut covered, mut lent, mut scored) = (0.0, 0.0, 0.0);
    for (slot, &value) in trace.iter().enumerate() {
        let at = Micros::from_secs(slot as u64 * SLOT_S);
        let demand = forecaster.demand(at);
        if slot >= skip {
            assert_eq!(demand.basis, Basis::Errors);
            scored += 1.0;
            lent += demand.activity.complement().fraction();
            covered += if value <= demand.activity.fraction() + 1e-9 { 1.0 } else { 0.0 };
        }
        forecaster.observe(at, Percent::from_fraction(value).unwrap());
    }
    Outcome { covered: covered / scored, lent: lent / scored }
}

/// The same for `last value + margin`.
fn naive(trace: &[f64], margin: f64, skip: usize) -> Outcome {
    let scored = &trace[skip..];
    let bounds = trace[skip - 1..].iter().map(|last| (last + margin).min(1.0));
    let both = scored.iter().zip(bounds);
    let covered = both.clone().filter(|(value, bound)| **value <= bound + 1e-9).count();
    let lent = both.map(|(_, bound)| 1.0 - bound).sum::<f64>();
    let n = scored.len() as f64;
    Outcome { covered: covered as f64 / n, lent: lent / n }
}

#[test]
fn the_bound_holds_as_often_as_asked() {
    println!(
        "noise coverage | covered  lent | last value + the margin that would have covered as much: lent"
    );
    for noise in [0.005, 0.02, 0.05] {
        for coverage in [0.8, 0.9, 0.95, 0.99] {
            let trace = diurnal(288 * 14, noise, 7);
            let ours = run(&trace, coverage, 288 * 2);
            let margin = (0..1000).map(|m| f64::from(m) / 1000.0);
            let equal =
                margin.map(|m| naive(&trace, m, 288 * 2)).find(|n| n.covered >= ours.covered);
            let equal = equal.unwrap();
            println!(
                "{noise:5} {coverage:8} | {:.4} {:.3} | {:.3}",
                ours.covered, ours.lent, equal.lent
            );
            assert!(
                (ours.covered - coverage).abs() <= 0.015,
                "{noise} {coverage}: {}",
                ours.covered
            );
        }
    }
}

#[test]
fn coverage_survives_a_service_that_changes_its_ways() {
    // Calm for a week, then three times the noise and a higher level.
    let mut trace = diurnal(288 * 7, 0.01, 3);
    trace.extend(diurnal(288 * 7, 0.04, 4).iter().map(|v| (v + 0.2).min(1.0)));
    let after = run(&trace, 0.95, 288 * 7);
    assert!((after.covered - 0.95).abs() <= 0.02, "{}", after.covered);
}

#[test]
fn a_higher_coverage_lends_less() {
    let trace = diurnal(288 * 10, 0.03, 11);
    let lent: Vec<f64> = [0.5, 0.8, 0.95, 0.99].map(|c| run(&trace, c, 600).lent).to_vec();
    assert!(lent.windows(2).all(|pair| pair[0] > pair[1]), "{lent:?}");
}

#[test]
fn without_a_record_it_is_careful() {
    let mut f = ActivityForecaster::new(ForecastParams::default(), 0.95);
    assert_eq!(f.demand(Micros::ZERO), Demand { activity: Percent::FULL, basis: Basis::Nothing });
    f.observe(Micros::ZERO, Percent::new(30.0).unwrap());
    let seen = f.demand(Micros::ZERO);
    assert_eq!(seen.basis, Basis::Peak);
    assert!((seen.activity.value() - 30.0).abs() < 1e-9);
    for slot in 1..10 {
        f.observe(Micros::from_secs(slot * SLOT_S), Percent::new(20.0).unwrap());
    }
    let later = f.demand(Micros::from_secs(10 * SLOT_S));
    assert!((later.activity.value() - 30.0).abs() < 1e-9, "the peak: {later:?}");
    for slot in 10..60 {
        f.observe(Micros::from_secs(slot * SLOT_S), Percent::new(20.0).unwrap());
    }
    assert_eq!(f.demand(Micros::from_secs(60 * SLOT_S)).basis, Basis::Errors);
}

#[test]
fn what_is_seen_of_the_running_interval_counts() {
    let mut f = ActivityForecaster::new(ForecastParams::default(), 0.95);
    for slot in 0..100 {
        f.observe(Micros::from_secs(slot * SLOT_S), Percent::new(20.0).unwrap());
    }
    let start = Micros::from_secs(100 * SLOT_S);
    assert!(f.demand(start).activity.value() < 21.0);
    f.observe(start, Percent::new(90.0).unwrap());
    assert!(f.demand(start).activity.value() >= 90.0);
}

#[test]
fn gaps_and_late_values_do_no_harm() {
    let mut f = ActivityForecaster::new(ForecastParams::default(), 0.95);
    for slot in 0..600 {
        f.observe(Micros::from_secs(slot * SLOT_S), Percent::new(20.0).unwrap());
    }
    let before = f.demand(Micros::from_secs(600 * SLOT_S));
    f.observe(Micros::from_secs(10), Percent::FULL);
    assert_eq!(f.demand(Micros::from_secs(600 * SLOT_S)), before, "a late value is ignored");
    // A year later only the record of errors is left to rest on, and no profile of the day.
    let year = Micros::from_secs(365 * 86_400);
    assert_eq!(f.demand(year).basis, Basis::Peak);
    f.observe(year, Percent::new(50.0).unwrap());
    assert!(f.demand(year).activity.value() >= 50.0);
}

#[test]
fn bad_parameters_are_refused_by_name() {
    let good = ForecastParams::default();
    assert!(good.check().is_ok());
    for (bad, field) in [
        (ForecastParams { interval: Micros::from_secs(7), ..good }, "interval_s"),
        (ForecastParams { interval: Micros(0), ..good }, "interval_s"),
        (ForecastParams { days: 0, ..good }, "days"),
        (ForecastParams { errors: 3, ..good }, "errors"),
        (ForecastParams { adaptation: f64::NAN, ..good }, "adaptation"),
    ] {
        assert_eq!(bad.check().unwrap_err().field, field);
    }
}

#[test]
fn letting_the_time_pass_first_changes_nothing() {
    let trace = diurnal(288 * 4, 0.03, 5);
    let mut plain = ActivityForecaster::new(ForecastParams::default(), 0.9);
    let mut advanced = plain.clone();
    for (slot, &value) in trace.iter().enumerate() {
        // Now and then nothing is seen for a while.
        let at = Micros::from_secs((slot + slot / 100 * 5) as u64 * SLOT_S);
        advanced.advance(at);
        assert_eq!(advanced.demand(at), plain.demand(at), "interval {slot}");
        let value = Percent::from_fraction(value).unwrap();
        plain.observe(at, value);
        advanced.observe(at, value);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_feed_gives_a_demand_within_the_gpu(
        feed in proptest::collection::vec((0u64..3_000_000, 0.0f64..=100.0), 0..200),
        coverage in 0.0f64..2.0,
    ) {
        let mut f = ActivityForecaster::new(ForecastParams::default(), coverage);
        let mut highest = 0.0f64;
        for (at, value) in feed {
            f.observe(Micros::from_secs(at), Percent::new(value).unwrap());
            highest = highest.max(value);
            let demand = f.demand(Micros::from_secs(at));
            prop_assert!((0.0..=100.0).contains(&demand.activity.value()));
            if demand.basis == Basis::Peak {
                prop_assert!(demand.activity.value() <= highest + 1e-9);
            }
        }
    }
}
