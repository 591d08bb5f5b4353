//! Ends of runs that are nobody's wish: errors with and without blame, signals from outside, GPUs that
//! refuse, a disk that is full; and what is told of a job meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::launch::Exit;
use muxflow_api::jobs::JobState;
use muxflow_manager::Manager;
use muxflow_manager::manager::Settings;
use muxflow_manager::scheduler::Scheduler;
use muxflow_manager::scheduler::watch::Watch;
use muxflow_manager::user::Caller;
use muxflow_policy::node::fault::Fault;
use muxflow_types::{HealthState, JobId, Micros};

use crate::support::{FakeNode, gpu};
use crate::{World, submit_to, world};

/// The row, once its run has ended.
fn after_run(world: &World, id: &JobId, run: u64) -> muxflow_store::jobs::JobRow {
    world.wait(id, "the run has ended", |job| job.run > run || !job.state.holds_gpu());
    world.manager.row(id.as_str()).unwrap()
}

#[test]
fn a_job_that_is_to_blame_has_failed_and_waits_before_it_tries_again() {
    let world = world(2, Settings::default());
    // With no retry left it is over: no other service is to meet it.
    let id = world.submit(|_| {});
    let run = world.runs(&id).run;
    world.node.fault(&id, run, Fault::Xid(31), true);
    let ended = world.wait(&id, "failed", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run, ended.failures), (JobState::Failed, 1, 1), "{ended:?}");
    assert!(ended.reason.contains("xid.31") && ended.reason.contains("to blame"), "{ended:?}");

    let id = world.submit(|submit| submit.retries = 2);
    for run in 1..=3 {
        world.wait(&id, "the next try", |job| {
            job.run == run && world.node.running().contains_key(&id)
        });
        let before = muxflow_manager::clock::now();
        world.node.fault(&id, run, Fault::UngatedProcess, true);
        let row = after_run(&world, &id, run);
        assert_eq!(u64::from(row.failures), run, "{row:?}");
        assert!(row.is_final || row.not_before > before, "it waits: {row:?}");
    }
    let ended = world.wait(&id, "failed", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run), (JobState::Failed, 3));
}

/// The driver names the culprit when the end of its run is written down already.
#[test]
fn blame_that_comes_late_makes_the_run_a_failure() {
    let world = world(1, Settings::default());
    let blame = |id: &JobId, run| {
        let on = gpu(0, None).gpu;
        let (job, fault) = (id.clone(), Fault::Xid(31));
        world.node.send(&on, Event::JobBlamed { job, run, fault });
        world.heard(&on);
        world.manager.job(id.as_str()).unwrap()
    };
    // It said that all was well.
    let id = world.submit(|submit| submit.retries = 5);
    world.runs(&id);
    world.exit(&id, 0);
    let done = world.wait(&id, "done", |job| job.state.is_final());
    assert_eq!(done.state, JobState::Done);
    assert_eq!(blame(&id, 7).state, JobState::Done, "that was another run");
    let failed = blame(&id, 1);
    assert_eq!((failed.state, failed.failures, failed.run), (JobState::Failed, 1, 1), "{failed:?}");
    assert_eq!(failed.reason, "exit code 0; it is to blame for xid.31");
    let runs = world.manager.detail(id.as_str()).unwrap().runs;
    assert_eq!(runs[0].outcome, failed.reason);
    assert_eq!(blame(&id, 1).reason, failed.reason, "told twice, it is the same");

    // It was stopped without blame, and waits to come back.
    let health = || Some(StopReason::Health("GPU is Overlimit".into()));
    for (retries, expected) in [(0, JobState::Failed), (1, JobState::Queued)] {
        let id = world.submit(|submit| submit.retries = retries);
        world.runs(&id);
        // Without room it stays where it is.
        world.node.change(0, |sight| sight.health = HealthState::Overlimit);
        world.node.end(&id, Exit { signal: Some(15), run: 1, ..Exit::unknown() }, health());
        world.wait(&id, "queued", |job| job.state == JobState::Queued);
        let before = muxflow_manager::clock::now();
        let blamed = blame(&id, 1);
        assert_eq!((blamed.state, blamed.failures), (expected, 1), "{blamed:?}");
        assert!(blamed.state.is_final() || blamed.not_before_us > before.0, "it waits: {blamed:?}");
        let again = blame(&id, 1);
        assert_eq!((again.state, again.failures), (expected, 1), "a run fails once: {again:?}");
        world.node.change(0, |sight| sight.health = HealthState::Healthy);
    }
}

