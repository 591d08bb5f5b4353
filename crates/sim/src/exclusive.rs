//! A cluster without sharing: whole GPUs, gangs, preemption at fixed rounds. It exists to check the
//! event core and the trace readers against a published run: Muri's test bed (400 jobs, 64 V100)
//! under its own baselines SRTF, SRSF and Tiresias.

use crate::error::SimError;
use crate::number::{mean, quantile};
use crate::queue::EventQueue;
use crate::trace::JobRow;

/// Which job goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExclusivePolicy {
    /// Shortest remaining time first.
    Srtf,
    /// Shortest remaining service (time × GPUs) first.
    Srsf,
    /// Tiresias: two queues by attained service (time × GPUs), first in, first out within each.
    Tiresias,
}

/// What came of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExclusiveResult {
    /// Mean job completion time.
    pub jct_mean_s: f64,
    /// 99th percentile of it.
    pub jct_p99_s: f64,
    /// Time until the last job is done.
    pub makespan_s: f64,
    /// Jobs that could not run because they ask for more GPUs than there are.
    pub refused: usize,
}

/// Settings of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExclusiveCluster {
    /// GPUs.
    pub gpus: u32,
    /// Time between rounds of scheduling.
    pub round_s: f64,
    /// What a start or resumption costs.
    pub restart_s: f64,
    /// Attained service at which Tiresias moves a job to its second queue (GPU-seconds).
    pub demotion_s: f64,
}

impl Default for ExclusiveCluster {
    /// Muri's test bed: 64 GPUs, rounds of six minutes.
    fn default() -> Self {
        ExclusiveCluster { gpus: 64, round_s: 360.0, restart_s: 30.0, demotion_s: 3250.0 * 3.6 }
    }
}

#[derive(Debug, Clone, Copy)]
struct State {
    left_s: f64,
    attained: f64,
    running: bool,
    settled_s: f64,
    ready_s: f64,
    end_s: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Round,
    End { job: usize },
}

/// Runs a trace on whole GPUs.
pub fn run_exclusive(
    jobs: &[JobRow],
    cluster: &ExclusiveCluster,
    policy: ExclusivePolicy,
) -> Result<ExclusiveResult, SimError> {
    if cluster.gpus == 0 || cluster.round_s < 1.0 {
        return Err(SimError::Setting {
            field: "cluster",
            value: format!("{cluster:?}"),
            reason: "it needs GPUs, and rounds of at least a second",
        });
    }
    let mut states: Vec<State> = jobs
        .iter()
        .map(|j| State {
            left_s: j.duration_s,
            attained: 0.0,
            running: false,
            settled_s: 0.0,
            ready_s: 0.0,
            end_s: None,
        })
        .collect();
    let mut queue = EventQueue::default();
    queue.push(0.0, Event::Round);
    let fits = |j: &JobRow| j.gpus <= cluster.gpus;
    let refused = jobs.iter().filter(|j| !fits(j)).count();
    let mut open = jobs.len() - refused;
    while let Some(event) = queue.pop() {
        let now = queue.now_s();
        match event {
            Event::End { job } => {
                let s = &mut states[job];
                if s.running && s.end_s.is_none() {
                    settle(s, jobs[job].gpus, now);
                    if s.left_s <= 1e-3 {
                        s.end_s = Some(now);
                        s.running = false;
                        open -= 1;
                    }
                }
            }
            Event::Round => {
                round(jobs, &mut states, cluster, policy, now);
                for (j, s) in states.iter().enumerate().filter(|(_, s)| s.running) {
                    let end = s.ready_s.max(now) + s.left_s;
                    if end <= now + cluster.round_s {
                        queue.push(end, Event::End { job: j });
                    }
                }
                if open > 0 {
                    queue.push(now + cluster.round_s, Event::Round);
                }
            }
        }
    }
    let mut jct: Vec<f64> =
        states.iter().zip(jobs).filter_map(|(s, j)| s.end_s.map(|e| e - j.submit_s)).collect();
    jct.sort_by(f64::total_cmp);
    Ok(ExclusiveResult {
        jct_mean_s: mean(&jct),
        jct_p99_s: quantile(&jct, 0.99),
        makespan_s: states.iter().filter_map(|s| s.end_s).fold(0.0, f64::max),
        refused,
    })
}

fn settle(s: &mut State, gpus: u32, now: f64) {
    let worked = (now - s.settled_s.max(s.ready_s)).max(0.0);
    s.left_s = (s.left_s - worked).max(0.0);
    s.attained += worked * f64::from(gpus);
    s.settled_s = now;
}

/// Orders all jobs that are there, and runs from the front what fits.
fn round(
    jobs: &[JobRow],
    states: &mut [State],
    cluster: &ExclusiveCluster,
    policy: ExclusivePolicy,
    now: f64,
) {
    let mut here: Vec<usize> = (0..jobs.len())
        .filter(|&j| {
            jobs[j].submit_s <= now && states[j].end_s.is_none() && jobs[j].gpus <= cluster.gpus
        })
        .collect();
    for &j in &here {
        if states[j].running {
            settle(&mut states[j], jobs[j].gpus, now);
        }
    }
    let key = |j: usize| {
        let (s, gpus) = (&states[j], f64::from(jobs[j].gpus));
        match policy {
            ExclusivePolicy::Srtf => (0, s.left_s),
            ExclusivePolicy::Srsf => (0, s.left_s * gpus),
            ExclusivePolicy::Tiresias => {
                (usize::from(s.attained > cluster.demotion_s), jobs[j].submit_s)
            }
        }
    };
    let mut keyed: Vec<((usize, f64), usize)> = here.iter().map(|&j| (key(j), j)).collect();
    keyed.sort_by(|a, b| a.0.0.cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)).then(a.1.cmp(&b.1)));
    here = keyed.into_iter().map(|k| k.1).collect();
    let mut free = cluster.gpus;
    for j in here {
        let runs = jobs[j].gpus <= free;
        let s = &mut states[j];
        if runs {
            free -= jobs[j].gpus;
            if !s.running {
                s.running = true;
                s.settled_s = now;
                s.ready_s = now + cluster.restart_s;
            }
        } else {
            s.running = false;
        }
    }
}

/// How far from a published number, in per cent.
pub fn off_by_pct(ours: f64, published: f64) -> f64 {
    (ours / published - 1.0) * 100.0
}
