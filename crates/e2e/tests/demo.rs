//! The demo as a user runs it: the whole, and interrupted at any moment.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muxflow_e2e::build::{products, xcuda};
use muxflow_e2e::default_signals;

/// Latencies are real: one demo at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A temporary directory of its own, so that what is left behind is seen.
fn demo(seconds: u32, dir: &tempfile::TempDir, out: Stdio) -> Child {
    default_signals(&mut Command::new(products().join("muxflow")))
        .args(["demo", "--seconds", &seconds.to_string()])
        .arg("--json")
        .arg(dir.path().join("result.json"))
        .env("TMPDIR", dir.path())
        .env("MUXFLOW_XCUDA", xcuda())
        .stdout(out)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Of the terminal that a person looks at.
const COLUMNS: u16 = 80;

/// Processes, shared memory, directories and control groups of a demo that was process `pid`.
fn left_behind(pid: u32, dir: &tempfile::TempDir) -> Vec<String> {
    let label = format!("muxflow-demo-{pid}-");
    let mut left = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        for name in ["cmdline", "environ"] {
            let text = std::fs::read(entry.path().join(name)).unwrap_or_default();
            if String::from_utf8_lossy(&text).contains(&label) {
                left.push(format!(
                    "{}: {}",
                    entry.path().display(),
                    String::from_utf8_lossy(&text)
                ));
            }
        }
    }
    let groups = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    let groups = groups.map(|entry| entry.path());
    let places = ["/dev/shm", "/tmp", "/sys/fs/cgroup"].map(PathBuf::from);
    for place in places.into_iter().chain([dir.path().to_owned()]).chain(groups) {
        for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&label) {
                left.push(entry.path().display().to_string());
            }
        }
    }
    left
}

