//! Every way out: contexts are gone, nothing is in flight, and the wait status is the program's own.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Limits, Settings, SlotState};
use muxflow_e2e::block::now_ns;
use muxflow_e2e::{Job, client, default_signals, stub_driver};

/// What the stub says of its launches, in a file that outlives it.
struct Stamp(File);

impl Stamp {
    fn new(job: &Job) -> Self {
        let path = job.path("stamp");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.expect("a file");
        file.set_len(4096).expect("it can be sized");
        Self(file)
    }

    fn word(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at * 8).expect("it is long enough");
        u64::from_le_bytes(bytes)
    }

    fn launches(&self) -> u64 {
        self.word(3)
    }

    /// Whether all that was launched had ended at this time.
    fn is_idle_at(&self, now_ns: u64) -> bool {
        self.word(2) <= now_ns
    }
}

/// Starts the client with slow kernels; returns when it says that it loops.
fn start(job: &Job, operations: &[&str]) -> Child {
    start_with(job, "300", operations)
}

fn start_with(job: &Job, kernel_us: &str, operations: &[&str]) -> Child {
    let program = client("client", &[]);
    let mut command = job.command(&program, stub_driver());
    command.env("STUB_KERNEL_US", kernel_us).env("STUB_STAMP", job.path("stamp")).args(operations);
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    default_signals(&mut command);
    let mut child = command.spawn().expect("it starts");
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.starts_with("looping") && !line.starts_with("ready") {
        line.clear();
        assert!(reader.read_line(&mut line).expect("a line") > 0, "it ended too early");
    }
    std::thread::sleep(Duration::from_millis(100));
    child.stdout = Some(reader.into_inner());
    child
}

fn signal(child: &Child, signal: i32) {
    let pid = i32::try_from(child.id()).expect("a process id");
    // SAFETY: a child of this test that was not waited for.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

fn end(mut child: Child) -> ExitStatus {
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(status) = child.try_wait().expect("a status") {
            return status;
        }
        assert!(Instant::now() < until, "it did not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The context was destroyed, and nothing was in flight then.
fn released(job: &Job) {
    let log = job.stub_log();
    let last = log.lines().rfind(|line| line.starts_with("destroy"));
    let last = last.unwrap_or_else(|| panic!("no context was destroyed: {log}"));
    assert!(last.contains("in_flight_us 0 "), "{log}");
    assert_eq!(log.matches("create").count(), log.matches("destroy").count(), "{log}");
}

#[test]
fn the_default_action_keeps_its_status() {
    for number in [libc::SIGTERM, libc::SIGINT] {
        let job = Job::new(1 << 20);
        let child = start(&job, &["init", "forever"]);
        signal(&child, number);
        assert_eq!(end(child).signal(), Some(number));
        released(&job);
    }
}

#[test]
fn a_handler_set_before_or_after_runs_and_the_program_ends_as_it_likes() {
    for operations in [
        &["handler", "init", "loop", "sync", "exit:5"],
        &["init", "handler", "loop", "sync", "exit:5"],
    ] {
        let job = Job::new(1 << 20);
        let child = start(&job, operations);
        signal(&child, libc::SIGTERM);
        assert_eq!(end(child).code(), Some(5));
        released(&job);
    }
}

#[test]
fn a_handler_that_exits_at_once_is_drained_before() {
    let job = Job::new(1 << 20);
    let child = start(&job, &["init", "handlerexit", "forever"]);
    signal(&child, libc::SIGTERM);
    assert_eq!(end(child).code(), Some(7));
    released(&job);
}

#[test]
fn the_checkpoint_window_allows_launches_one_at_a_time_and_ends() {
    let settings = Settings { checkpoint_window_ms: 700, ..Settings::default() };
    let job = Job::with(1 << 20, &settings);
    // After the signal the program goes on launching for ever: that is more than the window.
    let child = start(&job, &["handler", "init", "loop", "launch:20", "ready", "forever"]);
    let started = Instant::now();
    signal(&child, libc::SIGTERM);
    assert_eq!(end(child).signal(), Some(libc::SIGTERM));
    assert!(started.elapsed() > Duration::from_millis(700));
    assert!(started.elapsed() < Duration::from_secs(5));
    released(&job);
}

#[test]
fn the_program_sees_its_own_handlers() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&["init", "asked", "handler", "asked", "ignore", "asked"]);
    let asked: Vec<_> = outcome.stdout.lines().filter(|line| line.starts_with("asked")).collect();
    assert_eq!(asked, ["asked default", "asked mine", "asked ignore"]);
}

#[test]
fn an_ignored_signal_stays_ignored() {
    let job = Job::new(1 << 20);
    let child = start(&job, &["ignore", "init", "ready", "sleep:300", "launch:10", "exit:3"]);
    signal(&child, libc::SIGTERM);
    assert_eq!(end(child).code(), Some(3));
    released(&job);
}

#[test]
fn every_exit_releases() {
    for (operation, code, number) in [
        ("exit:4", Some(4), None),
        ("_exit:6", Some(6), None),
        ("quick_exit:8", Some(8), None),
        ("abort", None, Some(libc::SIGABRT)),
    ] {
        let job = Job::new(1 << 20);
        let program = client("client", &[]);
        let mut command = job.command(&program, stub_driver());
        command.env("STUB_KERNEL_US", "300").args(["init", "launch:200", operation]);
        let status = command.output().expect("it runs").status;
        assert_eq!((status.code(), status.signal()), (code, number), "{operation}");
        released(&job);
    }
}

#[test]
fn a_main_that_returns_releases_too() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&["init", "ctx", "launch:5"]);
    assert!(outcome.status.success());
    released(&job);
}

