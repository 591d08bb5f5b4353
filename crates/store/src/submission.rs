//! New jobs: all of a submission are kept or none, within what their user may have.

use muxflow_types::{JobId, Micros, WorkloadName};
use rusqlite::{OptionalExtension, params};

use crate::Store;
use crate::error::StoreError;
use crate::jobs::{unreadable, whole};

/// A job to keep.
#[derive(Debug, Clone, PartialEq)]
pub struct NewJob {
    /// Its index in an array.
    pub index: Option<u32>,
    /// What was submitted.
    pub submit: String,
    /// What it runs.
    pub workload: WorkloadName,
}

/// What all jobs of one submission share.
#[derive(Debug, Clone, PartialEq)]
pub struct Submission {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The user's name.
    pub user: String,
    /// The first state.
    pub state: String,
    /// When.
    pub at: Micros,
    /// When they must have ended.
    pub deadline: Option<Micros>,
}

/// What came of a submission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inserted {
    /// All jobs are kept, under these ids; the first is the id of the whole.
    Kept(String, Vec<JobId>),
    /// None is: the user would have more open jobs than allowed.
    OverLimit {
        /// How many there are already.
        open: u64,
    },
    /// None is: what the user's open jobs were submitted with would take more room than allowed.
    OverBytes {
        /// What is kept already.
        kept: u64,
        /// What these would add.
        asked: u64,
    },
}

/// What one user may have in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueLimits {
    /// Open jobs; none is no limit.
    pub jobs: Option<u64>,
    /// Bytes of what they were submitted with.
    pub bytes: Option<u64>,
}

impl Store {
    /// Keeps new jobs: all of them or none. The user's open jobs may not become more than the limits
    /// allow.
    pub fn insert_jobs(
        &mut self,
        submission: &Submission,
        jobs: &[NewJob],
        limits: QueueLimits,
    ) -> Result<Inserted, StoreError> {
        self.write("write jobs to", |transaction| {
            // Both from the index: the jobs themselves are not read.
            let (open, kept) = transaction
                .prepare_cached(
                    "SELECT count(*), coalesce(sum(bytes), 0) FROM jobs WHERE uid = ?1 AND final = 0",
                )?
                .query_row([submission.uid], |row| {
                    Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))
                })?;
            let (open, kept) = (u64::try_from(open).unwrap_or(0), u64::try_from(kept).unwrap_or(0));
            if limits.jobs.is_some_and(|limit| open.saturating_add(jobs.len() as u64) > limit) {
                return Ok(Inserted::OverLimit { open });
            }
            let asked: u64 = jobs.iter().map(|job| job.submit.len() as u64).sum();
            if limits.bytes.is_some_and(|limit| kept.saturating_add(asked) > limit) {
                return Ok(Inserted::OverBytes { kept, asked });
            }
            let last: Option<i64> = transaction
                .query_row("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'", [], |row| {
                    row.get(0)
                })
                .optional()?;
            let whole_id = format!("job-{}", last.unwrap_or(0) + 1);
            let mut ids = Vec::with_capacity(jobs.len());
            for job in jobs {
                let id = match job.index {
                    Some(index) => format!("{whole_id}.{index}"),
                    None => whole_id.clone(),
                };
                transaction
                    .prepare_cached(
                        "INSERT INTO jobs (id, array, uid, gid, user, submit, bytes, workload,
                         state, submitted_us, changed_us, deadline_us)
                         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?10, ?11)",
                    )?
                    .execute(params![
                        id,
                        job.index.map(|_| whole_id.as_str()),
                        submission.uid,
                        submission.gid,
                        submission.user,
                        job.submit,
                        whole(job.submit.len() as u64),
                        job.workload.as_str(),
                        submission.state,
                        whole(submission.at.0),
                        submission.deadline.map(|at| whole(at.0)),
                    ])?;
                ids.push(JobId::new(&id).map_err(|e| unreadable(1, e))?);
            }
            Ok(Inserted::Kept(whole_id, ids))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_of_a_user_is_bound_in_bytes_and_others_are_not_asked() {
        let folder = tempfile::tempdir().unwrap();
        let mut store = Store::open(&folder.path().join("s.db")).unwrap();
        let of = |uid| Submission {
            uid,
            gid: uid,
            user: format!("u{uid}"),
            state: "submitted".into(),
            at: Micros(1),
            deadline: None,
        };
        let job = |bytes: usize| NewJob {
            index: None,
            submit: "x".repeat(bytes),
            workload: WorkloadName::new("train").unwrap(),
        };
        let limits = QueueLimits { jobs: Some(3), bytes: Some(1_000) };
        let mut put = |uid, jobs: &[NewJob]| store.insert_jobs(&of(uid), jobs, limits).unwrap();
        assert!(matches!(
            put(1, &[job(400), NewJob { index: Some(1), ..job(200) }]),
            Inserted::Kept(..)
        ));
        assert_eq!(put(1, &[job(401)]), Inserted::OverBytes { kept: 600, asked: 401 });
        assert_eq!(
            put(1, &[job(1), NewJob { index: Some(1), ..job(1) }]),
            Inserted::OverLimit { open: 2 }
        );
        assert!(matches!(put(2, &[job(1_000)]), Inserted::Kept(..)), "another user's own");
        assert!(matches!(put(1, &[job(400)]), Inserted::Kept(..)), "up to the limit");
        // What has ended takes none of it.
        let ended = JobId::new("job-1").unwrap();
        store
            .change(|change| {
                let mut row = change.job(&ended)?.unwrap();
                (row.is_final, row.state) = (true, "done".into());
                change.put(&row)
            })
            .unwrap();
        let again = store.insert_jobs(&of(1), &[job(401)], limits).unwrap();
        assert_eq!(again, Inserted::OverBytes { kept: 600, asked: 401 });
        assert!(matches!(
            store.insert_jobs(&of(1), &[job(400)], limits).unwrap(),
            Inserted::Kept(..)
        ));
    }
}