/// Nobody knows who it was, or will know only later: it comes back, later each time, and has not failed.
#[test]
fn an_error_without_blame_costs_time_and_no_retry() {
    let world = world(1, Settings::default());
    let id = world.submit(|_| {});
    let mut waits = Vec::new();
    for run in 1..=5 {
        world.wait(&id, "it runs", |job| job.run == run && world.node.running().contains_key(&id));
        let before = muxflow_manager::clock::now();
        world.node.fault(&id, run, Fault::MpsCrash, false);
        let row = after_run(&world, &id, run);
        assert_eq!((row.failures, row.is_final), (0, false), "{row:?}");
        waits.push(row.not_before.since(before).as_secs_f64());
    }
    // 0.2 s, and twice as long each time, less what is drawn.
    assert!(waits[0] >= 0.15 && waits[4] >= 2.0 && waits[4] > 4.0 * waits[0], "{waits:?}");
    // A run that ends otherwise makes all of that forgotten.
    world.wait(&id, "it runs", |job| job.run == 6 && world.node.running().contains_key(&id));
    let health = Some(StopReason::Health("GPU is Overlimit".into()));
    world.node.end(&id, Exit { signal: Some(15), run: 6, ..Exit::unknown() }, health);
    assert_eq!(after_run(&world, &id, 6).setbacks, 0);
}

/// The table of docs/node-laws.md: a job that somebody ends is queued again. One that is always ended so
/// does it itself, and fails.
#[test]
fn a_signal_from_outside_is_no_failure_but_not_for_ever() {
    let world = world(1, Settings::default());
    for signal in [2, 9, 15] {
        let id = world.submit(|_| {});
        for run in 1..=4 {
            world.wait(&id, "it runs", |job| {
                job.run == run && world.node.running().contains_key(&id)
            });
            world.node.end(&id, Exit { signal: Some(signal), run, ..Exit::unknown() }, None);
        }
        let ended = world.wait(&id, "failed", |job| job.state.is_final());
        assert_eq!((ended.state, ended.failures), (JobState::Failed, 1), "{ended:?}");
        assert_eq!(ended.reason, format!("ended by signal {signal}"));
    }
}

/// The known one: a GPU that refuses again and again is not asked every two seconds, and the reason can
/// be read.
#[test]
fn a_gpu_that_refuses_is_asked_less_and_less_often() {
    let world = world(1, Settings::default());
    let why = "no control block: No space left on device";
    world.node.refuse(Some((false, why)));
    let id = world.submit(|_| {});
    let mut waits = Vec::new();
    for run in 1..=3 {
        let began = muxflow_manager::clock::now();
        let seen =
            world.wait(&id, "refused", |job| job.run == run && job.state == JobState::Queued);
        let row = world.manager.row(id.as_str()).unwrap();
        assert_eq!(u64::from(row.refusals), run);
        waits.push(row.not_before.since(began.max(row.changed_at)).as_secs_f64());
        // Plans are made meanwhile, and do not hide it.
        world.manager.wake("something else happened");
        std::thread::sleep(Duration::from_millis(200));
        let told = world.manager.job(id.as_str()).unwrap().reason;
        assert!(told.contains(why) && told.contains("may start again in"), "{told}\n{seen:?}");
    }
    assert!(waits[0] > 1.5 && waits[1] > 3.5 && waits[2] > 7.5, "{waits:?}");
    assert_eq!(world.manager.detail(id.as_str()).unwrap().runs.len(), 3);
}

