//! Every fault of the emulated GPU: what the service saw, and what came of the job.

use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::sys;
use muxflow_policy::node::fault::Fault;
use muxflow_policy::node::xid::RecoveryAction;
use muxflow_types::HealthState;

use crate::world::{LONG, World, inside, now_us};

/// What breaks: words for the fault injector, or the kill of the job with a kernel in flight.
#[derive(Debug, Clone, Copy)]
enum Breaks {
    Device(&'static [&'static str]),
    KillJob,
}

/// What comes of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    GoesOn,
    /// It is stopped, for a reason with this word.
    Stopped(&'static str),
    /// What the gate leaves of it may stay, or it is stopped for a reason with this word.
    HeldBack(&'static str),
    /// It is struck itself: it leaves by itself, or is stopped for a reason with this word before.
    Leaves(&'static str),
}

/// What `docs/reliability.md` claims of a fault, in kind.
#[derive(Debug, Clone, Copy)]
struct Claim {
    job: Fate,
    /// The state of the GPU when everything has calmed down.
    gpu: HealthState,
    /// The service loses a request or its context at most; otherwise it notices nothing.
    service_pays: bool,
}

const fn claim(job: Fate, gpu: HealthState, service_pays: bool) -> Claim {
    Claim { job, gpu, service_pays }
}

use Fate::{GoesOn, HeldBack, Leaves, Stopped};
use HealthState::{Disabled, Healthy, Overlimit};

const OFF_THE_BUS: &str = "XID 79, GPU off the bus";

const FAULTS: &[(&str, Breaks, Claim)] = &[
    ("XID 13", Breaks::Device(&["xid", "13"]), claim(Leaves("xid.13"), Healthy, true)),
    ("XID 31", Breaks::Device(&["xid", "31"]), claim(Leaves("xid.31"), Healthy, true)),
    ("XID 43", Breaks::Device(&["xid", "43"]), claim(Leaves("mps"), Healthy, true)),
    ("XID 45", Breaks::Device(&["xid", "45"]), claim(Leaves("mps"), Healthy, true)),
    ("XID 48", Breaks::Device(&["xid", "48"]), claim(Leaves("xid.48"), Disabled, true)),
    ("XID 63", Breaks::Device(&["xid", "63"]), claim(GoesOn, Healthy, false)),
    ("XID 74", Breaks::Device(&["xid", "74"]), claim(Stopped("xid.74"), Disabled, false)),
    (OFF_THE_BUS, Breaks::Device(&["off-bus"]), claim(Leaves(""), Disabled, true)),
    ("XID 94", Breaks::Device(&["xid", "94"]), claim(Leaves("xid.94"), Healthy, true)),
    ("XID 95", Breaks::Device(&["xid", "95"]), claim(Leaves("xid.95"), Disabled, true)),
    (
        "XID 154, asks for a reset",
        Breaks::Device(&["xid", "154"]),
        claim(Stopped("recovery.gpu-reset"), Disabled, false),
    ),
    (
        "job killed (SIGKILL) with a kernel in flight",
        Breaks::KillJob,
        claim(Leaves(""), Healthy, true),
    ),
    ("MPS server crashes", Breaks::Device(&["mps-crash"]), claim(Leaves("mps"), Healthy, true)),
    (
        "MPS hangs: new clients hang in `cuInit`",
        Breaks::Device(&["mps-hang"]),
        claim(Stopped("mps.hang"), Healthy, true),
    ),
    (
        "clock throttled to 600 MHz",
        Breaks::Device(&["throttle", "600"]),
        // A low clock counts only on a busy GPU, which it may not be at a gate nearly shut.
        claim(HeldBack("Overlimit"), Overlimit, false),
    ),
    (
        "memory burst of somebody else, 14.5 GiB",
        Breaks::Device(&["memory-burst", "14848"]),
        claim(Stopped("Overlimit"), Overlimit, false),
    ),
    (
        "NVML calls block",
        Breaks::Device(&["nvml-block"]),
        claim(Stopped("Overlimit"), Overlimit, false),
    ),
    (
        "NVML calls fail",
        Breaks::Device(&["nvml-error", "999"]),
        claim(Stopped("Overlimit"), Overlimit, false),
    ),
];

/// Those that cost the service its context, which the test command runs.
const WORST: [&str; 5] = [
    "XID 13",
    "XID 94",
    "XID 95",
    "MPS server crashes",
    "job killed (SIGKILL) with a kernel in flight",
];

/// For how long all must be as claimed before a fault is watched no longer.
const CALM_FOR: Duration = Duration::from_millis(1_500);

/// At the end of the time that a fault is watched, the service must be back.
const BACK_FOR: Duration = Duration::from_secs(5);

/// A hang is found within the time that a fault is watched.
const SHORT_PROBES: &str = "[mps]\nprobe_every_s = 2\nprobe_within_ms = 1500\n";

/// How long each fault is watched: long enough for what is decided after ten seconds of silence.
const WATCHED: Duration = Duration::from_secs(14);

#[test]
#[ignore = "prints the table of docs/reliability.md: cargo xtask reliability"]
fn the_table_of_faults() {
    inside("faults::inner_table");
}

#[test]
fn the_worst_faults_end_as_claimed() {
    inside("faults::inner_worst");
}

#[test]
#[ignore = "run inside an emulated node by the_worst_faults_end_as_claimed"]
fn inner_worst() {
    let worst = FAULTS.iter().filter(|(name, ..)| WORST.contains(name));
    assert_eq!(worst.clone().count(), WORST.len());
    for (name, breaks, claim) in worst {
        // Nothing hangs here, and on a busy machine a short probe would be taken for a hang.
        broken("", name, *breaks, *claim, LONG, CALM_FOR);
    }
}

/// All is as it will be: the job has left, the GPU is in its last state and the service serves.
fn is_calm(world: &World, claim: Claim) -> bool {
    let status = world.agent().status(&world.gpu).unwrap();
    let serves = world.served_since(now_us().saturating_sub(500_000)).count() > 0;
    status.health == claim.gpu && status.offline.is_none() && serves
}

/// Breaks it and watches it for so long, or until it was calm for so long.
fn broken(
    settings: &str,
    name: &str,
    breaks: Breaks,
    claim: Claim,
    watched: Duration,
    calm_for: Duration,
) {
    let world = World::start(settings);
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
    let (mut job, mut left) = ("goes on".to_owned(), None);
    let until = Instant::now() + watched;
    let mut restless = Instant::now();
    while Instant::now() < until && restless.elapsed() < calm_for {
        if left.is_none() || !is_calm(&world, claim) {
            restless = Instant::now();
        }
        if let Some((_, Event::JobEnded { reason, requeue, .. })) =
            world.agent().next_event(Duration::from_millis(50))
        {
            assert_eq!(left, None, "{name}: the job ended twice");
            left = Some((reason.as_ref().map(ToString::to_string), requeue));
            let why = reason.map_or("ended by itself".to_owned(), |why| format!("stopped ({why})"));
            let next = if requeue { ", to be queued again" } else { "" };
            job = format!("{why}{next}");
        }
    }
    let status = world.agent().status(&world.gpu).unwrap();
    let served = world.served_since(at);
    let since_us = served.last_us.map_or(now_us() - at, |last| now_us() - last);
    let away_ms = served.gap_us.max(since_us) / 1000;
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
    println!("MEASURED | {name} | {row} |");
    let stays = matches!(claim.job, HeldBack(_)) && left.is_none();
    match (claim.job, left) {
        (GoesOn, left) => assert_eq!(left, None, "{name}"),
        (HeldBack(_), None) => {
            assert_eq!(status.health, HealthState::Unhealthy, "{name}: nothing new may come");
        }
        (Stopped(word) | HeldBack(word), Some((Some(why), true))) => {
            assert!(why.contains(word), "{name}: {why}")
        }
        (Leaves(word), Some((why, true))) => {
            // MPS may show the error of a client before the driver's line is read.
            let by_mps = |why: &str| word.starts_with("xid") && why.contains("mps.fault");
            assert!(why.is_none_or(|why| why.contains(word) || by_mps(&why)), "{name}");
        }
        (_, left) => panic!("{name}: {left:?}"),
    }
    if !stays {
        assert_eq!(status.health, claim.gpu, "{name}");
    }
    let harm = (served.errors + served.out_of_memory, status.online_restarts);
    assert!(claim.service_pays || harm == (0, 0), "{name}: the service noticed: {harm:?}");
    let back_us = u64::try_from(BACK_FOR.as_micros()).unwrap();
    let back = world.served_since(now_us() - back_us).count() > 0;
    assert_eq!(back, name != OFF_THE_BUS, "{name}: the service serves at the end");
    // What was broken stays broken: the next one needs a new GPU.
    world.fault(&["reset"]);
    world.end();
}

#[test]
#[ignore = "run inside an emulated node by the_table_of_faults"]
fn inner_table() {
    // One row again, by a part of its name.
    let only = std::env::var("MUXFLOW_TEST_ONLY").unwrap_or_default();
    for (name, breaks, claim) in FAULTS.iter().filter(|(name, ..)| name.contains(&only)) {
        broken(SHORT_PROBES, name, *breaks, *claim, WATCHED, WATCHED);
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
    // The job has all of its time: its end is told after the answer.
    let alert = world.event("a person is told", |event| matches!(event, Event::Alert(_)));
    assert!(matches!(&alert, Event::Alert(text) if text.contains("disabled")), "{alert:?}");
    let ended = world.event("the job is stopped", |e| matches!(e, Event::JobEnded { .. }));
    let Event::JobEnded { reason, requeue, .. } = ended else { unreachable!() };
    let asked = Fault::Recovery(RecoveryAction::GpuReset);
    assert_eq!(
        reason,
        Some(StopReason::Fault(asked)),
        "the log line says what the driver asks for"
    );
    assert!(requeue, "the job is not to blame");
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
    // Once more, and reset before anybody has asked the driver what it wants.
    world.fault(&["xid", "154"]);
    world.wait("disabled again", |status| status.health == HealthState::Disabled);
    world.fault(&["reset"]);
    world.wait("it has returned again", |status| status.health == HealthState::Healthy);
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
    let (from, began) = (now_us(), Instant::now());
    world.fault(&["nvml-error", "999"]);
    world.wait("the gate is shut", |status| status.budget == 0.0);
    let failures = || world.agent().shared(&world.gpu).unwrap().monitor.published().failures;
    assert!(failures() > 0, "they are counted");
    world.fault(&["nvml-error", "0"]);
    world.opens_again(began);
    let served = world.served_since(from);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}

#[test]
fn a_job_that_breaks_the_gpu_three_times_is_fail_prone() {
    inside("faults::inner_culprit");
}

#[test]
#[ignore = "run inside an emulated node by a_job_that_breaks_the_gpu_three_times_is_fail_prone"]
fn inner_culprit() {
    let dir = tempfile::tempdir().unwrap();
    // The third time is under another agent: who was to blame is remembered.
    let mut told = Vec::new();
    for times in [2, 2] {
        let world = World::start_in(dir.path(), "");
        for _ in 0..times {
            let mut job = world.argv("job", 500, "8", 0);
            job.push("stubborn".into());
            world.start_job(job);
            world.wait("the job launches", |status| {
                status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 20)
            });
            world.fault(&["--pid", &world.job_pid().to_string(), "xid", "31"]);
            let ended = world.event("it is stopped", |e| matches!(e, Event::JobEnded { .. }));
            let Event::JobEnded { reason, fail_prone, blamed, .. } = ended else { unreachable!() };
            assert!(blamed, "the line that names it was there when its end was told");
            // MPS shows the same error, and may be the first to do so.
            let faults = [Fault::Xid(31), Fault::MpsFault].map(|f| Some(StopReason::Fault(f)));
            assert!(faults.contains(&reason), "{reason:?}");
            told.push(fail_prone);
            world.event("it is answered", |event| matches!(event, Event::Fault { .. }));
        }
        world.end();
    }
    assert_eq!(told, [false, false, true, true]);
}
