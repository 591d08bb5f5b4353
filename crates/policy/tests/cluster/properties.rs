//! Cluster planning against brute force: on small random clusters, classes collapsed or not, the
//! plan is worth as much as the best of all plans, passes its lint, and is the same every time.

use crate::support::{SMS, Table, gpu, gpu_type, job, run, share, snapshot};
use muxflow_policy::cluster::fit::{refusal, runs_here};
use muxflow_policy::cluster::{Memory, Parameters, Planner, lint};
use muxflow_types::{
    Bytes, Change, ClusterPlan, ClusterSnapshot, HealthState, Micros, OfflineInput, OnlineInput,
    Percent, ProfileRecord, SmShare, SpeedPredictor, WorkloadName,
};
use proptest::prelude::*;

const SERVICES: [&str; 3] = ["S0", "S1", "S2"];
const PROGRAMS: [&str; 3] = ["J0", "J1", "J2"];

fn table() -> impl Strategy<Value = Table> {
    prop::collection::vec(0u8..=10, 12).prop_map(|tenths| {
        let mut t = Table::default();
        for (k, tenth) in tenths.iter().enumerate() {
            let service = SERVICES.get(k / 3).copied().unwrap_or("idle");
            let key = (service.to_owned(), PROGRAMS[k % 3].to_owned());
            t.speeds.insert(key, f32::from(*tenth) / 10.0);
        }
        t.by_share = true;
        t
    })
}

#[derive(Debug, Clone)]
struct GpuDraw {
    service: usize,
    state: usize,
    sms: u32,
    quota_gib: u64,
    flags: (bool, bool, bool, bool),
    a10: bool,
}

#[derive(Debug, Clone)]
struct JobDraw {
    program: usize,
    memory_gib: u64,
    priority: u32,
    waited_min: u64,
    on: Option<usize>,
    started_sms: u32,
    flags: (bool, bool, bool, bool),
}

fn gpu_draw() -> impl Strategy<Value = GpuDraw> {
    let rare = || prop::bool::weighted(0.15);
    (
        0usize..4,
        prop_oneof![6 => Just(1usize), 1 => 0usize..5],
        prop::sample::select(vec![0u32, 10, 20, 40]),
        prop::sample::select(vec![2u64, 6]),
        (rare(), rare(), rare(), rare()),
        rare(),
    )
        .prop_map(|(service, state, sms, quota_gib, flags, a10)| GpuDraw {
            service,
            state,
            sms,
            quota_gib,
            flags,
            a10,
        })
}

fn job_draw() -> impl Strategy<Value = JobDraw> {
    let rare = || prop::bool::weighted(0.15);
    (
        0usize..3,
        prop::sample::select(vec![1u64, 4]),
        1u32..4,
        prop::sample::select(vec![0u64, 20, 500]),
        prop::option::of(0usize..6),
        prop::sample::select(vec![10u32, 20, 40]),
        (rare(), rare(), rare(), rare()),
    )
        .prop_map(|(program, memory_gib, priority, waited_min, on, started_sms, flags)| {
            JobDraw { program, memory_gib, priority, waited_min, on, started_sms, flags }
        })
}

fn cluster() -> impl Strategy<Value = ClusterSnapshot> {
    (prop::collection::vec(gpu_draw(), 0..5), prop::collection::vec(job_draw(), 0..5))
        .prop_map(|(gpus, jobs)| build(&gpus, &jobs))
}

fn build(gpus: &[GpuDraw], jobs: &[JobDraw]) -> ClusterSnapshot {
    let gpus = gpus.iter().enumerate().map(|(i, d)| {
        let mut g = gpu(&format!("g{i}"), SERVICES.get(d.service).copied().unwrap_or("S0"));
        if d.service >= SERVICES.len() {
            g.online = None;
        }
        g.health = HealthState::ALL[d.state];
        g.share = share(d.sms);
        g.quota = Bytes::from_gib(d.quota_gib);
        g.multi_user = d.flags.0;
        if d.a10 {
            g.gpu_type = gpu_type("A10");
        }
        if let Some(o) = &mut g.online {
            o.critical = d.flags.1;
            o.in_mps = !d.flags.2;
            o.uid = d.flags.3.then_some(7);
            o.profile.gpu_type = g.gpu_type.clone();
        }
        g
    });
    let made = jobs.iter().enumerate().map(|(i, d)| {
        let mut j = job(&format!("j{i}"), PROGRAMS[d.program]);
        j.memory = Bytes::from_gib(d.memory_gib);
        j.priority = d.priority;
        j.waited = Micros::from_secs(d.waited_min * 60);
        j.fail_prone = d.flags.0;
        j.pinned = d.flags.1;
        j.uid = d.flags.2.then_some(8);
        j.not_before = if d.flags.3 { Micros::from_secs(20_000) } else { Micros::ZERO };
        j.solo_speed = [(gpu_type("T4"), 0.5), (gpu_type("A10"), 1.0)].into();
        j
    });
    let mut s = snapshot(gpus.collect(), made.collect());
    for (j, d) in jobs.iter().enumerate() {
        let Some(g) = d.on.filter(|&g| g < s.gpus.len() && s.gpus[g].running.is_none()) else {
            continue;
        };
        run(&mut s, j, g);
        s.jobs[j].running_share = Some(share(d.started_sms));
    }
    s
}

