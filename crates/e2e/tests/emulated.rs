//! The interposer over an emulated GPU, where kernels take time, captures can be broken and memory can be
//! shared: what a program sees under it is what it sees without.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Limits, Settings, SlotState};
use muxflow_e2e::{Job, Outcome, build, client};

const MIB: u64 = 1 << 20;

/// A command on emulated GPUs, without the interposer.
fn on(gpus: &str, program: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(build::products().join("muxflow-emulated-node"));
    command.args(["--gpus", gpus, "--"]).arg(program).args(arguments);
    command
}

fn under<'a>(job: &Job, command: &'a mut Command) -> &'a mut Command {
    command.env("LD_PRELOAD", build::xcuda()).env("MUXFLOW_CONTROL", job.block.directory())
}

fn run(job: &Job, gpus: &str, arguments: &[&str]) -> Outcome {
    let mut command = on(gpus, &client("real", &[]), arguments);
    under(job, &mut command).output().expect("it runs").into()
}

fn overruns(job: &Job) -> u64 {
    job.block.job().did()[3]
}

/// The clients of the emulator's own tests, which check one answer after the other.
#[test]
fn every_answer_is_the_same_under_the_interposer() {
    for (name, argument, in_flight) in
        [("client", "check", 256), ("client", "check", 4), ("odd", "all", 256), ("odd", "all", 4)]
    {
        let program = build::emulator_client(name);
        let job = Job::new(1 << 34);
        job.block.agent().set_limits(&Limits { in_flight, ..Limits::OPEN });
        let mut command = on("t4x2", &program, &[argument]);
        let outcome: Outcome = under(&job, &mut command).output().expect("it runs").into();
        assert_eq!(outcome.stdout.trim(), "ok", "{name} {in_flight}: {}", outcome.stderr);
    }
}

/// A node with two GPUs, whose identities are its own: a shell prints them, and then runs the client under the
/// control block that it reads the path of, once for each further line.
fn shell_with_ids() -> (Child, BufReader<ChildStdout>, Vec<String>) {
    const SCRIPT: &str = r#"
        "$CLIENT" ids
        while read control visible what; do
            MUXFLOW_CONTROL=$control CUDA_VISIBLE_DEVICES=$visible LD_PRELOAD=$XCUDA "$CLIENT" $what
        done"#;
    let mut command = on("t4x2", Path::new("sh"), &["-c", SCRIPT]);
    command.env("CLIENT", client("real", &[])).env("XCUDA", build::xcuda());
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    let ids = two_lines(&mut reader);
    (child, reader, ids)
}

fn two_lines(reader: &mut impl BufRead) -> Vec<String> {
    reader.lines().take(2).map(|line| line.expect("a line")).collect()
}

#[test]
fn identities_of_devices_pass_untouched() {
    let (mut child, mut reader, plain) = shell_with_ids();
    let job = Job::new(1 << 30);
    let mut input = child.stdin.take().expect("piped");
    writeln!(input, "{} 0,1 ids", job.block.directory().display()).expect("it reads");
    let under = two_lines(&mut reader);
    drop(input);
    assert!(child.wait().expect("it ends").success());
    assert_eq!((plain.len(), under), (2, plain));
}

/// Two GPUs with different quotas; the program sees them in its own order.
#[test]
fn each_gpu_has_its_own_quota_whatever_the_program_calls_it() {
    let (mut child, mut reader, plain) = shell_with_ids();
    let mut input = child.stdin.take().expect("piped");
    let mut settings = Settings::default();
    for (device, line) in settings.devices.iter_mut().zip(&plain) {
        // Each byte stands there twice, of the two calls.
        let hex = line.rsplit(' ').next().expect("an identity");
        for (byte, pair) in device.iter_mut().zip(hex.as_bytes().chunks(4)) {
            let text = std::str::from_utf8(&pair[..2]).expect("text");
            *byte = u8::from_str_radix(text, 16).expect("a number");
        }
    }
    for (visible, quotas) in [("0,1", [64, 32]), ("1,0", [32, 64])] {
        let job = Job::with(64 * MIB, &settings);
        job.block.agent().set_quota(1, 32 * MIB);
        writeln!(input, "{} {visible} devices", job.block.directory().display()).expect("it reads");
        let lines = two_lines(&mut reader);
        for ((line, quota), held) in lines.iter().zip(quotas).zip([8, 0]) {
            let words: Vec<u64> = line.split(' ').map(|w| w.parse().expect("a number")).collect();
            let (free, total) = (words[1], words[2]);
            assert_eq!((total, words[3]), (quota * MIB, quota * MIB), "{visible}: {line}");
            // The module takes a little of the first.
            let left = (quota - held) * MIB;
            assert!(free <= left && free + 4096 >= left, "{visible}: {line}");
            assert_eq!(words[4..], [2, 0], "{visible}, a little too much and all of it: {line}");
        }
    }
    drop(input);
    assert!(child.wait().expect("it ends").success());
}

/// A host function that waits for what its own thread does after it has launched more than may be in
/// flight, and an event behind it.
#[test]
fn host_functions_and_events_do_not_deadlock() {
    let job = Job::new(1 << 30);
    job.block.agent().set_limits(&Limits { in_flight: 4, ..Limits::OPEN });
    let outcome = run(&job, "t4", &["waits"]);
    assert_eq!(outcome.stdout, "called 1\n", "{}", outcome.stderr);
    assert!(overruns(&job) > 0, "the bound was not met");
}

/// Captures in two streams while others launch and the bound is met, and while the agent freezes and thaws the
/// process: each graph has what the program captured, and nothing else.
#[test]
fn nothing_breaks_or_joins_a_capture() {
    for freeze in [false, true] {
        let job = Job::new(1 << 30);
        job.block.agent().set_limits(&Limits { in_flight: 4, ..Limits::OPEN });
        let mut command = on("t4", &client("real", &[]), &["capture"]);
        under(&job, &mut command).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut reader = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        reader.read_line(&mut line).expect("a line");
        assert_eq!(line, "capturing\n");
        if freeze {
            for (gate, state) in
                [(Gate::Frozen, SlotState::Drained), (Gate::Open, SlotState::Registered)]
            {
                let word = job.block.command(gate);
                let until = Instant::now() + Duration::from_secs(30);
                let answers =
                    |c: &muxflow_abi::control::Counters| c.state == state && c.acknowledged == word;
                while !job.block.processes().iter().any(answers) {
                    assert!(Instant::now() < until, "{gate:?}: {:?}", job.block.processes());
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        }
        child.stdin.take().expect("piped").write_all(b"go\n").expect("it reads");
        let rest = std::io::read_to_string(&mut reader).expect("its output");
        assert_eq!(rest, "ended 0 nodes 6\nended 0 nodes 6\nlaunches 0\n", "freeze {freeze}");
        assert!(child.wait().expect("a status").success());
    }
}

/// What one process of the job has is charged once, also when another one opens it.
#[test]
fn memory_that_processes_share_is_charged_once() {
    let job = Job::new(64 * MIB);
    let outcome = run(&job, "t4", &["share"]);
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines[..2], ["ipc 0 7 0", "descriptor 0"], "{}", outcome.stderr);
    let held: u64 = lines[2].trim_start_matches("held ").parse().expect("a number");
    // Two modules take a little.
    assert!((52 * MIB - 8192..=52 * MIB).contains(&held), "{held}");
    assert_eq!(lines[3], "lender 0");
}