fn within(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn wait_for(job: &Job, state: SlotState, word: u32) {
    let answered = || {
        let processes = job.block.processes();
        processes.iter().any(|c| c.state == state && c.acknowledged == word)
    };
    within(&format!("it answers {word:#x} with {state:?}"), answered);
}

#[test]
fn the_agent_freezes_thaws_drains_and_resets() {
    let job = Job::new(1 << 20);
    let stamp = Stamp::new(&job);
    let child = start(&job, &["init", "forever"]);
    let word = job.block.command(Gate::Frozen);
    wait_for(&job, SlotState::Drained, word);
    let frozen = stamp.launches();
    assert!(stamp.is_idle_at(now_ns()), "work was in flight");
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(stamp.launches(), frozen, "frozen is frozen");
    let word = job.block.command(Gate::Open);
    wait_for(&job, SlotState::Registered, word);
    within("thawed", || stamp.launches() > frozen);
    let word = job.block.command(Gate::Drain);
    wait_for(&job, SlotState::Drained, word);
    let word = job.block.command(Gate::Reset);
    wait_for(&job, SlotState::Released, word);
    released(&job);
    signal(&child, libc::SIGKILL);
    assert_eq!(end(child).signal(), Some(libc::SIGKILL));
}

#[test]
fn after_a_drain_by_the_agent_a_kill_finds_nothing_in_flight() {
    let job = Job::new(1 << 20);
    let stamp = Stamp::new(&job);
    let child = start(&job, &["init", "threads:3"]);
    within("it launches", || stamp.launches() > 100);
    let word = job.block.command(Gate::Drain);
    wait_for(&job, SlotState::Drained, word);
    let launches = stamp.launches();
    assert!(stamp.is_idle_at(now_ns()), "work was in flight");
    signal(&child, libc::SIGKILL);
    assert_eq!(end(child).signal(), Some(libc::SIGKILL));
    assert_eq!(stamp.launches(), launches, "something was launched after the drain");
}

/// Three threads, and two kernels in flight at most: somebody always waits for the work of the others when
/// the gate closes. Nobody starts anything then.
#[test]
fn a_launch_that_waits_for_others_does_not_start_when_the_gate_has_closed() {
    for gate in [Gate::Closed, Gate::Frozen, Gate::Drain] {
        let job = Job::new(1 << 20);
        job.block.agent().set_limits(&Limits { in_flight: 2, ..Limits::OPEN });
        let stamp = Stamp::new(&job);
        let child = start_with(&job, "100000", &["init", "threads:3"]);
        within("it launches", || stamp.launches() > 3);
        let word = job.block.command(gate);
        // Who was past the gate has launched by now.
        std::thread::sleep(Duration::from_millis(20));
        let launches = stamp.launches();
        let state = if gate == Gate::Closed { SlotState::Registered } else { SlotState::Drained };
        wait_for(&job, state, word);
        within("its work ends", || stamp.is_idle_at(now_ns()));
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(stamp.launches(), launches, "{gate:?}");
        signal(&child, libc::SIGKILL);
        end(child);
    }
}

/// In its own checkpoint window a process still answers the agent: it drains, and a reset ends it.
#[test]
fn a_process_that_stops_by_itself_answers_the_agent() {
    let settings = Settings { checkpoint_window_ms: 600_000, ..Settings::default() };
    let job = Job::with(1 << 20, &settings);
    let stamp = Stamp::new(&job);
    let child = start(&job, &["handler", "init", "loop", "ready", "forever"]);
    signal(&child, libc::SIGTERM);
    within("it stops", || job.block.processes().iter().any(|c| c.state == SlotState::Drained));
    let before = stamp.launches();
    within("its window lets it launch", || stamp.launches() > before + 5);
    let word = job.block.command(Gate::Drain);
    wait_for(&job, SlotState::Drained, word);
    let drained = stamp.launches();
    assert!(stamp.is_idle_at(now_ns()), "work was in flight");
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(stamp.launches(), drained);
    let word = job.block.command(Gate::Checkpoint);
    wait_for(&job, SlotState::Drained, word);
    within("the window is open again", || stamp.launches() > drained);
    job.block.command(Gate::Reset);
    assert_eq!(end(child).signal(), Some(libc::SIGTERM));
    released(&job);
}

#[test]
fn a_reset_leaves_nothing_charged() {
    let settings = Settings { context_bytes: 4096, ..Settings::default() };
    let job = Job::with(1 << 20, &settings);
    let operations = ["init", "ctx", "alloc:0x40000", "heap:0x1000", "ready", "sleep:600000"];
    let child = start(&job, &operations);
    assert_eq!(job.charged(), 0x40000 + 0x1000 + 2 * 4096);
    let word = job.block.command(Gate::Reset);
    wait_for(&job, SlotState::Released, word);
    assert_eq!(job.charged(), 0);
    released(&job);
    signal(&child, libc::SIGKILL);
    end(child);
}

/// A program that lives in green contexts only has a context all the same.
#[test]
fn green_contexts_are_drained_and_released() {
    let job = Job::new(1 << 20);
    let child = start(&job, &["green", "forever"]);
    let word = job.block.command(Gate::Drain);
    wait_for(&job, SlotState::Drained, word);
    signal(&child, libc::SIGTERM);
    assert_eq!(end(child).signal(), Some(libc::SIGTERM));
    released(&job);
    // One that was destroyed, and contexts that were left by detaching, are not touched again.
    let outcome = job.run(&["green", "greenend", "init", "ctx", "attach", "detach", "detach"]);
    assert!(outcome.status.success(), "{}", outcome.stderr);
    released(&job);
}

/// The agent is gone for good, and the program ignores or blocks the signal that says so.
#[test]
fn a_process_without_an_agent_ends_also_if_it_does_not_listen() {
    for deaf in ["ignore", "block"] {
        let settings = Settings {
            slow_after_ms: 100,
            stop_after_ms: 200,
            checkpoint_window_ms: 300,
            ..Settings::default()
        };
        let mut job = Job::with(1 << 20, &settings);
        let program = client("client", &[]);
        let mut command = job.command(&program, stub_driver());
        command.env("STUB_KERNEL_US", "300").env("MUXFLOW_ABANDONED_MS", "300");
        command.args([deaf, "init", "launch:10", "ready", "sleep:600000"]);
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = default_signals(&mut command).spawn().expect("it starts");
        let mut reader = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.contains("ready") {
            assert!(reader.read_line(&mut line).expect("a line") > 0, "it ended too early: {line}");
        }
        job.stop_beating();
        assert_eq!(end(child).signal(), Some(libc::SIGTERM), "{deaf}");
        released(&job);
    }
}

/// No handler of ours sees a signal that the program waits for: the agent drains it first.
#[test]
fn a_program_that_waits_for_signals_is_drained_through_the_control_block() {
    let job = Job::new(1 << 20);
    let stamp = Stamp::new(&job);
    let child = start(&job, &["init", "sigwait"]);
    within("it launches", || stamp.launches() > 100);
    let word = job.block.command(Gate::Drain);
    wait_for(&job, SlotState::Drained, word);
    assert!(stamp.is_idle_at(now_ns()), "work was in flight");
    let launches = stamp.launches();
    signal(&child, libc::SIGTERM);
    assert_eq!(end(child).code(), Some(40 + libc::SIGTERM), "it leaves as it likes");
    assert_eq!(stamp.launches(), launches);
    released(&job);
}

/// `sigaction` may be called by a handler, by several threads at once, in a forked child, and while the
/// first context is made.
#[test]
fn handlers_may_be_set_from_everywhere() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&["init", "storm:4000", "forkstorm:150", "exit:3"]);
    assert_eq!(outcome.status.code(), Some(3), "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stdout.contains("storm\nforkstorm 0\n"), "{}", outcome.stdout);
    for _ in 0..12 {
        let outcome = job.run(&["setting", "init", "kill:15", "times", "exit:3"]);
        assert_eq!(outcome.status.code(), Some(3), "{:?} {}", outcome.status, outcome.stderr);
        assert!(outcome.stdout.ends_with("times 1\n"), "{}", outcome.stdout);
    }
}

