//! An emulated node with an agent in it, for the tests of this program.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use muxflow_agent::agent::{Agent, wait_status};
use muxflow_agent::cgroup::{Cgroups, Limits};
use muxflow_agent::config::AgentConfig;
use muxflow_agent::gpu::{Event, GpuStatus, OfflineSpec, OnlineSpec, Order};
use muxflow_agent::stop::StopLimits;
use muxflow_e2e::build::must;
use muxflow_types::{JobId, ServiceId};

pub(crate) use crate::inside::{Inside, inside, inside_with};

pub(crate) const LONG: Duration = Duration::from_secs(40);

/// How often a test that can be made long repeats itself.
pub(crate) fn rounds(otherwise: u32) -> u32 {
    std::env::var("MUXFLOW_TEST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(otherwise)
}

pub(crate) fn variable(name: &str) -> PathBuf {
    std::env::var_os(name).map(PathBuf::from).expect("run by another test")
}

pub(crate) struct World {
    dir: Option<tempfile::TempDir>,
    base: PathBuf,
    run: PathBuf,
    cgroup_parent: String,
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

    /// Writes the file of an agent whose state is in `base`; where it is, its `run_dir`, and its
    /// `cgroup_parent`.
    pub(crate) fn settings(base: &Path, more: &str) -> (PathBuf, PathBuf, String) {
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
        (path, run, format!("muxflow-e2e-{label}"))
    }

    /// Starts an agent whose state is in `base`, as an earlier one left it.
    pub(crate) fn start_in(base: &Path, more: &str) -> Self {
        let (path, run, cgroup_parent) = Self::settings(base, more);
        let config = AgentConfig::read(&path).unwrap();
        let agent = Agent::start(&config, (variable("MUXFLOW_TEST_CHILD"), Vec::new())).unwrap();
        let gpu = agent.gpus()[0].clone();
        World { dir: None, base: base.to_owned(), run, cgroup_parent, agent: Some(agent), gpu }
    }

    /// The group above those of its workloads, where the kernel counts memory.
    pub(crate) fn memory_group(&self) -> Option<PathBuf> {
        let counted = |root: &&str| {
            let here = fs::read_to_string(Path::new(root).join("cgroup.controllers"));
            root.ends_with("memory") || here.is_ok_and(|all| all.contains("memory"))
        };
        let roots = ["/sys/fs/cgroup/memory", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        let root = roots.iter().filter(|root| Path::new(root).join("cgroup.procs").exists());
        let group = Path::new(root.clone().find(|root| counted(root))?).join(&self.cgroup_parent);
        fs::create_dir_all(&group).is_ok().then_some(group)
    }

    pub(crate) fn agent(&self) -> &Agent {
        self.agent.as_ref().unwrap()
    }

    pub(crate) fn wait(&self, what: &str, holds: impl Fn(&GpuStatus) -> bool) -> GpuStatus {
        wait_status(self.agent(), &self.gpu, LONG, holds).unwrap_or_else(|| {
            panic!("never: {what}: {:#?}\n{}", self.agent().status(&self.gpu), self.outputs())
        })
    }

    /// Waits for something that no status shows.
    pub(crate) fn until(&self, what: &str, holds: impl Fn() -> bool) {
        let deadline = Instant::now() + LONG;
        while !holds() {
            assert!(
                Instant::now() < deadline,
                "never: {what}: {:#?}",
                self.agent().status(&self.gpu)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn event(&self, what: &str, mut wanted: impl FnMut(&Event) -> bool) -> Event {
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

    /// The page of metrics.
    pub(crate) fn page(&self) -> String {
        page(self.agent().metrics_address().unwrap())
    }

    /// Has a job refused, and says why.
    pub(crate) fn refused(&self, spec: OfflineSpec) -> String {
        self.agent().order(&self.gpu, Order::StartOffline(Box::new(spec))).unwrap();
        let event = self.event("it is refused or starts", |event| {
            matches!(event, Event::JobRefused { .. } | Event::JobStarted { .. })
        });
        let Event::JobRefused { reason, .. } = event else { panic!("{event:?}") };
        reason
    }

    /// The last lines that workloads wrote, for whoever looks for the reason of a failure.
    fn outputs(&self) -> String {
        let dirs = fs::read_dir(self.base.join("state/workloads")).into_iter().flatten().flatten();
        let files = dirs.flat_map(|dir| fs::read_dir(dir.path()).into_iter().flatten().flatten());
        let last = |file: fs::DirEntry| {
            let text = fs::read_to_string(file.path()).unwrap_or_default();
            let lines: Vec<&str> = text.lines().rev().take(5).collect();
            format!("{}: {lines:?}\n", file.path().display())
        };
        files.filter(|f| f.path().extension().is_some_and(|e| e == "log")).map(last).collect()
    }

    /// Where the output of the job goes.
    pub(crate) fn job_output(&self) -> String {
        let file = self.base.join("state/workloads/offline-job/stdout.log");
        fs::read_to_string(file).unwrap_or_default()
    }

    pub(crate) fn pause(&self, who: &str, us: u64) -> PathBuf {
        let path = self.base.join(format!("{who}.pause"));
        fs::write(&path, us.to_string()).unwrap();
        path
    }

    pub(crate) fn record(&self) -> PathBuf {
        self.base.join("service.record")
    }

    /// Kernels of so many microseconds with this shape, and a pause after each.
    pub(crate) fn argv(
        &self,
        who: &str,
        kernel_us: u32,
        shape: &str,
        pause_us: u64,
    ) -> Vec<String> {
        let record = if who == "service" { self.record() } else { "-".into() };
        let words = [variable("MUXFLOW_TEST_WORKER"), kernel_us.to_string().into()];
        let rest = [shape.into(), self.pause(who, pause_us), record];
        words.into_iter().chain(rest).map(|word| word.display().to_string()).collect()
    }

    /// The usual service: a 2 ms kernel every 20 ms.
    pub(crate) fn start_service(&self) {
        self.start_service_as(self.argv("service", 2_000, "16", 20_000));
    }

    pub(crate) fn start_service_as(&self, argv: Vec<String>) {
        self.start_service_spec(Self::service_spec(argv));
    }

    pub(crate) fn service_spec(argv: Vec<String>) -> OnlineSpec {
        OnlineSpec {
            service: ServiceId::new("service").unwrap(),
            argv,
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            latency_file: None,
            grace_ms: 1_000,
        }
    }

    pub(crate) fn start_service_spec(&self, spec: OnlineSpec) {
        self.agent().order(&self.gpu, Order::StartOnline(Box::new(spec))).unwrap();
        self.wait("the service runs", |status| status.online.is_some());
    }

    pub(crate) fn spec(argv: Vec<String>) -> OfflineSpec {
        OfflineSpec {
            job: JobId::new("job").unwrap(),
            argv,
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            share: None,
            quota: None,
            stop: StopLimits { checkpoint_ms: 500, ..StopLimits::default() },
            not_after: None,
        }
    }

    pub(crate) fn start_job(&self, argv: Vec<String>) {
        self.start_job_as(Self::spec(argv));
    }

    pub(crate) fn start_job_as(&self, spec: OfflineSpec) {
        self.wait("the GPU takes a job", |status| status.placeable && status.share.is_some());
        self.agent().order(&self.gpu, Order::StartOffline(Box::new(spec))).unwrap();
        self.event("the job starts", |event| match event {
            Event::JobRefused { reason, .. } => panic!("refused: {reason}"),
            event => matches!(event, Event::JobStarted { .. }),
        });
    }

    pub(crate) fn start_worker_job(&self) {
        self.start_job(self.argv("job", 500, "8", 0));
        self.wait("the job launches", |status| {
            status.offline.as_ref().is_some_and(|(_, counts)| counts.launches > 100)
        });
    }

    /// The gate opens for the job again, which is still there: sensors were silent for less than the
    /// ten seconds after which it is evicted, unless this machine was held up.
    pub(crate) fn opens_again(&self, silent_since: Instant) {
        let brief = silent_since.elapsed() < Duration::from_secs(8);
        self.wait("it opens again", |status| {
            status.budget > 0.0 || (!brief && status.offline.is_none())
        });
    }

    /// A process of the job that is registered with the agent.
    pub(crate) fn job_pid(&self) -> u32 {
        self.agent().shared(&self.gpu).unwrap().job().unwrap().block.registered()[0]
    }

    /// Processes that are the service: they write its record.
    pub(crate) fn services_alive(&self) -> usize {
        let record = self.record().display().to_string();
        let all = fs::read_dir("/proc").unwrap().flatten();
        all.filter(|entry| {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == record.as_bytes())
        })
        .count()
    }

    pub(crate) fn restarts(&self) -> u64 {
        self.agent().status(&self.gpu).unwrap().online_restarts
    }

    pub(crate) fn fault(&self, words: &[&str]) {
        must(Command::new(variable("MUXFLOW_TEST_FAULT")).args(words));
    }

    /// What the service did since a moment.
    pub(crate) fn served_since(&self, from_us: u64) -> Served {
        Served::read(&fs::read_to_string(self.record()).unwrap_or_default(), from_us)
    }

    /// Waits until the service has served so many more requests, and says what it did meanwhile.
    pub(crate) fn serve(&self, count: usize) -> Served {
        let from = now_us();
        let deadline = Instant::now() + LONG;
        loop {
            let served = self.served_since(from);
            if served.count() >= count {
                return served;
            }
            assert!(Instant::now() < deadline, "the service does not serve: {served:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Where clients of the agent's MPS daemon connect.
    pub(crate) fn mps_pipe(&self) -> PathBuf {
        let mut all = fs::read_dir(self.run.join("mps")).unwrap().flatten();
        all.next().unwrap().path().join("pipe")
    }

    /// The service comes to want more than the whole GPU: it pauses no more, and three further
    /// clients work for it.
    pub(crate) fn burst(&self) -> Burst {
        self.pause("service", 0);
        let client = |n: u32| {
            let argv = self.argv(&format!("burst{n}"), 4_000, "40", 0);
            let mut more = Command::new(&argv[0]);
            more.args(&argv[1..]).env("CUDA_MPS_PIPE_DIRECTORY", self.mps_pipe());
            more.stdout(std::process::Stdio::null()).spawn().unwrap()
        };
        Burst((0..3).map(client).collect())
    }

    pub(crate) fn end(mut self) {
        let agent = self.agent.take().unwrap();
        self.leave(agent);
        self.clean_up();
    }

    /// Stops everything: the service, the agent, and MPS, which outlives the agent by design.
    fn leave(&self, agent: Agent) {
        let claimed = agent.status(&self.gpu).and_then(|status| status.claimed);
        if let Some(service) = claimed {
            drop(agent.order(&self.gpu, Order::StopOnline(service)));
        }
        let deadline = Instant::now() + LONG;
        let serves = || agent.status(&self.gpu).is_some_and(|status| status.online.is_some());
        while serves() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        agent.shutdown();
        let daemons = fs::read_dir(self.run.join("mps")).into_iter().flatten().flatten();
        for daemon in daemons {
            let quit = Command::new("sh")
                .args(["-c", "echo quit -t 5 | nvidia-cuda-mps-control"])
                .env("CUDA_MPS_PIPE_DIRECTORY", daemon.path().join("pipe"))
                .status();
            drop(quit);
        }
    }

    /// Nothing of a test is left behind: no files, no control groups.
    fn clean_up(&mut self) {
        fs::remove_dir_all(&self.run).unwrap();
        let groups = Cgroups::detect(&self.cgroup_parent);
        let deadline = Instant::now() + LONG;
        loop {
            groups.remove_empty();
            let mounts = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
            let left = mounts.map(|mount| mount.path().join(&self.cgroup_parent));
            let left: Vec<PathBuf> = left.filter(|path| path.exists()).collect();
            if left.is_empty() {
                break;
            }
            assert!(Instant::now() < deadline, "control groups are left: {left:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(self.dir.take());
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A test that failed leaves nothing running either.
        if let Some(agent) = self.agent.take() {
            self.leave(agent);
            drop(fs::remove_dir_all(&self.run));
            Cgroups::detect(&self.cgroup_parent).remove_empty();
        }
    }
}

/// The page of metrics that is served there.
pub(crate) fn page(address: std::net::SocketAddr) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// Clients of a burst.
pub(crate) struct Burst(Vec<std::process::Child>);

impl Burst {
    pub(crate) fn end(self) {
        for mut one in self.0 {
            one.kill().unwrap();
            one.wait().unwrap();
        }
    }
}

/// What a service recorded from some moment on.
#[derive(Debug, Default)]
pub(crate) struct Served {
    /// Latency and device time of each request served, in microseconds.
    pub(crate) requests: Vec<(u64, u64)>,
    /// Requests that found no memory.
    pub(crate) out_of_memory: usize,
    /// Requests that failed otherwise.
    pub(crate) errors: usize,
    /// The longest time between two served requests.
    pub(crate) gap_us: u64,
    /// When the last request was served.
    pub(crate) last_us: Option<u64>,
}

impl Served {
    fn read(text: &str, from_us: u64) -> Self {
        let mut served = Served::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let Some(at) = words.first().and_then(|word| word.parse::<u64>().ok()) else {
                continue;
            };
            let numbers = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
            match (numbers(1), numbers(2)) {
                (Some(latency), Some(device)) => {
                    // The gap that began before the moment and ended after it counts too.
                    if at >= from_us {
                        served.requests.push((latency, device));
                        served.gap_us = served.gap_us.max(at - served.last_us.unwrap_or(at));
                    }
                    served.last_us = Some(at);
                }
                _ if at < from_us => {}
                _ if words.get(1) == Some(&"oom") => served.out_of_memory += 1,
                _ if words.get(1) == Some(&"error") => served.errors += 1,
                // A line that is being written.
                _ => {}
            }
        }
        served
    }

    pub(crate) fn count(&self) -> usize {
        self.requests.len()
    }

    /// Device time that so many of a hundred requests did not exceed.
    pub(crate) fn device_us(&self, percent: usize) -> u64 {
        percentile(self.requests.iter().map(|(_, device)| *device), percent)
    }
}

/// The value that so many of a hundred do not exceed; 0 of nothing.
pub(crate) fn percentile(values: impl Iterator<Item = u64>, percent: usize) -> u64 {
    let mut sorted: Vec<u64> = values.collect();
    sorted.sort_unstable();
    let last = sorted.len().saturating_sub(1);
    sorted.get((last * percent).div_ceil(100)).copied().unwrap_or(0)
}

pub(crate) fn now_us() -> u64 {
    muxflow_agent::monitor::now().0
}
