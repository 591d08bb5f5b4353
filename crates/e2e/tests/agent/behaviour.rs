//! What the agent does about bursts, errors, blocked sensors and jobs that slip away.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_agent::monitor::ActivitySource;
use muxflow_policy::node::fault::{Action, Fault};
use muxflow_types::HealthState;

use crate::world::{World, inside, now_us, rounds};

#[test]
fn a_job_shares_the_gpu_and_leaves_on_a_burst() {
    inside("behaviour::inner_burst");
}

#[test]
#[ignore = "run inside an emulated node by a_job_shares_the_gpu_and_leaves_on_a_burst"]
fn inner_burst() {
    let world = World::start("");
    world.start_service();
    let status = world.wait("healthy", |status| status.health == HealthState::Healthy);
    assert_eq!(status.source, ActivitySource::Dcgm);
    assert!(status.attach.is_some_and(|(attached, _)| attached));
    world.start_worker_job();
    let page = world.page();
    assert!(page.contains("muxflow_job_launches_total{gpu=\"") && page.contains("job=\"job\""));
    // The service now wants the whole GPU, and more than that.
    let began = Instant::now();
    let more = world.burst();
    world.wait("the gate is shut", |status| status.budget == 0.0);
    let shut = began.elapsed();
    let ended = world.event("the job is evicted", |event| matches!(event, Event::JobEnded { .. }));
    let gone = began.elapsed();
    let Event::JobEnded { reason, exit, requeue, .. } = ended else { unreachable!() };
    assert!(matches!(reason, Some(StopReason::Health(_))), "{reason:?}");
    assert!(requeue && exit.all_gone, "{exit:?}");
    println!(
        "MEASURED burst: gate shut after {} ms, job gone after {} ms",
        shut.as_millis(),
        gone.as_millis()
    );
    more.end();
    assert!(shut < Duration::from_secs(5) && gone < Duration::from_secs(20));
    assert!(world.agent().status(&world.gpu).unwrap().online.is_some(), "online is unharmed");
    assert_eq!(world.restarts(), 0, "online is unharmed");
    world.end();
}

#[test]
fn errors_are_answered_online_first() {
    inside("behaviour::inner_errors");
}

#[test]
#[ignore = "run inside an emulated node by errors_are_answered_online_first"]
fn inner_errors() {
    let world = World::start("");
    world.start_service();
    let mut job = world.argv("job", 500, "8", 0);
    job.push("stubborn".into());
    world.start_job(job);
    world.wait("the job launches", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 100)
    });

    // A fatal fault of the job: everybody's context is lost, the service is back first.
    let at = now_us();
    world.fault(&["--pid", &world.job_pid().to_string(), "xid", "31"]);
    let (mut told, mut answer) = (Vec::new(), None);
    world.event("the XID is answered", |event| {
        told.push(event.clone());
        if let Event::Fault { seen, actions, took } = event
            // MPS may show it before the driver's line is read.
            && matches!(seen.fault, Fault::Xid(31) | Fault::MpsFault)
        {
            answer = Some((actions.clone(), *took));
        }
        answer.is_some()
    });
    let (actions, took) = answer.unwrap();
    let place = |wanted| actions.iter().position(|action| *action == wanted).unwrap();
    assert!(place(Action::RestartOnline) < place(Action::RestartJob), "{actions:?}");
    let last = |wanted: fn(&Event) -> bool| told.iter().rposition(wanted);
    let job_out = last(|event| matches!(event, Event::JobEnded { requeue: true, .. }));
    let service_back = last(|event| matches!(event, Event::OnlineStarted { adopted: false, .. }));
    // The answer is the last of all that was told, so the service was back when it came.
    assert!(
        job_out.is_some() && job_out < service_back,
        "the job goes, the service comes: {told:?}"
    );
    assert!(!told.iter().any(|event| matches!(event, Event::JobStarted { .. })), "{told:?}");
    world.serve(10);
    world.wait("healthy again", |s| s.health == HealthState::Healthy && s.online.is_some());
    println!(
        "MEASURED xid 31: answered in {} ms, longest gap of the service {} ms",
        took.0 / 1000,
        world.served_since(at).gap_us / 1000
    );

    // The device is gone and comes back: Disabled, then Healthy, nothing restarted by hand.
    world.start_worker_job();
    world.fault(&["off-bus"]);
    world.wait("disabled", |status| {
        status.health == HealthState::Disabled && status.offline.is_none() && !status.placeable
    });
    let ended = world.event("the job is stopped", |event| matches!(event, Event::JobEnded { .. }));
    assert!(matches!(ended, Event::JobEnded { requeue: true, .. }), "{ended:?}");
    world.fault(&["reset"]);
    world.wait("it has returned", |status| status.health == HealthState::Healthy);
    world.serve(10);
    world.start_worker_job();
    world.end();
}

#[test]
fn sensors_that_block_close_the_gate() {
    inside("behaviour::inner_blocked");
}

#[test]
#[ignore = "run inside an emulated node by sensors_that_block_close_the_gate"]
fn inner_blocked() {
    let world = World::start("");
    world.start_service();
    world.start_worker_job();
    let began = Instant::now();
    world.fault(&["nvml-block"]);
    world.wait("the gate is shut", |status| status.budget == 0.0);
    println!("MEASURED nvml-block: gate shut after {} ms", began.elapsed().as_millis());
    world.fault(&["nvml-unblock"]);
    world.opens_again(began);
    world.end();
}

#[test]
fn a_job_that_slips_the_interposer_is_stopped() {
    inside("behaviour::inner_stranger");
}

