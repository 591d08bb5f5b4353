//! The manager's jobs: one row each, and one row for each start.
//!
//! A change of a job, the start or end of a run and the event that tells of it are one transaction
//! ([`Store::change`]): after a `kill -9` all of it is there or none. What the states mean and which
//! may follow which is the manager's to know; here they are words.

use muxflow_types::{GpuId, JobId, Micros, WorkloadName};
pub use rusqlite::Result as SqlResult;
use rusqlite::types::Value;
use rusqlite::{OptionalExtension, Row, Transaction, params, params_from_iter};

use crate::Store;
use crate::error::StoreError;
use crate::events::{NewEvent, add_event};

/// A job as it is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct JobRow {
    /// Its place in the order of coming.
    pub number: i64,
    /// Its id.
    pub id: JobId,
    /// The array it belongs to.
    pub array: Option<String>,
    /// The user it runs as.
    pub uid: u32,
    /// The group it runs as.
    pub gid: u32,
    /// The user's name.
    pub user: String,
    /// What was submitted, as the manager wrote it.
    pub submit: String,
    /// What it runs, as far as profiles are concerned.
    pub workload: WorkloadName,
    /// Its state.
    pub state: String,
    /// Nothing comes after this state.
    pub is_final: bool,
    /// Its end was asked for.
    pub cancel: bool,
    /// Why it waits or how it ended.
    pub reason: String,
    /// The GPU it is on.
    pub gpu: Option<GpuId>,
    /// How often it was started.
    pub run: u64,
    /// The share it was started with: SMs, and of how many.
    pub share: Option<(u32, u32)>,
    /// The cap on its memory.
    pub quota_bytes: Option<u64>,
    /// Speed predicted when it was placed.
    pub predicted: Option<f64>,
    /// Speed seen.
    pub seen: Option<f64>,
    /// Iterations per second seen.
    pub rate: Option<f64>,
    /// How often it failed.
    pub failures: u32,
    /// When it last failed.
    pub last_failure: Micros,
    /// Not to be started before this.
    pub not_before: Micros,
    /// To be kept from critical services.
    pub fail_prone: bool,
    /// How often in a row an error of its GPU or a signal from outside ended its run.
    pub setbacks: u32,
    /// How often in a row its run never began.
    pub refusals: u32,
    /// When it came.
    pub submitted_at: Micros,
    /// When its state last changed.
    pub changed_at: Micros,
    /// When it was first started.
    pub started_at: Option<Micros>,
    /// When it ended for good.
    pub ended_at: Option<Micros>,
    /// When it must have ended.
    pub deadline: Option<Micros>,
    /// How long it had waited when its state last changed.
    pub waited: Micros,
    /// Exit code of its last run.
    pub exit_code: Option<i32>,
    /// Signal that ended its last run.
    pub exit_signal: Option<i32>,
}

/// One start of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct RunRow {
    /// Its number.
    pub run: u64,
    /// Where.
    pub gpu: String,
    /// For what.
    pub purpose: String,
    /// When it was ordered.
    pub started_at: Micros,
    /// When it ended.
    pub ended_at: Option<Micros>,
    /// How, in words.
    pub outcome: String,
    /// Speed predicted.
    pub predicted: Option<f64>,
    /// Speed seen.
    pub seen: Option<f64>,
    /// The service it ran beside.
    pub service: Option<String>,
}

/// Which jobs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct JobFilter {
    /// In one of these states; empty means any.
    pub states: Vec<String>,
    /// Of this user.
    pub uid: Option<u32>,
    /// Of this array.
    pub array: Option<String>,
    /// Older than this number.
    pub before: Option<i64>,
}

const COLUMNS: &str = "number, id, array, uid, gid, user, submit, workload, state, final, cancel,
    reason, gpu, run, share_sms, share_total, quota_bytes, predicted, seen, rate, failures,
    last_failure_us, not_before_us, fail_prone, submitted_us, changed_us, started_us, ended_us,
    deadline_us, waited_us, exit_code, exit_signal, setbacks, refusals";

