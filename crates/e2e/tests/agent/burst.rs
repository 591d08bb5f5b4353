//! Bursts of the service's traffic: how fast the agent gets out of the way, and what the service's
//! latency comes to with MuxFlow, alone on the GPU, and beside a job that nothing holds back.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_types::HealthState;

use crate::world::{World, inside, percentile, rounds, variable};

#[test]
#[ignore = "makes and judges rows of docs/reliability.md: cargo xtask reliability"]
fn reaction_to_bursts_beyond_the_gpu() {
    inside("burst::inner_reaction");
}

/// The service comes to want more than the whole GPU, again and again in a new world: an eviction
/// keeps its GPU from jobs for half a minute.
#[test]
#[ignore = "run inside an emulated node by reaction_to_bursts_beyond_the_gpu"]
fn inner_reaction() {
    let (mut shut_ms, mut gone_ms) = (Vec::new(), Vec::new());
    for _ in 0..rounds(10) {
        let world = World::start("");
        world.start_service();
        world.start_worker_job();
        let began = Instant::now();
        let more = world.burst();
        world.wait("the gate is shut", |status| status.budget == 0.0);
        shut_ms.push(ms(began));
        let ended = world.event("the job leaves", |event| matches!(event, Event::JobEnded { .. }));
        gone_ms.push(ms(began));
        let Event::JobEnded { reason, requeue, .. } = ended else { unreachable!() };
        assert!(matches!(reason, Some(StopReason::Health(_))) && requeue, "{reason:?}");
        more.end();
        world.end();
    }
    for (what, times) in [("gate shut", shut_ms), ("job gone", gone_ms)] {
        let at = |percent| percentile(times.iter().copied(), percent);
        println!(
            "MEASURED | burst beyond the GPU, {} times: {what} | p50 {} ms | p99 {} ms |",
            times.len(),
            at(50),
            at(99)
        );
    }
}

fn ms(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// What runs beside the service.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Beside {
    Nobody,
    JobUnderMuxFlow,
    JobUnprotected,
}

impl Beside {
    fn words(self) -> &'static str {
        match self {
            Beside::Nobody => "alone on the GPU",
            Beside::JobUnderMuxFlow => "beside a trainer, with MuxFlow",
            Beside::JobUnprotected => "beside a trainer, MPS alone",
        }
    }
}

/// Requests of the inference example: latency and device time.
#[derive(Debug, Default, Clone)]
struct Requests(Vec<(u64, u64)>);

/// What came of a service's traffic before and during the burst, and of the job beside it.
struct Through {
    before: Requests,
    during: Requests,
    /// The launch gate was shut at some time of the burst.
    shut: bool,
}

impl Requests {
    fn latency_us(&self, percent: usize) -> u64 {
        percentile(self.0.iter().map(|r| r.0), percent)
    }

    fn read(text: &str, from_us: u128, to_us: u128) -> Self {
        let line = |line: &str| {
            let mut words = line.split(' ');
            let at: u128 = words.next()?.parse().ok()?;
            let latency = words.next()?.parse().ok()?;
            let device = words.next()?.parse().ok()?;
            (from_us..to_us).contains(&at).then_some((latency, device))
        };
        Requests(text.lines().filter_map(line).collect())
    }

    fn row(&self) -> String {
        let latency = |percent| self.latency_us(percent);
        let device = |percent| percentile(self.0.iter().map(|r| r.1), percent);
        let ms = |us: u64| us / 100;
        let tenth = |us: u64| format!("{}.{}", ms(us) / 10, ms(us) % 10);
        format!(
            "{} | {} | {} | {} | {}",
            self.0.len(),
            tenth(latency(50)),
            tenth(latency(99)),
            tenth(device(50)),
            tenth(device(99))
        )
    }
}

fn epoch_us() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_micros()
}

/// Traffic of 11 requests a second, which can become 55: about two thirds of the GPU.
struct Traffic {
    world: World,
    /// What came of each request.
    record: PathBuf,
    /// It is five times as much while this file is there.
    burst: PathBuf,
}

