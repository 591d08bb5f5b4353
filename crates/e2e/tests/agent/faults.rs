//! Every fault of the emulated GPU: what the service saw, and what came of the job.

use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::sys;
use muxflow_policy::node::fault::Fault;
use muxflow_policy::node::xid::RecoveryAction;
use muxflow_types::HealthState;

use crate::world::{World, inside, now_us};

/// What breaks: words for the fault injector, or the kill of the job with a kernel in flight.
#[derive(Debug, Clone, Copy)]
enum Breaks {
    Device(&'static [&'static str]),
    KillJob,
}

const FAULTS: &[(&str, Breaks)] = &[
    ("XID 13", Breaks::Device(&["xid", "13"])),
    ("XID 31", Breaks::Device(&["xid", "31"])),
    ("XID 43", Breaks::Device(&["xid", "43"])),
    ("XID 45", Breaks::Device(&["xid", "45"])),
    ("XID 48", Breaks::Device(&["xid", "48"])),
    ("XID 63", Breaks::Device(&["xid", "63"])),
    ("XID 74", Breaks::Device(&["xid", "74"])),
    ("XID 79, GPU off the bus", Breaks::Device(&["off-bus"])),
    ("XID 94", Breaks::Device(&["xid", "94"])),
    ("XID 95", Breaks::Device(&["xid", "95"])),
    ("XID 154, asks for a reset", Breaks::Device(&["xid", "154"])),
    ("job killed (SIGKILL) with a kernel in flight", Breaks::KillJob),
    ("MPS server crashes", Breaks::Device(&["mps-crash"])),
    ("MPS hangs: new clients hang in `cuInit`", Breaks::Device(&["mps-hang"])),
    ("clock throttled to 600 MHz", Breaks::Device(&["throttle", "600"])),
    ("memory burst of somebody else, 14.5 GiB", Breaks::Device(&["memory-burst", "14848"])),
    ("NVML calls block", Breaks::Device(&["nvml-block"])),
    ("NVML calls fail", Breaks::Device(&["nvml-error", "999"])),
];

/// How long each fault is watched: long enough for what is decided after ten seconds of silence.
const WATCHED: Duration = Duration::from_secs(14);

#[test]
#[ignore = "prints the table of docs/reliability.md: cargo xtask reliability"]
fn the_table_of_faults() {
    inside("faults::inner_table");
}

fn broken(breaks: Breaks) -> String {
    let world = World::start("[mps]\nprobe_every_s = 2\nprobe_within_ms = 1500\n");
    world.start_service();
    match breaks {
        Breaks::Device(_) => world.start_worker_job(),
        Breaks::KillJob => {
            world.fault(&["kill-propagates", "100"]);
            world.start_job(world.argv("job", 300_000, "8", 0));
            world.wait("a kernel is in flight", |status| {
                status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 2)
            });
        }
    }
    let at = now_us();
    match breaks {
        // The job is named where a fault strikes one client: the one that the service must not pay for.
        Breaks::Device(words) => {
            let pid = world.job_pid().to_string();
            world.fault(&[&["--pid", &pid], words].concat());
        }
        Breaks::KillJob => sys::kill(world.job_pid(), libc::SIGKILL).unwrap(),
    }
    let mut job = "goes on".to_owned();
    let until = Instant::now() + WATCHED;
    while Instant::now() < until {
        if let Some((_, Event::JobEnded { reason, requeue, .. })) =
            world.agent().next_event(Duration::from_millis(50))
        {
            let why = reason.map_or("ended by itself".to_owned(), |why| format!("stopped ({why})"));
            let next = if requeue { ", to be queued again" } else { "" };
            job = format!("{why}{next}");
        }
    }
    let status = world.agent().status(&world.gpu).unwrap();
    let served = world.served_since(at);
    let away_ms =
        if served.count() == 0 { WATCHED.as_millis() } else { (served.gap_us / 1000).into() };
    let closed = if status.offline.is_some() && status.budget == 0.0 { ", gate shut" } else { "" };
    let row = format!(
        "{} | {}.{:02} | {} | {} | {job}{closed} | {}",
        served.errors + served.out_of_memory,
        away_ms / 1000,
        away_ms % 1000 / 10,
        served.count(),
        status.online_restarts,
        status.health
    );
    // What was broken stays broken: the next one needs a new GPU.
    world.fault(&["reset"]);
    world.end();
    row
}

#[test]
#[ignore = "run inside an emulated node by the_table_of_faults"]
fn inner_table() {
    // One row again, by a part of its name.
    let only = std::env::var("MUXFLOW_TEST_ONLY").unwrap_or_default();
    for (name, breaks) in FAULTS.iter().filter(|(name, _)| name.contains(&only)) {
        println!("MEASURED | {name} | {} |", broken(*breaks));
    }
}

#[test]
fn a_gpu_that_asks_for_a_reset_is_disabled_and_returns_by_itself() {
    inside("faults::inner_return");
}

#[test]
#[ignore = "run inside an emulated node by a_gpu_that_asks_for_a_reset_is_disabled_and_returns_by_itself"]
fn inner_return() {
    let world = World::start("");
    world.start_service();
    world.start_worker_job();
    let from = now_us();
    let mps = world.agent().status(&world.gpu).unwrap().mps_starts;
    world.fault(&["xid", "154"]);
    let ended = world.event("the job is stopped", |e| matches!(e, Event::JobEnded { .. }));
    let Event::JobEnded { reason, requeue, .. } = ended else { unreachable!() };
    let asked = Fault::Recovery(RecoveryAction::GpuReset);
    assert_eq!(
        reason,
        Some(StopReason::Fault(asked)),
        "the log line says what the driver asks for"
    );
    assert!(requeue, "the job is not to blame");
    let alert = world.event("a person is told", |event| matches!(event, Event::Alert(_)));
    assert!(matches!(&alert, Event::Alert(text) if text.contains("disabled")), "{alert:?}");
    world.wait("disabled", |status| status.health == HealthState::Disabled && !status.placeable);
    world.serve(20);
    let served = world.served_since(from);
    assert_eq!(served.errors, 0, "the service goes on beside it");
    assert_eq!(world.restarts(), 0);
    // The GPU is reset, which ends every context; nobody restarts the agent or MPS.
    world.fault(&["reset"]);
    world.wait("it has returned", |status| status.health == HealthState::Healthy);
    world.serve(20);
    world.start_worker_job();
    assert_eq!(world.agent().status(&world.gpu).unwrap().mps_starts, mps, "MPS was left alone");
    world.end();
}

#[test]
fn sensors_that_fail_close_the_gate_and_let_it_open_again() {
    inside("faults::inner_nvml_fails");
}

#[test]
#[ignore = "run inside an emulated node by sensors_that_fail_close_the_gate_and_let_it_open_again"]
fn inner_nvml_fails() {
    let world = World::start("");
    world.start_service();
    world.start_worker_job();
    let from = now_us();
    world.fault(&["nvml-error", "999"]);
    world.wait("the gate is shut", |status| status.budget == 0.0);
    let failures = || world.agent().shared(&world.gpu).unwrap().monitor.published().failures;
    assert!(failures() > 0, "they are counted");
    world.fault(&["nvml-error", "0"]);
    world.wait("it opens again", |status| status.budget > 0.0 || status.offline.is_none());
    let served = world.served_since(from);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}