/// A look that took long must not miss the end of a wait: the next plan of the interval is far.
#[test]
fn the_end_of_a_wait_is_seen_however_long_a_look_takes() {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, None)]);
    let store = dir.path().join("state.db");
    let (manager, wakes) =
        Manager::open(&store, Arc::clone(&node) as _, Settings::default()).unwrap();
    let (settings, speeds) = (crate::scheduler(), Arc::default());
    let scheduler = Arc::new(Scheduler { manager: Arc::clone(&manager), settings, speeds });
    let id = submit_to(&manager, "/bin/train");
    let queue = |not_before: Micros| {
        let mut row = manager.row(id.as_str()).unwrap();
        row.state = JobState::Queued.as_str().to_owned();
        row.not_before = not_before;
        manager.change(|change| change.put(&row)).unwrap();
    };
    let now = muxflow_manager::clock::now;
    queue(now().saturating_add(Micros::from_secs(3600)));
    let mut watch = Watch::new(scheduler);
    watch.look().unwrap();
    assert!(wakes.try_iter().count() > 0, "there is room");
    // The wait ends in this moment, and the next look comes late.
    queue(now());
    std::thread::sleep(Duration::from_secs(3));
    watch.look().unwrap();
    assert_eq!(wakes.try_iter().count(), 1, "the scheduler is told");
    watch.look().unwrap();
    assert_eq!(wakes.try_iter().count(), 0, "once");
}

/// After a kill -9 and on a full disk, only its keeper knows how a run ended: it is waited for, and
/// not begun again meanwhile. A run that nobody keeps is lost after a while.
#[test]
fn a_run_that_its_keeper_holds_is_not_taken_for_lost() {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, None), gpu(1, None)]);
    let store = dir.path().join("state.db");
    let (manager, _wakes) =
        Manager::open(&store, Arc::clone(&node) as _, Settings::default()).unwrap();
    let [kept, lost] = [0, 1].map(|index| {
        let id = submit_to(&manager, "/bin/train");
        let mut row = manager.row(id.as_str()).unwrap();
        (row.state, row.run) = (JobState::Running.as_str().to_owned(), 1);
        row.gpu = Some(gpu(index, None).gpu);
        manager.change(|change| change.put(&row)).unwrap();
        id
    });
    node.finds(&kept, 1);
    node.finds(&lost, 1);
    let (settings, speeds) = (crate::scheduler(), Arc::default());
    manager.reconcile(&settings.retry).unwrap();
    let seen = |id: &JobId| {
        let job = manager.job(id.as_str()).unwrap();
        (job.state, job.run)
    };
    assert_eq!(seen(&kept), (JobState::Checkpointing, 1));
    // Hours pass; of the second one, the node knows nothing any more.
    for id in [&kept, &lost] {
        let mut row = manager.row(id.as_str()).unwrap();
        row.changed_at = Micros(row.changed_at.0 - 6 * 3_600_000_000);
        manager.change(|change| change.put(&row)).unwrap();
    }
    node.loses(&lost);
    let mut watch =
        Watch::new(Arc::new(Scheduler { manager: Arc::clone(&manager), settings, speeds }));
    watch.look().unwrap();
    assert_eq!(seen(&kept), (JobState::Checkpointing, 1), "its keeper may say that it is done");
    assert_eq!(seen(&lost).0, JobState::Queued);
    node.keeps_exit(&kept, Exit { code: Some(0), run: 1, ..Exit::unknown() });
    watch.look().unwrap();
    assert_eq!(seen(&kept), (JobState::Done, 1));
}

