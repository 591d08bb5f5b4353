//! Chaos at a twentieth of its size; `cargo xtask soak` runs all of it. And hostile bytes.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use muxflow_abi::control::{JobPart, SLOTS};
use muxflow_abi::driver;
use muxflow_e2e::{Job, chaos, client, stub_driver};
use proptest::prelude::*;

#[test]
fn after_chaos_the_charge_is_exactly_what_is_live() {
    let (count, duration) = (10, Duration::from_secs(3));
    let plan = chaos::Plan { count, seed: 7, duration, quota_bytes: 1 << 30, pace_us: 1_000 };
    let result = chaos::run(plan);
    assert!(result.killed > 10 && result.processes > 10, "{result:?}");
    assert_eq!(result.charged_bytes, result.live_bytes, "{result:?}");
    assert_eq!((&result.wrong[..], result.left_bytes), (&[][..], 0), "{result:?}");
}

#[test]
fn also_where_room_is_short_and_they_take_it_from_each_other() {
    let (count, duration) = (6, Duration::from_secs(3));
    let plan = chaos::Plan { count, seed: 11, duration, quota_bytes: 8 << 20, pace_us: 20 };
    let result = chaos::run(plan);
    assert!(result.refused > 100, "{result:?}");
    assert_eq!(result.charged_bytes, result.live_bytes, "{result:?}");
    assert_eq!((&result.wrong[..], result.left_bytes), (&[][..], 0), "{result:?}");
}

/// A container's processes name themselves by ids of their own: the agent finds them by these.
#[test]
fn the_death_of_a_process_in_another_id_namespace_is_seen() {
    let job = Job::new(1 << 30);
    let agent = muxflow_agent::control_block::ControlBlock::open(job.block.directory());
    let agent = agent.expect("the agent maps it too");
    let mut command = job.command(Path::new("unshare"), stub_driver());
    // Root needs no user namespace for it, which some kernels refuse.
    if muxflow_agent::sys::own_uid() != 0 {
        command.arg("--user");
    }
    command.args(["--pid", "--fork", "--kill-child", "--"]).arg(client("client", &[]));
    command.args(["init", "alloc:0x100000", "ready", "sleep:600000"]).stdout(Stdio::piped());
    let mut child = command.spawn().expect("unshare of util-linux");
    let output = BufReader::new(child.stdout.take().expect("piped"));
    if !output.lines().map_while(Result::ok).any(|line| line == "ready") {
        child.wait().expect("a status");
        eprintln!("SKIPPED: this kernel gives no id namespace to an ordinary user; run it as root");
        assert!(std::env::var_os("CI").is_none(), "CI runs as root");
        return;
    }
    let process = job.block.processes()[0];
    assert_eq!(process.owner.pid, 1, "the first of its namespace");
    assert_eq!((agent.counts().processes, agent.reclaim(), job.charged()), (1, 0, 1 << 20));
    child.kill().expect("it is there");
    child.wait().expect("it is gone");
    let until = Instant::now() + Duration::from_secs(20);
    while agent.reclaim() == 0 {
        assert!(Instant::now() < until, "it counts as living: {process:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((agent.counts().processes, job.charged()), (0, 0));
}

/// A process may be killed after any instruction. One that calls in what another has in hand is led
/// through it instruction by instruction: at none of them is the other charged with too much or too little.
#[test]
fn at_no_instruction_of_a_call_is_the_other_charged_with_what_it_does_not_hold() {
    const PIECE: u64 = 4096;
    let job = Job::new(2 * PIECE);
    // Enough pairs to be given a hand; then it holds one piece and has one in hand.
    let mut other = job.spawn(&["init", "pairs:200", "many:2", "free", "ready", "sleep:600000"]);
    let output = BufReader::new(other.stdout.take().expect("piped"));
    assert!(output.lines().map_while(Result::ok).any(|line| line == "ready"), "it ended");
    let slot = job.block.processes()[0].slot;
    let in_hand = || job.block.job().slot(slot).expect("there").hand().bytes(0);
    let held = || job.block.job().slot_bytes(0, slot);
    assert_eq!((held(), in_hand()), (PIECE, PIECE));

    let mut caller = job.spawn(&["init", "traced", "alloc:4096", "sleep:600000"]);
    let pid = i32::try_from(caller.id()).expect("a process id");
    let stopped = || {
        let mut status = 0;
        // SAFETY: our own child, which nobody else waits for, and a place to write to.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert!(libc::WIFSTOPPED(status), "it ended: {status:#x}");
    };
    stopped();
    let mut instructions = 0_u64;
    while in_hand() > 0 || job.charged() < 2 * PIECE {
        // SAFETY: it is traced by us and stopped.
        let stepped = unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, pid, 0, 0) };
        assert_eq!(stepped, 0, "{}", std::io::Error::last_os_error());
        stopped();
        instructions += 1;
        assert_eq!(held(), PIECE, "after instruction {instructions}");
        assert!(instructions < 5_000_000, "it finds no room: {:?}", job.block.processes());
    }
    assert_eq!((held(), in_hand()), (PIECE, 0));
    for child in [&mut caller, &mut other] {
        child.kill().expect("it is there");
        child.wait().expect("it is gone");
    }
    job.block.reclaim(|_| {});
    assert_eq!(job.charged(), 0);
}

