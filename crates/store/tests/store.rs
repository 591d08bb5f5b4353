//! The store as a program would use it, and what is left of it after `kill -9`.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use muxflow_store::{ModelId, NewModel, Observation, Source, Store, StoreError};
use muxflow_types::{
    Bytes, GpuId, GpuType, JobId, Micros, Percent, ProfileRecord, SpeedSample, WorkloadName,
};

fn t4() -> GpuType {
    GpuType::new("T4").unwrap()
}

fn profile(name: &str) -> ProfileRecord {
    let mut record = ProfileRecord::unknown(WorkloadName::new(name).unwrap(), t4());
    record.sm_activity = Some(Percent::new(31.25).unwrap());
    record.memory = Some(Bytes::from_gib(2));
    record
}

fn sample(number: u64) -> SpeedSample {
    SpeedSample {
        online: profile(&format!("web-{}", number % 5)),
        offline: profile(&format!("train-{}", number % 3)),
        share: number.is_multiple_of(2).then(|| Percent::new(40.0).unwrap()),
        speed: 0.5,
        at: Micros(number),
    }
}

fn new_model<'a>(gpu_type: &'a GpuType, bytes: &'a [u8], parent: Option<ModelId>) -> NewModel<'a> {
    NewModel {
        gpu_type,
        kind: "kernel",
        bytes,
        checksum: "00000000",
        card: "a card",
        unseen_error: 0.05,
        parent,
        created_at: Micros(9),
    }
}

#[test]
fn what_is_written_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let mut store = Store::open(&path).unwrap();
    let samples: Vec<SpeedSample> = (0..20).map(sample).collect();
    store.put_samples(&samples, "a test").unwrap();
    let observation = Observation {
        job: JobId::new("job-1").unwrap(),
        gpu: GpuId::new("GPU-1").unwrap(),
        predicted: Some(0.6),
        sample: sample(77),
    };
    store.put_observed(std::slice::from_ref(&observation)).unwrap();
    let mut newer = profile("web-1");
    newer.gpu_util = Some(Percent::new(9.0).unwrap());
    store.put_profile(&newer, Micros(1_000)).unwrap();
    drop(store);

    let store = Store::open_read_only(&path).unwrap();
    assert_eq!(store.samples(&t4(), Source::Measured).unwrap(), samples);
    assert_eq!(store.samples(&t4(), Source::Observed).unwrap(), [observation.sample]);
    assert_eq!(store.profile(&newer.workload, &t4()).unwrap(), Some(newer));
    let nobody = WorkloadName::new("nobody").unwrap();
    assert_eq!(store.profile(&nobody, &t4()).unwrap(), None);
    store.check().unwrap();
}

#[test]
fn what_was_seen_of_a_running_pair_bears_the_time_at_which_it_was_known() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let mut store = Store::open(&path).unwrap();
    let observe = |store: &mut Store, at: u64, online: &ProfileRecord| {
        let observation = Observation {
            job: JobId::new("job-1").unwrap(),
            gpu: GpuId::new("GPU-1").unwrap(),
            predicted: None,
            sample: SpeedSample { online: online.clone(), at: Micros(at), ..sample(1) },
        };
        store.put_observed(&[observation]).unwrap();
    };
    // The job was measured alone at 100; nobody has measured the service, only seen it at 500.
    store.put_profile(&sample(1).offline, Micros(100)).unwrap();
    let seen = profile("web-1");
    for at in [500, 600, 700] {
        observe(&mut store, at, &seen);
    }
    let times = |path: &Path| -> Vec<(String, u64)> {
        let store = rusqlite::Connection::open(path).unwrap();
        let sql = "SELECT w.name, p.measured_at_us FROM profiles p
                   JOIN workloads w ON w.id = p.workload ORDER BY p.id";
        let mut rows = store.prepare(sql).unwrap();
        let rows = rows.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
        rows.map(Result::unwrap).collect()
    };
    let first = [("train-1".to_owned(), 100), ("web-1".to_owned(), 500)];
    assert_eq!(times(&path), first, "one row each, at its own time");
    assert_eq!(store.profile(&seen.workload, &t4()).unwrap(), None, "seen beside a job, not alone");
    assert_eq!(store.profiles().unwrap(), [sample(1).offline], "nor is it handed on");

    // Other values are another profile; what a store of before has at time zero says nothing.
    let busier = ProfileRecord { sm_activity: Percent::new(50.0).ok(), ..profile("web-1") };
    store.put_profile(&busier, Micros::ZERO).unwrap();
    observe(&mut store, 800, &busier);
    assert_eq!(times(&path)[3], ("web-1".to_owned(), 800));

    // Measured alone at last, with the very values that were seen: from here on that is its profile.
    store.put_profile(&seen, Micros(500)).unwrap();
    observe(&mut store, 900, &busier);
    assert_eq!(store.profile(&seen.workload, &t4()).unwrap(), Some(seen));
}