/// The usual terminal, of 24 lines of 80 characters: the end that a person looks at, and the program's.
fn terminal() -> (OwnedFd, OwnedFd) {
    let (mut ours, mut theirs) = (-1, -1);
    let size = libc::winsize { ws_row: 24, ws_col: COLUMNS, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: two integers and a size to read from, no name, no settings.
    let made = unsafe {
        libc::openpty(&mut ours, &mut theirs, std::ptr::null_mut(), std::ptr::null(), &size)
    };
    assert_eq!(made, 0, "no terminal: {}", std::io::Error::last_os_error());
    // SAFETY: both were opened just now and belong to nobody else.
    unsafe { (OwnedFd::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// All that a program wrote to a terminal, once it has closed it.
fn shown(from: OwnedFd) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let (mut screen, mut text, mut buffer) = (File::from(from), Vec::new(), [0; 4096]);
        // A terminal whose other end is closed reads as an error.
        while let Ok(count) = screen.read(&mut buffer) {
            if count == 0 {
                break;
            }
            text.extend_from_slice(&buffer[..count]);
        }
        String::from_utf8_lossy(&text).into_owned()
    })
}

/// The live view: frames drawn over each other, each a table of all GPUs, and the day goes on in them.
fn check_frames(text: &str) {
    let frames: Vec<&str> = text.split("F\x1b[J").skip(1).collect();
    let clocks: BTreeSet<&str> = frames
        .iter()
        .filter_map(|frame| frame.split(" of the day").next()?.split("· ").last())
        .filter(|clock| clock.len() == 5)
        .collect();
    assert!(frames.len() > 20 && clocks.len() > 10, "{} frames: {clocks:?}", frames.len());
    let busy = frames.iter().filter(|frame| {
        let gpus = (0..4).all(|gpu| frame.contains(&format!("\n  {gpu}    ")));
        gpus && frame.contains("SM activity") && frame.contains('█') && frame.contains("train-")
    });
    assert!(busy.count() > 5, "no frame shows four GPUs with jobs: {:?}", frames.last());
    // A line that the terminal breaks in two would not be erased whole.
    for frame in frames.iter().filter(|frame| frame.contains("SM activity")) {
        let lines: Vec<&str> = frame.split("\r\n").take_while(|line| !line.is_empty()).collect();
        let from = lines.iter().position(|line| line.contains(" of the day")).unwrap();
        let drawn = lines[from..].iter().map(|line| line.split('\x1b').next().unwrap());
        let long: Vec<&str> = drawn.filter(|line| line.chars().count() > COLUMNS.into()).collect();
        assert_eq!(long, Vec::<&str>::new(), "{frame}");
    }
}

/// One whole demo: what a person saw, and its result.
fn whole_demo(seconds: u32) -> (String, serde_json::Value) {
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = terminal();
    let child = demo(seconds, &dir, theirs.into());
    let pid = child.id();
    let screen = shown(ours);
    let output = child.wait_with_output().unwrap();
    let text = screen.join().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    let json = std::fs::read_to_string(dir.path().join("result.json")).unwrap();
    assert_eq!(left_behind(pid, &dir), Vec::<String>::new());
    (text, serde_json::from_str(&json).unwrap())
}

/// Both errors happened in both: else a table that looks well would say nothing.
fn both_errors(phases: &serde_json::Value) -> bool {
    [1, 2].iter().all(|&phase| phases[phase]["injected"].as_array().unwrap().len() == 2)
}

#[test]
fn the_demo_shows_what_protection_is_worth() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // A machine that stands still for seconds, and no GPU has a job when an error is due: another day.
    let (mut text, mut phases) = whole_demo(20);
    if !both_errors(&phases) {
        println!("an error found no job, the day is played again: {phases}");
        (text, phases) = whole_demo(20);
    }
    let json = serde_json::to_string_pretty(&phases).unwrap();
    assert!(text.contains("without protection") && text.contains("errors contained"), "{text}");
    check_frames(&text);
    let [alone, with, without] = [0, 1, 2].map(|index| &phases[index]);
    let number = |phase: &serde_json::Value, field: &str| phase[field].as_f64().unwrap();
    let failed = |phase: &serde_json::Value| -> u64 {
        phase["services"].as_array().unwrap().iter().map(|s| s["failed"].as_u64().unwrap()).sum()
    };
    println!("{}", text.rsplit("\x1b[J").next().unwrap());
    assert_eq!(number(alone, "iterations"), 0.0);
    assert!(number(with, "iterations") > 0.0 && number(without, "iterations") > 0.0, "{json}");
    assert!(number(with, "sm_activity_pct") > number(alone, "sm_activity_pct"), "{json}");
    assert!(both_errors(&phases), "{json}");
    // A job that is ended beside a service costs it nothing.
    let sigterm = &with["injected"][1];
    assert!(sigterm["what"].as_str().unwrap().contains("SIGTERM"), "{json}");
    assert_eq!(sigterm["failed_after"].as_u64(), Some(0), "{json}");
    assert!(failed(without) > 0, "without protection an error reaches the clients: {json}");
    assert!(failed(with) < failed(without), "{json}");
    // Its context is lost with the job's, and it is back before the day is over.
    assert!(number(with, "replica_restarts") >= 1.0, "{json}");
    assert!(number(with, "replicas_out_s") < number(without, "replicas_out_s"), "{json}");
}

