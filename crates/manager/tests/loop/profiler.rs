//! Measuring: alone or not at all, in bounded time, and a job that cannot be measured is scheduled.

use std::sync::Arc;
use std::time::{Duration, Instant};

use muxflow_agent::launch::Exit;
use muxflow_api::jobs::JobState;
use muxflow_manager::Manager;
use muxflow_manager::ending::Why;
use muxflow_manager::node::NodePort;
use muxflow_manager::scheduler::Scheduler;
use muxflow_manager::scheduler::admit::ProfilerSettings;
use muxflow_manager::scheduler::watch::Watch;
use muxflow_manager::user::Caller;
use muxflow_types::{GpuType, JobId};

use crate::support::{FakeNode, gpu};
use crate::{by_hand, submit_to};

#[test]
fn a_job_that_is_not_alone_has_no_profile_of_its_own() {
    let (_dir, node, scheduler) = by_hand(ProfilerSettings::default());
    let manager = Arc::clone(&scheduler.manager);
    let mut watch = Watch::new(Arc::clone(&scheduler));
    let t4 = GpuType::new("T4").unwrap();
    let mut measure = |program: &str, comes: &dyn Fn()| {
        let id = submit_to(&manager, program);
        node.launched(0);
        scheduler.cycle("test", true).unwrap();
        assert_eq!(manager.job(id.as_str()).unwrap().state, JobState::Profiling);
        node.launched(1_000);
        watch.look().unwrap();
        comes();
        node.launched(1_100);
        watch.look().unwrap();
        let job = manager.job(id.as_str()).unwrap();
        assert_eq!(job.state, JobState::Running, "{job:?}");
        let workload = manager.row(id.as_str()).unwrap().workload;
        let profile = manager.reader().profile(&workload, &t4).unwrap();
        node.change(0, |gpu| (gpu.online, gpu.outside_mps) = (None, Vec::new()));
        node.end(&id, Exit { code: Some(0), run: job.run, ..Exit::unknown() }, None);
        let exit = Exit { code: Some(0), run: job.run, ..Exit::unknown() };
        let retry = &scheduler.settings.retry;
        manager.run_ended(&id, &exit, &Why::default(), retry).unwrap();
        (profile, job.reason)
    };
    let (profile, reason) = measure("/bin/alone", &|| {});
    assert!(profile.unwrap().solo_time.is_some(), "{reason}");
    let service = || node.change(0, |sight| sight.online = gpu(0, Some("web")).online);
    let (profile, reason) = measure("/bin/beside-a-service", &service);
    assert!(profile.is_none() && reason.contains("no longer alone"), "{profile:?} {reason}");
    let stranger = || node.change(0, |sight| sight.outside_mps = vec![4711]);
    let (profile, reason) = measure("/bin/beside-a-stranger", &stranger);
    assert!(profile.is_none() && reason.contains("no longer alone"), "{profile:?} {reason}");
}

/// Ends the run of a job well, as the node would tell it.
fn finish(scheduler: &Scheduler, node: &FakeNode, id: &JobId) {
    let manager = &scheduler.manager;
    let run = manager.job(id.as_str()).unwrap().run;
    let exit = Exit { code: Some(0), run, ..Exit::unknown() };
    node.end(id, exit.clone(), None);
    manager.run_ended(id, &exit, &Why::default(), &scheduler.settings.retry).unwrap();
}

