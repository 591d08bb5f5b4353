//! What is simulated: GPUs, services with their requests, jobs, and the costs of moving them.

use muxflow_gpu_model::{GpuProfile, WorkloadShape};

use crate::error::SimError;
use crate::trace::{
    GenerateJobs, JobRow, RequestCurve, generate::TRAINING_MODELS, generate_jobs, generate_requests,
};

/// One online service, on a share of the cluster's GPUs.
#[derive(Debug, Clone)]
pub struct Service {
    /// Its name.
    pub name: String,
    /// What one replica runs.
    pub shape: WorkloadShape,
    /// Requests that one average replica gets.
    pub curve: RequestCurve,
    /// Largest batch.
    pub max_batch: usize,
    /// How many parts of the cluster's GPUs run it.
    pub weight: f64,
    /// Latency it must hold at the 99th percentile.
    pub slo_ms: f64,
    /// Whether fail-prone jobs must stay away.
    pub critical: bool,
    /// Slowdown it allows where budgets are set for each service; 0.2 is 20 %.
    pub slowdown_budget: f64,
}

/// GPUs of one type.
#[derive(Debug, Clone)]
pub struct Pool {
    /// The type.
    pub profile: GpuProfile,
    /// How many.
    pub gpus: usize,
}

/// Everything that a run needs beside a policy.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// GPUs; each runs one replica of one service.
    pub pools: Vec<Pool>,
    /// Services.
    pub services: Vec<Service>,
    /// Offline jobs, in the order of submission.
    pub jobs: Vec<JobRow>,
    /// Online metrics are taken over this time from the start.
    pub horizon_s: f64,
    /// The run ends here even when jobs are left.
    pub limit_s: f64,
    /// Time between plans (the paper: 15 minutes).
    pub interval_s: f64,
    /// Time between changes of the request rate.
    pub tick_s: f64,
    /// What a start, restart or move costs a job: image, start, warm-up, checkpoint.
    pub restart_s: f64,
    /// Measuring a workload that was never seen (the paper: below 10 minutes).
    pub profile_s: f64,
    /// Work lost when a job dies without a checkpoint.
    pub checkpoint_s: f64,
    /// Whether faults strike.
    pub faults: bool,
    /// Whether stops drain before they kill; off shows what MPS does then.
    pub graceful_exit: bool,
    /// Share of jobs that their users cancel with a signal while they run.
    pub cancelled: f64,
    /// Share of jobs that break again and again, each time taking their neighbours along.
    pub fail_prone: f64,
    /// Mean time on a GPU until such a job breaks.
    pub breaks_after_s: f64,
    /// How long a service is away when an error reaches it: it restarts first.
    pub outage_s: f64,
    /// Whether jobs that failed repeatedly are marked, which keeps them off critical services.
    pub mark_fail_prone: bool,
    /// Seed of everything random.
    pub seed: u64,
}

/// The three services of the default scenario: what they run, lowest and highest requests per
/// second and replica, largest batch, latency to hold at the 99th percentile. The paper's three
/// services get 20 to 190 requests per second, and most of its services may take more than 100 ms;
/// translation needs up to 96 ms for 99 of 100 requests when it is alone, so it may take 200.
const DEFAULT_SERVICES: [(&str, &str, f64, f64, usize, f64); 3] = [
    ("recommendation", "recommend-infer", 40.0, 190.0, 8, 100.0),
    ("vision", "resnet50-infer", 20.0, 90.0, 8, 100.0),
    ("translation", "translate-infer", 20.0, 45.0, 8, 200.0),
];

impl Scenario {
    /// The default services with generated daily curves.
    pub fn default_services(seed: u64) -> Result<Vec<Service>, SimError> {
        let mut out = Vec::new();
        let services = DEFAULT_SERVICES.into_iter().enumerate();
        for (i, (name, workload, low, high, max_batch, slo_ms)) in services {
            out.push(Service {
                name: name.to_owned(),
                shape: WorkloadShape::built_in(workload)?,
                curve: generate_requests(name, low, high, 2, seed.wrapping_add(i as u64))?,
                max_batch,
                weight: 1.0,
                slo_ms,
                critical: false,
                slowdown_budget: 0.2,
            });
        }
        Ok(out)
    }

