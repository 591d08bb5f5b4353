//! What can fail in the manager, and whose fault it is.

use std::path::PathBuf;

use muxflow_store::StoreError;

/// Something that was not done.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// A value that cannot be used.
    #[error("`{field}`: {problem}")]
    Invalid {
        /// Which.
        field: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// There is no such thing.
    #[error("there is no {what} `{name}`")]
    NotFound {
        /// Of which kind.
        what: &'static str,
        /// Its name.
        name: String,
    },
    /// An array where one job is asked for.
    #[error(
        "{array} is an array of jobs; name one of them, such as {member}, or list them with `muxflow jobs --array {array}`"
    )]
    IsArray {
        /// The array.
        array: String,
        /// One of its jobs.
        member: String,
    },
    /// The caller may not.
    #[error("{0}")]
    Forbidden(String),
    /// It cannot be done as things stand.
    #[error("{0}")]
    Conflict(String),
    /// The caller has too many jobs.
    #[error(
        "user {user} has {open} jobs that have not ended and may have {limit}; wait for some to end, or cancel some"
    )]
    Limit {
        /// Who.
        user: String,
        /// How many there are.
        open: u64,
        /// How many there may be.
        limit: u64,
    },
    /// What the caller's jobs were submitted with takes too much room.
    #[error(
        "what the jobs of user {user} that have not ended were submitted with takes {kept} bytes, these would add {asked}, and {limit} are allowed; put long arguments and variables into a file, wait for some jobs to end, or cancel some"
    )]
    LimitBytes {
        /// Who.
        user: String,
        /// What is kept.
        kept: u64,
        /// What would be added.
        asked: u64,
        /// What is allowed.
        limit: u64,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The node's executor failed.
    #[error(transparent)]
    Agent(#[from] muxflow_agent::AgentError),
    /// A file or socket cannot be used.
    #[error("cannot {operation} {path}")]
    File {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// Another manager works in the same directory.
    #[error("another manager uses {path}; only one may run per state directory")]
    AnotherManager {
        /// The lock.
        path: PathBuf,
    },
    /// The configuration cannot be used.
    #[error("{path}: {reason}")]
    Config {
        /// Which file.
        path: PathBuf,
        /// The field, what is wrong and what would be right.
        reason: String,
    },
    /// A plan cannot be made.
    #[error("cannot plan")]
    Plan(#[from] muxflow_policy::cluster::PlanError),
    /// The manager refused or gave a strange answer.
    #[error("{0}")]
    Client(String),
    /// The manager cannot be reached, or broke off: it may be back soon.
    #[error("{0}")]
    Unreachable(String),
    /// The manager has too many connections of this user: it may have a place soon.
    #[error("{0}")]
    Busy(String),
}

/// Short for results of this crate.
pub type Result<T> = std::result::Result<T, ManagerError>;

impl ManagerError {
    /// A value that cannot be used.
    pub fn invalid(field: impl Into<String>, problem: impl Into<String>) -> Self {
        ManagerError::Invalid { field: field.into(), problem: problem.into() }
    }

    /// The error with its causes, in one line.
    pub fn in_full(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            text.push_str(&format!(": {cause}"));
            source = cause.source();
        }
        text
    }
}
