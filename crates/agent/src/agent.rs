//! The agent as a whole: finds the GPUs, starts their loops, and passes orders and events.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muxflow_policy::node::builtin::{self, GpuLaws};
use muxflow_policy::node::config::ServiceKnobs;
use muxflow_types::Micros;
use nvml_wrapper::Nvml;

use crate::blame::Blame;
use crate::breaker::EvictionBreaker;
use crate::cgroup::{Cgroups, Limits, encode};
use crate::config::AgentConfig;
use crate::error::{AgentError, Result, file, system};
use crate::errors::{self, Echoes, Watcher, XidSeen};
use crate::gpu::control::{self, ControlParams, HealthOrder};
use crate::gpu::supervisor::{NodeShared, Supervisor, SupervisorParams};
use crate::gpu::{Event, FaultSeen, GpuShared, GpuStatus, Order};
pub use crate::handle::AgentHandle;
use crate::handle::Ends;
use crate::host::{HostReader, HostWatch};
use crate::http::PageServer;
use crate::installed;
use crate::keeper::ChildProgram;
use crate::launch::Kind;
use crate::marks::gpu_dir;
use crate::metrics;
use crate::monitor::dcgm::DcgmLink;
use crate::monitor::nvml::{self, GpuFacts, NvmlSensor};
use crate::monitor::{self, Monitor};
use crate::mps::daemon::{DaemonSpec, MpsDaemon};
use crate::recovery::{self, Absent};
use crate::relief::Relief;
use crate::runner::{Runner, Running};

/// DCGM and GPM refresh about this often.
const REFRESH: Micros = Micros::from_millis(100);

struct Gpu {
    shared: Arc<GpuShared>,
    orders: Sender<Order>,
    slow: Option<JoinHandle<()>>,
    fast: Option<JoinHandle<()>>,
    stop_fast: Arc<AtomicBool>,
}

/// A GPU that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamedGpu<'a> {
    /// Its UUID.
    Usable(&'a str),
    /// It cannot be used now, and why: whoever names it goes without.
    Unusable(String),
}

/// A running agent.
pub struct Agent {
    gpus: BTreeMap<String, Gpu>,
    order: Vec<String>,
    /// By the numbers of the driver, which counts those that cannot be used too.
    numbers: BTreeMap<usize, String>,
    absent: Vec<(usize, String)>,
    events: Mutex<Receiver<(String, Event)>>,
    runner: Arc<Runner>,
    /// Offline runs of an earlier agent that are on their way out.
    found: Vec<(String, u64)>,
    watchers: Vec<Watcher>,
    host: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
    page: Option<PageServer>,
    cgroups: Cgroups,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("gpus", &self.order).finish_non_exhaustive()
    }
}

/// The laws of a GPU: those of the configuration, or the built-in ones of its type.
fn laws_for(config: &AgentConfig, facts: &GpuFacts) -> Result<GpuLaws> {
    let laws = config.laws.gpus.get(&facts.gpu_type).cloned();
    laws.or_else(|| builtin::laws_of(&facts.gpu_type)).ok_or_else(|| AgentError::Config {
        path: "the node laws".into(),
        reason: format!(
            "there are none for {} ({}); add a [gpu.\"{}\"] section, see `muxflow config print`",
            facts.name, facts.uuid, facts.gpu_type
        ),
    })
}

/// GPUs by their numbers, and those that cannot be used.
type Sorted = (Vec<(usize, GpuFacts)>, Vec<Absent>);

/// The GPUs that can be read and have laws, each with its number, and the others. Where none can be
/// used, the first one says why.
fn usable(config: &AgentConfig, listed: Vec<Result<GpuFacts>>) -> Result<Sorted> {
    let (mut usable, mut absent) = (Vec::new(), Vec::new());
    for (number, facts) in listed.into_iter().enumerate() {
        match facts.and_then(|facts| laws_for(config, &facts).map(|_| facts)) {
            Ok(facts) => usable.push((number, facts)),
            Err(error) => absent.push(Absent { number, error }),
        }
    }
    if usable.is_empty() && !absent.is_empty() {
        return Err(absent.swap_remove(0).error);
    }
    Ok((usable, absent))
}

