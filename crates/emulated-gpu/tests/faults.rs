//! What breaks on demand: each XID as its clients, NVML and the kernel log see it, faults by seed, and
//! NVML that blocks or fails.

mod support;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::fault::{Fault, XIDS};
use muxflow_emulated_gpu::launcher::Running;
use support::{built, client, compiled, node, on, output};

/// Starts a program and waits for its first line.
fn started(command: &mut Command, first: &str) -> (Child, BufReader<ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    lines.read_line(&mut line).expect("it speaks");
    assert_eq!(line.trim(), first);
    (child, lines)
}

/// What it says until it ends, and how it ends.
fn rest((mut child, mut lines): (Child, BufReader<ChildStdout>)) -> (String, Option<i32>) {
    let mut said = String::new();
    lines.read_to_string(&mut said).expect("it says why it ends");
    (said.trim().to_owned(), child.wait().expect("it ends").code())
}

/// A client that allocates, launches and frees until something fails.
fn holder(node: &Running) -> (Child, BufReader<ChildStdout>) {
    started(on(node, client()).arg("hold"), "up")
}

/// The error that every call of the client returns after an XID; none for those that it survives.
fn error_of(xid: u32) -> Option<u32> {
    match xid {
        13 | 43 | 45 => Some(719),
        31 => Some(700),
        48 | 94 | 95 => Some(214),
        79 => Some(999),
        _ => None,
    }
}

#[test]
fn each_xid_reaches_the_client_nvml_and_the_kernel_log() {
    for xid in XIDS {
        let node = node("t4", 1.0);
        let watcher = started(on(&node, compiled("nvml")).arg("event"), "ready");
        let mut holder = holder(&node);
        Fault::Xid(xid).inject(node.node(), 0, 0, 0).expect("it strikes");
        // A GPU that is gone says nothing about its memory.
        let told = match xid {
            79 => "79 15 0".to_owned(),
            48 | 94 | 95 => format!("{xid} 0 1"),
            _ => format!("{xid} 0 0"),
        };
        assert_eq!(rest(watcher), (told, Some(0)));
        let log = std::fs::read_to_string(node.node().kernel_log()).expect("a kernel log");
        assert!(log.contains(&format!("NVRM: Xid (PCI:0000:3b:00): {xid}, ")), "{log}");
        if let Some(error) = error_of(xid) {
            assert_eq!(rest(holder), (format!("failed {error}"), Some(3)), "XID {xid}");
        } else {
            std::thread::sleep(Duration::from_millis(100));
            assert!(holder.0.try_wait().expect("a status").is_none(), "XID {xid} ended the client");
            holder.0.kill().expect("it lives");
            holder.0.wait().expect("it ends");
        }
        let ends_the_gpu = xid == 79;
        let next = on(&node, client()).arg("check").output().expect("it runs");
        assert_eq!(next.status.success(), !ends_the_gpu, "XID {xid}: a client afterwards");
        Fault::Reset.inject(node.node(), 0, 0, 0).expect("it comes back");
        assert_eq!(output(on(&node, client()).arg("check")), "ok", "XID {xid}: after a reset");
    }
}

#[test]
fn a_seed_says_which_faults_come_and_when() {
    let run = |seed: &str, deadly: bool| {
        let node = node("t4", 1.0);
        let mut command = on(&node, built().join("muxflow-emulated-fault"));
        command.args(["random", "--seed", seed, "--every", "3", "--count", "40"]);
        if deadly {
            command.arg("deadly");
        }
        let said = output(&mut command);
        // Whatever came, a reset ends it.
        Fault::Reset.inject(node.node(), 0, 0, 0).expect("it is reset");
        assert_eq!(output(on(&node, client()).arg("check")), "ok", "after seed {seed}: {said}");
        said
    };
    let first = run("11", false);
    assert_eq!(first.lines().count(), 40);
    assert_eq!(first, run("11", false), "the same seed");
    assert_ne!(first, run("12", false), "another seed");
    let deadly = run("11", true);
    let kills = |said: &str| said.lines().any(|l| l.contains("xid 79") || l.contains("xid 48"));
    assert!(kills(&deadly) && !kills(&first), "{deadly}");
}

#[test]
fn a_fault_strikes_when_its_time_has_come() {
    let node = node("t4", 1.0);
    let (mut child, _lines) = holder(&node);
    let mut command = on(&node, built().join("muxflow-emulated-fault"));
    let began = Instant::now();
    assert_eq!(output(command.args(["--after", "400", "xid", "13"])), "");
    assert_eq!(child.wait().expect("it ends").code(), Some(3));
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}

#[test]
fn a_gpu_that_fell_off_the_bus_stays_away_whatever_is_logged_after_it() {
    let node = node("t4", 1.0);
    let ask = || output(on(&node, compiled("nvml")).args(["ask", "0"]));
    assert_eq!(ask(), "0");
    for xid in [79, 154] {
        Fault::Xid(xid).inject(node.node(), 0, 0, 0).expect("it strikes");
        assert_eq!(ask(), "15", "after XID {xid} NVML says that it is lost");
        let next = on(&node, client()).arg("check").output().expect("it runs");
        assert!(!next.status.success(), "after XID {xid} a client got in");
    }
    Fault::Reset.inject(node.node(), 0, 0, 0).expect("it comes back");
    assert_eq!(ask(), "0");
    let next = on(&node, client()).arg("check").output().expect("it runs");
    assert!(next.status.success(), "no client gets in after the reset: {next:?}");
}

#[test]
fn nvml_blocks_or_fails_for_one_gpu_until_it_is_let_go() {
    let node = node("t4x2", 1.0);
    let ask = |gpu: &str| {
        let mut command = on(&node, compiled("nvml"));
        command.args(["ask", gpu]);
        command
    };
    Fault::NvmlError(999).inject(node.node(), 0, 0, 0).expect("it fails");
    assert_eq!(output(&mut ask("0")), "999");
    assert_eq!(output(&mut ask("1")), "0");
    Fault::NvmlError(0).inject(node.node(), 0, 0, 0).expect("it works");
    Fault::NvmlBlock(true).inject(node.node(), 0, 0, 0).expect("it blocks");
    let mut stuck = ask("0").stdout(Stdio::piped()).spawn().expect("it starts");
    // Its neighbour answers meanwhile.
    assert_eq!(output(&mut ask("1")), "0");
    std::thread::sleep(Duration::from_millis(500));
    assert!(stuck.try_wait().expect("a status").is_none(), "it answered while it was to block");
    Fault::NvmlBlock(false).inject(node.node(), 0, 0, 0).expect("it goes on");
    let said = stuck.wait_with_output().expect("it ends").stdout;
    assert_eq!(String::from_utf8_lossy(&said).trim(), "0");
}
