//! The control daemon of one GPU: started, watched, restarted with a growing wait, adopted.
//!
//! It runs in the foreground mode of the control program but in a session and a control group of its
//! own, so that it outlives the agent; a file remembers which process it is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::control::{MpsControl, ServerStatus};
use super::partition::Partitions;
use crate::cgroup::Group;
use crate::error::{AgentError, Result, file};
use crate::launch;
use crate::logs;
use crate::process::{self, ProcessKey};
use crate::stuck;
use crate::sys::{self, ChildSetup};

/// How a daemon is started and how long it may take to answer.
#[derive(Debug, Clone)]
pub struct DaemonSpec {
    /// The control program.
    pub program: PathBuf,
    /// The GPU, by UUID.
    pub uuid: String,
    /// Where it listens, logs, and is remembered.
    pub dir: PathBuf,
    /// One server for every user.
    pub multi_user: bool,
    /// How long each question may take.
    pub limit: Duration,
    /// Cut the SMs in two for good, so large a part for jobs, where the driver can.
    pub offline_partition: Option<f64>,
}

impl DaemonSpec {
    /// Where clients find it.
    pub fn pipe_dir(&self) -> PathBuf {
        self.dir.join("pipe")
    }

    /// Where it logs.
    pub fn log_dir(&self) -> PathBuf {
        self.dir.join("log")
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Remembered {
    boot_id: String,
    daemon: ProcessKey,
    #[serde(default)]
    partitions: Option<Partitions>,
    /// How it was started; none of an agent that did not write it down.
    #[serde(default)]
    started_with: Option<Settings>,
}

/// What a daemon is told when it starts and cannot be told later.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Settings {
    multi_user: bool,
    offline_partition: Option<f64>,
}

/// What is known of a daemon and its server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MpsState {
    /// No daemon runs.
    Down,
    /// The daemon runs and has no server yet: the first client starts it.
    Idle,
    /// A server runs.
    Serving {
        /// Its process.
        server: u32,
        /// What the daemon says of it.
        status: ServerStatus,
        /// Its clients.
        clients: Vec<u32>,
    },
    /// The daemon does not answer.
    Silent(String),
}

/// The daemon of one GPU.
#[derive(Debug)]
pub struct MpsDaemon {
    spec: DaemonSpec,
    control: MpsControl,
    group: Group,
    daemon: Option<ProcessKey>,
    child: Option<Child>,
    /// Starts in a row that failed, or of a daemon that was gone or of no use soon after.
    failures: u32,
    not_before: Option<Instant>,
    started: u64,
    started_at: Option<Instant>,
    /// How the daemon that runs was started.
    runs_with: Settings,
    partitions: Option<Partitions>,
    /// The driver was asked for partitions and has none.
    unpartitioned: bool,
}

/// The first wait after a failed start; each further one doubles it.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// A daemon that lived so long did not fail at its start.
const SETTLED_AFTER: Duration = Duration::from_secs(60);

/// A reset waits so long at most: the service waits with it.
const RESET_WAITS: Duration = Duration::from_secs(4);

/// The wait before a start after so many that did not last; the first of them costs none.
fn wait_after(failures: u32) -> Duration {
    match failures {
        0 | 1 => Duration::ZERO,
        n => FIRST_WAIT.saturating_mul(1 << (n - 2).min(10)).min(LONGEST_WAIT),
    }
}

impl MpsDaemon {
    /// Takes over the daemon that an earlier agent left, if it still runs.
    pub fn adopt(spec: DaemonSpec, group: Group) -> Result<Self> {
        for dir in [spec.dir.clone(), spec.pipe_dir(), spec.log_dir()] {
            fs::create_dir_all(&dir).map_err(file("create", &dir))?;
        }
        let remembered = launch::read::<Remembered>(&memory_file(&spec.dir))?;
        let remembered = remembered.filter(|r| r.boot_id == process::boot_id());
        // Kept though it may be gone: its server may not be.
        let daemon = remembered.as_ref().map(|remembered| remembered.daemon);
        let wanted = settings(&spec);
        let remembered = remembered.filter(|remembered| remembered.daemon.is_alive());
        let lives = remembered.is_some();
        let (partitions, runs_with) = match remembered {
            Some(remembered) => (remembered.partitions, remembered.started_with.unwrap_or(wanted)),
            None => (None, wanted),
        };
        if runs_with != wanted {
            tracing::warn!(
                gpu = spec.uuid,
                pipe_dir = %spec.pipe_dir().display(),
                "MPS runs with other settings than the file has now: they count once nobody uses it and it is started again"
            );
        }
        let control = MpsControl::new(spec.program.clone(), spec.pipe_dir(), spec.limit);
        Ok(MpsDaemon {
            spec,
            control,
            group,
            daemon,
            child: None,
            failures: 0,
            not_before: None,
            started: 0,
            started_at: None,
            unpartitioned: lives && partitions.is_none(),
            runs_with,
            partitions,
        })
    }

