//! Cluster planning by example: what a plan must do, one small cluster each.

use crate::support::{SMS, Table, gpu, gpu_type, job, run, share, snapshot};
use muxflow_policy::cluster::{Finding, Parameters, Planner, explain, lint};
use muxflow_types::{
    Bytes, Change, ClusterPlan, ClusterSnapshot, EvictionReason, HealthState, JobId, Micros,
    Percent, WaitReason,
};

fn plan_with(s: &ClusterSnapshot, table: &Table, parameters: Parameters) -> ClusterPlan {
    let planner = Planner::new(parameters).unwrap();
    let plan = planner.plan(s, table).unwrap();
    assert_eq!(lint(s, &plan, planner.parameters()), [], "a plan must pass its own lint");
    plan
}

fn plan(s: &ClusterSnapshot, table: &Table) -> ClusterPlan {
    plan_with(s, table, Parameters::default())
}

/// Where each job of the plan is, as `job@gpu` in the order of GPUs.
fn places(plan: &ClusterPlan) -> Vec<String> {
    plan.assignments.iter().map(|a| format!("{}@{}", a.job, a.gpu)).collect()
}

fn why(plan: &ClusterPlan, id: &str) -> WaitReason {
    plan.waiting.iter().find(|w| w.job.as_str() == id).expect("the job waits").reason.clone()
}

#[test]
fn the_example_of_the_paper() {
    let table = Table::new(&[
        ("A", "C", 0.3),
        ("A", "D", 0.8),
        ("A", "E", 0.5),
        ("B", "C", 0.8),
        ("B", "D", 0.7),
        ("B", "E", 0.4),
    ]);
    let s = snapshot(
        vec![gpu("a", "A"), gpu("b", "B")],
        vec![job("c", "C"), job("d", "D"), job("e", "E")],
    );
    let plan = plan(&s, &table);
    assert_eq!(places(&plan), ["d@a", "c@b"]);
    assert!((plan.total_weight - 1.6).abs() < 1e-6, "{}", plan.total_weight);
    assert!(plan.certified);
    assert_eq!(why(&plan, "e"), WaitReason::Outranked { candidates: 2 });
}

#[test]
fn a_job_that_nobody_can_hold_waits_and_says_why() {
    let table = Table::new(&[("S", "J", 0.5)]);
    let one = |change: fn(&mut ClusterSnapshot)| {
        let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J")]);
        change(&mut s);
        let p = plan(&s, &table);
        assert_eq!(p.assignments, []);
        why(&p, "j")
    };
    assert_eq!(one(|s| s.gpus.clear()), WaitReason::NoGpus);
    assert_eq!(one(|s| s.jobs[0].gpu_types = vec![gpu_type("A10")]), WaitReason::NoGpuOfType);
    for state in HealthState::ALL.into_iter().filter(|s| *s != HealthState::Healthy) {
        let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J")]);
        s.gpus[0].health = state;
        assert_eq!(
            why(&plan(&s, &table), "j"),
            WaitReason::NoHealthyGpu { unhealthy: 1 },
            "{state}"
        );
    }
    assert_eq!(
        one(|s| s.jobs[0].memory = Bytes::from_gib(7)),
        WaitReason::MemoryQuota { asked: Bytes::from_gib(7), largest: Bytes::from_gib(6) }
    );
    assert_eq!(one(|s| s.gpus[0].share = share(0)), WaitReason::NoShare);
    assert_eq!(one(|s| s.gpus[0].online.as_mut().unwrap().in_mps = false), WaitReason::OutsideMps);
    let other_user = |s: &mut ClusterSnapshot| {
        s.gpus[0].online.as_mut().unwrap().uid = Some(1);
        s.jobs[0].uid = Some(2);
    };
    assert_eq!(one(other_user), WaitReason::OtherUser);
    let fail_prone = |s: &mut ClusterSnapshot| {
        s.gpus[0].online.as_mut().unwrap().critical = true;
        s.jobs[0].fail_prone = true;
    };
    assert_eq!(one(fail_prone), WaitReason::FailProne);
    assert_eq!(
        one(|s| s.jobs[0].not_before = Micros::from_secs(20_000)),
        WaitReason::BackOff { left: Micros::from_secs(10_000) }
    );
}

