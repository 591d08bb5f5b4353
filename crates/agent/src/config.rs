//! The configuration file of the agent: text in, checked settings or an error that names the field.
//!
//! The laws of the node have a file of their own (`muxflow config`); this one says where things are
//! and what runs. `docs/agent.md` lists every field.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use muxflow_policy::node::config::NodeConfig;
use muxflow_types::{Bytes, JobId, Micros, Percent, ServiceId};
use serde::Deserialize;

use crate::breaker::BreakerParams;
use crate::cgroup::{self, Limits};
use crate::error::{AgentError, Result, file};
use crate::gpu::control::Defences;
use crate::gpu::{OfflineSpec, OnlineSpec};
use crate::host::HostParams;
use crate::logs::LogLimits;
use crate::stop::StopLimits;
use crate::sys;

/// What the agent runs with.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// What must outlive a restart.
    pub state_dir: PathBuf,
    /// Control blocks and MPS pipes; a memory file system.
    pub run_dir: PathBuf,
    /// The laws.
    pub laws: NodeConfig,
    /// The interposer's library.
    pub interposer: PathBuf,
    /// Address of the metrics; none serves none.
    pub metrics: Option<String>,
    /// The kernel log; none is not watched.
    pub kernel_log: Option<PathBuf>,
    /// Directory of all control groups.
    pub cgroup_parent: String,
    /// Variables that workloads get beside the usual ones.
    pub pass_env: Vec<String>,
    /// Time between two samples.
    pub sample_every: Duration,
    /// How much history is kept.
    pub history: Duration,
    /// Time between two turns of the fast loop.
    pub tick: Duration,
    /// Offline work that may wait in front of the service.
    pub queue_for: Micros,
    /// MPS; none runs without it.
    pub mps: Option<MpsSettings>,
    /// How long a client may take to attach.
    pub probe_limit: Duration,
    /// Time between two probes.
    pub probe_every: Duration,
    /// When the host is in distress.
    pub host: HostParams,
    /// Where the kernel's files about the host are: another place than `/proc` in a container.
    pub host_proc: PathBuf,
    /// Against mass eviction.
    pub breaker: BreakerParams,
    /// What protects the service.
    pub defences: Defences,
    /// Output of workloads.
    pub logs: LogLimits,
    /// Services, each with the GPU it belongs to: a UUID or a number.
    pub online: Vec<(String, OnlineSpec)>,
    /// Jobs to run wherever there is room, in this order.
    pub offline: Vec<OfflineSpec>,
}

