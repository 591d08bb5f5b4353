//! The simulator's side: the scenario as it takes it, and what it says came of it.

use muxflow_gpu_model::shape::WorkloadShape;
use muxflow_gpu_model::{Gap, GpuProfile, Phase, Rng, Sharing, averaged};
use muxflow_sim::latency::QueueTable;
use muxflow_sim::outcome::Mode;
use muxflow_sim::policy::{self, Policy};
use muxflow_sim::scenario::{Pool, Service};
use muxflow_sim::trace::{JobRow, RequestCurve};
use muxflow_sim::{Scenario, predictors};
use muxflow_types::{
    Bytes, ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor, WorkloadName,
};

use crate::{Run, Story, plan};

fn gpu() -> GpuProfile {
    GpuProfile::built_in("T4").unwrap()
}

/// What one replica of the service runs: a request of 4 ms on half of the SMs, one at a time.
pub(crate) fn service() -> WorkloadShape {
    WorkloadShape {
        name: WorkloadName::new("agreement-infer").unwrap(),
        phase: Phase::Inference,
        busy_us: 4_000.0,
        host_gap_us: 0.0,
        kernels: plan().request_kernels,
        sm_fill: 20.0,
        occupancy: 0.35,
        issue: 0.5,
        bandwidth: 0.4,
        memory: Bytes::from_mib(1_700),
        batch_cost: 1.0,
    }
}

/// MuxFlow with a fixed share, so that both sides lend the same.
struct FixedShare(Box<dyn Policy>);

impl Policy for FixedShare {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn about(&self) -> &'static str {
        "a fixed share"
    }

    fn mode(&self) -> Mode {
        self.0.mode()
    }

    fn watched(&self) -> bool {
        self.0.watched()
    }

    fn share(&self, _: Percent, sms: SmCount, _: &Service) -> SmShare {
        let percent = Percent::clamped(plan().share_pct.into()).unwrap();
        SmShare::from_percent(percent, sms).unwrap()
    }

    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String> {
        self.0.plan(snapshot, predictor)
    }
}

/// The simulator's step: it notices the burst at the second step, much as the agent does with the
/// latencies of the last requests and the time it waits for confirmation.
const STEP_S: f64 = 0.5;

/// Rates by the step; the simulator draws straight lines between the middles of steps, so the one
/// before the burst gives way to it.
fn curve() -> RequestCurve {
    // Replicas differ in how busy they are; `run` checks that this one got what was meant.
    let seconds = std::iter::successors(Some(STEP_S / 2.0), |at| Some(at + STEP_S));
    let rates = seconds.take_while(|at| *at < plan().end_s).map(rate).collect();
    RequestCurve { name: "agreement".to_owned(), step_s: STEP_S, rates }
}

fn rate(at_s: f64) -> f64 {
    if at_s < plan().burst_at_s { plan().calm_per_s } else { plan().burst_per_s }
}

fn scenario(seed: u64) -> Scenario {
    let profile = gpu();
    let service = Service {
        name: "agreement".to_owned(),
        shape: service(),
        curve: curve(),
        max_batch: 1,
        weight: 1.0,
        slo_ms: plan().slo_ms,
        critical: false,
        slowdown_budget: 0.2,
    };
    let job = JobRow {
        id: "job".to_owned(),
        submit_s: 0.0,
        duration_s: 3_600.0,
        gpus: 1,
        workload: Some(plan().job.to_owned()),
    };
    Scenario {
        pools: vec![Pool { profile, gpus: 1 }],
        services: vec![service],
        jobs: vec![job],
        horizon_s: plan().end_s,
        limit_s: plan().end_s,
        interval_s: 3.0,
        tick_s: STEP_S,
        restart_s: 1.0,
        profile_s: 1.0,
        checkpoint_s: 1.0,
        faults: false,
        graceful_exit: true,
        cancelled: 0.0,
        fail_prone: 0.0,
        breaks_after_s: 1_800.0,
        mark_fail_prone: false,
        outage_s: 30.0,
        seed,
    }
}

