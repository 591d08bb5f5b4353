//! The first decision about a job: is it measured first, and where; and the last when its time is
//! over.

use std::collections::BTreeSet;
use std::time::Duration;

use muxflow_api::jobs::{JobState, JobSubmit};
use muxflow_store::jobs::JobRow;
use muxflow_types::{GpuId, GpuType, HealthState, WorkloadName};

use super::Scheduler;
use crate::clock;
use crate::ends::DEADLINE_PASSED;
use crate::error::Result;
use crate::lifecycle::Happening;
use crate::manager::advance;
use crate::node::GpuSight;
use crate::views;

/// How jobs are measured.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfilerSettings {
    /// They are.
    pub enabled: bool,
    /// A GPU that nothing but measuring may use.
    pub set_aside: Option<GpuId>,
    /// What is measured over.
    pub window: Duration,
    /// Measuring never takes longer.
    pub limit: Duration,
    /// A job waits at most so long for an idle GPU to be measured on.
    pub wait: Duration,
}

impl Default for ProfilerSettings {
    fn default() -> Self {
        ProfilerSettings {
            enabled: true,
            set_aside: None,
            window: Duration::from_secs(10),
            limit: Duration::from_secs(60),
            wait: Duration::from_secs(60),
        }
    }
}

/// A GPU on which nothing disturbs a measurement.
fn is_idle(sight: &GpuSight, settings: &ProfilerSettings) -> bool {
    let wanted = match &settings.set_aside {
        Some(gpu) => *gpu == sight.gpu,
        None => true,
    };
    wanted
        && sight.health == HealthState::Healthy
        && sight.placeable
        && sight.online.is_none()
        && sight.offline.is_none()
        && sight.outside_mps.is_empty()
        && sight.share.is_some()
        && sight.quota.0 > 0
}

/// What is to be done with a job that was just taken in.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Admit(&'static str),
    Profile,
    Wait,
}

/// Why a job that could be measured is not yet.
const NO_IDLE_GPU: &str = "waits for an idle GPU to be measured on";
/// What is said of a job that could not be.
const UNMEASURED: &str = "waits for a GPU; not measured, as no GPU was idle";
/// Why a job waits for another.
const MEASURED_ALREADY: &str = "waits while the same program is measured";

impl Scheduler {
    /// Ends jobs whose deadline has passed.
    pub fn expire(&self) -> Result<()> {
        let now = clock::now();
        if !self.manager.reader().any_late(now)? {
            return Ok(());
        }
        let rows = self.manager.reader().open_jobs()?;
        let late = |row: &&JobRow| row.deadline.is_some_and(|deadline| deadline <= now);
        for row in rows.iter().filter(late) {
            if views::state_of(row)? == JobState::Checkpointing {
                continue;
            }
            let stepped = self.manager.step(&row.id, Happening::Expire, |row| {
                row.reason = DEADLINE_PASSED.to_owned();
            })?;
            if let Some(row) = stepped {
                self.manager.stop_on_node(&row);
            }
        }
        Ok(())
    }

