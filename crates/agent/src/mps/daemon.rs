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
    failures: u32,
    not_before: Option<Instant>,
    started: u64,
    partitions: Option<Partitions>,
    /// The driver was asked for partitions and has none.
    unpartitioned: bool,
}

/// The first wait after a failed start; each further one doubles it.
const FIRST_WAIT: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

impl MpsDaemon {
    /// Takes over the daemon that an earlier agent left, if it still runs.
    pub fn adopt(spec: DaemonSpec, group: Group) -> Result<Self> {
        for dir in [spec.dir.clone(), spec.pipe_dir(), spec.log_dir()] {
            fs::create_dir_all(&dir).map_err(file("create", &dir))?;
        }
        let remembered = launch::read::<Remembered>(&memory_file(&spec.dir))?;
        let remembered =
            remembered.filter(|r| r.boot_id == process::boot_id() && r.daemon.is_alive());
        let (daemon, partitions) = match remembered {
            Some(remembered) => (Some(remembered.daemon), remembered.partitions),
            None => (None, None),
        };
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
            unpartitioned: daemon.is_some() && partitions.is_none(),
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

    /// Its process, while it lives.
    pub fn process(&self) -> Option<ProcessKey> {
        self.daemon.filter(|daemon| daemon.is_alive())
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
        if self.not_before.is_some_and(|until| Instant::now() < until) {
            return Ok(false);
        }
        match self.start() {
            Ok(()) => {
                self.failures = 0;
                Ok(true)
            }
            Err(error) => {
                let wait = FIRST_WAIT.saturating_mul(1 << self.failures.min(10)).min(LONGEST_WAIT);
                self.failures = self.failures.saturating_add(1);
                self.not_before = Some(Instant::now() + wait);
                Err(error)
            }
        }
    }

    fn start(&mut self) -> Result<()> {
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
        let remembered =
            Remembered { boot_id: process::boot_id(), daemon, partitions: self.partitions.clone() };
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

    /// Ends daemon and server and everything in their group, politely first.
    pub fn stop(&mut self) {
        if self.process().is_some()
            && let Err(error) = self.control.quit()
        {
            tracing::warn!(gpu = self.spec.uuid, error = %error, "MPS does not quit; killing it");
        }
        let deadline = Instant::now() + self.spec.limit;
        while self.process().is_some() && Instant::now() < deadline {
            self.reap();
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
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
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
        drop(fs::remove_file(memory_file(&self.spec.dir)));
    }

    /// Ends it and starts it anew at once, whatever it was waiting for.
    pub fn reset(&mut self) -> Result<()> {
        self.stop();
        self.not_before = None;
        self.ensure().map(drop)
    }
}

fn memory_file(dir: &Path) -> PathBuf {
    dir.join("daemon.json")
}

#[cfg(test)]
#[path = "daemon_tests.rs"]
mod tests;
