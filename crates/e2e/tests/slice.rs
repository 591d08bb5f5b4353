//! Quota, gate, look-up and the safe side, over the stub driver.

use std::io::BufRead;
use std::path::Path;
use std::time::{Duration, Instant};

use muxflow_abi::control::{AgentPart, Gate, Limits, Settings};
use muxflow_e2e::{Job, build, client, stub, stub_driver};

fn lines(outcome: &muxflow_e2e::Outcome) -> Vec<&str> {
    outcome.stdout.lines().collect()
}

/// The nanoseconds that a `launch` operation printed.
fn launch_ns(line: &str) -> u64 {
    let mut words = line.split(' ').skip(1);
    assert_eq!(words.next(), Some("0"), "{line}");
    words.next().and_then(|word| word.parse().ok()).expect("a time")
}

#[test]
fn a_program_within_quota_runs_and_one_over_it_is_told_so() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&[
        "init",
        "total",
        "info0",
        "alloc:0x80000",
        "alloc:0x80001",
        "info",
        "free",
        "info",
    ]);
    let expected = [
        "init 0",
        "total 0 1048576",
        "info0 0",
        "alloc 0",
        "alloc 2",
        "info 0 524288 1048576",
        "free 0",
        "info 0 1048576 1048576",
    ];
    assert_eq!(lines(&outcome), expected, "{}", outcome.stderr);
    assert!(outcome.status.success());
}

#[test]
fn every_way_to_look_up_leads_to_the_quota() {
    for how in ["dlsym", "gpa", "default"] {
        let job = Job::new(1 << 20);
        let program = client("client", &[]);
        let mut command = job.command(&program, stub_driver());
        let outcome = command.env("LOOKUP", how).args(["init", "alloc:0x200000"]).output();
        let outcome: muxflow_e2e::Outcome = outcome.expect("it runs").into();
        assert_eq!(lines(&outcome), ["init 0", "alloc 2"], "{how}: {}", outcome.stderr);
    }
}

/// By `cuGetProcAddress` a program may ask for the functions of an old version, and for those that use
/// the default stream of a thread.
#[test]
fn old_versions_and_streams_of_threads_are_charged_and_gated_too() {
    let job = Job::new(1 << 20);
    let limits = Limits { rate_milli_per_s: 0, burst: 1, in_flight: 256 };
    job.block.agent().set_limits(&limits);
    let child = job.spawn(&["init", "oldest:0x100000"]);
    let waits = || job.block.processes().iter().any(|c| c.delayed_ns > 100_000_000);
    let until = Instant::now() + Duration::from_secs(20);
    while !waits() {
        assert!(Instant::now() < until, "it is not held: {:?}", job.block.processes());
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(job.charged(), 1 << 20);
    job.block.agent().set_limits(&Limits::OPEN);
    let outcome: muxflow_e2e::Outcome = child.wait_with_output().expect("it ends").into();
    assert_eq!(lines(&outcome)[1], "oldest 0 0 0 2 0", "{}", outcome.stderr);
}

#[test]
fn as_a_stand_in_it_does_the_same() {
    let job = Job::new(1 << 20);
    let program = client("client", &[]);
    let mut command = job.stand_in(&program, stub_driver());
    let outcome =
        command.args(["init", "alloc:0x80000", "alloc:0x80001", "launch:3", "table"]).output();
    let outcome: muxflow_e2e::Outcome = outcome.expect("it runs").into();
    let seen: Vec<_> = outcome.stdout.lines().map(|line| &line[..line.len().min(8)]).collect();
    assert_eq!(
        seen,
        ["init 0", "alloc 0", "alloc 2", "launch 0", "table 0 "],
        "{}",
        outcome.stderr
    );
}

#[test]
fn export_tables_pass_untouched() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&["table"]);
    assert_eq!(lines(&outcome), ["table 0 32"]);
}

#[test]
fn the_rate_holds_from_the_first_launch_on() {
    let job = Job::new(1 << 20);
    job.block.agent().set_limits(&Limits { rate_milli_per_s: 200_000, burst: 1, in_flight: 256 });
    let outcome = job.run(&["init", "launch:40"]);
    let took_ns = launch_ns(lines(&outcome)[1]);
    assert!(took_ns > 180_000_000, "40 launches at 200 a second took {took_ns} ns");
    assert!(took_ns < 600_000_000, "40 launches at 200 a second took {took_ns} ns");
}

