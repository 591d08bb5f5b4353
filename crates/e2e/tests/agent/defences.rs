//! Every defence on and off, all else equal: with it the service is unharmed, and without it the
//! service is harmed. Otherwise the test would prove nothing about the defence.
//!
//! Times are device times, which the load of the machine does not change, and each pair is compared
//! within one run.

use std::fs;
use std::time::{Duration, Instant};

use muxflow_agent::gpu::{Event, GpuStatus, Order, StopReason};
use muxflow_agent::process::ProcessKey;
use muxflow_agent::stop::Step;
use muxflow_agent::sys;
use muxflow_types::{HealthState, SmCount, SmShare};

use crate::world::{LONG, Served, World, inside, now_us, rounds};

fn launches(status: &GpuStatus) -> u64 {
    status.offline.as_ref().map_or(0, |(_, counts)| counts.launches)
}

#[test]
fn the_launch_gate_protects_and_without_it_the_service_is_slow() {
    inside("defences::inner_gate");
}

/// A service that comes to want the whole GPU beside a job that wants half: its device time alone
/// and beside the job. Eviction is off, so that nothing but the gate can help.
fn gated(gate: bool) -> (Served, Served) {
    let (alone, beside, stays) = crowded(&format!("gate = {gate}"), &[], |world| {
        world.wait("the job launches", |status| launches(status) > 20);
    });
    assert!(stays, "the job is there");
    (alone, beside)
}

/// The same with a switch, a job that is started by these words, and what is waited for then; and
/// whether the job is still there.
fn crowded(switch: &str, by: &[&str], settle: impl Fn(&World)) -> (Served, Served, bool) {
    let world = World::start(&format!("[defences]\neviction = false\n{switch}\n"));
    let (idle_us, busy_us) = (150_000, 4_000);
    world.start_service_as(world.argv("service", 30_000, "40_o90_i90_b60", busy_us));
    world.serve(5);
    let alone = world.serve(20);
    world.pause("service", idle_us);
    let mut argv = world.argv("job", 4_000, "40_o90_i90_b60", 0);
    argv.splice(0..0, by.iter().map(|word| (*word).to_owned()));
    let mut spec = World::spec(argv);
    spec.share = SmShare::new(SmCount(20), SmCount(40)).ok();
    world.start_job_as(spec);
    settle(&world);
    world.pause("service", busy_us);
    // The gate needs a few readings to see it.
    world.serve(30);
    let beside = world.serve(40);
    let stays = world.agent().status(&world.gpu).unwrap().offline.is_some();
    world.end();
    (alone, beside, stays)
}

#[test]
#[ignore = "run inside an emulated node by the_launch_gate_protects_and_without_it_the_service_is_slow"]
fn inner_gate() {
    let (alone, with) = gated(true);
    let (_, without) = gated(false);
    let median = |served: &Served| served.device_us(50);
    println!(
        "MEASURED | launch gate | device time of a request, median | {} us alone, {} us beside the job | {} us |",
        median(&alone),
        median(&with),
        median(&without)
    );
    assert!(median(&with) * 100 < median(&alone) * 112, "the gate protects");
    assert!(median(&without) * 100 > median(&alone) * 125, "without it the service must be harmed");
}

#[test]
fn the_stop_of_ungated_jobs_protects_and_without_it_the_service_is_slow() {
    inside("defences::inner_ungated");
}

/// The same beside a job that has slipped the interposer: no gate holds it.
fn ungated(stop: bool) -> (Served, Served) {
    let by = ["env", "-u", "LD_PRELOAD"];
    let (alone, beside, stays) = crowded(&format!("ungated_stop = {stop}"), &by, |world| {
        if stop {
            world.event("it is stopped", |event| matches!(event, Event::JobEnded { .. }));
            return;
        }
        // Twice as long as it takes to be found out.
        std::thread::sleep(Duration::from_secs(5));
        assert!(world.agent().status(&world.gpu).unwrap().offline.is_some(), "it is there");
    });
    assert_eq!(stays, !stop, "the job is there while nobody stops it");
    (alone, beside)
}

