//! The offline jobs of a phase: under the agent, or bare, as plain MPS clients beside it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use muxflow_agent::agent::Agent;
use muxflow_agent::cgroup::{Limits, encode};
use muxflow_agent::environment::{self, GpuSide};
use muxflow_agent::gpu::{Event, OfflineSpec, Order, StopReason};
use muxflow_agent::monitor;
use muxflow_agent::queue::{JobQueue, Left};
use muxflow_agent::stop::StopLimits;
use muxflow_policy::retry::RetryParams;
use muxflow_types::JobId;

use super::scenario::{Offline, Phase, TRAINED, TRAINING_BATCH};

/// A bare job that failed is started again after this, as any queue would.
const AGAIN_AFTER: Duration = Duration::from_secs(2);

/// What is known of one job.
#[derive(Debug, Default)]
struct Track {
    pid: Option<u32>,
    gpu: Option<String>,
    since: Option<Instant>,
    on_gpu: Duration,
    output: PathBuf,
    child: Option<Child>,
    not_before: Option<Instant>,
}

impl Track {
    fn left(&mut self) {
        self.on_gpu += self.since.take().map_or(Duration::ZERO, |since| since.elapsed());
        (self.pid, self.gpu) = (None, None);
    }
}

/// All jobs of a phase.
#[derive(Debug)]
pub(super) struct Jobs {
    offline: Offline,
    tracks: BTreeMap<String, Track>,
    queue: JobQueue,
    specs: BTreeMap<String, OfflineSpec>,
    pipes: PathBuf,
    /// Jobs that had to leave for the sake of a service or the host.
    pub(super) evictions: u64,
}

fn argv(phase: &Phase, name: &str) -> Vec<String> {
    let words = [
        phase.programs.training.display().to_string(),
        "--network".into(),
        TRAINED.into(),
        "--batch".into(),
        TRAINING_BATCH.to_string(),
        "--iterations".into(),
        "0".into(),
        "--checkpoint".into(),
        phase.dir.join(format!("{name}.checkpoint")).display().to_string(),
        "--save-every".into(),
        "20".into(),
        "--report-every".into(),
        "0.25".into(),
        "--default-signals".into(),
    ];
    words.to_vec()
}

impl Jobs {
    pub(super) fn new(phase: &Phase, retry: RetryParams) -> anyhow::Result<Self> {
        let count = if phase.offline == Offline::None { 0 } else { phase.jobs };
        let (mut tracks, mut specs) = (BTreeMap::new(), BTreeMap::new());
        for index in 0..count {
            let name = format!("train-{index}");
            let spec = OfflineSpec {
                job: JobId::new(&name)?,
                argv: argv(phase, &name),
                env: BTreeMap::new(),
                cwd: "/".into(),
                user: None,
                limits: Limits::default(),
                share: None,
                quota: None,
                stop: StopLimits { checkpoint_ms: 500, ..StopLimits::default() },
            };
            let output = match phase.offline {
                Offline::Bare => phase.dir.join(format!("{name}.log")),
                _ => {
                    let dir = phase.dir.join("state/workloads");
                    dir.join(encode(&format!("offline-{name}"))).join("stdout.log")
                }
            };
            specs.insert(name.clone(), spec);
            tracks.insert(name, Track { output, ..Track::default() });
        }
        let waiting = match phase.offline {
            Offline::Protected => specs.values().cloned().collect(),
            _ => Vec::new(),
        };
        Ok(Jobs {
            offline: phase.offline,
            tracks,
            queue: JobQueue::new(waiting, retry),
            specs,
            pipes: phase.run_dir.join("mps"),
            evictions: 0,
        })
    }

    /// Starts what can be started.
    pub(super) fn tick(&mut self, agent: &Agent) -> anyhow::Result<()> {
        match self.offline {
            Offline::None => Ok(()),
            Offline::Protected => {
                for uuid in agent.gpus() {
                    let Some(status) = agent.status(uuid) else { continue };
                    if let Some(spec) = self.queue.next_for(&status, monitor::now()) {
                        agent.order(uuid, Order::StartOffline(Box::new(spec)))?;
                    }
                }
                Ok(())
            }
            Offline::Bare => self.tick_bare(agent.gpus()),
        }
    }

    fn tick_bare(&mut self, gpus: &[String]) -> anyhow::Result<()> {
        let now = Instant::now();
        for ((name, track), gpu) in self.tracks.iter_mut().zip(gpus) {
            if let Some(child) = &mut track.child
                && child.try_wait()?.is_some()
            {
                track.child = None;
                track.left();
                track.not_before = Some(now + AGAIN_AFTER);
            }
            if track.child.is_some() || track.not_before.is_some_and(|at| now < at) {
                continue;
            }
            let Some(spec) = self.specs.get(name) else { continue };
            let child = start_bare(spec, gpu, &self.pipes, &track.output)?;
            track.pid = Some(child.id());
            track.child = Some(child);
            track.gpu = Some(gpu.clone());
            track.since = Some(now);
        }
        Ok(())
    }

