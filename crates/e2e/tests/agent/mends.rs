//! Errors upon errors: a repair that fails, a GPU that is mended while nobody looks, one that is gone
//! among others, and a node without MPS.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muxflow_agent::agent::wait_status;
use muxflow_agent::gpu::{Event, GpuStatus, Order, StopReason};
use muxflow_agent::stop::{Step, StopLimits};
use muxflow_agent::sys;
use muxflow_e2e::build::must;
use muxflow_policy::node::fault::Fault;
use muxflow_types::HealthState;

use crate::world::{LONG, World, inside, inside_with, variable};

fn fault(words: &[&str]) {
    must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(words));
}

#[test]
fn an_error_that_spares_the_service_leaves_the_job_its_time() {
    inside("mends::inner_spared");
}

#[test]
#[ignore = "run inside an emulated node by an_error_that_spares_the_service_leaves_the_job_its_time"]
fn inner_spared() {
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    // A kernel of 3 s is in flight; killed before its end it would take the service down.
    let mut spec = World::spec(world.argv("job", 3_000_000, "8", 0));
    spec.stop.drain_ms = 20_000;
    world.start_job_as(spec);
    let launches = |s: &GpuStatus| s.offline.as_ref().map_or(0, |(_, counts)| counts.launches);
    let before = launches(&world.wait("the job launches", |status| launches(status) > 0));
    world.wait("one more kernel begins", |status| launches(status) > before);
    world.fault(&["xid", "74"]);
    let ended = world.event("the job leaves", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { reason, exit, blamed, .. } = ended else { unreachable!() };
    assert_eq!(reason, Some(StopReason::Fault(Fault::Xid(74))));
    assert!(!blamed, "nobody is to blame for a link");
    let drain = exit.steps.iter().find(|taken| taken.step == Step::Drain);
    assert!(drain.is_some_and(|drain| !drain.timed_out), "{exit:?}");
    world.wait("disabled", |status| status.health == HealthState::Disabled);
    world.serve(20);
    assert_eq!(world.restarts(), 0, "the service noticed nothing");
    world.end();
}

#[test]
fn a_server_that_hangs_while_the_gpu_waits_for_it_is_replaced() {
    inside("mends::inner_hang_again");
}

#[test]
#[ignore = "run inside an emulated node by a_server_that_hangs_while_the_gpu_waits_for_it_is_replaced"]
fn inner_hang_again() {
    let world = World::start("[mps]\nprobe_within_ms = 1500\n");
    world.start_service();
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    let starts = world.agent().status(&world.gpu).unwrap().mps_starts;
    // From here on, whoever comes hangs, also at the server that the answer starts.
    let pid = world.agent().status(&world.gpu).unwrap().online.unwrap().1.to_string();
    world.fault(&["--pid", &pid, "xid", "31"]);
    world.wait("its server was replaced", |status| status.mps_starts > starts);
    let again = world.agent().status(&world.gpu).unwrap().mps_starts;
    // Until the new server is hit: it comes with its first client.
    world.until("the new server hangs", || {
        let hang = Command::new(variable("MUXFLOW_TEST_FAULT")).arg("mps-hang").output().unwrap();
        hang.status.success()
    });
    world.wait("it was replaced again, or had let everybody in", |status| {
        status.mps_starts > again || status.health == HealthState::Healthy
    });
    world.wait("healthy again", |s| s.health == HealthState::Healthy && s.online.is_some());
    world.serve(10);
    world.end();
}

#[test]
fn a_gpu_that_is_reset_while_no_agent_runs_returns() {
    inside("mends::inner_reset_unseen");
}

#[test]
#[ignore = "run inside an emulated node by a_gpu_that_is_reset_while_no_agent_runs_returns"]
fn inner_reset_unseen() {
    let dir = tempfile::tempdir().unwrap();
    let world = World::start_in(dir.path(), "");
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    world.fault(&["xid", "154"]);
    world.wait("disabled", |status| status.health == HealthState::Disabled);
    world.end();
    // Not mended: it stays as it is.
    let world = World::start_in(dir.path(), "");
    world.wait("still disabled", |status| status.health == HealthState::Disabled);
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(world.agent().status(&world.gpu).unwrap().health, HealthState::Disabled);
    world.end();
    fault(&["reset"]);
    let world = World::start_in(dir.path(), "");
    world.wait("it has returned", |status| status.health == HealthState::Healthy);
    // Reset at once, before anybody could read what the driver asks for.
    world.fault(&["xid", "48"]);
    world.fault(&["reset"]);
    world.wait("disabled", |status| status.transitions.contains_key(&HealthState::Disabled));
    world.wait("it has returned again", |status| status.health == HealthState::Healthy);
    world.end();
}

#[test]
fn a_daemon_that_dies_while_no_agent_runs_leaves_nobody_on_another_server() {
    inside("mends::inner_daemon_unseen");
    inside("mends::inner_daemon_unseen_disabled");
}

#[test]
#[ignore = "run inside an emulated node by a_daemon_that_dies_while_no_agent_runs_leaves_nobody_on_another_server"]
fn inner_daemon_unseen() {
    let dir = tempfile::tempdir().unwrap();
    let world = daemon_unseen(dir.path(), |_| {});
    world.start_worker_job();
    world.end();
}

/// What a GPU waits for is not forgotten over that: a client that gets in is no reset.
#[test]
#[ignore = "run inside an emulated node by a_daemon_that_dies_while_no_agent_runs_leaves_nobody_on_another_server"]
fn inner_daemon_unseen_disabled() {
    let disabled = |status: &GpuStatus| status.health == HealthState::Disabled;
    let dir = tempfile::tempdir().unwrap();
    let world = daemon_unseen(dir.path(), |world| {
        world.fault(&["xid", "154"]);
        world.wait("disabled", disabled);
    });
    world.wait("still disabled", disabled);
    // Longer than it takes a client to show that MPS is well.
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        let status = world.agent().status(&world.gpu).unwrap();
        assert!(disabled(&status), "enabled without a reset: {status:#?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    world.fault(&["reset"]);
    world.wait("back after a reset", |status| status.health == HealthState::Healthy);
    world.end();
}

/// The daemon of a service is killed while no agent runs; the next agent answers for it.
fn daemon_unseen(dir: &Path, before: impl Fn(&World)) -> World {
    let mut world = World::start_in(dir, "");
    // It stays when its context is lost: nobody sees that from outside.
    let mut service = world.argv("service", 2_000, "16", 20_000);
    service.push("stubborn".into());
    world.start_service_as(service);
    world.serve(5);
    before(&world);
    let memory = world.mps_pipe().with_file_name("daemon.json");
    world.agent.take().unwrap().shutdown();
    let memory: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(memory).unwrap()).unwrap();
    let daemon = u32::try_from(memory["daemon"]["pid"].as_u64().unwrap()).unwrap();
    sys::kill(daemon, libc::SIGKILL).unwrap();
    let world = World::start_in(dir, "");
    let answered = world.event("it is answered", |event| matches!(event, Event::Fault { .. }));
    let Event::Fault { seen, .. } = answered else { unreachable!() };
    assert_eq!(seen.fault, Fault::MpsCrash);
    world.serve(5);
    assert_eq!((world.restarts(), world.services_alive()), (1, 1));
    world
}

#[test]
fn a_service_that_outlives_its_context_is_renewed_after_a_reset() {
    inside("mends::inner_renewed");
}

#[test]
#[ignore = "run inside an emulated node by a_service_that_outlives_its_context_is_renewed_after_a_reset"]
fn inner_renewed() {
    let world = World::start("");
    let mut service = world.argv("service", 2_000, "16", 20_000);
    service.push("stubborn".into());
    world.start_service_as(service);
    world.serve(5);
    world.fault(&["xid", "154"]);
    world.wait("disabled", |status| status.health == HealthState::Disabled);
    world.serve(5);
    assert_eq!(world.restarts(), 0, "it goes on until the reset");
    world.fault(&["reset"]);
    world.wait("it has returned", |status| status.health == HealthState::Healthy);
    world.serve(20);
    assert_eq!((world.restarts(), world.services_alive()), (1, 1));
    world.end();
}

#[test]
fn what_came_while_no_agent_ran_is_found_by_the_next() {
    inside("mends::inner_asked_unseen");
    inside("mends::inner_hang_unseen");
}

/// The driver asks for a reset, and nobody reads the line in which it says so.
#[test]
#[ignore = "run inside an emulated node by what_came_while_no_agent_ran_is_found_by_the_next"]
fn inner_asked_unseen() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::start_in(dir.path(), "");
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    world.agent.take().unwrap().shutdown();
    fault(&["xid", "154"]);
    let world = World::start_in(dir.path(), "");
    world.wait("disabled", |status| status.health == HealthState::Disabled && !status.placeable);
    world.fault(&["reset"]);
    world.wait("it has returned", |status| status.health == HealthState::Healthy);
    world.start_worker_job();
    world.end();
}

