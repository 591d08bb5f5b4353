//! The run: events in virtual time, the truth of `gpu-model`, and the real laws of `policy`.

use std::time::Instant;

use muxflow_gpu_model::Rng;
use muxflow_policy::node::health::{HealthEvent, HealthMachine};
use muxflow_policy::retry::RetryParams;
use muxflow_types::{Bytes, GpuSample, MegaHertz, Micros, Percent, SpeedPredictor};

use crate::error::SimError;
use crate::metrics::{Counts, JobRecord, Point, RunResult, Spent};
use crate::number::{float, index};
use crate::outcome::{Outcomes, rate_step};
use crate::policy::Policy;
use crate::queue::EventQueue;
use crate::scenario::Scenario;
use crate::setup;
use crate::stays::Who;
use crate::world::{Gpu, Job, REPLICA_CLASSES, Stage, Workloads};

/// Runs begin two days into the policies' time, so that forecasts have a past to look at.
pub(crate) const EPOCH_S: f64 = 2.0 * 86_400.0;

/// What can happen.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Event {
    Arrive(usize),
    Profiled(usize),
    Tick,
    Plan,
    Done { gpu: usize, stay: u32 },
    Fault(usize),
    Breaks { gpu: usize, stay: u32 },
    Repaired(usize),
}

/// A simulation under way.
pub(crate) struct Engine<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) policy: Box<dyn Policy>,
    pub(crate) predictor: &'a dyn SpeedPredictor,
    pub(crate) queue: EventQueue<Event>,
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) workloads: Workloads,
    pub(crate) outcomes: Outcomes,
    pub(crate) forecasts: setup::Forecasts,
    pub(crate) profiles: setup::Profiles,
    /// Jobs that wait or run; those that are done leave at the next plan.
    pub(crate) active: Vec<usize>,
    pub(crate) present: usize,
    pub(crate) gpu_of: std::collections::HashMap<muxflow_types::GpuId, usize>,
    pub(crate) job_of: std::collections::HashMap<muxflow_types::JobId, usize>,
    pub(crate) seen: Vec<bool>,
    pub(crate) open: usize,
    pub(crate) retry: RetryParams,
    pub(crate) faults: Rng,
    pub(crate) counts: Counts,
    pub(crate) series: Vec<Point>,
    pub(crate) service_sums: Vec<(f64, f64)>,
    /// The same sums since the last plan: what monitors would have measured.
    pub(crate) measured: Vec<(f64, f64)>,
    pub(crate) planning_s: f64,
    pub(crate) predicting_s: f64,
}

/// Virtual time as the policies' time.
pub(crate) fn micros(at_s: f64) -> Micros {
    Micros::from_secs_f64(EPOCH_S + at_s).unwrap_or(Micros::ZERO)
}

/// Runs a scenario under a policy. `progress` is called with virtual seconds and the number of jobs
/// that are left.
pub fn run(
    scenario: &Scenario,
    policy: Box<dyn Policy>,
    predictor: &dyn SpeedPredictor,
    predictor_name: &str,
    progress: &mut dyn FnMut(f64, usize),
) -> Result<RunResult, SimError> {
    scenario.check()?;
    let started = Instant::now();
    let mut engine = Engine::new(scenario, policy, predictor)?;
    engine.go(progress)?;
    let total = started.elapsed().as_secs_f64();
    Ok(engine.finish(predictor_name, total))
}

impl<'a> Engine<'a> {
    fn new(
        scenario: &'a Scenario,
        policy: Box<dyn Policy>,
        predictor: &'a dyn SpeedPredictor,
    ) -> Result<Self, SimError> {
        let workloads = setup::workloads(scenario)?;
        let tables = setup::tables(scenario);
        let outcomes = setup::outcomes(scenario, &workloads, &tables, policy.mode());
        let gpus = setup::gpus(scenario, policy.watched())?;
        let jobs = setup::jobs(scenario, &workloads)?;
        let mut queue = EventQueue::default();
        queue.push(0.0, Event::Tick);
        queue.push(0.0, Event::Plan);
        for (j, job) in jobs.iter().enumerate() {
            queue.push(job.submit_s, Event::Arrive(j));
        }
        let mut engine = Engine {
            scenario,
            predictor,
            queue,
            gpu_of: gpus.iter().enumerate().map(|(i, g)| (g.id.clone(), i)).collect(),
            job_of: jobs.iter().enumerate().map(|(i, j)| (j.id.clone(), i)).collect(),
            seen: vec![false; workloads.shapes.len()],
            open: jobs.len(),
            profiles: setup::Profiles::new(scenario, &workloads),
            forecasts: setup::forecasts(scenario, &tables),
            gpus,
            jobs,
            workloads,
            outcomes,
            active: Vec::new(),
            present: 0,
            retry: RetryParams::default(),
            faults: Rng::fork(scenario.seed, 21),
            counts: Counts::default(),
            series: Vec::new(),
            service_sums: vec![(0.0, 0.0); scenario.services.len()],
            measured: vec![(0.0, 0.0); scenario.services.len()],
            planning_s: 0.0,
            predicting_s: 0.0,
            policy,
        };
        if scenario.faults {
            for g in 0..engine.gpus.len() {
                engine.schedule_fault(g);
            }
        }
        Ok(engine)
    }

