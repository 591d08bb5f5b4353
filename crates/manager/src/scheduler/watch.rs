//! Looks around once a second: readings for charts, speeds of running jobs, measurements that are
//! done, runs that nobody looks after, and GPUs that have become free.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_abi::control::rhythm::{self, BUCKETS};
use muxflow_agent::stop::StopLimits;
use muxflow_api::jobs::JobState;
use muxflow_store::Observation;
use muxflow_store::jobs::JobRow;
use muxflow_types::{
    Bytes, GpuId, GpuSample, JobId, Micros, Percent, ProfileRecord, SpeedSample, WorkloadName,
};

use super::apply::START_WITHIN;
use super::{Scheduler, apply};
use crate::clock;
use crate::error::Result;
use crate::lifecycle::Happening;
use crate::node::{GpuSight, Rhythm};
use crate::views;

/// Speeds are seen over at least this long.
const SPEED_WINDOW: Micros = Micros::from_secs(10);
/// A run that the node does not know of is looked for after this.
const SWEEP_AFTER: Micros = Micros::from_secs(20);
/// After this, and the time that its stop may take, it is taken for lost: after a restart of the agent
/// a run may be on its way out that the node does not show.
const LOST_AFTER: Micros = Micros::from_secs(120);
// By then a GPU would refuse to start it.
const _: () = assert!(START_WITHIN.as_micros() * 3 / 2 < LOST_AFTER.0 as u128);
/// Why there is nothing to measure.
const NO_LAUNCH: &str = "it launched nothing in time";

/// What is remembered of a run between two looks.
#[derive(Debug)]
struct Followed {
    run: u64,
    first: Rhythm,
    observed: Instant,
}

/// Looks around.
#[derive(Debug)]
pub struct Watch {
    scheduler: Arc<Scheduler>,
    followed: BTreeMap<JobId, Followed>,
    free: Vec<GpuId>,
    /// Waits that ended up to here were seen.
    seen_until: Micros,
}

/// Iterations between two readings, and the time between them.
fn progress(first: &Rhythm, last: &Rhythm) -> (Option<u32>, Micros) {
    let mut launches = [0_u32; BUCKETS];
    for (sum, (old, new)) in launches.iter_mut().zip(first.launches.iter().zip(last.launches)) {
        *sum = new.wrapping_sub(*old);
    }
    (rhythm::iterations(&launches), last.at.since(first.at))
}

fn mean(samples: &[GpuSample], of: impl Fn(&GpuSample) -> Option<Percent>) -> Option<Percent> {
    let values: Vec<f64> = samples.iter().filter_map(|s| of(s).map(Percent::value)).collect();
    #[expect(clippy::cast_precision_loss, reason = "a count of samples")]
    let count = values.len() as f64;
    (!values.is_empty()).then(|| Percent::clamped(values.iter().sum::<f64>() / count))?
}

fn lost_after(stop: StopLimits) -> Micros {
    let stop_us = u64::try_from(stop.whole().as_micros()).unwrap_or(u64::MAX);
    LOST_AFTER.saturating_add(Micros(stop_us))
}

impl Watch {
    /// For this scheduler.
    pub fn new(scheduler: Arc<Scheduler>) -> Self {
        let seen_until = clock::now();
        Watch { scheduler, followed: BTreeMap::new(), free: Vec::new(), seen_until }
    }

    /// Looks until the manager leaves.
    pub fn run(&mut self, leave: &AtomicBool) {
        let step = Duration::from_millis(self.scheduler.manager.settings.history_step_ms);
        while !leave.load(Ordering::Acquire) {
            let began = Instant::now();
            if let Err(error) = self.look() {
                tracing::error!(error = error.in_full(), "cannot look around");
            }
            std::thread::sleep(step.saturating_sub(began.elapsed()).max(Duration::from_millis(50)));
        }
    }

    /// One look.
    pub fn look(&mut self) -> Result<()> {
        let manager = Arc::clone(&self.scheduler.manager);
        let now = clock::now();
        let sights = manager.node.look();
        for sight in sights.iter().filter(|sight| sight.sample.is_some()) {
            manager.history.push(&sight.gpu, views::reading(sight, now));
        }
        let holders: Vec<JobState> =
            JobState::ALL.into_iter().filter(|state| state.holds_gpu()).collect();
        let filter = muxflow_store::jobs::JobFilter {
            states: holders.iter().map(|state| state.as_str().to_owned()).collect(),
            ..muxflow_store::jobs::JobFilter::default()
        };
        let rows = manager.reader().jobs(&filter, usize::MAX)?;
        self.followed
            .retain(|id, followed| rows.iter().any(|row| row.id == *id && row.run == followed.run));
        for row in &rows {
            let sight = row.gpu.as_ref().and_then(|gpu| sights.iter().find(|s| s.gpu == *gpu));
            let on_gpu = sight
                .and_then(|sight| sight.offline.as_ref())
                .is_some_and(|(job, _)| *job == row.id);
            match (views::state_of(row)?, sight) {
                (JobState::Profiling, Some(sight)) if on_gpu => self.measure(row, sight)?,
                (JobState::Running, Some(sight)) if on_gpu => self.follow(row, sight)?,
                (JobState::Checkpointing, Some(_)) if on_gpu => {
                    // An order that came before the start it was meant for is given again.
                    if now.since(row.changed_at) > Micros::from_secs(3) {
                        manager.stop_on_node(row);
                    }
                }
                _ => self.sweep(row, now)?,
            }
        }
        self.wake_for_room(&sights, now)
    }

