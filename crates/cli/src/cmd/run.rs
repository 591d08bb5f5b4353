//! `muxflow run`: any program under the interposer, with no manager. This process is the job's agent
//! itself: it beats, samples, runs the gate's law, gives back what dead processes held, and says at the end
//! what the job used, was refused and was delayed.

mod explain;
mod governor;
mod program;

use std::ffi::OsString;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use muxflow_abi::control::{DEVICES, Gate, Settings};
use muxflow_agent::control_block::ControlBlock;
use muxflow_types::Bytes;

use governor::Governor;

/// How often the agent's loop turns.
const TICK: Duration = Duration::from_millis(20);

/// Run a program under a memory quota and, if asked, behind the launch gate.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Device memory that the job may hold, for example 6GiB.
    #[arg(long, value_name = "SIZE", required_unless_present = "explain")]
    memory: Option<String>,
    /// GPU load (SM activity × clock factor, 0.01 to 2) at which launches are held back.
    #[arg(long, value_name = "LOAD")]
    load_limit: Option<f64>,
    /// UUID of the GPU whose load counts; the first one if not given.
    #[arg(long, value_name = "UUID")]
    gpu: Option<String>,
    /// Most kernels in flight in each process.
    #[arg(long, value_name = "KERNELS", default_value_t = 256)]
    in_flight: u64,
    /// Device memory charged for each context, where it is known.
    #[arg(long, value_name = "SIZE", default_value = "0")]
    context_memory: String,
    /// Seconds that the program may take to save its state after SIGINT or SIGTERM.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    checkpoint_window: u64,
    /// NVML inside the job tells the quota too.
    #[arg(long)]
    clamp_nvml: bool,
    /// The interposer; MUXFLOW_XCUDA or beside this program if not given.
    #[arg(long, value_name = "FILE")]
    interposer: Option<PathBuf>,
    /// Say which calls would be intercepted and how the driver was found, and stop.
    #[arg(long)]
    explain: bool,
    /// The program and its arguments.
    #[arg(last = true, required_unless_present = "explain", value_name = "COMMAND")]
    command: Vec<OsString>,
}

/// Runs the command.
pub(crate) fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let interposer = program::interposer(args.interposer.as_deref())?;
    if args.explain {
        return explain::run(&interposer, &args.command);
    }
    let quota = Bytes::parse(args.memory.as_deref().unwrap_or_default()).context("--memory")?;
    let context = Bytes::parse(&args.context_memory).context("--context-memory")?;
    let Some((name, arguments)) = args.command.split_first() else { bail!("no command given") };
    program::check(name)?;
    let mut governor = Governor::new(args.load_limit, args.gpu.as_deref(), args.in_flight)?;
    let settings = Settings {
        context_bytes: context.0,
        checkpoint_window_ms: args.checkpoint_window.saturating_mul(1_000),
        ..Settings::default()
    };
    let directory = control_directory();
    let block = ControlBlock::create(&directory, &settings, quota.0, None)?;
    // The same quota on every device that the job sees: it was given none in particular.
    for device in 0..DEVICES {
        block.set_quota_of(device, quota.0);
    }
    governor.step(&block);
    block.beat();
    listen();
    let mut command = Command::new(name);
    command.args(arguments).env("MUXFLOW_CONTROL", block.dir());
    command.env("LD_PRELOAD", preload(&interposer));
    if args.clamp_nvml {
        command.env("MUXFLOW_NVML_CLAMP", "1");
    }
    let started = Instant::now();
    let child = command.spawn().with_context(|| format!("cannot start {}", name.to_string_lossy()));
    let outcome = child.map(|child| watch(child, &block, &mut governor, args.checkpoint_window));
    let peak_bytes = governor.peak_bytes().max(block.job().retired_peak_bytes());
    let report = Report::of(&block, peak_bytes, quota.0, started.elapsed());
    block.remove().ok();
    let status = outcome??;
    report.print();
    Ok(code(status))
}

/// A directory on a memory file system, of which the name is ours alone.
fn control_directory() -> PathBuf {
    let base = ["/dev/shm", "/tmp"].into_iter().map(Path::new).find(|path| path.is_dir());
    let name = format!("muxflow-run-{}-{}", std::process::id(), muxflow_agent::sys::monotonic_ns());
    base.unwrap_or(Path::new(".")).join(name)
}

/// The interposer goes before what the user preloads.
fn preload(interposer: &Path) -> OsString {
    let mut list = interposer.as_os_str().to_owned();
    if let Some(own) = std::env::var_os("LD_PRELOAD").filter(|own| !own.is_empty()) {
        list.push(":");
        list.push(own);
    }
    list
}