    /// What the agent tells. Returns what a person should read.
    pub(super) fn note(&mut self, gpu: &str, event: &Event) -> Option<String> {
        match event {
            Event::JobStarted { job, pid, share, .. } => {
                let track = self.tracks.get_mut(job.as_str())?;
                track.pid = Some(*pid);
                track.gpu = Some(gpu.to_owned());
                track.since = Some(Instant::now());
                Some(format!("{job} runs on {:.0} % of the SMs", share.percent().value()))
            }
            Event::JobEnded { job, reason, requeue, .. } => {
                let how = match (requeue, reason.is_some()) {
                    (false, _) => Left::Finished,
                    (true, true) => Left::Evicted,
                    (true, false) => Left::Failed,
                };
                self.queue.left(job, how, monitor::now());
                self.tracks.get_mut(job.as_str())?.left();
                match reason {
                    Some(why @ (StopReason::Health(_) | StopReason::Host(_))) => {
                        self.evictions += 1;
                        Some(format!("{job} evicted: {why}"))
                    }
                    Some(why) => Some(format!("{job} stopped: {why}")),
                    None => Some(format!("{job} left by itself")),
                }
            }
            Event::JobRefused { job, .. } => {
                self.queue.left(job, Left::Evicted, monitor::now());
                None
            }
            _ => None,
        }
    }

    /// The job on a GPU with its process.
    pub(super) fn on(&self, gpu: &str) -> Option<(&str, u32)> {
        let (name, track) = self.tracks.iter().find(|(_, t)| t.gpu.as_deref() == Some(gpu))?;
        Some((name, track.pid?))
    }

    /// Seconds on GPUs so far, all jobs together.
    pub(super) fn on_gpu_s(&self) -> f64 {
        let one = |track: &Track| {
            track.on_gpu + track.since.map_or(Duration::ZERO, |since| since.elapsed())
        };
        self.tracks.values().map(|track| one(track).as_secs_f64()).sum()
    }

    /// Iterations that are done and not lost.
    pub(super) fn iterations(&self) -> u64 {
        self.tracks.values().map(|track| last_iteration(&track.output)).sum()
    }

    /// Ends the bare ones; those under the agent leave with it.
    pub(super) fn end(&mut self) {
        for child in self.tracks.values_mut().filter_map(|track| track.child.as_mut()) {
            // Already gone is fine.
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// The last `iteration N` of a trainer's output.
pub(super) fn last_iteration(output: &Path) -> u64 {
    let text = std::fs::read_to_string(output).unwrap_or_default();
    let mut lines = text.lines().rev();
    lines.find_map(|line| line.strip_prefix("iteration ")?.parse().ok()).unwrap_or(0)
}

fn start_bare(spec: &OfflineSpec, gpu: &str, pipes: &Path, output: &Path) -> anyhow::Result<Child> {
    let dir = pipes.join(encode(gpu));
    let (pipe, log) = (dir.join("pipe"), dir.join("log"));
    let side = GpuSide { uuid: gpu, mps_pipe_dir: Some(&pipe), mps_log_dir: Some(&log) };
    let env = environment::online(std::env::vars().collect(), &spec.env, side);
    let append = || File::options().create(true).append(true).open(output);
    let out = append().with_context(|| format!("cannot write {}", output.display()))?;
    let child = Command::new(&spec.argv[0])
        .args(&spec.argv[1..])
        .env_clear()
        .envs(env)
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .process_group(0)
        .spawn();
    child.with_context(|| format!("cannot start {}", spec.argv[0]))
}

/// How many iterations per second a job does alone on the first GPU.
pub(super) fn solo_rate(
    phase: &Phase,
    seconds: f64,
    stop: &dyn Fn() -> bool,
) -> anyhow::Result<f64> {
    let output = phase.dir.join("solo.log");
    let mut words = argv(phase, "solo");
    if let Some(every) = words.iter_mut().find(|word| *word == "0.25") {
        // Often enough that the moments of the first and the last line are known well.
        *every = "0.05".into();
    }
    let out =
        File::create(&output).with_context(|| format!("cannot write {}", output.display()))?;
    let mut child = Command::new(&words[0])
        .args(&words[1..])
        .env("CUDA_VISIBLE_DEVICES", "0")
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .process_group(0)
        .spawn()
        .with_context(|| format!("cannot start {}", words[0]))?;
    let began = Instant::now();
    let mut first: Option<(Instant, u64)> = None;
    let mut last = (began, 0);
    while began.elapsed().as_secs_f64() < seconds && !stop() && child.try_wait()?.is_none() {
        std::thread::sleep(Duration::from_millis(10));
        let done = last_iteration(&output);
        if done > last.1 {
            last = (Instant::now(), done);
            first.get_or_insert(last);
        }
    }
    drop(child.kill());
    drop(child.wait());
    let (from, before) = first.context("the trainer did nothing alone; see its output")?;
    let took = last.0.duration_since(from).as_secs_f64();
    #[expect(clippy::cast_precision_loss, reason = "counts of iterations")]
    let rate = (last.1 - before) as f64 / took;
    anyhow::ensure!(
        rate.is_finite() && rate > 0.0,
        "the trainer did too little alone to tell its speed"
    );
    Ok(rate)
}
