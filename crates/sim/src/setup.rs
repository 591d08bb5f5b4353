//! Everything that a run needs before its first event.

use std::collections::BTreeMap;
use std::sync::Arc;

use muxflow_gpu_model::{Gap, Phase, Rng, Sharing, WorkloadShape, averaged};
use muxflow_policy::node::builtin::laws_of;
use muxflow_policy::node::forecast::{ActivityForecaster, ForecastParams};
use muxflow_policy::node::health::{HealthMachine, HealthParams};
use muxflow_policy::node::share::ShareParams;
use muxflow_types::{GpuId, GpuType, JobId, Micros, NodeId, Percent, ProfileRecord};

use crate::engine::{EPOCH_S, micros};
use crate::error::SimError;
use crate::latency::QueueTable;
use crate::outcome::{Mode, Outcomes, PoolTruth, ServiceTruth, rate_of, rate_step};
use crate::scenario::Scenario;
use crate::world::{Gpu, Job, REPLICA_CLASSES, Stage, Workloads};

fn value<T, E: std::fmt::Display>(what: &'static str, r: Result<T, E>) -> Result<T, SimError> {
    r.map_err(|e| SimError::Value { what, reason: e.to_string() })
}

/// The workloads that the jobs of a scenario run, and how fast each is alone on each pool.
pub(crate) fn workloads(scenario: &Scenario) -> Result<Workloads, SimError> {
    let all = WorkloadShape::built_in_list()?;
    let mut shapes: Vec<WorkloadShape> = Vec::new();
    for j in &scenario.jobs {
        let name = j.workload.as_deref().unwrap_or("");
        if shapes.iter().any(|s| s.name.as_str() == name) {
            continue;
        }
        match all.iter().find(|w| w.name.as_str() == name) {
            Some(found) => shapes.push(found.clone()),
            None => shapes.push(WorkloadShape::built_in(name)?),
        }
    }
    let reference = muxflow_gpu_model::GpuProfile::built_in(muxflow_gpu_model::shape::REFERENCE)?;
    let alone = |profile: &muxflow_gpu_model::GpuProfile, shape: &WorkloadShape| {
        let placed = shape.on(profile);
        let tenant = placed.tenant(Gap::Closed { gap_us: placed.host_gap_us });
        averaged(profile, &Sharing::Mps, &[tenant]).iterations_per_s[0]
    };
    let solo = scenario
        .pools
        .iter()
        .map(|p| shapes.iter().map(|s| alone(&p.profile, s) / alone(&reference, s)).collect())
        .collect();
    Ok(Workloads { shapes, solo })
}

/// The queueing tables of all services.
pub(crate) fn tables(scenario: &Scenario) -> Vec<Arc<QueueTable>> {
    let table = |s: &crate::scenario::Service| QueueTable::new(s.shape.batch_cost, s.max_batch);
    scenario.services.iter().map(|s| Arc::new(table(s))).collect()
}

pub(crate) fn outcomes(
    scenario: &Scenario,
    workloads: &Workloads,
    tables: &[Arc<QueueTable>],
    mode: Mode,
) -> Outcomes {
    let pools = scenario
        .pools
        .iter()
        .map(|p| PoolTruth { profile: p.profile.clone(), laws: laws_of(&p.profile.gpu_type) })
        .collect();
    let services = scenario
        .services
        .iter()
        .zip(tables)
        .map(|(s, table)| ServiceTruth { shape: s.shape.clone(), table: Arc::clone(table) })
        .collect();
    Outcomes::new(mode, pools, services, &workloads.shapes)
}

/// The times of the health machine where one sample stands for a whole tick.
fn health_params(tick_s: f64) -> HealthParams {
    let ticks = |n: f64| Micros::from_secs_f64(tick_s * n).unwrap_or(Micros::from_secs(60));
    HealthParams {
        stale_after: ticks(2.5),
        lost_after: ticks(10.0),
        confirm_after: Micros::ZERO,
        recover_after: ticks(1.0),
        ..HealthParams::default()
    }
}