#[test]
fn memory_in_hand_is_not_held() {
    let job = Job::new(8 << 20);
    // Freed by the thread that allocated, and by another.
    let outcome = job.run(&["init", "pairs:200", "many:300", "freeall", "info"]);
    let said = lines(&outcome);
    assert_eq!(said[1..4], ["pairs 0", "many 0", "freeall 0"]);
    assert_eq!(said[4], format!("info 0 {0} {0}", 8 << 20));
    let outcome = job.run(&["init", "pairs:200", "many:300", "freeelsewhere", "info"]);
    let said = lines(&outcome);
    assert_eq!(said[3], "freeelsewhere 0");
    assert_eq!(said[4], format!("info 0 {0} {0}", 8 << 20));
}

#[test]
fn what_one_process_has_in_hand_another_may_hold() {
    let job = Job::new(8 << 20);
    let mut idle = job.spawn(&["init", "pairs:200", "many:200", "freeall", "ready", "sleep:60000"]);
    let mut said = std::io::BufReader::new(idle.stdout.take().expect("a pipe"));
    let mut line = String::new();
    while !line.contains("ready") {
        assert_ne!(said.read_line(&mut line).expect("it speaks"), 0, "{line}");
    }
    assert_eq!(job.charged(), 0);
    let outcome = job.run(&["init", &format!("alloc:{}", 8 << 20), "alloc:512"]);
    assert_eq!(lines(&outcome)[1..], ["alloc 0", "alloc 2"], "all of it, and no more");
    // The idle one goes on as before.
    idle.kill().expect("it dies");
    idle.wait().expect("it is gone");
}

#[test]
fn at_most_one_extra_driver_call_per_sixteen_launches() {
    let job = Job::new(1 << 20);
    let outcome = job.run(&["init", "launch:16000", "beside"]);
    let beside = lines(&outcome)[2].to_owned();
    let numbers: Vec<u64> =
        beside.split(' ').skip(1).map(|n| n.parse().expect("a number")).collect();
    assert_eq!(numbers[1], 16_000, "every launch arrives");
    assert!(numbers[0] <= 1_000, "{beside}");
    assert!(numbers[0] >= 450, "the work in flight is followed: {beside}");
}

#[test]
fn work_in_flight_is_bounded_by_words_and_by_events() {
    for without in ["", "STUB_NO_WRITE_VALUE"] {
        let job = Job::new(1 << 20);
        let limits = Limits { rate_milli_per_s: u64::MAX, burst: 64, in_flight: 64 };
        job.block.agent().set_limits(&limits);
        let program = client("client", &[]);
        let mut command = job.command(&program, stub_driver());
        command.env("STUB_KERNEL_US", "500").args(["init", "launch:400", "sync"]);
        if !without.is_empty() {
            command.env(without, "1");
        }
        let outcome: muxflow_e2e::Outcome = command.output().expect("it runs").into();
        let took_ns = launch_ns(lines(&outcome)[1]);
        // 400 kernels of 0.5 ms; with 64 in flight at most, the last is launched after about 336.
        assert!(took_ns > 130_000_000, "{without}: all 400 were queued within {took_ns} ns");
        let counters = job.block.processes();
        assert!(counters.iter().all(|c| c.overruns == 0), "{without}: progress was seen");
    }
}

#[test]
fn a_closed_gate_holds_and_an_opened_one_lets_go() {
    let job = Job::new(1 << 20);
    job.block.command(Gate::Closed);
    let mut child = job.spawn(&["init", "launch:5", "ready"]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(child.try_wait().expect("a status").is_none(), "it waits at the gate");
    job.block.command(Gate::Open);
    let outcome: muxflow_e2e::Outcome = child.wait_with_output().expect("it ends").into();
    assert!(launch_ns(lines(&outcome)[1]) > 200_000_000);
    assert!(outcome.status.success());
}

#[test]
fn launches_into_a_capture_are_neither_gated_nor_counted() {
    let job = Job::new(1 << 20);
    job.block.agent().set_limits(&Limits { rate_milli_per_s: 0, burst: 1, in_flight: 1 });
    let outcome = job.run(&["init", "capture:0", "launch:1000", "endcapture:0", "beside"]);
    assert!(outcome.status.success(), "{}", outcome.stderr);
    assert_eq!(lines(&outcome)[4], "beside 0 1000", "and nothing was called beside");
}

#[test]
fn launches_are_counted_exactly() {
    let job = Job::new(1 << 20);
    let mut child = job.spawn(&["init", "launch:12345", "sleep:150", "ready", "sleep:10000"]);
    let mut launches = 0;
    let until = Instant::now() + Duration::from_secs(5);
    while launches != 12_345 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        launches = job.block.processes().iter().map(|c| c.launches).sum();
    }
    assert_eq!(launches, 12_345);
    let rhythm: u32 = job.block.processes()[0].rhythm.iter().sum();
    assert_eq!(rhythm, 12_345);
    child.kill().expect("it dies");
    child.wait().expect("it is gone");
}

