//! Ten thousand jobs and a thousand GPUs behind a fake node, over the real socket. The small form is a
//! test; `cargo xtask bench manager` runs the large one and prints its table.

#![expect(clippy::unwrap_used, reason = "a test that fails should say where")]
#![expect(clippy::cast_precision_loss, clippy::print_stdout, reason = "figures for a table")]

mod support;

use std::sync::Arc;
use std::time::{Duration, Instant};

use muxflow_agent::launch::Exit;
use muxflow_api::cluster::{PlanView, Summary};
use muxflow_api::jobs::{Cancelled, JobList, JobState, Submitted};
use muxflow_manager::Manager;
use muxflow_manager::client::{Client, Place};
use muxflow_manager::http::server::{Extras, Listen, SILENCE, Server};
use muxflow_manager::manager::Settings;
use muxflow_manager::scheduler::SchedulerSettings;
use muxflow_manager::scheduler::admit::ProfilerSettings;
use muxflow_manager::up::Loops;
use serde_json::json;
use support::{FakeNode, gpu};

fn resident_mib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_ascii_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

fn milliseconds(times: &mut [Duration], part: usize, of: usize) -> f64 {
    times.sort_unstable();
    times[(times.len() * part / of).min(times.len() - 1)].as_secs_f64() * 1e3
}

/// `most_mib` bounds what jobs, plans and answers may take together.
fn run(jobs: usize, gpus: u32, most_mib: u64) {
    let dir = tempfile::tempdir().unwrap();
    let before_mib = resident_mib();
    let services = ["web", "search", "ads", "rank"];
    let sights = (0..gpus).map(|n| gpu(n, Some(services[n as usize % 4]))).collect();
    let node = FakeNode::new(dir.path(), sights);
    let settings = Settings { jobs_per_user: None, ..Settings::default() };
    let store = dir.path().join("state.db");
    let (manager, wakes) = Manager::open(&store, Arc::clone(&node) as _, settings).unwrap();
    let socket = dir.path().join("manager.sock");
    let listen = Listen { socket, socket_mode: 0o600, tcp: None, silence: SILENCE };
    let server = Server::start(Arc::clone(&manager), &listen, Extras::default()).unwrap();
    let client = Client::new(Place::Socket(server.socket().to_owned())).unwrap();

    // Half one by one, half as arrays, while nothing is planned yet.
    let one = |n: usize| {
        let program = format!("/bin/train-{}", n % 40);
        json!({"command": [program], "cwd": "/", "priority": 1 + n % 3})
    };
    let singles = jobs / 2;
    let mut submits: Vec<Duration> = Vec::new();
    let began = Instant::now();
    for n in 0..singles {
        let at = Instant::now();
        let _: Submitted = client.post("/v1/jobs", &one(n)).unwrap();
        submits.push(at.elapsed());
    }
    let single_rate = singles as f64 / began.elapsed().as_secs_f64();
    let began = Instant::now();
    let mut left = jobs - singles;
    let mut n = 0;
    while left > 0 {
        let count = left.min(1000);
        let mut array = one(n);
        array["array"] = json!({"first": 0, "last": count - 1});
        let _: Submitted = client.post("/v1/jobs", &array).unwrap();
        left -= count;
        n += 1;
    }
    let array_rate = (jobs - singles) as f64 / began.elapsed().as_secs_f64();

    let settings = SchedulerSettings {
        profiler: ProfilerSettings { enabled: false, ..ProfilerSettings::default() },
        retrain_every: None,
        ..SchedulerSettings::default()
    };
    let loops = Loops::start(&manager, wakes, settings, store).unwrap();
    // Until every GPU has a job.
    let deadline = Instant::now() + Duration::from_secs(300);
    while node.running().len() < gpus as usize {
        assert!(Instant::now() < deadline, "{} of {gpus} GPUs filled", node.running().len());
        std::thread::sleep(Duration::from_millis(50));
    }
    let plan: PlanView = client.get("/v1/plan").unwrap();
    let mut reads: Vec<Duration> = Vec::new();
    let paths = [
        "/v1/jobs?limit=100",
        "/v1/jobs/job-1",
        "/v1/summary",
        "/v1/gpus/0",
        "/v1/events?limit=100",
    ];
    // Meanwhile jobs end, so that plans are made and rows are written.
    let running: Vec<_> = node.running().into_keys().collect();
    for round in 0..40 {
        for id in running.iter().skip(round * 2).take(2) {
            let exit = Exit { code: Some(0), ..Exit::unknown() };
            node.end(id, exit, None);
        }
        for path in paths {
            let at = Instant::now();
            let _: serde_json::Value = client.get(path).unwrap();
            reads.push(at.elapsed());
        }
    }
    let page: JobList = client.get("/v1/jobs?state=running&limit=1").unwrap();
    assert_eq!(page.items[0].state, JobState::Running);
    // What ended was replaced, each by one plan or another, and nothing was lost or made up.
    let ended = running.len().min(80);
    let deadline = Instant::now() + Duration::from_secs(300);
    loop {
        let summary: Summary = client.get("/v1/summary").unwrap();
        let of = |state: JobState| summary.jobs.get(state.as_str()).copied().unwrap_or(0);
        let counts = (of(JobState::Running), of(JobState::Done), of(JobState::Queued));
        let left = jobs - ended - gpus as usize;
        if counts == (u64::from(gpus), ended as u64, left as u64) {
            break;
        }
        assert!(Instant::now() < deadline, "{counts:?} of {jobs} jobs on {gpus} GPUs");
        std::thread::sleep(Duration::from_millis(50));
    }
    loops.stop();
    // All jobs of an array at once.
    let count = jobs / 2;
    let mut array = one(0);
    array["array"] = json!({"first": 0, "last": count - 1});
    let made: Submitted = client.post("/v1/jobs", &array).unwrap();
    let at = Instant::now();
    let gone: Cancelled = client.delete(&format!("/v1/jobs/{}", made.id)).unwrap();
    let cancelled = at.elapsed();
    assert_eq!(gone.jobs.len(), count);
    println!("BENCH | jobs × GPUs | {jobs} × {gpus} |");
    println!("BENCH | submissions per second, one job each, one caller | {single_rate:.0} |");
    println!(
        "BENCH | such a submission, p50 / p99 | {:.1} / {:.1} ms |",
        milliseconds(&mut submits, 50, 100),
        milliseconds(&mut submits, 99, 100)
    );
    println!("BENCH | jobs per second, in arrays of 1,000 | {array_rate:.0} |");
    println!(
        "BENCH | reading requests while plans are made, p50 / p99 | {:.1} / {:.1} ms |",
        milliseconds(&mut reads, 50, 100),
        milliseconds(&mut reads, 99, 100)
    );
    println!("BENCH | cancelling an array of {count} | {:.0} ms |", cancelled.as_secs_f64() * 1e3);
    println!("BENCH | a plan, snapshot and lint included | {:.2} s |", plan.took_us as f64 / 1e6);
    println!(
        "BENCH | memory, resident, with the fake node | {} MiB ({before_mib} MiB before) |",
        resident_mib()
    );
    assert!(plan.findings.is_empty(), "{:?}", plan.findings);
    let more_mib = resident_mib().saturating_sub(before_mib);
    assert!(more_mib <= most_mib, "{more_mib} MiB for {jobs} jobs and {gpus} GPUs");
}

#[test]
fn a_full_queue_is_planned_and_answers() {
    run(400, 40, 192);
}

#[test]
#[ignore = "run by cargo xtask bench manager"]
fn large() {
    run(10_000, 1_000, 1_024);
}
