//! Profiles, measured pairs, and speeds observed on running pairs.

use muxflow_types::{
    Bytes, GpuId, GpuType, JobId, Micros, Percent, ProfileRecord, SpeedSample, WorkloadName,
};
use rusqlite::{OptionalExtension, Row, Transaction, params};

use crate::Store;
use crate::error::StoreError;

/// Where samples come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Measured on purpose, or imported.
    Measured,
    /// Seen on running pairs.
    Observed,
}

/// The speed of a running pair over some time.
#[derive(Debug, Clone, PartialEq)]
pub struct Observation {
    /// The job that ran.
    pub job: JobId,
    /// Where.
    pub gpu: GpuId,
    /// What was predicted when it was placed, where a prediction was made.
    pub predicted: Option<f64>,
    /// The pair and its speed.
    pub sample: SpeedSample,
}

fn micros(value: Micros) -> i64 {
    i64::try_from(value.0).unwrap_or(i64::MAX)
}

fn bytes(value: Bytes) -> i64 {
    i64::try_from(value.0).unwrap_or(i64::MAX)
}

/// The columns of a profile, in the order of [`read_profile`].
macro_rules! profile_columns {
    ($p:literal, $w:literal) => {
        concat!(
            $w,
            ".name, ",
            $p,
            ".gpu_type, ",
            $p,
            ".gpu_util_pct, ",
            $p,
            ".sm_activity_pct, ",
            $p,
            ".sm_occupancy_pct, ",
            $p,
            ".dram_activity_pct, ",
            $p,
            ".solo_time_us, ",
            $p,
            ".memory_bytes"
        )
    };
}
/// Finds the newest profile with these values, of such a time; `?10`: also one that was only seen.
macro_rules! equal_profile {
    ($time:literal) => {
        concat!(
            "SELECT id FROM profiles WHERE workload = ?1 AND gpu_type = ?2
             AND gpu_util_pct IS ?3 AND sm_activity_pct IS ?4 AND sm_occupancy_pct IS ?5
             AND dram_activity_pct IS ?6 AND solo_time_us IS ?7 AND memory_bytes IS ?8
             AND seen <= ?10 AND measured_at_us ",
            $time,
            " ORDER BY measured_at_us DESC LIMIT 1"
        )
    };
}
/// How many columns that is.
const PROFILE_COLUMNS: usize = 8;

fn read_profile(row: &Row<'_>, first: usize) -> Result<ProfileRecord, String> {
    let text = |at: usize| row.get::<_, String>(first + at).map_err(|e| e.to_string());
    let percent = |at: usize| -> Result<Option<Percent>, String> {
        let value: Option<f64> = row.get(first + at).map_err(|e| e.to_string())?;
        value.map(Percent::new).transpose().map_err(|e| e.to_string())
    };
    let whole = |at: usize| -> Result<Option<u64>, String> {
        let value: Option<i64> = row.get(first + at).map_err(|e| e.to_string())?;
        value.map(u64::try_from).transpose().map_err(|e| e.to_string())
    };
    Ok(ProfileRecord {
        workload: WorkloadName::new(&text(0)?).map_err(|e| e.to_string())?,
        gpu_type: GpuType::new(&text(1)?).map_err(|e| e.to_string())?,
        gpu_util: percent(2)?,
        sm_activity: percent(3)?,
        sm_occupancy: percent(4)?,
        dram_activity: percent(5)?,
        solo_time: whole(6)?.map(Micros),
        memory: whole(7)?.map(Bytes),
    })
}

/// The row of a profile; an equal one of the same time is used again.
fn put_profile(
    transaction: &Transaction<'_>,
    profile: &ProfileRecord,
    at: Micros,
) -> rusqlite::Result<i64> {
    const SAME_TIME: &str = equal_profile!("= ?9");
    put_profile_unless(transaction, profile, at, false, SAME_TIME)
}

/// The row of a profile that a running pair was seen with. Nothing was measured just now: where an
/// equal one is known, it is that, with the time at which it was measured; else what was seen of the
/// workload while it ran is new at this time, and marked as seen only: one reading of a service is not
/// its profile. Stores of before have such rows at time zero, which says nothing.
fn known_or_seen(
    transaction: &Transaction<'_>,
    profile: &ProfileRecord,
    at: Micros,
) -> rusqlite::Result<i64> {
    const NO_LATER: &str = equal_profile!("BETWEEN 1 AND ?9");
    put_profile_unless(transaction, profile, at, true, NO_LATER)
}