    /// A run that the node does not show: perhaps its end was not told.
    fn sweep(&self, row: &JobRow, now: Micros) -> Result<()> {
        let manager = &self.scheduler.manager;
        let since = now.since(row.changed_at);
        if since < SWEEP_AFTER {
            return Ok(());
        }
        let ended = manager.node.last_exit(&row.id).is_some_and(|exit| exit.run == row.run);
        let found = manager.node.found();
        // Its keeper alone knows how it ended, and says so when there is room on the disk: until then
        // it may be done, however long that takes.
        let is_kept = found.contains(&(row.id.clone(), row.run));
        let lost = || -> Result<bool> {
            Ok(since > lost_after(apply::stop_limits(&views::submit_of(row)?)))
        };
        if ended || (!is_kept && lost()?) {
            let retry = &self.scheduler.settings.retry;
            manager.settle(row, &found, retry, "the node does not know of it")?;
            manager.wake(format!("{} was found ended", row.id));
        }
        Ok(())
    }

    /// Has the scheduler look when there is work and new room for it, or a wait is over.
    fn wake_for_room(&mut self, sights: &[GpuSight], now: Micros) -> Result<()> {
        let free: Vec<GpuId> = sights
            .iter()
            .filter(|s| s.placeable && s.share.is_some() && s.quota.0 > 0 && s.sms.0 > 0)
            .filter(|s| s.outside_mps.is_empty())
            .map(|sight| sight.gpu.clone())
            .collect();
        let manager = &self.scheduler.manager;
        let more = free.iter().any(|gpu| !self.free.contains(gpu));
        self.free = free;
        if !manager.settings.shadow && manager.reader().any_late(now)? {
            manager.wake("a deadline has passed");
        }
        if self.free.is_empty() {
            return Ok(());
        }
        // However long the last look took, no end of a wait falls between two of them.
        let since = std::mem::replace(&mut self.seen_until, now);
        let (waiting, due) = {
            let reader = manager.reader();
            let unmeasured = reader.any_in(JobState::Submitted.as_str())?;
            (reader.any_in(JobState::Queued.as_str())?, unmeasured || reader.any_due(since, now)?)
        };
        if due || (more && waiting) {
            manager.wake("a GPU has room");
        }
        Ok(())
    }

    /// Where a run stood when it was first seen, or when its last window began.
    fn since(&mut self, row: &JobRow, rhythm: &Rhythm) -> &mut Followed {
        self.followed.entry(row.id.clone()).or_insert_with(|| Followed {
            run: row.run,
            first: rhythm.clone(),
            observed: Instant::now(),
        })
    }

    /// Measures a job that is alone on its GPU. What somebody else takes part of is no measurement.
    fn measure(&mut self, row: &JobRow, sight: &GpuSight) -> Result<()> {
        if sight.online.is_some() || !sight.outside_mps.is_empty() {
            return self.measured(row, Err("it was no longer alone on its GPU"));
        }
        let scheduler = Arc::clone(&self.scheduler);
        let settings = &scheduler.settings.profiler;
        let rhythm = scheduler.manager.node.rhythm(&sight.gpu).filter(|r| r.job == row.id);
        let total = clock::now().since(row.changed_at);
        let over = u128::from(total.0) >= settings.limit.as_micros();
        let Some(rhythm) = rhythm else {
            return if over { self.measured(row, Err(NO_LAUNCH)) } else { Ok(()) };
        };
        let launched = rhythm.launches.iter().any(|count| *count > 0);
        if !launched && !over {
            return Ok(());
        }
        let first = self.since(row, &rhythm).first.clone();
        let (iterations, window) = progress(&first, &rhythm);
        let enough = u128::from(window.0) >= settings.window.as_micros() && iterations.is_some();
        if !enough && !over {
            return Ok(());
        }
        if !launched {
            return self.measured(row, Err(NO_LAUNCH));
        }
        let samples = scheduler.manager.node.samples(&sight.gpu, window.max(Micros::from_secs(1)));
        let solo_time = iterations.map(|count| Micros(window.0 / u64::from(count.max(1))));
        let profile = ProfileRecord {
            workload: row.workload.clone(),
            gpu_type: sight.gpu_type.clone(),
            gpu_util: mean(&samples, |s| s.gpu_util),
            sm_activity: mean(&samples, |s| s.sm_activity),
            sm_occupancy: mean(&samples, |s| s.sm_occupancy),
            dram_activity: mean(&samples, |s| s.dram_activity),
            solo_time: solo_time.filter(|time| time.0 > 0),
            memory: Some(rhythm.peak).filter(|bytes| *bytes > Bytes::ZERO),
        };
        self.measured(row, Ok(profile))
    }

