//! What the service sees when things break: signals, a killed agent, and every fault in turn.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_agent::gpu::Event;
use muxflow_agent::process::ProcessKey;
use muxflow_agent::sys;
use muxflow_types::HealthState;

use crate::world::{LONG, World, inside, now_us, rounds, variable};

#[test]
fn signals_to_the_job_in_the_middle_of_work_cost_the_service_nothing() {
    inside("reliability::inner_signals");
}

#[test]
#[ignore = "run inside an emulated node by signals_to_the_job_in_the_middle_of_work_cost_the_service_nothing"]
fn inner_signals() {
    let rounds = rounds(50);
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    let began = now_us();
    for round in 0..rounds {
        world.start_worker_job();
        let signal = if round % 2 == 0 { libc::SIGTERM } else { libc::SIGINT };
        sys::kill(world.job_pid(), signal).unwrap();
        world.event("the job ends", |event| matches!(event, Event::JobEnded { .. }));
    }
    assert_eq!(world.restarts(), 0, "the service lost its context");
    let served = world.served_since(began);
    assert!(served.count() > 0 && served.errors == 0, "{served:?}");
    println!(
        "MEASURED signals: {rounds} times, service restarts 0, longest gap {} ms",
        served.gap_us / 1000
    );
    world.end();
}

#[test]
fn a_killed_agent_harms_nobody_and_its_successor_finds_everything() {
    inside("reliability::inner_killed_agent");
}

#[test]
#[ignore = "the process that a_killed_agent_harms_nobody_and_its_successor_finds_everything kills"]
fn inner_agent_to_kill() {
    let world = World::start_in(Path::new(&variable("MUXFLOW_TEST_STATE")), "");
    world.start_service();
    world.start_worker_job();
    std::fs::write(world.base().join("both-run"), world.job_pid().to_string()).unwrap();
    std::thread::sleep(LONG);
}

#[test]
#[ignore = "run inside an emulated node by a_killed_agent_harms_nobody_and_its_successor_finds_everything"]
fn inner_killed_agent() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "reliability::inner_agent_to_kill", "--ignored", "--nocapture"])
        .env("MUXFLOW_TEST_STATE", dir.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ready = dir.path().join("both-run");
    let deadline = Instant::now() + LONG;
    while std::fs::read_to_string(&ready).map_or(true, |text| text.is_empty()) {
        assert!(Instant::now() < deadline, "the other agent never had both running");
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid: u32 = std::fs::read_to_string(&ready).unwrap().parse().unwrap();
    let job = ProcessKey::of(pid).unwrap();
    let killed_at = now_us();
    other.kill().unwrap();
    other.wait().unwrap();
    while job.is_alive() {
        assert!(Instant::now() < deadline, "the job outlives the agent");
        std::thread::sleep(Duration::from_millis(5));
    }
    let gone_ms = (now_us() - killed_at) / 1000;
    let world = World::start_in(dir.path(), "");
    let (mut found, mut ended) = (0, 0);
    while found == 0 || ended == 0 {
        assert!(Instant::now() < deadline, "not all is told: {found} {ended}");
        match world.agent().next_event(Duration::from_millis(100)) {
            Some((_, Event::OnlineStarted { adopted, .. })) => {
                assert!(adopted, "the service is found and not started");
                found += 1;
            }
            Some((_, Event::JobEnded { requeue, .. })) => {
                assert!(requeue, "the job did not end by itself");
                ended += 1;
            }
            _ => {}
        }
    }
    // Whoever runs the agent gives its orders again.
    let file = dir.path().join("latency");
    std::fs::write(&file, "1234").unwrap();
    let mut spec = World::service_spec(world.argv("service", 2_000, "16", 20_000));
    spec.latency_file = Some(file);
    world.start_service_spec(spec);
    let shared = world.agent().shared(&world.gpu).unwrap();
    world.until("the latency of the service is read again", || {
        shared.latency_us.load(std::sync::atomic::Ordering::Relaxed) == 1234
    });
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    let status = world.agent().status(&world.gpu).unwrap();
    assert_eq!((status.mps_starts, status.online_restarts), (0, 0), "nothing was started again");
    assert_eq!(world.services_alive(), 1, "nothing runs twice");
    let served = world.served_since(killed_at);
    assert!(served.count() > 10 && served.errors == 0, "the service went on: {served:?}");
    println!(
        "MEASURED kill -9 of the agent: job gone after {gone_ms} ms, longest gap of the service {} ms",
        served.gap_us / 1000
    );
    world.end();
}
