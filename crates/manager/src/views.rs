//! From what is kept and seen to what the API tells.

use muxflow_api::cluster::{GpuJob, GpuService, GpuView, Reading};
use muxflow_api::jobs::{JobState, JobSubmit, JobView, RunView};
use muxflow_store::jobs::{JobRow, RunRow};
use muxflow_types::{Micros, Percent};

use crate::error::{ManagerError, Result};
use crate::node::GpuSight;

/// The state of a row. A word that is not known can only be damage.
pub fn state_of(row: &JobRow) -> Result<JobState> {
    JobState::parse(&row.state).ok_or_else(|| {
        ManagerError::Conflict(format!(
            "job {} is in a state `{}` that this program does not know; use the program that wrote the store",
            row.id, row.state
        ))
    })
}

/// What was submitted.
pub fn submit_of(row: &JobRow) -> Result<JobSubmit> {
    serde_json::from_str(&row.submit).map_err(|error| {
        ManagerError::Conflict(format!("what was submitted as {} cannot be read: {error}", row.id))
    })
}

/// How long a job has waited in all.
pub fn waited(row: &JobRow, state: JobState, now: Micros) -> Micros {
    match state {
        JobState::Submitted | JobState::Queued => {
            row.waited.saturating_add(now.since(row.changed_at))
        }
        _ => row.waited,
    }
}

fn share_pct((sms, total): (u32, u32)) -> Option<f64> {
    (total > 0).then(|| f64::from(sms) / f64::from(total) * 100.0)
}

/// Why a job waits or how it ended. What holds for all jobs, and how long it still waits, is true only
/// at this moment and is not kept with the job.
fn reason(row: &JobRow, state: JobState, now: Micros, paused: bool) -> String {
    let waits = matches!(state, JobState::Submitted | JobState::Queued);
    if waits && paused {
        return "offline work is paused, until `muxflow resume`".to_owned();
    }
    if state == JobState::Queued && row.not_before > now {
        let left_s = row.not_before.since(now).0.div_ceil(1_000_000);
        let why = if row.reason.is_empty() { "it waits" } else { &row.reason };
        return format!("{why}; may start again in {left_s} s");
    }
    if waits && row.reason.is_empty() {
        return "for the next plan".to_owned();
    }
    row.reason.clone()
}

/// A job as it is.
pub fn job(row: &JobRow, now: Micros, paused: bool) -> Result<JobView> {
    let state = state_of(row)?;
    let submit = submit_of(row)?;
    Ok(JobView {
        id: row.id.as_str().to_owned(),
        name: submit.name.clone(),
        array: row.array.clone(),
        user: row.user.clone(),
        uid: row.uid,
        state,
        cancelling: row.cancel && !state.is_final(),
        reason: reason(row, state, now, paused),
        gpu: row.gpu.as_ref().map(|gpu| gpu.as_str().to_owned()),
        run: row.run,
        workload: row.workload.as_str().to_owned(),
        submit,
        submitted_us: row.submitted_at.0,
        changed_us: row.changed_at.0,
        started_us: row.started_at.map(|at| at.0),
        ended_us: row.ended_at.map(|at| at.0),
        deadline_us: row.deadline.map(|at| at.0),
        waited_us: waited(row, state, now).0,
        failures: row.failures,
        fail_prone: row.fail_prone,
        not_before_us: row.not_before.0,
        share_pct: row.share.and_then(share_pct),
        quota_bytes: row.quota_bytes,
        predicted_speed: row.predicted,
        seen_speed: row.seen,
        iterations_per_s: row.rate,
        exit_code: row.exit_code,
        exit_signal: row.exit_signal,
    })
}

/// A start of a job.
pub fn run(row: RunRow) -> RunView {
    RunView {
        run: row.run,
        gpu: row.gpu,
        purpose: row.purpose,
        started_us: row.started_at.0,
        ended_us: row.ended_at.map(|at| at.0),
        outcome: row.outcome,
        predicted_speed: row.predicted,
        seen_speed: row.seen,
    }
}

/// The newest reading of a GPU.
pub fn reading(gpu: &GpuSight, now: Micros) -> Reading {
    let sample = gpu.sample.as_ref();
    Reading {
        at_us: now.0,
        gpu_util_pct: sample.and_then(|s| s.gpu_util).map(Percent::value),
        sm_activity_pct: sample.and_then(|s| s.sm_activity).map(Percent::value),
        online_sm_activity_pct: gpu.online_activity.map(Percent::value),
        memory_used_bytes: sample.and_then(|s| s.memory_used).map(|bytes| bytes.0),
        sm_clock_mhz: sample.and_then(|s| s.sm_clock).map(|clock| clock.0),
        power_w: sample.and_then(|s| s.power).map(|power| power.value()),
        temperature_c: sample.and_then(|s| s.temperature_c),
        latency_us: gpu.online.as_ref().and_then(|o| o.latency).map(|latency| latency.0),
        health: gpu.health.as_str().to_owned(),
        budget: gpu.budget,
        offline: gpu.offline.is_some(),
    }
}

/// A GPU as it is.
pub fn gpu(gpu: &GpuSight, now: Micros) -> GpuView {
    GpuView {
        id: gpu.gpu.as_str().to_owned(),
        index: gpu.index,
        gpu_type: gpu.gpu_type.as_str().to_owned(),
        name: gpu.name.clone(),
        sms: gpu.sms.0,
        memory_bytes: gpu.memory.0,
        health: gpu.health.as_str().to_owned(),
        placeable: gpu.placeable && gpu.outside_mps.is_empty(),
        share_pct: gpu.share.map(|share| share.percent().value()),
        quota_bytes: gpu.quota.0,
        budget: gpu.budget,
        load: gpu.load,
        reading: gpu.sample.as_ref().map(|_| reading(gpu, now)),
        online: gpu.online.as_ref().map(|online| GpuService {
            service: online.service.as_str().to_owned(),
            pid: online.pid,
            latency_us: online.latency.map(|latency| latency.0),
            critical: online.critical,
        }),
        offline: gpu.offline.as_ref().map(|(job, counts)| GpuJob {
            job: job.as_str().to_owned(),
            launches: counts.launches,
            in_flight: counts.in_flight,
            charged_bytes: counts.charged_bytes,
            delayed_us: counts.delayed_ns / 1000,
        }),
        outside_mps: gpu.outside_mps.clone(),
        outside_mps_remedy: remedy(gpu),
        stops: gpu.stops.clone(),
        faults: gpu.faults.clone(),
        mps_starts: gpu.mps_starts,
        online_restarts: gpu.online_restarts,
    }
}

/// How processes outside MPS are brought in.
pub fn remedy(gpu: &GpuSight) -> Option<String> {
    if gpu.outside_mps.is_empty() {
        return None;
    }
    let pids: Vec<String> = gpu.outside_mps.iter().map(u32::to_string).collect();
    let pids = pids.join(", ");
    Some(match &gpu.mps_pipe_dir {
        Some(dir) => format!(
            "process {pids} uses GPU {} outside MPS, so no job is placed there; restart it with CUDA_MPS_PIPE_DIRECTORY={}, or declare it as a service",
            gpu.gpu,
            dir.display()
        ),
        None => format!(
            "process {pids} uses GPU {} and MPS is switched off, so no job is placed there; switch MPS on, or declare the process as a service",
            gpu.gpu
        ),
    })
}