#[test]
fn speeds_that_were_seen_are_kept_up_to_a_number_and_those_of_rare_pairs_longest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let mut store = Store::open(&path).unwrap();
    store.put_profile(&sample(1).offline, Micros(1)).unwrap();
    // One pair is seen once, early; another 60 times, each time with another activity.
    let mut seen = Vec::new();
    for at in 0..61_u32 {
        let name = if at == 0 { "rare" } else { "busy" };
        let activity = Percent::new(f64::from(at)).ok();
        let online = ProfileRecord { sm_activity: activity, ..profile(name) };
        seen.push(Observation {
            job: JobId::new("job-1").unwrap(),
            gpu: GpuId::new("GPU-1").unwrap(),
            predicted: None,
            sample: SpeedSample { online, at: Micros(100 + u64::from(at)), ..sample(1) },
        });
    }
    store.put_observed(&seen).unwrap();
    let kept = |store: &Store| -> Vec<u64> {
        let samples = store.samples(&t4(), Source::Observed).unwrap();
        samples.iter().map(|sample| sample.at.0).collect()
    };
    let profiles = || -> i64 {
        let store = rusqlite::Connection::open(&path).unwrap();
        store.query_row("SELECT count(*) FROM profiles", [], |row| row.get(0)).unwrap()
    };
    assert_eq!(store.trim_observed(100, 1_000).unwrap(), 0);
    assert_eq!((kept(&store).len(), profiles()), (61, 62));
    assert_eq!(store.trim_observed(10, 1_000).unwrap(), 50);
    assert_eq!(kept(&store)[..2], [100, 151], "the rare pair is still known");
    assert_eq!(profiles(), 12, "what was seen for them went too, what was measured stays");
    assert_eq!(store.trim_observed(10, 4).unwrap(), 7);
    assert_eq!((kept(&store), profiles()), (vec![157, 158, 159, 160], 5));
    store.check().unwrap();
}

#[test]
fn all_models_are_kept_and_one_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(&folder.path().join("store.db")).unwrap();
    let gpu = t4();
    let first = store.put_model(&new_model(&gpu, b"one", None), true).unwrap();
    let second = store.put_model(&new_model(&gpu, b"two", Some(first)), false).unwrap();
    assert_eq!(store.model_in_use(&gpu).unwrap().unwrap().id, first);
    let third = store.put_model(&new_model(&gpu, b"three", Some(first)), true).unwrap();
    assert_eq!(store.model_in_use(&gpu).unwrap().unwrap().bytes, b"three");
    let all = store.models().unwrap();
    assert_eq!(all.iter().map(|m| m.id).collect::<Vec<_>>(), [first, second, third]);
    assert_eq!(all.iter().filter(|m| m.in_use).count(), 1);
    assert_eq!(all[2].parent, Some(first));
    store.use_model(second).unwrap();
    assert_eq!(store.model_in_use(&gpu).unwrap().unwrap().id, second);
    let error = store.use_model(ModelId(99)).unwrap_err().to_string();
    assert!(error.contains("no model 99"), "{error}");
    assert_eq!(store.model_in_use(&gpu).unwrap().unwrap().id, second, "nothing changed");
}