/// What the pair is worth, written down again from the definition and not from the planner.
fn worth(s: &ClusterSnapshot, t: &Table, p: &Parameters, g: usize, j: usize) -> Option<f64> {
    let (gpu, job) = (&s.gpus[g], &s.jobs[j]);
    let speed = |share: SmShare| {
        let name = gpu.online.as_ref().map_or("idle", |o| o.profile.workload.as_str());
        let online = OnlineInput {
            profile: ProfileRecord::unknown(WorkloadName::new(name).unwrap(), gpu.gpu_type.clone()),
            share,
        };
        let offline = OfflineInput {
            profile: ProfileRecord::unknown(job.workload.clone(), gpu.gpu_type.clone()),
        };
        f64::from(t.predict(&online, &offline).speed)
    };
    let unit = f64::from(job.priority) * p.aging(job.waited) * job.solo_speed[&gpu.gpu_type];
    let coming = |s: &ClusterSnapshot| {
        // As a newcomer: the same job, not running here.
        let mut other = job.clone();
        if runs_here(gpu, job) {
            if job.pinned {
                return None;
            }
            other.running_on = None;
        }
        let fits = refusal(&p.terms(s), gpu, &other).is_none()
            && speed(gpu.share) >= f64::from(p.min_speed);
        fits.then(|| unit * speed(gpu.share))
    };
    let staying = (runs_here(gpu, job) && refusal(&p.terms(s), gpu, job).is_none())
        .then(|| unit * speed(job.running_share.unwrap()) * (1.0 + p.disruption_cost()));
    match (staying, coming(s)) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}

/// The best total over all ways to pair, GPUs from `g` on.
fn best(worths: &[Vec<Option<f64>>], g: usize, used: &mut Vec<bool>) -> f64 {
    let Some(row) = worths.get(g) else { return 0.0 };
    let mut top = best(worths, g + 1, used);
    for (j, worth) in row.iter().enumerate() {
        if let (Some(w), false) = (worth, used[j]) {
            used[j] = true;
            top = top.max(w + best(worths, g + 1, used));
            used[j] = false;
        }
    }
    top
}

fn value(plan: &ClusterPlan, p: &Parameters) -> f64 {
    plan.assignments
        .iter()
        .map(|a| {
            let bonus = if a.change == Change::Stay { 1.0 + p.disruption_cost() } else { 1.0 };
            f64::from(a.weight) * bonus
        })
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn the_plan_is_the_best_of_all_plans(s in cluster(), t in table()) {
        let p = Parameters { max_disruption: Percent::FULL, ..Parameters::default() };
        let planner = Planner::new(p.clone()).unwrap();
        let plan = planner.plan(&s, &t).unwrap();
        prop_assert_eq!(lint(&s, &plan, &p), []);
        let pairs = |g| (0..s.jobs.len()).map(|j| worth(&s, &t, &p, g, j)).collect();
        let worths: Vec<Vec<_>> = (0..s.gpus.len()).map(pairs).collect();
        let best = best(&worths, 0, &mut vec![false; s.jobs.len()]);
        prop_assert!((value(&plan, &p) - best).abs() <= 1e-4 * (1.0 + best), "{} against {best}", value(&plan, &p));
        prop_assert_eq!(planner.plan(&s, &t).unwrap(), plan);
    }

    #[test]
    fn a_careful_plan_passes_its_lint_too(s in cluster(), t in table(), limit in 0.0f64..100.0) {
        let p = Parameters { max_disruption: Percent::new(limit).unwrap(), ..Parameters::default() };
        let plan = Planner::new(p.clone()).unwrap().plan(&s, &t).unwrap();
        prop_assert_eq!(lint(&s, &plan, &p), []);
        let placed = plan.assignments.len() + plan.waiting.len();
        prop_assert_eq!(placed, s.jobs.len());
        prop_assert!(plan.assignments.iter().all(|a| a.share.total().0 == SMS));
    }
}

/// The same cluster a little later: jobs waited longer, some GPUs lend other shares, and the plan
/// was carried out.
fn later(s: &ClusterSnapshot, plan: &ClusterPlan, shares: &[u32]) -> ClusterSnapshot {
    let mut next = s.clone();
    next.at = Micros(s.at.0 + 900_000_000);
    for (g, &sms) in next.gpus.iter_mut().zip(shares) {
        g.share = share(sms);
        g.running = None;
    }
    for g in &mut next.gpus {
        g.running = None;
    }
    for j in &mut next.jobs {
        (j.running_on, j.running_share) = (None, None);
        j.waited = Micros(j.waited.0 + 900_000_000);
    }
    for a in &plan.assignments {
        let g = next.gpus.iter_mut().find(|g| g.gpu == a.gpu).unwrap();
        g.running = Some(a.job.clone());
        let j = next.jobs.iter_mut().find(|j| j.job == a.job).unwrap();
        (j.running_on, j.running_share) = (Some(a.gpu.clone()), Some(a.share));
    }
    next
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn a_memory_changes_nothing_but_the_time(
        s in cluster(),
        t in table(),
        shares in prop::collection::vec(prop::sample::select(vec![0u32, 10, 20, 40]), 0..5),
    ) {
        let p = Parameters { max_disruption: Percent::FULL, ..Parameters::default() };
        let planner = Planner::new(p.clone()).unwrap();
        let mut memory = Memory::default();
        let mut s = s;
        for _ in 0..3 {
            let warm = planner.plan_next(&mut memory, &s, &t).unwrap();
            prop_assert_eq!(lint(&s, &warm, &p), []);
            let cold = planner.plan(&s, &t).unwrap();
            let (a, b) = (value(&warm, &p), value(&cold, &p));
            prop_assert!((a - b).abs() <= 1e-5 * (1.0 + b), "{a} with a memory, {b} without");
            s = later(&s, &warm, &shares);
        }
    }
}
