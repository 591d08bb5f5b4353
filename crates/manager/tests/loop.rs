//! The scheduler loop with a fake node: jobs come, run, fail, are stopped and come back.

#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]

#[path = "loop/again.rs"]
mod again;
#[path = "loop/ends.rs"]
mod ends;
#[path = "loop/kept.rs"]
mod kept;
#[path = "loop/profiler.rs"]
mod profiler;
mod support;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::launch::{Exit, StopCause};
use muxflow_api::jobs::{JobState, JobSubmit, JobView};
use muxflow_manager::Manager;
use muxflow_manager::manager::Settings;
use muxflow_manager::node::NodePort;
use muxflow_manager::scheduler::admit::ProfilerSettings;
use muxflow_manager::scheduler::record::replay;
use muxflow_manager::scheduler::{Scheduler, SchedulerSettings};
use muxflow_manager::up::Loops;
use muxflow_manager::user::Caller;
use muxflow_policy::node::fault::Fault;
use muxflow_policy::retry::RetryParams;
use muxflow_types::{Bytes, GpuId, HealthState, JobId, Micros};
use support::{FakeNode, gpu};

struct World {
    _dir: Option<tempfile::TempDir>,
    store: PathBuf,
    node: Arc<FakeNode>,
    manager: Arc<Manager>,
    loops: Option<Loops>,
    caller: Caller,
}

fn scheduler() -> SchedulerSettings {
    SchedulerSettings {
        retry: RetryParams { base: Micros::from_millis(200), ..RetryParams::default() },
        profiler: ProfilerSettings { enabled: false, ..ProfilerSettings::default() },
        retrain_every: None,
        ..SchedulerSettings::default()
    }
}

fn start(node: Arc<FakeNode>, store: PathBuf, settings: Settings) -> World {
    let settings = Settings { history_step_ms: 50, ..settings };
    let (manager, wakes) = Manager::open(&store, Arc::clone(&node) as _, settings).unwrap();
    let loops = Loops::start(&manager, wakes, scheduler(), store.clone()).unwrap();
    let caller = Caller::of_uid(muxflow_agent::sys::own_uid(), None);
    World { _dir: None, store, node, manager, loops: Some(loops), caller }
}

fn world(gpus: u32, settings: Settings) -> World {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), (0..gpus).map(|n| gpu(n, Some("web"))).collect());
    let mut world = start(node, dir.path().join("state.db"), settings);
    world._dir = Some(dir);
    world
}

impl World {
    fn submit(&self, change: impl FnOnce(&mut JobSubmit)) -> JobId {
        let text = r#"{"command": ["/bin/train"], "cwd": "/"}"#;
        let mut submit: JobSubmit = serde_json::from_str(text).unwrap();
        change(&mut submit);
        let made = self.manager.submit(&self.caller, &submit).unwrap();
        JobId::new(&made.jobs[0]).unwrap()
    }

