//! The schema, as the list of steps that led to it. Steps are only ever added.

use std::path::Path;

use rusqlite::{Connection, TransactionBehavior};

use crate::error::StoreError;

/// `MUXF`: tells a store from any other SQLite file.
const APPLICATION_ID: i32 = 0x4d55_5846;

/// Step `n` brings a store of version `n` to version `n + 1`.
const STEPS: [&str; 5] = [
    // 1: what was measured and what was learned.
    "CREATE TABLE workloads (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE
    ) STRICT;
    CREATE TABLE profiles (
        id INTEGER PRIMARY KEY,
        workload INTEGER NOT NULL REFERENCES workloads (id),
        gpu_type TEXT NOT NULL,
        gpu_util_pct REAL,
        sm_activity_pct REAL,
        sm_occupancy_pct REAL,
        dram_activity_pct REAL,
        solo_time_us INTEGER,
        memory_bytes INTEGER,
        measured_at_us INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX profiles_latest ON profiles (workload, gpu_type, measured_at_us);
    CREATE TABLE samples (
        id INTEGER PRIMARY KEY,
        gpu_type TEXT NOT NULL,
        online INTEGER NOT NULL REFERENCES profiles (id),
        offline INTEGER NOT NULL REFERENCES profiles (id),
        share_pct REAL,
        speed REAL NOT NULL,
        at_us INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX samples_by_type ON samples (gpu_type, at_us);
    CREATE TABLE models (
        id INTEGER PRIMARY KEY,
        gpu_type TEXT NOT NULL,
        kind TEXT NOT NULL,
        bytes BLOB NOT NULL,
        checksum TEXT NOT NULL,
        card TEXT NOT NULL,
        unseen_error REAL NOT NULL,
        parent INTEGER REFERENCES models (id),
        created_at_us INTEGER NOT NULL,
        in_use INTEGER NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX one_model_in_use ON models (gpu_type) WHERE in_use = 1;",
    // 2: speeds of running pairs flow back, and a sample says where it is from.
    "ALTER TABLE samples ADD COLUMN origin TEXT NOT NULL DEFAULT '';
    CREATE TABLE observed_speeds (
        id INTEGER PRIMARY KEY,
        job TEXT NOT NULL,
        gpu TEXT NOT NULL,
        gpu_type TEXT NOT NULL,
        online INTEGER NOT NULL REFERENCES profiles (id),
        offline INTEGER NOT NULL REFERENCES profiles (id),
        share_pct REAL,
        predicted REAL,
        speed REAL NOT NULL,
        at_us INTEGER NOT NULL
    ) STRICT;
    CREATE INDEX observed_by_type ON observed_speeds (gpu_type, at_us);",
    // 3: the manager's jobs, what became of each start of one, what happened, and small notes.
    "CREATE TABLE jobs (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        array TEXT,
        uid INTEGER NOT NULL,
        gid INTEGER NOT NULL,
        user TEXT NOT NULL,
        submit TEXT NOT NULL,
        workload TEXT NOT NULL,
        state TEXT NOT NULL,
        final INTEGER NOT NULL DEFAULT 0,
        cancel INTEGER NOT NULL DEFAULT 0,
        reason TEXT NOT NULL DEFAULT '',
        gpu TEXT,
        run INTEGER NOT NULL DEFAULT 0,
        share_sms INTEGER,
        share_total INTEGER,
        quota_bytes INTEGER,
        predicted REAL,
        seen REAL,
        rate REAL,
        failures INTEGER NOT NULL DEFAULT 0,
        last_failure_us INTEGER NOT NULL DEFAULT 0,
        not_before_us INTEGER NOT NULL DEFAULT 0,
        fail_prone INTEGER NOT NULL DEFAULT 0,
        submitted_us INTEGER NOT NULL,
        changed_us INTEGER NOT NULL,
        started_us INTEGER,
        ended_us INTEGER,
        deadline_us INTEGER,
        waited_us INTEGER NOT NULL DEFAULT 0,
        exit_code INTEGER,
        exit_signal INTEGER
    ) STRICT;
    CREATE INDEX jobs_open ON jobs (uid, number) WHERE final = 0;
    CREATE INDEX jobs_by_state ON jobs (state, number);
    CREATE INDEX jobs_by_array ON jobs (array) WHERE array IS NOT NULL;
    CREATE TABLE runs (
        job TEXT NOT NULL,
        run INTEGER NOT NULL,
        gpu TEXT NOT NULL,
        purpose TEXT NOT NULL,
        started_us INTEGER NOT NULL,
        ended_us INTEGER,
        outcome TEXT NOT NULL DEFAULT '',
        predicted REAL,
        seen REAL,
        PRIMARY KEY (job, run)
    ) STRICT;
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT,
        at_us INTEGER NOT NULL,
        kind TEXT NOT NULL,
        gpu TEXT,
        job TEXT,
        service TEXT,
        text TEXT NOT NULL
    ) STRICT;
    CREATE TABLE notes (
        key TEXT PRIMARY KEY,
        value TEXT NOT NULL
    ) STRICT;",
    // 4: a profile that was only seen while the workload ran is told from one that was measured; what
    // keeps a job from running without being its failure is counted; a run says beside whom it was.
    "ALTER TABLE profiles ADD COLUMN seen INTEGER NOT NULL DEFAULT 0;
    CREATE INDEX samples_by_online ON samples (online);
    CREATE INDEX samples_by_offline ON samples (offline);
    CREATE INDEX observed_by_online ON observed_speeds (online);
    CREATE INDEX observed_by_offline ON observed_speeds (offline);
    ALTER TABLE jobs ADD COLUMN setbacks INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE jobs ADD COLUMN refusals INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE runs ADD COLUMN service TEXT;",
    // 5: how much room a submission takes, where it can be added up without reading it.
    "ALTER TABLE jobs ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE jobs SET bytes = length(CAST(submit AS BLOB));
    DROP INDEX jobs_open;
    CREATE INDEX jobs_open ON jobs (uid, number, bytes) WHERE final = 0;",
];

