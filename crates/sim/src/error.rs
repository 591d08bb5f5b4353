//! What can go wrong in a simulation: mostly its inputs.

use std::path::PathBuf;

/// A simulation that cannot run.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// A file that cannot be opened.
    #[error("cannot open the trace {path}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// A file that broke off or is not what its name says.
    #[error("{path}, line {line}: cannot be read ({hint})")]
    Read {
        /// The file.
        path: PathBuf,
        /// Where.
        line: u64,
        /// What it probably is.
        hint: &'static str,
        /// What the system says.
        #[source]
        source: std::io::Error,
    },
    /// A line that is not a row of this kind of trace.
    #[error("{path}, line {line}: {reason}")]
    Line {
        /// The file.
        path: PathBuf,
        /// Where.
        line: u64,
        /// What is wrong and how it should look.
        reason: String,
    },
    /// A trace without a single usable row.
    #[error("{path}: no usable row in it")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A setting that makes no sense.
    #[error("`{field}` is {value}: {reason}")]
    Setting {
        /// Which one.
        field: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        reason: &'static str,
    },
    /// A policy that does not exist.
    #[error("there is no policy `{name}`; there are {known}")]
    UnknownPolicy {
        /// As given.
        name: String,
        /// All names.
        known: String,
    },
    /// A GPU type or workload that cannot be used.
    #[error("the GPU model cannot be used")]
    Model(#[from] muxflow_gpu_model::ModelError),
    /// A plan that could not be made.
    #[error("planning at {at_s:.0} s of virtual time failed: {reason}")]
    Plan {
        /// When.
        at_s: f64,
        /// Why.
        reason: String,
    },
    /// A plan that fails its lint: the simulation stops, as the real manager would.
    #[error("the plan at {at_s:.0} s of virtual time fails its lint: {finding}")]
    Lint {
        /// When.
        at_s: f64,
        /// The first finding.
        finding: String,
    },
    /// A value that the domain refuses.
    #[error("{what} cannot be built: {reason}")]
    Value {
        /// What was built.
        what: &'static str,
        /// Why not.
        reason: String,
    },
    /// The predictor could not be trained.
    #[error("the predictor cannot be trained: {reason}")]
    Predictor {
        /// Why.
        reason: String,
    },
}
