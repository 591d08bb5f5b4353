//! The agent on an emulated GPU: real processes, a real interposer, a real (emulated) driver.
//!
//! Each test starts an emulated node and runs itself again inside it, so that the agent finds the
//! node's libraries the way it finds a real driver's.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![expect(clippy::print_stdout, reason = "measured times are for whoever runs the tests")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use muxflow_agent::agent::{Agent, wait_status};
use muxflow_agent::cgroup::Limits;
use muxflow_agent::config::AgentConfig;
use muxflow_agent::gpu::{Event, GpuStatus, OfflineSpec, OnlineSpec, Order, StopReason};
use muxflow_agent::monitor::ActivitySource;
use muxflow_agent::stop::StopLimits;
use muxflow_e2e::build::{client, must, target, xcuda};
use muxflow_policy::node::fault::Fault;
use muxflow_types::{HealthState, JobId, ServiceId};

const LONG: Duration = Duration::from_secs(40);

/// Where the emulated GPU was built to.
fn emulated() -> PathBuf {
    if let Some(built) = std::env::var_os("MUXFLOW_EMULATED_BUILT") {
        return built.into();
    }
    let packages = ["gpu", "cuda", "nvml", "dcgm"].map(|part| format!("muxflow-emulated-{part}"));
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet"]).current_dir(env!("CARGO_MANIFEST_DIR"));
    for package in &packages {
        build.args(["-p", package]);
    }
    must(&mut build);
    target().join("debug")
}

fn child_program() -> PathBuf {
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "-p", "muxflow-agent", "--bin", "muxflow-agent-child"]);
    must(build.current_dir(env!("CARGO_MANIFEST_DIR")));
    target().join("debug/muxflow-agent-child")
}