impl Agent {
    /// Starts everything. `child` is how the agent starts itself again for keepers and probes.
    pub fn start(config: &AgentConfig, child: ChildProgram) -> Result<Self> {
        let nvml = nvml::open()?;
        let (facts, mut absent) = usable(config, nvml::list(&nvml)?)?;
        // Jobs and services reach their part of one; environments and output are in the other.
        for (dir, mode) in [(&config.run_dir, 0o755), (&config.state_dir, 0o700)] {
            crate::private::own_directory(dir, mode).map_err(file("use", dir))?;
        }
        let cgroups = Cgroups::detect(&config.cgroup_parent);
        tracing::info!(cgroups = cgroups.describe(), gpus = facts.len(), "agent starts");
        if let Some(flaw) = installed::flaw(&config.interposer) {
            tracing::error!(
                "no job will start, for there is no interposer to hold it: {flaw}; {}",
                installed::REMEDY
            );
        }
        let runner = Runner::open(&config.state_dir, cgroups.clone(), child.clone())?;
        let runner = Arc::new(runner);
        let (tell, events) = mpsc::channel();
        let blame = Blame::open(config.state_dir.join("blamed.json"), config.laws.retry)?;
        let node = NodeShared {
            runner: Arc::clone(&runner),
            blame: Arc::new(blame),
            breaker: Arc::new(Mutex::new(EvictionBreaker::new(config.breaker))),
            state_dir: config.state_dir.clone(),
            tell,
        };
        let dcgm = match DcgmLink::open(REFRESH) {
            Ok(dcgm) => Some(Arc::new(dcgm)),
            Err(reason) => {
                tracing::warn!(reason, "no DCGM: SM activity comes from NVML where it can");
                None
            }
        };
        let mut found = recovery::recovered(&runner, &node)?;
        let leaving = |run: &&Running| run.launch.kind == Kind::Offline;
        let leaving = found.values().flatten().filter(leaving);
        let leaving =
            leaving.map(|run| (run.launch.name.clone(), run.launch.run_number())).collect();
        let mut agent = Agent {
            gpus: BTreeMap::new(),
            order: Vec::new(),
            numbers: BTreeMap::new(),
            absent: Vec::new(),
            events: Mutex::new(events),
            runner: Arc::clone(&runner),
            found: leaving,
            watchers: Vec::new(),
            host: None,
            page: None,
            cgroups,
        };
        for (index, facts) in &facts {
            let adopted = found.remove(&facts.uuid).unwrap_or_default();
            let is_here = |gpu: &str| gpu == facts.uuid || gpu == index.to_string();
            let service = config.online.iter().find(|(gpu, _)| is_here(gpu));
            let knobs = service.map(|(_, spec)| config.laws.service(&spec.service));
            let start = GpuStart { config, nvml: &nvml, facts, node: &node, child: &child, knobs };
            match start_gpu(&start, dcgm.clone(), adopted) {
                Ok(gpu) => {
                    agent.gpus.insert(facts.uuid.clone(), gpu);
                    agent.order.push(facts.uuid.clone());
                    agent.numbers.insert(*index, facts.uuid.clone());
                }
                Err(error) => absent.push(Absent { number: *index, error }),
            }
        }
        agent.watchers.extend(recovery::see_off(&node, found.into_values().flatten().collect())?);
        if !absent.is_empty() {
            agent.watchers.push(recovery::watch_absent(&nvml, &node.tell, &absent)?);
            agent.absent = absent.iter().map(|one| (one.number, one.to_string())).collect();
        }
        agent.watch_errors(config, &nvml, &facts)?;
        agent.watch_host(config)?;
        agent.serve_page(config)?;
        Ok(agent)
    }