    /// The measurement is over, with or without a result; the job goes on where it is, unless that
    /// GPU is set aside for measuring.
    fn measured(
        &mut self,
        row: &JobRow,
        profile: std::result::Result<ProfileRecord, &str>,
    ) -> Result<()> {
        let scheduler = &self.scheduler;
        let manager = &scheduler.manager;
        let words = match &profile {
            Ok(profile) => {
                manager.store().put_profile(profile, clock::now())?;
                scheduler.speeds.forget(&row.workload);
                let time = profile.solo_time.map_or_else(
                    || "no rhythm was found".to_owned(),
                    |time| format!("{time} per iteration alone"),
                );
                format!("measured: {time}")
            }
            Err(why) => format!("could not be measured: {why}"),
        };
        self.followed.remove(&row.id);
        let aside = scheduler.settings.profiler.set_aside.is_some();
        let happening = if aside { Happening::AskStop } else { Happening::Keep };
        let stepped = manager.step(&row.id, happening, |row| row.reason = words)?;
        if let Some(row) = stepped.filter(|_| aside) {
            manager.stop_on_node(&row);
        }
        manager.wake(format!("{} was measured", row.id));
        Ok(())
    }

    /// How fast a job runs where it is.
    fn follow(&mut self, row: &JobRow, sight: &GpuSight) -> Result<()> {
        let manager = Arc::clone(&self.scheduler.manager);
        let rhythm = manager.node.rhythm(&sight.gpu).filter(|r| r.job == row.id);
        let Some(rhythm) = rhythm else { return Ok(()) };
        let observe_every = self.scheduler.settings.observe_every;
        let followed = self.since(row, &rhythm);
        let (iterations, window) = progress(&followed.first, &rhythm);
        if window < SPEED_WINDOW {
            return Ok(());
        }
        followed.first = rhythm;
        let due = followed.observed.elapsed() >= observe_every;
        if due {
            followed.observed = Instant::now();
        }
        let Some(iterations) = iterations else { return Ok(()) };
        let rate = f64::from(iterations) / window.as_secs_f64();
        let solo = self.scheduler.speeds.profile(&manager, &row.workload, &sight.gpu_type)?;
        let alone = solo.as_ref().and_then(|profile| profile.solo_time);
        let seen = alone.map(|time| (time.as_secs_f64() * rate).min(1.0));
        manager.change(|change| {
            let Some(mut row) = change.job(&row.id)? else { return Ok(()) };
            (row.rate, row.seen) = (Some(rate), seen);
            if let Some(online) = &sight.online {
                change.beside(&row, online.service.as_str())?;
            }
            change.put(&row)
        })?;
        if let (true, Some(speed), Some(offline)) = (due, seen, solo) {
            self.observe(row, sight, offline, speed)?;
        }
        Ok(())
    }

    /// Keeps the speed of a pair for the next training.
    fn observe(
        &self,
        row: &JobRow,
        sight: &GpuSight,
        offline: ProfileRecord,
        speed: f64,
    ) -> Result<()> {
        let Some(online) = &sight.online else { return Ok(()) };
        let Ok(workload) = WorkloadName::new(online.service.as_str()) else { return Ok(()) };
        let manager = &self.scheduler.manager;
        let known = self.scheduler.speeds.profile(manager, &workload, &sight.gpu_type)?;
        let online = known.unwrap_or_else(|| ProfileRecord {
            sm_activity: sight.online_activity,
            ..ProfileRecord::unknown(workload, sight.gpu_type.clone())
        });
        let share = row
            .share
            .filter(|(_, total)| *total > 0)
            .and_then(|(sms, total)| Percent::clamped(f64::from(sms) / f64::from(total) * 100.0));
        let sample = SpeedSample { online, offline, share, speed, at: clock::now() };
        let (job, gpu) = (row.id.clone(), sight.gpu.clone());
        let observation = Observation { job, gpu, predicted: row.predicted, sample };
        Ok(manager.store().put_observed(&[observation])?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_may_take_an_hour_to_save_its_state_is_not_lost_meanwhile() {
        let stop = |checkpoint_ms| StopLimits { checkpoint_ms, ..StopLimits::default() };
        assert!(lost_after(stop(3_600_000)) > Micros::from_secs(3_600 + 120));
        assert!(lost_after(stop(2_000)) < Micros::from_secs(150));
        assert!(lost_after(stop(u64::MAX)) > Micros::from_secs(3_600), "nothing overflows");
    }
}
