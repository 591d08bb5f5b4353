//! One phase, inside the emulated node: agent, services, jobs, requests, and what goes wrong.

mod errors;

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use muxflow_agent::agent::Agent;
use muxflow_agent::cgroup::encode;
use muxflow_agent::mps::control::MpsControl;
use muxflow_agent::{monitor, sys};
use muxflow_api::service::{HealthDeclaration, ServiceDeclaration, ServiceView};
use muxflow_manager::client::{Client, Place};
use muxflow_manager::config::UpConfig;
use muxflow_manager::hosting::Hosting;
use muxflow_manager::up::Up;
use muxflow_services::manager::ServiceManager;
use muxflow_types::Micros;

use super::jobs::{self, Jobs};
use super::load::{self, Asked, Record};
use super::report::{Injected, PhaseResult, ServiceResult};
use super::scenario::{FAULT_AT, Offline, Phase, SIGTERM_AT, Served};
use super::view::{Glance, GpuGlance, View};
use crate::cmd::agent::child_program;

const TICK: Duration = Duration::from_millis(50);
/// Requests that fail within this time after an error count as its doing.
const AFTER_S: f64 = 6.0;
/// A phase that is not ready by then is broken.
const READY_WITHIN: Duration = Duration::from_secs(40);
/// How long a job is measured alone.
pub(super) const SOLO_S: f64 = 5.0;

/// The inner process was asked to stop.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub(super) struct Interrupted;

struct Stage<'a> {
    phase: &'a Phase,
    up: Up,
    hosting: Hosting,
    client: Client,
    runtime: tokio::runtime::Runtime,
    jobs: Jobs,
    records: Vec<Record>,
    view: View,
    signals: &'a OwnedFd,
    injected: Vec<Injected>,
    out_s: f64,
    pids: BTreeMap<String, Vec<u32>>,
}

fn interrupted(signals: &OwnedFd) -> bool {
    sys::take_signal(signals.as_fd()).is_some()
}

/// Runs a phase and leaves its result in `result.json` beside the phase's file.
pub(super) fn run(file: &Path) -> anyhow::Result<()> {
    // Before any thread starts, so that all of them leave these signals to this one.
    let signals =
        sys::signal_fd(&[libc::SIGTERM, libc::SIGINT]).context("cannot watch for signals")?;
    let text =
        std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut phase: Phase = serde_json::from_str(&text).context("the phase cannot be read")?;
    // From here on a signal is heard, and whoever wants to send one learns where to.
    std::fs::write(phase.dir.join("inner.pid"), std::process::id().to_string())?;
    let log = std::fs::File::create(phase.dir.join("demo.log")).context("cannot write the log")?;
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new("info"))
        .with_writer(std::sync::Mutex::new(log))
        .with_ansi(false)
        .init();
    let mut view = View::new(phase.offline.title(), phase.day_s);
    if phase.offline == Offline::None {
        view.line("measuring a job alone");
        let rate = jobs::solo_rate(&phase, SOLO_S, &|| interrupted(&signals));
        phase.solo_per_s = Some(rate?);
    }
    let mut stage = Stage::start(&phase, view, &signals)?;
    let outcome = stage.play();
    stage.end();
    let result = outcome?;
    let text = serde_json::to_string_pretty(&result)?;
    std::fs::write(phase.dir.join("result.json"), text).context("cannot write the result")
}

fn config_text(phase: &Phase) -> anyhow::Result<String> {
    let node =
        std::env::var("MUXFLOW_EMULATED_DIR").context("this runs inside an emulated node")?;
    let kernel_log = Path::new(&node).join("kernel.log");
    // The log is there from the first line on; an agent that comes earlier would not find it.
    std::fs::OpenOptions::new().create(true).append(true).open(&kernel_log)?;
    let defences = match phase.offline {
        Offline::Bare => {
            "[agent.defences]\ngate = false\neviction = false\nquota = false\nclean_stop = false\nerror_response = false\n"
        }
        _ => "",
    };
    Ok(format!(
        "state_dir = '{}'\nrun_dir = '{}'\nlisten = '127.0.0.1:{}'\n[[token]]\nuser = '{}'\ntoken = '{}'\n[profiler]\nenabled = false\n[agent]\ninterposer = '{}'\nmetrics = ''\nkernel_log = '{}'\ncgroup_parent = '{}'\npass_env = ['MUXFLOW_EMULATED_DIR']\nlaws = 'laws.toml'\n{defences}",
        phase.dir.join("state").display(),
        phase.run_dir.display(),
        phase.port,
        sys::own_uid(),
        phase.token,
        phase.programs.interposer.display(),
        kernel_log.display(),
        phase.label,
    ))
}

