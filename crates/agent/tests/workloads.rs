//! Real processes, real groups, real signals: workloads under keepers.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "workloads/failed_starts.rs"]
mod failed_starts;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muxflow_agent::AgentError;
use muxflow_agent::cgroup::{Cgroups, Limits};
use muxflow_agent::environment::CONTROL_VARIABLE;
use muxflow_agent::launch::{Exit, Kind, Launch, Run, StopCause};
use muxflow_agent::logs::LogLimits;
use muxflow_agent::process::ProcessKey;
use muxflow_agent::runner::{Found, Runner, Running};
use muxflow_agent::stop::StopLimits;
use muxflow_agent::sys;

const LONG: Duration = Duration::from_secs(20);

fn child_program() -> (PathBuf, Vec<String>) {
    (env!("CARGO_BIN_EXE_muxflow-agent-child").into(), Vec::new())
}

fn runner(dir: &Path) -> Runner {
    Runner::open(dir, Cgroups::detect("muxflow-test"), child_program()).unwrap()
}

/// Names carry the test's process id: groups are visible to the whole machine.
fn named(name: &str) -> String {
    format!("{name}-{}", std::process::id())
}

fn shell(runner: &Runner, kind: Kind, name: &str, script: &str) -> Launch {
    let name = named(name);
    let limits = Limits { cpus: Some("0".into()), memory_bytes: Some(256 << 20) };
    Launch {
        group: runner.group(kind, &name, &limits).unwrap(),
        limits,
        name,
        kind,
        gpu: "GPU-test".into(),
        argv: ["sh", "-c", script].map(String::from).to_vec(),
        env: BTreeMap::from([("PATH".into(), "/usr/bin:/bin".into())]),
        cwd: "/".into(),
        user: None,
        logs: LogLimits::default(),
        control_dir: None,
        mps: None,
        stop: StopLimits { checkpoint_ms: 1_000, ..StopLimits::default() },
        online_grace_ms: 1_000,
        agent: ProcessKey::own(),
        fingerprint: 0,
        outside_mps: false,
    }
}

fn ended(running: &mut Running) -> Exit {
    running.wait(LONG).unwrap().expect("it ended")
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < deadline, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn log(running: &Running) -> String {
    fs::read_to_string(running.log_file("stdout")).unwrap_or_default()
}

#[test]
fn exit_codes_signals_and_output_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let mut ok = runner
        .start(shell(&runner, Kind::Offline, "codes-a", "echo out; echo err >&2; exit 7"))
        .unwrap();
    let exit = ended(&mut ok);
    assert_eq!((exit.code, exit.signal, exit.stop), (Some(7), None, None));
    assert_eq!(log(&ok), "out\n");
    assert_eq!(fs::read_to_string(ok.log_file("stderr")).unwrap(), "err\n");

    let mut killed =
        runner.start(shell(&runner, Kind::Online, "codes-b", "kill -SEGV $$; sleep 9")).unwrap();
    let exit = ended(&mut killed);
    assert_eq!((exit.code, exit.signal), (None, Some(libc::SIGSEGV)));
}

#[test]
fn what_cannot_be_started_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let mut launch = shell(&runner, Kind::Offline, "missing", "");
    launch.argv = vec!["/no/such/program".into()];
    let error = runner.start(launch).unwrap_err().to_string();
    assert!(error.contains("/no/such/program") && error.contains("missing"), "{error}");
    let mut launch = shell(&runner, Kind::Offline, "nowhere", "true");
    launch.cwd = "/no/such/dir".into();
    let error = runner.start(launch).unwrap_err().to_string();
    assert!(error.contains("/no/such/dir"), "{error}");
    assert!(matches!(
        Runner::open(dir.path(), Cgroups::none(), child_program()),
        Err(AgentError::AnotherAgent { .. })
    ));
}

