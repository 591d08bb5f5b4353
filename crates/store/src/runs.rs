//! What the starts of jobs were like beside services: small rows, read without the jobs.

use muxflow_types::Micros;

use crate::Store;
use crate::error::StoreError;
use crate::jobs::micros;

/// One start beside a service whose speed was seen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PairedRun {
    /// When it was ordered.
    pub started_at: Micros,
    /// When it ended.
    pub ended_at: Option<Micros>,
    /// Speed seen.
    pub seen: f64,
}

impl Store {
    /// Of the newest starts, so many of them, those beside a service whose speed was seen. What the
    /// jobs were submitted with is not touched: it may be many times what is asked for.
    pub fn paired_runs(&self, newest: u64) -> Result<Vec<PairedRun>, StoreError> {
        let failed = |error| self.error("read runs from", error);
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT started_us, ended_us, speed FROM (
                     SELECT r.started_us, r.ended_us, r.service,
                         CASE WHEN r.ended_us IS NULL AND r.service IS NOT NULL
                             THEN (SELECT j.seen FROM jobs j WHERE j.id = r.job AND j.run = r.run)
                             ELSE r.seen END AS speed
                     FROM runs r ORDER BY r.rowid DESC LIMIT ?1)
                 WHERE service IS NOT NULL AND speed IS NOT NULL",
            )
            .map_err(failed)?;
        let runs = statement.query_map([crate::jobs::whole(newest)], |row| {
            Ok(PairedRun {
                started_at: micros(row.get(0)?),
                ended_at: row.get::<_, Option<i64>>(1)?.map(micros),
                seen: row.get(2)?,
            })
        });
        runs.map_err(failed)?.collect::<rusqlite::Result<_>>().map_err(failed)
    }
}