fn put_profile_unless(
    transaction: &Transaction<'_>,
    profile: &ProfileRecord,
    at: Micros,
    seen: bool,
    there: &'static str,
) -> rusqlite::Result<i64> {
    let name = profile.workload.as_str();
    transaction
        .prepare_cached("INSERT INTO workloads (name) VALUES (?1) ON CONFLICT DO NOTHING")?
        .execute([name])?;
    let workload: i64 = transaction
        .prepare_cached("SELECT id FROM workloads WHERE name = ?1")?
        .query_row([name], |row| row.get(0))?;
    let values = params![
        workload,
        profile.gpu_type.as_str(),
        profile.gpu_util.map(Percent::value),
        profile.sm_activity.map(Percent::value),
        profile.sm_occupancy.map(Percent::value),
        profile.dram_activity.map(Percent::value),
        profile.solo_time.map(micros),
        profile.memory.map(bytes),
        micros(at),
        seen,
    ];
    let known: Option<i64> =
        transaction.prepare_cached(there)?.query_row(values, |row| row.get(0)).optional()?;
    if let Some(id) = known {
        return Ok(id);
    }
    transaction
        .prepare_cached(
            "INSERT INTO profiles (workload, gpu_type, gpu_util_pct, sm_activity_pct,
             sm_occupancy_pct, dram_activity_pct, solo_time_us, memory_bytes, measured_at_us,
             seen) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
        )?
        .insert(values)
}

