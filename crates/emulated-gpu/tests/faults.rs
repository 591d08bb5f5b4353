//! What breaks on demand: each XID as its clients, NVML and the kernel log see it, faults by seed, and
//! NVML that blocks or fails.

#[path = "support/device_memory.rs"]
mod device_memory;
mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use device_memory::used_bytes;
use muxflow_emulated_gpu::client::{Allowance, Gpu};
use muxflow_emulated_gpu::fault::{Fault, XIDS};
use muxflow_emulated_gpu::launcher::Running;
use muxflow_emulated_gpu::profile::Profile;
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

/// A client that has pushed so many kernels of 1 ms and waits for a line.
fn pushed(node: &Running, kernels: &str) -> (Child, BufReader<ChildStdout>) {
    started(on(node, client()).args(["push", kernels]).stdin(Stdio::piped()), "pushed")
}

/// What waiting for its work gives.
fn waited(mut it: (Child, BufReader<ChildStdout>)) -> String {
    drop(writeln!(it.0.stdin.take().expect("a pipe"), "go"));
    rest(it).0
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

/// Each line that is printed strikes the same process when it is given to the program again.
#[test]
fn the_lines_of_a_random_run_name_whom_they_strike() {
    let node = node("t4", 1.0);
    let (bystander, victim) = (pushed(&node, "0"), pushed(&node, "0"));
    let pid = victim.0.id().to_string();
    let program = built().join("muxflow-emulated-fault");
    let mut command = on(&node, &program);
    command.args(["--pid", &pid, "random", "--seed", "3", "--every", "1", "--count", "30"]);
    let said = output(&mut command);
    assert!(said.lines().all(|l| l.contains(&format!("--pid {pid} "))), "{said}");
    let deadly = ["xid 13", "xid 31", "xid 43", "xid 45", "xid 94"];
    let strikes = |line: &&str| deadly.iter().any(|xid| line.contains(xid));
    let line = said.lines().find(strikes).unwrap_or_else(|| panic!("none strikes: {said}"));
    let met = waited(victim);
    assert!(["719", "700", "214"].contains(&met.as_str()), "{met}");
    let next = pushed(&node, "0");
    let line = line.split(" #").next().unwrap_or(line);
    let line = line.replace(&format!("--pid {pid}"), &format!("--pid {}", next.0.id()));
    assert_eq!(output(on(&node, &program).args(line.split_whitespace())), "");
    // Its time comes within a moment.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(waited(next), met);
    assert_eq!(waited(bystander), "0", "nobody meant this one");
}

/// A device sleeps while nobody waits: whom a fault strikes is decided by who has work, not by who had
/// some when it last looked.
#[test]
fn a_fault_without_a_name_strikes_the_one_with_work() {
    let node = node("t4", 1.0);
    // Another try where the machine was slower than the work: then both were idle, and the first of
    // them was struck.
    for _ in 0..10 {
        let (idle, busy) = (pushed(&node, "0"), pushed(&node, "900"));
        Fault::Xid(13).inject(node.node(), 0, 0, 0).expect("it strikes");
        let met = [waited(busy), waited(idle)];
        if met == ["719", "0"] {
            return;
        }
        assert_eq!(met, ["0", "719"], "one of them, and only one");
    }
    panic!("the one with work was never struck");
}

#[test]
fn a_reset_gives_all_memory_back_and_a_far_future_is_no_overflow() {
    let node = node("t4", 1.0);
    let mut command = on(&node, built().join("muxflow-emulated-fault"));
    assert_eq!(output(command.args(["--after", &u64::MAX.to_string(), "xid", "79"])), "");
    let (mut child, _lines) = pushed(&node, "0");
    let used = || used_bytes(&node);
    assert!(used() > 100 << 20, "its context");
    let beside = Gpu::connect(node.node(), 0, Allowance::default()).expect("another client");
    beside.context(1).expect("a context");
    Fault::Reset.inject(node.node(), 0, 0, 0).expect("it is reset");
    assert_eq!(used(), 0);
    // Who was struck takes nothing any more, also when it asked before it knew.
    assert_eq!((beside.charge(1 << 21), beside.context(1)), (Err(46), Err(46)));
    assert_eq!(used(), 0);
    child.kill().expect("it lives");
    child.wait().expect("it ends");
    assert_eq!(output(on(&node, client()).arg("check")), "ok");
}

/// Never more than there is, and on the account of who was named.
#[test]
fn a_burst_takes_what_is_free_and_goes_with_its_client() {
    let node = node("t4", 1.0);
    let mut child = pushed(&node, "0");
    let pid = child.0.id().to_string();
    let own = used_bytes(&node);
    let nvml = || output(on(&node, compiled("nvml")).arg("memory"));
    let burst = |arguments: &[&str]| {
        let mut command = on(&node, built().join("muxflow-emulated-fault"));
        command.args(arguments).output().expect("it runs").status.success()
    };
    let total = Profile::parse(Profile::built_in_text("t4").expect("a profile"));
    let total = total.expect("it is sound").facts.memory_bytes[0];
    assert!(burst(&["memory-burst", "1000000"]));
    assert_eq!(nvml(), format!("0 {total} {own}"), "free, used, and what the client holds");
    assert!(!burst(&["--pid", "1", "memory-burst", "1024"]), "it is not on this GPU");
    assert!(burst(&["--pid", &pid, "memory-burst", "1024"]));
    let both = own + (1 << 30);
    assert_eq!(nvml(), format!("{} {both} {both}", total - both));
    child.0.kill().expect("it lives");
    child.0.wait().expect("it ends");
    assert_eq!(used_bytes(&node), 0);
}

#[test]
fn a_fault_strikes_when_its_time_has_come() {
    let node = node("t4", 1.0);
    let struck = holder(&node);
    let mut command = on(&node, built().join("muxflow-emulated-fault"));
    let began = Instant::now();
    assert_eq!(output(command.args(["--after", "400", "xid", "13"])), "");
    assert_eq!(rest(struck), ("failed 719".to_owned(), Some(3)));
    assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
}

#[test]
fn a_gpu_that_fell_off_the_bus_stays_away_whatever_is_logged_after_it() {
    let node = node("t4", 1.0);
    let ask = || output(on(&node, compiled("nvml")).args(["ask", "0"]));
    assert_eq!(ask(), "0");
    let dcgm = || output(&mut on(&node, compiled("dcgm")));
    assert!(dcgm().lines().nth(1).expect("a GPU").contains(" 203=0 "));
    for xid in [79, 154] {
        Fault::Xid(xid).inject(node.node(), 0, 0, 0).expect("it strikes");
        assert_eq!(ask(), "15", "after XID {xid} NVML says that it is lost");
        let lost = dcgm();
        let fields = lost.lines().nth(1).expect("a GPU").split(' ').skip(1);
        let known = fields.filter(|field| !field.starts_with("9999="));
        assert!(known.into_iter().all(|f| f.ends_with("=!-18")), "so does DCGM: {lost}");
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
    // With a handle in hand, its name is not to be had either.
    let mut named = on(&node, compiled("nvml"));
    named.args(["ask", "0", "then"]).stdin(Stdio::piped());
    let (mut child, lines) = started(&mut named, "open");
    Fault::NvmlError(999).inject(node.node(), 0, 0, 0).expect("it fails");
    drop(child.stdin.take());
    assert_eq!(rest((child, lines)).0, "999 999");
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
