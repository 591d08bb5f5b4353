//! An emulated node with an agent in it, for the tests of this program.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use muxflow_agent::agent::{Agent, wait_status};
use muxflow_agent::cgroup::Limits;
use muxflow_agent::config::AgentConfig;
use muxflow_agent::gpu::{Event, GpuStatus, OfflineSpec, OnlineSpec, Order};
use muxflow_agent::stop::StopLimits;
use muxflow_e2e::build::{client, must, target, xcuda};
use muxflow_types::{JobId, ServiceId};

pub(crate) const LONG: Duration = Duration::from_secs(40);

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
pub(crate) fn inside(name: &str) {
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

pub(crate) fn variable(name: &str) -> PathBuf {
    std::env::var_os(name).map(PathBuf::from).expect("run by another test")
}

pub(crate) struct World {
    dir: Option<tempfile::TempDir>,
    base: PathBuf,
    run: PathBuf,
    pub(crate) agent: Option<Agent>,
    pub(crate) gpu: String,
}

impl World {
    pub(crate) fn start(more: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut world = Self::start_in(dir.path(), more);
        world.dir = Some(dir);
        world
    }

    /// Where this world keeps its files.
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// Starts an agent whose state is in `base`, as an earlier one left it.
    pub(crate) fn start_in(base: &Path, more: &str) -> Self {
        let node = variable("MUXFLOW_EMULATED_DIR");
        let label = base.file_name().unwrap().to_string_lossy().replace('.', "");
        let run = Path::new("/dev/shm").join(format!("muxflow-e2e-{label}"));
        let text = format!(
            "state_dir = '{0}/state'\nrun_dir = '{1}'\ninterposer = '{2}'\nmetrics = '127.0.0.1:0'\nkernel_log = '{3}'\ncgroup_parent = 'muxflow-e2e-{4}'\npass_env = ['MUXFLOW_EMULATED_DIR']\n{more}",
            base.display(),
            run.display(),
            variable("MUXFLOW_TEST_XCUDA").display(),
            node.join("kernel.log").display(),
            label
        );
        // The log is there from the first line on; an agent that comes earlier would not find it.
        fs::OpenOptions::new().create(true).append(true).open(node.join("kernel.log")).unwrap();
        let path = base.join("agent.toml");
        fs::write(&path, text).unwrap();
        let config = AgentConfig::read(&path).unwrap();
        let agent = Agent::start(&config, (variable("MUXFLOW_TEST_CHILD"), Vec::new())).unwrap();
        let gpu = agent.gpus()[0].clone();
        World { dir: None, base: base.to_owned(), run, agent: Some(agent), gpu }
    }

    pub(crate) fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    pub(crate) fn wait(&self, what: &str, holds: impl Fn(&GpuStatus) -> bool) -> GpuStatus {
        wait_status(self.agent(), &self.gpu, LONG, holds)
            .unwrap_or_else(|| panic!("never: {what}: {:#?}", self.agent().status(&self.gpu)))
    }

    pub(crate) fn event(&self, what: &str, wanted: impl Fn(&Event) -> bool) -> Event {
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

    pub(crate) fn pause(&self, who: &str, us: u64) -> PathBuf {
        let path = self.base.join(format!("{who}.pause"));
        fs::write(&path, us.to_string()).unwrap();
        path
    }

    pub(crate) fn record(&self) -> PathBuf {
        self.base.join("service.record")
    }

    pub(crate) fn argv(&self, who: &str, kernel_us: u32, fill: u32, pause_us: u64) -> Vec<String> {
        let record = if who == "service" { self.record() } else { "-".into() };
        let words = [variable("MUXFLOW_TEST_WORKER"), kernel_us.to_string().into()];
        let rest = [fill.to_string().into(), self.pause(who, pause_us), record];
        words.into_iter().chain(rest).map(|word| word.display().to_string()).collect()
    }

    pub(crate) fn start_service(&self) {
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

    pub(crate) fn start_job(&self, argv: Vec<String>) {
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

    pub(crate) fn start_worker_job(&self) {
        self.start_job(self.argv("job", 500, 8, 0));
        self.wait("the job launches", |status| {
            status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 100)
        });
    }

    pub(crate) fn fault(&self, words: &[&str]) {
        must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(words));
    }

    /// Lines of the record since a moment: how many requests were served and the longest gap.
    pub(crate) fn served_since(&self, from_us: u64) -> (usize, u64) {
        let text = fs::read_to_string(self.record()).unwrap_or_default();
        let times: Vec<u64> =
            text.lines().filter_map(|line| line.split(' ').next()?.parse().ok()).collect();
        // The gap that began before the moment and ended after it counts too.
        let gaps = times.windows(2).filter(|pair| pair[1] >= from_us).map(|pair| pair[1] - pair[0]);
        (times.iter().filter(|at| **at >= from_us).count(), gaps.max().unwrap_or(0))
    }

    /// Where clients of the agent's MPS daemon connect.
    pub(crate) fn mps_pipe(&self) -> PathBuf {
        let mut all = fs::read_dir(self.run.join("mps")).unwrap().flatten();
        all.next().unwrap().path().join("pipe")
    }

    pub(crate) fn end(mut self) {
        let agent = self.agent.take().unwrap();
        agent.order(&self.gpu, Order::StopOnline).unwrap();
        let deadline = Instant::now() + LONG;
        while agent.status(&self.gpu).unwrap().online.is_some() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        agent.shutdown();
        for entry in fs::read_dir(self.run.join("mps")).unwrap().flatten() {
            // MPS outlives the agent by design; the test ends it.
            let pipe = entry.path().join("pipe");
            let quit = Command::new("sh")
                .args(["-c", "echo quit | nvidia-cuda-mps-control"])
                .env("CUDA_MPS_PIPE_DIRECTORY", pipe)
                .status();
            assert!(quit.is_ok());
        }
        fs::remove_dir_all(&self.run).unwrap();
        drop(self.dir.take());
    }
}

pub(crate) fn now_us() -> u64 {
    muxflow_agent::monitor::now().0
}