#[test]
#[ignore = "run inside an emulated node by a_job_that_slips_the_interposer_is_stopped"]
fn inner_stranger() {
    let world = World::start("");
    // Killed in the middle of a kernel, such a job would take the service along.
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    // Twice is not yet often.
    for (times, way) in ["-u LD_PRELOAD", "LD_PRELOAD=", "-u LD_PRELOAD"].iter().enumerate() {
        world.wait("the GPU takes a job", |status| status.placeable && status.share.is_some());
        let mut argv = world.argv("job", 300_000, "8", 0);
        argv.splice(0..0, ["env"].into_iter().chain(way.split(' ')).map(String::from));
        let began = Instant::now();
        world.start_job(argv);
        let ended = world.event("it is stopped", |event| matches!(event, Event::JobEnded { .. }));
        let Event::JobEnded { reason, fail_prone, blamed, .. } = ended else { unreachable!() };
        assert_eq!(reason, Some(StopReason::Fault(Fault::UngatedProcess)), "{way}");
        assert!(blamed, "it waits before it runs again");
        assert_eq!(fail_prone, times == 2, "blamed the {times}. time before: {way}");
        println!("MEASURED stranger, {way}: stopped after {} ms", began.elapsed().as_millis());
    }
    world.serve(10);
    assert_eq!(world.restarts(), 0, "its stop harms nobody");
    world.end();
}

#[test]
fn a_host_in_distress_evicts_the_job() {
    inside("behaviour::inner_host");
}

/// The kernel's files of a host, as a test wants them.
pub(crate) fn write_host(dir: &Path, available_kib: u64, kswapd_ticks: u64, pressure: f64) {
    fs::create_dir_all(dir.join("pressure")).unwrap();
    fs::create_dir_all(dir.join("61")).unwrap();
    let replace = |name: &str, text: String| {
        let beside = dir.join("new");
        fs::write(&beside, text).unwrap();
        fs::rename(&beside, dir.join(name)).unwrap();
    };
    replace("meminfo", format!("MemTotal: 1000000 kB\nMemAvailable: {available_kib} kB\n"));
    let full = format!("full avg10={pressure:.2} avg60=0.00 avg300=0.00 total=0\n");
    replace("pressure/memory", full);
    replace("61/comm", "kswapd0\n".into());
    let stat = format!("61 (kswapd0) S 2 0 0 0 -1 0 0 0 0 0 0 {kswapd_ticks} 0 0 20 0 1 0 12 0 0");
    replace("61/stat", stat);
}

#[test]
#[ignore = "run inside an emulated node by a_host_in_distress_evicts_the_job"]
fn inner_host() {
    let dir = tempfile::tempdir().unwrap();
    write_host(dir.path(), 500_000, 0, 0.0);
    let settings = format!(
        "[host]\nproc = '{}'\nkswapd_for_s = 1\npressure_for_s = 1\ncalm_for_s = 1\n",
        dir.path().display()
    );
    let world = World::start(&settings);
    world.start_service();
    let from = now_us();
    let mut ticks = 0;
    for (sign, words) in [("memory", "host memory"), ("kswapd", "kswapd"), ("pressure", "pressure")]
    {
        world.start_worker_job();
        let ended = loop {
            match sign {
                "memory" => write_host(dir.path(), 10_000, ticks, 0.0),
                // Busy all the time, by its own count.
                "kswapd" => {
                    ticks += 5;
                    write_host(dir.path(), 500_000, ticks, 0.0);
                }
                _ => write_host(dir.path(), 500_000, ticks, 60.0),
            }
            match world.agent().next_event(Duration::from_millis(50)) {
                Some((_, ended @ Event::JobEnded { .. })) => break ended,
                _ => assert!(now_us() - from < 120_000_000, "{sign} evicts nobody"),
            }
        };
        let Event::JobEnded { reason: Some(StopReason::Host(why)), requeue, .. } = ended else {
            panic!("{sign}: {ended:?}")
        };
        assert!(why.contains(words) && requeue, "{sign}: {why}");
        assert!(!world.agent().status(&world.gpu).unwrap().placeable, "nothing is placed now");
        write_host(dir.path(), 500_000, ticks, 0.0);
    }
    let served = world.served_since(from);
    assert_eq!((served.errors, world.restarts()), (0, 0), "the service noticed nothing");
    world.end();
}

#[test]
fn watching_a_gpu_costs_little_and_memory_stays_flat() {
    inside("behaviour::inner_cost");
}

#[test]
#[ignore = "run inside an emulated node by watching_a_gpu_costs_little_and_memory_stays_flat"]
fn inner_cost() {
    let world = World::start("history_s = 2\n");
    world.start_service();
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    // The ring is full and everything is warm.
    std::thread::sleep(Duration::from_secs(3));
    let own = || {
        let stat = muxflow_agent::process::stat(std::process::id()).unwrap();
        let statm = fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        (stat.cpu_ticks, pages)
    };
    let samples = || world.agent().shared(&world.gpu).unwrap().monitor.published().count;
    let (began, (ticks, pages), count) = (Instant::now(), own(), samples());
    std::thread::sleep(Duration::from_secs(rounds(6).max(6).into()));
    let (elapsed, (ticks_after, pages_after)) = (began.elapsed(), own());
    let taken = samples() - count;
    let busy_ms = (ticks_after - ticks) * 10;
    println!(
        "MEASURED cost: {busy_ms} ms of processor in {} ms for one GPU, {taken} samples, memory {} to {} KiB",
        elapsed.as_millis(),
        pages * 4,
        pages_after * 4
    );
    assert!(taken > 100, "samples go on");
    // Three to five per cent of a core in a debug build; the loops are at their beat and not busy.
    let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap();
    assert!(busy_ms * 100 < elapsed_ms * 25, "{busy_ms} ms of processor in {elapsed_ms} ms");
    assert!(pages_after <= pages + 512, "memory grows: {pages} to {pages_after} pages");
    world.end();
}