fn begin(beside: Beside) -> Traffic {
    let settings = match beside {
        Beside::JobUnprotected => "[defences]\ngate = false\neviction = false\n",
        _ => "",
    };
    let world = World::start(settings);
    let built = variable("MUXFLOW_TEST_BUILT");
    let (record, burst) = (world.base().join("requests"), world.base().join("burst"));
    let program = |name: &str| built.join(name).display().to_string();
    let words = "--network vgg16 --batch 2 --rate 11 --seconds 0 --burst 5";
    let mut service = vec![program("muxflow-example-inference")];
    service.extend(words.split(' ').map(String::from));
    for (flag, path) in [("--record", &record), ("--burst-while", &burst)] {
        service.extend([flag.to_owned(), path.display().to_string()]);
    }
    world.start_service_as(service);
    world.wait("healthy", |status| status.health == HealthState::Healthy);
    if beside != Beside::Nobody {
        let mut job = vec![program("muxflow-example-training")];
        let words = "--network vgg16 --batch 2 --iterations 0";
        job.extend(words.split(' ').map(String::from));
        world.start_job(job);
        world.wait("the job launches", |status| {
            status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 200)
        });
    }
    Traffic { world, record, burst }
}

/// Traffic for so many seconds, and then five times as much.
fn traffic(beside: Beside, seconds: u64) -> Through {
    let Traffic { world, record, burst } = begin(beside);
    let window = Duration::from_secs(seconds);
    let begin = epoch_us();
    std::thread::sleep(window);
    let middle = epoch_us();
    fs::write(&burst, "").unwrap();
    let (began, mut shut) = (Instant::now(), false);
    while began.elapsed() < window {
        shut |= world.agent().status(&world.gpu).is_some_and(|status| status.budget == 0.0);
        std::thread::sleep(Duration::from_millis(20));
    }
    let end = epoch_us();
    let text = fs::read_to_string(&record).unwrap();
    world.end();
    let requests = |from, to| Requests::read(&text, from, to);
    Through { before: requests(begin, middle), during: requests(middle, end), shut }
}

#[test]
#[ignore = "makes rows of docs/reliability.md: cargo xtask reliability"]
fn reaction_to_five_times_the_traffic() {
    inside("burst::inner_five_times");
}

/// How long until the gate is shut, each time in a new world: the job may be evicted.
#[test]
#[ignore = "run inside an emulated node by reaction_to_five_times_the_traffic"]
fn inner_five_times() {
    let mut shut_ms = Vec::new();
    for _ in 0..rounds(10) {
        let Traffic { world, burst, .. } = begin(Beside::JobUnderMuxFlow);
        std::thread::sleep(Duration::from_secs(2));
        world.wait("the gate is open", |status| status.budget > 0.0);
        let began = Instant::now();
        fs::write(&burst, "").unwrap();
        world.wait("the gate is shut", |status| status.budget == 0.0);
        shut_ms.push(ms(began));
        world.end();
    }
    let at = |percent| percentile(shut_ms.iter().copied(), percent);
    println!(
        "MEASURED | five times the traffic, {} times: gate shut | p50 {} ms | p99 {} ms |",
        shut_ms.len(),
        at(50),
        at(99)
    );
}

#[test]
#[ignore = "makes and judges rows of docs/reliability.md: cargo xtask reliability"]
fn latency_through_a_burst() {
    inside("burst::inner_latency");
}

#[test]
#[ignore = "run inside an emulated node by latency_through_a_burst"]
fn inner_latency() {
    let [_, guarded, unprotected] =
        [Beside::Nobody, Beside::JobUnderMuxFlow, Beside::JobUnprotected].map(|beside| {
            let through = traffic(beside, 10);
            println!("MEASURED | {} | before | {} |", beside.words(), through.before.row());
            println!("MEASURED | {} | burst | {} |", beside.words(), through.during.row());
            through
        });
    assert!(guarded.shut, "the gate was never shut through the burst");
    let p99_us = |through: &Through| through.during.latency_us(99);
    let (with, without) = (p99_us(&guarded), p99_us(&unprotected));
    assert!(
        with > 0 && with * 2 < without,
        "p99 {with} us with MuxFlow, {without} us with MPS alone"
    );
    let served = |through: &Through| through.during.0.len();
    assert!(served(&guarded) > served(&unprotected), "and more requests are answered");
}