    /// Lets new jobs into the queue, or has them measured.
    pub fn admit(&self) -> Result<()> {
        if !self.manager.reader().any_in(JobState::Submitted.as_str())? {
            return Ok(());
        }
        let rows = self.manager.reader().open_jobs()?;
        let settings = &self.settings.profiler;
        let sights = self.manager.node.look();
        let held: BTreeSet<&GpuId> = rows.iter().filter_map(|row| row.gpu.as_ref()).collect();
        let profiling = rows.iter().filter(|row| row.state == JobState::Profiling.as_str());
        let mut measured: BTreeSet<WorkloadName> =
            profiling.map(|row| row.workload.clone()).collect();
        let may_ever = |sight: &&GpuSight| sight.online.is_none() && sight.outside_mps.is_empty();
        let free: Vec<&GpuSight> = sights.iter().filter(may_ever).collect();
        let mut idle: Vec<&GpuSight> = sights
            .iter()
            .filter(|sight| is_idle(sight, settings) && !held.contains(&sight.gpu))
            .collect();
        let now = clock::now();
        let (mut admitted, mut starts, mut waits) = (Vec::new(), Vec::new(), Vec::new());
        for row in rows.iter().filter(|row| row.state == JobState::Submitted.as_str()) {
            let waited = now.since(row.submitted_at);
            let late = u128::from(waited.0) > settings.wait.as_micros();
            match self.verdict(row, &sights, &measured, &free)? {
                Verdict::Admit(reason) => admitted.push((row.id.clone(), reason)),
                Verdict::Wait if late => admitted.push((row.id.clone(), UNMEASURED)),
                Verdict::Wait => waits.push((row, MEASURED_ALREADY)),
                Verdict::Profile => {
                    let wanted = views::submit_of(row).ok();
                    let place = |wanted| idle.iter().position(|sight| fits(wanted, sight));
                    let Some(at) = wanted.as_ref().and_then(place) else {
                        // However long it waited, one that is idle now would have been taken.
                        match late {
                            true => admitted.push((row.id.clone(), UNMEASURED)),
                            false => waits.push((row, NO_IDLE_GPU)),
                        }
                        continue;
                    };
                    measured.insert(row.workload.clone());
                    starts.push((row.id.clone(), idle.remove(at).clone()));
                }
            }
        }
        waits.retain(|(row, reason)| row.reason != *reason);
        if admitted.is_empty() && waits.is_empty() && starts.is_empty() {
            return Ok(());
        }
        self.manager.change(|change| {
            for (waiting, reason) in &waits {
                let Some(mut row) = change.job(&waiting.id)? else { continue };
                if row.state == JobState::Submitted.as_str() {
                    row.reason = (*reason).to_owned();
                    change.put(&row)?;
                }
            }
            for (id, reason) in &admitted {
                let Some(mut row) = change.job(id)? else { continue };
                advance(change, &mut row, Happening::Admit, now, |row| {
                    row.reason = (*reason).to_owned();
                })?;
            }
            Ok(())
        })?;
        // One that fails does not keep the others from it.
        let begun = starts.iter().map(|(id, sight)| self.start_profiling(id, sight));
        begun.fold(Ok(()), Result::and)
    }

    fn verdict(
        &self,
        row: &JobRow,
        sights: &[GpuSight],
        measured: &BTreeSet<WorkloadName>,
        free: &[&GpuSight],
    ) -> Result<Verdict> {
        let settings = &self.settings.profiler;
        if !settings.enabled {
            return Ok(Verdict::Admit("waits for a GPU; measuring is switched off"));
        }
        if self.manager.settings.shadow {
            return Ok(Verdict::Admit("waits for a GPU; nothing is started in shadow mode"));
        }
        let types: BTreeSet<&GpuType> = sights.iter().map(|sight| &sight.gpu_type).collect();
        for gpu_type in types {
            if self.speeds.profile(&self.manager, &row.workload, gpu_type)?.is_some() {
                return Ok(Verdict::Admit("waits for a GPU"));
            }
        }
        if free.is_empty() {
            return Ok(Verdict::Admit(UNMEASURED));
        }
        if measured.contains(&row.workload) {
            return Ok(Verdict::Wait);
        }
        let Ok(wanted) = views::submit_of(row) else {
            return Ok(Verdict::Admit(UNMEASURED));
        };
        // A GPU that has just been found has no quota yet.
        let fits_one = free.iter().any(|sight| sight.quota.0 == 0 || fits(&wanted, sight));
        Ok(if fits_one { Verdict::Profile } else { Verdict::Admit(UNMEASURED) })
    }

    fn start_profiling(&self, id: &muxflow_types::JobId, sight: &GpuSight) -> Result<()> {
        let Some(share) = sight.share else { return Ok(()) };
        let now = clock::now();
        let stepped = self.manager.change(|change| {
            // Asked here, where a pause cannot come between.
            if self.manager.is_paused() {
                return Ok(None);
            }
            let Some(mut row) = change.job(id)? else { return Ok(None) };
            let stepped = advance(change, &mut row, Happening::Profile, now, |row| {
                row.gpu = Some(sight.gpu.clone());
                row.share = Some((share.sms().0, share.total().0));
                row.quota_bytes = Some(sight.quota.0);
                row.predicted = None;
                row.seen = None;
                row.rate = None;
                row.reason = "measured on an idle GPU".to_owned();
            })?;
            Ok(stepped.then_some(row))
        })?;
        if let Some(row) = stepped {
            self.start_on_node(&row)?;
        }
        Ok(())
    }
}

/// Whether a job may be measured on this GPU.
fn fits(submit: &JobSubmit, sight: &GpuSight) -> bool {
    let typed = submit.gpu_types.is_empty()
        || submit.gpu_types.iter().any(|name| name == sight.gpu_type.as_str());
    typed && submit.memory_bytes.is_none_or(|bytes| bytes <= sight.quota.0)
}
