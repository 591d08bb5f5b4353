//! What is no longer kept: jobs that ended long ago, or before very many others, and speeds of pairs
//! that were seen often enough since.

use muxflow_types::{JobId, Micros};
use rusqlite::params;

use crate::Store;
use crate::error::StoreError;
use crate::jobs::whole;

impl Store {
    /// Jobs that ended before a moment, or after which `newest` others ended; at most `limit`, the
    /// oldest first. Open jobs are never among them.
    pub fn old_jobs(
        &self,
        ended_before: Micros,
        newest: u64,
        limit: usize,
    ) -> Result<Vec<JobId>, StoreError> {
        let failed = |error| self.error("read jobs from", error);
        let mut statement = self
            .connection
            .prepare_cached(
                "WITH ended AS (SELECT id, coalesce(ended_us, changed_us) AS at, number
                                FROM jobs WHERE final = 1)
                 SELECT id FROM ended
                 WHERE at < ?1 OR (at, number) <= (SELECT at, number FROM ended
                     ORDER BY at DESC, number DESC LIMIT 1 OFFSET ?2)
                 ORDER BY at, number LIMIT ?3",
            )
            .map_err(failed)?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let values = params![whole(ended_before.0), whole(newest), limit];
        let ids = statement.query_map(values, |row| {
            let id: String = row.get(0)?;
            JobId::new(&id).map_err(|error| {
                let kind = rusqlite::types::Type::Text;
                rusqlite::Error::FromSqlConversionFailure(0, kind, error.to_string().into())
            })
        });
        ids.map_err(failed)?.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// Keeps the newest speeds that were seen: so many of each pair of workloads, and so many of each
    /// GPU type. What was seen of a workload for a speed that is gone goes with it. Says how many
    /// speeds were deleted.
    pub fn trim_observed(&mut self, per_pair: u64, per_type: u64) -> Result<usize, StoreError> {
        self.write("trim observed speeds in", |transaction| {
            let deleted = transaction
                .prepare_cached(
                    "DELETE FROM observed_speeds WHERE id IN (
                         SELECT id FROM (
                             SELECT s.id,
                                 row_number() OVER (PARTITION BY s.gpu_type, p.workload, q.workload
                                     ORDER BY s.at_us DESC, s.id DESC) AS of_pair,
                                 row_number() OVER (PARTITION BY s.gpu_type
                                     ORDER BY s.at_us DESC, s.id DESC) AS of_type
                             FROM observed_speeds s JOIN profiles p ON p.id = s.online
                                 JOIN profiles q ON q.id = s.offline)
                         WHERE of_pair > ?1 OR of_type > ?2)",
                )?
                .execute([whole(per_pair), whole(per_type)])?;
            transaction.execute(
                "DELETE FROM profiles WHERE seen = 1
                     AND NOT EXISTS (SELECT 1 FROM observed_speeds s WHERE s.online = profiles.id)
                     AND NOT EXISTS (SELECT 1 FROM observed_speeds s WHERE s.offline = profiles.id)
                     AND NOT EXISTS (SELECT 1 FROM samples s WHERE s.online = profiles.id)
                     AND NOT EXISTS (SELECT 1 FROM samples s WHERE s.offline = profiles.id)",
                [],
            )?;
            Ok(deleted)
        })
    }

    /// Deletes jobs with their starts, unless they are open; says how many.
    pub fn delete_ended(&mut self, ids: &[JobId]) -> Result<usize, StoreError> {
        self.write("delete jobs from", |transaction| {
            let mut deleted = 0;
            for id in ids {
                let count = transaction
                    .prepare_cached("DELETE FROM jobs WHERE id = ?1 AND final = 1")?
                    .execute([id.as_str()])?;
                if count > 0 {
                    transaction
                        .prepare_cached("DELETE FROM runs WHERE job = ?1")?
                        .execute([id.as_str()])?;
                }
                deleted += count;
            }
            Ok(deleted)
        })
    }
}