/// Whoever cancelled it, or whenever it had to be done: that is why it ended, also when its last start
/// came to nothing.
#[test]
fn a_refused_start_does_not_hide_a_wish() {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, None)]);
    let store = dir.path().join("state.db");
    let (manager, _wakes) = Manager::open(&store, node, Settings::default()).unwrap();
    let refused_of = |id: JobId, edit: fn(&mut muxflow_store::jobs::JobRow)| {
        let mut row = manager.row(id.as_str()).unwrap();
        (row.state, row.run) = (JobState::Checkpointing.as_str().to_owned(), 1);
        edit(&mut row);
        manager.change(|change| change.put(&row)).unwrap();
        manager.run_refused(&id, 1, "no room").unwrap();
        let job = manager.job(id.as_str()).unwrap();
        (job.state, job.reason)
    };
    let refused = |edit| refused_of(submit_to(&manager, "/bin/train"), edit);
    let (state, reason) = refused(|row| {
        (row.cancel, row.reason) = (true, "cancelled by root".to_owned());
    });
    let words = "cancelled by root (could not be started: no room)";
    assert_eq!((state, reason.as_str()), (JobState::Cancelled, words));
    let late = serde_json::from_str(r#"{"command": ["x"], "cwd": "/", "deadline_s": 1}"#).unwrap();
    let caller = Caller::of_uid(muxflow_agent::sys::own_uid(), None);
    let late = manager.submit(&caller, &late).unwrap().id;
    std::thread::sleep(Duration::from_millis(1_100));
    let (state, reason) = refused_of(JobId::new(&late).unwrap(), |_| {});
    let words = "its deadline has passed (could not be started: no room)";
    assert_eq!((state, reason.as_str()), (JobState::Failed, words));
    let (state, reason) = refused(|_| {});
    assert_eq!(state, JobState::Queued);
    assert!(reason.starts_with("could not be started: no room"), "{reason}");
}

/// What happened cannot be written down, for minutes; a manager that is told to leave does not wait.
#[test]
fn a_full_disk_does_not_keep_the_manager_from_leaving() {
    let mut world = world(1, Settings::default());
    let id = world.submit(|_| {});
    let run = world.runs(&id).run;
    let gpu = world.node.running()[&id].clone();
    world.manager.store().limit_pages(1).unwrap();
    let (job, reason) = (id.clone(), "no room for this. ".repeat(10_000));
    world.node.send(&gpu, Event::JobRefused { job, run, unstartable: true, reason });
    std::thread::sleep(Duration::from_secs(1));
    let began = Instant::now();
    world.stop();
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(
        world.manager.job(id.as_str()).unwrap().state,
        JobState::Running,
        "nothing was written"
    );
}

/// The figure of oversold GPUs is about jobs beside services; one that was alone took nothing of theirs.
#[test]
fn only_runs_beside_a_service_count_as_oversold() {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, None)]);
    let store = dir.path().join("state.db");
    let (manager, _wakes) = Manager::open(&store, node, Settings::default()).unwrap();
    let hour_ago = Micros(muxflow_manager::clock::now().0 - 3_600_000_000);
    let ran = |program: &str, seen: f64, service: Option<&str>| {
        let id = submit_to(&manager, program);
        let mut row = manager.row(id.as_str()).unwrap();
        (row.run, row.seen, row.changed_at) = (1, Some(seen), hour_ago);
        row.gpu = Some(gpu(0, None).gpu);
        let write = |change: &mut muxflow_store::jobs::Change<'_, '_>| {
            change.begin_run(&row, "work")?;
            if let Some(service) = service {
                change.beside(&row, service)?;
            }
            change.end_run(&row, muxflow_manager::clock::now(), "exit code 0")?;
            change.put(&row)
        };
        manager.change(write).unwrap();
    };
    ran("/bin/alone", 1.0, None);
    assert_eq!(manager.summary().unwrap().oversold_gpu, None);
    ran("/bin/paired", 0.5, Some("web"));
    let summary = manager.summary().unwrap();
    assert_eq!(summary.oversold_gpu, Some(0.5), "{summary:?}");
    assert!((3_600.0..3_700.0).contains(&summary.oversold_over_s), "{summary:?}");
}