/// The day is compressed, and so are the times of the laws that last longer than seconds. A GPU that
/// is over its limit is out for a tenth of the day at first: on a short day, too, jobs come back to it
/// before the next error.
fn laws(day_s: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 4")]
    let out_s = (day_s / 10.0).clamp(1.0, 4.0) as u64;
    format!(
        "[health]\noverlimit_base_s = {out_s}\noverlimit_cap_s = {}\noverlimit_window_s = 60\n[retry]\nbase_s = 1\ncap_s = 4\n[split]\nlook_every_ms = 3000\nlook_for_ms = 200\n",
        4 * out_s
    )
}

fn declaration(phase: &Phase, service: &Served) -> ServiceDeclaration {
    let words = [
        phase.programs.inference.display().to_string(),
        "--network".into(),
        service.network.clone(),
        "--batch".into(),
        service.batch.to_string(),
        "--rate".into(),
        "0".into(),
        "--seconds".into(),
        "0".into(),
        "--listen".into(),
        "127.0.0.1:{port}".into(),
    ];
    ServiceDeclaration {
        name: service.name.clone(),
        command: words.to_vec(),
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        gpu_type: None,
        port: 0,
        min_replicas: service.replicas,
        max_replicas: service.replicas,
        load_per_replica: 4.0,
        health: HealthDeclaration {
            path: "/healthz".into(),
            every_ms: 250,
            within_ms: 1_000,
            down_after: 2,
            restart_after_ms: 3_000,
        },
        slo_ms: service.slo_ms,
        critical: false,
        request_within_ms: 2_000,
        drain_within_ms: 2_000,
    }
}

impl<'a> Stage<'a> {
    fn start(phase: &'a Phase, view: View, signals: &'a OwnedFd) -> anyhow::Result<Self> {
        std::fs::write(phase.dir.join("laws.toml"), laws(phase.day_s))?;
        let path = phase.dir.join("up.toml");
        std::fs::write(&path, config_text(phase)?)?;
        let config = UpConfig::read(&path)?;
        let mut hosting = None;
        let up = Up::start(&config, child_program()?, |agent, _| {
            let hosted = hosting.insert(Hosting::start(agent, &config)?);
            Ok(hosted.extras())
        })?;
        let server = up.server().context("the manager does not listen")?;
        let client = Client::new(Place::Socket(server.socket().to_owned()))?;
        let mut view = view;
        if let Some(address) = server.address() {
            view.line(&format!("dashboard: http://{address}/dashboard#token={}", phase.token));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .context("cannot start a runtime")?;
        Ok(Stage {
            phase,
            jobs: Jobs::new(phase),
            hosting: hosting.context("nothing is hosted")?,
            up,
            client,
            runtime,
            records: phase.services.iter().map(|_| Record::default()).collect(),
            view,
            signals,
            injected: Vec::new(),
            out_s: 0.0,
            pids: BTreeMap::new(),
        })
    }

    fn agent(&self) -> &Agent {
        self.up.agent()
    }

    fn services(&self) -> &ServiceManager {
        &self.hosting.services
    }

    fn play(&mut self) -> anyhow::Result<PhaseResult> {
        let mut fronts = Vec::new();
        for service in &self.phase.services {
            fronts.push(self.services().declare(&declaration(self.phase, service))?);
        }
        self.wait_until_ready()?;
        // The first requests load code and memory; they are no part of the day.
        for front in &fronts {
            self.runtime.block_on(load::warm_up(*front));
        }
        for index in 0..self.agent().gpus().len() {
            // A client that dies with work in flight takes its neighbours along: the worst that MPS does.
            self.fault(index, None, &["kill-propagates", "100"])?;
        }
        let start = Instant::now();
        let mut under_way = Vec::new();
        for (index, (service, front)) in self.phase.services.iter().zip(fronts).enumerate() {
            let curve = service.curve(self.phase, index);
            let asking = load::run(front, curve, start, self.records[index].clone());
            under_way.push(self.runtime.spawn(asking));
        }
        let began = monitor::now();
        self.the_day(start)?;
        let span = monitor::now().since(began);
        let (iterations, on_gpu_s) = (self.jobs.iterations(), self.jobs.on_gpu_s());
        for asking in under_way {
            self.runtime.block_on(asking).context("the requests broke off")?;
        }
        Ok(self.result(iterations, on_gpu_s, span))
    }

    fn wait_until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + READY_WITHIN;
        let wanted: u32 = self.phase.services.iter().map(|service| service.replicas).sum();
        loop {
            let views = self.services().list();
            let all = views.iter().flat_map(|view| &view.replicas);
            let ready = all.filter(|replica| replica.state == "ready").count();
            if ready >= wanted as usize {
                return Ok(());
            }
            if interrupted(self.signals) {
                return Err(Interrupted.into());
            }
            let late = Instant::now() > deadline;
            anyhow::ensure!(!late, "only {ready} of {wanted} replicas are ready: {views:#?}");
            std::thread::sleep(TICK);
        }
    }