    /// The static partitions, where there are some.
    pub fn partitions(&self) -> Option<&Partitions> {
        self.partitions.as_ref()
    }

    /// How to reach it.
    pub fn control(&self) -> &MpsControl {
        &self.control
    }

    /// What it was made from.
    pub fn spec(&self) -> &DaemonSpec {
        &self.spec
    }

    /// Whether the daemon that runs was started with other settings than it should have.
    pub fn is_outdated(&self) -> bool {
        self.process().is_some() && self.runs_with != settings(&self.spec)
    }

    /// Whether the server of the daemon that runs serves all users at once.
    pub fn serves_all_users(&self) -> bool {
        self.runs_with.multi_user
    }

    /// Its process, while it lives.
    pub fn process(&self) -> Option<ProcessKey> {
        self.daemon.filter(|daemon| daemon.is_alive())
    }

    /// Whether the daemon that an earlier agent left is gone. Its clients, if there are any, are lost
    /// or on a server that no new daemon knows.
    pub fn died_unseen(&self) -> bool {
        self.started == 0 && self.daemon.is_some_and(|daemon| !daemon.is_alive())
    }

    /// Whether something of it runs, its server for one, as far as the kernel tracks that.
    pub fn has_processes(&self) -> bool {
        self.group.tracks() && !self.group.processes().is_empty()
    }

    /// How often this agent started it.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Starts it when it does not run and its wait is over; says whether it runs now.
    pub fn ensure(&mut self) -> Result<bool> {
        if let Some(child) = &mut self.child
            && matches!(child.try_wait(), Ok(Some(_)))
        {
            self.child = None;
        }
        if self.process().is_some() {
            return Ok(true);
        }
        self.judge_last_start();
        if self.not_before.is_some_and(|until| Instant::now() < until) {
            return Ok(false);
        }
        match self.start() {
            Ok(()) => {
                self.started_at = Some(Instant::now());
                Ok(true)
            }
            Err(error) => {
                // It had its chance: even the first failure costs a wait.
                self.failures = self.failures.saturating_add(1).max(2);
                self.not_before = Some(Instant::now() + wait_after(self.failures));
                Err(error)
            }
        }
    }

    /// The daemon is gone or of no use. One that did not last makes the next one wait.
    fn judge_last_start(&mut self) {
        let Some(started) = self.started_at.take() else { return };
        if started.elapsed() >= SETTLED_AFTER {
            (self.failures, self.not_before) = (0, None);
            return;
        }
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(Instant::now() + wait_after(self.failures));
    }

    fn start(&mut self) -> Result<()> {
        let wanted = settings(&self.spec);
        if self.runs_with.offline_partition != wanted.offline_partition {
            (self.partitions, self.unpartitioned) = (None, false);
        }
        self.runs_with = wanted;
        let Some(share) = self.spec.offline_partition.filter(|_| !self.unpartitioned) else {
            return self.start_as(&[]).and_then(|()| self.remember());
        };
        if self.start_as(&["-S"]).is_ok() {
            self.partitions = Partitions::make(&self.control, &self.spec.uuid, share);
            if let Some(made) = &self.partitions {
                tracing::info!(gpu = self.spec.uuid, partitions = ?made, "SMs are cut in two");
                return self.remember();
            }
        }
        tracing::warn!(
            gpu = self.spec.uuid,
            "this driver or GPU has no static SM partitions: the share is set by percentage"
        );
        self.unpartitioned = true;
        self.stop();
        self.start_as(&[]).and_then(|()| self.remember())
    }

    fn remember(&self) -> Result<()> {
        let Some(daemon) = self.daemon else { return Ok(()) };
        let remembered = Remembered {
            boot_id: process::boot_id(),
            daemon,
            partitions: self.partitions.clone(),
            started_with: Some(self.runs_with),
        };
        launch::write(&memory_file(&self.spec.dir), &remembered)
    }

    fn start_as(&mut self, flags: &[&str]) -> Result<()> {
        // What a dead daemon left in its directory keeps the next one from starting.
        let pipe_dir = self.spec.pipe_dir();
        drop(fs::remove_dir_all(&pipe_dir));
        fs::create_dir_all(&pipe_dir).map_err(file("create", &pipe_dir))?;
        let (groups, affinity) = self.group.entrance()?;
        let setup = ChildSetup { groups, affinity, new_session: true, ..ChildSetup::default() };
        let mut command = Command::new(&self.spec.program);
        command
            .arg("-f")
            .args(flags)
            .args(self.spec.multi_user.then_some("-multiuser-server"))
            .env("CUDA_VISIBLE_DEVICES", &self.spec.uuid)
            .env("CUDA_MPS_PIPE_DIRECTORY", &pipe_dir)
            .env("CUDA_MPS_LOG_DIRECTORY", self.spec.log_dir())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(logs::open(&self.spec.log_dir().join("daemon.out"))?)
            .stderr(logs::open(&self.spec.log_dir().join("daemon.err"))?);
        let mut child = sys::with_setup(&mut command, setup)
            .spawn()
            .map_err(file("start", &self.spec.program))?;
        let daemon = match process::stat(child.id()) {
            Ok(stat) => Some(ProcessKey { pid: child.id(), start_ticks: stat.start_ticks }),
            Err(error) => {
                // One that cannot be told from another must not be left behind.
                drop(child.kill());
                drop(child.wait());
                return Err(self.failed("-f", format!("it cannot be watched: {error}")));
            }
        };
        self.child = Some(child);
        self.daemon = daemon;
        self.started += 1;
        self.await_answer()?;
        tracing::info!(gpu = self.spec.uuid, pid = daemon.map(|d| d.pid), "MPS daemon runs");
        Ok(())
    }