    fn wait(&self, id: &JobId, what: &str, holds: impl Fn(&JobView) -> bool) -> JobView {
        let deadline = Instant::now() + Duration::from_secs(40);
        loop {
            let job = self.manager.job(id.as_str()).unwrap();
            if holds(&job) {
                return job;
            }
            assert!(Instant::now() < deadline, "never: {what}: {job:#?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn runs(&self, id: &JobId) -> JobView {
        self.wait(id, "runs", |job| {
            job.state == JobState::Running && self.node.running().contains_key(id)
        })
    }

    /// Waits until all events that were sent before are written down.
    fn heard(&self, gpu: &GpuId) {
        let last = self.manager.reader().last_event().unwrap();
        self.node.send(gpu, Event::Alert("heard".into()));
        let told = || {
            let events = self.manager.reader().events(last, None, 1_000).unwrap();
            events.iter().any(|event| event.text == "heard")
        };
        let deadline = Instant::now() + Duration::from_secs(40);
        while !told() {
            assert!(Instant::now() < deadline, "events are not read");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn exit(&self, id: &JobId, code: i32) {
        let run = self.manager.job(id.as_str()).unwrap().run;
        self.node.end(id, Exit { code: Some(code), run, ..Exit::unknown() }, None);
    }

    fn stop(&mut self) {
        self.loops.take().unwrap().stop();
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(loops) = self.loops.take() {
            loops.stop();
        }
    }
}

#[test]
fn a_job_runs_to_its_end_and_the_next_takes_its_place() {
    let world = world(1, Settings::default());
    let first = world.submit(|_| {});
    let seen = world.runs(&first);
    assert!(seen.predicted_speed.is_some() && seen.share_pct.is_some(), "{seen:?}");
    let second = world.submit(|_| {});
    let words = "a job that counts more took the only GPU that could hold it";
    let waiting = world.wait(&second, "waits with a reason", |job| job.reason == words);
    assert_eq!(waiting.state, JobState::Queued);
    let detail = world.manager.detail(second.as_str()).unwrap();
    assert_eq!(detail.candidates[0].given_to.as_deref(), Some(first.as_str()));
    world.exit(&first, 0);
    assert_eq!(world.wait(&first, "done", |job| job.state.is_final()).state, JobState::Done);
    world.runs(&second);
    world.exit(&second, 3);
    let failed = world.wait(&second, "failed", |job| job.state.is_final());
    assert_eq!((failed.state, failed.exit_code), (JobState::Failed, Some(3)));
    let record = world.manager.plan().unwrap();
    assert_eq!(replay(&record).unwrap(), record.plan, "byte for byte");
    let mut damaged = muxflow_api::cluster::PlanRecord::clone(&record);
    damaged.snapshot = damaged.snapshot.replace("\"version\": 1", "\"version\": 9");
    assert!(replay(&damaged).unwrap_err().to_string().contains("snapshot"));
}

#[test]
fn a_job_that_fails_is_tried_as_often_as_it_may() {
    let world = world(1, Settings::default());
    let id = world.submit(|submit| submit.retries = 2);
    for run in 1..=3 {
        world.wait(&id, "the next try", |job| {
            job.run == run && world.node.running().contains_key(&id)
        });
        world.exit(&id, 1);
        world.wait(&id, "the failure is counted", |job| u64::from(job.failures) == run);
    }
    let ended = world.wait(&id, "failed for good", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run, ended.failures), (JobState::Failed, 3, 3));
    assert_eq!(world.manager.detail(id.as_str()).unwrap().runs.len(), 3);
}

#[test]
fn a_program_that_cannot_be_started_fails_its_job_and_a_gpu_that_refuses_does_not() {
    let world = world(1, Settings::default());
    world.node.refuse(Some((true, "`pyhton` in /: No such file or directory")));
    let id = world.submit(|submit| submit.retries = 1);
    let ended = world.wait(&id, "failed for good", |job| job.state.is_final());
    assert_eq!((ended.state, ended.run, ended.failures), (JobState::Failed, 2, 2), "{ended:?}");
    assert!(ended.reason.contains("`pyhton`"), "{ended:?}");
    let runs = world.manager.detail(id.as_str()).unwrap().runs;
    assert!(runs.len() == 2 && runs.iter().all(|run| run.outcome.contains("pyhton")), "{runs:?}");
    // The GPU's own reasons pass, and are not held against the job.
    world.node.refuse(Some((false, "the GPU is Unhealthy")));
    let id = world.submit(|_| {});
    world.wait(&id, "refused", |job| job.reason.contains("Unhealthy"));
    world.node.refuse(None);
    assert_eq!(world.runs(&id).failures, 0);
}

#[test]
fn evicted_work_comes_back_and_cancelled_work_does_not() {
    let world = world(2, Settings::default());
    let id = world.submit(|_| {});
    world.runs(&id);
    let exit = Exit { signal: Some(15), run: 1, stop: Some(StopCause::Asked), ..Exit::unknown() };
    world.node.end(&id, exit, Some(StopReason::Health("GPU is Overlimit".into())));
    world.wait(&id, "again", |job| job.run == 2 && job.state == JobState::Running);
    assert_eq!(world.manager.summary().unwrap().evictions, 1);
    // News of the first run is none.
    let old = Exit { code: Some(0), run: 1, ..Exit::unknown() };
    let gpu = world.node.running()[&id].clone();
    let (job, reason) = (id.clone(), None);
    let (requeue, fail_prone, blamed) = (false, false, false);
    world.node.send(&gpu, Event::JobEnded { job, exit: old, reason, requeue, fail_prone, blamed });
    for unstartable in [false, true] {
        let (job, reason) = (id.clone(), "it came late".to_owned());
        world.node.send(&gpu, Event::JobRefused { job, run: 1, unstartable, reason });
    }
    world.heard(&gpu);
    let job = world.manager.job(id.as_str()).unwrap();
    assert_eq!((job.state, job.run, job.failures), (JobState::Running, 2, 0), "{job:?}");
    world.manager.cancel(&world.caller, id.as_str()).unwrap();
    let ended = world.wait(&id, "cancelled", |job| job.state.is_final());
    assert_eq!(ended.state, JobState::Cancelled);
    assert!(world.node.running().is_empty());
}

#[test]
fn pause_drains_everything_and_resume_brings_it_back() {
    let world = world(2, Settings::default());
    let ids = [world.submit(|_| {}), world.submit(|_| {})];
    ids.iter().for_each(|id| drop(world.runs(id)));
    world.manager.set_paused(&world.caller, true).unwrap();
    for id in &ids {
        world.wait(id, "queued", |job| job.state == JobState::Queued);
    }
    let late = world.submit(|_| {});
    std::thread::sleep(Duration::from_millis(300));
    assert!(world.node.running().is_empty());
    assert_eq!(world.manager.job(late.as_str()).unwrap().state, JobState::Submitted);
    // All of them say why they wait.
    for id in ids.iter().chain([&late]) {
        let job = world.manager.job(id.as_str()).unwrap();
        assert!(job.reason.contains("offline work is paused"), "{job:?}");
    }
    world.manager.set_paused(&world.caller, false).unwrap();
    world.wait(&ids[0], "again", |job| job.run == 2);
}

/// A scheduler whose cycles the test makes itself, with one idle GPU.
fn by_hand(profiler: ProfilerSettings) -> (tempfile::TempDir, Arc<FakeNode>, Arc<Scheduler>) {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, None)]);
    let store = dir.path().join("state.db");
    let (manager, _) = Manager::open(&store, Arc::clone(&node) as _, Settings::default()).unwrap();
    let settings = SchedulerSettings { profiler, ..scheduler() };
    (dir, node, Arc::new(Scheduler { manager, settings, speeds: Arc::default() }))
}

