//! The cluster snapshot as JSON, version 1: what `muxflow plan` reads and the manager saves.

use std::collections::{BTreeMap, BTreeSet};

use muxflow_types::{
    Bytes, ClusterSnapshot, GpuId, GpuSnapshot, GpuType, HealthState, JobId, JobSnapshot, Micros,
    NodeId, OnlineSnapshot, Percent, ProfileRecord, ServiceId, SmCount, SmShare, UnitError,
    WorkloadName,
};
use serde::{Deserialize, Serialize};

use crate::WireError;

/// The version that this program reads and writes.
pub const VERSION: u32 = 1;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireSnapshot {
    version: u32,
    at_us: u64,
    reference_type: String,
    gpus: Vec<WireGpu>,
    jobs: Vec<WireJob>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireGpu {
    gpu: String,
    node: String,
    gpu_type: String,
    sms: u32,
    memory_bytes: u64,
    health: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    online: Option<WireOnline>,
    share_sms: u32,
    quota_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    running: Option<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    multi_user: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireOnline {
    service: String,
    profile: WireProfile,
    predicted_sm_activity_pct: f64,
    memory_bytes: u64,
    #[serde(default, skip_serializing_if = "is_false")]
    critical: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    in_mps: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireProfile {
    workload: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gpu_util_pct: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sm_activity_pct: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sm_occupancy_pct: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dram_activity_pct: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    solo_time_us: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireJob {
    job: String,
    workload: String,
    /// Per GPU type.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    profiles: BTreeMap<String, WireProfile>,
    /// Per GPU type, against the reference type at 1.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    solo_speed: BTreeMap<String, f64>,
    memory_bytes: u64,
    #[serde(default = "one", skip_serializing_if = "is_one")]
    priority: u32,
    submitted_at_us: u64,
    #[serde(default, skip_serializing_if = "is_zero")]
    waited_us: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    running_on: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    running_share_sms: Option<u32>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    gpu_types: Vec<String>,
    #[serde(default, skip_serializing_if = "is_false")]
    fail_prone: bool,
    #[serde(default, skip_serializing_if = "is_zero")]
    not_before_us: u64,
    #[serde(default, skip_serializing_if = "is_false")]
    pinned: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    uid: Option<u32>,
}

fn yes() -> bool {
    true
}
fn one() -> u32 {
    1
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_false(b: &bool) -> bool {
    !b
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_true(b: &bool) -> bool {
    *b
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_one(n: &u32) -> bool {
    *n == 1
}
#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Reads a snapshot and checks it whole: every value in range, every name once, every job that runs
/// known to its GPU and the other way round.
pub fn parse(text: &str) -> Result<ClusterSnapshot, WireError> {
    let wire: WireSnapshot = serde_json::from_str(text)?;
    if wire.version != VERSION {
        return Err(WireError::Version { found: wire.version, known: VERSION });
    }
    let gpus = wire
        .gpus
        .into_iter()
        .enumerate()
        .map(|(i, g)| gpu(&format!("gpus[{i}]"), g))
        .collect::<Result<Vec<_>, _>>()?;
    let sms: BTreeMap<&GpuId, SmCount> = gpus.iter().map(|g| (&g.gpu, g.sms)).collect();
    let jobs = wire
        .jobs
        .into_iter()
        .enumerate()
        .map(|(i, j)| job(&format!("jobs[{i}]"), j, &sms))
        .collect::<Result<Vec<_>, _>>()?;
    let reference_type = name("reference_type", &wire.reference_type, GpuType::new)?;
    let snapshot = ClusterSnapshot { at: Micros(wire.at_us), reference_type, gpus, jobs };
    check_whole(&snapshot)?;
    Ok(snapshot)
}

fn name<T>(
    field: &str,
    text: &str,
    new: impl Fn(&str) -> Result<T, muxflow_types::IdError>,
) -> Result<T, WireError> {
    new(text).map_err(|source| WireError::Id { field: field.to_owned(), source })
}

fn unit<T>(field: &str, value: Result<T, UnitError>) -> Result<T, WireError> {
    value.map_err(|source| WireError::Unit { field: field.to_owned(), source })
}

fn value(field: String, problem: impl Into<String>) -> WireError {
    WireError::Value { field, problem: problem.into() }
}

fn profile(at: &str, p: WireProfile, gpu_type: &GpuType) -> Result<ProfileRecord, WireError> {
    let pct = |field: &str, v: Option<f64>| {
        v.map(|v| unit(&format!("{at}.{field}"), Percent::new(v))).transpose()
    };
    Ok(ProfileRecord {
        workload: name(&format!("{at}.workload"), &p.workload, WorkloadName::new)?,
        gpu_type: gpu_type.clone(),
        gpu_util: pct("gpu_util_pct", p.gpu_util_pct)?,
        sm_activity: pct("sm_activity_pct", p.sm_activity_pct)?,
        sm_occupancy: pct("sm_occupancy_pct", p.sm_occupancy_pct)?,
        dram_activity: pct("dram_activity_pct", p.dram_activity_pct)?,
        solo_time: p.solo_time_us.map(Micros),
        memory: p.memory_bytes.map(Bytes),
    })
}

fn gpu(at: &str, g: WireGpu) -> Result<GpuSnapshot, WireError> {
    let gpu_type = name(&format!("{at}.gpu_type"), &g.gpu_type, GpuType::new)?;
    let health = HealthState::parse(&g.health).ok_or_else(|| {
        let words: Vec<_> = HealthState::ALL.iter().map(|s| s.as_str()).collect();
        value(
            format!("{at}.health"),
            format!("`{}` is no health state; write one of {}", g.health, words.join(", ")),
        )
    })?;
    let online = g.online.map(|o| online(&format!("{at}.online"), o, &gpu_type)).transpose()?;
    Ok(GpuSnapshot {
        gpu: name(&format!("{at}.gpu"), &g.gpu, GpuId::new)?,
        node: name(&format!("{at}.node"), &g.node, NodeId::new)?,
        sms: SmCount(g.sms),
        memory: Bytes(g.memory_bytes),
        health,
        online,
        share: unit(
            &format!("{at}.share_sms"),
            SmShare::new(SmCount(g.share_sms), SmCount(g.sms)),
        )?,
        quota: Bytes(g.quota_bytes),
        running: g.running.map(|r| name(&format!("{at}.running"), &r, JobId::new)).transpose()?,
        multi_user: g.multi_user,
        gpu_type,
    })
}

fn online(at: &str, o: WireOnline, gpu_type: &GpuType) -> Result<OnlineSnapshot, WireError> {
    Ok(OnlineSnapshot {
        service: name(&format!("{at}.service"), &o.service, ServiceId::new)?,
        profile: profile(&format!("{at}.profile"), o.profile, gpu_type)?,
        predicted_sm_activity: unit(
            &format!("{at}.predicted_sm_activity_pct"),
            Percent::new(o.predicted_sm_activity_pct),
        )?,
        memory: Bytes(o.memory_bytes),
        critical: o.critical,
        uid: o.uid,
        in_mps: o.in_mps,
    })
}

fn job(at: &str, j: WireJob, sms: &BTreeMap<&GpuId, SmCount>) -> Result<JobSnapshot, WireError> {
    let mut profiles = BTreeMap::new();
    for (type_name, p) in j.profiles {
        let field = format!("{at}.profiles.{type_name}");
        let gpu_type = name(&field, &type_name, GpuType::new)?;
        profiles.insert(gpu_type.clone(), profile(&field, p, &gpu_type)?);
    }
    let mut solo_speed = BTreeMap::new();
    for (type_name, speed) in j.solo_speed {
        let field = format!("{at}.solo_speed.{type_name}");
        let gpu_type = name(&field, &type_name, GpuType::new)?;
        if !(speed.is_finite() && speed > 0.0 && speed <= 1e6) {
            return Err(value(
                field,
                format!(
                    "{speed} is no speed; write a number above 0, 1 meaning as fast as the reference type"
                ),
            ));
        }
        solo_speed.insert(gpu_type, speed);
    }
    if !(1..=1000).contains(&j.priority) {
        return Err(value(
            format!("{at}.priority"),
            format!("{} is out of range; write 1 (normal) to 1000", j.priority),
        ));
    }
    let running_on =
        j.running_on.map(|r| name(&format!("{at}.running_on"), &r, GpuId::new)).transpose()?;
    let running_share = match (&running_on, j.running_share_sms) {
        (Some(on), Some(share)) => match sms.get(on) {
            Some(&total) => {
                Some(unit(&format!("{at}.running_share_sms"), SmShare::new(SmCount(share), total))?)
            }
            None => None,
        },
        (None, Some(_)) => {
            return Err(value(
                format!("{at}.running_share_sms"),
                "a job that does not run has no share; give `running_on` too",
            ));
        }
        (_, None) => None,
    };
    Ok(JobSnapshot {
        job: name(&format!("{at}.job"), &j.job, JobId::new)?,
        workload: name(&format!("{at}.workload"), &j.workload, WorkloadName::new)?,
        profiles,
        solo_speed,
        memory: Bytes(j.memory_bytes),
        priority: j.priority,
        submitted_at: Micros(j.submitted_at_us),
        waited: Micros(j.waited_us),
        running_on,
        running_share,
        gpu_types: j
            .gpu_types
            .iter()
            .enumerate()
            .map(|(k, t)| name(&format!("{at}.gpu_types[{k}]"), t, GpuType::new))
            .collect::<Result<_, _>>()?,
        fail_prone: j.fail_prone,
        not_before: Micros(j.not_before_us),
        pinned: j.pinned,
        uid: j.uid,
    })
}

/// What no single field can tell: names that stand twice, and pairings of which only one side knows.
fn check_whole(s: &ClusterSnapshot) -> Result<(), WireError> {
    let mut gpus = BTreeMap::new();
    for (i, g) in s.gpus.iter().enumerate() {
        if gpus.insert(&g.gpu, g).is_some() {
            return Err(value(
                format!("gpus[{i}].gpu"),
                format!("`{}` stands in the file twice", g.gpu),
            ));
        }
    }
    let mut jobs = BTreeMap::new();
    for (i, j) in s.jobs.iter().enumerate() {
        if jobs.insert(&j.job, j).is_some() {
            return Err(value(
                format!("jobs[{i}].job"),
                format!("`{}` stands in the file twice", j.job),
            ));
        }
    }
    for (i, g) in s.gpus.iter().enumerate() {
        let Some(running) = &g.running else { continue };
        match jobs.get(running) {
            Some(j) if j.running_on.as_ref() == Some(&g.gpu) => {}
            Some(_) => {
                return Err(value(
                    format!("gpus[{i}].running"),
                    format!(
                        "job `{running}` does not say that it runs on `{}`; set its `running_on`",
                        g.gpu
                    ),
                ));
            }
            None => {
                return Err(value(
                    format!("gpus[{i}].running"),
                    format!("there is no job `{running}` in `jobs`"),
                ));
            }
        }
    }
    let mut taken = BTreeSet::new();
    for (i, j) in s.jobs.iter().enumerate() {
        let Some(on) = &j.running_on else { continue };
        // A job may name a GPU that is gone; a GPU that is here must agree.
        if let Some(g) = gpus.get(on)
            && g.running.as_ref() != Some(&j.job)
        {
            return Err(value(
                format!("jobs[{i}].running_on"),
                format!("GPU `{on}` does not say that it runs `{}`; set its `running`", j.job),
            ));
        }
        if !taken.insert(on) {
            return Err(value(
                format!("jobs[{i}].running_on"),
                format!("two jobs claim GPU `{on}`"),
            ));
        }
    }
    Ok(())
}

/// Writes a snapshot so that [`parse`] gives it back.
pub fn render(s: &ClusterSnapshot) -> String {
    let wire = WireSnapshot {
        version: VERSION,
        at_us: s.at.0,
        reference_type: s.reference_type.as_str().to_owned(),
        gpus: s.gpus.iter().map(wire_gpu).collect(),
        jobs: s.jobs.iter().map(wire_job).collect(),
    };
    serde_json::to_string_pretty(&wire).unwrap_or_default()
}

fn wire_profile(p: &ProfileRecord) -> WireProfile {
    WireProfile {
        workload: p.workload.as_str().to_owned(),
        gpu_util_pct: p.gpu_util.map(Percent::value),
        sm_activity_pct: p.sm_activity.map(Percent::value),
        sm_occupancy_pct: p.sm_occupancy.map(Percent::value),
        dram_activity_pct: p.dram_activity.map(Percent::value),
        solo_time_us: p.solo_time.map(|t| t.0),
        memory_bytes: p.memory.map(|b| b.0),
    }
}

fn wire_gpu(g: &GpuSnapshot) -> WireGpu {
    WireGpu {
        gpu: g.gpu.as_str().to_owned(),
        node: g.node.as_str().to_owned(),
        gpu_type: g.gpu_type.as_str().to_owned(),
        sms: g.sms.0,
        memory_bytes: g.memory.0,
        health: g.health.as_str().to_owned(),
        online: g.online.as_ref().map(|o| WireOnline {
            service: o.service.as_str().to_owned(),
            profile: wire_profile(&o.profile),
            predicted_sm_activity_pct: o.predicted_sm_activity.value(),
            memory_bytes: o.memory.0,
            critical: o.critical,
            uid: o.uid,
            in_mps: o.in_mps,
        }),
        share_sms: g.share.sms().0,
        quota_bytes: g.quota.0,
        running: g.running.as_ref().map(|j| j.as_str().to_owned()),
        multi_user: g.multi_user,
    }
}

fn wire_job(j: &JobSnapshot) -> WireJob {
    WireJob {
        job: j.job.as_str().to_owned(),
        workload: j.workload.as_str().to_owned(),
        profiles: j
            .profiles
            .iter()
            .map(|(t, p)| (t.as_str().to_owned(), wire_profile(p)))
            .collect(),
        solo_speed: j.solo_speed.iter().map(|(t, s)| (t.as_str().to_owned(), *s)).collect(),
        memory_bytes: j.memory.0,
        priority: j.priority,
        submitted_at_us: j.submitted_at.0,
        waited_us: j.waited.0,
        running_on: j.running_on.as_ref().map(|g| g.as_str().to_owned()),
        running_share_sms: j.running_share.map(|s| s.sms().0),
        gpu_types: j.gpu_types.iter().map(|t| t.as_str().to_owned()).collect(),
        fail_prone: j.fail_prone,
        not_before_us: j.not_before.0,
        pinned: j.pinned,
        uid: j.uid,
    }
}