/// How MPS is run.
#[derive(Debug, Clone)]
pub struct MpsSettings {
    /// The control program.
    pub program: PathBuf,
    /// One server for every user.
    pub multi_user: bool,
    /// Time between two questions about its state.
    pub check_every: Duration,
    /// How long an answer may take.
    pub limit: Duration,
    /// Have the driver cap memory too; none does so where the driver can.
    pub driver_memory_limit: Option<bool>,
    /// Part of the SMs that jobs get for good, 0 to 1, where the driver can cut them.
    pub offline_partition: Option<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Raw {
    state_dir: PathBuf,
    run_dir: PathBuf,
    laws: Option<PathBuf>,
    interposer: PathBuf,
    metrics: Option<String>,
    kernel_log: Option<PathBuf>,
    cgroup_parent: String,
    pass_env: Vec<String>,
    sample_every_ms: u64,
    history_s: u64,
    tick_ms: u64,
    queue_for_ms: u64,
    mps: RawMps,
    host: RawHost,
    breaker: RawBreaker,
    defences: Defences,
    logs: LogLimits,
    online: Vec<RawOnline>,
    offline: Vec<RawOffline>,
}

impl Default for Raw {
    fn default() -> Self {
        Raw {
            state_dir: "/var/lib/muxflow".into(),
            run_dir: "/run/muxflow".into(),
            laws: None,
            interposer: crate::installed::interposer(),
            metrics: Some("127.0.0.1:9470".into()),
            kernel_log: Some("/dev/kmsg".into()),
            cgroup_parent: "muxflow".into(),
            pass_env: Vec::new(),
            sample_every_ms: 10,
            history_s: 300,
            tick_ms: 10,
            queue_for_ms: 10,
            mps: RawMps::default(),
            host: RawHost::default(),
            breaker: RawBreaker::default(),
            defences: Defences::default(),
            logs: LogLimits::default(),
            online: Vec::new(),
            offline: Vec::new(),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawMps {
    enabled: bool,
    program: PathBuf,
    multi_user: bool,
    check_every_ms: u64,
    answer_within_ms: u64,
    probe_within_ms: u64,
    probe_every_s: u64,
    driver_memory_limit: Option<bool>,
    offline_partition_pct: Option<f64>,
}

impl Default for RawMps {
    fn default() -> Self {
        RawMps {
            enabled: true,
            program: "nvidia-cuda-mps-control".into(),
            multi_user: false,
            check_every_ms: 1_000,
            answer_within_ms: 3_000,
            probe_within_ms: 5_000,
            probe_every_s: 60,
            driver_memory_limit: None,
            offline_partition_pct: None,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawHost {
    proc: Option<PathBuf>,
    memory_used_pct: Option<f64>,
    kswapd_busy_pct: Option<f64>,
    kswapd_for_s: Option<u64>,
    pressure_full_pct: Option<f64>,
    pressure_for_s: Option<u64>,
    calm_for_s: Option<u64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawBreaker {
    window_s: Option<u64>,
    always: Option<usize>,
    share_pct: Option<f64>,
    calm_for_s: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOnline {
    service: String,
    gpu: String,
    argv: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<PathBuf>,
    user: Option<String>,
    cpus: Option<String>,
    memory: Option<String>,
    latency_file: Option<PathBuf>,
    #[serde(default = "online_grace_ms")]
    grace_ms: u64,
}

fn online_grace_ms() -> u64 {
    30_000
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOffline {
    job: String,
    argv: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<PathBuf>,
    user: Option<String>,
    cpus: Option<String>,
    memory: Option<String>,
    quota: Option<String>,
    #[serde(default)]
    stop: StopLimits,
}

impl AgentConfig {
    /// What holds without a file: nothing runs.
    pub fn built_in() -> Result<Self> {
        checked(Raw::default(), NodeConfig::default())
            .map_err(|reason| AgentError::Config { path: "the built-in settings".into(), reason })
    }

    /// Reads a file, and the laws that it names beside it.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(file("read", path))?;
        let raw: Raw = toml::from_str(&text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let line = text.get(..at).unwrap_or_default().matches('\n').count() + 1;
            let reason = format!("line {line}: {}", error.message().trim());
            AgentError::Config { path: path.to_owned(), reason }
        })?;
        Self::of_raw(raw, path)
    }

    /// The settings in a part of another file, `path`.
    pub fn of_table(table: toml::Table, path: &Path) -> Result<Self> {
        let raw: Raw = table.try_into().map_err(|error: toml::de::Error| {
            let reason = format!("agent: {}", error.message().trim());
            AgentError::Config { path: path.to_owned(), reason }
        })?;
        Self::of_raw(raw, path)
    }

    fn of_raw(raw: Raw, path: &Path) -> Result<Self> {
        let wrong = |reason: String| AgentError::Config { path: path.to_owned(), reason };
        let laws = match &raw.laws {
            None => NodeConfig::default(),
            Some(name) => {
                let beside = path.parent().unwrap_or(Path::new(".")).join(name);
                let text = std::fs::read_to_string(&beside).map_err(file("read", &beside))?;
                NodeConfig::parse(&text).map_err(|error| AgentError::Config {
                    path: beside,
                    reason: error.to_string(),
                })?
            }
        };
        checked(raw, laws).map_err(wrong)
    }
}

fn checked(raw: Raw, laws: NodeConfig) -> std::result::Result<AgentConfig, String> {
    within("sample_every_ms", raw.sample_every_ms, 1, 1_000)?;
    within("history_s", raw.history_s, 1, 3_600)?;
    within("tick_ms", raw.tick_ms, 1, 100)?;
    within("queue_for_ms", raw.queue_for_ms, 1, 1_000)?;
    within("mps.check_every_ms", raw.mps.check_every_ms, 50, 60_000)?;
    within("mps.answer_within_ms", raw.mps.answer_within_ms, 50, 60_000)?;
    within("mps.probe_within_ms", raw.mps.probe_within_ms, 50, 60_000)?;
    within("mps.probe_every_s", raw.mps.probe_every_s, 1, 86_400)?;
    let offline_partition = match raw.mps.offline_partition_pct {
        Some(value) if !(1.0..=99.0).contains(&value) => {
            return Err(format!(
                "mps.offline_partition_pct is {value}; it must be between 1 and 99"
            ));
        }
        value => value.map(|pct| pct / 100.0),
    };
    let mps = raw.mps.enabled.then(|| MpsSettings {
        program: raw.mps.program.clone(),
        multi_user: raw.mps.multi_user,
        check_every: Duration::from_millis(raw.mps.check_every_ms),
        limit: Duration::from_millis(raw.mps.answer_within_ms),
        driver_memory_limit: raw.mps.driver_memory_limit,
        offline_partition,
    });
    let mut pass_env: Vec<String> = crate::environment::PASSED.map(String::from).to_vec();
    pass_env.extend(raw.pass_env);
    Ok(AgentConfig {
        state_dir: raw.state_dir,
        run_dir: raw.run_dir,
        laws,
        interposer: raw.interposer,
        metrics: raw.metrics.filter(|address| !address.is_empty()),
        kernel_log: raw.kernel_log.filter(|path| !path.as_os_str().is_empty()),
        cgroup_parent: raw.cgroup_parent,
        pass_env,
        sample_every: Duration::from_millis(raw.sample_every_ms),
        history: Duration::from_secs(raw.history_s),
        tick: Duration::from_millis(raw.tick_ms),
        queue_for: Micros::from_millis(raw.queue_for_ms),
        mps,
        probe_limit: Duration::from_millis(raw.mps.probe_within_ms),
        probe_every: Duration::from_secs(raw.mps.probe_every_s),
        host: host(&raw.host)?,
        host_proc: raw.host.proc.clone().unwrap_or_else(|| "/proc".into()),
        breaker: breaker(&raw.breaker)?,
        defences: raw.defences,
        logs: raw.logs,
        online: raw.online.into_iter().map(online).collect::<std::result::Result<_, _>>()?,
        offline: raw.offline.into_iter().map(offline).collect::<std::result::Result<_, _>>()?,
    })
}

fn within(field: &str, value: u64, low: u64, high: u64) -> std::result::Result<(), String> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(format!("{field} is {value}; it must be between {low} and {high}"))
}

fn host(raw: &RawHost) -> std::result::Result<HostParams, String> {
    let mut params = HostParams::default();
    let percent = |field: &str, value: f64| {
        Percent::new(value).map_err(|error| format!("host.{field}: {error}"))
    };
    if let Some(value) = raw.memory_used_pct {
        params.memory_used = percent("memory_used_pct", value)?;
    }
    if let Some(value) = raw.kswapd_busy_pct {
        params.kswapd_busy = percent("kswapd_busy_pct", value)?;
    }
    if let Some(value) = raw.pressure_full_pct {
        params.pressure_full = percent("pressure_full_pct", value)?;
    }
    params.kswapd_for = raw.kswapd_for_s.map_or(params.kswapd_for, Micros::from_secs);
    params.pressure_for = raw.pressure_for_s.map_or(params.pressure_for, Micros::from_secs);
    params.calm_for = raw.calm_for_s.map_or(params.calm_for, Micros::from_secs);
    Ok(params)
}

fn breaker(raw: &RawBreaker) -> std::result::Result<BreakerParams, String> {
    let mut params = BreakerParams::default();
    if let Some(value) = raw.share_pct {
        let share = Percent::new(value).map_err(|error| format!("breaker.share_pct: {error}"))?;
        params.share = share.value() / 100.0;
    }
    for (field, value) in [("window_s", raw.window_s), ("calm_for_s", raw.calm_for_s)] {
        within(&format!("breaker.{field}"), value.unwrap_or(1), 1, 86_400)?;
    }
    params.window = raw.window_s.map_or(params.window, Micros::from_secs);
    params.calm_for = raw.calm_for_s.map_or(params.calm_for, Micros::from_secs);
    params.always = raw.always.unwrap_or(params.always);
    Ok(params)
}

/// `name`, `uid` or `uid:gid`.
pub fn parse_user(text: &str) -> Option<(u32, u32)> {
    let (user, group) = text.split_once(':').unwrap_or((text, ""));
    let named = sys::user_by_name(user);
    let uid = named.map(|(uid, _)| uid).or_else(|| user.parse().ok())?;
    let gid = match group {
        "" => named.map_or(uid, |(_, gid)| gid),
        number => number.parse().ok()?,
    };
    Some((uid, gid))
}

fn user(of: &str, text: Option<String>) -> std::result::Result<Option<(u32, u32)>, String> {
    text.map(|text| {
        parse_user(&text).ok_or(format!(
            "{of}.user: `{text}` is no user here; give a name, a number or `uid:gid`"
        ))
    })
    .transpose()
}

fn limits(
    of: &str,
    cpus: Option<String>,
    memory: Option<String>,
) -> std::result::Result<Limits, String> {
    if let Some(list) = &cpus
        && cgroup::parse_cpus(list).is_none()
    {
        return Err(format!("{of}.cpus: `{list}` is no list of processors such as `0-3,8`"));
    }
    let memory = memory.map(|text| bytes(of, "memory", &text)).transpose()?;
    Ok(Limits { cpus, memory_bytes: memory.map(|bytes| bytes.0) })
}

fn bytes(of: &str, field: &str, text: &str) -> std::result::Result<Bytes, String> {
    Bytes::parse(text).map_err(|error| format!("{of}.{field}: {error}"))
}

fn program(of: &str, argv: &[String]) -> std::result::Result<(), String> {
    if argv.is_empty() {
        return Err(format!("{of}.argv is empty; give the program and its arguments"));
    }
    Ok(())
}

fn online(raw: RawOnline) -> std::result::Result<(String, OnlineSpec), String> {
    let of = format!("online `{}`", raw.service);
    program(&of, &raw.argv)?;
    let spec = OnlineSpec {
        service: ServiceId::new(&raw.service).map_err(|error| format!("{of}: {error}"))?,
        argv: raw.argv,
        env: raw.env,
        cwd: raw.cwd.unwrap_or_else(|| "/".into()),
        user: user(&of, raw.user)?,
        limits: limits(&of, raw.cpus, raw.memory)?,
        latency_file: raw.latency_file,
        grace_ms: raw.grace_ms,
    };
    Ok((raw.gpu, spec))
}

fn offline(raw: RawOffline) -> std::result::Result<OfflineSpec, String> {
    let of = format!("offline `{}`", raw.job);
    program(&of, &raw.argv)?;
    Ok(OfflineSpec {
        job: JobId::new(&raw.job).map_err(|error| format!("{of}: {error}"))?,
        argv: raw.argv,
        env: raw.env,
        cwd: raw.cwd.unwrap_or_else(|| "/".into()),
        user: user(&of, raw.user)?,
        limits: limits(&of, raw.cpus, raw.memory)?,
        share: None,
        quota: raw.quota.map(|text| bytes(&of, "quota", &text)).transpose()?,
        stop: raw.stop,
        not_after: None,
    })
}

#[cfg(test)]
#[path = "config_tests.rs"]
mod tests;
