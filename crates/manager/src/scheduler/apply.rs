//! Carries a plan out: every change is written down first, all of them at once, and then ordered.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use muxflow_agent::cgroup::Limits;
use muxflow_agent::gpu::OfflineSpec;
use muxflow_agent::launch::RUN_VARIABLE;
use muxflow_agent::stop::StopLimits;
use muxflow_agent::sys;
use muxflow_api::jobs::JobSubmit;
use muxflow_store::events::NewEvent;
use muxflow_store::jobs::JobRow;
use muxflow_types::{Bytes, Change, ClusterPlan, ClusterSnapshot, SmCount, SmShare, WaitReason};

use super::{INTERVAL, Scheduler};
use crate::clock;
use crate::error::Result;
use crate::lifecycle::Happening;
use crate::manager::advance;
use crate::{submit, views};

/// A job that cannot save its state gets this long to leave in order.
const PLAIN_STOP_MS: u64 = 2_000;

/// A GPU that gets to a start later than this refuses it: the run may have been taken for lost.
pub const START_WITHIN: Duration = Duration::from_secs(60);

/// How long a job may take to leave.
pub fn stop_limits(wanted: &JobSubmit) -> StopLimits {
    let mut stop = StopLimits { checkpoint_ms: PLAIN_STOP_MS, ..StopLimits::default() };
    if let Some(checkpoint) = &wanted.checkpoint {
        stop.checkpoint_ms = checkpoint.window_s * 1000;
        stop.signal = submit::signal(&checkpoint.signal).unwrap_or(stop.signal);
    }
    stop
}

/// What a run of a job is started with.
pub fn spec(row: &JobRow) -> Result<OfflineSpec> {
    let wanted = views::submit_of(row)?;
    let mut env = BTreeMap::new();
    if let Some(user) = sys::user_by_id(row.uid) {
        env.insert("HOME".to_owned(), user.home);
        env.insert("USER".to_owned(), user.name.clone());
        env.insert("LOGNAME".to_owned(), user.name);
    }
    env.extend(wanted.env.clone());
    env.insert("MUXFLOW_JOB".to_owned(), row.id.as_str().to_owned());
    env.insert(RUN_VARIABLE.to_owned(), row.run.to_string());
    if let Some((_, index)) = row.id.as_str().split_once('.') {
        env.insert("MUXFLOW_ARRAY_INDEX".to_owned(), index.to_owned());
    }
    let stop = stop_limits(&wanted);
    if let Some(dir) = wanted.checkpoint.as_ref().and_then(|checkpoint| checkpoint.dir.as_ref()) {
        env.insert("MUXFLOW_CHECKPOINT_DIR".to_owned(), dir.clone());
    }
    let share = row.share.and_then(|(sms, total)| SmShare::new(SmCount(sms), SmCount(total)).ok());
    Ok(OfflineSpec {
        job: row.id.clone(),
        argv: wanted.command,
        env,
        cwd: wanted.cwd.into(),
        user: (sys::own_uid() == 0).then_some((row.uid, row.gid)),
        limits: Limits { cpus: wanted.cpus, memory_bytes: wanted.host_memory_bytes },
        share,
        quota: row.quota_bytes.map(Bytes),
        stop,
        not_after: Some(Instant::now() + START_WITHIN),
    })
}

impl Scheduler {
    /// Orders a run that was written down. What cannot be ordered is written down too.
    pub fn start_on_node(&self, row: &JobRow) -> Result<()> {
        let Some(gpu) = &row.gpu else { return Ok(()) };
        let ordered = spec(row)
            .map_err(|error| error.in_full())
            .and_then(|spec| self.manager.node.start(gpu, spec));
        if let Err(why) = ordered {
            self.manager.run_refused(&row.id, row.run, &why)?;
        }
        Ok(())
    }

    /// Carries a plan out, or in shadow mode only tells it.
    pub fn apply(&self, snapshot: &ClusterSnapshot, plan: &ClusterPlan, cause: &str) -> Result<()> {
        let changes = plan.assignments.iter().filter(|a| a.change != Change::Stay).count();
        let shadow = self.manager.settings.shadow;
        if changes > 0 || !plan.evictions.is_empty() || cause == INTERVAL {
            let word =
                if shadow { "would start, restart or move" } else { "starts, restarts or moves" };
            self.manager.tell(NewEvent {
                at: clock::now(),
                kind: "plan",
                gpu: None,
                job: None,
                service: None,
                text: format!(
                    "{cause}: {word} {changes} of {} jobs on {} GPUs, evicts {}, {} wait",
                    snapshot.jobs.len(),
                    snapshot.gpus.len(),
                    plan.evictions.len(),
                    plan.waiting.len()
                ),
            });
        }
        let (starts, stops) = self.write_down(plan, shadow)?;
        for row in stops {
            self.manager.stop_on_node(&row);
        }
        // They are written down as begun: one that fails does not keep the others from it.
        starts.iter().map(|row| self.start_on_node(row)).fold(Ok(()), Result::and)
    }

    /// All changes of a plan in one transaction; the runs to start and to stop come back.
    fn write_down(&self, plan: &ClusterPlan, shadow: bool) -> Result<(Vec<JobRow>, Vec<JobRow>)> {
        let now = clock::now();
        self.manager.change(|change| {
            let (mut starts, mut stops) = (Vec::new(), Vec::new());
            for waiting in &plan.waiting {
                let Some(mut row) = change.job(&waiting.job)? else { continue };
                // What it waits for is told by what went wrong before.
                if matches!(waiting.reason, WaitReason::BackOff { .. }) && !row.reason.is_empty() {
                    continue;
                }
                let reason = waiting.reason.to_string();
                if !row.is_final && row.gpu.is_none() && row.reason != reason {
                    row.reason = reason;
                    change.put(&row)?;
                }
            }
            // Asked here, where a pause cannot come between: what is started now, its drain will see.
            if shadow || self.manager.is_paused() {
                return Ok((starts, stops));
            }
            for eviction in &plan.evictions {
                let Some(mut row) = change.job(&eviction.job)? else { continue };
                let reason = muxflow_api::plan::eviction_words(&eviction.reason);
                if advance(change, &mut row, Happening::AskStop, now, |row| row.reason = reason)? {
                    stops.push(row);
                }
            }
            for assignment in &plan.assignments {
                let Some(mut row) = change.job(&assignment.job)? else { continue };
                let happening = match &assignment.change {
                    Change::Stay => continue,
                    Change::Start => Happening::Start,
                    Change::Restart | Change::Move { .. } => Happening::AskStop,
                };
                let stepped =
                    advance(change, &mut row, happening, now, |row| match &assignment.change {
                        Change::Move { .. } => {
                            row.reason = format!("moves to GPU {}", assignment.gpu);
                        }
                        Change::Restart => row.reason = "restarts with a new share".to_owned(),
                        Change::Start | Change::Stay => {
                            let share = assignment.share;
                            row.gpu = Some(assignment.gpu.clone());
                            row.share = Some((share.sms().0, share.total().0));
                            row.quota_bytes = Some(assignment.quota.0);
                            row.predicted = Some(f64::from(assignment.predicted_speed));
                            row.seen = None;
                            row.rate = None;
                            row.reason = String::new();
                        }
                    })?;
                match (stepped, happening) {
                    (true, Happening::Start) => starts.push(row),
                    (true, _) => stops.push(row),
                    (false, _) => {}
                }
            }
            Ok((starts, stops))
        })
    }
}
