//! Quick questions about the queue, asked once a second: answered without reading the jobs.

use muxflow_types::Micros;

use crate::Store;
use crate::error::StoreError;
use crate::jobs::whole;

impl Store {
    /// Whether there is a job in this state.
    pub fn any_in(&self, state: &str) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM jobs WHERE state = ?1)";
        let failed = |error| self.error("read jobs from", error);
        let mut statement = self.connection.prepare_cached(sql).map_err(failed)?;
        statement.query_row([state], |row| row.get(0)).map_err(failed)
    }

    /// Whether the wait of a queued job ended between these two moments.
    pub fn any_due(&self, from: Micros, to: Micros) -> Result<bool, StoreError> {
        let sql = "SELECT EXISTS (SELECT 1 FROM jobs WHERE state = 'queued'
            AND not_before_us BETWEEN ?1 AND ?2)";
        let failed = |error| self.error("read jobs from", error);
        let mut statement = self.connection.prepare_cached(sql).map_err(failed)?;
        statement.query_row([whole(from.0), whole(to.0)], |row| row.get(0)).map_err(failed)
    }

    /// Whether the deadline of a job that has not ended has passed.
    pub fn any_late(&self, now: Micros) -> Result<bool, StoreError> {
        self.connection
            .query_row(
                "SELECT EXISTS (SELECT 1 FROM jobs WHERE final = 0 AND deadline_us <= ?1
                 AND state <> 'checkpointing')",
                [whole(now.0)],
                |row| row.get(0),
            )
            .map_err(|error| self.error("read jobs from", error))
    }
}
