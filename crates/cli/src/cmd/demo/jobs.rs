//! The offline jobs of a phase: submitted to the manager, or bare, as plain MPS clients beside it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use muxflow_agent::cgroup::encode;
use muxflow_agent::environment::{self, GpuSide};
use muxflow_api::events::{EventList, EventView};
use muxflow_api::jobs::{JobList, Submitted};
use muxflow_manager::client::Client;

use super::scenario::{Offline, Phase, TRAINED, TRAINING_BATCH};
use super::stage::Interrupted;

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
    id: String,
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
    words: BTreeMap<String, Vec<String>>,
    pipes: PathBuf,
    state_dir: PathBuf,
    submitted: bool,
    looked: Option<Instant>,
    seen_events: u64,
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

/// The manager is asked this often.
const LOOK_EVERY: Duration = Duration::from_millis(200);

impl Jobs {
    pub(super) fn new(phase: &Phase) -> Self {
        let count = if phase.offline == Offline::None { 0 } else { phase.jobs };
        let (mut tracks, mut words) = (BTreeMap::new(), BTreeMap::new());
        for index in 0..count {
            let name = format!("train-{index}");
            let output = phase.dir.join(format!("{name}.log"));
            words.insert(name.clone(), argv(phase, &name));
            tracks.insert(name, Track { output, ..Track::default() });
        }
        Jobs {
            offline: phase.offline,
            tracks,
            words,
            pipes: phase.run_dir.join("mps"),
            state_dir: phase.dir.join("state/agent/workloads"),
            submitted: false,
            looked: None,
            seen_events: 0,
            evictions: 0,
        }
    }

    /// Starts what can be started. Returns what happened.
    pub(super) fn tick(
        &mut self,
        client: &Client,
        gpus: &[String],
    ) -> anyhow::Result<Vec<EventView>> {
        match self.offline {
            Offline::None => {}
            Offline::Protected if !self.submitted => self.submit(client)?,
            Offline::Protected => {}
            Offline::Bare => self.tick_bare(gpus)?,
        }
        if self.looked.is_some_and(|at| at.elapsed() < LOOK_EVERY) {
            return Ok(Vec::new());
        }
        self.looked = Some(Instant::now());
        if self.offline == Offline::Protected {
            self.look(client)?;
        }
        let list: EventList = client.get(&format!("/v1/events?after={}", self.seen_events))?;
        self.seen_events = list.next;
        // Those that left because of an error are counted as errors.
        let for_service =
            |event: &&EventView| event.kind == "eviction" && !event.text.contains("fault");
        let evicted = list.items.iter().filter(for_service).count();
        self.evictions += evicted as u64;
        Ok(list.items)
    }

    /// As anybody would: through the manager's socket.
    fn submit(&mut self, client: &Client) -> anyhow::Result<()> {
        for (name, words) in &self.words {
            let job = serde_json::json!({
                "name": name, "command": words, "cwd": "/", "retries": 20,
                "checkpoint": { "window_s": 1 },
            });
            let made: Submitted = client.post("/v1/jobs", &job)?;
            if let Some(track) = self.tracks.get_mut(name) {
                let dir = self.state_dir.join(encode(&format!("offline-{}", made.id)));
                track.output = dir.join("stdout.log");
                track.id = made.id;
            }
        }
        self.submitted = true;
        Ok(())
    }

    fn look(&mut self, client: &Client) -> anyhow::Result<()> {
        let list: JobList = client.get("/v1/jobs?limit=100")?;
        for track in self.tracks.values_mut() {
            let job = list.items.iter().find(|job| job.id == track.id);
            let gpu = job.filter(|job| job.state.holds_gpu()).and_then(|job| job.gpu.clone());
            if gpu != track.gpu {
                track.left();
                track.since = gpu.as_ref().map(|_| Instant::now());
                track.gpu = gpu;
            }
        }
        Ok(())
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
            let Some(words) = self.words.get(name) else { continue };
            let child = start_bare(words, gpu, &self.pipes, &track.output)?;
            track.pid = Some(child.id());
            track.child = Some(child);
            track.gpu = Some(gpu.clone());
            track.since = Some(now);
        }
        Ok(())
    }

    /// The job on a GPU with its process.
    pub(super) fn on(&self, gpu: &str) -> Option<(&str, Option<u32>)> {
        let (name, track) = self.tracks.iter().find(|(_, t)| t.gpu.as_deref() == Some(gpu))?;
        let found = || process_with(&format!("{name}.checkpoint"));
        Some((name, track.pid.or_else(found)))
    }

    /// The name of the job on a GPU.
    pub(super) fn name_on(&self, gpu: &str) -> Option<&str> {
        let on = |(_, track): &(&String, &Track)| track.gpu.as_deref() == Some(gpu);
        self.tracks.iter().find(on).map(|(name, _)| name.as_str())
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

/// The process of ours with this word in its arguments.
fn process_with(word: &str) -> Option<u32> {
    let entries = std::fs::read_dir("/proc").ok()?;
    let mut pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    pids.find(|pid| {
        let text = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = text.split(|byte| *byte == 0);
        words.next().is_some_and(|first| first.ends_with(b"muxflow-example-training"))
            && words.any(|argument| argument.ends_with(word.as_bytes()))
    })
}

fn start_bare(words: &[String], gpu: &str, pipes: &Path, output: &Path) -> anyhow::Result<Child> {
    let dir = pipes.join(encode(gpu));
    let (pipe, log) = (dir.join("pipe"), dir.join("log"));
    let side = GpuSide { uuid: gpu, mps_pipe_dir: Some(&pipe), mps_log_dir: Some(&log) };
    let env = environment::online(std::env::vars().collect(), &BTreeMap::new(), side);
    let append = || File::options().create(true).append(true).open(output);
    let out = append().with_context(|| format!("cannot write {}", output.display()))?;
    let child = Command::new(&words[0])
        .args(&words[1..])
        .env_clear()
        .envs(env)
        .stdin(Stdio::null())
        .stderr(out.try_clone()?)
        .stdout(out)
        .process_group(0)
        .spawn();
    child.with_context(|| format!("cannot start {}", words[0]))
}

/// How many iterations per second a job does alone on the first GPU; [`Interrupted`] when `stop` says
/// so meanwhile.
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
    let mut stopped = false;
    while began.elapsed().as_secs_f64() < seconds && child.try_wait()?.is_none() {
        stopped = stop();
        if stopped {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
        let done = last_iteration(&output);
        if done > last.1 {
            last = (Instant::now(), done);
            first.get_or_insert(last);
        }
    }
    drop(child.kill());
    drop(child.wait());
    if stopped {
        // The signal is taken: nobody after this would see it.
        return Err(Interrupted.into());
    }
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