/// The signal that this process was sent, if any, and whether by its terminal.
static TOLD: AtomicI32 = AtomicI32::new(0);
static BY_TERMINAL: AtomicBool = AtomicBool::new(false);

extern "C" fn tell(signal: i32, info: *const libc::siginfo_t, _machine: *const libc::c_void) {
    // SAFETY: the kernel gives a valid one.
    let by_kernel = unsafe { (*info).si_code } == libc::SI_KERNEL;
    BY_TERMINAL.store(by_kernel, Ordering::Relaxed);
    TOLD.store(signal, Ordering::Release);
}

fn listen() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: zeroed is a valid action; the handler only stores to atomics; a child gets the
        // default back at exec.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = tell as *const () as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// The agent's loop, until the program has ended, and with it all its processes that use the GPU: as
/// long as one lives, the job has an agent.
fn watch(
    mut child: Child,
    block: &ControlBlock,
    governor: &mut Governor,
    window_s: u64,
) -> anyhow::Result<ExitStatus> {
    let mut stop: Option<Stop> = None;
    let mut ended = None;
    loop {
        block.beat();
        block.reclaim();
        if ended.is_none() {
            ended = child.try_wait().context("waiting for the program")?;
        }
        if let Some(status) = ended.filter(|_| block.registered().is_empty()) {
            return Ok(status);
        }
        let first = ended.is_none().then(|| child.id());
        match &mut stop {
            Some(stop) => stop.step(block, first),
            None => governor.step(block),
        }
        let told = TOLD.swap(0, Ordering::Acquire);
        if told != 0 && stop.is_none() {
            block.set_gate(Gate::Drain);
            stop = Some(Stop {
                signal: told,
                by_terminal: BY_TERMINAL.load(Ordering::Relaxed),
                since: Instant::now(),
                window_s,
                sent: None,
            });
        }
        std::thread::sleep(TICK);
    }
}

/// The order of a stop: gate, drain, signal with a checkpoint window, and only then SIGKILL.
struct Stop {
    signal: i32,
    by_terminal: bool,
    since: Instant,
    window_s: u64,
    sent: Option<Instant>,
}

impl Stop {
    /// `first` is the program that was started, while it lives.
    fn step(&mut self, block: &ControlBlock, first: Option<u32>) {
        let answers = block.answers();
        match self.sent {
            None => {
                let late = self.since.elapsed() > Duration::from_secs(2);
                if answers.drained == answers.live || late {
                    block.set_gate(Gate::Checkpoint);
                    self.send(block, first, self.signal);
                    self.sent = Some(Instant::now());
                }
            }
            Some(at) if at.elapsed() > Duration::from_secs(self.window_s + 5) => {
                self.by_terminal = false;
                self.send(block, first, libc::SIGKILL);
            }
            Some(_) => {}
        }
    }

    /// Sends a signal to the program and to all its processes that use the GPU. A terminal has sent its
    /// own to everybody in our process group already; a second one would interrupt what the first began.
    fn send(&self, block: &ControlBlock, first: Option<u32>, signal: i32) {
        let mut all = block.registered();
        all.extend(first);
        all.sort_unstable();
        all.dedup();
        // SAFETY: only asks.
        let group = |pid: u32| i32::try_from(pid).map_or(-1, |pid| unsafe { libc::getpgid(pid) });
        let own = group(std::process::id());
        for pid in all.into_iter().filter(|&pid| !self.by_terminal || group(pid) != own) {
            muxflow_agent::sys::kill(pid, signal).ok();
        }
    }
}

/// The code of a shell: that of the program, or 128 and the signal that ended it.
fn code(status: ExitStatus) -> ExitCode {
    let number = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(u8::try_from(number & 0xff).unwrap_or(1))
}

/// What the job did.
struct Report {
    launches: u64,
    delayed: Duration,
    refused: u64,
    overruns: u64,
    peak_bytes: u64,
    quota_bytes: u64,
    took: Duration,
}

impl Report {
    fn of(block: &ControlBlock, peak_bytes: u64, quota_bytes: u64, took: Duration) -> Self {
        let [launches, delayed_ns, refused, overruns] = block.job().did();
        let delayed = Duration::from_nanos(delayed_ns);
        Self { launches, delayed, refused, overruns, peak_bytes, quota_bytes, took }
    }

    #[expect(clippy::print_stderr, reason = "standard output belongs to the program that was run")]
    fn print(&self) {
        eprintln!(
            "muxflow run: {:.1} s, {} launches; memory {} of {} at most, {} requests refused; \
             launches waited {:.3} s in all, {} let through for want of progress",
            self.took.as_secs_f64(),
            self.launches,
            Bytes(self.peak_bytes),
            Bytes(self.quota_bytes),
            self.refused,
            self.delayed.as_secs_f64(),
            self.overruns
        );
    }
}