#[test]
fn a_symbol_that_the_driver_lacks_stays_missing() {
    let job = Job::new(1 << 20);
    let old = stub("stub-old", &["cuMemAllocAsync", "cuMemAllocAsync_ptsz"]);
    let program = client("missing", &[]);
    let outcome: muxflow_e2e::Outcome =
        job.command(&program, &old).output().expect("it runs").into();
    assert_eq!(
        lines(&outcome),
        ["dlsym no", "default no", "gpa no 1", "nonsense no 1", "empty no 1"],
        "{}",
        outcome.stderr
    );
}

#[test]
fn both_versions_of_dlsym_are_caught_and_foreign_lookups_pass() {
    let job = Job::new(1 << 20);
    let program = client("versions", &[]);
    let outcome: muxflow_e2e::Outcome =
        job.command(&program, stub_driver()).output().expect("it runs").into();
    assert_eq!(lines(&outcome), ["old 2", "new 2", "next ok", "own ok"], "{}", outcome.stderr);
}

// ---- the safe side ----

fn refused(outcome: &muxflow_e2e::Outcome, reason: &str) {
    assert_eq!(&lines(outcome)[..2], ["init 0", "alloc 2"], "{}", outcome.stderr);
    assert!(lines(outcome)[2].starts_with("launch 802"), "{}", outcome.stdout);
    assert_eq!(outcome.stderr.matches("muxflow-xcuda").count(), 1, "said once: {}", outcome.stderr);
    assert!(outcome.stderr.contains(reason), "{}", outcome.stderr);
}

const TRIES: [&str; 5] = ["init", "alloc:512", "launch:1", "alloc:512", "launch:1"];

#[test]
fn without_a_good_control_block_everything_is_refused_and_the_reason_said_once() {
    let job = Job::new(1 << 20);
    let program = client("client", &[]);
    let mut command = job.command(&program, stub_driver());
    command.env_remove("MUXFLOW_CONTROL").args(TRIES);
    refused(&command.output().expect("it runs").into(), "MUXFLOW_CONTROL is not set");

    type Damage = fn(&std::path::Path);
    let damages: [(Damage, &str); 6] = [
        (|dir| std::fs::remove_file(dir.join("agent")).expect("removed"), "errno 2"),
        (|dir| truncate(&dir.join("agent"), 100), "truncated: 100 of"),
        (|dir| truncate(&dir.join("job"), 0), "truncated: 0 of"),
        (|dir| write_at(&dir.join("agent"), 8, &[9]), "version 9"),
        (|dir| write_at(&dir.join("agent"), 0, &[0xa5; AgentPart::BYTES]), "wrong magic"),
        (|dir| write_at(&dir.join("job"), 24, &[1, 2, 3]), "checksum"),
    ];
    for (damage, reason) in damages {
        let job = Job::new(1 << 20);
        damage(job.block.directory());
        refused(&job.run(&TRIES), reason);
    }
}

fn truncate(path: &std::path::Path, bytes: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(path).expect("it is there");
    file.set_len(bytes).expect("it can be cut");
}

fn write_at(path: &std::path::Path, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().write(true).open(path).expect("it is there");
    file.write_all_at(bytes, at).expect("it can be written");
}

