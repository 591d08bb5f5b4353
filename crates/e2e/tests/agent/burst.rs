//! Bursts of the service's traffic: how fast the agent gets out of the way, and what the service's
//! latency comes to with MuxFlow, alone on the GPU, and beside a job that nothing holds back.

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muxflow_agent::gpu::{Event, StopReason};
use muxflow_types::HealthState;

use crate::world::{World, inside, percentile, rounds, variable};

#[test]
#[ignore = "prints rows of docs/reliability.md: cargo xtask reliability"]
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

impl Requests {
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
        let latency = |percent| percentile(self.0.iter().map(|r| r.0), percent);
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

/// Traffic of 11 requests a second becomes 55, which is about two thirds of the GPU.
fn traffic(beside: Beside, seconds: u64) -> (Requests, Requests) {
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
    let window = Duration::from_secs(seconds);
    let begin = epoch_us();
    std::thread::sleep(window);
    let middle = epoch_us();
    fs::write(&burst, "").unwrap();
    std::thread::sleep(window);
    let end = epoch_us();
    let text = fs::read_to_string(&record).unwrap();
    world.end();
    (Requests::read(&text, begin, middle), Requests::read(&text, middle, end))
}

#[test]
#[ignore = "prints rows of docs/reliability.md: cargo xtask reliability"]
fn latency_through_a_burst() {
    inside("burst::inner_latency");
}

#[test]
#[ignore = "run inside an emulated node by latency_through_a_burst"]
fn inner_latency() {
    for beside in [Beside::Nobody, Beside::JobUnderMuxFlow, Beside::JobUnprotected] {
        let (before, during) = traffic(beside, 10);
        println!("MEASURED | {} | before | {} |", beside.words(), before.row());
        println!("MEASURED | {} | burst | {} |", beside.words(), during.row());
    }
}
