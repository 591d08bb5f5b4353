//! The cluster as the planner sees it: what the node says, what the store says, joined.
//!
//! A GPU whose job is being measured or is on its way out is not in the snapshot: nothing can be
//! decided about it until that is over.

use std::collections::{BTreeMap, BTreeSet};

use muxflow_api::jobs::JobState;
use muxflow_store::jobs::JobRow;
use muxflow_types::{
    Bytes, ClusterSnapshot, GpuId, GpuSnapshot, GpuType, HealthState, JobSnapshot, Micros, NodeId,
    OnlineSnapshot, Percent, ProfileRecord, ServiceId, SmCount, SmShare, WorkloadName,
};

use super::Scheduler;
use crate::clock;
use crate::error::{ManagerError, Result};
use crate::node::GpuSight;
use crate::views;

/// A job with a deadline counts up to this much more as it comes closer.
const MOST_URGENT: u32 = 4;

/// Waiting times are told to the planner in these.
const MINUTE: Micros = Micros::from_secs(60);

/// The name that a service outside MPS has in a snapshot.
const OUTSIDE: &str = "outside-mps";

fn named<T>(made: std::result::Result<T, muxflow_types::IdError>) -> Result<T> {
    made.map_err(|error| ManagerError::Conflict(error.to_string()))
}

/// How much more a job counts because its deadline comes closer: once at first, four times at last.
pub fn urgency(row: &JobRow, now: Micros) -> u32 {
    let Some(deadline) = row.deadline else { return 1 };
    let whole = deadline.since(row.submitted_at).0.max(1);
    let gone = now.since(row.submitted_at).0.min(whole);
    let step = gone.saturating_mul(u64::from(MOST_URGENT)) / whole;
    u32::try_from(step).unwrap_or(MOST_URGENT).clamp(1, MOST_URGENT)
}

/// What the readings say of a service that nobody has measured alone.
fn seen_profile(gpu: &GpuSight, workload: WorkloadName) -> ProfileRecord {
    // Whole per cents: services that look alike are planned alike.
    let whole = |percent: Percent| Percent::clamped(percent.value().round());
    ProfileRecord {
        sm_activity: gpu.online_activity.and_then(whole),
        ..ProfileRecord::unknown(workload, gpu.gpu_type.clone())
    }
}

impl Scheduler {
    /// The snapshot.
    pub fn snapshot(&self) -> Result<ClusterSnapshot> {
        let now = clock::now();
        let sights = self.manager.node.look();
        let rows = self.manager.reader().open_jobs()?;
        let mut held: BTreeMap<GpuId, &JobRow> = BTreeMap::new();
        for row in &rows {
            if views::state_of(row)?.holds_gpu()
                && let Some(gpu) = &row.gpu
            {
                held.insert(gpu.clone(), row);
            }
        }
        let mut gpus = Vec::new();
        let aside = self.settings.profiler.set_aside.as_ref();
        let usable = |sight: &&GpuSight| sight.sms.0 > 0 && aside != Some(&sight.gpu);
        for sight in sights.iter().filter(usable) {
            let holder = held.get(&sight.gpu).copied();
            let runs = |row: &&JobRow| row.state == JobState::Running.as_str();
            let running = holder.filter(runs);
            if holder.is_some() && running.is_none() {
                continue;
            }
            gpus.push(self.gpu(sight, running)?);
        }
        let types: Vec<GpuType> = sights.iter().map(|sight| sight.gpu_type.clone()).collect();
        let reference_type = most_common(&types).map_or_else(|| named(GpuType::new("T4")), Ok)?;
        let types: BTreeSet<GpuType> = types.into_iter().collect();
        let mut jobs = Vec::new();
        for row in &rows {
            let state = views::state_of(row)?;
            if !matches!(state, JobState::Queued | JobState::Running) {
                continue;
            }
            jobs.push(self.job(row, state, &gpus, &types, &reference_type, now)?);
        }
        Ok(ClusterSnapshot { at: now, reference_type, gpus, jobs })
    }

