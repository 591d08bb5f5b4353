//! What can fail in the agent, each with what it was doing and to what.

use std::path::{Path, PathBuf};

/// An operation of the agent that failed.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A file or directory cannot be used.
    #[error("cannot {operation} {path}")]
    File {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file that the agent wrote earlier cannot be understood.
    #[error("{path} is damaged: {reason}; remove it to forget what it says")]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A workload that cannot be started.
    #[error("cannot start {workload}: {reason}")]
    Start {
        /// Which.
        workload: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A GPU that was asked to let somebody in has not answered yet.
    #[error("cannot start {workload}: GPU {gpu} did not answer within {} s", limit.as_secs())]
    NoAnswer {
        /// Who was to be let in.
        workload: String,
        /// The GPU's UUID.
        gpu: String,
        /// How long was waited.
        limit: std::time::Duration,
    },
    /// A program or directory with which a workload cannot be started anywhere on this node.
    #[error("cannot start {workload}: {reason}")]
    Unstartable {
        /// Which.
        workload: String,
        /// The program, the directory, and what is wrong with them.
        reason: String,
    },
    /// A workload of that name is there already.
    #[error("{workload} runs already as process {pid}; stop it first")]
    RunsAlready {
        /// Which.
        workload: String,
        /// Its process.
        pid: u32,
    },
    /// No workload of that name.
    #[error("there is no workload {workload} on this node")]
    Unknown {
        /// Which.
        workload: String,
    },
    /// Another agent works in the same directory.
    #[error("another agent uses {path}; only one may run per state directory")]
    AnotherAgent {
        /// The lock.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("cannot {operation}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// A control block that cannot be used.
    #[error("the control block in {path} cannot be used: {reason}")]
    ControlBlock {
        /// Its directory.
        path: PathBuf,
        /// Why.
        reason: muxflow_abi::control::Invalid,
    },
    /// The MPS control program did not do as asked.
    #[error("MPS control in {pipe_dir}: `{command}` failed: {reason}")]
    Mps {
        /// Which daemon.
        pipe_dir: PathBuf,
        /// What was asked.
        command: String,
        /// What it said.
        reason: String,
    },
    /// The driver's management library cannot be used.
    #[error("NVML: cannot {operation}: {reason}")]
    Nvml {
        /// What was tried.
        operation: &'static str,
        /// What it said.
        reason: String,
    },
    /// A setting names a GPU that nobody has.
    #[error("there is no GPU `{name}` here; there are {known}")]
    NoSuchGpu {
        /// What was named.
        name: String,
        /// The UUIDs that could be.
        known: String,
    },
    /// The configuration cannot be used.
    #[error("{path}: {reason}")]
    Config {
        /// Which file.
        path: PathBuf,
        /// The field, what is wrong and what would be right.
        reason: String,
    },
}

/// Short for results of this crate.
pub type Result<T> = std::result::Result<T, AgentError>;

pub(crate) fn file<'a>(
    operation: &'static str,
    path: &'a Path,
) -> impl FnOnce(std::io::Error) -> AgentError + use<'a> {
    move |source| AgentError::File { operation, path: path.to_owned(), source }
}

pub(crate) fn system(operation: &'static str) -> impl FnOnce(std::io::Error) -> AgentError {
    move |source| AgentError::System { operation, source }
}