#[test]
#[ignore = "run inside an emulated node by the_stop_of_ungated_jobs_protects_and_without_it_the_service_is_slow"]
fn inner_ungated() {
    let (alone, with) = ungated(true);
    let (_, without) = ungated(false);
    let median = |served: &Served| served.device_us(50);
    println!(
        "MEASURED | stop of jobs without the interposer | device time of a request, median | {} us alone, {} us after the job was found out | {} us |",
        median(&alone),
        median(&with),
        median(&without)
    );
    assert!(median(&with) * 100 < median(&alone) * 112, "the job is gone");
    assert!(median(&without) * 100 > median(&alone) * 125, "without it the service must be harmed");
}

#[test]
fn the_memory_quota_protects_and_without_it_the_service_finds_no_memory() {
    inside("defences::inner_quota");
}

/// A job that takes all the memory it gets, beside a service that needs 2 GiB for each request.
/// Eviction is off, so that nothing but the quota can help.
fn capped(quota: bool) -> Served {
    let world = World::start(&format!("[defences]\neviction = false\nquota = {quota}\n"));
    let mut service = world.argv("service", 2_000, "16", 20_000);
    service.push("scratch=2048".into());
    world.start_service_as(service);
    let mut job = world.argv("job", 500, "8", 0);
    job.push("hold=all".into());
    world.start_job(job);
    world.until("the job has all it gets", || world.job_output().contains("ready"));
    let from = now_us();
    world.until("the service has tried often", || {
        let served = world.served_since(from);
        served.count() + served.out_of_memory > 50
    });
    let served = world.served_since(from);
    world.end();
    served
}

#[test]
#[ignore = "run inside an emulated node by the_memory_quota_protects_and_without_it_the_service_finds_no_memory"]
fn inner_quota() {
    let (with, without) = (capped(true), capped(false));
    println!(
        "MEASURED | memory quota | requests that found no memory | {} of {} | {} of {} |",
        with.out_of_memory,
        with.out_of_memory + with.count(),
        without.out_of_memory,
        without.out_of_memory + without.count()
    );
    assert_eq!(with.out_of_memory, 0, "the quota protects");
    assert!(without.out_of_memory > 0, "without it the service must be harmed");
}

#[test]
fn eviction_protects_from_a_memory_burst_and_without_it_the_service_finds_no_memory() {
    inside("defences::inner_memory_burst");
}

/// The service grows until it holds nearly the whole GPU, beside a job that holds all of its quota.
fn burst(eviction: bool) -> Served {
    // 64 MiB with each request: at most 1 GiB/s where it is measured. In the test command it leaves
    // room for a machine that is busy with other tests.
    let pause_us = if rounds(0) > 0 { 60_000 } else { 120_000 };
    grown(eviction, 8_900, pause_us, &[])
}

/// It grows by so much, with so long a pause after each request, beside a job with these options more.
fn grown(eviction: bool, by_mib: usize, pause_us: u64, more: &[&str]) -> Served {
    let world = World::start(&format!("[defences]\neviction = {eviction}\n"));
    let want = world.base().join("want");
    fs::write(&want, "4096").unwrap();
    let mut service = world.argv("service", 2_000, "16", pause_us);
    service.extend(["hold=4096".into(), format!("want={}", want.display())]);
    world.start_service_as(service);
    let mut job = world.argv("job", 500, "8", 0);
    job.extend(["hold=all"].iter().chain(more).map(|word| (*word).to_owned()));
    let mut spec = World::spec(job);
    spec.stop.checkpoint_ms = 60_000;
    world.start_job_as(spec);
    world.wait("the job holds its quota", |status| {
        status.offline.as_ref().is_some_and(|(_, counts)| counts.refused > 0)
    });
    let from = now_us();
    fs::write(&want, (4_096 + by_mib).to_string()).unwrap();
    if eviction {
        let ended = world.event("the job leaves", |event| matches!(event, Event::JobEnded { .. }));
        let Event::JobEnded { reason, requeue, .. } = ended else { unreachable!() };
        assert!(matches!(reason, Some(StopReason::Health(_))) && requeue, "{reason:?}");
    }
    // Until it holds what it wants, or has been refused.
    world.until("the burst is over", || {
        let served = world.served_since(from);
        served.out_of_memory > 10 || served.count() > by_mib / 64 + 30
    });
    let served = world.served_since(from);
    world.end();
    served
}

#[test]
#[ignore = "run inside an emulated node by eviction_protects_from_a_memory_burst_and_without_it_the_service_finds_no_memory"]
fn inner_memory_burst() {
    let (with, without) = (burst(true), burst(false));
    println!(
        "MEASURED | eviction | requests of a memory burst that found no memory | {} of {} | {} of {} |",
        with.out_of_memory,
        with.out_of_memory + with.count(),
        without.out_of_memory,
        without.out_of_memory + without.count()
    );
    assert_eq!(with.out_of_memory, 0, "eviction makes room in time");
    assert!(without.out_of_memory > 0, "without it the service must be harmed");
}