/// A program whose first thread leaves while others go on looks like a dead one in most of /proc.
#[test]
fn a_process_whose_first_thread_has_left_still_holds_its_memory() {
    let job = Job::new(1 << 20);
    let agent = muxflow_agent::control_block::ControlBlock::open(job.block.directory());
    let agent = agent.expect("the agent maps it too");
    let mut child = job.spawn(&["init", "alloc:0x100000", "leave"]);
    let output = BufReader::new(child.stdout.take().expect("piped"));
    assert!(output.lines().map_while(Result::ok).any(|line| line == "ready"), "it ended");
    let until = Instant::now() + Duration::from_secs(20);
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", child.id())).expect("there");
    while !stat().contains(") Z ") {
        assert!(Instant::now() < until, "its first thread does not leave: {}", stat());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!((agent.counts().processes, agent.reclaim(), job.charged()), (1, 0, 1 << 20));
    let outcome = job.run(&["init", "alloc:512"]);
    assert!(outcome.stdout.ends_with("alloc 2\n"), "given out twice: {}", outcome.stdout);
    child.kill().expect("it is there");
    child.wait().expect("it is gone");
    let outcome = job.run(&["init", "alloc:0x100000"]);
    assert!(outcome.stdout.ends_with("alloc 0\n"), "never given back: {}", outcome.stdout);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Whatever a process writes into the job's part, the agent reads numbers and a client runs or is
    /// refused; nobody crashes.
    #[test]
    fn garbage_in_the_job_part_crashes_nobody(
        writes in prop::collection::vec((64_usize..JobPart::BYTES - 8, any::<u64>()), 1..400),
    ) {
        let job = Job::new(1 << 20);
        let file = std::fs::OpenOptions::new().write(true).open(job.block.directory().join("job"));
        let file = file.expect("the job part");
        for (at, value) in writes {
            file.write_all_at(&value.to_le_bytes(), at as u64).expect("written");
        }
        // What the agent itself makes of it: numbers, and no slot for longer than its owner lives.
        let agent = muxflow_agent::control_block::ControlBlock::open(job.block.directory());
        let agent = agent.expect("only the header can be refused");
        let answers = agent.answers();
        prop_assert!(answers.drained <= answers.live && answers.released <= answers.drained);
        prop_assert!(agent.counts().processes <= SLOTS && agent.registered().len() <= SLOTS);
        agent.reclaim();
        let outcome = job.run(&["init", "alloc:512", "launch:20", "free", "info"]);
        prop_assert!(outcome.status.code().is_some(), "{:?} {}", outcome.status, outcome.stderr);
        for line in outcome.stdout.lines().filter(|line| line.starts_with("alloc")) {
            prop_assert!(line == "alloc 0" || line == "alloc 2", "{line}");
        }
    }

    /// Any bytes as the agent's part: valid or refused, and the client ends by itself.
    #[test]
    fn garbage_in_the_agent_part_crashes_nobody(
        writes in prop::collection::vec((0_usize..4096, any::<u8>()), 1..64),
    ) {
        let job = Job::new(1 << 20);
        let file = std::fs::OpenOptions::new().write(true).open(job.block.directory().join("agent"));
        let file = file.expect("the agent part");
        for (at, value) in writes {
            file.write_all_at(&[value], at as u64).expect("written");
        }
        // The live words may hold launches back for ever, which is no crash.
        let mut child = job.spawn(&["init", "alloc:512", "launch:20", "free", "info"]);
        let until = Instant::now() + Duration::from_millis(500);
        let mut ended = false;
        while !ended && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
            ended = child.try_wait().expect("a status").is_some();
        }
        child.kill().expect("it is not waited for");
        let status = child.wait().expect("it is gone");
        prop_assert!(!ended || status.code().is_some(), "{status:?}");
    }

    /// Look-ups by any name, version and flag find a symbol of that name or nothing.
    #[test]
    fn lookups_never_find_something_else(name in "(cu)?[A-Za-z0-9_]{0,24}", version in any::<u32>(), pt in any::<bool>()) {
        if let Some(index) = driver::resolve(name.as_bytes(), version, pt) {
            prop_assert_eq!(driver::DRIVER[index].base, &name);
            prop_assert!(driver::DRIVER[index].since <= version);
        }
        if let Some(index) = driver::index_of(name.as_bytes()) {
            prop_assert_eq!(driver::DRIVER[index].symbol, &name);
        }
    }
}