    pub(crate) fn now_s(&self) -> f64 {
        self.queue.now_s()
    }

    fn go(&mut self, progress: &mut dyn FnMut(f64, usize)) -> Result<(), SimError> {
        let runs_jobs = self.policy.name() != "online-only";
        while let Some(event) = self.queue.pop() {
            let now = self.now_s();
            let jobs_done = self.open == 0 || !runs_jobs;
            if now > self.scenario.limit_s || (jobs_done && now > self.scenario.horizon_s) {
                break;
            }
            self.counts.events += 1;
            match event {
                Event::Arrive(j) => self.arrive(j),
                Event::Profiled(j) => self.wait(j, self.jobs[j].submit_s),
                Event::Tick => {
                    self.tick();
                    progress(now, self.open);
                    self.queue.push(now + self.scenario.tick_s, Event::Tick);
                }
                Event::Plan => {
                    self.plan()?;
                    self.queue.push(now + self.scenario.interval_s, Event::Plan);
                }
                Event::Done { gpu, stay } => self.done(gpu, stay),
                Event::Fault(g) => self.fault(g),
                Event::Breaks { gpu, stay } => self.breaks(gpu, stay),
                Event::Repaired(g) => self.repaired(g),
            }
        }
        Ok(())
    }

    fn arrive(&mut self, j: usize) {
        let workload = self.jobs[j].workload;
        if std::mem::replace(&mut self.seen[workload], true) {
            self.wait(j, self.now_s());
        } else {
            self.jobs[j].stage = Stage::Profiling;
            self.queue.push(self.now_s() + self.scenario.profile_s, Event::Profiled(j));
        }
    }

    fn wait(&mut self, j: usize, since_s: f64) {
        let job = &mut self.jobs[j];
        job.stage = Stage::Waiting;
        job.since_s = since_s;
        self.active.push(j);
        self.present += 1;
    }

    /// All replicas get new request rates; the counters, the health machines and the metrics follow.
    fn tick(&mut self) {
        let now = self.now_s();
        let rates = self.replica_rates(now);
        let mut sum = Point { at_s: now, ..Point::default() };
        for g in 0..self.gpus.len() {
            self.counts.events += 1;
            let (service, class) = (self.gpus[g].service, self.gpus[g].class);
            let step = rates[service][class];
            self.refresh(g, step);
            self.judge(g);
            self.account(g, step, &mut sum);
        }
        self.forecasts.observe(now, &rates);
        let n = float(self.gpus.len());
        let running = sum.running.max(1e-9);
        self.series.push(Point {
            latency_ms: sum.latency_ms / sum.requests_per_s.max(1e-9),
            alone_ms: sum.alone_ms / sum.requests_per_s.max(1e-9),
            p99_ms: sum.p99_ms / sum.requests_per_s.max(1e-9),
            alone_p99_ms: sum.alone_p99_ms / sum.requests_per_s.max(1e-9),
            speed: sum.speed / running,
            oversold_now: sum.speed / n,
            gpu_util: sum.gpu_util / n,
            sm_activity: sum.sm_activity / n,
            memory: sum.memory / n,
            waiting: float(self.present) - sum.running,
            ..sum
        });
    }

    /// Steps of the request rate of each service and class of replicas.
    pub(crate) fn replica_rates(&self, now: f64) -> Vec<Vec<u32>> {
        let of = |s: &crate::scenario::Service| {
            let base = s.curve.at(now);
            REPLICA_CLASSES.iter().map(|c| rate_step(base * c)).collect()
        };
        self.scenario.services.iter().map(of).collect()
    }

