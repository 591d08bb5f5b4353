//! The other side: real processes on emulated GPUs, with the agent's own fast loop between them.
//!
//! The loop runs on the device's time and counters. It writes the control block that the interposer
//! in the job obeys, and says when the job must leave.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

use muxflow_abi::control::{Gate, Settings};
use muxflow_agent::control_block::ControlBlock;
use muxflow_agent::gpu::ActiveJob;
use muxflow_agent::gpu::control::{ControlLoop, ControlParams, Defences};
use muxflow_agent::monitor::{ActivitySource, Published};
use muxflow_e2e::build::{client, products, xcuda};
use muxflow_emulated_gpu::facts::Stats;
use muxflow_emulated_gpu::launcher::{Plan, Running, start};
use muxflow_emulated_gpu::node::parse_gpus;
use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Socket};
use muxflow_policy::node::builtin::laws_of;
use muxflow_policy::node::split::SplitParams;
use muxflow_types::{
    Bytes, GpuSample, GpuType, JobId, MegaHertz, Micros, Percent, SmCount, SmShare,
};

use crate::simulated::{Arrivals, service};
use crate::{Run, Story, plan};

/// From when all processes are up to the start of the scenario.
const SOON_NS: u64 = 1_000_000_000;

fn now_ns() -> u64 {
    muxflow_e2e::block::now_ns()
}

/// Runs one scenario per sequence of arrivals, each on a GPU of its own. From `broken` on, the gate
/// lets everything through.
pub(crate) fn run(arrivals: &[Arrivals], broken: usize, factor: f64) -> Vec<Run> {
    let built = built();
    let home = tempfile::Builder::new().prefix("mxa").tempdir().unwrap();
    let node = start(&Plan {
        gpus: parse_gpus(&format!("t4x{}", arrivals.len())).unwrap(),
        time_factor: factor,
        seed: 1,
        directory: Some(home.path().join("node")),
        built,
    })
    .unwrap();
    let pipe = home.path().join("mps");
    let mut daemon = Command::new(node.node().root().join("bin/nvidia-cuda-mps-control"));
    daemon.arg("-f").envs(node.environment());
    daemon.env("CUDA_MPS_PIPE_DIRECTORY", &pipe).env("CUDA_MPS_LOG_DIRECTORY", &pipe);
    let mut daemon = daemon.stdin(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !pipe.join("control").exists() {
        assert!(Instant::now() < deadline, "the MPS daemon does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
    let (all_up, epoch_ns) = (Barrier::new(arrivals.len()), OnceLock::new());
    let (all_up, epoch_ns) = (&all_up, &epoch_ns);
    let runs = std::thread::scope(|scope| {
        let each: Vec<_> = arrivals
            .iter()
            .enumerate()
            .map(|(gpu, arrivals)| {
                let home = home.path().join(format!("run{gpu}"));
                let pipe = pipe.clone();
                let place = Place { node: &node, gpu, home, pipe, all_up, epoch_ns, factor };
                scope.spawn(move || place.run(arrivals, gpu < broken))
            })
            .collect();
        each.into_iter().map(|run| run.join().unwrap()).collect()
    });
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    runs
}

fn built() -> PathBuf {
    if let Some(built) = std::env::var_os("MUXFLOW_EMULATED_BUILT") {
        return built.into();
    }
    products().to_owned()
}

/// Where one run happens.
struct Place<'a> {
    node: &'a Running,
    gpu: usize,
    home: PathBuf,
    pipe: PathBuf,
    all_up: &'a Barrier,
    epoch_ns: &'a OnceLock<u64>,
    /// Device seconds per second.
    factor: f64,
}

/// Lines of a process, read as they come: its words that are numbers.
type Lines = Arc<Mutex<Vec<(f64, f64)>>>;

/// Waits until a process is up, and reads on.
fn up(process: &mut Child) -> Lines {
    let mut out = BufReader::new(process.stdout.take().unwrap());
    let mut first = String::new();
    out.read_line(&mut first).unwrap();
    assert_eq!(first, "ready\n", "a process did not come up");
    let lines = Lines::default();
    let into = Arc::clone(&lines);
    std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            let mut words = line.split(' ').skip(1).map_while(|word| word.parse().ok());
            if let (Some(first), Some(second)) = (words.next(), words.next()) {
                into.lock().unwrap().push((first, second));
            }
        }
    });
    lines
}

/// One reading of the device's integrals: device seconds since the epoch, busy, SM activity.
type Reading = (f64, f64, f64);

