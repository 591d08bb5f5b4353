//! The machine, state by state and event by event, as scenarios, and under broken samples.

use muxflow_types::{Bytes, GpuType, MegaHertz, Percent};
use proptest::prelude::*;

use super::*;
use crate::node::builtin::laws_of;
use crate::node::xid::RecoveryAction;

fn t4() -> Thresholds {
    laws_of(&GpuType::new("T4").unwrap()).unwrap().thresholds
}

fn ms(ms: u64) -> Micros {
    Micros::from_millis(ms)
}

/// A sample in which everything is fine, taken and refreshed at this time.
fn fine(at: Micros) -> GpuSample {
    GpuSample {
        gpu_util: Some(Percent::FULL),
        sm_activity: Some(Percent::new(50.0).unwrap()),
        sm_clock: Some(MegaHertz(1500)),
        memory_used: Some(Bytes::from_gib(8)),
        memory_total: Some(Bytes::from_gib(16)),
        ..GpuSample::empty(at)
    }
}

fn sm(at: Micros, pct: f64) -> GpuSample {
    GpuSample { sm_activity: Percent::new(pct).ok(), ..fine(at) }
}

fn memory(at: Micros, used_pct: f64) -> GpuSample {
    let used = Bytes::from_gib(16).scaled(Percent::new(used_pct).unwrap());
    GpuSample { memory_used: Some(used), ..fine(at) }
}

fn machine(now: Micros) -> HealthMachine {
    HealthMachine::new(t4(), HealthParams::default(), now)
}

/// Feeds samples every 100 ms for a while, starting 100 ms from `now`; gives the end of it.
fn feed(
    machine: &mut HealthMachine,
    now: Micros,
    lasting: Micros,
    sample: impl Fn(Micros) -> GpuSample,
) -> Micros {
    let mut at = now;
    while at.since(now) < lasting {
        at = at.saturating_add(ms(100));
        machine.step(at, HealthEvent::Sample(&sample(at)));
    }
    at
}

/// A machine that has just come into a state by the ordinary way, and the time of that.
fn in_state(state: HealthState) -> (HealthMachine, Micros) {
    let start = Micros::from_secs(1_000);
    let mut m = machine(start);
    let mut now = start;
    match state {
        HealthState::Init => {}
        HealthState::Healthy => now = feed(&mut m, now, ms(2_500), fine),
        HealthState::Unhealthy => now = feed(&mut m, now, ms(100), |at| sm(at, 90.0)),
        HealthState::Overlimit => now = feed(&mut m, now, ms(100), |at| memory(at, 97.0)),
        HealthState::Disabled => {
            m.step(now, HealthEvent::Disable(DisableReason::Operator));
        }
    }
    assert_eq!(m.state(), state);
    (m, now)
}

/// Each event of the table: what happens, and how to make it happen.
type Happening = fn(&mut HealthMachine, Micros) -> Micros;
const HAPPENINGS: [(&str, Happening); 17] = [
    ("one sample, all fine", |m, now| feed(m, now, ms(100), fine)),
    ("all fine for recover_after", |m, now| feed(m, now, ms(2_200), fine)),
    ("all fine, Overlimit period over", |m, now| {
        m.step(now.saturating_add(ms(29_900)), HealthEvent::Tick);
        feed(m, now.saturating_add(ms(29_950)), ms(100), fine)
    }),
    ("between for recover_after", |m, now| feed(m, now, ms(2_200), |at| sm(at, 85.0))),
    ("one sample at Unhealthy", |m, now| feed(m, now, ms(100), |at| sm(at, 88.0))),
    ("one sample over the limit", |m, now| feed(m, now, ms(100), |at| sm(at, 97.0))),
    ("over the limit for confirm_after", |m, now| feed(m, now, ms(400), |at| sm(at, 97.0))),
    ("clock under the limit, confirmed", |m, now| {
        feed(m, now, ms(400), |at| GpuSample { sm_clock: Some(MegaHertz(749)), ..fine(at) })
    }),
    ("low clock of an idle GPU", |m, now| {
        let zero = Some(Percent::ZERO);
        let idle = |at| GpuSample { gpu_util: zero, sm_clock: Some(MegaHertz(300)), ..sm(at, 0.0) };
        feed(m, now, ms(2_200), idle)
    }),
    ("one sample, memory over the limit", |m, now| feed(m, now, ms(100), |at| memory(at, 95.1))),
    ("a metric missing for a second", |m, now| {
        feed(m, now, ms(1_000), |at| GpuSample { sm_clock: None, ..fine(at) })
    }),
    ("a metric missing, another over", |m, now| {
        feed(m, now, ms(400), |at| GpuSample { sm_clock: None, ..sm(at, 97.0) })
    }),
    ("one impossible sample", |m, now| {
        let beyond = Some(Bytes::from_gib(17));
        feed(m, now, ms(100), |at| GpuSample { memory_used: beyond, ..fine(at) })
    }),
    ("silence for stale_after", |m, now| {
        let now = now.saturating_add(ms(2_001));
        m.step(now, HealthEvent::Tick);
        now
    }),
    ("silence for lost_after", |m, now| {
        for late in [2_001, 10_001] {
            m.step(now.saturating_add(ms(late)), HealthEvent::Tick);
        }
        now.saturating_add(ms(10_001))
    }),
    ("device fault", |m, now| {
        m.step(now, HealthEvent::Disable(DisableReason::Fault(Fault::Xid(79))));
        now
    }),
    ("device back", |m, now| {
        m.step(now, HealthEvent::Enable);
        now
    }),
];