    fn await_answer(&mut self) -> Result<()> {
        let deadline = Instant::now() + self.spec.limit.max(Duration::from_secs(2));
        loop {
            if let Some(child) = &mut self.child
                && let Ok(Some(status)) = child.try_wait()
            {
                self.child = None;
                let said = fs::read_to_string(self.spec.log_dir().join("daemon.err"));
                let said = said.unwrap_or_default();
                return Err(self.failed("-f", format!("it left with {status}: {}", said.trim())));
            }
            let asked = self.control.servers();
            if asked.is_ok() {
                return Ok(());
            }
            if Instant::now() > deadline {
                self.kill();
                let why = asked.err().map_or_else(String::new, |error| error.to_string());
                return Err(self.failed("-f", format!("it does not answer: {why}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn failed(&self, command: &str, reason: String) -> AgentError {
        AgentError::Mps { pipe_dir: self.spec.pipe_dir(), command: command.to_owned(), reason }
    }

    /// Asks how it is. Takes up to three questions.
    pub fn state(&self) -> MpsState {
        if self.process().is_none() {
            return MpsState::Down;
        }
        let asked = self.control.servers().and_then(|servers| match servers.first() {
            None => Ok(MpsState::Idle),
            Some(&server) => {
                let status = self.control.status(server)?;
                let clients = self.control.clients(server)?;
                Ok(MpsState::Serving { server, status, clients })
            }
        });
        asked.unwrap_or_else(|error| MpsState::Silent(error.to_string()))
    }

    /// Ends daemon and server and everything in their group, politely first. A daemon that is asked
    /// to quit waits for its clients, so this is for one that has none.
    pub fn stop(&mut self) {
        if self.process().is_some() {
            match self.control.quit() {
                Ok(()) => self.await_end(),
                Err(error) => {
                    tracing::warn!(gpu = self.spec.uuid, %error, "MPS does not quit; killing it");
                }
            }
        }
        self.kill();
    }

    fn await_end(&mut self) {
        let deadline = Instant::now() + self.spec.limit;
        while self.process().is_some() && Instant::now() < deadline {
            self.reap();
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn reap(&mut self) {
        if let Some(child) = &mut self.child
            && matches!(child.try_wait(), Ok(Some(_)))
        {
            self.child = None;
        }
    }

    fn kill(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            self.group.kill_all(|| process::with_below(daemon), Duration::from_secs(2));
        }
        if let Some(child) = self.child.take() {
            stuck::end(child, "MPS control daemon");
        }
        drop(fs::remove_file(memory_file(&self.spec.dir)));
    }

    /// Ends it politely and starts it anew, with the settings of now.
    pub fn renew(&mut self) -> Result<()> {
        self.stop();
        self.start_anew()
    }

    /// Ends it at once and starts it anew: contexts are lost, and asked to quit it would wait for
    /// clients that hold on to theirs.
    pub fn reset(&mut self) -> Result<()> {
        self.kill();
        self.start_anew()
    }

    /// One that did not last makes the next one wait, here for a few seconds at most; where that is
    /// not enough, it does not run when this is over.
    fn start_anew(&mut self) -> Result<()> {
        self.judge_last_start();
        if let Some(until) = self.not_before {
            let wait = until.saturating_duration_since(Instant::now());
            std::thread::sleep(wait.min(RESET_WAITS));
        }
        self.ensure().map(drop)
    }
}

fn settings(spec: &DaemonSpec) -> Settings {
    Settings { multi_user: spec.multi_user, offline_partition: spec.offline_partition }
}

/// Where clients find the daemon that is remembered in this directory, while it lives.
pub(crate) fn living(dir: &Path) -> Option<PathBuf> {
    let remembered = launch::read::<Remembered>(&memory_file(dir)).ok().flatten()?;
    let lives = remembered.boot_id == process::boot_id() && remembered.daemon.is_alive();
    lives.then(|| dir.join("pipe"))
}

fn memory_file(dir: &Path) -> PathBuf {
    dir.join("daemon.json")
}

#[cfg(test)]
#[path = "daemon_tests.rs"]
mod tests;
