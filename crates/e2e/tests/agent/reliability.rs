//! What the service sees when things break: signals, a killed agent, and every fault in turn.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_agent::gpu::Event;
use muxflow_agent::launch::Run;
use muxflow_agent::process::ProcessKey;
use muxflow_agent::sys;
use muxflow_e2e::build::must;
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

/// Starts another agent in a process of its own; it, and what it wrote when service and job ran.
fn agent_to_kill(name: &str, state: &Path) -> (Child, String) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]);
    command.env("MUXFLOW_TEST_STATE", state).stdout(Stdio::null());
    (command.spawn().unwrap(), both_run(state))
}

fn both_run(state: &Path) -> String {
    let deadline = Instant::now() + LONG;
    loop {
        let text = std::fs::read_to_string(state.join("both-run")).unwrap_or_default();
        if !text.is_empty() {
            return text;
        }
        assert!(Instant::now() < deadline, "the other agent never had both running");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
#[ignore = "run inside an emulated node by a_killed_agent_harms_nobody_and_its_successor_finds_everything"]
fn inner_killed_agent() {
    let dir = tempfile::tempdir().unwrap();
    let (mut other, pid) = agent_to_kill("reliability::inner_agent_to_kill", dir.path());
    let deadline = Instant::now() + LONG;
    let job = ProcessKey::of(pid.parse().unwrap()).unwrap();
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

#[test]
fn nothing_of_a_job_outlives_agent_and_keeper_into_its_next_run() {
    inside("reliability::inner_killed_keepers");
}

/// The job is a shell with a GPU process and another one below it, in sessions of their own.
#[test]
#[ignore = "the process that nothing_of_a_job_outlives_agent_and_keeper_into_its_next_run kills"]
fn inner_agent_with_shell_job() {
    let world = World::start_in(Path::new(&variable("MUXFLOW_TEST_STATE")), "");
    world.start_service();
    let worker = world.argv("job", 20_000, "8", 0).join(" ");
    let script = format!("setsid {worker} & setsid sleep 600 & wait");
    world.start_job(vec!["sh".into(), "-c".into(), script]);
    world.wait("the job launches", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 5)
    });
    let job = world.agent().shared(&world.gpu).unwrap().job().unwrap();
    let control = job.block.dir().display().to_string();
    std::fs::write(world.base().join("both-run"), control).unwrap();
    std::thread::sleep(LONG);
}

#[test]
#[ignore = "run inside an emulated node by nothing_of_a_job_outlives_agent_and_keeper_into_its_next_run"]
fn inner_killed_keepers() {
    let dir = tempfile::tempdir().unwrap();
    let (mut other, control) = agent_to_kill("reliability::inner_agent_with_shell_job", dir.path());
    must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(["kill-propagates", "100"]));
    // Whoever has the job's control block in its environment: the shell and what it has started.
    let control = format!("MUXFLOW_CONTROL={control}");
    let is_of_job = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|entry| entry == control.as_bytes())
    };
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let old: Vec<ProcessKey> = pids.filter(is_of_job).filter_map(ProcessKey::of).collect();
    let alive = || old.iter().filter(|process| process.is_alive()).count();
    assert_eq!(old.len(), 3, "{old:?}");
    let run = |name: &str| {
        let file = dir.path().join("state/workloads").join(name).join("run.json");
        serde_json::from_str::<Run>(&std::fs::read_to_string(file).unwrap()).unwrap()
    };
    let runs = [run("online-service"), run("offline-job")];
    let killed_at = now_us();
    // At once, as `pkill -9 muxflow` does it: held first, so that no keeper begins a stop.
    for run in &runs {
        sys::kill(run.keeper.pid, libc::SIGSTOP).unwrap();
    }
    other.kill().unwrap();
    other.wait().unwrap();
    for run in &runs {
        sys::kill(run.keeper.pid, libc::SIGKILL).unwrap();
    }
    let deadline = Instant::now() + LONG;
    while runs[1].main.is_alive() {
        assert!(Instant::now() < deadline, "the shell outlives its keeper");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(alive() > 0, "what the shell started goes on");
    let world = World::start_in(dir.path(), "");
    let ended = world.event("the job's end is told", |event| {
        if matches!(event, Event::OnlineStarted { adopted: false, .. }) {
            panic!("the service was started and not found: {event:?}");
        }
        matches!(event, Event::JobEnded { .. })
    });
    assert!(matches!(ended, Event::JobEnded { requeue: true, .. }), "{ended:?}");
    assert_eq!(alive(), 0, "nothing of it is left when its end is told: {ended:?}");
    // The next run of it shares the GPU with nobody but the service.
    world.start_worker_job();
    assert_eq!(world.services_alive(), 1, "nothing runs twice");
    world.serve(10);
    let served = world.served_since(killed_at);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}