    /// Gives the health machine its sample, and evicts when it says so.
    fn judge(&mut self, g: usize) {
        let now = micros(self.now_s());
        let sample = self.sample(g);
        let gpu = &mut self.gpus[g];
        let Some(health) = gpu.health.as_mut() else { return };
        health.step(now, HealthEvent::Sample(&sample));
        if health.permission(now).evict {
            for slot in (0..self.gpus[g].running.len()).rev() {
                self.counts.evictions += 1;
                self.stop(g, slot, true);
            }
        }
    }

    fn sample(&self, g: usize) -> GpuSample {
        let gpu = &self.gpus[g];
        let o = &gpu.outcome;
        let at = micros(self.now_s());
        GpuSample {
            gpu_util: Percent::clamped(o.gpu_util * 100.0),
            sm_activity: Percent::clamped(o.sm_activity * 100.0),
            sm_clock: Some(MegaHertz(u32::try_from(index(o.clock_mhz)).unwrap_or(0))),
            memory_used: Some(self.memory(g)),
            memory_total: Some(self.scenario.pools[gpu.pool].profile.memory),
            online_latency: Micros::from_secs_f64(o.p99_ms / 1e3).ok(),
            ..GpuSample::empty(at)
        }
    }

    fn memory(&self, g: usize) -> Bytes {
        let gpu = &self.gpus[g];
        let online = self.scenario.services[gpu.service].shape.memory;
        let memory = |job: usize| self.workloads.shapes[self.jobs[job].workload].memory;
        gpu.running.iter().fold(online, |sum, r| sum.saturating_add(memory(r.job)))
    }

    fn account(&mut self, g: usize, step: u32, sum: &mut Point) {
        let gpu = &self.gpus[g];
        if gpu.down {
            return;
        }
        let alone = self.outcomes.get(self.key(g, step, Who::Nobody));
        let gpu = &self.gpus[g];
        let o = &gpu.outcome;
        let rate = crate::outcome::rate_of(step);
        sum.requests_per_s += rate;
        sum.latency_ms += rate * o.latency_ms;
        sum.p99_ms += rate * o.p99_ms;
        sum.alone_ms += rate * alone.latency_ms;
        sum.alone_p99_ms += rate * alone.p99_ms;
        sum.gpu_util += o.gpu_util;
        sum.sm_activity += o.sm_activity;
        let total = self.scenario.pools[gpu.pool].profile.memory;
        sum.memory += self.memory(g).share_of(total).map_or(0.0, Percent::fraction);
        if o.overloaded {
            self.counts.overloaded_minutes += self.scenario.tick_s / 60.0;
        }
        if sum.at_s <= self.scenario.horizon_s {
            let s = &mut self.service_sums[gpu.service];
            s.0 += rate * o.latency_ms;
            s.1 += rate * alone.latency_ms;
        }
        sum.running += float(gpu.running.len());
        sum.speed += o.speeds.iter().sum::<f64>();
        let seen = &mut self.measured[gpu.service];
        seen.0 += rate * o.latency_ms;
        seen.1 += rate * alone.latency_ms;
    }

    /// The health machine of a GPU, where the policy watches.
    pub(crate) fn health(&self, g: usize) -> Option<&HealthMachine> {
        self.gpus[g].health.as_ref()
    }

    fn finish(self, predictor_name: &str, total_s: f64) -> RunResult {
        let mut counts = self.counts;
        counts.outcomes = self.outcomes.distinct() as u64;
        let record = |j: &Job| JobRecord {
            submit_s: j.submit_s,
            start_s: j.start_s,
            end_s: j.end_s.filter(|_| j.stage != Stage::Cancelled),
            separate_s: j.separate_s,
            real_s: j.real_s,
            evictions: j.evictions,
            cancelled: j.stage == Stage::Cancelled,
        };
        let by_service = self
            .scenario
            .services
            .iter()
            .zip(&self.service_sums)
            .map(|(s, (shared, alone))| {
                (s.name.clone(), if *alone > 0.0 { shared / alone } else { 1.0 })
            })
            .collect();
        RunResult {
            policy: self.policy.name().to_owned(),
            about: self.policy.about().to_owned(),
            predictor: predictor_name.to_owned(),
            series: self.series,
            jobs: self.jobs.iter().map(record).collect(),
            counts,
            gpus: self.gpus.len(),
            horizon_s: self.scenario.horizon_s,
            by_service,
            spent: Spent {
                planning_s: self.planning_s,
                predicting_s: self.predicting_s,
                rest_s: (total_s - self.planning_s).max(0.0),
            },
        }
    }
}
