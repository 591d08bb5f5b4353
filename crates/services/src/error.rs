//! What can go wrong with a service.

use std::net::SocketAddr;
use std::path::PathBuf;

/// An operation on services that failed.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// A declaration that cannot be one.
    #[error("service `{service}`: `{field}` {problem}")]
    Declaration {
        /// Which service.
        service: String,
        /// Which field.
        field: &'static str,
        /// What is wrong, and what to write instead.
        problem: String,
    },
    /// The front's port cannot be had.
    #[error("service `{service}`: cannot listen on {address}: choose another `port`, or 0 for any")]
    Listen {
        /// Which service.
        service: String,
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// No such service.
    #[error("there is no service `{service}`; known are: {known}")]
    Unknown {
        /// What was asked for.
        service: String,
        /// What there is.
        known: String,
    },
    /// It is written down and was not taken up when the manager started.
    #[error("service `{service}` was not taken up: {reason}; declare it again or remove it")]
    NotTakenUp {
        /// Which service.
        service: String,
        /// Why.
        reason: String,
    },
    /// The executor refuses.
    #[error("replica `{replica}` cannot be started or stopped: {reason}")]
    Executor {
        /// Which replica.
        replica: String,
        /// Why.
        reason: String,
    },
    /// Nothing is started or stopped in shadow mode.
    #[error(
        "service `{service}` has replicas, and in shadow mode none is started or stopped: leave shadow mode first"
    )]
    Shadow {
        /// Which service.
        service: String,
    },
    /// It cannot be written down, so it was not done.
    #[error("service `{service}` cannot be written to {}, and stays as it was", path.display())]
    NotWritten {
        /// Which service.
        service: String,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// What is remembered of services cannot be read or written.
    #[error("{}: {reason}", path.display())]
    State {
        /// The file.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
}