/// Runs the ignored test `name` inside an emulated node.
fn inside(name: &str) {
    let (built, child) = (emulated(), child_program());
    let interposer = xcuda();
    let worker = client("worker", &[]);
    let mut command = Command::new(built.join("muxflow-emulated-node"));
    command
        .args(["--gpus", "t4", "--"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("MUXFLOW_TEST_FAULT", built.join("muxflow-emulated-fault"))
        .env("MUXFLOW_TEST_CHILD", child)
        .env("MUXFLOW_TEST_XCUDA", interposer)
        .env("MUXFLOW_TEST_WORKER", worker);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    assert!(text.contains("1 passed"), "nothing ran inside: {text}");
    for line in text.lines().filter(|line| line.starts_with("MEASURED")) {
        println!("{line}");
    }
}

fn variable(name: &str) -> PathBuf {
    std::env::var_os(name).map(PathBuf::from).expect("run by another test")
}

struct World {
    dir: tempfile::TempDir,
    agent: Option<Agent>,
    gpu: String,
}

impl World {
    fn start(more: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let node = variable("MUXFLOW_EMULATED_DIR");
        let run = Path::new("/dev/shm").join(format!("muxflow-e2e-{}", std::process::id()));
        let text = format!(
            "state_dir = '{0}/state'\nrun_dir = '{1}'\ninterposer = '{2}'\nmetrics = '127.0.0.1:0'\nkernel_log = '{3}'\ncgroup_parent = 'muxflow-e2e-{4}'\npass_env = ['MUXFLOW_EMULATED_DIR']\n{more}",
            dir.path().display(),
            run.display(),
            variable("MUXFLOW_TEST_XCUDA").display(),
            node.join("kernel.log").display(),
            std::process::id()
        );
        // The log is there from the first line on; an agent that comes earlier would not find it.
        fs::OpenOptions::new().create(true).append(true).open(node.join("kernel.log")).unwrap();
        let path = dir.path().join("agent.toml");
        fs::write(&path, text).unwrap();
        let config = AgentConfig::read(&path).unwrap();
        let agent = Agent::start(&config, (variable("MUXFLOW_TEST_CHILD"), Vec::new())).unwrap();
        let gpu = agent.gpus()[0].clone();
        World { dir, agent: Some(agent), gpu }
    }

    fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    fn wait(&self, what: &str, holds: impl Fn(&GpuStatus) -> bool) -> GpuStatus {
        wait_status(self.agent(), &self.gpu, LONG, holds)
            .unwrap_or_else(|| panic!("never: {what}: {:#?}", self.agent().status(&self.gpu)))
    }

    fn event(&self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
        let deadline = Instant::now() + LONG;
        while Instant::now() < deadline {
            if let Some((_, event)) = self.agent().next_event(Duration::from_millis(100))
                && wanted(&event)
            {
                return event;
            }
        }
        panic!("never: {what}: {:#?}", self.agent().status(&self.gpu))
    }

    fn pause(&self, who: &str, us: u64) -> PathBuf {
        let path = self.dir.path().join(format!("{who}.pause"));
        fs::write(&path, us.to_string()).unwrap();
        path
    }

    fn record(&self) -> PathBuf {
        self.dir.path().join("service.record")
    }

    fn argv(&self, who: &str, kernel_us: u32, fill: u32, pause_us: u64) -> Vec<String> {
        let record = if who == "service" { self.record() } else { "-".into() };
        let words = [variable("MUXFLOW_TEST_WORKER"), kernel_us.to_string().into()];
        let rest = [fill.to_string().into(), self.pause(who, pause_us), record];
        words.into_iter().chain(rest).map(|word| word.display().to_string()).collect()
    }

    fn start_service(&self) {
        let spec = OnlineSpec {
            service: ServiceId::new("service").unwrap(),
            argv: self.argv("service", 2_000, 16, 20_000),
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            latency_file: None,
            grace_ms: 1_000,
        };
        self.agent().order(&self.gpu, Order::StartOnline(Box::new(spec))).unwrap();
        self.wait("the service runs", |status| status.online.is_some());
    }

    fn start_job(&self, argv: Vec<String>) {
        self.wait("the GPU takes a job", |status| status.placeable && status.share.is_some());
        let spec = OfflineSpec {
            job: JobId::new("job").unwrap(),
            argv,
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            share: None,
            quota: None,
            stop: StopLimits { checkpoint_ms: 500, ..StopLimits::default() },
        };
        self.agent().order(&self.gpu, Order::StartOffline(Box::new(spec))).unwrap();
        self.event("the job starts", |event| match event {
            Event::JobRefused { reason, .. } => panic!("refused: {reason}"),
            event => matches!(event, Event::JobStarted { .. }),
        });
    }

    fn start_worker_job(&self) {
        self.start_job(self.argv("job", 500, 8, 0));
        self.wait("the job launches", |status| {
            status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 100)
        });
    }

    fn fault(&self, words: &[&str]) {
        must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(words));
    }

    /// Lines of the record since a moment: how many requests were served and the longest gap.
    fn served_since(&self, from_us: u64) -> (usize, u64) {
        let text = fs::read_to_string(self.record()).unwrap_or_default();
        let times: Vec<u64> = text
            .lines()
            .filter_map(|line| line.split(' ').next()?.parse().ok())
            .filter(|at| *at >= from_us)
            .collect();
        let gaps = times.windows(2).map(|pair| pair[1] - pair[0]);
        (times.len(), gaps.max().unwrap_or(0))
    }

    /// Where clients of the agent's MPS daemon connect.
    fn mps_pipe(&self) -> PathBuf {
        let run = Path::new("/dev/shm").join(format!("muxflow-e2e-{}", std::process::id()));
        let mut all = fs::read_dir(run.join("mps")).unwrap().flatten();
        all.next().unwrap().path().join("pipe")
    }

    fn end(mut self) {
        let agent = self.agent.take().unwrap();
        agent.order(&self.gpu, Order::StopOnline).unwrap();
        let deadline = Instant::now() + LONG;
        while agent.status(&self.gpu).unwrap().online.is_some() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        agent.shutdown();
        let run = Path::new("/dev/shm").join(format!("muxflow-e2e-{}", std::process::id()));
        for entry in fs::read_dir(run.join("mps")).unwrap().flatten() {
            // MPS outlives the agent by design; the test ends it.
            let pipe = entry.path().join("pipe");
            let quit = Command::new("sh")
                .args(["-c", "echo quit | nvidia-cuda-mps-control"])
                .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
                .status();
            assert!(quit.is_ok());
        }
        fs::remove_dir_all(run).unwrap();
    }
}

fn now_us() -> u64 {
    muxflow_agent::monitor::now().0
}

#[test]
fn a_job_shares_the_gpu_and_leaves_on_a_burst() {
    inside("inner_burst");
}