/// GPUs, eight to a machine, services and classes of replicas dealt out at random.
pub(crate) fn gpus(scenario: &Scenario, watched: bool) -> Result<Vec<Gpu>, SimError> {
    let mut rng = Rng::fork(scenario.seed, 31);
    let total: f64 = scenario.services.iter().map(|s| s.weight).sum();
    let mut out = Vec::with_capacity(scenario.gpus());
    for (p, pool) in scenario.pools.iter().enumerate() {
        let laws = laws_of(&pool.profile.gpu_type);
        if watched && laws.is_none() {
            return Err(SimError::Setting {
                field: "GPU type",
                value: pool.profile.gpu_type.to_string(),
                reason: "the policy needs the node laws of the type; there are laws for T4 and A10",
            });
        }
        for i in 0..pool.gpus {
            let mut draw = rng.uniform() * total;
            let mut service = 0;
            for (s, spec) in scenario.services.iter().enumerate() {
                service = s;
                if draw < spec.weight {
                    break;
                }
                draw -= spec.weight;
            }
            let health = laws.clone().filter(|_| watched).map(|l| {
                let mut machine =
                    HealthMachine::new(l.thresholds, health_params(scenario.tick_s), micros(0.0));
                let slo = scenario.services[service].slo_ms;
                machine.set_slo(Micros::from_secs_f64(slo / 1e3).ok());
                machine
            });
            let name = format!("{}-{i:06}", pool.profile.gpu_type);
            let node = format!("node-{p}-{:05}", i / 8);
            out.push(Gpu {
                id: value("a GPU id", GpuId::new(&name))?,
                node: value("a node id", NodeId::new(&node))?,
                pool: p,
                service,
                class: rng.below(REPLICA_CLASSES.len()),
                running: Vec::new(),
                stays: 0,
                health,
                down: false,
                outcome: crate::outcome::Outcome::default(),
                error_day: None,
            });
        }
    }
    Ok(out)
}

pub(crate) fn jobs(scenario: &Scenario, workloads: &Workloads) -> Result<Vec<Job>, SimError> {
    let mut rng = Rng::fork(scenario.seed, 41);
    let mut out = Vec::with_capacity(scenario.jobs.len());
    let mut fate = Rng::fork(scenario.seed, 43);
    for (i, row) in scenario.jobs.iter().enumerate() {
        let name = row.workload.as_deref().unwrap_or("");
        let workload = workloads.shapes.iter().position(|s| s.name.as_str() == name).unwrap_or(0);
        let cancel = rng.uniform() < scenario.cancelled;
        let part = rng.uniform();
        out.push(Job {
            id: value("a job id", JobId::new(&format!("job-{i:07}")))?,
            workload,
            submit_s: row.submit_s,
            duration_s: row.duration_s,
            left_s: row.duration_s,
            stage: Stage::Unborn,
            start_s: None,
            end_s: None,
            separate_s: 0.0,
            real_s: 0.0,
            evictions: 0,
            failures: Default::default(),
            not_before_s: 0.0,
            since_s: row.submit_s,
            waited_s: 0.0,
            cancel_at_left_s: if cancel { row.duration_s * part } else { 0.0 },
            breaks: fate.uniform() < scenario.fail_prone,
        });
    }
    Ok(out)
}

/// Profiles by pool: of each workload, and of each service at its mean rate.
pub(crate) struct Profiles {
    pub(crate) workloads: Vec<BTreeMap<GpuType, ProfileRecord>>,
    pub(crate) solo: Vec<BTreeMap<GpuType, f64>>,
    /// By pool, service and class.
    pub(crate) services: Vec<Vec<Vec<ProfileRecord>>>,
}

impl Profiles {
    pub(crate) fn new(scenario: &Scenario, workloads: &Workloads) -> Self {
        let of = |shape: &WorkloadShape| {
            let each = scenario
                .pools
                .iter()
                .map(|p| (p.profile.gpu_type.clone(), shape.profile_record(&p.profile, 0.0)));
            each.collect()
        };
        let solo = |w: usize| {
            let each = scenario.pools.iter().enumerate();
            each.map(|(p, pool)| (pool.profile.gpu_type.clone(), workloads.solo[p][w])).collect()
        };
        Profiles {
            workloads: workloads.shapes.iter().map(of).collect(),
            solo: (0..workloads.shapes.len()).map(solo).collect(),
            services: scenario
                .pools
                .iter()
                .map(|p| {
                    scenario
                        .services
                        .iter()
                        .map(|s| vec![record(s, &p.profile, s.curve.mean()); REPLICA_CLASSES.len()])
                        .collect()
                })
                .collect(),
        }
    }