impl Place<'_> {
    fn run(&self, arrivals: &Arrivals, gated: bool) -> Run {
        std::fs::create_dir_all(&self.home).unwrap();
        let times: Vec<String> = arrivals.0.iter().map(f64::to_string).collect();
        let path = self.home.join("arrivals");
        std::fs::write(&path, times.join("\n")).unwrap();
        let shape = service();
        let each_us = shape.busy_us / f64::from(shape.kernels);
        let kernel = format!("serve_muxflow_us{each_us:.0}_f20_o35_i50_b40");
        let path = path.display().to_string();
        let mut serving = self.start("serve", &kernel, plan().request_kernels, &path, None);
        let requests = up(&mut serving);
        // A busy machine may hold the loop up.
        let settings =
            Settings { slow_after_ms: 10_000, stop_after_ms: 30_000, ..Settings::default() };
        let block = ControlBlock::create(&self.home, &settings, 8 << 30, None).unwrap();
        let percent = Percent::clamped(plan().share_pct.into()).unwrap();
        let share = SmShare::from_percent(percent, SmCount(40)).unwrap();
        let stop = muxflow_agent::stop::StopLimits::default();
        let job = ActiveJob::new(JobId::new("job").unwrap(), block, share, stop);
        job.block.beat();
        // 340 ms in kernels of 1 ms, 12 ms apart: the workload of this name.
        let kernel = "train_muxflow_us1000_f40_o40_i82_b45";
        let mut training = self.start("train", kernel, plan().job_kernels, "12000", Some(&job));
        let kernels = up(&mut training);
        self.all_up.wait();
        let epoch_ns = *self.epoch_ns.get_or_init(|| now_ns() + SOON_NS);
        for process in [&mut serving, &mut training] {
            writeln!(process.stdin.take().unwrap(), "{epoch_ns}").unwrap();
        }
        let (readings, evicted_at_s) =
            self.control(epoch_ns, &job, &mut training, &requests, gated);
        let status = serving.wait().unwrap();
        assert!(status.success(), "the service ended with {status}");
        // The last lines are on their way.
        let requests = drained(&requests);
        let kernels = drained(&kernels);
        assert_eq!(requests.len(), arrivals.0.len(), "every request is answered");
        let story = |window: (f64, f64)| Story {
            latency_ms: latency_ms(window, arrivals, &requests),
            ..tell(window, &readings, &kernels)
        };
        Run {
            shared: story(plan().shared),
            alone: story(plan().alone),
            whole: tell(plan().whole(), &readings, &kernels),
            evictions: u64::from(evicted_at_s.is_some()),
            evicted_at_s: evicted_at_s.unwrap_or(0.0),
        }
    }

    fn start(
        &self,
        mode: &str,
        kernel: &str,
        count: u32,
        last: &str,
        job: Option<&ActiveJob>,
    ) -> Child {
        let mut command = Command::new(client("paced", &[]));
        command.arg(mode).arg(self.factor.to_string());
        command.arg(kernel).args([count.to_string(), last.to_owned()]);
        command.envs(self.node.environment());
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe);
        command.env("CUDA_VISIBLE_DEVICES", self.gpu.to_string());
        if let Some(job) = job {
            command.env("LD_PRELOAD", xcuda()).env("MUXFLOW_CONTROL", job.block.dir());
            command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", plan().share_pct.to_string());
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
    }

    /// The agent's fast loop until the end of the scenario: the device's integrals over time, and
    /// when the job left.
    fn control(
        &self,
        epoch_ns: u64,
        job: &ActiveJob,
        training: &mut Child,
        requests: &Lines,
        gated: bool,
    ) -> (Vec<Reading>, Option<f64>) {
        let socket = Socket::connect(&self.node.node().socket(self.gpu)).unwrap();
        let stats = || {
            let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).unwrap();
            Stats::from_bytes(&answer.tail[..size_of::<Stats>()]).unwrap()
        };
        // Device time of the epoch, from a reading that took little time.
        let offset_ns = loop {
            let before = now_ns();
            let stats = stats();
            let after = now_ns();
            if after - before < 200_000 {
                let left_ns = epoch_ns as f64 - (before + after) as f64 / 2.0;
                break stats.time_ns as f64 + left_ns * self.factor;
            }
        };
        let mut laws = ControlLoop::new(params(gated, self.factor), micros(&stats()));
        let mut seen = Published {
            sample: None,
            count: 0,
            source: ActivitySource::Dcgm,
            failure: None,
            failures: 0,
            processes: None,
            recovery: None,
            took: Micros::ZERO,
        };
        let mut readings: Vec<Reading> = Vec::new();
        let mut evicted_at_s = None;
        loop {
            let stats = stats();
            let at_s = (stats.time_ns as f64 - offset_ns) / 1e9;
            readings.push((at_s, stats.integrals[0], stats.integrals[1]));
            if at_s > plan().end_s {
                break;
            }
            if seen.sample.is_none_or(|s| s.refreshed_at.0 != stats.profiling_time_ns / 1000) {
                seen.sample = Some(sample(&stats));
                seen.count += 1;
            }
            let here = evicted_at_s.is_none();
            let latency = p99(requests);
            let turn = laws.turn(micros(&stats), &seen, latency, here.then_some(job));
            if here && turn.evict {
                evict(job, training);
                evicted_at_s = Some(at_s);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        if evicted_at_s.is_none() {
            training.kill().unwrap();
            training.wait().unwrap();
        }
        (readings, evicted_at_s)
    }
}