#[test]
fn a_service_that_grew_lends_less_to_newcomers() {
    let table = Table::new(&[("S", "J", 0.5)]);
    let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J")]);
    s.gpus[0].online.as_mut().unwrap().memory = Bytes::from_gib(10);
    let p = plan(&s, &table);
    // 16 GiB, of which 12 % stay free and the service holds 10 GiB.
    let left =
        Bytes::from_gib(6).saturating_sub(Bytes::from_gib(16).scaled(Percent::new(12.0).unwrap()));
    assert_eq!(p.assignments[0].quota, left);
    s.gpus[0].online.as_mut().unwrap().memory = Bytes::from_gib(13);
    let reason = why(&plan(&s, &table), "j");
    assert!(matches!(reason, WaitReason::MemoryQuota { .. }), "{reason}");
    run(&mut s, 0, 0);
    assert_eq!(places(&plan(&s, &table)), ["j@g"], "a resident keeps its quota; health watches it");
}

#[test]
fn mps_for_all_users_lets_users_mix() {
    let table = Table::new(&[("S", "J", 0.5)]);
    let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J")]);
    s.gpus[0].online.as_mut().unwrap().uid = Some(1);
    s.gpus[0].multi_user = true;
    s.jobs[0].uid = Some(2);
    assert_eq!(places(&plan(&s, &table)), ["j@g"]);
}

#[test]
fn an_idle_gpu_is_used() {
    let table = Table::new(&[("idle", "J", 1.0)]);
    let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J")]);
    s.gpus[0].online = None;
    assert_eq!(places(&plan(&s, &table)), ["j@g"]);
}

#[test]
fn a_move_must_gain_more_than_it_costs() {
    // A restart of 60 s in 900 s and a margin of 5 %: staying counts 1.117 times.
    for (there, moves) in [(0.55, false), (0.5583, false), (0.5584, true), (0.9, true)] {
        let table = Table::new(&[("A", "J", 0.5), ("B", "J", there)]);
        let mut s = snapshot(vec![gpu("a", "A"), gpu("b", "B")], vec![job("j", "J")]);
        run(&mut s, 0, 0);
        let p = plan(&s, &table);
        let expected =
            if moves { Change::Move { from: s.gpus[0].gpu.clone() } } else { Change::Stay };
        assert_eq!(p.assignments[0].change, expected, "{there}");
    }
}

#[test]
fn a_new_share_is_worth_a_restart_only_when_it_gains_more_than_it_costs() {
    let mut table = Table::new(&[("S", "J", 1.0)]);
    table.by_share = true;
    for (offered, change, speed) in [(21, Change::Stay, 0.5), (30, Change::Restart, 0.75)] {
        let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J")]);
        run(&mut s, 0, 0);
        s.gpus[0].share = share(offered);
        let p = plan(&s, &table);
        assert_eq!(p.assignments[0].change, change);
        assert!((p.assignments[0].predicted_speed - speed).abs() < 1e-6);
        let expected = if change == Change::Stay { share(SMS / 2) } else { share(offered) };
        assert_eq!(p.assignments[0].share, expected);
    }
}

#[test]
fn a_running_job_may_stay_where_nobody_may_come() {
    let table = Table::new(&[("S", "J", 0.5), ("T", "J", 0.9)]);
    let mut s = snapshot(vec![gpu("g", "S"), gpu("h", "T")], vec![job("j", "J")]);
    run(&mut s, 0, 0);
    s.gpus[0].health = HealthState::Unhealthy;
    s.gpus[1].health = HealthState::Unhealthy;
    assert_eq!(places(&plan(&s, &table)), ["j@g"]);
    s.gpus[0].health = HealthState::Overlimit;
    let p = plan(&s, &table);
    assert_eq!(p.assignments, []);
    assert_eq!(p.evictions[0].reason, EvictionReason::Health);
    assert_eq!(why(&p, "j"), WaitReason::NoHealthyGpu { unhealthy: 2 });
}

