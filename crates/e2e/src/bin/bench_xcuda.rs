//! Measures what the interposer costs, against a stub driver that returns at once, and how fast the
//! gate closes. Prints the tables of docs/benchmarks.md, or those that are named: `overhead`,
//! `start-up`, `reaction`.

#![expect(clippy::print_stdout, reason = "a program whose output is its table")]

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Limits};
use muxflow_e2e::{Job, block, client, stub_driver};

const ROUNDS: usize = 5;

fn main() {
    let named: Vec<String> = std::env::args().skip(1).collect();
    let parts: [(&str, fn()); 3] =
        [("overhead", overhead), ("start-up", start_up), ("reaction", reaction)];
    for (name, part) in parts {
        if named.is_empty() || named.iter().any(|wanted| wanted == name) {
            part();
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs the bench program, on one core if `taskset` is there.
fn bench(job: Option<&Job>) -> BTreeMap<String, f64> {
    let program = client("bench", &[]);
    let mut command = match job {
        Some(job) => job.command(&program, stub_driver()),
        None => {
            let mut command = Command::new(&program);
            command.env("LD_LIBRARY_PATH", stub_driver());
            command
        }
    };
    let output = command.output().expect("the bench program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let parse = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    text.lines().filter_map(parse).collect()
}

fn overhead() {
    let mut direct: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut under: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let job = Job::new(8 << 30);
    for _ in 0..ROUNDS {
        for (sums, job) in [(&mut direct, None), (&mut under, Some(&job))] {
            for (name, value) in bench(job) {
                sums.entry(name).or_default().push(value);
            }
        }
    }
    println!("| call | direct, ns | under xcuda, ns | ratio |\n|---|---|---|---|");
    for (key, name) in [
        ("launch", "`cuLaunchKernel`, quota and open gate"),
        ("alloc_free_10", "`cuMemAlloc` + `cuMemFree`, 10 live"),
        ("alloc_free_100000", "`cuMemAlloc` + `cuMemFree`, 100,000 live"),
        ("alloc_free_second", "the same in a second thread of the process"),
    ] {
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let (a, b) = (least(&direct[key]), least(&under[key]));
        println!("| {name} | {a:.1} | {b:.1} | {:.1}× |", b / a);
    }
}

/// Starts so many clients at once; seconds until all have made a context and ended.
fn start(job: Option<&Job>, count: usize) -> f64 {
    let program = client("client", &[]);
    let begun = Instant::now();
    let children: Vec<_> = (0..count)
        .map(|_| {
            let mut command = match job {
                Some(job) => job.command(&program, stub_driver()),
                None => {
                    let mut command = Command::new(&program);
                    command.env("LD_LIBRARY_PATH", stub_driver());
                    command
                }
            };
            command.args(["init", "alloc:512", "launch:1"]).stdout(Stdio::null());
            command.spawn().expect("a client starts")
        })
        .collect();
    for mut child in children {
        assert!(child.wait().expect("it ends").success());
    }
    begun.elapsed().as_secs_f64()
}

fn start_up() {
    let job = Job::new(8 << 30);
    println!(
        "\n| start, context, one launch, exit | direct, ms | under xcuda, ms |\n|---|---|---|"
    );
    let alone = |job: Option<&Job>| median((0..15).map(|_| start(job, 1) * 1e3).collect());
    println!("| one process | {:.1} | {:.1} |", alone(None), alone(Some(&job)));
    let many = |job: Option<&Job>| median((0..3).map(|_| start(job, 300) * 1e3).collect());
    println!("| 300 at once, all together | {:.0} | {:.0} |", many(None), many(Some(&job)));
}

fn reaction() {
    println!(
        "\n| kernels | in flight at most | last launch after closing, p50 / p99 | last kernel starts, p50 / p99 |\n|---|---|---|---|"
    );
    for (kernel_us, in_flight) in [(10_u32, 256_u64), (100, 100), (1_000, 10)] {
        let job = Job::new(8 << 30);
        job.block.agent().set_limits(&Limits { in_flight, ..Limits::OPEN });
        let stamp = job.path("stamp");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&stamp);
        let file = file.expect("a stamp file");
        file.set_len(4096).expect("it can be sized");
        let program = client("client", &[]);
        let mut command = job.command(&program, stub_driver());
        command.env("STUB_KERNEL_US", kernel_us.to_string()).env("STUB_STAMP", &stamp);
        let mut child =
            command.args(["init", "forever"]).stdout(Stdio::null()).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(300));
        let (mut host, mut device) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let closed_ns = block::now_ns();
            job.block.command(Gate::Closed);
            std::thread::sleep(Duration::from_millis(40));
            let mut words = [0; 16];
            file.read_exact_at(&mut words, 0).expect("two words");
            let word = |at: usize| {
                words[at..at + 8].iter().rev().fold(0_u64, |sum, &byte| sum << 8 | u64::from(byte))
            };
            let after = |ns: u64| Duration::from_nanos(ns.saturating_sub(closed_ns));
            host.push(after(word(0)).as_secs_f64() * 1e3);
            device.push(after(word(8)).as_secs_f64() * 1e3);
            job.block.command(Gate::Open);
            std::thread::sleep(Duration::from_millis(20));
        }
        child.kill().expect("it dies");
        child.wait().expect("it is gone");
        for values in [&mut host, &mut device] {
            values.sort_by(f64::total_cmp);
        }
        println!(
            "| {kernel_us} µs | {in_flight} | {:.2} / {:.2} ms | {:.2} / {:.2} ms |",
            host[50], host[98], device[50], device[98]
        );
    }
}
