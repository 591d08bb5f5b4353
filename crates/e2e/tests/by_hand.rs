//! `muxflow run`: a job with no manager, from the shell.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr::{null, null_mut};
use std::time::Duration;

use muxflow_e2e::{Outcome, build, client, default_signals, stub_driver};

/// The program, built by this test: it is not this package's own.
fn muxflow() -> PathBuf {
    build::products().join("muxflow")
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(muxflow());
    command
        .env("LD_LIBRARY_PATH", stub_driver())
        .env("MUXFLOW_XCUDA", build::xcuda())
        .env("STUB_KERNEL_US", "300")
        .arg("run")
        .args(arguments);
    command
}

fn run(arguments: &[&str]) -> Outcome {
    command(arguments).output().expect("it runs").into()
}

#[test]
fn a_job_by_hand_is_held_and_accounted_for() {
    let program = client("client", &[]);
    let program = program.to_str().expect("a path");
    let outcome = run(&[
        "--memory",
        "1MiB",
        "--",
        program,
        "init",
        "alloc:0x80000",
        "alloc:0x90000",
        "launch:100",
        "exit:3",
    ]);
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.stderr);
    assert!(outcome.stdout.contains("alloc 0\nalloc 2\nlaunch 0"), "{}", outcome.stdout);
    let report = outcome.stderr.lines().last().unwrap_or_default();
    for part in ["100 launches", "512.0 KiB of 1.0 MiB", "1 requests refused"] {
        assert!(report.contains(part), "{part}: {report}");
    }

    let child = command(&["--memory", "1MiB", "--", program, "handler", "init", "loop", "exit:5"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    std::thread::sleep(Duration::from_millis(500));
    let pid = i32::try_from(child.id()).expect("an id");
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let outcome: Outcome = child.wait_with_output().expect("it ends").into();
    assert_eq!(outcome.status.code(), Some(5), "{}", outcome.stderr);

    let outcome = run(&["--memory", "1MiB", "--", program, "init", "kill:15"]);
    assert_eq!(outcome.status.code(), Some(128 + 15));
    assert_eq!(outcome.status.signal(), None);
}

#[test]
fn it_explains_itself_and_refuses_what_would_run_free() {
    let outcome = run(&["--explain"]);
    assert!(outcome.status.success());
    for part in ["cuLaunchKernelEx_ptsz", "libcuda.so.1 (LD_LIBRARY_PATH, found)", "720 in all"] {
        assert!(outcome.stdout.contains(part), "{part}: {}", outcome.stdout);
    }
    // It says of each call what is done about it, and not what is done about others of its kind.
    let under = |symbol: &str| {
        let before = outcome.stdout.split(&format!(" {symbol} ")).next().unwrap_or_default();
        let title = before.trim_end().lines().rev().find(|line| !line.starts_with(' '));
        title.unwrap_or_default().to_owned()
    };
    assert!(under("cuCtxDetach").contains("released at the end"), "{}", under("cuCtxDetach"));
    assert!(under("cuCtxGetDevice").contains("forwarded as it is"), "{}", outcome.stdout);
    let program = client("client", &["-static"]);
    let outcome = run(&["--memory", "1MiB", "--", program.to_str().expect("a path"), "ready"]);
    assert_eq!(outcome.status.code(), Some(1));
    assert!(outcome.stderr.contains("statically linked"), "{}", outcome.stderr);
    let outcome = run(&["--memory", "lots", "--", "true"]);
    assert!(outcome.stderr.contains("--memory"), "{}", outcome.stderr);
}

/// What `muxflow run` said at the end.
#[derive(Debug)]
struct Report {
    launches: u64,
    waited_s: f64,
}

impl Report {
    fn read(path: &Path) -> Self {
        let text = std::fs::read_to_string(path).expect("a report");
        let before = |word: &str| {
            let words: Vec<&str> = text.split_whitespace().collect();
            let at = words.windows(2).find(|pair| pair[1].starts_with(word)).map(|pair| pair[0]);
            at.unwrap_or_else(|| panic!("no `{word}` in {text}")).to_owned()
        };
        let waited = text.split("launches waited ").nth(1).and_then(|rest| rest.split(' ').next());
        Self {
            launches: before("launches;").parse().expect("a number"),
            waited_s: waited.and_then(|word| word.parse().ok()).expect("a time"),
        }
    }
}

/// A job of short kernels and long pauses, for four seconds each time: beside a process that fills the
/// GPU, first with a limit and then without, and with the limit once more when it is alone.
const BESIDE: &str = r#"
    "$WORKER" 50000 40 "$DIR/other.pause" - >"$DIR/other" & other=$!
    while ! grep -q ready "$DIR/other"; do sleep 0.1; done
    sleep 1
    run() {
        name=$1; shift
        "$MUXFLOW" run --memory 1GiB "$@" -- "$WORKER" 2000 8 "$DIR/job.pause" - 2>"$DIR/$name" &
        job=$!; sleep 4; kill -TERM $job; wait $job
    }
    run limited --load-limit 0.4
    run free
    kill $other; wait $other
    run alone --load-limit 0.4
    true
"#;

#[test]
fn a_load_limit_holds_the_job_back_while_another_process_fills_the_gpu() {
    let files = tempfile::tempdir().expect("a directory");
    let path = |name: &str| files.path().join(name);
    std::fs::write(path("other.pause"), "0").expect("written");
    std::fs::write(path("job.pause"), "20000").expect("written");
    let mut node = Command::new(build::products().join("muxflow-emulated-node"));
    node.args(["--gpus", "t4", "--", "sh", "-c", BESIDE])
        .env("MUXFLOW", muxflow())
        .env("MUXFLOW_XCUDA", build::xcuda())
        .env("WORKER", client("worker", &[]))
        .env("DIR", files.path());
    let outcome: Outcome = default_signals(&mut node).output().expect("it runs").into();
    assert!(outcome.status.success(), "{}{}", outcome.stdout, outcome.stderr);
    let report = |name: &str| Report::read(&path(name));
    let (limited, free, alone) = (report("limited"), report("free"), report("alone"));
    let all = format!("limited {limited:?}, without a limit {free:?}, alone {alone:?}");
    println!("{all}");
    assert!(limited.waited_s > 1.0, "the job did not wait: {all}");
    assert!(free.waited_s < limited.waited_s / 10.0, "it waited without a limit: {all}");
    assert!(alone.waited_s < limited.waited_s / 4.0, "it waited with nobody beside it: {all}");
    assert!(free.launches > 2 * limited.launches, "the limit held nothing back: {all}");
    assert!(alone.launches > 2 * limited.launches, "alone it was as slow: {all}");
}

/// Lines of a child until one begins with a word.
fn until(reader: &mut impl BufRead, word: &str) -> String {
    let mut line = String::new();
    while !line.starts_with(word) {
        line.clear();
        assert!(reader.read_line(&mut line).expect("a line") > 0, "it ended before `{word}`");
    }
    line.trim().to_owned()
}

/// A shell as the program: what it has started is told too, and waited for.
#[test]
fn a_stop_reaches_every_process_of_the_job_and_waits_for_it() {
    let program = client("client", &[]);
    let script = format!("{} pid init forever; true", program.display());
    let mut child = default_signals(&mut command(&["--memory", "1MiB", "--", "sh", "-c", &script]))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    let pid = until(&mut reader, "pid").trim_start_matches("pid ").to_owned();
    until(&mut reader, "looping");
    let own = i32::try_from(child.id()).expect("an id");
    // SAFETY: our own child, not waited for yet.
    assert_eq!(unsafe { libc::kill(own, libc::SIGTERM) }, 0);
    let outcome: Outcome = child.wait_with_output().expect("it ends").into();
    assert_eq!(outcome.status.code(), Some(128 + libc::SIGTERM), "{}", outcome.stderr);
    let left = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    assert!(left.is_empty() || left.contains(") Z "), "it runs on: {left}");
    assert!(outcome.stderr.contains("launches; memory"), "{}", outcome.stderr);
}

/// Ctrl-C reaches all processes of a terminal; the program gets it once.
#[test]
fn an_interrupt_from_the_terminal_comes_once() {
    let (mut master, mut slave) = (-1, -1);
    // SAFETY: two places to write to; no name, settings or size.
    let made =
        unsafe { libc::openpty(&raw mut master, &raw mut slave, null_mut(), null(), null()) };
    assert_eq!(made, 0);
    // SAFETY: both were just opened, and nobody else has them.
    let (master, slave) = unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
    let program = client("client", &[]);
    let program = program.to_str().expect("a path");
    let operations = ["handler", "init", "loop", "sleep:1500", "times", "exit:5"];
    let mut command = command(&["--memory", "1MiB", "--", program]);
    default_signals(&mut command).args(operations);
    command.stdin(slave).stdout(Stdio::piped()).stderr(Stdio::piped());
    // SAFETY: two system calls, between fork and exec: a session of its own, with this terminal.
    unsafe {
        command.pre_exec(|| {
            if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let mut child = command.spawn().expect("it starts");
    let mut reader = BufReader::new(child.stdout.take().expect("piped"));
    until(&mut reader, "looping");
    (&master).write_all(b"\x03").expect("typed");
    assert_eq!(until(&mut reader, "times"), "times 1");
    let outcome: Outcome = child.wait_with_output().expect("it ends").into();
    assert_eq!(outcome.status.code(), Some(5), "{}", outcome.stderr);
}

#[test]
fn nvml_tells_the_quota_where_that_is_asked_for() {
    let total = |clamp: &[&str]| -> u64 {
        let mut node = Command::new(build::products().join("muxflow-emulated-node"));
        node.args(["--gpus", "t4", "--"]).arg(muxflow()).args(["run", "--memory", "1GiB"]);
        node.args(clamp).arg("--").arg(client("real", &[])).arg("nvml");
        let outcome: Outcome =
            node.env("MUXFLOW_XCUDA", build::xcuda()).output().expect("it runs").into();
        let told = outcome.stdout.trim().strip_prefix("total ").and_then(|n| n.parse().ok());
        told.unwrap_or_else(|| panic!("{}{}", outcome.stdout, outcome.stderr))
    };
    assert_eq!(total(&["--clamp-nvml"]), 1 << 30);
    assert!(total(&[]) > 8 << 30, "the whole GPU");
}