    /// Takes the profiles of services at the rates of now: what the monitor has seen lately.
    pub(crate) fn refresh(&mut self, scenario: &Scenario, rates: &[Vec<u32>]) {
        for (p, pool) in scenario.pools.iter().enumerate() {
            for (s, service) in scenario.services.iter().enumerate() {
                for (c, step) in rates[s].iter().enumerate() {
                    // In steps of a twentieth, so that equal GPUs stay equal.
                    let rate = coarse(rate_of(*step));
                    self.services[p][s][c] = record(service, &pool.profile, rate);
                }
            }
        }
    }
}

fn coarse(rate: f64) -> f64 {
    if rate <= 0.0 { 0.0 } else { ((rate.ln() / 0.05).round() * 0.05).exp() }
}

fn record(
    service: &crate::scenario::Service,
    profile: &muxflow_gpu_model::GpuProfile,
    rate: f64,
) -> ProfileRecord {
    debug_assert_eq!(service.shape.phase, Phase::Inference);
    service.shape.profile_record(profile, rate)
}

/// What each class of replicas of each service on each pool will need.
pub(crate) struct Forecasts {
    by_class: Vec<Vec<Vec<ActivityForecaster>>>,
    /// SM activity alone at each rate step, by pool and service.
    activity: BTreeMap<(usize, usize, u32), f64>,
    pools: Vec<PoolTruth>,
    services: Vec<WorkloadShape>,
    tables: Vec<Arc<QueueTable>>,
}

/// Makes the forecasts and lets them see the two days before the run.
pub(crate) fn forecasts(scenario: &Scenario, tables: &[Arc<QueueTable>]) -> Forecasts {
    let wanted = ForecastParams {
        interval: Micros::from_secs_f64(scenario.interval_s).unwrap_or(Micros::ZERO),
        ..ForecastParams::default()
    };
    let params = wanted.check().unwrap_or_default();
    let coverage = ShareParams::default().coverage;
    let per_class =
        || (0..REPLICA_CLASSES.len()).map(|_| ActivityForecaster::new(params, coverage)).collect();
    let per_service = || scenario.services.iter().map(|_| per_class()).collect();
    let mut out = Forecasts {
        by_class: scenario.pools.iter().map(|_| per_service()).collect(),
        activity: BTreeMap::new(),
        pools: scenario
            .pools
            .iter()
            .map(|p| PoolTruth { profile: p.profile.clone(), laws: None })
            .collect(),
        services: scenario.services.iter().map(|s| s.shape.clone()).collect(),
        tables: tables.to_vec(),
    };
    let step = params.interval.as_secs_f64() / 2.0;
    let mut at = -EPOCH_S;
    while at < 0.0 {
        let rates: Vec<Vec<u32>> = scenario
            .services
            .iter()
            .map(|s| REPLICA_CLASSES.iter().map(|c| rate_step(s.curve.at(at) * c)).collect())
            .collect();
        out.observe(at, &rates);
        at += step;
    }
    out
}

impl Forecasts {
    /// Takes what the monitors saw at one moment.
    pub(crate) fn observe(&mut self, at_s: f64, rates: &[Vec<u32>]) {
        for p in 0..self.by_class.len() {
            for (s, rates) in rates.iter().enumerate() {
                for (c, &step) in rates.iter().enumerate() {
                    let activity = self.alone(p, s, step);
                    let seen = Percent::clamped(activity * 100.0).unwrap_or(Percent::FULL);
                    self.by_class[p][s][c].observe(micros(at_s), seen);
                }
            }
        }
    }

    /// What a replica of this class will need in the coming interval.
    pub(crate) fn need(&self, pool: usize, service: usize, class: usize, at_s: f64) -> Percent {
        self.by_class[pool][service][class].demand(micros(at_s)).activity
    }

    fn alone(&mut self, pool: usize, service: usize, step: u32) -> f64 {
        if let Some(known) = self.activity.get(&(pool, service, step)) {
            return *known;
        }
        let profile = &self.pools[pool].profile;
        let rate = rate_of(step);
        let single = self.services[service].on(profile);
        let batch = self.tables[service].at(rate * single.busy_us / 1e6).batch;
        let placed = self.services[service].with_batch(batch).on(profile);
        let tenant = placed.tenant(Gap::Open { per_s: rate / batch });
        let activity = averaged(profile, &Sharing::Mps, &[tenant]).load.sm_activity;
        self.activity.insert((pool, service, step), activity);
        activity
    }
}
