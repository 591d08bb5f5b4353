//! The scheduler loop: at every interval, and when something happens that cannot wait, it takes a
//! snapshot, plans, lints, writes the plan down and carries it out.
//!
//! A plan made because something happened disturbs nobody who runs; moves and restarts belong to the
//! interval. Plans keep nothing from one to the next, so that a saved one can be made again.

pub mod admit;
mod again;
pub mod apply;
pub mod record;
pub mod retrain;
pub mod snapshot;
pub mod speeds;
pub mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use muxflow_api::cluster::PlanRecord;
use muxflow_policy::cluster::{Parameters, Planner, lint};
use muxflow_policy::retry::RetryParams;
use muxflow_store::events::NewEvent;
use muxflow_types::{Micros, Percent};

use crate::clock;
use crate::error::Result;
use crate::manager::{Manager, Planned, Wake};
use admit::ProfilerSettings;
use again::Again;
use speeds::Speeds;

/// Events that come close together make one plan.
const GATHER: Duration = Duration::from_millis(50);

/// The cause of plans that may move jobs.
const INTERVAL: &str = "interval";

/// What the scheduler is held to.
#[derive(Debug, Clone, PartialEq)]
pub struct SchedulerSettings {
    /// Between two plans that may move jobs.
    pub interval: Micros,
    /// What a restart costs a job.
    pub restart_cost: Micros,
    /// Per cent of the running jobs that one plan may disturb.
    pub max_disruption: Percent,
    /// Threads for planning.
    pub threads: usize,
    /// Waits of jobs that fail.
    pub retry: RetryParams,
    /// How jobs are measured.
    pub profiler: ProfilerSettings,
    /// An observed speed goes to the store this often.
    pub observe_every: Duration,
    /// Between two trainings; none trains nothing.
    pub retrain_every: Option<Duration>,
}

impl Default for SchedulerSettings {
    fn default() -> Self {
        let parameters = Parameters::default();
        SchedulerSettings {
            interval: parameters.interval,
            restart_cost: parameters.restart_cost,
            max_disruption: parameters.max_disruption,
            threads: 1,
            retry: RetryParams::default(),
            profiler: ProfilerSettings::default(),
            observe_every: Duration::from_secs(60),
            retrain_every: Some(Duration::from_secs(24 * 3600)),
        }
    }
}

impl SchedulerSettings {
    /// The planner's settings, for a plan that may move jobs or one that may not.
    pub fn parameters(&self, may_move: bool) -> Parameters {
        Parameters {
            interval: self.interval,
            restart_cost: self.restart_cost,
            max_disruption: if may_move { self.max_disruption } else { Percent::ZERO },
            threads: self.threads,
            ..Parameters::default()
        }
    }
}

/// The scheduler of a manager.
#[derive(Debug)]
pub struct Scheduler {
    /// The manager.
    pub manager: Arc<Manager>,
    /// What it is held to.
    pub settings: SchedulerSettings,
    /// Models in use and profiles read.
    pub speeds: Arc<Speeds>,
}

impl Scheduler {
    /// Runs until the manager leaves.
    pub fn run(&self, wakes: &Receiver<Wake>, leave: &AtomicBool) {
        let interval = Duration::from_micros(self.settings.interval.0);
        let mut next = Instant::now();
        let mut took = Duration::ZERO;
        let mut again = Again::default();
        while !leave.load(Ordering::Acquire) {
            let wait = again.before(next).saturating_duration_since(Instant::now());
            let cause = match wakes.recv_timeout(wait) {
                Ok(Wake::Leave) | Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => "the last plan failed".to_owned(),
                Ok(Wake::Event(cause)) => {
                    // Planning never takes more than half of the time.
                    std::thread::sleep(GATHER.max(took));
                    let more = wakes.try_iter().collect::<Vec<_>>();
                    if more.contains(&Wake::Leave) {
                        return;
                    }
                    match more.len() {
                        0 => cause,
                        count => format!("{cause} and {count} more"),
                    }
                }
            };
            // Whatever woke it: where something always happens, no wait would ever run out.
            let may_move = Instant::now() >= next;
            let cause = if may_move { INTERVAL.to_owned() } else { cause };
            if may_move {
                next = Instant::now() + interval;
            }
            let began = Instant::now();
            let well = self.cycle(&cause, may_move).unwrap_or_else(|error| {
                tracing::error!(error = error.in_full(), cause, "no plan was carried out");
                false
            });
            again.note(well, Instant::now());
            took = began.elapsed();
        }
    }

    /// One cycle: admit, plan, lint, write down, carry out. Whether nothing is left to be tried again.
    pub fn cycle(&self, cause: &str, may_move: bool) -> Result<bool> {
        if !self.manager.settings.shadow {
            self.expire()?;
        }
        if self.manager.is_paused() {
            return Ok(true);
        }
        self.admit()?;
        let began = Instant::now();
        let snapshot = self.snapshot()?;
        let waiting = snapshot.jobs.iter().any(|job| job.running_on.is_none());
        if !may_move && !waiting {
            return Ok(true);
        }
        let parameters = self.settings.parameters(may_move);
        let planner = Planner::new(parameters)?;
        let registry = self.speeds.registry();
        let plan = planner.plan(&snapshot, &*registry)?;
        let findings: Vec<String> =
            lint(&snapshot, &plan, planner.parameters()).iter().map(ToString::to_string).collect();
        let took = began.elapsed();
        let applied = findings.is_empty() && !self.manager.settings.shadow;
        let record = PlanRecord {
            version: record::VERSION,
            at_us: snapshot.at.0,
            cause: cause.to_owned(),
            applied,
            took_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            findings: findings.clone(),
            speeds: self.speeds.words(),
            max_disruption_pct: planner.parameters().max_disruption.value(),
            interval_us: planner.parameters().interval.0,
            restart_cost_us: planner.parameters().restart_cost.0,
            snapshot: muxflow_api::snapshot::render(&snapshot),
            plan: muxflow_api::plan::render(&plan),
            models: self.speeds.model_texts(),
        };
        let planned = Planned { snapshot, plan, registry };
        self.manager.set_plan(record, planned)?;
        let Some(planned) = self.manager.planned() else { return Ok(true) };
        if !findings.is_empty() {
            self.manager.tell(NewEvent {
                at: clock::now(),
                kind: "alert",
                gpu: None,
                job: None,
                service: None,
                text: format!("a plan was not carried out: {}", findings.join("; ")),
            });
            return Ok(false);
        }
        self.apply(&planned.snapshot, &planned.plan, cause)?;
        Ok(true)
    }
}