/// The next write of these files of a workload finds no room.
fn fill(runner: &Runner, launch: &Launch, files: &[&str]) -> Vec<PathBuf> {
    let dir = runner.log_file(launch.kind, &launch.name, "stdout").parent().unwrap().to_owned();
    let full = |file: &&str| {
        let path = dir.join(file).with_extension("new");
        std::os::unix::fs::symlink("/dev/full", &path).unwrap();
        path
    };
    files.iter().map(full).collect()
}

#[test]
fn a_service_that_dies_on_a_full_disk_is_known_to_be_gone_and_can_start_again() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let launch = shell(&runner, Kind::Online, "full", "sleep 300");
    let mut service = runner.start(launch.clone()).unwrap();
    let files = fill(&runner, &launch, &["exit.json", "launch.json"]);
    sys::kill(service.main().pid, libc::SIGKILL).unwrap();
    let exit = ended(&mut service);
    assert_eq!((exit.code, exit.signal), (None, None), "nobody could write it down");
    let again = |launch: &Launch| {
        let group = runner.group(Kind::Online, &launch.name, &launch.limits).unwrap();
        runner.start(Launch { group, ..launch.clone() })
    };
    let error = again(&launch).unwrap_err().to_string();
    assert!(error.contains("launch.new"), "whoever tries again says why: {error}");
    files.iter().for_each(|path| fs::remove_file(path).unwrap());
    let mut service = again(&launch).unwrap();
    service.ask_stop();
    ended(&mut service);
}

#[test]
fn nothing_runs_twice() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let launch = shell(&runner, Kind::Offline, "twice", "sleep 300");
    let mut first = runner.start(launch.clone()).unwrap();
    assert!(matches!(runner.start(launch), Err(AgentError::RunsAlready { .. })));
    first.ask_stop();
    assert_eq!(ended(&mut first).stop, Some(StopCause::Asked));
}

#[test]
fn what_has_ended_can_be_forgotten_and_what_runs_cannot() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let launch = shell(&runner, Kind::Offline, "forget", "echo out; sleep 300");
    let name = launch.name.clone();
    let mut running = runner.start(launch).unwrap();
    until("output", || log(&running) == "out\n");
    let refused = runner.forget(Kind::Offline, &name);
    assert!(matches!(refused, Err(AgentError::RunsAlready { .. })), "{refused:?}");
    running.ask_stop();
    ended(&mut running);
    let output = runner.log_file(Kind::Offline, &name, "stdout");
    assert!(output.exists());
    until("its keeper is gone", || runner.forget(Kind::Offline, &name).is_ok());
    assert!(!output.parent().unwrap().exists());
    runner.forget(Kind::Offline, &name).unwrap();
}

#[test]
fn a_stop_lets_the_program_save_and_then_takes_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let script = "trap 'echo saved; exit 0' TERM; setsid sleep 300 & echo ready; while :; do sleep 0.02; done";
    let mut willing = runner.start(shell(&runner, Kind::Offline, "willing", script)).unwrap();
    until("ready", || log(&willing).contains("ready"));
    willing.ask_stop();
    let exit = ended(&mut willing);
    assert_eq!(log(&willing), "ready\nsaved\n");
    assert_eq!((exit.code, exit.stop, exit.all_gone), (Some(0), Some(StopCause::Asked), true));
    assert!(willing.processes().is_empty(), "the detached child went too");

    let script =
        "trap '' TERM INT HUP; setsid sleep 300 & echo ready; while :; do sleep 0.02; done";
    let mut stubborn = runner.start(shell(&runner, Kind::Offline, "stubborn", script)).unwrap();
    until("ready", || log(&stubborn).contains("ready"));
    let began = Instant::now();
    stubborn.ask_stop();
    let exit = ended(&mut stubborn);
    assert_eq!((exit.signal, exit.all_gone), (Some(libc::SIGKILL), true));
    assert!(exit.steps.iter().any(|step| step.timed_out), "{:?}", exit.steps);
    assert!(began.elapsed() < Duration::from_secs(6), "bounded by the limits of the steps");
}

