//! A whole node as its user meets it: profiles from files, directories that were used before, signals
//! and exit codes of the program around a command, and counters that refresh as the profile says.

#![expect(clippy::unwrap_used, reason = "a failed test says where")]
#![expect(clippy::print_stderr, reason = "a skipped test must say so")]

mod support;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_emulated_gpu::launcher::{Plan, Running, start};
use muxflow_emulated_gpu::node::{Node, parse_gpus};
use muxflow_emulated_gpu::profile::Profile;
use support::{built, client, compiled, node, on, output};

fn within(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn directory() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("mxn").tempdir().unwrap()
}

/// A T4 whose counters refresh at other times: profiling, utilisation, clock, power.
fn profile_with_periods([profiling, utilisation, clock, power]: [u32; 4]) -> String {
    let model = include_str!("../../gpu-model/profiles/t4.toml").replace("\n[", "\n[model.");
    let (before, rest) = model.split_once("[model.refresh_ms]").unwrap();
    let (_, after) = rest.split_once("\n[").unwrap();
    let own = Profile::built_in_text("t4").unwrap().replace("model_name = \"T4\"", "");
    format!(
        "{own}\n[model]\n{before}\n[model.refresh_ms]\nprofiling = {profiling}\nutilisation = {utilisation}\n\
         clock = {clock}\npower = {power}\n\n[{after}"
    )
}

fn started(plan_gpus: &str, directory: &Path) -> Running {
    let plan = Plan {
        gpus: parse_gpus(plan_gpus).unwrap(),
        time_factor: 1.0,
        seed: 1,
        directory: Some(directory.to_owned()),
        built: built().to_owned(),
    };
    start(&plan).unwrap()
}

#[test]
fn a_directory_used_before_with_more_gpus_gives_a_whole_node() {
    let home = directory();
    drop(started("t4x3", home.path()));
    let node = started("a10", home.path());
    assert_eq!(node.node().gpu_count(), 1);
    assert_eq!(output(on(&node, compiled("nvml")).args(["again", "1"])), "0");
    let daemon = on(&node, built().join("nvidia-cuda-mps-control")).arg("-d").status();
    assert!(daemon.unwrap().success());
    assert_eq!(output(on(&node, client()).arg("check")), "ok", "under MPS");
    assert!(output(&mut on(&node, compiled("dcgm"))).starts_with("1 GPUs"));
    // While it runs, nobody else gets the directory.
    let mut second = Command::new(built().join("muxflow-emulated-node"));
    second.args(["--gpus", "t4", "--dir"]).arg(home.path()).args(["--", "true"]);
    let refused = second.output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("runs in"), "{said}");
    assert_eq!(output(on(&node, client()).arg("check")), "ok", "and the first is as it was");
}

/// A command inside a node, and the lines that it says.
fn around(gpus: &str, script: &str) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new(built().join("muxflow-emulated-node"));
    command.args(["--gpus", gpus, "--", "sh", "-c", script]).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    (child, lines)
}

fn line(lines: &mut BufReader<ChildStdout>) -> String {
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    line.trim().to_owned()
}

#[test]
fn signals_and_exit_codes_pass_through_the_program_around_a_command() {
    let (mut seven, _) = around("t4", "exit 7");
    assert_eq!(seven.wait().unwrap().code(), Some(7));
    for (signal, code) in [(libc::SIGTERM, 143), (libc::SIGHUP, 129), (libc::SIGINT, 130)] {
        // A shell that runs in the background may have been told to ignore interrupts.
        let script = "echo $$ $MUXFLOW_EMULATED_DIR; exec sleep 1000";
        let (mut child, mut lines) = around("t4", script);
        let said = line(&mut lines);
        let (pid, home) = said.split_once(' ').unwrap();
        let (process, home) = (Path::new("/proc").join(pid), PathBuf::from(home));
        let ignored = std::fs::read_to_string(process.join("status")).unwrap();
        let ignored = ignored.lines().find_map(|l| l.strip_prefix("SigIgn:")).unwrap();
        let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap() >> (signal - 1) & 1 == 1;
        assert!(process.exists() && home.is_dir());
        let sent = if ignored { libc::SIGTERM } else { signal };
        // SAFETY: our own child, not waited for yet.
        assert_eq!(unsafe { libc::kill(child.id().cast_signed(), sent) }, 0);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(if ignored { 143 } else { code }), "signal {sent}");
        within("the command is gone", || !process.exists());
        assert!(!home.exists(), "its directory is removed");
    }
}

