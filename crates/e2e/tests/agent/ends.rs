//! Ends that nobody asked for: a program that leaves workers behind, a keeper that is killed, a control
//! block that is cut short, and an agent that can open no file. A job that dies with a kernel in flight takes the service down here.

use std::fs;
use std::time::{Duration, Instant};

use muxflow_abi::control::{AGENT_FILE, JOB_FILE};
use muxflow_agent::descriptors;
use muxflow_agent::gpu::{Event, GpuStatus};
use muxflow_agent::launch::{Exit, Run};
use muxflow_agent::sys;

use crate::world::{World, inside};

fn launches(status: &GpuStatus) -> u64 {
    status.offline.as_ref().map_or(0, |(_, counts)| counts.launches)
}

/// How the job ended; the service must not have noticed.
fn unharmed(world: &World) -> Exit {
    let ended = world.event("the job ends", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { exit, .. } = ended else { unreachable!() };
    let deadline = Instant::now() + Duration::from_secs(2);
    while Instant::now() < deadline {
        assert_eq!(world.restarts(), 0, "the service lost its context: {exit:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    world.serve(10);
    exit
}

#[test]
fn workers_that_outlive_their_program_are_drained() {
    inside("ends::inner_workers");
}

#[test]
#[ignore = "run inside an emulated node by workers_that_outlive_their_program_are_drained"]
fn inner_workers() {
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    let go = world.base().join("go");
    let worker = world.argv("job", 300_000, "8", 0).join(" ");
    let script = format!("{worker} & while [ ! -e {} ]; do sleep 0.01; done", go.display());
    world.start_job(vec!["sh".into(), "-c".into(), script]);
    let before = launches(&world.wait("the worker launches", |status| launches(status) > 1));
    world.wait("one more kernel begins", |status| launches(status) > before);
    fs::write(&go, "").unwrap();
    let exit = unharmed(&world);
    assert_eq!((exit.code, exit.stop, exit.all_gone), (Some(0), None, true), "{exit:?}");
    assert!(!exit.steps.is_empty(), "the worker was drained: {exit:?}");
    world.end();
}

#[test]
fn a_job_whose_keeper_is_killed_is_drained() {
    inside("ends::inner_keeper");
}

#[test]
#[ignore = "run inside an emulated node by a_job_whose_keeper_is_killed_is_drained"]
fn inner_keeper() {
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    world.start_job(world.argv("job", 300_000, "8", 0));
    let before = launches(&world.wait("the job launches", |status| launches(status) > 1));
    let file = world.base().join("state/workloads/offline-job/run.json");
    let run: Run = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    world.wait("one more kernel begins", |status| launches(status) > before);
    sys::kill(run.keeper.pid, libc::SIGKILL).unwrap();
    let exit = unharmed(&world);
    assert!(exit.all_gone && !exit.steps.is_empty(), "{exit:?}");
    world.end();
}

#[test]
fn an_agent_without_descriptors_kills_nobody() {
    inside("ends::inner_descriptors");
}

#[test]
#[ignore = "run inside an emulated node by an_agent_without_descriptors_kills_nobody"]
fn inner_descriptors() {
    let world = World::start("");
    world.start_service();
    world.start_worker_job();
    let before = world.agent().status(&world.gpu).unwrap();
    let mut files = Vec::new();
    while files.len() < descriptors::most()
        && let Ok(file) = fs::File::open("/dev/null")
    {
        files.push(file);
    }
    // Long enough for everything that looks at processes to have looked many times.
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        while let Ok(file) = fs::File::open("/dev/null") {
            files.push(file);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(files);
    let status = world.agent().status(&world.gpu).unwrap();
    assert_eq!(status.online, before.online, "the service goes on");
    assert_eq!((status.online_restarts, status.mps_starts), (0, before.mps_starts));
    assert_eq!(status.stops, before.stops, "the job was not stopped");
    assert_eq!(status.faults, before.faults, "nothing was taken for a fault");
    world.serve(10);
    world.end();
}

#[test]
fn a_control_block_cut_short_ends_its_job_and_nobody_else() {
    inside("ends::inner_torn");
}

/// The agent lives in this very process: an access of its own beyond the end of the file would be the end
/// of the test.
#[test]
#[ignore = "run inside an emulated node by a_control_block_cut_short_ends_its_job_and_nobody_else"]
fn inner_torn() {
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    // A job that can answer, and one that cannot: then it is the agent alone who sees it.
    for (part, stopped) in [(JOB_FILE, false), (JOB_FILE, true), (AGENT_FILE, false)] {
        world.start_worker_job();
        let dir = world.agent().shared(&world.gpu).unwrap().job().unwrap().block.dir().to_owned();
        let pid = world.job_pid();
        if stopped {
            sys::kill(pid, libc::SIGSTOP).unwrap();
            // What it has put on the GPU ends; a stopped process begins nothing.
            std::thread::sleep(Duration::from_millis(200));
        }
        fs::OpenOptions::new().write(true).open(dir.join(part)).unwrap().set_len(0).unwrap();
        let exit = unharmed(&world);
        assert!(exit.all_gone, "{part}, stopped: {stopped}: {exit:?}");
        world.wait("the GPU is free", |status| status.offline.is_none());
    }
    world.start_worker_job();
    world.end();
}