/// MPS hangs: found by the first client that is tried, not by the second a minute later.
#[test]
#[ignore = "run inside an emulated node by what_came_while_no_agent_ran_is_found_by_the_next"]
fn inner_hang_unseen() {
    let dir = tempfile::tempdir().unwrap();
    let settings = "[mps]\nprobe_every_s = 3600\n";
    let mut world = World::start_in(dir.path(), settings);
    world.start_service();
    world.serve(5);
    world.agent.take().unwrap().shutdown();
    fault(&["mps-hang"]);
    let world = World::start_in(dir.path(), settings);
    let answered = world.event("it is answered", |event| matches!(event, Event::Fault { .. }));
    let Event::Fault { seen, .. } = answered else { unreachable!() };
    assert_eq!(seen.fault, Fault::MpsHang);
    world.serve(20);
    world.end();
}

#[test]
fn one_gpu_that_is_gone_does_not_stop_the_others() {
    inside_with("t4x4", "mends::inner_one_gone");
}

#[test]
#[ignore = "run inside an emulated node by one_gpu_that_is_gone_does_not_stop_the_others"]
fn inner_one_gone() {
    fault(&["--gpu", "1", "off-bus"]);
    let world = World::start("");
    let agent = world.agent();
    assert_eq!(agent.gpus().len(), 3, "{:?}", agent.gpus());
    assert!(
        agent.absent().len() == 1 && agent.absent()[0].1.contains("GPU 1"),
        "{:?}",
        agent.absent()
    );
    // Numbers are those of the driver.
    assert_eq!(agent.find_gpu("1"), None);
    assert_eq!(agent.find_gpu("2"), Some(agent.gpus()[1].as_str()));
    for gpu in agent.gpus() {
        let healthy = wait_status(agent, gpu, LONG, |s| s.health == HealthState::Healthy);
        assert!(healthy.is_some(), "{gpu}: {:?}", agent.status(gpu));
    }
    let alert = world.event("a person is told", |event| matches!(event, Event::Alert(_)));
    assert!(matches!(&alert, Event::Alert(text) if text.contains("GPU 1")), "{alert:?}");
    // Errors of the others are seen: from the log and from NVML, which has no events of the lost.
    world.fault(&["xid", "154"]);
    world.wait("disabled", |status| status.health == HealthState::Disabled);
    let output = Command::new(variable("MUXFLOW_TEST_BUILT").join("muxflow"))
        .args(["doctor", "--config"])
        .arg(world.base().join("agent.toml"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains("BAD   GPU 1"), "{said}");
    for gpu in agent.gpus() {
        assert!(said.contains(gpu), "{gpu} is not in {said}");
    }
    world.end();
}

#[test]
fn without_mps_the_service_runs_and_no_job_does() {
    inside("mends::inner_no_mps");
}

#[test]
#[ignore = "run inside an emulated node by without_mps_the_service_runs_and_no_job_does"]
fn inner_no_mps() {
    let world = World::start("[mps]\nprogram = '/no/such/program'\n");
    world.start_service();
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    world.serve(10);
    let why = world.refused(World::spec(world.argv("job", 500, "8", 0)));
    assert!(why.contains("MPS does not run") && why.contains("/no/such/program"), "{why}");
    assert!(!world.agent().status(&world.gpu).unwrap().placeable);
    world.end();
}

#[test]
fn a_stop_by_force_is_followed_by_a_probe() {
    inside("mends::inner_forced");
}

#[test]
#[ignore = "run inside an emulated node by a_stop_by_force_is_followed_by_a_probe"]
fn inner_forced() {
    let world = World::start("[mps]\nprobe_every_s = 3600\n");
    world.start_service();
    let mut spec = World::spec(world.argv("job", 500, "8", 0));
    spec.stop = StopLimits {
        drain_ms: 200,
        checkpoint_ms: 200,
        release_ms: 200,
        terminate_ms: 500,
        ..StopLimits::default()
    };
    world.start_job_as(spec);
    world.wait("the job launches", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 20)
    });
    let before = world.agent().status(&world.gpu).unwrap().attach;
    sys::kill(world.job_pid(), libc::SIGSTOP).unwrap();
    let order = Order::StopOffline { job: None, reason: StopReason::Asked };
    world.agent().order(&world.gpu, order).unwrap();
    let ended = world.event("the job leaves", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { exit, .. } = ended else { unreachable!() };
    assert!(exit.steps.iter().any(|taken| taken.timed_out), "{exit:?}");
    world.wait("a client has tried", |status| status.attach != before);
    world.serve(5);
    world.end();
}

