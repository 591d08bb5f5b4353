//! What is charged beyond one call and its opposite: pools that outlive their handle, graphs that are
//! made again, captures side by side, limits of devices. Over the stub driver.

use std::io::BufRead;
use std::time::{Duration, Instant};

use muxflow_abi::control::Limits;
use muxflow_e2e::{Job, Outcome, client, stub_driver};

fn lines(outcome: &Outcome) -> Vec<&str> {
    outcome.stdout.lines().collect()
}

/// What a destroyed pool has given out stays taken until it is freed, and nothing is asked of it.
#[test]
fn pools_that_are_destroyed_while_in_use_do_not_escape_the_quota() {
    let job = Job::new(16 << 20);
    let round = ["pool", "poolalloc:0x400000", "poolend"];
    let mut operations = vec!["init"];
    operations.extend(round.repeat(5));
    operations.extend(["freeasync", "info", "freeasync", "freeasync", "freeasync", "info"]);
    operations.extend(round);
    let outcome = job.run(&operations);
    let said = lines(&outcome);
    let allocated: Vec<_> = said.iter().filter(|line| line.starts_with("poolalloc")).collect();
    let (yes, no) = (&"poolalloc 0", &"poolalloc 2");
    assert_eq!(allocated, [yes, yes, yes, yes, no, yes], "{}", outcome.stderr);
    let told: Vec<_> = said.iter().filter(|line| line.starts_with("info")).collect();
    assert_eq!(told, [&"info 0 4194304 16777216", &"info 0 16777216 16777216"]);
    assert!(!job.stub_log().contains("dead pool"), "{}", job.stub_log());
}

#[test]
fn each_executable_of_a_graph_is_charged() {
    for keeps in [false, true] {
        let job = Job::new(2 << 20);
        let mut command = job.command(&client("client", &[]), stub_driver());
        if keeps {
            command.env("STUB_GRAPH_KEEPS", "1");
        }
        command.args(["init", "plan:0x100000", "instantiate", "graphend", "instantiate", "info"]);
        command.args(["graphend", "alloc:0x180000", "instantiate", "free", "instantiate", "info"]);
        let outcome: Outcome = command
            .args(["planend", "graphend", "graphtrim", "info"])
            .output()
            .expect("it runs")
            .into();
        let half = "info 0 1048576 2097152";
        let expected = [
            "init 0",
            "plan 0",
            "instantiate 0",
            "graphend 0",
            "instantiate 0",
            half,
            "graphend 0",
            "alloc 0",
            "instantiate 2",
            "free 0",
            "instantiate 0",
            half,
            "planend 0",
            "graphend 0",
            "graphtrim 0",
            "info 0 2097152 2097152",
        ];
        assert_eq!(lines(&outcome), expected, "keeps {keeps}: {}", outcome.stderr);
    }
}

#[test]
fn captures_are_told_apart_and_all_end() {
    // As many at once as a program likes; afterwards launches cost what they did before.
    let job = Job::new(4 << 20);
    let outcome = job.run(&["init", "captures:40", "launch:1600", "beside"]);
    let beside = lines(&outcome)[3].to_owned();
    let calls: u64 = beside.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    assert!(calls <= 110, "the driver is asked at each launch: {beside}");
    // Each graph holds what was captured into it.
    let outcome = job.run(&[
        "init",
        "capture:0x100",
        "capture:0x200",
        "allocin:0x100",
        "allocin:0x200",
        "allocin:0x200",
        "info",
        "endcapture:0x100",
        "planend",
        "info",
        "endcapture:0x200",
        "planend",
        "info",
    ]);
    let told = lines(&outcome).into_iter().filter(|line| line.starts_with("info"));
    let expected = ["info 0 1048576 4194304", "info 0 2097152 4194304", "info 0 4194304 4194304"];
    assert_eq!(told.collect::<Vec<_>>(), expected, "{}", outcome.stderr);
}

/// The default stream of a thread is not that of the process: a launch into the one passes the gate while
/// the other captures, and no mark is put into a stream that captures.
#[test]
fn a_capture_of_one_default_stream_is_not_one_of_the_other() {
    let job = Job::new(1 << 20);
    let operations =
        ["init", "captureown", "launch:100", "endown", "sleep:100", "ready", "sleep:60000"];
    let mut child = job.spawn(&operations);
    let mut said = std::io::BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("ready") {
        assert_ne!(said.read_line(&mut line).expect("it speaks"), 0, "{line}");
    }
    let until = Instant::now() + Duration::from_secs(20);
    while job.block.processes()[0].launches != 100 {
        assert!(Instant::now() < until, "not counted: {:?}", job.block.processes()[0]);
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().expect("it dies");
    child.wait().expect("it is gone");
    // Launches of before the capture have no mark yet when others have to wait.
    job.block.agent().set_limits(&Limits { in_flight: 2, ..Limits::OPEN });
    let mut command = job.command(&client("client", &[]), stub_driver());
    command.env("STUB_KERNEL_US", "1000").args(["init", "launchin:0x100", "launchin:0x300"]);
    command.args(["capture:0x100", "capture:0x300"]).args(["launchin:0x200"; 6]);
    command.args(["endcapture:0x100", "endcapture:0x300"]);
    let outcome: Outcome = command.output().expect("it runs").into();
    assert!(outcome.stdout.ends_with("endcapture 0\nendcapture 0\n"), "{}", outcome.stdout);
    assert!(!job.stub_log().contains("mark in a capture"), "{}", job.stub_log());
}

#[test]
fn each_device_has_its_own_heap_and_forgets_it() {
    let job = Job::new(1 << 20);
    job.block.agent().set_quota(1, 2 << 20);
    let mut command = job.command(&client("client", &[]), stub_driver());
    command.env("STUB_DEVICES", "2");
    command.args(["init", "heap:0x80000", "device:1", "heap:0x40000", "info", "device:0", "info"]);
    command.args(["device:1", "heap:0x200000", "heap:0x200001", "info", "reset:1", "info"]);
    let outcome: Outcome = command.output().expect("it runs").into();
    let heaps: Vec<_> = lines(&outcome).into_iter().filter(|l| l.starts_with("heap")).collect();
    assert_eq!(heaps, ["heap 0", "heap 0", "heap 0", "heap 2"], "{}", outcome.stderr);
    let told: Vec<_> = lines(&outcome).into_iter().filter(|l| l.starts_with("info")).collect();
    let expected = [
        "info 0 1835008 2097152",
        "info 0 524288 1048576",
        "info 0 0 2097152",
        "info 0 2097152 2097152",
    ];
    assert_eq!(told, expected, "{}", outcome.stderr);
}