/// Every state × every event. `+` marks where offline work may run.
#[test]
fn every_state_and_every_event() {
    let mut table = String::from("\n");
    for (name, happening) in HAPPENINGS {
        table += &format!("{name:33}");
        for state in HealthState::ALL {
            let (mut m, now) = in_state(state);
            let now = happening(&mut m, now);
            let run = if m.permission(now).run { "+" } else { "" };
            table += &format!("| {:11}", format!("{}{run}", m.state()));
        }
        table = table.trim_end().to_owned() + "\n";
    }
    let expected = "
one sample, all fine             | Init       | Healthy+   | Unhealthy+ | Overlimit  | Disabled
all fine for recover_after       | Healthy+   | Healthy+   | Healthy+   | Overlimit  | Disabled
all fine, Overlimit period over  | Init       | Unhealthy+ | Overlimit  | Unhealthy+ | Disabled
between for recover_after        | Unhealthy+ | Healthy+   | Unhealthy+ | Overlimit  | Disabled
one sample at Unhealthy          | Unhealthy+ | Unhealthy+ | Unhealthy+ | Overlimit  | Disabled
one sample over the limit        | Init       | Unhealthy  | Unhealthy  | Overlimit  | Disabled
over the limit for confirm_after | Overlimit  | Overlimit  | Overlimit  | Overlimit  | Disabled
clock under the limit, confirmed | Overlimit  | Overlimit  | Overlimit  | Overlimit  | Disabled
low clock of an idle GPU         | Healthy+   | Healthy+   | Healthy+   | Overlimit  | Disabled
one sample, memory over the limit| Overlimit  | Overlimit  | Overlimit  | Overlimit  | Disabled
a metric missing for a second    | Init       | Healthy+   | Unhealthy+ | Overlimit  | Disabled
a metric missing, another over   | Overlimit  | Overlimit  | Overlimit  | Overlimit  | Disabled
one impossible sample            | Init       | Healthy+   | Unhealthy+ | Overlimit  | Disabled
silence for stale_after          | Init       | Unhealthy  | Unhealthy  | Overlimit  | Disabled
silence for lost_after           | Init       | Overlimit  | Overlimit  | Overlimit  | Disabled
device fault                     | Disabled   | Disabled   | Disabled   | Disabled   | Disabled
device back                      | Init       | Healthy+   | Unhealthy+ | Overlimit  | Init
";
    assert_eq!(table, expected, "got:{table}");
}

#[test]
fn thresholds_are_reached_or_passed_as_the_paper_says() {
    let bands = Bands::new(Metric::SmActivity, 80.0, 88.0, 96.0).unwrap();
    let level = |value| bands.judge(value).0;
    assert_eq!(level(79.9), Level::Fine);
    assert_eq!(level(80.0), Level::Between, "below Healthy means below");
    assert_eq!(level(88.0), Level::Unhealthy, "reaching is enough");
    assert_eq!(level(96.0), Level::Unhealthy, "exceeding is not reaching");
    assert_eq!(level(96.1), Level::Over);
    let clock = Bands::new(Metric::SmClock, 1050.0, 900.0, 750.0).unwrap();
    let level = |value| clock.judge(value).0;
    assert_eq!(
        [1051.0, 1050.0, 900.0, 750.0, 749.0].map(level),
        [Level::Fine, Level::Between, Level::Unhealthy, Level::Unhealthy, Level::Over]
    );
}

