//! What is no longer kept: jobs that ended long ago, or before very many others, or before others of
//! their user that take much room, and speeds of pairs that were seen often enough since.

use muxflow_types::{JobId, Micros};
use rusqlite::params;

use crate::Store;
use crate::error::StoreError;
use crate::jobs::{unreadable, whole};

/// What is kept of jobs that have ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keep {
    /// Those that ended since this moment.
    pub ended_since: Micros,
    /// So many of them, those that ended last.
    pub newest: u64,
    /// Of each user, those that ended last, while what they were submitted with takes no more bytes.
    pub bytes_per_user: u64,
}

fn read_id(row: &rusqlite::Row<'_>) -> rusqlite::Result<JobId> {
    let id: String = row.get(0)?;
    JobId::new(&id).map_err(|error| unreadable(0, error))
}

impl Store {
    /// Jobs that have ended and are not to be kept; at most `limit`, the oldest first. Open jobs are
    /// never among them.
    pub fn old_jobs(&self, keep: &Keep, limit: usize) -> Result<Vec<JobId>, StoreError> {
        let failed = |error| self.error("read jobs from", error);
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT id FROM (
                     SELECT id, number, at, row_number() OVER (ORDER BY at DESC, number DESC) AS place,
                         sum(bytes) OVER (PARTITION BY uid ORDER BY at DESC, number DESC) AS kept
                     FROM (SELECT id, number, uid, bytes, coalesce(ended_us, changed_us) AS at
                           FROM jobs WHERE final = 1))
                 WHERE at < ?1 OR place > ?2 OR kept > ?3
                 ORDER BY at, number LIMIT ?4",
            )
            .map_err(failed)?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let Keep { ended_since, newest, bytes_per_user } = *keep;
        let values = params![whole(ended_since.0), whole(newest), whole(bytes_per_user), limit];
        let ids = statement.query_map(values, read_id).map_err(failed)?;
        ids.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// All jobs that have ended, each with its user, those that ended last first.
    pub fn ended_jobs(&self) -> Result<Vec<(JobId, u32)>, StoreError> {
        let failed = |error| self.error("read jobs from", error);
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT id, uid FROM jobs WHERE final = 1
                 ORDER BY coalesce(ended_us, changed_us) DESC, number DESC",
            )
            .map_err(failed)?;
        let jobs = statement.query_map([], |row| Ok((read_id(row)?, row.get(1)?)));
        jobs.map_err(failed)?.collect::<rusqlite::Result<_>>().map_err(failed)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::submission::{NewJob, QueueLimits, Submission};
    use muxflow_types::WorkloadName;

    /// Jobs of two users that ended one after another, each with so many bytes.
    fn ended(store: &mut Store, jobs: &[(u32, usize)]) {
        for (number, (uid, bytes)) in (1..).zip(jobs) {
            let submission = Submission {
                uid: *uid,
                gid: *uid,
                user: format!("u{uid}"),
                state: "submitted".into(),
                at: Micros(1),
                deadline: None,
            };
            let workload = WorkloadName::new("train").unwrap();
            let job = NewJob { index: None, submit: "x".repeat(*bytes), workload };
            store.insert_jobs(&submission, &[job], QueueLimits::default()).unwrap();
            let id = JobId::new(&format!("job-{number}")).unwrap();
            let end = store.change(|change| {
                let mut row = change.job(&id)?.unwrap();
                (row.is_final, row.state) = (true, "done".into());
                row.ended_at = Some(Micros(100 + number));
                change.put(&row)
            });
            end.unwrap();
        }
    }

    #[test]
    fn jobs_that_ended_are_bound_in_number_in_age_and_in_bytes_of_each_user() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(&folder.path().join("s.db")).unwrap();
        ended(&mut store, &[(1, 400), (2, 900), (1, 500), (1, 200), (1, 300), (2, 50)]);
        let all = Keep { ended_since: Micros(0), newest: 100, bytes_per_user: 10_000 };
        let old = |keep: Keep, limit: usize| -> Vec<String> {
            let ids = store.old_jobs(&keep, limit).unwrap();
            ids.iter().map(|id| id.as_str().to_owned()).collect()
        };
        assert_eq!(old(all, 10), Vec::<String>::new());
        assert_eq!(old(Keep { newest: 4, ..all }, 10), ["job-1", "job-2"]);
        assert_eq!(old(Keep { ended_since: Micros(104), ..all }, 10), ["job-1", "job-2", "job-3"]);
        // The first has 300, 200 and 500, the second 50 and 900.
        assert_eq!(old(Keep { bytes_per_user: 1_000, ..all }, 10), ["job-1"]);
        assert_eq!(old(Keep { bytes_per_user: 949, ..all }, 10), ["job-1", "job-2", "job-3"]);
        assert_eq!(old(Keep { bytes_per_user: 949, ..all }, 2), ["job-1", "job-2"], "oldest first");
        let users: Vec<u32> = store.ended_jobs().unwrap().into_iter().map(|(_, uid)| uid).collect();
        assert_eq!(users, [2, 1, 1, 1, 2, 1], "those that ended last first");
    }
}
