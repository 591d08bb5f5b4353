//! Wire formats at the border: what is read from and written to files and sockets.
//!
//! Domain types are not serialisable, so that renaming a field in `types` never changes a file
//! format in silence. Each format here is versioned, refuses fields it does not know, and names the
//! field when a value is refused.
//!
//! Absent on purpose: no IO (text in, text out), no decisions.

#![deny(unsafe_code)]

pub mod cluster;
pub mod events;
pub mod example;
pub mod jobs;
pub mod plan;
pub mod problem;
pub mod service;
pub mod snapshot;

use muxflow_types::{IdError, UnitError};

/// A document that is not what it should be.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// Not JSON, or not of the right form.
    #[error("line {line}, column {column}: {problem}")]
    Form {
        /// What is wrong, without the place.
        problem: String,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
    },
    /// Of a version that this program does not read.
    #[error(
        "`version` is {found}, but this program reads version {known}; convert the file or use the program that wrote it"
    )]
    Version {
        /// What the file says.
        found: u32,
        /// What is understood.
        known: u32,
    },
    /// A number out of range.
    #[error("`{field}`: {source}")]
    Unit {
        /// Where, such as `gpus[3].share_sms`.
        field: String,
        /// What is wrong with it.
        source: UnitError,
    },
    /// A name that cannot be one.
    #[error("`{field}`: {source}")]
    Id {
        /// Where, such as `jobs[0].job`.
        field: String,
        /// What is wrong with it.
        source: IdError,
    },
    /// A value that contradicts another.
    #[error("`{field}`: {problem}")]
    Value {
        /// Where.
        field: String,
        /// What is wrong, and what to write instead.
        problem: String,
    },
}

impl From<serde_json::Error> for WireError {
    fn from(source: serde_json::Error) -> Self {
        let text = source.to_string();
        let problem = match text.rfind(" at line ") {
            Some(end) => text[..end].to_owned(),
            None => text,
        };
        WireError::Form { problem, line: source.line(), column: source.column() }
    }
}