#[test]
fn a_gpu_that_is_gone_gives_its_job_back() {
    let table = Table::new(&[("S", "J", 0.5)]);
    let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J"), job("k", "J")]);
    run(&mut s, 0, 0);
    s.jobs[1].running_on = Some(muxflow_types::GpuId::new("lost").unwrap());
    let p = plan(&s, &table);
    assert_eq!(places(&p), ["j@g"]);
    assert_eq!(p.evictions[0].reason, EvictionReason::GpuGone);
}

#[test]
fn a_job_that_cannot_checkpoint_is_never_moved() {
    let table = Table::new(&[("A", "J", 0.1), ("B", "J", 0.9)]);
    let mut s = snapshot(vec![gpu("a", "A"), gpu("b", "B")], vec![job("j", "J")]);
    run(&mut s, 0, 0);
    s.jobs[0].pinned = true;
    assert_eq!(places(&plan(&s, &table)), ["j@a"]);
    s.gpus[0].health = HealthState::Overlimit;
    let p = plan(&s, &table);
    assert_eq!((p.assignments.len(), why(&p, "j")), (0, WaitReason::Pinned));
}

#[test]
fn priority_counts() {
    let table = Table::new(&[("S", "J", 0.6), ("S", "K", 0.4)]);
    let mut s = snapshot(vec![gpu("g", "S")], vec![job("j", "J"), job("k", "K")]);
    assert_eq!(places(&plan(&s, &table)), ["j@g"]);
    s.jobs[1].priority = 2;
    assert_eq!(places(&plan(&s, &table)), ["k@g"]);
}

#[test]
fn equals_are_served_first_come_first_served() {
    let table = Table::new(&[("S", "J", 0.6)]);
    let mut s = snapshot(vec![gpu("g", "S")], vec![job("late", "J"), job("early", "J")]);
    s.jobs[0].submitted_at = Micros(9);
    s.jobs[1].submitted_at = Micros(3);
    assert_eq!(places(&plan(&s, &table)), ["early@g"]);
}

/// A job that is slow everywhere, against an endless stream of fast ones: it must get its turn.
#[test]
fn no_job_starves() {
    let table = Table::new(&[("S", "fast", 0.9), ("S", "slow", 0.2)]);
    let interval = Parameters::default().interval;
    let mut waited = Micros::ZERO;
    for round in 0..200 {
        let mut s = snapshot(vec![gpu("g", "S")], vec![job("slow", "slow"), job("new", "fast")]);
        s.jobs[0].waited = waited;
        if places(&plan(&s, &table)) == ["slow@g"] {
            assert!(round > 0, "at first the fast job is worth more");
            return;
        }
        waited = waited.saturating_add(interval);
    }
    panic!("still waiting after {waited}");
}

#[test]
fn types_are_compared_on_the_reference_type() {
    // Both keep 0.6 of their own solo speed, but the A10 is twice as fast alone.
    let table = Table::new(&[("S", "J", 0.6)]);
    let mut s = snapshot(vec![gpu("t4", "S"), gpu("a10", "S")], vec![job("j", "J")]);
    s.gpus[1].gpu_type = gpu_type("A10");
    s.gpus[1].online.as_mut().unwrap().profile.gpu_type = gpu_type("A10");
    s.jobs[0].solo_speed = [(gpu_type("T4"), 0.5), (gpu_type("A10"), 1.0)].into();
    let p = plan(&s, &table);
    assert_eq!(places(&p), ["j@a10"]);
    assert!((p.assignments[0].weight - 0.6).abs() < 1e-6);
}