    fn the_day(&mut self, start: Instant) -> anyhow::Result<()> {
        let (mut fault_due, mut sigterm_due) = (true, true);
        let mut last = start;
        loop {
            let at_s = start.elapsed().as_secs_f64();
            if at_s >= self.phase.day_s {
                return Ok(());
            }
            if interrupted(self.signals) {
                return Err(Interrupted.into());
            }
            self.look_after_jobs()?;
            if fault_due && at_s >= FAULT_AT * self.phase.day_s {
                fault_due = !self.break_memory(at_s)?;
            }
            if sigterm_due && at_s >= SIGTERM_AT * self.phase.day_s {
                sigterm_due = !self.terminate(at_s)?;
            }
            let views = self.services().list();
            self.watch_replicas(&views, last.elapsed().as_secs_f64(), at_s);
            last = Instant::now();
            let glance = self.glance(&views, at_s);
            self.view.show(&glance);
            std::thread::sleep(TICK);
        }
    }

    fn look_after_jobs(&mut self) -> anyhow::Result<()> {
        let gpus = self.agent().gpus().to_vec();
        for event in self.jobs.tick(&self.client, &gpus)? {
            let number = event.gpu.and_then(|gpu| gpus.iter().position(|uuid| *uuid == gpu));
            let place = number.map_or_else(String::new, |number| format!("GPU {number}: "));
            if matches!(event.kind.as_str(), "eviction" | "fault" | "job" | "alert") {
                self.view.event(&format!("{place}{}", event.text));
            }
        }
        Ok(())
    }