    fn gpu(&self, sight: &GpuSight, running: Option<&JobRow>) -> Result<GpuSnapshot> {
        let share = sight.share.filter(|share| share.total() == sight.sms);
        let none = SmShare::new(SmCount(0), sight.sms)
            .map_err(|error| ManagerError::Conflict(error.to_string()))?;
        let offline = Bytes(sight.offline.as_ref().map_or(0, |(_, counts)| counts.charged_bytes));
        let used = sight.sample.and_then(|sample| sample.memory_used).unwrap_or(Bytes::ZERO);
        let service = match (&sight.online, sight.outside_mps.is_empty()) {
            (Some(online), _) => Some(online.service.clone()),
            (None, false) => Some(named(ServiceId::new(OUTSIDE))?),
            (None, true) => None,
        };
        let online = match service {
            None => None,
            Some(service) => {
                let workload = named(WorkloadName::new(service.as_str()))?;
                let known = self.speeds.profile(&self.manager, &workload, &sight.gpu_type)?;
                Some(OnlineSnapshot {
                    service,
                    profile: known.unwrap_or_else(|| seen_profile(sight, workload)),
                    predicted_sm_activity: sight.demand.unwrap_or(Percent::FULL),
                    memory: used.saturating_sub(offline),
                    critical: sight.online.as_ref().is_some_and(|online| online.critical),
                    uid: sight.online.as_ref().and_then(|online| online.uid),
                    in_mps: sight.outside_mps.is_empty(),
                })
            }
        };
        // Healthy and yet not to be used: it cools down. Beside somebody outside MPS the plan itself
        // refuses, and says so.
        let takes_nobody = !sight.placeable && sight.outside_mps.is_empty();
        let closed = running.is_none() && takes_nobody && sight.health == HealthState::Healthy;
        Ok(GpuSnapshot {
            gpu: sight.gpu.clone(),
            node: named(NodeId::new("this"))?,
            gpu_type: sight.gpu_type.clone(),
            sms: sight.sms,
            memory: sight.memory,
            health: if closed { HealthState::Unhealthy } else { sight.health },
            online,
            share: share.unwrap_or(none),
            // Whoever is there keeps the quota that it was started with.
            quota: sight.quota.max(Bytes(running.and_then(|row| row.quota_bytes).unwrap_or(0))),
            running: running.map(|row| row.id.clone()),
            multi_user: sight.multi_user,
        })
    }

    fn job(
        &self,
        row: &JobRow,
        state: JobState,
        gpus: &[GpuSnapshot],
        types: &BTreeSet<GpuType>,
        reference: &GpuType,
        now: Micros,
    ) -> Result<JobSnapshot> {
        let submit = views::submit_of(row)?;
        let mut profiles = BTreeMap::new();
        for gpu_type in types {
            if !profiles.contains_key(gpu_type)
                && let Some(profile) =
                    self.speeds.profile(&self.manager, &row.workload, gpu_type)?
            {
                profiles.insert(gpu_type.clone(), profile);
            }
        }
        let on_reference = profiles.get(reference).and_then(|profile| profile.solo_time);
        let mut solo_speed = BTreeMap::new();
        for (gpu_type, profile) in &profiles {
            if let (Some(reference), Some(here)) = (on_reference, profile.solo_time) {
                solo_speed.insert(
                    gpu_type.clone(),
                    reference.as_secs_f64() / here.as_secs_f64().max(1e-9),
                );
            }
        }
        let peak = profiles.values().filter_map(|profile| profile.memory).max();
        let gpu = row.gpu.as_ref().filter(|_| state == JobState::Running);
        let running_share = gpu.and_then(|on| {
            let total = gpus.iter().find(|gpu| gpu.gpu == *on)?.sms;
            let (sms, of) = row.share?;
            (SmCount(of) == total).then(|| SmShare::new(SmCount(sms), total).ok())?
        });
        Ok(JobSnapshot {
            job: row.id.clone(),
            workload: row.workload.clone(),
            memory: submit.memory_bytes.map(Bytes).or(peak).unwrap_or(Bytes(1)),
            priority: (submit.priority * urgency(row, now)).min(1000),
            submitted_at: row.submitted_at,
            // Whole minutes: jobs of one program that came together are planned as one kind.
            waited: Micros(views::waited(row, state, now).0 / MINUTE.0 * MINUTE.0),
            running_on: gpu.cloned(),
            running_share,
            gpu_types: submit
                .gpu_types
                .iter()
                .map(|name| named(GpuType::new(name)))
                .collect::<Result<_>>()?,
            fail_prone: row.fail_prone,
            not_before: if row.not_before <= now { Micros::ZERO } else { row.not_before },
            pinned: submit.checkpoint.is_none(),
            uid: Some(row.uid),
            profiles,
            solo_speed,
        })
    }
}

fn most_common(types: &[GpuType]) -> Option<GpuType> {
    let mut counts: BTreeMap<&GpuType, usize> = BTreeMap::new();
    types.iter().for_each(|gpu_type| *counts.entry(gpu_type).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(gpu_type, _)| gpu_type.clone())
}