#[test]
fn a_stop_that_is_hastened_waits_for_no_one_who_saves() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let script = "trap 'sleep 300' TERM; echo ready; while :; do sleep 0.02; done";
    for before in [true, false] {
        // A name of its own: output is kept, and the word of the other would be found in it.
        let name = if before { "hastened-before" } else { "hastened-after" };
        let mut launch = shell(&runner, Kind::Offline, name, script);
        launch.stop.checkpoint_ms = 300_000;
        let mut slow = runner.start(launch).unwrap();
        until("ready", || log(&slow).contains("ready"));
        if before {
            slow.hasten();
            assert_eq!(slow.wait(Duration::from_millis(200)).unwrap(), None, "it is no stop");
        }
        slow.ask_stop();
        slow.hasten();
        let exit = ended(&mut slow);
        assert_eq!((exit.stop, exit.all_gone), (Some(StopCause::Asked), true));
        assert!(exit.steps.iter().any(|step| step.timed_out), "{:?}", exit.steps);
    }
}

#[test]
fn it_runs_as_the_user_on_the_processors_that_were_given() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let mut launch = shell(
        &runner,
        Kind::Offline,
        "user",
        "id -u; id -g; id -G; grep Cpus_allowed_list /proc/self/status; env | sort | head -3",
    );
    launch.user = Some((65534, 65534));
    let mut running = runner.start(launch).unwrap();
    assert_eq!(ended(&mut running).code, Some(0));
    let text = log(&running);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..4], ["65534", "65534", "65534", "Cpus_allowed_list:\t0"], "{text}");
    assert!(!text.contains("CARGO"), "nothing of the agent's environment passes: {text}");
}

#[test]
fn memory_beyond_the_limit_ends_the_job_and_says_so() {
    let groups = Cgroups::detect("muxflow-test");
    if !groups.describe().contains("memory v") {
        assert!(std::env::var_os("CI").is_none(), "no memory cgroup: {}", groups.describe());
        println!("SKIPPED: no memory cgroup here; run as root with one mounted");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let mut launch = shell(&runner, Kind::Offline, "eater", "x=$(tr '\\0' a </dev/zero); true");
    let limits = Limits { cpus: None, memory_bytes: Some(32 << 20) };
    launch.group = runner.group(Kind::Offline, &launch.name, &limits).unwrap();
    let mut running = runner.start(launch).unwrap();
    let exit = ended(&mut running);
    assert!(exit.out_of_memory, "{exit:?}");
}

#[test]
fn long_output_is_rotated_while_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let mut launch =
        shell(&runner, Kind::Offline, "chatty", "i=0; while :; do i=$((i+1)); echo line $i; done");
    launch.logs = LogLimits { bytes: 64 << 10, files: 2 };
    let mut running = runner.start(launch).unwrap();
    let rotated = running.log_file("stdout").with_extension("log.2");
    until("two rotations", || rotated.exists());
    running.ask_stop();
    ended(&mut running);
    let before = fs::read_to_string(&rotated).unwrap();
    assert!(before.starts_with("line "), "whole lines at the start");
}

/// Runs `script` for both kinds under a runner in a process that is then killed.
fn agent_that_dies(state: &Path) -> std::process::Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_other_agent", "--nocapture", "--ignored"]);
    command.env("MUXFLOW_TEST_STATE", state).stdout(Stdio::null());
    command.spawn().unwrap()
}

/// The body of the process that gets killed; not a test by itself.
#[test]
#[ignore = "run by agent_killed_in_the_middle as a process of its own"]
fn the_other_agent() {
    let Some(state) = std::env::var_os("MUXFLOW_TEST_STATE") else { return };
    let state = PathBuf::from(state);
    let runner = runner(&state);
    let script = "trap 'echo saved; exit 3' TERM; echo ready; while :; do sleep 0.02; done";
    let mut all = Vec::new();
    for kind in [Kind::Online, Kind::Offline] {
        let mut launch = shell(&runner, kind, "orphan", script);
        launch.name = "orphan".into();
        let group_name = format!("orphan-{}", std::process::id());
        launch.group = runner.group(kind, &group_name, &Limits::default()).unwrap();
        all.push(runner.start(launch).unwrap());
    }
    fs::write(state.join("both-run"), "").unwrap();
    std::thread::sleep(LONG);
}