#[test]
fn when_the_agent_dies_launches_slow_down_then_stop_and_the_process_ends() {
    let settings = Settings { slow_after_ms: 200, stop_after_ms: 600, ..Settings::default() };
    let mut job = Job::with(1 << 20, &settings);
    let program = client("client", &[]);
    let mut command = job.command(&program, stub_driver());
    command.env("MUXFLOW_ABANDONED_MS", "500").args(["init", "forever"]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let child = command.spawn().expect("it starts");
    std::thread::sleep(Duration::from_millis(300));
    job.stop_beating();
    let outcome: muxflow_e2e::Outcome = child.wait_with_output().expect("it ends").into();
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(outcome.status.signal(), Some(libc::SIGTERM), "{}", outcome.stderr);
    for said in ["the agent is late", "the agent is gone", "did not come back"] {
        assert_eq!(outcome.stderr.matches(said).count(), 1, "{said}: {}", outcome.stderr);
    }
    assert!(job.stub_log().contains("destroy"), "contexts were released: {}", job.stub_log());
}

/// A program of musl has its loader among its libraries. Here a library has only that name.
#[test]
fn musl_is_refused_by_name() {
    let job = Job::new(1 << 20);
    let library = job.path("ld-musl-x86_64.so.1");
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-shared", "-x", "c", "/dev/null", "-o"]).arg(&library);
    build::must(&mut compiler);
    let mut command = job.command(&client("client", &[]), stub_driver());
    command.env("LD_PRELOAD", format!("{}:{}", build::xcuda().display(), library.display()));
    let outcome: muxflow_e2e::Outcome = command.args(["init"]).output().expect("it runs").into();
    assert_eq!(outcome.status.code(), Some(126), "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("this program runs on musl"), "{}", outcome.stderr);
}

#[test]
fn it_needs_no_new_glibc() {
    let output = std::process::Command::new("objdump").arg("-T").arg(build::xcuda()).output();
    let text =
        String::from_utf8(output.expect("objdump (binutils) is needed").stdout).expect("text");
    let newest = text
        .split("GLIBC_2.")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u32>().ok())
        .max();
    assert!(newest <= Some(17), "needs glibc 2.{newest:?}");
    assert!(newest.is_some());
}

#[test]
fn memory_of_a_graph_that_is_gone_counts_until_it_is_trimmed() {
    let run = |keeps: bool, operations: &[&str]| -> muxflow_e2e::Outcome {
        let job = Job::new(2 << 20);
        let mut command = job.command(&client("client", &[]), stub_driver());
        if keeps {
            command.env("STUB_GRAPH_KEEPS", "1");
        }
        command.args(operations).output().expect("it runs").into()
    };
    let (all, half) = ("info 0 2097152 2097152", "info 0 1048576 2097152");
    let given_back = ["init", "graph:0x100000", "info", "graphend", "info", "graphtrim", "info"];
    let outcome = run(false, &given_back);
    let seen = ["init 0", "graph 0", half, "graphend 0", all, "graphtrim 0", all];
    assert_eq!(lines(&outcome), seen, "{}", outcome.stderr);
    let outcome = run(true, &given_back);
    let seen = ["init 0", "graph 0", half, "graphend 0", half, "graphtrim 0", all];
    assert_eq!(lines(&outcome), seen, "{}", outcome.stderr);
    // Where room is short it is trimmed for the program.
    let outcome = run(true, &["init", "graph:0x100000", "graphend", "alloc:0x180000", "info"]);
    let seen = ["init 0", "graph 0", "graphend 0", "alloc 0", "info 0 524288 2097152"];
    assert_eq!(lines(&outcome), seen, "{}", outcome.stderr);
}

#[test]
fn a_program_that_waits_for_each_kernel_tells_how_long_one_takes() {
    let job = Job::new(1 << 20);
    let mut command = job.command(&client("client", &[]), stub_driver());
    command.env("STUB_KERNEL_US", "3000").args(["init", "paced:60", "ready"]);
    let outcome: muxflow_e2e::Outcome = command.output().expect("it runs").into();
    assert!(outcome.stdout.contains("paced 0"), "{}{}", outcome.stdout, outcome.stderr);
    let each_ns = job.block.processes()[0].ns_per_launch;
    // A busy machine wakes the program late, and lets a kernel run before the program waits for it.
    assert!((500_000..60_000_000).contains(&each_ns), "{each_ns} ns instead of 3 ms");
}

#[test]
fn what_a_living_context_holds_stays_charged_when_another_one_goes() {
    let (half, all) = ("info 0 524288 1048576", "info 0 1048576 1048576");
    for (first, second) in [("release", "ctxend"), ("ctxend", "release")] {
        let job = Job::new(1 << 20);
        let outcome =
            job.run(&["init", "ctx", "alloc:0x80000", first, "info", second, "info", "_exit:0"]);
        let told = lines(&outcome).into_iter().filter(|line| line.starts_with("info"));
        assert_eq!(told.collect::<Vec<_>>(), [half, all], "{first} first: {}", outcome.stderr);
    }
}

#[test]
fn without_its_threads_nothing_is_launched() {
    let job = Job::new(1 << 20);
    let mut command = job.command(Path::new("sh"), stub_driver());
    // Stacks larger than all the memory that there may be: no thread can be started.
    let limits = "ulimit -s 1048576 && ulimit -v 800000 && exec \"$0\" init launch:3";
    let outcome = command.args(["-c", limits]).arg(client("client", &[])).output();
    let outcome: muxflow_e2e::Outcome = outcome.expect("it runs").into();
    assert!(outcome.stdout.contains("launch 802 "), "{} {}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("cannot start a thread"), "{}", outcome.stderr);
}