    fn watch_replicas(&mut self, views: &[ServiceView], passed_s: f64, at_s: f64) {
        for service in &self.phase.services {
            let view = views.iter().find(|view| view.declared.name == service.name);
            let replicas = view.into_iter().flat_map(|view| &view.replicas);
            let ready = replicas.filter(|replica| replica.state == "ready").count();
            let out_s = (service.replicas as usize).saturating_sub(ready) as f64 * passed_s;
            self.out_s += out_s;
            let recent =
                |one: &&mut Injected| one.beside == service.name && at_s - one.at_s < AFTER_S;
            if let Some(one) = self.injected.iter_mut().rfind(recent) {
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "milliseconds"
                )]
                let out_ms = (out_s * 1e3) as u64;
                one.out_ms += out_ms;
            }
        }
        for replica in views.iter().flat_map(|view| &view.replicas) {
            let seen = self.pids.entry(replica.gpu.clone()).or_default();
            if let Some(pid) = replica.pid.filter(|pid| !seen.contains(pid)) {
                seen.push(pid);
            }
        }
    }

    fn glance(&self, views: &[ServiceView], at_s: f64) -> Glance {
        let gpu = |(index, uuid): (usize, &String)| {
            let status = self.agent().status(uuid);
            let sample = self.agent().shared(uuid).and_then(|s| s.monitor.published().sample);
            let service = views.iter().find_map(|view| {
                let replica = view.replicas.iter().find(|replica| replica.gpu == *uuid)?;
                Some((replica, view.declared.slo_ms))
            });
            GpuGlance {
                index,
                health: status.as_ref().map_or_else(String::new, |s| s.health.to_string()),
                service: service.map(|(replica, _)| replica.name.clone()),
                rate_per_s: service.map_or(0.0, |(replica, _)| replica.latency.rate_per_s),
                p99_ms: service.and_then(|(replica, _)| replica.latency.p99_ms),
                slo_ms: service.and_then(|(_, slo)| slo),
                sm_activity_pct: sample.and_then(|s| s.sm_activity).map_or(0.0, |p| p.value()),
                job: self.jobs.name_on(uuid).map(str::to_owned),
                budget: status.map_or(0.0, |s| s.budget),
                gated: self.phase.offline == Offline::Protected,
            }
        };
        let gpus = self.agent().gpus().iter().enumerate().map(gpu).collect();
        Glance { at_s, gpus, iterations: self.jobs.iterations(), solo_per_s: self.phase.solo_per_s }
    }

    fn result(&mut self, iterations: u64, on_gpu_s: f64, span: Micros) -> PhaseResult {
        let now = monitor::now();
        let (mut util, mut activity) = (Mean::default(), Mean::default());
        for uuid in self.agent().gpus() {
            let Some(shared) = self.agent().shared(uuid) else { continue };
            for sample in shared.monitor.history(now, span) {
                util.add(sample.gpu_util.map(|p| p.value()));
                activity.add(sample.sm_activity.map(|p| p.value()));
            }
        }
        for one in &mut self.injected {
            let hit = |asked: &Asked| {
                !asked.good && (one.at_s - 2.5..one.at_s + AFTER_S).contains(&asked.at_s)
            };
            let services = self.phase.services.iter().zip(&self.records);
            let beside = services.filter(|(service, _)| service.name == one.beside);
            let failed = beside.map(|(_, r)| r.all().iter().filter(|a| hit(a)).count() as u64);
            one.failed_after = failed.sum();
        }
        let restarts = self.pids.values().map(|pids| pids.len().saturating_sub(1) as u64).sum();
        let services = self.phase.services.iter().zip(&self.records);
        PhaseResult {
            offline: self.phase.offline,
            day_s: self.phase.day_s,
            gpus: u32::try_from(self.agent().gpus().len()).unwrap_or(u32::MAX),
            services: services
                .map(|(service, record)| service_result(service, &record.all()))
                .collect(),
            iterations,
            on_gpu_s,
            solo_per_s: self.phase.solo_per_s,
            gpu_util_pct: util.value(),
            sm_activity_pct: activity.value(),
            evictions: self.jobs.evictions,
            injected: self.injected.clone(),
            replica_restarts: restarts,
            replicas_out_s: self.out_s,
        }
    }

    /// Leaves nothing running, whatever came before.
    fn end(mut self) {
        self.jobs.end();
        for service in &self.phase.services {
            drop(self.runtime.block_on(async {
                let leaving = self.services().remove(&service.name);
                tokio::time::timeout(Duration::from_secs(8), leaving).await
            }));
        }
        let gpus: Vec<String> = self.agent().gpus().to_vec();
        drop(self.hosting);
        self.up.shutdown();
        for uuid in gpus {
            // MPS outlives an agent by design; the demo ends it.
            let pipe = self.phase.run_dir.join("mps").join(encode(&uuid)).join("pipe");
            let control =
                MpsControl::new("nvidia-cuda-mps-control".into(), pipe, Duration::from_secs(3));
            drop(control.quit());
        }
        self.runtime.shutdown_timeout(Duration::from_secs(1));
    }
}

fn service_result(service: &Served, asked: &[Asked]) -> ServiceResult {
    let quantile = |q| load::quantile_ms(asked.iter().copied(), q).unwrap_or(f64::NAN);
    let within = service.slo_ms.map(|slo| {
        let good =
            asked.iter().filter(|one| one.good && (one.latency_us as f64) <= slo * 1e3).count();
        good as f64 / asked.len().max(1) as f64
    });
    ServiceResult {
        name: service.name.clone(),
        requests: asked.len() as u64,
        failed: asked.iter().filter(|one| !one.good).count() as u64,
        p50_ms: quantile(0.5),
        p99_ms: quantile(0.99),
        within_slo: within,
        slo_ms: service.slo_ms,
    }
}

#[derive(Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            self.sum += value;
            self.count += 1.0;
        }
    }

    fn value(&self) -> f64 {
        if self.count > 0.0 { self.sum / self.count } else { 0.0 }
    }
}