#[test]
#[ignore = "run inside an emulated node by a_job_shares_the_gpu_and_leaves_on_a_burst"]
fn inner_burst() {
    let world = World::start("");
    world.start_service();
    let status = world.wait("healthy", |status| status.health == HealthState::Healthy);
    assert_eq!(status.source, ActivitySource::Dcgm);
    assert!(status.attach.is_some_and(|(attached, _)| attached));
    world.start_worker_job();
    let page = {
        use std::io::{Read, Write};
        let address = world.agent().metrics_address().unwrap();
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    assert!(page.contains("muxflow_job_launches_total{gpu=\"") && page.contains("job=\"job\""));
    // The service now wants the whole GPU, and more than that.
    let began = Instant::now();
    fs::write(world.dir.path().join("service.pause"), "0").unwrap();
    let more: Vec<_> = (0..3)
        .map(|n| {
            let argv = world.argv(&format!("burst{n}"), 4_000, 40, 0);
            let pipe = world.mps_pipe();
            let mut more = Command::new(&argv[0]);
            more.args(&argv[1..]).env("CUDA_MPS_PIPE_DIRECTORY", pipe);
            more.stdout(std::process::Stdio::null()).spawn().unwrap()
        })
        .collect();
    world.wait("the gate is shut", |status| status.budget == 0.0);
    let shut = began.elapsed();
    let ended = world.event("the job is evicted", |event| matches!(event, Event::JobEnded { .. }));
    let gone = began.elapsed();
    let Event::JobEnded { reason, exit, requeue, .. } = ended else { unreachable!() };
    assert!(matches!(reason, Some(StopReason::Health(_))), "{reason:?}");
    assert!(requeue && exit.all_gone, "{exit:?}");
    println!(
        "MEASURED burst: gate shut after {} ms, job gone after {} ms",
        shut.as_millis(),
        gone.as_millis()
    );
    for mut one in more {
        one.kill().unwrap();
        one.wait().unwrap();
    }
    assert!(shut < Duration::from_secs(5) && gone < Duration::from_secs(20));
    assert!(world.agent().status(&world.gpu).unwrap().online.is_some(), "online is unharmed");
    world.end();
}

#[test]
fn errors_are_answered_online_first() {
    inside("inner_errors");
}

#[test]
#[ignore = "run inside an emulated node by errors_are_answered_online_first"]
fn inner_errors() {
    let world = World::start("[mps]\nprobe_every_s = 2\nprobe_within_ms = 1500\n");
    world.start_service();
    world.start_worker_job();

    // A fatal fault of the job: everybody's context is lost, the service is back first.
    let at = now_us();
    world.fault(&["xid", "31"]);
    let event = world.event(
        "the XID is answered",
        |event| matches!(event, Event::Fault { seen, .. } if seen.fault == Fault::Xid(31)),
    );
    let Event::Fault { took, .. } = event else { unreachable!() };
    world.wait("healthy again", |s| s.health == HealthState::Healthy && s.online.is_some());
    std::thread::sleep(Duration::from_millis(500));
    let (served, gap_us) = world.served_since(at);
    assert!(served > 0, "the service serves again");
    println!(
        "MEASURED xid 31: answered in {} ms, longest gap of the service {} ms",
        took.0 / 1000,
        gap_us / 1000
    );

    // The device is gone and comes back: Disabled, then Healthy, nothing restarted by hand.
    world.fault(&["off-bus"]);
    world.wait("disabled", |status| status.health == HealthState::Disabled);
    world.fault(&["reset"]);
    println!("MEASURED off-bus: disabled, then reset");
    world.end();
}

#[test]
fn sensors_that_block_close_the_gate() {
    inside("inner_blocked");
}

#[test]
#[ignore = "run inside an emulated node by sensors_that_block_close_the_gate"]
fn inner_blocked() {
    let world = World::start("");
    world.start_service();
    world.start_worker_job();
    let began = Instant::now();
    world.fault(&["nvml-block"]);
    world.wait("the gate is shut", |status| status.budget == 0.0);
    println!("MEASURED nvml-block: gate shut after {} ms", began.elapsed().as_millis());
    world.fault(&["nvml-unblock"]);
    world.wait("it opens again", |status| status.budget > 0.0 || status.offline.is_none());
    world.end();
}

#[test]
fn a_job_that_slips_the_interposer_is_stopped() {
    inside("inner_stranger");
}

#[test]
#[ignore = "run inside an emulated node by a_job_that_slips_the_interposer_is_stopped"]
fn inner_stranger() {
    let world = World::start("");
    world.start_service();
    world.wait("the GPU takes a job", |status| status.placeable && status.share.is_some());
    let mut argv = vec!["env".to_owned(), "-u".into(), "LD_PRELOAD".into()];
    argv.extend(world.argv("job", 500, 8, 1_000));
    let began = Instant::now();
    world.start_job(argv);
    let ended = world.event("it is stopped", |event| matches!(event, Event::JobEnded { .. }));
    let Event::JobEnded { reason, fail_prone, .. } = ended else { unreachable!() };
    assert_eq!(reason, Some(StopReason::Fault(Fault::UngatedProcess)));
    println!("MEASURED stranger: stopped after {} ms", began.elapsed().as_millis());
    assert!(began.elapsed() < Duration::from_secs(15));
    let _later = fail_prone;
    world.end();
}
