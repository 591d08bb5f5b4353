//! What can go wrong between MuxFlow and a cluster.

use std::time::Duration;

/// An operation on the cluster that failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No way to reach or trust the API server.
    #[error("cannot connect to the cluster; check KUBECONFIG or the pod's service account")]
    Connect(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A request that failed.
    #[error("cannot {action} {subject}")]
    Request {
        /// What was asked.
        action: &'static str,
        /// Of what.
        subject: String,
        /// The answer.
        source: Box<kube::Error>,
    },
    /// A watch that gave no first list.
    #[error(
        "no list of {kind} after {} s; the scheduler may lack the right to list and watch them, or the custom resources are not installed",
        waited.as_secs()
    )]
    Watch {
        /// Of what.
        kind: &'static str,
        /// How long was waited.
        waited: Duration,
    },
    /// A part that must not end did.
    #[error("{what} has ended: {why}")]
    Ended {
        /// Which.
        what: &'static str,
        /// How.
        why: String,
    },
    /// A leader that does nothing.
    #[error("no look at the cluster was finished for {} s although this replica leads; it is ended, for another to lead", .0.as_secs())]
    Hangs(Duration),
    /// A setting that makes no sense.
    #[error("`{setting}`: {problem}")]
    Setting {
        /// Which one.
        setting: &'static str,
        /// Why, and what to write.
        problem: String,
    },
    /// The planner refused.
    #[error("cannot plan")]
    Plan(#[from] muxflow_policy::cluster::PlanError),
}

impl Error {
    pub(crate) fn request(
        action: &'static str,
        subject: impl Into<String>,
    ) -> impl FnOnce(kube::Error) -> Self {
        let subject = subject.into();
        move |source| Error::Request { action, subject, source: Box::new(source) }
    }
}