#[test]
fn a_job_that_takes_long_to_save_its_state_does_not_keep_memory_from_the_service() {
    inside("defences::inner_hastened");
}

#[test]
#[ignore = "run inside an emulated node by a_job_that_takes_long_to_save_its_state_does_not_keep_memory_from_the_service"]
fn inner_hastened() {
    // It grows by 420 MiB/s and has 800 MiB left when the job is told to leave.
    let served = grown(true, 6_000, 150_000, &["save=20"]);
    assert_eq!(served.out_of_memory, 0, "the job does not keep its memory meanwhile");
}

#[test]
fn the_answer_to_errors_protects_and_without_it_the_service_stays_away() {
    inside("defences::inner_error_response");
}

/// The job has a fatal fault and does not leave, so that its MPS server lets nobody in: what the
/// service served in the next five seconds.
fn struck(error_response: bool) -> Served {
    // A job beside which the service cannot start is evicted too: here nothing else may help.
    let switches = format!("[defences]\neviction = false\nerror_response = {error_response}\n");
    let world = World::start(&switches);
    world.start_service();
    let mut job = world.argv("job", 500, "8", 0);
    job.push("stubborn".into());
    world.start_job(job);
    world.wait("the job launches", |status| launches(status) > 100);
    world.fault(&["--pid", &world.job_pid().to_string(), "xid", "31"]);
    world.until("the service was struck", || world.restarts() > 0);
    let from = now_us();
    if error_response {
        world.wait("healthy again", |s| s.health == HealthState::Healthy && s.online.is_some());
        world.until("it serves", || world.served_since(from).count() > 0);
    }
    std::thread::sleep(Duration::from_secs(5));
    let served = world.served_since(from);
    world.end();
    served
}

#[test]
#[ignore = "run inside an emulated node by the_answer_to_errors_protects_and_without_it_the_service_stays_away"]
fn inner_error_response() {
    let (with, without) = (struck(true), struck(false));
    println!(
        "MEASURED | answer to errors | requests served in the 5 s after XID 31 of the job | {} | {} |",
        with.count(),
        without.count()
    );
    assert!(with.count() > 20, "the service is back");
    assert_eq!(without.count(), 0, "without it the service must be harmed");
    let (with, without) = (hung(true), hung(false));
    println!(
        "MEASURED | answer to errors | requests served after a restart of the service while MPS hangs | {} | {} |",
        with.count(),
        without.count()
    );
    assert!(with.count() > 0, "the service is back");
    assert_eq!(without.count(), 0, "without it the service must be harmed");
}

/// MPS hangs, and the service ends by itself: what it served from then on.
fn hung(error_response: bool) -> Served {
    let switches = format!("[defences]\neviction = false\nerror_response = {error_response}\n");
    let world = World::start(&format!("{switches}[mps]\nprobe_every_s = 2\n"));
    world.start_service();
    world.serve(5);
    world.fault(&["mps-hang"]);
    let (_, pid) = world.agent().status(&world.gpu).unwrap().online.unwrap();
    sys::kill(pid, libc::SIGKILL).unwrap();
    world.until("the service was struck", || world.restarts() > 0);
    let from = now_us();
    if error_response {
        world.until("it serves", || world.served_since(from).count() > 20);
    } else {
        std::thread::sleep(Duration::from_secs(10));
    }
    let served = world.served_since(from);
    world.fault(&["reset"]);
    world.end();
    served
}

#[test]
fn the_clean_exit_protects_and_without_it_a_signal_to_the_job_harms_the_service() {
    inside("defences::inner_clean_exit");
}

