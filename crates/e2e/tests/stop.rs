//! Every way out: contexts are gone, nothing is in flight, and the wait status is the program's own.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Settings, SlotState};
use muxflow_e2e::{Job, client, default_signals, stub_driver};

/// Starts the client with slow kernels; returns when it says that it loops.
fn start(job: &Job, operations: &[&str]) -> Child {
    let program = client("client", &[]);
    let mut command = job.command(&program, stub_driver());
    command.env("STUB_KERNEL_US", "300").args(operations);
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

fn wait_for(job: &Job, state: SlotState, word: u32) {
    let until = Instant::now() + Duration::from_secs(5);
    while !job.block.processes().iter().any(|c| c.state == state && c.acknowledged == word) {
        assert!(Instant::now() < until, "{:?}", job.block.processes());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn the_agent_freezes_thaws_drains_and_resets() {
    let job = Job::new(1 << 20);
    let child = start(&job, &["init", "forever"]);
    let word = job.block.command(Gate::Frozen);
    wait_for(&job, SlotState::Drained, word);
    let launches = |job: &Job| job.block.processes()[0].launches;
    std::thread::sleep(Duration::from_millis(50));
    let frozen = launches(&job);
    std::thread::sleep(Duration::from_millis(150));
    assert_eq!(launches(&job), frozen, "frozen is frozen");
    let word = job.block.command(Gate::Open);
    wait_for(&job, SlotState::Registered, word);
    std::thread::sleep(Duration::from_millis(100));
    assert!(launches(&job) > frozen, "thawed");
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
    let child = start(&job, &["init", "forever"]);
    let word = job.block.command(Gate::Drain);
    wait_for(&job, SlotState::Drained, word);
    signal(&child, libc::SIGTERM);
    assert_eq!(end(child).signal(), Some(libc::SIGTERM));
    released(&job);
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
