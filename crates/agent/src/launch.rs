//! What the agent hands to a keeper, and what the keeper leaves behind, as files.
//!
//! Each workload has a directory of its own under the agent's state:
//!
//! | file | written by | says |
//! | --- | --- | --- |
//! | `launch.json` | agent | everything needed to start and to stop it; the keeper has no choices |
//! | `run.json` | keeper | which processes these are, in which boot |
//! | `exit.json` | keeper | how it ended, and how it was stopped |
//! | `keeper.lock` | keeper | locked while a keeper lives: nothing runs twice |
//! | `stdout.log`, `stderr.log` | the workload | its output, rotated |
//!
//! These are wire formats of the agent with itself; a file of an older version that cannot be read is
//! an error that names it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cgroup::{Group, Limits};
use crate::error::{AgentError, Result, file};
use crate::logs::{self, LogLimits};
use crate::process::ProcessKey;
use crate::stop::{Step, StepTaken, StopLimits};
use crate::sys::Ended;

/// What kind of work it is; this decides what happens when the agent dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Latency-bound: it outlives the agent.
    Online,
    /// Best-effort: it stops when the agent dies.
    Offline,
}

impl Kind {
    /// The word used in logs, files and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Online => "online",
            Kind::Offline => "offline",
        }
    }
}

/// Everything a keeper needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    /// The workload's name.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// The GPU it was put on.
    pub gpu: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// User and group that it runs as; none means the agent's.
    pub user: Option<(u32, u32)>,
    /// What its control group is held to.
    pub limits: Limits,
    /// Its control group.
    pub group: Group,
    /// How much of its output is kept.
    pub logs: LogLimits,
    /// The directory of its control block, for offline work.
    pub control_dir: Option<PathBuf>,
    /// How to reach its MPS daemon: the control program and the pipe directory.
    pub mps: Option<(PathBuf, PathBuf)>,
    /// How long each step of a stop may take.
    pub stop: StopLimits,
    /// How long an online service may take to leave after SIGTERM.
    pub online_grace_ms: u64,
    /// The agent whose death ends offline work.
    pub agent: ProcessKey,
    /// Tells the same work from other work under the same name; 0 when nobody asks.
    #[serde(default)]
    pub fingerprint: u64,
    /// A service that was started while no MPS daemon ran: it shares with nobody.
    #[serde(default)]
    pub outside_mps: bool,
}

/// The variable that numbers the starts of one job; a job may read it, and the keeper writes it down
/// with the exit.
pub const RUN_VARIABLE: &str = "MUXFLOW_RUN";

impl Launch {
    /// Which start of the workload this is; 0 when nobody counts.
    pub fn run_number(&self) -> u64 {
        run_number(&self.env)
    }
}

/// Which start of a workload an environment is for; 0 when nobody counts.
pub(crate) fn run_number(env: &BTreeMap<String, String>) -> u64 {
    env.get(RUN_VARIABLE).and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// Which processes a workload is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The boot in which the keys below hold.
    pub boot_id: String,
    /// The keeper.
    pub keeper: ProcessKey,
    /// The workload's main process.
    pub main: ProcessKey,
    /// When it started, in seconds since the epoch.
    pub started_at_s: u64,
}

/// Why a keeper stopped a workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum StopCause {
    /// The agent asked for it.
    Asked,
    /// The agent is gone.
    AgentGone,
}

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exit {
    /// Exit code, when it left by itself.
    pub code: Option<i32>,
    /// Signal, when one ended it.
    pub signal: Option<i32>,
    /// The kernel killed a process of it for want of memory.
    pub out_of_memory: bool,
    /// Why it was stopped, when it was.
    pub stop: Option<StopCause>,
    /// What the stop went through.
    pub steps: Vec<StepTaken>,
    /// Nothing of its group was left at the end.
    pub all_gone: bool,
    /// Which start of the workload this was the end of; 0 when nobody counts.
    #[serde(default)]
    pub run: u64,
    /// What it was started with, in one number; 0 when nobody asks.
    #[serde(default)]
    pub fingerprint: u64,
    /// When, in seconds since the epoch.
    pub at_s: u64,
}