    fn watch_errors(
        &mut self,
        config: &AgentConfig,
        nvml: &Arc<Nvml>,
        facts: &[(usize, GpuFacts)],
    ) -> Result<()> {
        let routes: Vec<(String, String, Sender<Order>)> = facts
            .iter()
            .filter_map(|(_, f)| {
                Some((f.uuid.clone(), f.pci.clone(), self.gpus.get(&f.uuid)?.orders.clone()))
            })
            .collect();
        let echoes = Arc::new(Mutex::new(Echoes::default()));
        let tell = move |seen: XidSeen| {
            let route = routes.iter().find(|(uuid, pci, _)| *uuid == seen.gpu || *pci == seen.gpu);
            let Some((uuid, _, orders)) = route else { return };
            let mut echoes = echoes.lock().unwrap_or_else(PoisonError::into_inner);
            let news = echoes.is_news(seen.at, seen.teller, uuid, seen.fault);
            let seen = FaultSeen { at: seen.at, fault: seen.fault, pid: seen.pid };
            if news {
                drop(orders.send(Order::Fault(seen)));
            } else if seen.pid.is_some() {
                drop(orders.send(Order::Blame(seen)));
            }
        };
        let mut log_is_watched = false;
        if let Some(path) = &config.kernel_log {
            match errors::watch_kernel_log(path, tell.clone()) {
                Ok(watcher) => {
                    log_is_watched = true;
                    self.watchers.push(watcher);
                }
                Err(error) => tracing::warn!(error = %error, "the kernel log is not watched"),
            }
        }
        match errors::watch_nvml(Arc::clone(nvml), self.order.clone(), log_is_watched, tell) {
            Ok(watcher) => self.watchers.push(watcher),
            Err(error) => tracing::warn!(error = %error, "no XID events from NVML"),
        }
        Ok(())
    }

    fn watch_host(&mut self, config: &AgentConfig) -> Result<()> {
        let reader = HostReader::new(&config.host_proc);
        tracing::info!(signs = reader.describe(), "host is watched");
        let (mut watch, mut relief) = (HostWatch::new(config.host), Relief::default());
        let targets: Vec<Ends> =
            self.gpus.values().map(|g| (Arc::clone(&g.shared), g.orders.clone())).collect();
        let stop = Arc::new(AtomicBool::new(false));
        let (inside, evicts) = (Arc::clone(&stop), config.defences.host_eviction);
        let body = move || {
            while !inside.load(Ordering::Acquire) {
                let now = monitor::now();
                if let Some(distress) = watch.observe(reader.read(now)) {
                    tracing::warn!(distress = %distress, "host in distress");
                    if evicts {
                        relief.relieve(&targets, &distress.to_string());
                    }
                }
                for (gpu, _) in &targets {
                    gpu.host_calm.store(watch.is_calm(now), Ordering::Release);
                }
                std::thread::sleep(Duration::from_millis(500));
            }
        };
        let thread = std::thread::Builder::new().name("host".into()).spawn(body);
        self.host = Some((stop, thread.map_err(system("start a thread"))?));
        Ok(())
    }

    fn serve_page(&mut self, config: &AgentConfig) -> Result<()> {
        let Some(address) = &config.metrics else { return Ok(()) };
        let gpus: Vec<Arc<GpuShared>> = self.gpus.values().map(|g| Arc::clone(&g.shared)).collect();
        let page = move || metrics::render(gpus.iter().map(Arc::as_ref));
        self.page = Some(PageServer::start(address, page)?);
        Ok(())
    }

    /// The GPUs, in the order of the driver.
    pub fn gpus(&self) -> &[String] {
        &self.order
    }

    /// GPUs that are there and cannot be used, each with its number and why.
    pub fn absent(&self) -> &[(usize, String)] {
        &self.absent
    }