#[test]
fn crossed_thresholds_are_refused_by_name() {
    let err = Bands::new(Metric::Memory, 92.0, 90.0, 95.0).unwrap_err();
    assert_eq!(
        err.to_string(),
        "memory_pct.healthy is 92 and lies beyond memory_pct.unhealthy (90): memory_pct must rise from healthy to unhealthy"
    );
    let err = Bands::new(Metric::SmClock, 900.0, 1000.0, 700.0).unwrap_err();
    assert!(err.to_string().contains("must fall from healthy to unhealthy"), "{err}");
    assert_eq!(Bands::new(Metric::Memory, 80.0, 96.0, 95.0).unwrap_err().field(), "unhealthy");
    assert_eq!(Bands::new(Metric::Memory, 80.0, 80.0, 95.0).unwrap_err().field(), "healthy");
    assert_eq!(Bands::new(Metric::Memory, 80.0, 90.0, 101.0).unwrap_err().field(), "overlimit");
    assert!(Bands::new(Metric::Memory, f64::NAN, 90.0, 95.0).is_err());
    assert!(Bands::new(Metric::GpuUtil, 95.0, 100.0, 100.0).is_ok(), "100 % is never passed");
}

#[test]
fn latency_is_judged_only_against_an_slo() {
    let at = Micros::from_secs(5);
    let slow = GpuSample { online_latency: Some(ms(130)), ..fine(at) };
    assert_eq!(t4().judge(&slow, None).worst.unwrap().level, Level::Fine);
    let finding = t4().judge(&slow, Some(ms(100))).worst.unwrap();
    assert_eq!((finding.metric, finding.level), (Metric::Latency, Level::Over));
    assert!((finding.value - 130.0).abs() < 1e-9);
    let idle = GpuSample { online_latency: None, ..slow };
    assert_eq!(t4().judge(&idle, Some(ms(100))).missing, None, "no request, no latency");
}

#[test]
fn transitions_say_why() {
    let (mut m, now) = in_state(HealthState::Healthy);
    let at = now.saturating_add(ms(100));
    let t = m.step(at, HealthEvent::Sample(&memory(at, 96.0))).unwrap();
    assert_eq!((t.from, t.to, t.at), (HealthState::Healthy, HealthState::Overlimit, at));
    assert_eq!(t.overlimit, Some((1, Micros::from_secs(30))));
    let Cause::Reading(finding) = t.cause else { panic!("{t:?}") };
    assert_eq!((finding.metric, finding.threshold), (Metric::Memory, 95.0));
    assert_eq!(
        t.to_string(),
        "Healthy -> Overlimit: memory_pct 96.0 is over 95.0; entry 1, for 30.0 s"
    );
    let reason = DisableReason::Fault(Fault::Recovery(RecoveryAction::GpuReset));
    let t = m.step(at, HealthEvent::Disable(reason)).unwrap();
    assert_eq!(t.to_string(), "Overlimit -> Disabled: disabled by recovery.gpu-reset");
}

#[test]
fn new_thresholds_count_from_the_next_sample_on() {
    let (mut m, now) = in_state(HealthState::Healthy);
    let strict = Thresholds {
        bands: vec![Bands::new(Metric::SmActivity, 10.0, 20.0, 30.0).unwrap()],
        ..t4()
    };
    let params = HealthParams { confirm_after: Micros::ZERO, ..HealthParams::default() };
    m.reconfigure(strict, params);
    assert_eq!(m.step(now, HealthEvent::Tick), None);
    let at = now.saturating_add(ms(100));
    let t = m.step(at, HealthEvent::Sample(&fine(at))).unwrap();
    assert_eq!(t.to, HealthState::Overlimit, "without a confirmation it is the paper's machine");
}

/// Each `.scenario` is a script of samples with the transitions it must cause, line by line.
#[test]
fn scenarios() {
    for (name, script) in [
        ("burst", include_str!("scenarios/burst.scenario")),
        ("backoff", include_str!("scenarios/backoff.scenario")),
        ("broken-samples", include_str!("scenarios/broken-samples.scenario")),
        ("device", include_str!("scenarios/device.scenario")),
    ] {
        let played = play(script);
        assert_eq!(played, script, "scenario {name} played as:\n{played}");
    }
}