/// The version that this program writes.
#[expect(clippy::cast_possible_truncation, reason = "a short list")]
pub const VERSION: u32 = STEPS.len() as u32;

fn version(connection: &Connection, path: &Path) -> Result<(u32, i32), StoreError> {
    let pragma = |name| {
        connection
            .pragma_query_value(None, name, |row| row.get::<_, i64>(0))
            .map_err(|error| StoreError::from_sqlite("read", path, error))
    };
    let version = u32::try_from(pragma("user_version")?).unwrap_or(u32::MAX);
    Ok((version, i32::try_from(pragma("application_id")?).unwrap_or(0)))
}

/// Refuses other files and newer stores; the version of this one.
fn check(connection: &Connection, path: &Path) -> Result<u32, StoreError> {
    let (found, application) = version(connection, path)?;
    let failed = |error| StoreError::from_sqlite("read", path, error);
    let tables: i64 = connection
        .query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))
        .map_err(failed)?;
    if tables > 0 && application != APPLICATION_ID {
        let detail = "it is an SQLite file of another program".to_owned();
        return Err(StoreError::NotAStore { path: path.to_owned(), detail });
    }
    if found > VERSION {
        return Err(StoreError::Newer { path: path.to_owned(), found, known: VERSION });
    }
    Ok(found)
}

/// For a reader, which cannot bring a store up to date.
pub(crate) fn check_current(connection: &Connection, path: &Path) -> Result<(), StoreError> {
    let found = check(connection, path)?;
    if found < VERSION {
        return Err(StoreError::Older { path: path.to_owned(), found, known: VERSION });
    }
    Ok(())
}

/// Brings a store up to date, one transaction per step: killed in between, it opens at the last
/// finished step and goes on from there.
pub(crate) fn migrate(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    let failed = |error| StoreError::from_sqlite("bring up to date", path, error);
    loop {
        if check(connection, path)? == VERSION {
            return Ok(());
        }
        let step =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        // Asked again inside: another program may have taken this step meanwhile.
        let found = check(&step, path)?;
        if let Some(sql) = STEPS.get(found as usize) {
            step.execute_batch(sql).map_err(failed)?;
            step.pragma_update(None, "application_id", APPLICATION_ID).map_err(failed)?;
            step.pragma_update(None, "user_version", found + 1).map_err(failed)?;
        }
        step.commit().map_err(failed)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Source, Store};
    use muxflow_types::GpuType;

    #[test]
    fn a_store_of_version_1_opens_and_keeps_its_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old.db");
        let old = Connection::open(&path).unwrap();
        old.execute_batch(STEPS[0]).unwrap();
        old.pragma_update(None, "application_id", APPLICATION_ID).unwrap();
        old.pragma_update(None, "user_version", 1).unwrap();
        old.execute_batch(
            "INSERT INTO workloads VALUES (1, 'web'), (2, 'train');
             INSERT INTO profiles (id, workload, gpu_type, sm_activity_pct, measured_at_us)
                VALUES (1, 1, 'T4', 30.0, 5), (2, 2, 'T4', NULL, 6);
             INSERT INTO samples (gpu_type, online, offline, share_pct, speed, at_us)
                VALUES ('T4', 1, 2, 40.0, 0.5, 7);",
        )
        .unwrap();
        drop(old);
        let reader = Store::open_read_only(&path).unwrap_err();
        assert!(reader.to_string().contains("older than 5"), "{reader}");
        let store = Store::open(&path).unwrap();
        let t4 = GpuType::new("T4").unwrap();
        let samples = store.samples(&t4, Source::Measured).unwrap();
        assert_eq!(samples.len(), 1);
        assert_eq!(samples[0].speed, 0.5);
        assert_eq!(samples[0].offline.workload.as_str(), "train");
        assert_eq!(store.samples(&t4, Source::Observed).unwrap().len(), 0);
        Store::open_read_only(&path).unwrap();
    }

    #[test]
    fn a_newer_store_and_other_files_are_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.db");
        let store = Store::open(&path).unwrap();
        store.connection.pragma_update(None, "user_version", VERSION + 3).unwrap();
        drop(store);
        let error = Store::open(&path).unwrap_err().to_string();
        assert!(error.contains("version 8") && error.contains("newer program"), "{error}");

        let foreign = folder.path().join("other.db");
        Connection::open(&foreign).unwrap().execute_batch("CREATE TABLE t (x)").unwrap();
        let error = Store::open(&foreign).unwrap_err().to_string();
        assert!(error.contains("another program"), "{error}");
        let text = folder.path().join("text.db");
        std::fs::write(&text, "not a database, but long enough to be looked at".repeat(50))
            .unwrap();
        let error = Store::open(&text).unwrap_err().to_string();
        assert!(error.contains("not a MuxFlow store"), "{error}");
        let error = Store::open(&folder.path().join("no/such/folder.db")).unwrap_err();
        assert!(error.to_string().contains("cannot open"), "{error}");
    }
}