fn params(gated: bool, factor: f64) -> ControlParams {
    ControlParams {
        laws: laws_of(&GpuType::new("T4").unwrap()).unwrap(),
        health: Default::default(),
        // The simulator has no looks at the service alone; they cost two per cent.
        split: SplitParams { look_every: Micros::from_secs(3_600), ..SplitParams::default() },
        forecast: Default::default(),
        share: Default::default(),
        quota: Default::default(),
        slo: Micros::from_secs_f64(plan().slo_ms / 1e3).ok(),
        // The interposer measures kernels by the host's clock.
        queue_for: Micros::from_secs_f64(0.01 / factor).unwrap(),
        tick: Duration::from_millis(10),
        defences: Defences { gate: gated, ..Defences::default() },
    }
}

/// Device time as the laws' time.
fn micros(stats: &Stats) -> Micros {
    Micros(stats.time_ns / 1000)
}

fn sample(stats: &Stats) -> GpuSample {
    let mut sample = GpuSample::empty(micros(stats));
    sample.refreshed_at = Micros(stats.profiling_time_ns / 1000);
    sample.sm_activity = Percent::clamped(stats.profiling[1] * 100.0);
    sample.gpu_util = Percent::clamped(stats.utilisation_pct[0].into());
    sample.sm_clock = Some(MegaHertz(stats.clock_mhz[0]));
    sample.memory_used = Some(Bytes(stats.used_bytes));
    sample.memory_total = Some(Bytes::from_gib(15));
    sample
}

/// The 99th percentile of the last hundred requests, when there were so many.
fn p99(requests: &Lines) -> Option<Micros> {
    let lines = requests.lock().unwrap();
    let recent = lines.len().checked_sub(100)?;
    let mut all: Vec<f64> = lines[recent..].iter().map(|(came, ended)| ended - came).collect();
    all.sort_by(f64::total_cmp);
    Micros::from_secs_f64(all[98] / 1e3).ok()
}

/// The stop order: drain through the control block, then the signal.
fn evict(job: &ActiveJob, training: &mut Child) {
    job.stopping.store(true, std::sync::atomic::Ordering::Release);
    job.block.set_gate(Gate::Drain);
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        job.block.beat();
        let answers = job.block.answers();
        if answers.drained == answers.live {
            break;
        }
        assert!(Instant::now() < deadline, "the job does not drain");
        std::thread::sleep(Duration::from_millis(2));
    }
    // SAFETY: our own child, not waited for yet.
    unsafe { libc::kill(training.id().cast_signed(), libc::SIGTERM) };
    training.wait().unwrap();
}

fn drained(lines: &Lines) -> Vec<(f64, f64)> {
    let deadline = Instant::now() + Duration::from_secs(10);
    // The reader lets go of its half when the pipe is at its end.
    while Arc::strong_count(lines) > 1 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    lines.lock().unwrap().clone()
}

fn tell((from, to): (f64, f64), readings: &[Reading], kernels: &[(f64, f64)]) -> Story {
    let inside = |at_ms: f64| from * 1e3 <= at_ms && at_ms < to * 1e3;
    let ran: f64 = kernels.iter().filter(|(_, at)| inside(*at)).map(|(count, _)| count).sum();
    let busy = at(readings, to, 1) - at(readings, from, 1);
    let active = at(readings, to, 2) - at(readings, from, 2);
    Story {
        latency_ms: 0.0,
        offline_per_s: ran / f64::from(plan().job_kernels) / (to - from),
        utilisation: busy / (to - from),
        sm_activity: active / (to - from),
    }
}

/// The mean latency of the requests that were due in a window. A busy machine pushes some late and
/// then several at once; what that adds to the queue follows from when they came and how long one
/// takes, and is taken off.
fn latency_ms((from, to): (f64, f64), due: &Arrivals, requests: &[(f64, f64)]) -> f64 {
    let due: Vec<f64> = due.0.iter().map(|us| us / 1e3).collect();
    let came: Vec<f64> = requests.iter().map(|(came, _)| *came).collect();
    let mine: Vec<usize> =
        (0..due.len()).filter(|i| from * 1e3 <= due[*i] && due[*i] < to * 1e3).collect();
    let mean =
        |of: &dyn Fn(usize) -> f64| mine.iter().map(|i| of(*i)).sum::<f64>() / mine.len() as f64;
    let served = mean(&|i| requests[i].1 - requests[i].0.max(requests[i - 1].1));
    let queue = |times: &[f64]| {
        let mut free = 0.0_f64;
        let ends = times.iter().map(|came| {
            free = free.max(*came) + served;
            free - came
        });
        ends.collect::<Vec<f64>>()
    };
    let (by_due, by_came) = (queue(&due), queue(&came));
    mean(&|i| requests[i].1 - requests[i].0 - (by_came[i] - by_due[i]))
}

/// An integral at a time, straight between two readings.
fn at(readings: &[Reading], at_s: f64, which: usize) -> f64 {
    let value = |reading: &Reading| if which == 1 { reading.1 } else { reading.2 };
    let after = readings.partition_point(|reading| reading.0 < at_s).clamp(1, readings.len() - 1);
    let (a, b) = (&readings[after - 1], &readings[after]);
    let part = (at_s - a.0) / (b.0 - a.0);
    value(a) + (value(b) - value(a)) * part
}