impl Store {
    pub(crate) fn write<T>(
        &mut self,
        operation: &'static str,
        change: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, StoreError> {
        let run = || {
            let transaction = self
                .connection
                .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
            let value = change(&transaction)?;
            transaction.commit()?;
            Ok(value)
        };
        let result = run();
        result.map_err(|error| self.error(operation, error))
    }

    /// Keeps a workload's profile; older ones stay for the record.
    pub fn put_profile(&mut self, profile: &ProfileRecord, at: Micros) -> Result<(), StoreError> {
        self.write("write a profile to", |t| put_profile(t, profile, at).map(|_| ()))
    }

    /// The newest profile of a workload on a GPU type. What was only seen of it beside another is none.
    pub fn profile(
        &self,
        workload: &WorkloadName,
        gpu_type: &GpuType,
    ) -> Result<Option<ProfileRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            profile_columns!("p", "w"),
            " FROM profiles p JOIN workloads w ON w.id = p.workload
              WHERE w.name = ?1 AND p.gpu_type = ?2 AND p.seen = 0 ORDER BY p.measured_at_us DESC, p.id DESC LIMIT 1"
        );
        let row = self
            .connection
            .query_row(SQL, [workload.as_str(), gpu_type.as_str()], |row| Ok(read_profile(row, 0)))
            .optional()
            .map_err(|error| self.error("read a profile from", error))?;
        row.transpose().map_err(|detail| StoreError::Row {
            path: self.path.clone(),
            what: format!("the profile of {workload} on {gpu_type}"),
            detail,
        })
    }

    /// The newest profile of every workload on every GPU type, by name.
    pub fn profiles(&self) -> Result<Vec<ProfileRecord>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            profile_columns!("p", "w"),
            " FROM profiles p JOIN workloads w ON w.id = p.workload
              WHERE p.id = (SELECT q.id FROM profiles q
                  WHERE q.workload = p.workload AND q.gpu_type = p.gpu_type AND q.seen = 0
                  ORDER BY q.measured_at_us DESC, q.id DESC LIMIT 1)
              ORDER BY w.name, p.gpu_type"
        );
        let failed = |error| self.error("read the profiles from", error);
        let mut statement = self.connection.prepare(SQL).map_err(failed)?;
        let rows = statement.query_map([], |row| Ok(read_profile(row, 0))).map_err(failed)?;
        rows.map(|row| {
            row.map_err(failed)?.map_err(|detail| StoreError::Row {
                path: self.path.clone(),
                what: "a profile".to_owned(),
                detail,
            })
        })
        .collect()
    }

    /// Keeps measured pairs: all of them or, on an error, none.
    pub fn put_samples(&mut self, samples: &[SpeedSample], origin: &str) -> Result<(), StoreError> {
        self.write("write samples to", |transaction| {
            for sample in samples {
                let online = put_profile(transaction, &sample.online, sample.at)?;
                let offline = put_profile(transaction, &sample.offline, sample.at)?;
                transaction
                    .prepare_cached(
                        "INSERT INTO samples (gpu_type, online, offline, share_pct, speed, at_us,
                         origin) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
                    )?
                    .execute(params![
                        sample.offline.gpu_type.as_str(),
                        online,
                        offline,
                        sample.share.map(Percent::value),
                        sample.speed,
                        micros(sample.at),
                        origin,
                    ])?;
            }
            Ok(())
        })
    }

    /// Keeps speeds of running pairs: all of them or, on an error, none.
    pub fn put_observed(&mut self, observed: &[Observation]) -> Result<(), StoreError> {
        self.write("write observed speeds to", |transaction| {
            for observation in observed {
                let sample = &observation.sample;
                let online = known_or_seen(transaction, &sample.online, sample.at)?;
                let offline = known_or_seen(transaction, &sample.offline, sample.at)?;
                transaction
                    .prepare_cached(
                        "INSERT INTO observed_speeds (job, gpu, gpu_type, online, offline,
                         share_pct, predicted, speed, at_us)
                         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)",
                    )?
                    .execute(params![
                        observation.job.as_str(),
                        observation.gpu.as_str(),
                        sample.offline.gpu_type.as_str(),
                        online,
                        offline,
                        sample.share.map(Percent::value),
                        observation.predicted,
                        sample.speed,
                        micros(sample.at),
                    ])?;
            }
            Ok(())
        })
    }

    /// All samples of a GPU type from one source, oldest first.
    pub fn samples(
        &self,
        gpu_type: &GpuType,
        source: Source,
    ) -> Result<Vec<SpeedSample>, StoreError> {
        macro_rules! query {
            ($table:literal) => {
                concat!(
                    "SELECT s.share_pct, s.speed, s.at_us, ",
                    profile_columns!("p", "v"),
                    ", ",
                    profile_columns!("q", "w"),
                    " FROM ",
                    $table,
                    " s JOIN profiles p ON p.id = s.online JOIN workloads v ON v.id = p.workload
                      JOIN profiles q ON q.id = s.offline JOIN workloads w ON w.id = q.workload
                      WHERE s.gpu_type = ?1 ORDER BY s.at_us, s.id"
                )
            };
        }
        let sql = match source {
            Source::Measured => query!("samples"),
            Source::Observed => query!("observed_speeds"),
        };
        let failed = |error| self.error("read samples from", error);
        let mut statement = self.connection.prepare_cached(sql).map_err(failed)?;
        let mut rows = statement.query([gpu_type.as_str()]).map_err(failed)?;
        let mut samples = Vec::new();
        while let Some(row) = rows.next().map_err(failed)? {
            samples.push(read_sample(row).map_err(|detail| StoreError::Row {
                path: self.path.clone(),
                what: format!("sample {} of {gpu_type}", samples.len() + 1),
                detail,
            })?);
        }
        Ok(samples)
    }
}

fn read_sample(row: &Row<'_>) -> Result<SpeedSample, String> {
    let share: Option<f64> = row.get(0).map_err(|e| e.to_string())?;
    let speed: f64 = row.get(1).map_err(|e| e.to_string())?;
    let at: i64 = row.get(2).map_err(|e| e.to_string())?;
    if !(0.0..=1.0).contains(&speed) {
        return Err(format!("a speed of {speed} is not between 0 and 1"));
    }
    Ok(SpeedSample {
        online: read_profile(row, 3)?,
        offline: read_profile(row, 3 + PROFILE_COLUMNS)?,
        share: share.map(Percent::new).transpose().map_err(|e| e.to_string())?,
        speed,
        at: Micros(u64::try_from(at).map_err(|e| e.to_string())?),
    })
}