#[test]
fn a_job_that_must_leave_passes_a_flood_of_errors() {
    inside("mends::inner_flood");
}

#[test]
#[ignore = "run inside an emulated node by a_job_that_must_leave_passes_a_flood_of_errors"]
fn inner_flood() {
    // Clients may take long on a machine that is busy, and that is no hang.
    let world = World::start("[mps]\nprobe_within_ms = 30000\n");
    world.start_service();
    world.start_worker_job();
    let shared = world.agent().shared(&world.gpu).unwrap();
    let line = format!("[    1.0] NVRM: Xid (PCI:{}): 45, Ch 00000010\n", shared.facts.pci);
    let log = variable("MUXFLOW_EMULATED_DIR").join("kernel.log");
    let seen = |status: &GpuStatus| status.faults.get("xid.45").copied().unwrap_or(0);
    let (done, written) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        // Each line asks for a client that attaches, and they come faster than that takes.
        let flood = scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let mut log = std::fs::OpenOptions::new().append(true).open(&log).unwrap();
                log.write_all(line.as_bytes()).unwrap();
                written.fetch_add(1, Ordering::AcqRel);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let left = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.wait("errors are answered", |status| seen(status) > 3);
            world.until("a flood has come", || written.load(Ordering::Acquire) > 20);
            world.fault(&["memory-burst", "14848"]);
            world.event("the job leaves", |event| matches!(event, Event::JobEnded { .. }))
        }));
        done.store(true, Ordering::Release);
        flood.join().unwrap();
        let Ok(Event::JobEnded { reason, requeue, .. }) = left else { panic!("it stays") };
        assert!(matches!(reason, Some(StopReason::Health(_))) && requeue, "{reason:?}");
    });
    world.fault(&["memory-burst", "0"]);
    world.serve(10);
    assert_eq!(world.restarts(), 0, "the service noticed nothing");
    world.end();
}
