//! What can be wrong with a description of a GPU or of a workload.

/// A profile or workload text that cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// Not TOML, or a field is missing, unknown or of the wrong kind.
    #[error("the {what} is not readable: {reason}")]
    Syntax {
        /// GPU profile or workload list.
        what: &'static str,
        /// What the parser says, with line and column.
        reason: String,
    },
    /// A number out of its range.
    #[error("{subject}: field `{field}` is {value}, it must lie between {low} and {high}")]
    Range {
        /// The GPU type or workload.
        subject: String,
        /// The field.
        field: &'static str,
        /// What was given.
        value: f64,
        /// Smallest allowed.
        low: f64,
        /// Largest allowed.
        high: f64,
    },
    /// A name that cannot be an id.
    #[error("{subject}: {reason}")]
    Name {
        /// What carries the name.
        subject: String,
        /// Why not.
        reason: String,
    },
    /// A GPU type or workload that is not built in.
    #[error("there is no built-in {what} called `{name}`; built in are {known}")]
    Unknown {
        /// GPU type or workload.
        what: &'static str,
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
}