/// A file of the control block is cut short while a process has it mapped: an access would end it, with
/// its contexts and with work in flight.
#[test]
fn a_control_block_that_is_cut_short_refuses_everything_and_ends_nobody_uncleanly() {
    for (part, kept) in [("job", 0), ("job", 100), ("agent", 0)] {
        let mut job = Job::new(1 << 20);
        let operations = ["init", "alloc:0x1000", "launch:100", "ready", "sleep:1500"];
        let after = ["alloc:512", "launch:1", "free", "alloc:512", "exit:5"];
        let program = client("client", &[]);
        let mut command = job.command(&program, stub_driver());
        command.env("STUB_KERNEL_US", "300").args(operations).args(after);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = default_signals(&mut command).spawn().expect("it starts");
        let mut reader = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.starts_with("ready") {
            line.clear();
            assert!(reader.read_line(&mut line).expect("a line") > 0, "it ended too early");
        }
        // The test has both parts mapped too, and must not be the one to touch them.
        job.stop_beating();
        let file = std::fs::OpenOptions::new().write(true).open(job.block.directory().join(part));
        file.expect("the part").set_len(kept).expect("it can be cut");
        let said = std::io::read_to_string(&mut reader).expect("its output");
        let output = child.wait_with_output().expect("a status");
        let why = String::from_utf8_lossy(&output.stderr);
        let context = format!("{part} cut to {kept}: {:?}\n{said}\n{why}", output.status);
        if part == "job" {
            assert_eq!(output.status.code(), Some(5), "{context}");
            assert!(said.contains("alloc 2\nlaunch 802") && said.contains("free 0"), "{context}");
            assert_eq!(why.matches("cut short while it was in use").count(), 1, "{context}");
        } else {
            // A silent agent: the process stops itself, as it would have if the agent had died.
            assert_eq!(output.status.signal(), Some(libc::SIGTERM), "{context}");
        }
        released(&job);
    }
}

/// What is not of the control block goes to whom it would have gone to.
#[test]
fn other_bus_errors_end_the_program_as_they_would_have() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&["init", "buserror"]);
    assert_eq!(outcome.status.signal(), Some(libc::SIGBUS), "{}", outcome.stderr);
    let outcome = job.run(&["init", "bushandler", "buserror"]);
    assert_eq!(outcome.status.code(), Some(7), "{}", outcome.stderr);
    let outcome = job.run(&["init", "kill:7"]);
    assert_eq!(outcome.status.signal(), Some(libc::SIGBUS), "{}", outcome.stderr);
}