#[test]
fn a_full_disk_and_a_read_only_store_change_nothing_and_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let mut store = Store::open(&path).unwrap();
    store.put_samples(&[sample(1)], "").unwrap();
    store.limit_pages(30).unwrap();
    let many: Vec<SpeedSample> = (0..20_000).map(sample).collect();
    let error = store.put_samples(&many, "").unwrap_err();
    assert!(matches!(error, StoreError::DiskFull { .. }), "{error:?}");
    assert!(error.to_string().contains("disk is full; nothing was changed"), "{error}");
    assert_eq!(store.samples(&t4(), Source::Measured).unwrap().len(), 1);
    drop(store);
    let mut reader = Store::open_read_only(&path).unwrap();
    let error = reader.put_samples(&[sample(2)], "").unwrap_err();
    assert!(error.to_string().contains("read-only"), "{error}");
}

/// How many samples a batch has: they come whole or not at all.
const BATCH: u64 = 7;

/// Not a test on its own: the program that is killed. It prints each batch after its commit.
#[test]
fn child_that_writes_until_it_is_killed() {
    let Some(path) = std::env::var_os("STORE_TEST_VICTIM") else { return };
    let mut store = Store::open(Path::new(&path)).unwrap();
    let mut next = store.samples(&t4(), Source::Measured).unwrap().len() as u64 / BATCH;
    let gpu = t4();
    loop {
        let batch: Vec<SpeedSample> = (0..BATCH).map(|n| sample(next * BATCH + n)).collect();
        store.put_samples(&batch, "victim").unwrap();
        let parent = store.model_in_use(&gpu).unwrap().map(|m| m.id);
        let bytes = next.to_le_bytes().repeat(2_000);
        store.put_model(&new_model(&gpu, &bytes, parent), true).unwrap();
        println!("committed {next}");
        std::io::stdout().flush().unwrap();
        next += 1;
    }
}

#[test]
fn kill_9_at_any_point_leaves_nothing_half_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let mut acknowledged = None;
    for round in 0..25u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_that_writes_until_it_is_killed", "--nocapture"])
            .env("STORE_TEST_VICTIM", &path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let (started, begun) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            lines
                .lines()
                .map_while(Result::ok)
                .filter_map(|line| line.rsplit_once("committed ")?.1.parse::<u64>().ok())
                .inspect(|_| {
                    started.send(()).ok();
                })
                .last()
        });
        // The first kills hit the start and the creation of the store, wherever a busy machine has
        // come by then; the others hit the writes.
        if round >= 10 {
            begun.recv_timeout(Duration::from_secs(120)).unwrap();
        }
        std::thread::sleep(Duration::from_millis(2 + (round * 37) % 90));
        child.kill().unwrap();
        child.wait().unwrap();
        acknowledged = reader.join().unwrap().or(acknowledged);

        let store = Store::open(&path).unwrap();
        store.check().unwrap();
        let samples = store.samples(&t4(), Source::Measured).unwrap();
        assert_eq!(samples.len() as u64 % BATCH, 0, "round {round}: half a batch");
        for (number, found) in samples.iter().enumerate() {
            assert_eq!(*found, sample(number as u64), "round {round}");
        }
        let models = store.models().unwrap();
        assert_eq!(models.iter().filter(|m| m.in_use).count(), usize::from(!models.is_empty()));
        assert!(models.iter().all(|m| m.bytes.len() == 16_000));
        if let Some(last) = acknowledged {
            assert!(samples.len() as u64 >= (last + 1) * BATCH, "round {round}: lost a commit");
        }
    }
    assert!(acknowledged.is_some(), "the child never committed anything");
}