    /// The GPU that a setting names by UUID or number; a name that no GPU can have is an error.
    pub fn named_gpu(&self, name: &str) -> Result<NamedGpu<'_>> {
        if let Some(found) = self.find_gpu(name) {
            return Ok(NamedGpu::Usable(found));
        }
        let number = name.parse::<usize>().ok();
        // The UUID of a GPU that cannot be read is not known.
        let may_be = |absent: &&(usize, String)| match number {
            Some(number) => absent.0 == number,
            None => name.starts_with("GPU-"),
        };
        let why: Vec<&str> =
            self.absent.iter().filter(may_be).map(|(_, why)| why.as_str()).collect();
        if why.is_empty() {
            let name = name.to_owned();
            return Err(AgentError::NoSuchGpu { name, known: self.order.join(", ") });
        }
        Ok(NamedGpu::Unusable(why.join("; ")))
    }

    /// For other threads.
    pub fn handle(&self) -> AgentHandle {
        let both = |gpu: &Gpu| (Arc::clone(&gpu.shared), gpu.orders.clone());
        AgentHandle {
            gpus: Arc::new(self.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), both(gpu))).collect()),
            order: self.order.as_slice().into(),
            numbers: self.order.iter().map(|uuid| self.number_of(uuid)).collect(),
            runner: Arc::clone(&self.runner),
            found: self.found.as_slice().into(),
        }
    }

    fn number_of(&self, uuid: &str) -> usize {
        let mut all = self.numbers.iter();
        all.find_map(|(number, of)| (of == uuid).then_some(*number)).unwrap_or(usize::MAX)
    }

    /// A GPU by UUID or by its number.
    pub fn find_gpu(&self, name: &str) -> Option<&str> {
        let by_number = name.parse::<usize>().ok().and_then(|index| self.numbers.get(&index));
        by_number.or_else(|| self.order.iter().find(|uuid| *uuid == name)).map(String::as_str)
    }

    /// What is known of a GPU.
    pub fn status(&self, uuid: &str) -> Option<GpuStatus> {
        self.gpus.get(uuid).map(|gpu| gpu.shared.status().clone())
    }

    /// What a GPU shares with its loops: for whoever builds on the agent.
    pub fn shared(&self, uuid: &str) -> Option<Arc<GpuShared>> {
        self.gpus.get(uuid).map(|gpu| Arc::clone(&gpu.shared))
    }

    /// Gives an order to a GPU.
    pub fn order(&self, uuid: &str, order: Order) -> Result<()> {
        let unknown = || AgentError::Unknown { workload: format!("GPU {uuid}") };
        let gpu = self.gpus.get(uuid).ok_or_else(unknown)?;
        gpu.shared.status().claim(&order)?;
        gpu.orders.send(order).map_err(|_| unknown())
    }

    /// The next event, for at most `limit`.
    pub fn next_event(&self, limit: Duration) -> Option<(String, Event)> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner).recv_timeout(limit).ok()
    }

    /// Where the metrics are.
    pub fn metrics_address(&self) -> Option<std::net::SocketAddr> {
        self.page.as_ref().map(PageServer::address)
    }

    /// Stops offline work in the clean order and ends. Services and MPS go on.
    pub fn shutdown(mut self) {
        for gpu in self.gpus.values() {
            drop(gpu.orders.send(Order::Shutdown));
        }
        self.watchers.clear();
        for gpu in self.gpus.values_mut() {
            if let Some(slow) = gpu.slow.take() {
                drop(slow.join());
            }
            gpu.stop_fast.store(true, Ordering::Release);
            if let Some(fast) = gpu.fast.take() {
                drop(fast.join());
            }
        }
        if let Some((stop, thread)) = self.host.take() {
            stop.store(true, Ordering::Release);
            drop(thread.join());
        }
        self.cgroups.remove_empty();
    }
}

/// What the loops of one GPU are made from.
struct GpuStart<'a> {
    config: &'a AgentConfig,
    nvml: &'a Arc<Nvml>,
    facts: &'a GpuFacts,
    node: &'a NodeShared,
    child: &'a ChildProgram,
    knobs: Option<ServiceKnobs>,
}