/// Looks around until the job is no longer being measured.
fn until_measured(manager: &Manager, watch: &mut Watch, id: &JobId) -> String {
    let deadline = Instant::now() + Duration::from_secs(40);
    loop {
        watch.look().unwrap();
        let job = manager.job(id.as_str()).unwrap();
        if job.state != JobState::Profiling {
            return job.reason;
        }
        assert!(Instant::now() < deadline, "measuring goes on: {job:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn measuring_ends_in_time_whatever_the_job_does() {
    let limit = Duration::from_millis(400);
    let (_dir, node, scheduler) =
        by_hand(ProfilerSettings { limit, ..ProfilerSettings::default() });
    let manager = Arc::clone(&scheduler.manager);
    let t4 = GpuType::new("T4").unwrap();
    // One launches nothing at all, one launches and shows no rhythm.
    for (program, launches, says) in
        [("/bin/idle", 0, "it launched nothing in time"), ("/bin/once", 1, "no rhythm was found")]
    {
        let mut watch = Watch::new(Arc::clone(&scheduler));
        let id = submit_to(&manager, program);
        node.launched(launches);
        let began = Instant::now();
        scheduler.cycle("test", true).unwrap();
        assert_eq!(manager.job(id.as_str()).unwrap().state, JobState::Profiling);
        let reason = until_measured(&manager, &mut watch, &id);
        assert!(began.elapsed() >= limit, "it was not given up before its time");
        assert!(reason.contains(says), "{program}: {reason}");
        // It goes on where it is, as any other would.
        assert_eq!(manager.job(id.as_str()).unwrap().state, JobState::Running);
        assert!(node.running().contains_key(&id));
        let workload = manager.row(id.as_str()).unwrap().workload;
        let profile = manager.reader().profile(&workload, &t4).unwrap();
        assert!(profile.is_none_or(|profile| profile.solo_time.is_none()), "{program}");
        finish(&scheduler, &node, &id);
    }
}

#[test]
fn a_job_that_found_no_idle_gpu_is_scheduled_unmeasured() {
    let wait = Duration::from_secs(3);
    let (_dir, node, scheduler) = by_hand(ProfilerSettings { wait, ..ProfilerSettings::default() });
    let manager = Arc::clone(&scheduler.manager);
    let first = submit_to(&manager, "/bin/first");
    scheduler.cycle("test", true).unwrap();
    assert_eq!(manager.job(first.as_str()).unwrap().state, JobState::Profiling);
    let second = submit_to(&manager, "/bin/second");
    let same = submit_to(&manager, "/bin/first");
    scheduler.cycle("test", true).unwrap();
    let why = |id: &JobId| manager.job(id.as_str()).unwrap().reason;
    assert_eq!(why(&second), "waits for an idle GPU to be measured on");
    assert_eq!(why(&same), "waits while the same program is measured");
    manager.cancel(&Caller::of_uid(muxflow_agent::sys::own_uid(), None), same.as_str()).unwrap();
    let began = Instant::now();
    let job = loop {
        scheduler.cycle("test", true).unwrap();
        let job = manager.job(second.as_str()).unwrap();
        if job.state != JobState::Submitted {
            break job;
        }
        assert!(began.elapsed() < Duration::from_secs(40), "it waits for ever: {job:?}");
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(job.state, JobState::Queued);
    assert!(job.changed_us - job.submitted_us >= 3_000_000, "not before its time: {job:?}");
    // Carefully: it runs where there is room, at the speed that the conservative rule promises.
    finish(&scheduler, &node, &first);
    scheduler.cycle("test", true).unwrap();
    let job = manager.job(second.as_str()).unwrap();
    assert_eq!((job.state, job.run), (JobState::Running, 1), "{job:?}");
    assert!(job.predicted_speed.is_some() && node.running().contains_key(&second));
    let workload = manager.row(second.as_str()).unwrap().workload;
    let t4 = GpuType::new("T4").unwrap();
    assert!(manager.reader().profile(&workload, &t4).unwrap().is_none());
}

/// Nobody waits to be measured on a GPU that is not there.
#[test]
fn a_job_that_fits_nowhere_is_told_so_at_once() {
    let (_dir, _node, scheduler) = by_hand(ProfilerSettings::default());
    let manager = Arc::clone(&scheduler.manager);
    for (field, why) in [
        (r#""gpu_types": ["A100"]"#, "no GPU is of a type that the job accepts"),
        (r#""memory_bytes": 1099511627776"#, "asks for 1024.0 GiB of memory"),
    ] {
        let text = format!(r#"{{"command": ["/bin/train"], "cwd": "/", {field}}}"#);
        let caller = Caller::of_uid(muxflow_agent::sys::own_uid(), None);
        let made = manager.submit(&caller, &serde_json::from_str(&text).unwrap()).unwrap();
        scheduler.cycle("test", true).unwrap();
        let job = manager.job(&made.id).unwrap();
        assert_eq!(job.state, JobState::Queued, "{job:?}");
        assert!(job.reason.contains(why), "{}", job.reason);
    }
}

/// A GPU that is set aside is for measuring alone: a job leaves it afterwards, measured or not, and
/// runs elsewhere.
#[test]
fn a_gpu_that_is_set_aside_is_left_again() {
    let aside = Some(gpu(0, None).gpu);
    let profiler =
        ProfilerSettings { set_aside: aside, limit: Duration::ZERO, ..ProfilerSettings::default() };
    let (_dir, node, scheduler) = by_hand(profiler);
    let manager = Arc::clone(&scheduler.manager);
    node.add(gpu(1, Some("web")));
    let id = submit_to(&manager, "/bin/idle");
    scheduler.cycle("test", true).unwrap();
    assert_eq!(node.running()[&id], node.look()[0].gpu);
    let reason = until_measured(&manager, &mut Watch::new(Arc::clone(&scheduler)), &id);
    assert!(reason.contains("could not be measured"), "{reason}");
    assert!(node.running().is_empty(), "it was told to leave");
    while let Some((gpu, event)) = node.next_event(Duration::ZERO) {
        manager.note_event(&gpu, event, &scheduler.settings.retry).unwrap();
    }
    scheduler.cycle("test", true).unwrap();
    let job = manager.job(id.as_str()).unwrap();
    assert_eq!((job.state, job.run), (JobState::Running, 2), "{job:?}");
    assert_eq!(node.running()[&id], node.look()[1].gpu);
}

/// As after a pause, or a manager that was away: its time to wait is over, and a GPU is idle now.
#[test]
fn a_job_that_waited_too_long_is_measured_where_a_gpu_is_idle() {
    let wait = Duration::ZERO;
    let (_dir, node, scheduler) = by_hand(ProfilerSettings { wait, ..ProfilerSettings::default() });
    let manager = Arc::clone(&scheduler.manager);
    let first = submit_to(&manager, "/bin/first");
    std::thread::sleep(Duration::from_millis(5));
    scheduler.cycle("test", true).unwrap();
    assert_eq!(manager.job(first.as_str()).unwrap().state, JobState::Profiling);
    assert!(node.running().contains_key(&first));
    // Where none is, nothing is waited for.
    let second = submit_to(&manager, "/bin/second");
    std::thread::sleep(Duration::from_millis(5));
    scheduler.cycle("test", true).unwrap();
    assert_eq!(manager.job(second.as_str()).unwrap().state, JobState::Queued);
}