fn submit_to(manager: &Manager, program: &str) -> JobId {
    let text = format!(r#"{{"command": [{program:?}], "cwd": "/"}}"#);
    let caller = Caller::of_uid(muxflow_agent::sys::own_uid(), None);
    let made = manager.submit(&caller, &serde_json::from_str(&text).unwrap()).unwrap();
    JobId::new(&made.jobs[0]).unwrap()
}

#[test]
fn nothing_starts_when_a_pause_comes_in_the_middle_of_a_cycle() {
    let (_dir, node, scheduler) = by_hand(ProfilerSettings::default());
    let manager = Arc::clone(&scheduler.manager);
    let id = submit_to(&manager, "/bin/train");
    let operator = Caller::of_uid(muxflow_agent::sys::own_uid(), None);
    let (paused, by) = (Arc::clone(&manager), operator.clone());
    node.at_next_look(move || assert!(paused.set_paused(&by, true).unwrap().paused));
    scheduler.cycle("test", true).unwrap();
    assert!(manager.is_paused());
    assert!(node.running().is_empty(), "measuring did not begin");
    assert_eq!(manager.job(id.as_str()).unwrap().state, JobState::Submitted);
    manager.set_paused(&operator, false).unwrap();
    scheduler.cycle("test", true).unwrap();
    assert!(node.running().contains_key(&id));
}

#[test]
fn jobs_that_ended_long_ago_are_removed_with_their_output() {
    let settings =
        Settings { keep_jobs_for: Micros::from_secs(3600), keep_jobs: 3, ..Settings::default() };
    let world = world(1, settings);
    let open = world.submit(|_| {});
    world.runs(&open);
    let ended: Vec<JobId> = (0..5).map(|_| world.submit(|_| {})).collect();
    for id in &ended {
        std::fs::write(world.node.log_file(id, "stdout"), "output").unwrap();
        world.manager.cancel(&world.caller, id.as_str()).unwrap();
        world.wait(id, "cancelled", |job| job.state.is_final());
    }
    let waits = world.submit(|_| {});
    let stay = std::sync::atomic::AtomicBool::new(false);
    let there = |id: &JobId| {
        let (row, file) = (world.manager.row(id.as_str()), world.node.log_file(id, "stdout"));
        assert_eq!(row.is_ok(), file.exists() || !ended.contains(id), "{id}: both or neither");
        row.is_ok()
    };
    // The number is kept to: those that ended first go first.
    let now = || Micros(world.manager.row(open.as_str()).unwrap().changed_at.0);
    assert_eq!(world.manager.sweep(now(), &stay).unwrap(), 2);
    let left: Vec<bool> = ended.iter().map(&there).collect();
    assert_eq!(left, [false, false, true, true, true]);
    assert_eq!(world.manager.sweep(now(), &stay).unwrap(), 0);
    // So is the time; what has not ended stays however old it is.
    let years = Micros::from_secs(10 * 365 * 24 * 3600);
    assert_eq!(world.manager.sweep(now().saturating_add(years), &stay).unwrap(), 3);
    assert!(!ended.iter().any(&there));
    assert!(there(&open) && there(&waits));
    // Its number is not given again.
    assert!(world.manager.row(world.submit(|_| {}).as_str()).unwrap().number > 7);
}

#[test]
fn a_fail_prone_job_is_kept_from_critical_services() {
    let world = world(2, Settings::default());
    let critical = |index: usize, is: bool| {
        world.node.change(index, |gpu| gpu.online.as_mut().unwrap().critical = is);
    };
    critical(0, true);
    critical(1, true);
    let id = world.submit(|submit| submit.retries = 1);
    world.runs(&id);
    // The agent blames it for errors, and too often; it may try again, but not here.
    let gpu = world.node.running()[&id].clone();
    world.node.forget(&id);
    let exit = Exit { signal: Some(9), run: 1, stop: Some(StopCause::Asked), ..Exit::unknown() };
    let reason = Some(StopReason::Fault(Fault::UngatedProcess));
    let (job, requeue, fail_prone, blamed) = (id.clone(), true, true, true);
    world.node.send(&gpu, Event::JobEnded { job, exit, reason, requeue, fail_prone, blamed });
    world.wait(&id, "kept away", |job| job.reason.contains("fail-prone"));
    assert!(world.node.running().is_empty());
    critical(1, false);
    world.manager.wake("another service is there");
    world.runs(&id);
    assert_eq!(world.node.running()[&id], world.node.look()[1].gpu);
}

#[test]
fn a_job_keeps_the_quota_that_it_was_started_with() {
    let world = world(1, Settings::default());
    let id = world.submit(|_| {});
    world.runs(&id);
    let manager = Arc::clone(&world.manager);
    let scheduler = Scheduler { manager, settings: scheduler(), speeds: Arc::default() };
    let given = world.manager.row(id.as_str()).unwrap().quota_bytes.map(Bytes).unwrap();
    assert!(given > Bytes::from_gib(1), "{given}");
    // The service beside it grows; what is lent to others is not what it was given.
    world.node.change(0, |gpu| gpu.quota = Bytes::from_gib(1));
    let seen = scheduler.snapshot().unwrap();
    assert_eq!((seen.gpus[0].running.as_ref(), seen.gpus[0].quota), (Some(&id), given));
}

#[test]
fn a_deadline_ends_what_waits_and_what_runs() {
    let world = world(1, Settings::default());
    let runs = world.submit(|submit| submit.deadline_s = Some(20));
    world.runs(&runs);
    let waits = world.submit(|submit| submit.deadline_s = Some(1));
    for id in [&runs, &waits] {
        let ended = world.wait(id, "expired", |job| job.state.is_final());
        assert_eq!(ended.state, JobState::Failed);
        assert!(ended.reason.contains("deadline has passed"), "{ended:?}");
    }
    let ended = world.manager.job(runs.as_str()).unwrap();
    assert_eq!(ended.reason, "its deadline has passed (stopped: asked)");
}

#[test]
fn shadow_mode_starts_nothing_and_reports() {
    let world = world(1, Settings { shadow: true, ..Settings::default() });
    let id = world.submit(|_| {});
    let deadline = Instant::now() + Duration::from_secs(20);
    while world.manager.plan().is_none_or(|plan| !plan.plan.contains(id.as_str())) {
        assert!(Instant::now() < deadline, "no plan was made");
        std::thread::sleep(Duration::from_millis(20));
    }
    let plan = world.manager.plan().unwrap();
    assert!(!plan.applied && plan.plan.contains("start"), "{}", plan.plan);
    assert!(world.node.running().is_empty());
    assert_eq!(world.manager.job(id.as_str()).unwrap().state, JobState::Queued);
}

/// In shadow mode a job whose deadline passes stays where it is: nothing was there to run it.
#[test]
fn shadow_mode_ends_nothing() {
    let world = world(1, Settings { shadow: true, ..Settings::default() });
    let id = world.submit(|submit| submit.deadline_s = Some(1));
    let passed = world.manager.row(id.as_str()).unwrap().deadline.unwrap();
    let deadline = Instant::now() + Duration::from_secs(40);
    while world.manager.plan().is_none_or(|plan| plan.at_us <= passed.0) {
        assert!(Instant::now() < deadline, "no plan was made after its deadline");
        world.manager.wake("look again");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(world.manager.job(id.as_str()).unwrap().state, JobState::Queued);
}

/// Something happens all the time, and the interval's plan is made all the same.
#[test]
fn the_interval_comes_however_much_happens() {
    let dir = tempfile::tempdir().unwrap();
    let node = FakeNode::new(dir.path(), vec![gpu(0, Some("web"))]);
    let store = dir.path().join("state.db");
    let (manager, wakes) = Manager::open(&store, node as _, Settings::default()).unwrap();
    let (interval, restart_cost) = (Micros::from_millis(300), Micros::from_millis(1));
    let settings = SchedulerSettings { interval, restart_cost, ..scheduler() };
    let scheduler = Scheduler { manager: Arc::clone(&manager), settings, speeds: Arc::default() };
    let leave = std::sync::atomic::AtomicBool::new(false);
    let is_left = || leave.load(std::sync::atomic::Ordering::Acquire);
    // The planner has something to do at every event.
    submit_to(&manager, "/bin/train");
    submit_to(&manager, "/bin/train");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_left() {
                manager.wake("something happens");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        std::thread::sleep(Duration::from_millis(20));
        let (planning, leave) = (&scheduler, &leave);
        scope.spawn(move || planning.run(&wakes, leave));
        let deadline = Instant::now() + Duration::from_secs(40);
        let (mut moves, mut others) = (BTreeSet::new(), BTreeSet::new());
        while (moves.len() < 3 || others.is_empty()) && Instant::now() < deadline {
            if let Some(plan) = manager.plan() {
                let is_of_interval = plan.max_disruption_pct > 0.0;
                assert_eq!(is_of_interval, plan.cause == "interval", "{}", plan.cause);
                if is_of_interval { &mut moves } else { &mut others }.insert(plan.at_us);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        leave.store(true, std::sync::atomic::Ordering::Release);
        assert!(moves.len() >= 3 && !others.is_empty(), "{moves:?} {others:?}");
    });
}

#[test]
fn a_gpu_with_a_process_outside_mps_is_left_alone() {
    let world = world(1, Settings::default());
    world.node.change(0, |gpu| gpu.outside_mps = vec![4711]);
    let id = world.submit(|_| {});
    let waiting = world.wait(&id, "waits", |job| job.reason.contains("outside MPS"));
    assert_eq!(waiting.state, JobState::Queued);
    let view = muxflow_manager::views::gpu(
        &muxflow_manager::node::NodePort::look(&*world.node)[0],
        Micros(0),
    );
    let remedy = view.outside_mps_remedy.unwrap();
    assert!(remedy.contains("4711") && remedy.contains("CUDA_MPS_PIPE_DIRECTORY=/run/mps"));
    world.node.change(0, |gpu| gpu.outside_mps.clear());
    world.manager.wake("the process left");
    world.runs(&id);
}

#[test]
fn nothing_is_lost_or_started_twice_over_a_restart() {
    let mut first = world(3, Settings::default());
    let ids: Vec<JobId> = (0..3).map(|_| first.submit(|_| {})).collect();
    ids.iter().for_each(|id| drop(first.runs(id)));
    let waits = first.submit(|_| {});
    first.wait(&waits, "waits", |job| job.state == JobState::Queued);
    first.stop();
    // While nobody looks: one ends well, one ends badly, of one nobody saw the end.
    let run = 1;
    first.node.end(&ids[0], Exit { code: Some(0), run, ..Exit::unknown() }, None);
    first.node.end(&ids[1], Exit { code: Some(7), run, ..Exit::unknown() }, None);
    first.node.forget(&ids[2]);
    let node = Arc::clone(&first.node);
    while muxflow_manager::node::NodePort::next_event(&*node, Duration::ZERO).is_some() {}
    node.change(0, |gpu| gpu.health = HealthState::Healthy);
    let second = start(node, first.store.clone(), Settings::default());
    assert_eq!(second.manager.job(ids[0].as_str()).unwrap().state, JobState::Done);
    assert_eq!(second.manager.job(ids[1].as_str()).unwrap().state, JobState::Failed);
    second.wait(&ids[2], "again", |job| job.run == 2 && job.state == JobState::Running);
    second.wait(&waits, "its turn", |job| job.state == JobState::Running);
    assert_eq!(second.manager.job(ids[0].as_str()).unwrap().run, 1);
}