pub(crate) fn whole(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(crate) fn micros(value: i64) -> Micros {
    Micros(u64::try_from(value).unwrap_or(0))
}

pub(crate) fn unreadable(column: usize, problem: impl std::fmt::Display) -> rusqlite::Error {
    let kind = rusqlite::types::Type::Text;
    rusqlite::Error::FromSqlConversionFailure(column, kind, problem.to_string().into())
}

fn read_job(row: &Row<'_>) -> rusqlite::Result<JobRow> {
    let text = |at: usize| row.get::<_, String>(at);
    let optional_us = |at: usize| row.get::<_, Option<i64>>(at).map(|us| us.map(micros));
    let gpu: Option<String> = row.get(12)?;
    let share: (Option<u32>, Option<u32>) = (row.get(14)?, row.get(15)?);
    Ok(JobRow {
        number: row.get(0)?,
        id: JobId::new(&text(1)?).map_err(|e| unreadable(1, e))?,
        array: row.get(2)?,
        uid: row.get(3)?,
        gid: row.get(4)?,
        user: row.get(5)?,
        submit: row.get(6)?,
        workload: WorkloadName::new(&text(7)?).map_err(|e| unreadable(7, e))?,
        state: row.get(8)?,
        is_final: row.get(9)?,
        cancel: row.get(10)?,
        reason: row.get(11)?,
        gpu: gpu.map(|gpu| GpuId::new(&gpu)).transpose().map_err(|e| unreadable(12, e))?,
        run: u64::try_from(row.get::<_, i64>(13)?).unwrap_or(0),
        share: share.0.zip(share.1),
        quota_bytes: row.get::<_, Option<i64>>(16)?.and_then(|bytes| u64::try_from(bytes).ok()),
        predicted: row.get(17)?,
        seen: row.get(18)?,
        rate: row.get(19)?,
        failures: row.get(20)?,
        last_failure: micros(row.get(21)?),
        not_before: micros(row.get(22)?),
        fail_prone: row.get(23)?,
        submitted_at: micros(row.get(24)?),
        changed_at: micros(row.get(25)?),
        started_at: optional_us(26)?,
        ended_at: optional_us(27)?,
        deadline: optional_us(28)?,
        waited: micros(row.get(29)?),
        exit_code: row.get(30)?,
        exit_signal: row.get(31)?,
        setbacks: row.get(32)?,
        refusals: row.get(33)?,
    })
}

fn read_run(row: &Row<'_>) -> rusqlite::Result<RunRow> {
    Ok(RunRow {
        run: u64::try_from(row.get::<_, i64>(0)?).unwrap_or(0),
        gpu: row.get(1)?,
        purpose: row.get(2)?,
        started_at: micros(row.get(3)?),
        ended_at: row.get::<_, Option<i64>>(4)?.map(micros),
        outcome: row.get(5)?,
        predicted: row.get(6)?,
        seen: row.get(7)?,
        service: row.get(8)?,
    })
}

/// A transaction over jobs.
#[derive(Debug)]
pub struct Change<'a, 'c> {
    transaction: &'a Transaction<'c>,
    events: Vec<NewEvent>,
}

impl Change<'_, '_> {
    /// A job.
    pub fn job(&self, id: &JobId) -> rusqlite::Result<Option<JobRow>> {
        let sql = format!("SELECT {COLUMNS} FROM jobs WHERE id = ?1");
        self.transaction.prepare_cached(&sql)?.query_row([id.as_str()], read_job).optional()
    }

    /// Writes what may change of a job.
    pub fn put(&self, job: &JobRow) -> rusqlite::Result<()> {
        self.transaction
            .prepare_cached(
                "UPDATE jobs SET state = ?2, final = ?3, cancel = ?4, reason = ?5, gpu = ?6,
                 run = ?7, share_sms = ?8, share_total = ?9, quota_bytes = ?10, predicted = ?11,
                 seen = ?12, rate = ?13, failures = ?14, last_failure_us = ?15,
                 not_before_us = ?16, fail_prone = ?17, changed_us = ?18, started_us = ?19,
                 ended_us = ?20, waited_us = ?21, exit_code = ?22, exit_signal = ?23,
                 setbacks = ?24, refusals = ?25
                 WHERE id = ?1",
            )?
            .execute(params![
                job.id.as_str(),
                job.state,
                job.is_final,
                job.cancel,
                job.reason,
                job.gpu.as_ref().map(GpuId::as_str),
                whole(job.run),
                job.share.map(|share| share.0),
                job.share.map(|share| share.1),
                job.quota_bytes.map(whole),
                job.predicted,
                job.seen,
                job.rate,
                job.failures,
                whole(job.last_failure.0),
                whole(job.not_before.0),
                job.fail_prone,
                whole(job.changed_at.0),
                job.started_at.map(|at| whole(at.0)),
                job.ended_at.map(|at| whole(at.0)),
                whole(job.waited.0),
                job.exit_code,
                job.exit_signal,
                job.setbacks,
                job.refusals,
            ])?;
        Ok(())
    }

    /// Writes down that a run begins.
    pub fn begin_run(&self, job: &JobRow, purpose: &str) -> rusqlite::Result<()> {
        let gpu = job.gpu.as_ref().map_or("", |gpu| gpu.as_str());
        self.transaction
            .prepare_cached(
                "INSERT OR REPLACE INTO runs (job, run, gpu, purpose, started_us, predicted)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?
            .execute(params![
                job.id.as_str(),
                whole(job.run),
                gpu,
                purpose,
                whole(job.changed_at.0),
                job.predicted
            ])?;
        Ok(())
    }

    /// Writes down how a run ended, unless that is known already.
    pub fn end_run(&self, job: &JobRow, at: Micros, outcome: &str) -> rusqlite::Result<()> {
        self.transaction
            .prepare_cached(
                "UPDATE runs SET ended_us = ?3, outcome = ?4, seen = ?5
                 WHERE job = ?1 AND run = ?2 AND ended_us IS NULL",
            )?
            .execute(params![job.id.as_str(), whole(job.run), whole(at.0), outcome, job.seen])?;
        Ok(())
    }

    /// Writes down that a run ended otherwise than was thought.
    pub fn judge_run(&self, job: &JobRow, outcome: &str) -> rusqlite::Result<()> {
        self.transaction
            .prepare_cached("UPDATE runs SET outcome = ?3 WHERE job = ?1 AND run = ?2")?
            .execute(params![job.id.as_str(), whole(job.run), outcome])?;
        Ok(())
    }

    /// Writes down beside which service the run of a job is.
    pub fn beside(&self, job: &JobRow, service: &str) -> rusqlite::Result<()> {
        self.transaction
            .prepare_cached("UPDATE runs SET service = ?3 WHERE job = ?1 AND run = ?2")?
            .execute(params![job.id.as_str(), whole(job.run), service])?;
        Ok(())
    }

    /// Tells what happened; it is written with the rest.
    pub fn tell(&mut self, event: NewEvent) {
        self.events.push(event);
    }
}

/// The query for jobs, newest first, and its values.
fn select(filter: &JobFilter, limit: usize) -> (String, Vec<Value>) {
    let mut wanted = vec!["1 = 1".to_owned()];
    let mut values: Vec<Value> = Vec::new();
    let mut hold = |value: Value| {
        values.push(value);
        values.len()
    };
    if let Some(uid) = filter.uid {
        wanted.push(format!("uid = ?{}", hold(Value::from(i64::from(uid)))));
    }
    if let Some(array) = &filter.array {
        wanted.push(format!("array = ?{}", hold(Value::from(array.clone()))));
    }
    if let Some(before) = filter.before {
        wanted.push(format!("number < ?{}", hold(Value::from(before))));
    }
    if !filter.states.is_empty() {
        let places: Vec<String> = filter
            .states
            .iter()
            .map(|state| format!("?{}", hold(Value::from(state.clone()))))
            .collect();
        wanted.push(format!("state IN ({})", places.join(", ")));
    }
    let limit = hold(Value::from(i64::try_from(limit).unwrap_or(i64::MAX)));
    let sql = format!(
        "SELECT {COLUMNS} FROM jobs WHERE {} ORDER BY number DESC LIMIT ?{limit}",
        wanted.join(" AND ")
    );
    (sql, values)
}

impl Store {
    /// Changes jobs: all of it or, on an error, nothing. The events that were told come back with
    /// their numbers.
    pub fn change<T>(
        &mut self,
        work: impl FnOnce(&mut Change<'_, '_>) -> rusqlite::Result<T>,
    ) -> Result<(T, Vec<(u64, NewEvent)>), StoreError> {
        self.write("write jobs to", |transaction| {
            let mut change = Change { transaction, events: Vec::new() };
            let value = work(&mut change)?;
            let mut told = Vec::with_capacity(change.events.len());
            for event in change.events {
                told.push((add_event(transaction, &event)?, event));
            }
            Ok((value, told))
        })
    }

    /// One job.
    pub fn job(&self, id: &JobId) -> Result<Option<JobRow>, StoreError> {
        let failed = |error| self.error("read a job from", error);
        let sql = format!("SELECT {COLUMNS} FROM jobs WHERE id = ?1");
        let mut statement = self.connection.prepare_cached(&sql).map_err(failed)?;
        statement.query_row([id.as_str()], read_job).optional().map_err(failed)
    }

    /// Jobs, newest first.
    pub fn jobs(&self, filter: &JobFilter, limit: usize) -> Result<Vec<JobRow>, StoreError> {
        let (sql, values) = select(filter, limit);
        self.read_jobs(&sql, params_from_iter(values))
    }

    /// Jobs, newest first: at most so many, and no more once what they were submitted with takes so
    /// many bytes. Whether there are more of them comes too.
    pub fn job_page(
        &self,
        filter: &JobFilter,
        limit: usize,
        most_bytes: usize,
    ) -> Result<(Vec<JobRow>, bool), StoreError> {
        let failed = |error| self.error("read jobs from", error);
        let (sql, values) = select(filter, limit.saturating_add(1));
        let mut statement = self.connection.prepare_cached(&sql).map_err(failed)?;
        let rows = statement.query_map(params_from_iter(values), read_job).map_err(failed)?;
        let (mut page, mut bytes) = (Vec::new(), 0);
        for row in rows {
            if page.len() >= limit || bytes >= most_bytes {
                return Ok((page, true));
            }
            let row = row.map_err(failed)?;
            bytes += row.submit.len();
            page.push(row);
        }
        Ok((page, false))
    }

    /// All jobs that have not ended, oldest first.
    pub fn open_jobs(&self) -> Result<Vec<JobRow>, StoreError> {
        let sql = format!("SELECT {COLUMNS} FROM jobs WHERE final = 0 ORDER BY number");
        self.read_jobs(&sql, [])
    }

    fn read_jobs(
        &self,
        sql: &str,
        values: impl rusqlite::Params,
    ) -> Result<Vec<JobRow>, StoreError> {
        let failed = |error| self.error("read jobs from", error);
        let mut statement = self.connection.prepare_cached(sql).map_err(failed)?;
        let rows = statement.query_map(values, read_job).map_err(failed)?;
        rows.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// How many jobs there are in each state.
    pub fn count_jobs(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let failed = |error| self.error("count jobs in", error);
        let mut statement = self
            .connection
            .prepare_cached("SELECT state, count(*) FROM jobs GROUP BY state")
            .map_err(failed)?;
        let rows = statement
            .query_map([], |row| {
                Ok((row.get(0)?, u64::try_from(row.get::<_, i64>(1)?).unwrap_or(0)))
            })
            .map_err(failed)?;
        rows.collect::<rusqlite::Result<_>>().map_err(failed)
    }

    /// The last starts of a job, oldest first.
    pub fn runs(&self, id: &JobId, limit: usize) -> Result<Vec<RunRow>, StoreError> {
        let failed = |error| self.error("read runs from", error);
        let mut statement = self
            .connection
            .prepare_cached(
                "SELECT run, gpu, purpose, started_us, ended_us, outcome, predicted, seen, service
                 FROM runs WHERE job = ?1 ORDER BY run DESC LIMIT ?2",
            )
            .map_err(failed)?;
        let limit = i64::try_from(limit).unwrap_or(i64::MAX);
        let rows = statement.query_map(params![id.as_str(), limit], read_run).map_err(failed)?;
        let mut runs: Vec<RunRow> = rows.collect::<rusqlite::Result<_>>().map_err(failed)?;
        runs.reverse();
        Ok(runs)
    }
}