#[test]
fn interrupted_at_any_moment_it_leaves_nothing() {
    // Moments of start, of the first phase, and of the second with jobs on the GPUs; the first ones
    // drawn anew each time. By Ctrl-C, by a reader that has seen enough, by a terminal that is closed.
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let drawn = u64::from(std::time::UNIX_EPOCH.elapsed().unwrap().subsec_micros() % 1_500);
    for (after_ms, by) in [
        (drawn / 10, Some(libc::SIGINT)),
        (100 + drawn, None),
        (7_000 + drawn, Some(libc::SIGHUP)),
        (22_000 + drawn, Some(libc::SIGINT)),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = demo(8, &dir, Stdio::piped());
        let pid = child.id();
        std::thread::sleep(Duration::from_millis(after_ms));
        assert!(child.try_wait().unwrap().is_none(), "over after {after_ms} ms already");
        match by {
            // SAFETY: plain system call with numbers.
            Some(signal) => drop(unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) }),
            None => drop(child.stdout.take()),
        }
        let deadline = Instant::now() + Duration::from_secs(60);
        while child.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "it goes on, interrupted after {after_ms} ms");
            std::thread::sleep(Duration::from_millis(20));
        }
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert_eq!(left_behind(pid, &dir), Vec::<String>::new(), "after {after_ms} ms: {text}");
        println!("interrupted after {after_ms} ms: {:?}", output.status);
        // Without a terminal there are plain lines, and nothing is drawn over.
        assert!(!text.contains('\x1b'), "{text}");
        if after_ms > 22_000 {
            assert!(text.contains("| GPU 0 ") && text.contains(" p99 "), "{text}");
        }
    }
}

/// What a path of the dashboard's server answers: its status line.
fn answer(address: &str, path: &str, token: Option<&str>) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let by = token.map_or_else(String::new, |t| format!("Authorization: Bearer {t}\r\n"));
    write!(stream, "GET {path} HTTP/1.1\r\nHost: demo\r\n{by}Connection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    BufReader::new(stream).read_line(&mut text).unwrap();
    text
}

/// Looks at the dashboard as the printed line says; its address and token.
fn look_at(line: &str) -> (String, String) {
    let url = line.split("http://").nth(1).unwrap();
    let (address, token) = url.split_once("/dashboard#token=").unwrap();
    assert!(answer(address, "/dashboard", None).contains(" 200 "), "{line}");
    assert!(answer(address, "/v1/health", Some(token)).contains(" 200 "), "{line}");
    assert!(answer(address, "/v1/health", Some("another")).contains(" 401 "), "{line}");
    (address.to_owned(), token.to_owned())
}

#[test]
fn the_dashboard_stays_where_it_is_and_is_not_for_everybody() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let mut child = demo(5, &dir, Stdio::piped());
    let pid = child.id();
    let mut doors = BTreeSet::new();
    let mut browser = None;
    let mut phases = 0;
    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
        if !line.contains("dashboard: ") {
            continue;
        }
        phases += 1;
        let (address, token) = look_at(&line);
        // Somebody looks at it; a shell shows its further arguments, as a browser does.
        browser.get_or_insert_with(|| {
            let url = format!("http://{address}/dashboard#token={token}");
            let mut shell = Command::new("sh");
            shell.args(["-c", "read line", "browser", &url]).stdin(Stdio::piped()).spawn().unwrap()
        });
        assert!(token.len() == 32 && token.chars().all(|c| c.is_ascii_hexdigit()), "{token}");
        doors.insert((address, token));
        for place in [PathBuf::from("/dev/shm"), dir.path().to_owned()] {
            let label = format!("muxflow-demo-{pid}-");
            let mut entries = std::fs::read_dir(place).unwrap().flatten();
            let ours = entries.find(|e| e.file_name().to_string_lossy().starts_with(&label));
            let mode = ours.unwrap().metadata().unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700);
        }
    }
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{errors}", output.status);
    assert_eq!((phases, doors.len()), (3, 1), "one address for all: {doors:?}");
    let mut browser = browser.unwrap();
    assert!(browser.try_wait().unwrap().is_none(), "the sweep ended somebody's browser");
    browser.kill().unwrap();
    browser.wait().unwrap();
}

#[test]
fn interrupted_while_a_job_is_measured_it_begins_nothing_more() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    let mut child = demo(60, &dir, Stdio::piped());
    let pid = child.id();
    let mut said = String::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok) {
        if line.contains("measuring a job alone") {
            std::thread::sleep(Duration::from_millis(500));
            // SAFETY: plain system call with numbers.
            unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGINT) };
        }
        said += &format!("{line}\n");
    }
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted") && !said.contains("dashboard: "), "{said}");
    assert_eq!(left_behind(pid, &dir), Vec::<String>::new(), "{said}");
}
