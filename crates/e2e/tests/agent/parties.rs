//! Several parties: users that share a GPU, whose activity is whose, and many GPUs at once.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, GpuStatus, Order, StopReason};
use muxflow_types::JobId;

use crate::world::{LONG, World, inside, inside_with, now_us};

/// Says whether this process may become other users; where it must and cannot, that is a failure.
fn may_change_user() -> bool {
    let root = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    if !root {
        println!("SKIPPED: run the tests as root to see jobs of several users");
        assert!(std::env::var_os("CI").is_none(), "CI runs as root");
    }
    root
}

fn launches(status: &GpuStatus) -> u64 {
    status.offline.as_ref().map_or(0, |(_, counts)| counts.launches)
}

#[test]
fn any_user_shares_a_gpu_and_mixed_users_need_the_multi_user_server() {
    if may_change_user() {
        inside("parties::inner_users");
    }
}

#[test]
#[ignore = "run inside an emulated node by any_user_shares_a_gpu_and_mixed_users_need_the_multi_user_server"]
fn inner_users() {
    let owner = |pid: u32| fs::metadata(format!("/proc/{pid}")).unwrap().uid();
    // One server serves one user: any, as long as it is the same.
    let world = World::start("");
    fs::set_permissions(world.base(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut service = World::service_spec(world.argv("service", 2_000, "16", 20_000));
    service.user = Some((65_534, 65_534));
    world.start_service_spec(service);
    let job = |user| {
        let mut spec = World::spec(world.argv("job", 500, "8", 0));
        spec.user = user;
        spec
    };
    world.start_job_as(job(Some((65_534, 65_534))));
    world.wait("the job launches", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 100)
    });
    let status = world.agent().status(&world.gpu).unwrap();
    assert_eq!((owner(status.online.unwrap().1), owner(world.job_pid())), (65_534, 65_534));
    world.serve(10);
    let stop = Order::StopOffline { job: None, reason: StopReason::Asked };
    world.agent().order(&world.gpu, stop).unwrap();
    world.event("it is stopped", |event| matches!(event, Event::JobEnded { .. }));
    world.wait("room again", |status| status.placeable);
    let order = Order::StartOffline(Box::new(job(None)));
    world.agent().order(&world.gpu, order).unwrap();
    let refused = world.event("it is refused", |event| matches!(event, Event::JobRefused { .. }));
    let Event::JobRefused { reason, .. } = refused else { unreachable!() };
    assert!(reason.contains("another user") && reason.contains("mps.multi_user"), "{reason}");
    world.end();

    let world = World::start("[mps]\nmulti_user = true\n");
    fs::set_permissions(world.base(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut service = World::service_spec(world.argv("service", 2_000, "16", 20_000));
    service.user = Some((65_534, 65_534));
    world.start_service_spec(service);
    let mut spec = World::spec(world.argv("job", 500, "8", 0));
    spec.user = Some((65_533, 65_533));
    world.start_job_as(spec);
    world.wait("the job launches", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 100)
    });
    assert_eq!(owner(world.job_pid()), 65_533);
    world.serve(10);
    world.end();
}

#[test]
fn a_server_that_makes_room_for_another_user_has_not_crashed() {
    if may_change_user() {
        inside("parties::inner_another_user");
    }
}

#[test]
#[ignore = "run inside an emulated node by a_server_that_makes_room_for_another_user_has_not_crashed"]
fn inner_another_user() {
    // Root probes first, and again and again while the job of somebody else is there alone.
    let world = World::start("[mps]\nprobe_every_s = 1\nprobe_within_ms = 30000\n");
    fs::set_permissions(world.base(), fs::Permissions::from_mode(0o777)).unwrap();
    let shared = world.agent().shared(&world.gpu).unwrap();
    world.until("the agent has probed", || shared.sms.load(Ordering::Relaxed) > 0);
    // The server of the probe is known by now: the daemon is asked once a second.
    std::thread::sleep(Duration::from_secs(2));
    let mut spec = World::spec(world.argv("job", 500, "8", 0));
    spec.user = Some((65_534, 65_534));
    world.start_job_as(spec);
    world.wait("the job launches", |status| launches(status) > 100);
    std::thread::sleep(Duration::from_secs(6));
    let status = world.agent().status(&world.gpu).unwrap();
    assert_eq!((status.faults.len(), status.mps_starts), (0, 1), "{:?}", status.faults);
    assert!(status.stops.is_empty(), "{:?}", status.stops);
    assert_eq!(status.attach.map(|(attached, _)| attached), Some(true));
    world.wait("the job goes on", |now| launches(now) > launches(&status));
    world.end();
}

#[test]
fn the_services_part_of_the_activity_is_told_with_its_error() {
    inside("parties::inner_split");
}

