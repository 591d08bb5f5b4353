//! The configuration of `muxflow up`: optional, every field with a default, checked with errors that
//! name the field. `docs/manager.md` lists them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use muxflow_agent::config::AgentConfig;
use muxflow_agent::sys;
use muxflow_types::{GpuId, Micros, Percent};
use serde::Deserialize;

use crate::client;
use crate::error::{ManagerError, Result};
use crate::http::server::{Listen, SILENCE};
use crate::manager::Settings;
use crate::scheduler::SchedulerSettings;
use crate::scheduler::admit::ProfilerSettings;
use crate::user::{Caller, Tokens};

/// What `muxflow up` runs with.
#[derive(Debug, Clone)]
pub struct UpConfig {
    /// What must outlive a restart.
    pub state_dir: PathBuf,
    /// Where the API listens.
    pub listen: Listen,
    /// What the manager is held to.
    pub settings: Settings,
    /// What the scheduler is held to.
    pub scheduler: SchedulerSettings,
    /// The node's executor.
    pub agent: AgentConfig,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Raw {
    state_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    socket: Option<PathBuf>,
    socket_mode: Option<String>,
    listen: Option<String>,
    silence_s: u64,
    token: Vec<RawToken>,
    shadow: bool,
    jobs_per_user: u64,
    queue_mib_per_user: u64,
    keep_jobs_days: u64,
    keep_jobs: u64,
    keep_mib_per_user: u64,
    keep_output_mib_per_user: u64,
    history_s: u64,
    scheduler: RawScheduler,
    profiler: RawProfiler,
    agent: toml::Table,
}

impl Default for Raw {
    fn default() -> Self {
        Raw {
            state_dir: None,
            run_dir: None,
            socket: None,
            socket_mode: None,
            listen: None,
            silence_s: SILENCE.as_secs(),
            token: Vec::new(),
            shadow: false,
            jobs_per_user: 10_000,
            queue_mib_per_user: 128,
            keep_jobs_days: 30,
            keep_jobs: 100_000,
            keep_mib_per_user: 256,
            keep_output_mib_per_user: 16_384,
            history_s: 900,
            scheduler: RawScheduler::default(),
            profiler: RawProfiler::default(),
            agent: toml::Table::new(),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawToken {
    user: String,
    token: Option<String>,
    token_file: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawScheduler {
    interval_s: u64,
    restart_cost_s: u64,
    max_disruption_pct: f64,
    observe_every_s: u64,
    retrain_every_s: u64,
}

impl Default for RawScheduler {
    fn default() -> Self {
        RawScheduler {
            interval_s: 900,
            restart_cost_s: 60,
            max_disruption_pct: 10.0,
            observe_every_s: 60,
            retrain_every_s: 86_400,
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawProfiler {
    enabled: bool,
    set_aside: Option<String>,
    window_s: u64,
    limit_s: u64,
    wait_s: u64,
}

impl Default for RawProfiler {
    fn default() -> Self {
        RawProfiler { enabled: true, set_aside: None, window_s: 10, limit_s: 60, wait_s: 60 }
    }
}

/// Where a manager of this user keeps what must outlive a restart.
pub fn default_state_dir(uid: u32) -> PathBuf {
    if uid == 0 {
        return "/var/lib/muxflow".into();
    }
    let set = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let home = || sys::user_by_id(uid).map(|user| Path::new(&user.home).join(".local/state"));
    set.or_else(home).unwrap_or_else(|| "/var/tmp".into()).join("muxflow")
}

/// Shortest token that is accepted: 16 characters cannot be guessed over the network.
const SHORTEST_TOKEN: usize = 16;

impl UpConfig {
    /// What holds without a file.
    pub fn built_in() -> Result<Self> {
        Self::checked(Raw::default(), Path::new("the built-in settings"))
    }

    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|source| ManagerError::File {
            operation: "read",
            path: path.to_owned(),
            source,
        })?;
        Self::parse(&text, path)
    }

    /// Reads the text of a file.
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        let raw: Raw = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let line = text.get(..at).unwrap_or_default().matches('\n').count() + 1;
            let reason = format!("line {line}: {}", error.message().trim());
            ManagerError::Config { path: path.to_owned(), reason }
        })?;
        Self::checked(raw, path)
    }

    fn checked(raw: Raw, path: &Path) -> Result<Self> {
        let wrong = |reason: String| ManagerError::Config { path: path.to_owned(), reason };
        let uid = sys::own_uid();
        let state_dir = raw.state_dir.unwrap_or_else(|| default_state_dir(uid));
        let run_dir = raw.run_dir.unwrap_or_else(|| client::default_run_dir(uid));
        let mut table = raw.agent;
        let text = |path: &Path| toml::Value::String(path.display().to_string());
        table.entry("state_dir").or_insert_with(|| text(&state_dir.join("agent")));
        table.entry("run_dir").or_insert_with(|| text(&run_dir));
        let agent = AgentConfig::of_table(table, path)?;
        if let Some(job) = agent.offline.first() {
            let reason = format!(
                "agent.offline `{}`: here jobs are submitted, with `muxflow submit`",
                job.job
            );
            return Err(wrong(reason));
        }
        let tokens = tokens(raw.token).map_err(wrong)?;
        let tcp = match raw.listen {
            None => None,
            Some(_) if tokens.is_empty() => {
                return Err(wrong(
                    "listen: a TCP address needs at least one [[token]] with a user; leave `listen` out to use the local socket only".to_owned(),
                ));
            }
            Some(address) => Some((address, tokens)),
        };
        let mode = raw.socket_mode.unwrap_or_else(|| if uid == 0 { "666" } else { "600" }.into());
        let mode = u32::from_str_radix(&mode, 8).ok().filter(|mode| *mode <= 0o777);
        let listen = Listen {
            socket: raw.socket.unwrap_or_else(|| run_dir.join("manager.sock")),
            socket_mode: mode.ok_or_else(|| {
                wrong("socket_mode: write an octal mode such as \"660\"".to_owned())
            })?,
            tcp,
            silence: Duration::from_secs(raw.silence_s),
        };
        within("silence_s", raw.silence_s, 1, 3600).map_err(wrong)?;
        within("jobs_per_user", raw.jobs_per_user, 1, 10_000_000).map_err(wrong)?;
        within("queue_mib_per_user", raw.queue_mib_per_user, 1, 1 << 20).map_err(wrong)?;
        within("keep_jobs_days", raw.keep_jobs_days, 1, 36_500).map_err(wrong)?;
        within("keep_jobs", raw.keep_jobs, 1, 10_000_000).map_err(wrong)?;
        within("keep_mib_per_user", raw.keep_mib_per_user, 1, 1 << 20).map_err(wrong)?;
        let output_mib = raw.keep_output_mib_per_user;
        within("keep_output_mib_per_user", output_mib, 1, 1 << 30).map_err(wrong)?;
        within("history_s", raw.history_s, 10, 86_400).map_err(wrong)?;
        let settings = Settings {
            jobs_per_user: Some(raw.jobs_per_user),
            queue_bytes_per_user: Some(raw.queue_mib_per_user << 20),
            keep_jobs_for: Micros::from_secs(raw.keep_jobs_days * 24 * 3600),
            keep_jobs: raw.keep_jobs,
            keep_bytes_per_user: raw.keep_mib_per_user << 20,
            keep_output_bytes_per_user: output_mib << 20,
            shadow: raw.shadow,
            history_points: usize::try_from(raw.history_s).unwrap_or(900),
            history_step_ms: 1_000,
        };
        let retry = agent.laws.retry;
        let scheduler = scheduler(&raw.scheduler, &raw.profiler, retry).map_err(wrong)?;
        Ok(UpConfig { state_dir, listen, settings, scheduler, agent })
    }
}

fn within(field: &str, value: u64, low: u64, high: u64) -> std::result::Result<(), String> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(format!("{field} is {value}; it must be between {low} and {high}"))
}

fn scheduler(
    raw: &RawScheduler,
    profiler: &RawProfiler,
    retry: muxflow_policy::retry::RetryParams,
) -> std::result::Result<SchedulerSettings, String> {
    within("scheduler.interval_s", raw.interval_s, 1, 86_400)?;
    within("scheduler.restart_cost_s", raw.restart_cost_s, 0, raw.interval_s.saturating_sub(1))?;
    within("scheduler.observe_every_s", raw.observe_every_s, 1, 86_400)?;
    within("scheduler.retrain_every_s", raw.retrain_every_s, 0, 31_536_000)?;
    within("profiler.window_s", profiler.window_s, 1, 3600)?;
    within("profiler.limit_s", profiler.limit_s, profiler.window_s, 3600)?;
    within("profiler.wait_s", profiler.wait_s, 0, 86_400)?;
    let set_aside = profiler.set_aside.as_deref().map(GpuId::new).transpose();
    let settings = SchedulerSettings {
        interval: Micros::from_secs(raw.interval_s),
        restart_cost: Micros::from_secs(raw.restart_cost_s),
        max_disruption: Percent::new(raw.max_disruption_pct)
            .map_err(|error| format!("scheduler.max_disruption_pct: {error}"))?,
        threads: 1,
        retry,
        profiler: ProfilerSettings {
            enabled: profiler.enabled,
            set_aside: set_aside.map_err(|error| format!("profiler.set_aside: {error}"))?,
            window: Duration::from_secs(profiler.window_s),
            limit: Duration::from_secs(profiler.limit_s),
            wait: Duration::from_secs(profiler.wait_s),
        },
        observe_every: Duration::from_secs(raw.observe_every_s),
        retrain_every: (raw.retrain_every_s > 0).then(|| Duration::from_secs(raw.retrain_every_s)),
    };
    settings.parameters(true).check().map_err(|error| format!("scheduler: {error}"))?;
    Ok(settings)
}

fn tokens(list: Vec<RawToken>) -> std::result::Result<Tokens, String> {
    let mut tokens = Tokens::default();
    for (index, raw) in list.into_iter().enumerate() {
        let of = format!("token[{index}]");
        let user = Caller::of_name(&raw.user)
            .ok_or_else(|| format!("{of}.user: `{}` is no user here", raw.user))?;
        let token = match (raw.token, raw.token_file) {
            (Some(token), None) => token,
            (None, Some(path)) => std::fs::read_to_string(&path)
                .map_err(|error| format!("{of}.token_file: {}: {error}", path.display()))?
                .trim()
                .to_owned(),
            _ => return Err(format!("{of}: give either `token` or `token_file`")),
        };
        if token.len() < SHORTEST_TOKEN || token.chars().any(|c| c.is_whitespace() || c == ';') {
            return Err(format!(
                "{of}.token: at least {SHORTEST_TOKEN} characters without spaces and semicolons"
            ));
        }
        if tokens.find(&token).is_some() {
            return Err(format!(
                "{of}.token: another entry has the same; each stands for one user"
            ));
        }
        tokens.insert(token, user);
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<UpConfig> {
        UpConfig::parse(text, Path::new("up.toml"))
    }

    #[test]
    fn an_empty_file_is_the_defaults() {
        let config = read("").unwrap();
        assert_eq!(config.scheduler.interval, Micros::from_secs(900));
        assert_eq!(config.settings, Settings::default());
        assert!(config.listen.tcp.is_none() && !config.settings.shadow);
        assert!(config.agent.state_dir.starts_with(&config.state_dir));
    }

    #[test]
    fn the_example_is_read() {
        let example = include_str!("../../../config/up.toml");
        let all: String = example
            .lines()
            .map(|line| {
                line.strip_prefix("# ")
                    .filter(|l| l.contains(" = ") || l.starts_with('['))
                    .unwrap_or(line)
            })
            .map(|line| format!("{line}\n"))
            .collect();
        read(example).unwrap();
        let full = read(&all).unwrap();
        assert!(full.listen.tcp.is_some(), "every setting of the example, switched on");
    }

    #[test]
    fn errors_name_the_field_and_the_remedy() {
        for (text, words) in [
            ("listen = '127.0.0.1:1'", "needs at least one [[token]]"),
            ("colour = 'red'", "line 1"),
            ("\n\nscheduler = 3", "line 3"),
            ("[scheduler]\ninterval_s = 0", "scheduler.interval_s is 0"),
            ("[scheduler]\nrestart_cost_s = 900", "restart_cost_s"),
            ("[scheduler]\nmax_disruption_pct = 101.0", "max_disruption_pct"),
            ("[profiler]\nlimit_s = 1", "profiler.limit_s"),
            ("socket_mode = '999'", "octal"),
            ("queue_mib_per_user = 0", "queue_mib_per_user is 0"),
            ("keep_jobs_days = 0", "keep_jobs_days is 0"),
            ("keep_jobs = 0", "keep_jobs is 0"),
            ("keep_mib_per_user = 0", "keep_mib_per_user is 0"),
            ("keep_output_mib_per_user = 0", "keep_output_mib_per_user is 0"),
            ("silence_s = 0", "silence_s is 0"),
            ("[agent]\ntick_ms = 0", "tick_ms is 0"),
            ("[agent]\nnothing = 1", "nothing"),
            ("[[token]]\nuser = 'no-such-user-here'\ntoken = '0123456789abcdef'", "token[0].user"),
            ("[[token]]\nuser = 'root'\ntoken = 'short'", "16 characters"),
            ("[[token]]\nuser = 'root'", "token_file"),
            (
                "[[token]]\nuser = 'root'\ntoken = '0123456789abcdef'\n[[token]]\nuser = '65534'\ntoken = '0123456789abcdef'",
                "token[1].token: another entry",
            ),
        ] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("up.toml"), "{text}: {error}");
        }
    }
}
