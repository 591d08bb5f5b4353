//! The store: what was measured, what was learned from it, what came of it, and the manager's jobs,
//! in one SQLite file.
//!
//! Every change is one transaction: after a `kill -9` at any moment a batch of samples is there
//! whole or not at all, and exactly one model per GPU type is in use. A store of an older version is
//! brought up to date when it is opened; one of a newer version is refused.
//!
//! Absent on purpose: no decisions (which model is better is the predictor's to say), no model
//! formats (a model is bytes with a checksum), no clock (times are handed in), no cache.

mod error;
pub mod events;
pub mod jobs;
mod model;
mod queue;
mod retention;
mod runs;
mod sample;
mod schema;
pub mod submission;

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

pub use error::StoreError;
pub use model::{ModelId, ModelRow, NewModel};
pub use retention::Keep;
pub use runs::PairedRun;
pub use sample::{Observation, Source};
pub use schema::VERSION;

/// How long a writer waits for another one.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

/// An open store.
#[derive(Debug)]
pub struct Store {
    connection: Connection,
    path: PathBuf,
}

impl Store {
    /// Opens or creates a store, and brings an older one up to date.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut store = Self::connect(path, flags)?;
        store.configure()?;
        schema::migrate(&mut store.connection, path)?;
        Ok(store)
    }

    /// Opens an existing store for reading only.
    pub fn open_read_only(path: &Path) -> Result<Self, StoreError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let store = Self::connect(path, flags)?;
        schema::check_current(&store.connection, path)?;
        Ok(store)
    }

    fn connect(path: &Path, flags: OpenFlags) -> Result<Self, StoreError> {
        let failed = |error| StoreError::from_sqlite("open", path, error);
        let connection = Connection::open_with_flags(path, flags).map_err(failed)?;
        connection.busy_timeout(BUSY_TIMEOUT).map_err(failed)?;
        Ok(Store { connection, path: path.to_owned() })
    }

    /// Write-ahead log: readers (dashboard, planner) are not blocked by a writer. `synchronous =
    /// FULL`: what was acknowledged survives a power cut too; there are a few commits per second at
    /// most, and samples come in batches, so the price of an fsync for each does not matter.
    fn configure(&self) -> Result<(), StoreError> {
        let set = |name, value: &str| {
            self.connection
                .pragma_update(None, name, value)
                .map_err(|error| self.error("configure", error))
        };
        set("journal_mode", "WAL")?;
        set("synchronous", "FULL")?;
        set("foreign_keys", "ON")
    }

    /// Asks SQLite whether the file is sound.
    pub fn check(&self) -> Result<(), StoreError> {
        let answer: String = self
            .connection
            .query_row("PRAGMA integrity_check", [], |row| row.get(0))
            .map_err(|error| self.error("check", error))?;
        if answer == "ok" {
            Ok(())
        } else {
            Err(StoreError::Damaged { path: self.path.clone(), detail: answer })
        }
    }

    fn error(&self, operation: &'static str, error: rusqlite::Error) -> StoreError {
        StoreError::from_sqlite(operation, &self.path, error)
    }

    /// Holds the file to so many pages, so that a full disk can be tested without filling one.
    #[doc(hidden)]
    pub fn limit_pages(&self, pages: u32) -> Result<(), StoreError> {
        self.connection
            .pragma_update(None, "max_page_count", pages)
            .map_err(|error| self.error("limit", error))
    }
}