/// What the simulator says.
pub(crate) fn run() -> Run {
    // The seed deals the one replica out with the average load.
    let result = (0..100).map(simulate).find(|result| {
        let calm = result.series.iter().find(|point| point.at_s >= plan().shared.0).unwrap();
        (calm.requests_per_s / plan().calm_per_s - 1.0).abs() < 0.01
    });
    let result = result.expect("some seed gives the average replica");
    let profile = gpu();
    let placed = WorkloadShape::built_in(plan().job).unwrap().on(&profile);
    let tenant = placed.tenant(Gap::Closed { gap_us: placed.host_gap_us });
    let solo_per_s = averaged(&profile, &Sharing::Mps, &[tenant]).iterations_per_s[0];
    let story = |(from, to): (f64, f64)| {
        let points: Vec<_> =
            result.series.iter().filter(|p| from <= p.at_s && p.at_s < to).collect();
        let n = points.len() as f64;
        let mean = |of: fn(&muxflow_sim::metrics::Point) -> f64| {
            points.iter().map(|point| of(point)).sum::<f64>() / n
        };
        let requests: f64 = points.iter().map(|point| point.requests_per_s).sum();
        Story {
            latency_ms: points.iter().map(|p| p.latency_ms * p.requests_per_s).sum::<f64>()
                / requests,
            offline_per_s: mean(|point| point.oversold_now) * solo_per_s,
            utilisation: mean(|point| point.gpu_util),
            sm_activity: mean(|point| point.sm_activity),
        }
    };
    let left = result.series.iter().rev().find(|point| point.running > 0.0);
    Run {
        shared: story(plan().shared),
        alone: story(plan().alone),
        whole: story(plan().whole()),
        evictions: result.counts.evictions,
        evicted_at_s: left.map_or(0.0, |point| point.at_s + STEP_S),
    }
}

fn simulate(seed: u64) -> muxflow_sim::RunResult {
    let scenario = scenario(seed);
    let types = vec![scenario.pools[0].profile.clone()];
    let with = predictors::by_name("rule", &types, 1).unwrap();
    let policy = Box::new(FixedShare(policy::by_name("muxflow", seed).unwrap()));
    muxflow_sim::run(&scenario, policy, with.predictor.as_ref(), &with.name, &mut |_, _| {})
        .unwrap()
}

/// When the requests of one run come, device microseconds since the start.
pub(crate) struct Arrivals(pub(crate) Vec<f64>);

impl Arrivals {
    /// Poisson arrivals that are typical: their number, and the mean latency of a queue that they
    /// alone would make, are as the theory says within a per cent. A few hundred requests would
    /// otherwise differ by more than what is to be shown.
    pub(crate) fn typical(run: u64) -> Arrivals {
        let calm = draw(run, 0, (0.0, plan().burst_at_s), plan().calm_per_s, plan().shared);
        let burst =
            draw(run, 1, (plan().burst_at_s, plan().end_s), plan().burst_per_s, plan().alone);
        Arrivals(calm.into_iter().chain(burst).collect())
    }
}

fn draw(run: u64, phase: u64, (from, to): (f64, f64), per_s: f64, window: (f64, f64)) -> Vec<f64> {
    let busy_us = service().busy_us;
    let expected = QueueTable::new(1.0, 1).at(per_s * busy_us / 1e6).mean * busy_us;
    let wanted = per_s * (window.1 - window.0);
    for attempt in 0..1_000_000 {
        let mut rng = Rng::fork(run * 1_000_003 + attempt, phase);
        let mut at = from * 1e6;
        let mut all = Vec::new();
        loop {
            at += rng.exponential(1e6 / per_s);
            if at >= to * 1e6 {
                break;
            }
            all.push(at);
        }
        let (mut free, mut sum, mut count) = (0.0_f64, 0.0, 0.0);
        for &came in &all {
            free = free.max(came) + busy_us;
            if window.0 * 1e6 <= came && came < window.1 * 1e6 {
                sum += free - came;
                count += 1.0;
            }
        }
        let near = |seen: f64, wanted: f64| (seen / wanted - 1.0).abs() < 0.01;
        if near(count, wanted) && near(sum / count, expected) {
            return all;
        }
    }
    panic!("no typical arrivals in a million draws");
}
