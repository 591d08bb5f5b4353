//! Breaks emulated GPUs on demand: at once, after a while, or at random by seed.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::EmulationError;
use muxflow_emulated_gpu::fault::Fault;
use muxflow_emulated_gpu::node::Node;
use muxflow_gpu_model::Rng;

const USAGE: &str =
    "usage: muxflow-emulated-fault [--dir DIR] [--gpu N] [--pid PID] [--after MS] FAULT
       muxflow-emulated-fault [--dir DIR] [--gpu N] [--pid PID] random --seed N [--every MS] [--count N] [deadly]
           faults of all kinds at random moments, MS apart in the mean; the seed says which and when;
           `deadly` lets those come that strike everybody on the GPU (XID 48, 79, 95)
FAULT: xid N | kill-propagates PCT | mps-crash | mps-hang | throttle MHZ | memory-burst MIB |
       nvml-block | nvml-unblock | nvml-error N | dcgm-error N | sensor-lie PCT | off-bus | reset";

struct Wanted {
    node: Node,
    gpu: usize,
    pid: i32,
    after_ms: u64,
    seed: u64,
    every_ms: u64,
    count: u32,
    words: Vec<String>,
}

fn wanted() -> Result<Wanted, String> {
    let node = Node::find(None).unwrap_or_else(|| Node::at(""));
    let mut wanted = Wanted {
        node,
        gpu: 0,
        pid: 0,
        after_ms: 0,
        seed: 0,
        every_ms: 1000,
        count: 10,
        words: Vec::new(),
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(word) = arguments.next() {
        if !word.starts_with("--") {
            wanted.words.push(word);
            continue;
        }
        let value = arguments.next().ok_or_else(|| format!("{word} needs a value\n{USAGE}"))?;
        let bad = |_| format!("{word} {value}: not a number\n{USAGE}");
        match word.as_str() {
            "--dir" => wanted.node = Node::at(&value),
            "--gpu" => wanted.gpu = value.parse().map_err(bad)?,
            "--pid" => wanted.pid = value.parse().map_err(bad)?,
            "--after" => wanted.after_ms = value.parse().map_err(bad)?,
            "--seed" => wanted.seed = value.parse().map_err(bad)?,
            "--every" => wanted.every_ms = value.parse().map_err(bad)?,
            "--count" => wanted.count = value.parse().map_err(bad)?,
            _ => return Err(format!("{word} is not known\n{USAGE}")),
        }
    }
    if wanted.node.root().as_os_str().is_empty() {
        return Err(format!("set MUXFLOW_EMULATED_DIR or give --dir\n{USAGE}"));
    }
    Ok(wanted)
}

#[expect(clippy::print_stdout, reason = "a program for people at a terminal")]
fn run() -> Result<(), String> {
    let wanted = wanted()?;
    let words = |e: EmulationError| {
        let cause = std::error::Error::source(&e).map(|s| format!(": {s}")).unwrap_or_default();
        format!("{e}{cause}")
    };
    if wanted.words.first().map(String::as_str) != Some("random") {
        let fault = Fault::parse(&wanted.words).map_err(words)?;
        return fault.inject(&wanted.node, wanted.gpu, wanted.pid, wanted.after_ms).map_err(words);
    }
    let deadly = match wanted.words.get(1).map(String::as_str) {
        None => false,
        Some("deadly") if wanted.words.len() == 2 => true,
        Some(word) => return Err(format!("random {word} is not known\n{USAGE}")),
    };
    let mut rng = Rng::new(wanted.seed);
    let (began, mut due_ms) = (Instant::now(), 0.0);
    for _ in 0..wanted.count {
        due_ms += rng.exponential(wanted.every_ms as f64);
        let fault = Fault::random(&mut rng, deadly);
        let due = began + Duration::from_secs_f64(due_ms / 1e3);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        // One line each, of which the last words can be given to this program again.
        let outcome = match fault.inject(&wanted.node, wanted.gpu, wanted.pid, 0) {
            Ok(()) => String::new(),
            Err(EmulationError::Fault { .. }) => " # nothing to strike".to_owned(),
            Err(error) => return Err(words(error)),
        };
        let whose = if wanted.pid == 0 { String::new() } else { format!("--pid {} ", wanted.pid) };
        println!("--gpu {} {whose}--after {due_ms:.0} {fault}{outcome}", wanted.gpu);
    }
    Ok(())
}

#[expect(clippy::print_stderr, reason = "this is where errors reach the person who typed")]
fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("muxflow-emulated-fault: {error}");
            ExitCode::FAILURE
        }
    }
}