/// Ten jobs each next to a better place: one plan may move only one of them.
#[test]
fn one_plan_disturbs_no_more_than_it_may() {
    let table = Table::new(&[("bad", "J", 0.3), ("good", "J", 0.9)]);
    let mut gpus: Vec<_> = (0..10).map(|i| gpu(&format!("b{i}"), "bad")).collect();
    gpus.extend((0..10).map(|i| gpu(&format!("g{i}"), "good")));
    let mut s = snapshot(gpus, (0..10).map(|i| job(&format!("j{i}"), "J")).collect());
    for i in 0..10 {
        run(&mut s, i, i);
    }
    let p = plan(&s, &table);
    let moved = p.assignments.iter().filter(|a| a.change != Change::Stay).count();
    assert!(moved <= 1, "{moved} moved");
    let free = Parameters { max_disruption: Percent::FULL, ..Parameters::default() };
    let p = plan_with(&s, &table, free);
    assert!(p.assignments.iter().all(|a| matches!(a.change, Change::Move { .. })));
}

#[test]
fn the_explanation_names_places_owners_and_refusals() {
    let table = Table::new(&[("A", "J", 0.5), ("A", "K", 0.9), ("B", "J", 0.4)]);
    let mut s = snapshot(
        vec![gpu("a", "A"), gpu("b", "B"), gpu("c", "A")],
        vec![job("j", "J"), job("k", "K")],
    );
    s.gpus[1].health = HealthState::Unhealthy;
    s.gpus[2].quota = Bytes::from_gib(1);
    let p = plan(&s, &table);
    let e = explain(&s, &p, &table, &Parameters::default(), &JobId::new("j").unwrap()).unwrap();
    assert_eq!(e.waiting, Some(WaitReason::Outranked { candidates: 1 }));
    assert_eq!(e.candidates.len(), 1);
    assert_eq!(e.candidates[0].given_to.as_ref().map(JobId::as_str), Some("k"));
    assert_eq!(e.refusals.values().sum::<usize>(), 2);
    assert!(explain(&s, &p, &table, &Parameters::default(), &JobId::new("x").unwrap()).is_none());
}

/// Each way to break a plan is found.
#[test]
fn the_lint_finds_what_is_wrong() {
    let table = Table::new(&[("A", "J", 0.5), ("B", "J", 0.4)]);
    let mut s = snapshot(vec![gpu("a", "A"), gpu("b", "B")], vec![job("j", "J"), job("k", "J")]);
    run(&mut s, 0, 0);
    let good = plan(&s, &table);
    let parameters = Parameters { max_disruption: Percent::ZERO, ..Parameters::default() };
    let found = |change: &dyn Fn(&mut ClusterPlan)| {
        let mut p = good.clone();
        change(&mut p);
        lint(&s, &p, &parameters)
    };
    assert_eq!(found(&|_| {}), []);
    assert!(found(&|p| p.at = Micros(1)).contains(&Finding::OtherSnapshot));
    assert!(found(&|p| p.certified = false).contains(&Finding::NotCertified));
    let (a, j) = (s.gpus[0].gpu.clone(), s.jobs[0].job.clone());
    assert!(found(&|p| p.assignments[1].gpu = a.clone()).contains(&Finding::GpuTwice(a.clone())));
    assert!(found(&|p| p.assignments[1].job = j.clone()).contains(&Finding::JobTwice(j.clone())));
    assert!(found(&|p| drop(p.assignments.remove(0))).contains(&Finding::JobForgotten(j.clone())));
    let stranger = JobId::new("stranger").unwrap();
    assert!(
        found(&|p| p.assignments[1].job = stranger.clone())
            .contains(&Finding::UnknownJob(stranger.clone()))
    );
    assert!(
        found(&|p| p.assignments[0].change = Change::Start)
            .contains(&Finding::WrongChange(j.clone()))
    );
    assert!(
        found(&|p| p.assignments[0].weight = f32::NAN).contains(&Finding::BadNumber(j.clone()))
    );
    assert!(matches!(
        found(&|p| p.assignments[0].quota = Bytes::from_gib(11))[..],
        [Finding::QuotaOverrun { .. }]
    ));
    let restarted = found(&|p| p.assignments[0].change = Change::Restart);
    assert_eq!(restarted, [Finding::TooManyDisruptions { disturbed: 1, limit: 0 }]);
    let mut sick = s.clone();
    sick.gpus[1].health = HealthState::Unhealthy;
    assert!(matches!(lint(&sick, &good, &parameters)[..], [Finding::Misfit { .. }]));
}