#[test]
#[ignore = "run inside an emulated node by the_services_part_of_the_activity_is_told_with_its_error"]
fn inner_split() {
    let dir = tempfile::tempdir().unwrap();
    // Looks more often than by default, so that the test is short.
    let laws = "[split]\nlook_every_ms = 6000\npair_within_ms = 1000\n";
    fs::write(dir.path().join("laws.toml"), laws).unwrap();
    let world = World::start_in(dir.path(), "laws = 'laws.toml'\n");
    world.start_service_as(world.argv("service", 5_000, "20", 10_000));
    world.start_job(world.argv("job", 2_000, "16", 0));
    let reported = || world.agent().status(&world.gpu).unwrap().online_activity.unwrap();
    let total = || {
        let seen = world.agent().shared(&world.gpu).unwrap().monitor.published();
        seen.sample.and_then(|sample| sample.sm_activity).map_or(0.0, |percent| percent.value())
    };
    world.wait("the job launches", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 500)
    });
    // Until enough looks have been compared, everything counts as the service's.
    world.until("they are told apart", || {
        let (activity, points) = reported();
        // Before that, all of it is the service's.
        points > 0.0 && activity.value() + 5.0 < total()
    });
    let (from, began) = (now_us(), Instant::now());
    let (mut online, mut error, mut all, mut count) = (0.0, 0.0, 0.0, 0.0);
    while began.elapsed() < Duration::from_secs(8) {
        let (activity, points) = reported();
        // A look shows the service alone, without an error.
        if points > 0.0 {
            online += activity.value();
            error += points;
            all += total();
            count += 1.0;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let served = world.served_since(from);
    let busy_us: u64 = served.requests.iter().map(|(_, device)| device).sum();
    #[expect(clippy::cast_precision_loss, reason = "microseconds of a few seconds")]
    let truth = busy_us as f64 / (began.elapsed().as_secs_f64() * 1e6) * 20.0 / 40.0 * 100.0;
    let (online, error, all) = (online / count, error / count, all / count);
    println!(
        "MEASURED whose activity: all {all:.1} %, the service's {truth:.1} % by its own record, told as {online:.1} % with an error of {error:.1} points"
    );
    assert!(error > 0.0, "an error is told");
    assert!(online < all, "the job's part is taken off");
    assert!((online - truth).abs() <= error + 2.0, "the truth is within the error");
    // However wide the error is told: that is nearer than taking everything for the service's.
    assert!((online - truth).abs() < all - truth, "{online:.1} % told of {truth:.1} %");
    world.end();
}

#[test]
fn too_many_evictions_at_once_are_held_at_the_gates() {
    inside_with("t4x4", "parties::inner_breaker");
}

#[test]
#[ignore = "run inside an emulated node by too_many_evictions_at_once_are_held_at_the_gates"]
fn inner_breaker() {
    let world = World::start("");
    let gpus = world.agent().gpus().to_vec();
    let status = |gpu: &String| world.agent().status(gpu).unwrap();
    let all = |what: &str, holds: &dyn Fn(&String) -> bool| {
        world.until(what, || gpus.iter().all(holds));
    };
    all("they take jobs", &|gpu| status(gpu).placeable && status(gpu).share.is_some());
    for (index, gpu) in gpus.iter().enumerate() {
        let mut spec = World::spec(world.argv("job", 500, "8", 1_000));
        spec.job = JobId::new(&format!("job-{index}")).unwrap();
        world.agent().order(gpu, Order::StartOffline(Box::new(spec))).unwrap();
    }
    all("all jobs launch", &|gpu| status(gpu).offline.is_some_and(|(_, c)| c.launches > 20));
    // All services are said to be slow at the same time: more likely a lie than the truth.
    for gpu in &gpus {
        let shared = world.agent().shared(gpu).unwrap();
        shared.slo_us.store(10_000, Ordering::Relaxed);
        shared.latency_us.store(100_000, Ordering::Relaxed);
    }
    let (mut ended, mut alerts) = (BTreeSet::new(), 0);
    let deadline = Instant::now() + LONG;
    let held = || gpus.iter().filter(|gpu| status(gpu).held > 0).count();
    while ended.len() < 2 || alerts == 0 || held() < 2 {
        assert!(Instant::now() < deadline, "ended {ended:?}, alerts {alerts}, held {}", held());
        match world.agent().next_event(Duration::from_millis(50)) {
            Some((_, Event::JobEnded { job, .. })) => drop(ended.insert(job)),
            Some((_, Event::Alert(text))) if text.contains("too many evictions") => alerts += 1,
            _ => {}
        }
    }
    std::thread::sleep(Duration::from_secs(2));
    while let Some((_, event)) = world.agent().next_event(Duration::from_millis(50)) {
        assert!(!matches!(event, Event::JobEnded { .. }), "one too many: {event:?}");
    }
    let shut = |gpu: &&String| status(gpu).offline.is_some() && status(gpu).budget == 0.0;
    assert_eq!(gpus.iter().filter(shut).count(), 2, "the others wait at shut gates");
    // A shut gate gives no memory back: when the service wants it, the breaker holds nobody.
    let full = gpus.iter().position(|gpu| status(gpu).offline.is_some()).unwrap();
    world.fault(&["--gpu", &full.to_string(), "memory-burst", "14848"]);
    let ended = world.event("a job leaves", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { job, .. } = ended else { unreachable!() };
    assert_eq!(job.as_str(), format!("job-{full}"), "that job and no other");
    world.end();
}