    /// A scenario on GPUs of one type with the default services and the given jobs.
    pub fn new(
        gpu_type: &str,
        gpus: usize,
        jobs: Vec<JobRow>,
        seed: u64,
    ) -> Result<Self, SimError> {
        if gpus == 0 || gpus > 1_000_000 {
            return Err(SimError::Setting {
                field: "gpus",
                value: gpus.to_string(),
                reason: "write a number from 1 to 1000000",
            });
        }
        let profile = GpuProfile::built_in(gpu_type)?;
        Ok(Scenario {
            pools: vec![Pool { profile, gpus }],
            services: Self::default_services(seed)?,
            jobs: with_models(jobs, seed)?,
            horizon_s: 86_400.0,
            limit_s: 40.0 * 86_400.0,
            interval_s: 900.0,
            tick_s: 60.0,
            restart_s: 60.0,
            profile_s: 300.0,
            checkpoint_s: 600.0,
            faults: true,
            graceful_exit: true,
            cancelled: 0.02,
            fail_prone: 0.0,
            breaks_after_s: 1800.0,
            outage_s: 30.0,
            mark_fail_prone: true,
            seed,
        })
    }

    /// The default: generated Philly-like jobs. Durations are cut at six hours and scaled so that
    /// the jobs alone would fill `fill` of the GPUs over twelve hours, the time in which they come.
    pub fn generated(gpus: usize, jobs: usize, fill: f64, seed: u64) -> Result<Self, SimError> {
        let hours = 12.0;
        let mean =
            fill * crate::number::float(gpus) * hours * 3600.0 / crate::number::float(jobs.max(1));
        let rows = generate_jobs(&GenerateJobs {
            jobs,
            hours,
            longest_s: 6.0 * 3600.0,
            mean_s: Some(mean.clamp(30.0, 4.0 * 3600.0)),
            seed,
        })?;
        Self::new("T4", gpus, rows, seed)
    }

    /// All GPUs.
    pub fn gpus(&self) -> usize {
        self.pools.iter().map(|p| p.gpus).sum()
    }

    /// Refuses what makes no sense, by name.
    pub fn check(&self) -> Result<(), SimError> {
        let bad = |field, value: f64, reason| {
            Err(SimError::Setting { field, value: value.to_string(), reason })
        };
        if self.gpus() == 0 {
            return bad("gpus", 0.0, "there must be at least one");
        }
        if self.services.is_empty() {
            return bad("services", 0.0, "there must be at least one");
        }
        for (field, value) in
            [("interval", self.interval_s), ("horizon", self.horizon_s), ("limit", self.limit_s)]
        {
            if !(value.is_finite() && value >= 1.0) {
                return bad(field, value, "write at least one second");
            }
        }
        if !(self.tick_s.is_finite() && self.tick_s >= 0.1) {
            return bad("tick", self.tick_s, "write at least a tenth of a second");
        }
        if !(0.0..=1.0).contains(&self.fail_prone) {
            return bad("fail-prone jobs", self.fail_prone, "write a share from 0 to 1");
        }
        let sms = self.pools.iter().map(|p| p.profile.sms).max().unwrap_or(0);
        crate::outcome::OutcomeKey::check(self.pools.len(), self.services.len(), 0, sms)?;
        if self.restart_s >= self.interval_s {
            return bad("restart", self.restart_s, "it must be below the interval between plans");
        }
        Ok(())
    }
}

/// Gives each job that names no known workload one of the paper's four models, at random.
fn with_models(mut jobs: Vec<JobRow>, seed: u64) -> Result<Vec<JobRow>, SimError> {
    let known = WorkloadShape::built_in_list()?;
    let mut rng = muxflow_gpu_model::Rng::fork(seed, 11);
    for j in &mut jobs {
        let draw = TRAINING_MODELS[rng.below(4)];
        let keeps = j.workload.as_ref().is_some_and(|w| known.iter().any(|k| k.name.as_str() == w));
        if !keeps {
            j.workload = Some(draw.to_owned());
        }
    }
    Ok(jobs)
}
