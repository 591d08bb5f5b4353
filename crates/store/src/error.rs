//! What can go wrong, and what to do about it.

use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// An error of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Written by a newer program.
    #[error(
        "{path} is a store of version {found}, and this program knows versions up to {known}; use the newer program, or another file"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version known here.
        known: u32,
    },
    /// Written by an older program and opened only for reading.
    #[error(
        "{path} is a store of version {found}, older than {known}; open it once for writing (any command that writes) to bring it up to date"
    )]
    Older {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version needed.
        known: u32,
    },
    /// Some other file.
    #[error("{path} is not a MuxFlow store: {detail}; name another file")]
    NotAStore {
        /// The file.
        path: PathBuf,
        /// What it is instead.
        detail: String,
    },
    /// No room.
    #[error(
        "cannot {operation} {path}: the disk is full; nothing was changed, free some space and try again"
    )]
    DiskFull {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Not to be written.
    #[error(
        "cannot {operation} {path}: it is read-only for this user; change its permissions or name another file"
    )]
    ReadOnly {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Another program holds it.
    #[error(
        "cannot {operation} {path}: another program has been writing to it for too long; try again, or stop it"
    )]
    Busy {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// Not sound.
    #[error("{path} is damaged ({detail}); restore a copy")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        detail: String,
    },
    /// A row that this program would not have written.
    #[error("{path}: {what} cannot be read: {detail}")]
    Row {
        /// The file.
        path: PathBuf,
        /// Which row.
        what: String,
        /// What is wrong with it.
        detail: String,
    },
    /// A model that is not there.
    #[error("{path} has no model {id}; list the models to see which there are")]
    NoModel {
        /// The file.
        path: PathBuf,
        /// Which one.
        id: i64,
    },
    /// Anything else.
    #[error("cannot {operation} {path}")]
    Sqlite {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        #[source]
        source: rusqlite::Error,
    },
}

impl StoreError {
    pub(crate) fn from_sqlite(
        operation: &'static str,
        path: &Path,
        error: rusqlite::Error,
    ) -> Self {
        let path = path.to_owned();
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => StoreError::DiskFull { operation, path },
            Some(ErrorCode::ReadOnly) => StoreError::ReadOnly { operation, path },
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
                StoreError::Busy { operation, path }
            }
            Some(ErrorCode::DatabaseCorrupt) => {
                StoreError::Damaged { path, detail: error.to_string() }
            }
            Some(ErrorCode::NotADatabase) => {
                StoreError::NotAStore { path, detail: "not an SQLite file".to_owned() }
            }
            _ => StoreError::Sqlite { operation, path, source: error },
        }
    }
}