#[test]
fn a_directory_left_by_somebody_with_the_same_number_is_not_taken() {
    let (mut first, mut lines) = around("t4", "echo $$ $MUXFLOW_EMULATED_DIR; exec sleep 1000");
    let said = line(&mut lines);
    let (pid, home) = said.split_once(' ').unwrap();
    let home = PathBuf::from(home);
    // Without a word: what it made stays, and its command lives on.
    first.kill().unwrap();
    first.wait().unwrap();
    // SAFETY: the command that was just named, which nobody waits for but the system.
    assert_eq!(unsafe { libc::kill(pid.parse().unwrap(), libc::SIGKILL) }, 0);
    assert!(home.is_dir());
    within("its devices go with it", || {
        muxflow_emulated_gpu::wire::Socket::connect(&Node::at(&home).socket(0)).is_err()
    });
    std::fs::remove_dir_all(home).unwrap();
}

#[test]
fn a_directory_may_be_named_from_where_the_command_was_typed() {
    let home = directory();
    let said = |name: &str| {
        let mut command = Command::new(built().join("muxflow-emulated-node"));
        command.current_dir(home.path()).args(["--gpus", "t4", "--dir", name, "--", "sh", "-c"]);
        output(command.arg("cd / && exec \"$0\" devices").arg(client()))
    };
    let first = said("mine");
    assert!(first.starts_with("0 ") && first.len() > 30, "{first}");
    assert_eq!(said("./mine"), first, "the same GPU");
}

#[test]
fn profiles_are_files() {
    let home = directory();
    let path = home.path().join("mine.toml");
    let text = profile_with_periods([100, 166, 20, 20]).replace("Tesla T4", "My own GPU");
    let text = text.replace("sms = 40", "sms = 20");
    std::fs::write(&path, format!("cuda_version = 12020\n{text}")).unwrap();
    let gpus = format!("{} x2,t4", path.display());
    let script = format!("{}", compiled("dcgm").display());
    let (child, _) = around(&gpus, "exit 0");
    drop(child.wait_with_output());
    let mut command = Command::new(built().join("muxflow-emulated-node"));
    let said = output(command.args(["--gpus", &gpus, "--", &script]));
    let names: Vec<&str> = said.lines().skip(1).take(3).collect();
    assert!(said.starts_with("3 GPUs"), "{said}");
    assert!(names[0].contains("50=My own GPU ") && names[1].contains("50=My own GPU "), "{said}");
    assert!(names[2].contains("50=Tesla T4 "), "{said}");
    // The driver's version too, and before anything is initialised.
    let mut command = Command::new(built().join("muxflow-emulated-node"));
    let version = command.args(["--gpus", &gpus, "--"]).arg(client()).arg("version");
    assert_eq!(output(version), "12020");
    // One that cannot be used is named, with the place.
    std::fs::write(&path, "product = 3").unwrap();
    let mut command = Command::new(built().join("muxflow-emulated-node"));
    let refused = command.args(["--gpus", &gpus, "--", "true"]).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("profile.toml"), "{said}");
}