/// Plays a script: `TIME field=value …` is a sample (fields keep their last value; `-` removes one),
/// `TIME tick|disable|enable|slo=…` an event; lines that start with `=` are what must follow.
fn play(script: &str) -> String {
    let mut m = machine(Micros::ZERO);
    let mut sample = fine(Micros::ZERO);
    let mut out = String::new();
    for line in script.lines().filter(|line| !line.starts_with('=')) {
        out += &format!("{line}\n");
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(time) = words.next() else { continue };
        let now = Micros::from_secs_f64(time.trim_end_matches('s').parse().unwrap()).unwrap();
        (sample.at, sample.refreshed_at) = (now, now);
        let mut event = None;
        for word in words {
            match word {
                "tick" => event = Some(HealthEvent::Tick),
                "enable" => event = Some(HealthEvent::Enable),
                "disable" => {
                    event = Some(HealthEvent::Disable(DisableReason::Fault(Fault::Xid(79))))
                }
                field => set(&mut m, &mut sample, now, field),
            }
        }
        let event = event.unwrap_or(HealthEvent::Sample(&sample));
        if let Some(transition) = m.step(now, event) {
            out += &format!("= {transition}\n");
        }
        let may = m.permission(now);
        if !may.run && m.state().allows_running() {
            out += "= held\n";
        }
    }
    out
}

fn set(m: &mut HealthMachine, sample: &mut GpuSample, now: Micros, field: &str) {
    let (name, text) = field.split_once('=').unwrap();
    let value: Option<f64> = text.parse().ok();
    let whole = text.parse().ok().map(MegaHertz);
    let percent = value.and_then(|v| Percent::new(v).ok());
    match name {
        "sm" => sample.sm_activity = percent,
        "util" => sample.gpu_util = percent,
        "clock" => sample.sm_clock = whole,
        "memory" => sample.memory_used = percent.map(|p| Bytes::from_gib(16).scaled(p)),
        "memory_gib" => sample.memory_used = whole.map(|g| Bytes::from_gib(u64::from(g.0))),
        "latency_ms" => {
            sample.online_latency = value.and_then(|v| Micros::from_secs_f64(v / 1e3).ok())
        }
        "slo_ms" => m.set_slo(value.and_then(|v| Micros::from_secs_f64(v / 1e3).ok())),
        "age_ms" => sample.refreshed_at = Micros(now.0 - ms(text.parse().unwrap()).0),
        other => panic!("unknown field {other}"),
    }
}

/// A broken feed: any field missing or extreme, any age, out of order, clock jumping.
#[derive(Debug, Clone)]
struct Wild {
    step_ms: i64,
    kind: u8,
    age_ms: u64,
    sm: Option<f64>,
    clock: Option<u32>,
    memory: Option<u64>,
    latency_ms: Option<u64>,
    ahead_ms: u64,
}