/// Signals to a job in the middle of a kernel, with the interposer and without: how often the
/// service had to restart.
fn signalled(interposed: bool, rounds: usize) -> u64 {
    // The agent would find the job without the interposer out, and stop it by other means.
    let world = World::start("[defences]\nungated_stop = false\n");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    for round in 0..rounds {
        let mut argv = world.argv("job", 200_000, "8", 0);
        if !interposed {
            argv.splice(0..0, ["env".into(), "-u".into(), "LD_PRELOAD".into()]);
        }
        world.start_job(argv);
        let job = world.agent().shared(&world.gpu).unwrap();
        let pid = loop {
            let on_gpu = job.monitor.published().processes.map(|(_, pids)| pids);
            let online = world.agent().status(&world.gpu).unwrap().online.map(|(_, pid)| pid);
            let servers = |pid: &&u32| Some(**pid) != online && is_worker(**pid);
            if let Some(pid) = on_gpu.unwrap_or_default().iter().find(servers) {
                break *pid;
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        // It has a context; its kernels follow one after the other from now on.
        std::thread::sleep(Duration::from_millis(400));
        let signal = if round % 2 == 0 { libc::SIGTERM } else { libc::SIGINT };
        let job = ProcessKey::of(pid).unwrap();
        sys::kill(pid, signal).unwrap();
        world.event("the job ends", |event| matches!(event, Event::JobEnded { .. }));
        assert!(!job.is_alive());
    }
    std::thread::sleep(Duration::from_secs(1));
    let restarts = world.restarts();
    world.end();
    restarts
}

fn is_worker(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.starts_with("worker"))
}

#[test]
#[ignore = "run inside an emulated node by the_clean_exit_protects_and_without_it_a_signal_to_the_job_harms_the_service"]
fn inner_clean_exit() {
    let (with, without) = (signalled(true, 2), signalled(false, 2));
    println!(
        "MEASURED | clean exit of the interposer | restarts of the service, 2 signals to the job | {with} | {without} |"
    );
    assert_eq!(with, 0, "the interposer gives the context back first");
    assert!(without > 0, "without it the service must be harmed");
}

#[test]
fn the_clean_stop_protects_and_without_it_the_service_is_harmed() {
    inside("defences::inner_clean_stop");
}

/// Stops a job whose kill would take the service down, and says how often the service had to
/// restart.
fn stopped(clean_stop: bool) -> u64 {
    let world = World::start(&format!("[defences]\nclean_stop = {clean_stop}\n"));
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    // Long kernels, and the stop right after one has begun: it is in flight.
    world.start_job(world.argv("job", 300_000, "8", 0));
    let before = launches(&world.wait("the job launches", |status| launches(status) > 1));
    world.wait("one more kernel begins", |status| launches(status) > before);
    let order = Order::StopOffline { job: None, reason: StopReason::Asked };
    world.agent().order(&world.gpu, order).unwrap();
    world.event("the job ends", |event| matches!(event, Event::JobEnded { .. }));
    let deadline = Instant::now() + if clean_stop { Duration::from_secs(2) } else { LONG };
    while world.restarts() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
    }
    let restarts = world.restarts();
    world.end();
    restarts
}

#[test]
#[ignore = "run inside an emulated node by the_clean_stop_protects_and_without_it_the_service_is_harmed"]
fn inner_clean_stop() {
    let (with, without) = (stopped(true), stopped(false));
    println!(
        "MEASURED | clean stop | restarts of the service, job stopped with a kernel in flight | {with} | {without} |"
    );
    assert_eq!(with, 0, "with the clean order nothing happens");
    assert!(without > 0, "without it the service must be harmed, or the test proves nothing");
}

#[test]
fn a_kernel_longer_than_the_drain_is_cut_off_before_the_stop_signal() {
    inside("defences::inner_long_kernel");
}

#[test]
#[ignore = "run inside an emulated node by a_kernel_longer_than_the_drain_is_cut_off_before_the_stop_signal"]
fn inner_long_kernel() {
    let world = World::start("");
    world.fault(&["kill-propagates", "100"]);
    world.start_service();
    let mut spec = World::spec(world.argv("job", 10_000_000, "8", 0));
    spec.stop.drain_ms = 300;
    world.start_job_as(spec);
    world.wait("its kernel runs", |status| launches(status) > 0);
    let order = Order::StopOffline { job: None, reason: StopReason::Asked };
    world.agent().order(&world.gpu, order).unwrap();
    let ended = world.event("the job ends", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { exit, .. } = ended else { unreachable!() };
    let drain = exit.steps.iter().find(|taken| taken.step == Step::Drain);
    assert!(drain.is_some_and(|taken| taken.timed_out), "it was in flight: {exit:?}");
    let from = now_us();
    world.until("the service goes on", || world.served_since(from).count() > 50);
    assert_eq!((world.restarts(), world.served_since(from).errors), (0, 0), "{exit:?}");
    world.end();
}
