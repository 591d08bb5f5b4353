//! A real Kubernetes for tests: etcd, API server, controller manager and scheduler of a current
//! version, built from Go modules and started on free ports with throw-away certificates.
//!
//! A mock of the API server agrees with whoever wrote it. Optimistic locking, watches that expire,
//! eviction under a PodDisruptionBudget, RBAC and schema checks are what breaks schedulers, so the
//! tests run against the program that does them. [`program`] finds or builds it, [`pki`] makes the
//! certificates, [`cluster`] starts, restarts and stops the parts, [`node`] adds a node with a
//! kubelet and a container runtime, where nodes that a test writes are not enough; [`adapter`] answers a
//! group of the API from a test; [`scenarios`] is what
//! their test programs share.
//!
//! Absent on purpose: no client (tests bring their own), no network between pods, nothing installed
//! on the machine.

pub mod adapter;
pub mod cluster;
mod groups;
pub mod node;
pub mod pki;
mod ready;
pub mod scenarios;

use std::path::PathBuf;

pub use muxflow_control_plane as program;

pub use cluster::{Cluster, Lifetime, Part};
pub use node::Node;

/// Why there is no cluster.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program is not there.
    #[error(transparent)]
    Program(#[from] program::Error),
    /// A file or folder.
    #[error("cannot {action} {}", path.display())]
    File {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// A certificate.
    #[error("cannot make the certificate of {subject}")]
    Certificate {
        /// Whose.
        subject: String,
        /// The reason.
        source: rcgen::Error,
    },
    /// The kernel of this machine does not let a node be made: a container without these rights.
    #[error("this machine's kernel refuses a node: {why}")]
    Refused {
        /// What it refused.
        why: String,
    },
    /// A part that does not come up.
    #[error("{part} is not ready after {waited_s} s; the end of {}:\n{output}", log.display())]
    NotReady {
        /// Which one.
        part: &'static str,
        /// How long was waited.
        waited_s: u64,
        /// Its log.
        log: PathBuf,
        /// The end of its log.
        output: String,
    },
}

/// What a test does when there is no cluster: with `CI=true` it fails, otherwise it says loudly that
/// it was skipped, and why.
///
/// # Panics
/// With `CI=true`, and when the build itself is broken.
#[expect(clippy::print_stderr, reason = "a skipped test must be seen")]
pub fn skip_or_fail(test: &str, error: &Error) {
    let ci = std::env::var("CI").is_ok_and(|v| v == "true");
    let missing = matches!(error, Error::Program(program::Error::Unavailable { .. }));
    let refused = matches!(error, Error::Refused { .. });
    assert!(!ci && (missing || refused), "{test}: {error}");
    eprintln!("\n*** SKIPPED {test}: {error}\n");
}