fn wild() -> impl Strategy<Value = Wild> {
    let step = prop_oneof![8 => 0i64..400, 1 => 400i64..40_000, 1 => -20_000i64..0];
    let age = prop_oneof![6 => 0u64..300, 1 => 300u64..30_000];
    let sm = proptest::option::weighted(0.9, prop_oneof![3 => 0.0f64..80.0, 1 => 0.0f64..=100.0]);
    let clock = proptest::option::weighted(0.9, prop_oneof![3 => 1060u32..1590, 1 => 0u32..4000]);
    let memory = proptest::option::weighted(0.9, prop_oneof![3 => 0u64..13, 1 => 0u64..20]);
    let latency = proptest::option::weighted(0.3, 0u64..200);
    let ahead = prop_oneof![9 => Just(0u64), 1 => 1u64..5_000];
    (step, 0u8..30, age, sm, clock, memory, latency, ahead).prop_map(
        |(step_ms, kind, age_ms, sm, clock, memory, latency_ms, ahead_ms)| Wild {
            step_ms,
            kind,
            age_ms,
            sm,
            clock,
            memory,
            latency_ms,
            ahead_ms,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// The oracle of this test is written from the words of the specification, not from the code:
    /// it keeps the newest possible sample and asks whether offline work may run beside it.
    #[test]
    fn no_feed_lets_offline_run_beside_a_bad_or_stale_sample(
        feed in proptest::collection::vec(wild(), 1..120),
    ) {
        let p = HealthParams::default();
        let mut m = machine(ms(100_000));
        m.set_slo(Some(ms(100)));
        let mut now_ms: u64 = 100_000;
        let mut newest: Option<(u64, u64)> = None;
        let mut complete_at: Option<u64> = None;
        let mut over = false;
        let mut entered: Option<(u64, Micros)> = None;
        for w in feed {
            let before = now_ms;
            now_ms = now_ms.saturating_add_signed(w.step_ms);
            if now_ms < before {
                (newest, complete_at) = (None, None);
                entered = entered.map(|(at, period)| (at.min(now_ms), period));
            }
            let at = now_ms + w.ahead_ms;
            let refreshed = at.saturating_sub(w.age_ms);
            let sample = GpuSample {
                refreshed_at: ms(refreshed),
                sm_activity: w.sm.map(|v| Percent::new(v).unwrap()),
                sm_clock: w.clock.map(MegaHertz),
                memory_used: w.memory.map(Bytes::from_gib),
                online_latency: w.latency_ms.map(ms),
                ..fine(ms(at))
            };
            let from = m.state();
            let event = match w.kind {
                0 => HealthEvent::Disable(DisableReason::Operator),
                1 => HealthEvent::Enable,
                2..5 => HealthEvent::Tick,
                _ => HealthEvent::Sample(&sample),
            };
            let transition = m.step(ms(now_ms), event);
            if matches!(event, HealthEvent::Enable) && from == HealthState::Disabled {
                (newest, complete_at, over) = (None, None, false);
            }
            let possible = at <= now_ms
                && w.clock.is_none_or(|c| c <= 1749)
                && w.memory.is_none_or(|g| g <= 16);
            let in_order = newest.is_none_or(|(r, a)| refreshed >= r && at >= a);
            let taken = matches!(event, HealthEvent::Sample(_)) && from != HealthState::Disabled;
            if taken && possible && in_order {
                newest = Some((refreshed, at));
                let over_now = w.sm.is_some_and(|v| v > 96.0)
                    || w.clock.is_some_and(|c| c < 750)
                    || w.memory.is_some_and(|g| g == 16)
                    || w.latency_ms.is_some_and(|l| l > 120);
                let complete = w.sm.is_some() && w.clock.is_some() && w.memory.is_some();
                if complete {
                    (complete_at, over) = (Some(refreshed), over_now);
                } else {
                    over |= over_now;
                }
            }
            let stale = complete_at.is_none_or(|c| now_ms - c > p.stale_after.0 / 1000);
            let may = m.permission(ms(now_ms));
            if over || stale {
                prop_assert!(!may.run, "runs beside over={over} stale={stale} in {}", m.state());
                prop_assert!(!may.place);
            }
            prop_assert!(!may.place || (may.run && m.state() == HealthState::Healthy));
            prop_assert!(!(may.run && may.evict));
            // Whatever state follows: time alone stops offline work.
            let later = m.permission(ms(now_ms + 2_001));
            prop_assert!(!later.run && !later.place);
            if let Some(t) = transition {
                prop_assert_ne!(t.from, t.to);
                prop_assert_eq!(t.to, m.state());
                if let Some((entries, period)) = t.overlimit {
                    prop_assert_eq!(period, p.period(entries));
                    entered = Some((now_ms, period));
                }
                let served = (t.from, t.to) == (HealthState::Overlimit, HealthState::Unhealthy);
                if (served || t.to == HealthState::Healthy)
                    && let Some((at, period)) = entered.take()
                {
                    prop_assert!(ms(now_ms - at) >= period, "{t} before the period was over");
                }
            }
        }
    }

    /// Back-off grows with every entry of the last two hours and forgets older ones.
    #[test]
    fn overlimit_lasts_longer_with_each_entry_and_forgets_after_two_hours(
        gaps_s in proptest::collection::vec(0u64..6_000, 1..20),
        factor in 1.1f64..8.0,
    ) {
        let p = HealthParams { overlimit_factor: factor, ..HealthParams::default() };
        let mut m = HealthMachine::new(t4(), p, Micros::ZERO);
        let mut now = Micros::from_secs(10);
        let mut entries: Vec<Micros> = Vec::new();
        for gap in gaps_s {
            now = feed(&mut m, now.saturating_add(Micros::from_secs(gap)), ms(2_200), fine);
            prop_assert_eq!(m.state(), HealthState::Healthy);
            now = now.saturating_add(ms(100));
            let t = m.step(now, HealthEvent::Sample(&memory(now, 99.0))).unwrap();
            entries.push(now);
            let counted = entries.iter().filter(|e| now.since(**e) < Micros::from_secs(7200)).count();
            let (said, period) = t.overlimit.unwrap();
            prop_assert_eq!(said, counted);
            let power = (1..counted).fold(30.0, |s: f64, _| s * factor).min(3600.0);
            prop_assert!((period.as_secs_f64() - power).abs() < 1e-3 * power);
            // Just before its end it holds, whatever the samples say; then it lets go.
            let end = now.saturating_add(period);
            let early = Micros(end.0 - 1_000);
            m.step(early, HealthEvent::Sample(&fine(early)));
            prop_assert_eq!(m.state(), HealthState::Overlimit);
            m.step(end, HealthEvent::Sample(&fine(end)));
            prop_assert_eq!(m.state(), HealthState::Unhealthy);
            now = end;
        }
    }
}