#[test]
fn agent_killed_in_the_middle() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = agent_that_dies(dir.path());
    until("both run", || dir.path().join("both-run").exists());
    other.kill().unwrap();
    other.wait().unwrap();

    let runner = runner(dir.path());
    let (found, troubles) = runner.recover().unwrap();
    assert!(troubles.is_empty(), "{troubles:?}");
    assert_eq!(found.len(), 2);
    for one in found {
        match one {
            Found::Running(mut running) if running.launch.kind == Kind::Online => {
                assert!(running.main().is_alive(), "online is unharmed");
                let again = runner.start(running.launch.clone());
                assert!(matches!(again, Err(AgentError::RunsAlready { .. })));
                running.ask_stop();
                let exit = ended(&mut running);
                assert_eq!(exit.code, Some(3), "the code is known though the agent is another");
            }
            Found::Running(mut running) => {
                let exit = ended(&mut running);
                assert_eq!((exit.code, exit.stop), (Some(3), Some(StopCause::AgentGone)));
                assert!(log(&running).contains("saved"));
            }
            Found::Ended { launch, exit } => {
                assert_eq!(launch.kind, Kind::Offline);
                assert_eq!((exit.code, exit.stop), (Some(3), Some(StopCause::AgentGone)));
            }
        }
    }
}

#[test]
fn a_killed_keeper_costs_online_nothing_and_ends_offline() {
    let dir = tempfile::tempdir().unwrap();
    let runner = runner(dir.path());
    let go = dir.path().join("go");
    let script = format!("until [ -e {} ]; do sleep 0.1; done; seq 9999; sleep 300", go.display());
    let mut launch = shell(&runner, Kind::Online, "kk-on", &script);
    launch.logs = LogLimits { bytes: 10_000, files: 1 };
    let mut online = runner.start(launch).unwrap();
    let mut offline = runner.start(shell(&runner, Kind::Offline, "kk-off", "sleep 300")).unwrap();
    for running in [&online, &offline] {
        sys::kill(running.run.keeper.pid, libc::SIGKILL).unwrap();
    }
    let exit = ended(&mut offline);
    assert!(exit.all_gone && offline.processes().is_empty());
    assert_eq!(online.wait(Duration::from_millis(100)).unwrap(), None);
    assert!(online.main().is_alive());
    // What it writes has an end all the same.
    fs::write(&go, "").unwrap();
    let live = online.log_file("stdout");
    until("its output is rotated", || {
        assert_eq!(online.poll_exit().unwrap(), None);
        live.with_file_name("stdout.log.1").exists() && fs::metadata(&live).unwrap().len() < 9_999
    });
    online.ask_stop();
    assert!(ended(&mut online).all_gone);
}

/// Starts a job whose children leave their session and outlive it, and is killed then, with the keeper.
#[test]
#[ignore = "run by a_job_that_lost_agent_and_keeper_is_found_by_its_children"]
fn the_agent_that_goes_with_its_keeper() {
    let Some(state) = std::env::var_os("MUXFLOW_TEST_STATE").map(PathBuf::from) else { return };
    let groups = match std::env::var_os("MUXFLOW_TEST_GROUPS") {
        Some(_) => Cgroups::detect("muxflow-test"),
        None => Cgroups::none(),
    };
    let runner = Runner::open(&state, groups, child_program()).unwrap();
    let script =
        "setsid sleep 300 & setsid sh -c 'trap \"\" TERM; sleep 300 & wait' & echo ready; wait";
    let mut launch = shell(&runner, Kind::Offline, "bereft", script);
    launch.name = "bereft".into();
    let group = named("bereft");
    launch.group = runner.group(Kind::Offline, &group, &Limits::default()).unwrap();
    let control = state.join("control");
    launch.env.insert(CONTROL_VARIABLE.into(), control.display().to_string());
    launch.control_dir = Some(control);
    let running = runner.start(launch).unwrap();
    until("its children run", || running.processes().len() >= 4);
    let pids: Vec<String> = running.processes().iter().map(u32::to_string).collect();
    fs::write(state.join("pids.new"), pids.join(" ")).unwrap();
    fs::rename(state.join("pids.new"), state.join("pids")).unwrap();
    std::thread::sleep(LONG);
}