fn start_gpu(
    start: &GpuStart<'_>,
    dcgm: Option<Arc<DcgmLink>>,
    adopted: Vec<Running>,
) -> Result<Gpu> {
    let &GpuStart { config, nvml, facts, node, child, knobs } = start;
    let laws = laws_for(config, facts)?;
    let name = encode(&facts.uuid);
    let state_dir = gpu_dir(&config.state_dir, &facts.uuid);
    std::fs::create_dir_all(&state_dir).map_err(file("create", &state_dir))?;
    let sensor = NvmlSensor::new(Arc::clone(nvml), dcgm, &facts.uuid)?;
    let source = monitor::Sensor::source(&sensor);
    tracing::info!(gpu = facts.uuid, name = facts.name, source = source.as_str(), "GPU found");
    let monitor = Monitor::start(&name, sensor, config.sample_every, config.history)
        .map_err(system("start a thread"))?;
    let shared = Arc::new(GpuShared::new(facts.clone(), monitor));
    let (orders, receive_orders) = mpsc::channel();
    let (to_fast, from_slow) = mpsc::channel::<HealthOrder>();
    let stop_fast = Arc::new(AtomicBool::new(false));
    let params = ControlParams {
        laws,
        health: config.laws.health,
        split: config.laws.split,
        forecast: config.laws.forecast,
        share: knobs.map_or(config.laws.share, |knobs| knobs.share),
        quota: config.laws.quota,
        slo: knobs.and_then(|knobs| knobs.slo),
        queue_for: config.queue_for,
        tick: config.tick,
        defences: config.defences,
    };
    let fast = {
        let (shared, orders, tell) = (Arc::clone(&shared), orders.clone(), node.tell.clone());
        let stop = Arc::clone(&stop_fast);
        let body = move || control::run(&shared, params, &from_slow, &orders, &tell, &stop);
        std::thread::Builder::new().name(format!("fast-{name}")).spawn(body)
    };
    let fast = fast.map_err(system("start a thread"))?;
    let daemon = mps_daemon(config, facts, node)?;
    let params = supervisor_params(config, child, state_dir);
    let mut supervisor =
        Supervisor::new(params, Arc::clone(&shared), node.clone(), receive_orders, to_fast, daemon);
    for running in adopted {
        supervisor.adopt(running)?;
    }
    let slow = std::thread::Builder::new()
        .name(format!("slow-{name}"))
        .spawn(move || supervisor.run())
        .map_err(system("start a thread"))?;
    Ok(Gpu { shared, orders, slow: Some(slow), fast: Some(fast), stop_fast })
}

fn mps_daemon(
    config: &AgentConfig,
    facts: &GpuFacts,
    node: &NodeShared,
) -> Result<Option<MpsDaemon>> {
    let Some(mps) = &config.mps else { return Ok(None) };
    let spec = DaemonSpec {
        program: mps.program.clone(),
        uuid: facts.uuid.clone(),
        dir: config.run_dir.join("mps").join(encode(&facts.uuid)),
        multi_user: mps.multi_user,
        limit: mps.limit,
        offline_partition: mps.offline_partition,
    };
    let group = node.runner.cgroups().create(&format!("mps-{}", facts.uuid), &Limits::default())?;
    MpsDaemon::adopt(spec, group).map(Some)
}

fn supervisor_params(
    config: &AgentConfig,
    child: &ChildProgram,
    state_dir: std::path::PathBuf,
) -> SupervisorParams {
    SupervisorParams {
        run_dir: config.run_dir.join("control"),
        state_dir,
        pass_env: config.pass_env.clone(),
        interposer: config.interposer.clone(),
        child: child.clone(),
        errors: config.laws.errors.clone(),
        retry: config.laws.retry,
        logs: config.logs,
        probe_limit: config.probe_limit,
        probe_every: config.probe_every,
        mps_every: config.mps.as_ref().map_or(Duration::from_secs(1), |mps| mps.check_every),
        register_within: Duration::from_secs(2),
        fault_stop: Duration::from_millis(1_500),
        driver_memory_limit: config.mps.as_ref().and_then(|mps| mps.driver_memory_limit),
        defences: config.defences,
    }
}

/// Waits until a condition on a GPU's status holds; for callers that start something and want to
/// see it.
pub fn wait_status(
    agent: &Agent,
    uuid: &str,
    limit: Duration,
    holds: impl Fn(&GpuStatus) -> bool,
) -> Option<GpuStatus> {
    let deadline = Instant::now() + limit;
    loop {
        let status = agent.status(uuid)?;
        if holds(&status) {
            return Some(status);
        }
        if Instant::now() > deadline {
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}
