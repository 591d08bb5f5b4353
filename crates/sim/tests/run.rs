//! Whole runs: the same seed gives the same bytes, time adds up, and the published trends hold.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]

use muxflow_sim::predictors::NamedPredictor;
use muxflow_sim::{RunResult, Scenario, compare, policy, predictors, report, run};

fn small() -> Scenario {
    Scenario::generated(60, 200, 0.5, 7).unwrap()
}

fn predictor(name: &str, s: &Scenario) -> NamedPredictor {
    let types: Vec<_> = s.pools.iter().map(|p| p.profile.clone()).collect();
    predictors::by_name(name, &types, 1).unwrap()
}

fn go(s: &Scenario, name: &str, with: &NamedPredictor) -> RunResult {
    let p = policy::by_name(name, s.seed).unwrap();
    run(s, p, with.predictor.as_ref(), &with.name, &mut |_, _| {}).unwrap()
}

#[test]
fn the_same_seed_gives_the_same_bytes_in_parallel_too() {
    let s = small();
    let with = predictor("rule", &s);
    let names: Vec<String> = ["muxflow", "muxflow-m", "time-sharing"].map(str::to_owned).to_vec();
    let runs = |threads| {
        let r = compare(&s, &names, &with, threads, &|_, _, _| {}).unwrap();
        (report::json(&r, s.seed).to_string(), report::jobs_csv(&r))
    };
    let once = runs(1);
    assert_eq!(once, runs(3));
    let other = Scenario { seed: 8, ..small() };
    let r = compare(&other, &names, &with, 2, &|_, _, _| {}).unwrap();
    assert_ne!(once.1, report::jobs_csv(&r));
}

#[test]
fn time_adds_up() {
    let s = small();
    let with = predictor("rule", &s);
    for name in ["muxflow", "pb-time-sharing"] {
        let r = go(&s, name, &with);
        assert_eq!(r.summary().unfinished, 0, "{name}");
        for (j, row) in r.jobs.iter().zip(&s.jobs) {
            if j.cancelled {
                assert!(j.separate_s <= row.duration_s + 1e-3);
                continue;
            }
            let (start, end) = (j.start_s.unwrap(), j.end_s.unwrap());
            assert!(start >= j.submit_s && end > start, "{name} {j:?}");
            assert!(j.real_s <= end - start + 1e-3, "{name} {j:?}");
            assert!(j.separate_s <= j.real_s + 1e-3, "{name} {j:?}");
            assert!(j.separate_s >= row.duration_s - 1e-3, "{name} {j:?} {row:?}");
        }
        let busy: f64 = r.series.iter().map(|p| p.running).fold(0.0, f64::max);
        assert!(busy <= 60.0, "{name}: {busy} jobs on 60 GPUs");
    }
}

#[test]
fn online_only_is_what_others_are_measured_against() {
    let s = small();
    let r = go(&s, "online-only", &predictor("rule", &s));
    let m = r.summary();
    assert!((m.slowdown - 1.0).abs() < 1e-12 && (m.p99_slowdown - 1.0).abs() < 1e-12);
    assert_eq!((m.finished, r.counts.executions), (0, 0));
    assert!(m.sm_activity > 0.05 && m.sm_activity < 0.3, "{m:?}");
}

#[test]
fn muxflow_beats_time_sharing_and_spares_the_service() {
    let s = small();
    let with = predictor("mlp", &s);
    let of = |name: &str| go(&s, name, &with).summary();
    let (ours, plain, priority) = (of("muxflow"), of("time-sharing"), of("pb-time-sharing"));
    assert!(ours.slowdown < 1.2 && ours.p99_slowdown < 1.2, "{ours:?}");
    for other in [plain, priority] {
        assert!(ours.jct_mean_s < other.jct_mean_s, "{ours:?} {other:?}");
        assert!(ours.oversold > other.oversold, "{ours:?} {other:?}");
    }
    assert!(plain.slowdown > priority.slowdown, "{plain:?} {priority:?}");
    let fixed = of("muxflow-s");
    assert!(ours.oversold > fixed.oversold, "{ours:?} {fixed:?}");
}

#[test]
fn only_a_graceful_exit_keeps_signals_from_spreading() {
    let with = predictor("rule", &small());
    let rough = Scenario { graceful_exit: false, cancelled: 0.3, ..small() };
    let r = go(&rough, "muxflow-m", &with);
    assert!(r.counts.propagated_by_signal > 10, "{:?}", r.counts);
    let gentle = Scenario { graceful_exit: true, ..rough };
    assert_eq!(go(&gentle, "muxflow-m", &with).counts.propagated_by_signal, 0);
}

#[test]
fn a_burst_beyond_capacity_evicts_and_the_job_comes_back() {
    let mut s = small();
    for service in &mut s.services {
        // From hour 6 on, an hour of six times the traffic; the slowest service cannot serve it.
        for (minute, rate) in service.curve.rates.iter_mut().enumerate() {
            if (360..420).contains(&(minute % 1440)) {
                *rate *= 6.0;
            }
        }
    }
    let r = go(&s, "muxflow-m", &predictor("rule", &s));
    assert!(r.counts.evictions > 0, "{:?}", r.counts);
    assert_eq!(r.summary().unfinished, 0);
    assert!(r.jobs.iter().any(|j| j.evictions > 0 && j.end_s.is_some()));
}

#[test]
fn nonsense_is_refused_by_name() {
    let e = Scenario::generated(0, 10, 0.5, 1).unwrap_err().to_string();
    assert!(e.contains("gpus"), "{e}");
    let e = policy::by_name("magic", 1).err().unwrap().to_string();
    assert!(e.contains("magic") && e.contains("muxflow-s-m"), "{e}");
    let s = Scenario { restart_s: 5000.0, ..small() };
    let p = policy::by_name("muxflow", 1).unwrap();
    let with = predictor("rule", &s);
    let e = run(&s, p, with.predictor.as_ref(), "rule", &mut |_, _| {}).unwrap_err().to_string();
    assert!(e.contains("restart"), "{e}");
    assert!(
        predictors::by_name("crystal-ball", &[], 1).unwrap_err().to_string().contains("oracle")
    );
}

#[test]
fn the_page_carries_every_run() {
    let s = small();
    let r = go(&s, "muxflow-s-m", &predictor("rule", &s));
    let page = report::page("title", "note", std::slice::from_ref(&r), s.seed);
    assert!(page.contains("\"policy\":\"muxflow-s-m\"") && page.contains("polyline"));
    let table = report::comparison(&[r], true);
    assert_eq!(table.lines().count(), 3, "{table}");
}