#[test]
fn a_job_that_lost_agent_and_keeper_is_found_by_its_children() {
    for with_groups in [true, false] {
        let groups = if with_groups { Cgroups::detect("muxflow-test") } else { Cgroups::none() };
        let dir = tempfile::tempdir().unwrap();
        let mut other = Command::new(std::env::current_exe().unwrap());
        other.args(["--exact", "the_agent_that_goes_with_its_keeper", "--ignored"]);
        other.env("MUXFLOW_TEST_STATE", dir.path()).stdout(Stdio::null());
        if with_groups {
            other.env("MUXFLOW_TEST_GROUPS", "1");
        }
        let mut other = other.spawn().unwrap();
        until("it runs", || dir.path().join("pids").exists());
        let pids = fs::read_to_string(dir.path().join("pids")).unwrap();
        let all: Vec<ProcessKey> =
            pids.split(' ').filter_map(|pid| ProcessKey::of(pid.parse().unwrap())).collect();
        let run = dir.path().join("workloads/offline-bereft/run.json");
        let run: Run = serde_json::from_str(&fs::read_to_string(run).unwrap()).unwrap();
        // Held first, so that the keeper cannot begin to stop the job.
        sys::kill(run.keeper.pid, libc::SIGSTOP).unwrap();
        other.kill().unwrap();
        other.wait().unwrap();
        sys::kill(run.keeper.pid, libc::SIGKILL).unwrap();
        until("its main process is gone", || !run.main.is_alive() && !run.keeper.is_alive());
        let left = || all.iter().filter(|key| key.is_alive()).count();
        assert!(left() >= 3, "its children go on: {}", left());

        let runner = Runner::open(dir.path(), groups, child_program()).unwrap();
        let (mut found, troubles) = runner.recover().unwrap();
        assert!(troubles.is_empty(), "{troubles:?}");
        let Some(Found::Running(mut running)) = found.pop() else { panic!("{found:?}") };
        let again = running.launch.clone();
        let exit = ended(&mut running);
        assert!(exit.all_gone && exit.code.is_none(), "{exit:?}");
        assert_eq!(left(), 0, "with groups: {with_groups}");
        let limits = &again.limits;
        let group = runner.group(Kind::Offline, &named("bereft"), limits).unwrap();
        let argv = ["sh", "-c", "exit 5"].map(String::from).to_vec();
        let mut next = runner.start(Launch { argv, group, agent: ProcessKey::own(), ..again });
        assert_eq!(ended(next.as_mut().unwrap()).code, Some(5));
    }
}

#[test]
fn what_an_earlier_run_left_is_gone_before_the_next_begins() {
    let dir = tempfile::tempdir().unwrap();
    let groups = Cgroups::detect("muxflow-test");
    if !groups.describe().starts_with("tracking v") {
        assert!(std::env::var_os("CI").is_none(), "no cgroup: {}", groups.describe());
        println!("SKIPPED: no cgroup here; run as root with one mounted");
        return;
    }
    let runner = runner(dir.path());
    let launch = shell(&runner, Kind::Offline, "again", "exit 6");
    let (groups, affinity) = launch.group.entrance().unwrap();
    let setup = sys::ChildSetup { groups, affinity, ..sys::ChildSetup::default() };
    let mut left = sys::with_setup(Command::new("sleep").arg("300"), setup).spawn().unwrap();
    let mut running = runner.start(launch).unwrap();
    let gone = left.try_wait().unwrap();
    if gone.is_none() {
        left.kill().unwrap();
        left.wait().unwrap();
    }
    assert!(gone.is_some_and(|status| !status.success()), "killed before the start: {gone:?}");
    assert_eq!(ended(&mut running).code, Some(6));
}
