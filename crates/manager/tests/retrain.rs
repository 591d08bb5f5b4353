//! Speeds seen on running pairs become samples, samples become a model, and a model that is no
//! better than the one in use does not take its place.

#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

mod support;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use muxflow_manager::Manager;
use muxflow_manager::manager::Settings;
use muxflow_manager::scheduler::SchedulerSettings;
use muxflow_manager::scheduler::retrain::{Trained, train};
use muxflow_manager::up::Loops;
use muxflow_store::{Observation, Store};
use muxflow_types::{
    GpuId, GpuType, JobId, Micros, Percent, ProfileRecord, SpeedSample, WorkloadName,
};

fn profile(name: &str, sm_activity_pct: f64) -> ProfileRecord {
    let gpu_type = GpuType::new("T4").unwrap();
    let mut record = ProfileRecord::unknown(WorkloadName::new(name).unwrap(), gpu_type);
    record.sm_activity = Percent::clamped(sm_activity_pct);
    record
}

/// Every pair of four services and four programs at three shares, seen from `at_s` on. With no
/// `law`, a speed has nothing to do with the pair.
fn observations(at_s: u64, law: bool) -> Vec<Observation> {
    let mut wobble = 0.37f64;
    let mut seen = Vec::new();
    for (on, off, share) in
        (0..48u32).map(|n| (n / 12, n / 3 % 4, [20.0, 50.0, 80.0][n as usize % 3]))
    {
        wobble = (wobble * 997.0).fract();
        let activity = 0.3 + 0.15 * f64::from(off);
        let lawful = 1.0 / (1.0 - activity + activity / (share / 100.0) + 0.05 * f64::from(on));
        let number = seen.len() as u64;
        seen.push(Observation {
            job: JobId::new(&format!("job-{at_s}-{number}")).unwrap(),
            gpu: GpuId::new("GPU-0").unwrap(),
            predicted: None,
            sample: SpeedSample {
                online: profile(&format!("web-{on}"), 10.0 + 15.0 * f64::from(on)),
                offline: profile(&format!("train-{off}"), 100.0 * activity),
                share: Percent::clamped(share),
                speed: if law { lawful } else { wobble },
                at: Micros::from_secs(at_s + number),
            },
        });
    }
    seen
}

#[test]
fn observed_speeds_train_a_model_that_only_a_better_one_replaces() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = Store::open(&folder.path().join("store.db")).unwrap();
    let t4 = GpuType::new("T4").unwrap();
    let stay = AtomicBool::new(false);

    store.put_observed(&observations(0, false)).unwrap();
    assert_eq!(train(&mut store, &t4, &stay).unwrap(), Trained::TooFew(48));

    // Nonsense is all there is: the first model is made of it.
    store.put_observed(&observations(1_000, false)).unwrap();
    let first = train(&mut store, &t4, &stay).unwrap();
    assert!(matches!(&first, Trained::Replaced { words } if words.contains("first")), "{first:?}");

    // What is seen now follows a law, and one trained on it is better on the newest.
    for round in 2..6 {
        store.put_observed(&observations(1_000 * round, true)).unwrap();
    }
    let second = train(&mut store, &t4, &stay).unwrap();
    assert!(matches!(second, Trained::Replaced { .. }), "{second:?}");
    let in_use = store.model_in_use(&t4).unwrap().unwrap();

    // Nothing new was seen: the next one is no better, is kept beside it, and is not used.
    let third = train(&mut store, &t4, &stay).unwrap();
    let Trained::Kept { words } = &third else { unreachable!("{third:?}") };
    let errors: Vec<f64> = words.split(' ').filter_map(|w| w.parse().ok()).collect();
    assert!(errors.len() == 3 && errors[0] >= errors[2], "new, held out, in use: {words}");
    let after = store.model_in_use(&t4).unwrap().unwrap();
    assert_eq!((after.id, &after.bytes), (in_use.id, &in_use.bytes));
    let models = store.models().unwrap();
    assert_eq!(models.iter().map(|m| m.in_use).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(models[2].parent, Some(in_use.id));
}

/// Minutes of training are under way when the manager is told to leave: it leaves.
#[test]
fn nobody_waits_for_a_training() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store.db");
    let mut store = Store::open(&path).unwrap();
    for round in 0..40 {
        store.put_observed(&observations(1_000 * round, true)).unwrap();
    }
    drop(store);
    let node = support::FakeNode::new(folder.path(), vec![support::gpu(0, Some("web"))]);
    let (manager, wakes) =
        Manager::open(&path, Arc::clone(&node) as _, Settings::default()).unwrap();
    let every = Duration::from_millis(1);
    let settings = SchedulerSettings { retrain_every: Some(every), ..SchedulerSettings::default() };
    let loops = Loops::start(&manager, wakes, settings, path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    let is_training = || {
        let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
        let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
        threads.filter_map(|task| name(task).ok()).any(|name| name.trim() == "training")
    };
    while !is_training() {
        assert!(Instant::now() < deadline, "no training began");
        std::thread::sleep(Duration::from_millis(20));
    }
    let began = Instant::now();
    loops.stop();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "{took:?}");
    // Nothing of the manager is held by what is still under way.
    drop(manager);
    assert_eq!(Arc::strong_count(&node), 1);
}
