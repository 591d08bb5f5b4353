//! What happened, in order, and small notes that must outlive a restart.

use muxflow_types::Micros;
use rusqlite::{OptionalExtension, Transaction, params};

use crate::Store;
use crate::error::StoreError;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewEvent {
    /// When.
    pub at: Micros,
    /// Of which kind.
    pub kind: &'static str,
    /// The GPU it is about.
    pub gpu: Option<String>,
    /// The job it is about.
    pub job: Option<String>,
    /// The service it is about.
    pub service: Option<String>,
    /// In words.
    pub text: String,
}

/// Something that happened, as it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventRow {
    /// Its number.
    pub seq: u64,
    /// When.
    pub at: Micros,
    /// Of which kind.
    pub kind: String,
    /// The GPU it is about.
    pub gpu: Option<String>,
    /// The job it is about.
    pub job: Option<String>,
    /// The service it is about.
    pub service: Option<String>,
    /// In words.
    pub text: String,
}

pub(crate) fn add_event(transaction: &Transaction<'_>, event: &NewEvent) -> rusqlite::Result<u64> {
    let seq = transaction
        .prepare_cached(
            "INSERT INTO events (at_us, kind, gpu, job, service, text)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .insert(params![
            i64::try_from(event.at.0).unwrap_or(i64::MAX),
            event.kind,
            event.gpu,
            event.job,
            event.service,
            event.text,
        ])?;
    Ok(u64::try_from(seq).unwrap_or(0))
}

impl Store {
    /// Events after a number, oldest first.
    pub fn events(
        &self,
        after: u64,
        kind: Option<&str>,
        limit: usize,
    ) -> Result<Vec<EventRow>, StoreError> {
        let failed = |error| self.error("read events from", error);
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT seq, at_us, kind, gpu, job, service, text FROM events
                 WHERE seq > ?1 AND (?2 IS NULL OR kind = ?2) ORDER BY seq LIMIT ?3",
            )
            .map_err(failed)?;
        let after = i64::try_from(after).unwrap_or(i64::MAX);
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = statement
            .query_map(params![after, kind, limit], |row| {
                Ok(EventRow {
                    seq: u64::try_from(row.get::<_, i64>(0)?).unwrap_or(0),
                    at: Micros(u64::try_from(row.get::<_, i64>(1)?).unwrap_or(0)),
                    kind: row.get(2)?,
                    gpu: row.get(3)?,
                    job: row.get(4)?,
                    service: row.get(5)?,
                    text: row.get(6)?,
                })
            })
            .map_err(failed)?;
        rows.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// The number of the newest event; 0 when there is none.
    pub fn last_event(&self) -> Result<u64, StoreError> {
        let last: i64 = self
            .connection
            .query_row("SELECT coalesce(max(seq), 0) FROM events", [], |row| row.get(0))
            .map_err(|error| self.error("read events from", error))?;
        Ok(u64::try_from(last).unwrap_or(0))
    }

    /// Keeps the newest `keep` events.
    pub fn trim_events(&mut self, keep: u64) -> Result<(), StoreError> {
        let keep = i64::try_from(keep).unwrap_or(i64::MAX);
        self.write("trim events in", |transaction| {
            transaction
                .execute(
                    "DELETE FROM events WHERE seq <= (SELECT max(seq) FROM events) - ?1",
                    [keep],
                )
                .map(|_| ())
        })
    }

    /// A note by its name.
    pub fn note(&self, key: &str) -> Result<Option<String>, StoreError> {
        self.connection
            .query_row("SELECT value FROM notes WHERE key = ?1", [key], |row| row.get(0))
            .optional()
            .map_err(|error| self.error("read a note from", error))
    }

    /// Keeps a note.
    pub fn put_note(&mut self, key: &str, value: &str) -> Result<(), StoreError> {
        self.write("write a note to", |transaction| {
            transaction
                .execute(
                    "INSERT INTO notes (key, value) VALUES (?1, ?2)
                     ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                    [key, value],
                )
                .map(|_| ())
        })
    }
}