impl Exit {
    /// An end that nobody saw.
    pub fn unknown() -> Self {
        Exit {
            code: None,
            signal: None,
            out_of_memory: false,
            stop: None,
            steps: Vec::new(),
            all_gone: true,
            run: 0,
            fingerprint: 0,
            at_s: now_s(),
        }
    }

    /// The program left by itself: nobody asked it to, or it was gone before it was asked.
    pub fn is_by_itself(&self) -> bool {
        let signalled = |taken: &StepTaken| taken.step == Step::Checkpoint;
        self.stop.is_none() || (self.code.is_some() && !self.steps.iter().any(signalled))
    }

    /// The program did what it was started for: nothing is left to be done.
    pub fn is_finished(&self) -> bool {
        self.code == Some(0) && self.is_by_itself()
    }

    /// From what the kernel told the parent.
    pub fn of(ended: Option<Ended>) -> Self {
        let mut exit = Exit::unknown();
        match ended {
            Some(Ended::Code(code)) => exit.code = Some(code),
            Some(Ended::Signal(signal)) => exit.signal = Some(signal),
            None => {}
        }
        exit
    }
}

/// Seconds since the epoch, for people who read the files.
pub fn now_s() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// The files of one workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadDir(PathBuf);

impl WorkloadDir {
    /// In this directory.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        WorkloadDir(path.into())
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// What is to be started.
    pub fn launch_file(&self) -> PathBuf {
        self.0.join("launch.json")
    }

    /// Which processes run.
    pub fn run_file(&self) -> PathBuf {
        self.0.join("run.json")
    }

    /// How it ended.
    pub fn exit_file(&self) -> PathBuf {
        self.0.join("exit.json")
    }

    /// Held by the keeper.
    pub fn lock_file(&self) -> PathBuf {
        self.0.join("keeper.lock")
    }

    /// The output, `stdout` or `stderr`.
    pub fn log_file(&self, stream: &str) -> PathBuf {
        self.0.join(format!("{stream}.log"))
    }

    /// Keeps the output within its limits.
    pub fn rotate_logs(&self, launch: &Launch) {
        for stream in ["stdout", "stderr"] {
            if let Err(error) = logs::rotate(&self.log_file(stream), launch.logs) {
                tracing::warn!(workload = launch.name, error = %error, "cannot rotate output");
            }
        }
    }
}

/// Reads a file; `None` when it is not there.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(AgentError::File { operation: "read", path: path.to_owned(), source });
        }
    };
    let damaged =
        |e: serde_json::Error| AgentError::Damaged { path: path.to_owned(), reason: e.to_string() };
    serde_json::from_str(&text).map(Some).map_err(damaged)
}

/// Writes a file whole or not at all, also when the machine stops in the middle.
pub fn write<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|e| AgentError::Damaged { path: path.to_owned(), reason: e.to_string() })?;
    let beside = path.with_extension("new");
    let mut written = fs::File::create(&beside).map_err(file("create", &beside))?;
    written.write_all(text.as_bytes()).map_err(file("write", &beside))?;
    written.sync_all().map_err(file("write", &beside))?;
    fs::rename(&beside, path).map_err(file("rename to", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_come_back_and_damage_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("exit.json");
        assert_eq!(read::<Exit>(&path).unwrap(), None);
        let exit = Exit::of(Some(Ended::Signal(9)));
        write(&path, &exit).unwrap();
        assert_eq!(read::<Exit>(&path).unwrap(), Some(exit));
        fs::write(&path, "{\"code\": tru").unwrap();
        let error = read::<Exit>(&path).unwrap_err().to_string();
        assert!(error.contains("exit.json") && error.contains("remove it"), "{error}");
    }
}
