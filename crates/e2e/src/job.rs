//! A job under test: a control block with a beating agent, and programs run under the interposer.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::block::ControlBlock;
use muxflow_abi::control::{Gate, Settings};

use crate::build;

/// A control block in a directory of its own, with a thread that beats for the agent.
#[derive(Debug)]
pub struct Job {
    /// The block itself.
    pub block: Arc<ControlBlock>,
    directory: tempfile::TempDir,
    beating: Arc<AtomicBool>,
    heart: Option<JoinHandle<()>>,
}

/// How a program ended and what it wrote.
#[derive(Debug)]
pub struct Outcome {
    /// Its wait status.
    pub status: ExitStatus,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Job {
    /// A job with this quota on device 0, gate open.
    #[must_use]
    pub fn new(quota_bytes: u64) -> Self {
        Self::with(quota_bytes, &Settings::default())
    }

    /// As [`Job::new`], with settings.
    #[must_use]
    pub fn with(quota_bytes: u64, settings: &Settings) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let block = ControlBlock::create(&directory.path().join("control"), 42, settings)
            .expect("a control block");
        block.agent().set_quota(0, quota_bytes);
        block.command(Gate::Open);
        let block = Arc::new(block);
        let beating = Arc::new(AtomicBool::new(true));
        let heart = {
            let (block, beating) = (Arc::clone(&block), Arc::clone(&beating));
            std::thread::spawn(move || {
                while beating.load(Ordering::Relaxed) {
                    block.beat();
                    std::thread::sleep(Duration::from_millis(50));
                }
            })
        };
        Self { block, directory, beating, heart: Some(heart) }
    }

    /// The agent dies.
    pub fn stop_beating(&mut self) {
        self.beating.store(false, Ordering::Relaxed);
        if let Some(heart) = self.heart.take() {
            heart.join().expect("the heart does not panic");
        }
    }

    /// A place for files of this job.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A command under the preloaded interposer, in front of the driver in a directory.
    #[must_use]
    pub fn command(&self, program: &Path, driver: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env("LD_PRELOAD", build::xcuda())
            .env("LD_LIBRARY_PATH", driver)
            .env("MUXFLOW_CONTROL", self.block.directory())
            .env("STUB_LOG", self.path("stub.log"));
        command
    }

    /// A command where the interposer stands in for `libcuda.so.1`: it is found first.
    #[must_use]
    pub fn stand_in(&self, program: &Path, driver: &Path) -> Command {
        let first = self.path("stand-in");
        std::fs::create_dir_all(&first).expect("a directory for the stand-in");
        for name in ["libcuda.so.1", "libcuda.so"] {
            let link = first.join(name);
            if !link.exists() {
                std::os::unix::fs::symlink(build::xcuda(), link).expect("a link");
            }
        }
        let mut command = Command::new(program);
        let path = format!("{}:{}", first.display(), driver.display());
        command.env("LD_LIBRARY_PATH", path).env("MUXFLOW_CONTROL", self.block.directory());
        command
    }

    /// Runs the C client with some operations over the stub driver.
    #[must_use]
    pub fn run(&self, operations: &[&str]) -> Outcome {
        let client = build::client("client", &[]);
        let mut command = self.command(&client, build::stub_driver());
        command.args(operations).output().expect("the client runs").into()
    }

    /// Starts the C client.
    #[must_use]
    pub fn spawn(&self, operations: &[&str]) -> Child {
        let client = build::client("client", &[]);
        let mut command = self.command(&client, build::stub_driver());
        command.args(operations).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("the client starts")
    }

    /// What the stub logged about contexts.
    #[must_use]
    pub fn stub_log(&self) -> String {
        std::fs::read_to_string(self.path("stub.log")).unwrap_or_default()
    }

    /// Bytes charged on device 0.
    #[must_use]
    pub fn charged(&self) -> u64 {
        self.block.job().charged_bytes(0)
    }
}

/// Gives a command the default signals. A shell starts what runs in the background with SIGINT
/// ignored, and all that is started from there would inherit it.
pub fn default_signals(command: &mut Command) -> &mut Command {
    // SAFETY: between fork and exec only `signal` is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            for number in [libc::SIGINT, libc::SIGTERM, libc::SIGQUIT] {
                libc::signal(number, libc::SIG_DFL);
            }
            Ok(())
        })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.stop_beating();
    }
}