/// The program for users; `cargo test --workspace` builds it before any test runs.
fn muxflow() -> Option<PathBuf> {
    let program = built().join("muxflow");
    if program.exists() {
        return Some(program);
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{} is missing", program.display());
    eprintln!("SKIPPED `muxflow gpus`: build it first, with cargo build --workspace");
    None
}

#[test]
fn muxflow_gpus_shows_the_gpus_that_muxflow_emulate_makes() {
    let Some(muxflow) = muxflow() else { return };
    let home = directory();
    let path = home.path().join("mine.toml");
    let text = profile_with_periods([100, 166, 20, 20]).replace("Tesla T4", "My own GPU");
    std::fs::write(&path, text).unwrap();
    let gpus = format!("{} x2,a10", path.display());
    let mut command = Command::new(&muxflow);
    command.args(["emulate", "--gpus", &gpus, "--"]).arg(&muxflow).arg("gpus");
    let said = output(&mut command);
    let rows: Vec<&str> = said.lines().collect();
    assert_eq!(rows.len(), 4, "{said}");
    assert!(rows[0].starts_with("GPU") && rows[0].contains("MEMORY"), "{said}");
    assert!(rows[1].starts_with("0 ") && rows[1].contains("My own GPU"), "{said}");
    assert!(rows[2].contains("My own GPU") && rows[3].contains("NVIDIA A10"), "{said}");
    assert!(rows[1].contains("/ 15360 MiB") && rows[3].contains("/ 23028 MiB"), "{said}");
    // Its exit code is the command's.
    let mut command = Command::new(&muxflow);
    let status = command.args(["emulate", "--", "sh", "-c", "exit 7"]).status();
    assert_eq!(status.unwrap().code(), Some(7));
}

/// Lines of `NAME STAMP VALUE`, by name.
fn readings(said: &str) -> BTreeMap<String, Vec<(u64, u64)>> {
    let mut all: BTreeMap<String, Vec<(u64, u64)>> = BTreeMap::new();
    for line in said.lines() {
        let [name, stamp, value] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let reading = (stamp.parse().unwrap(), value.parse().unwrap());
        all.entry(name.to_owned()).or_default().push(reading);
    }
    all
}

/// Asked every millisecond, a counter changes when its stamp does, and stamps are whole periods apart.
/// That holds on a slow machine too, where some periods go by unseen.
fn refreshes(what: &str, readings: &[(u64, u64)], period_ms: u32) {
    assert!(readings.len() >= 4, "{what}: {} readings", readings.len());
    for pair in readings.windows(2) {
        let apart_us = pair[1].0 - pair[0].0;
        assert!(apart_us > 0, "{what}: {:?} without a new stamp", pair);
        let period_us = u64::from(period_ms) * 1000;
        let off = apart_us % period_us;
        assert!(off.min(period_us - off) <= 2, "{what}: {apart_us} us at a period of {period_us}");
    }
    let values: std::collections::BTreeSet<u64> = readings.iter().map(|(_, v)| *v).collect();
    assert!(values.len() > 1, "{what}: it never changed");
}

#[test]
fn counters_refresh_at_the_periods_of_the_profile() {
    let home = directory();
    let path = home.path().join("slow.toml");
    let slow = [250, 400, 150, 60];
    std::fs::write(&path, profile_with_periods(slow)).unwrap();
    for (gpus, periods) in
        [("t4".to_owned(), [100, 166, 20, 20]), (path.display().to_string(), slow)]
    {
        let node = node(&gpus, 1.0);
        let [profiling, utilisation, clock, power] = periods;
        let mut work = on(&node, client());
        let mut work = work.arg("bursts").stdout(Stdio::null()).spawn().unwrap();
        let spawn = |program: &str| {
            let mut command = on(&node, compiled(program));
            command.args(["poll", "4"]).stdout(Stdio::piped()).spawn().unwrap()
        };
        let said = ["dcgm", "nvml"].map(spawn).map(|child| {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success());
            readings(&String::from_utf8(output.stdout).unwrap())
        });
        work.kill().unwrap();
        work.wait().unwrap();
        let [dcgm, nvml] = said;
        for (field, period) in
            [("1002", profiling), ("1005", profiling), ("203", utilisation), ("155", power)]
        {
            refreshes(field, &dcgm[field], period);
        }
        refreshes("process", &nvml["process"], utilisation);
        // Without stamps: never more often than once per period.
        let elapsed_ms = nvml["elapsed"][0].1;
        for (what, period) in [("utilisation", utilisation), ("clock", clock), ("power", power)] {
            let most = elapsed_ms / u64::from(period) + 2;
            let seen = nvml[what].len() as u64;
            assert!(seen <= most, "{what}: {seen} changes in {elapsed_ms} ms at {period} ms each");
        }
        assert!(nvml["power"].len() > 3 && nvml["utilisation"].len() > 1, "{nvml:?}");
    }
}

#[test]
fn nvml_opened_and_closed_many_times_leaves_nothing_open() {
    let node = node("t4x2", 1.0);
    assert_eq!(output(on(&node, compiled("nvml")).args(["again", "2000"])), "0");
    let open = std::fs::read_dir(format!("/proc/{}/fd", node.device_pids()[0])).unwrap().count();
    assert!(open < 100, "{open} descriptors at the device");
}

#[test]
fn what_only_goes_to_the_gpu_is_what_it_receives() {
    let node = node("t4", 1.0);
    let mut upload = on(&node, client());
    let mut upload = upload.arg("upload").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(upload.stdout.take().unwrap());
    assert_eq!(line(&mut lines), "up");
    // Before its first period is over a field has no number.
    let field = |line: &str, number: &str| -> Option<f64> {
        let (_, rest) = line.split_once(&format!(" {number}=")).unwrap();
        rest.split(' ').next().unwrap().parse().ok()
    };
    // 12 GB/s at most, when the uploads follow close on one another.
    within("DCGM sees a rate", || {
        let said = output(&mut on(&node, compiled("dcgm")));
        let line = said.lines().nth(1).unwrap();
        let (Some(sent), Some(received)) = (field(line, "1009"), field(line, "1010")) else {
            return false;
        };
        assert_eq!(sent, 0.0, "the GPU sends nothing: {line}");
        (1e8..1.3e10).contains(&received)
    });
    within("NVML sees a rate", || {
        let said = output(on(&node, compiled("nvml")).arg("pcie"));
        let (sent, received) = said.split_once(' ').unwrap();
        assert_eq!(sent, "0", "{said}");
        received.parse::<f64>().unwrap() > 1e5
    });
    upload.kill().unwrap();
    upload.wait().unwrap();
}
