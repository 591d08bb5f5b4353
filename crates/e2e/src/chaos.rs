//! Chaos: many processes of one job that allocate, fork, exec and are killed at random. Afterwards the
//! charge must be exactly what the living hold.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::{Job, build};

/// Entries of the file that the processes share: forks and execs take one each, and stop in time.
const ENTRIES: u64 = 4096;

/// What one run came to.
#[derive(Debug, Clone, Copy)]
pub struct Result {
    /// Processes that there were, forked ones included.
    pub processes: u64,
    /// Of them, killed by us.
    pub killed: u64,
    /// Bytes that the living held at the end.
    pub live_bytes: u64,
    /// Bytes that the control block said were charged.
    pub charged_bytes: u64,
    /// Bytes charged when all were dead.
    pub left_bytes: u64,
    /// Requests that found no room.
    pub refused: u64,
}

fn word(file: &File, index: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, index * 8).expect("the live file is long enough");
    u64::from_le_bytes(bytes)
}

fn is_alive(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn send(pid: u64, signal: i32) {
    if let Ok(pid) = i32::try_from(pid) {
        // SAFETY: only ids from the file that our own processes wrote.
        unsafe { libc::kill(pid, signal) };
    }
}

/// A small generator of its own: the seed alone decides.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// How much of it.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Processes at the start; they fork more.
    pub count: usize,
    /// Decides everything random.
    pub seed: u64,
    /// How long they are killed.
    pub duration: Duration,
    /// What the job may hold: little makes processes take from each other.
    pub quota_bytes: u64,
    /// Shortest pause between two steps of a process.
    pub pace_us: u32,
}

/// All processes of a run, those forked since too: whatever happens, none is left.
struct Group(i32);

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: a process group that we made; its leader is a child that was not waited for, or
        // this is the end of the run.
        unsafe { libc::kill(-self.0, libc::SIGKILL) };
    }
}

/// Starts so many, kills at random for a while, holds the rest still, and compares.
#[must_use]
pub fn run(plan: Plan) -> Result {
    let Plan { count, seed, duration, .. } = plan;
    let job = Job::new(plan.quota_bytes);
    let path = job.path("live");
    let live = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
    let live = live.expect("the live file");
    live.set_len(8 + ENTRIES * 24).expect("it can be sized");
    let program = build::client("client", &[]);
    let mut group = 0;
    let mut children: Vec<Child> = (0..count)
        .map(|_| {
            let mut command = job.command(&program, build::stub_driver());
            command
                .env("LIVE", &path)
                .env("CHAOS_MOST", (4 * count).to_string())
                .env("CHAOS_PACE_US", plan.pace_us.to_string())
                .env_remove("STUB_LOG")
                .arg(format!("chaos:{seed}"));
            command.stdout(Stdio::null()).process_group(group);
            let child = command.spawn().expect("a process starts");
            if group == 0 {
                group = i32::try_from(child.id()).expect("a process id");
            }
            child
        })
        .collect();
    let group = Group(group);
    let mut random = seed | 1;
    let mut killed = 0;
    let until = Instant::now() + duration;
    let pids = |live: &File| -> Vec<(u64, u64)> {
        let used = word(live, 0).min(ENTRIES);
        let all = (0..used).map(|at| (at, word(live, 1 + 3 * at)));
        all.filter(|&(_, pid)| pid != 0 && is_alive(pid)).collect()
    };
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        let living = pids(&live);
        // Down to half of what was started; they fork again.
        for (_, pid) in living.iter().skip(count / 2) {
            if next(&mut random).is_multiple_of(8) {
                send(*pid, libc::SIGKILL);
                killed += 1;
            }
        }
    }
    // Hold the living still; those that were just forked or are about to exec may need a second try.
    let until = Instant::now() + Duration::from_secs(60);
    while pids(&live).iter().any(|&(at, _)| word(&live, 3 + 3 * at) == 0) {
        assert!(Instant::now() < until, "some process does not hold");
        for (_, pid) in pids(&live) {
            send(pid, libc::SIGUSR1);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    job.block.reclaim(|_| {});
    let living = pids(&live);
    let live_bytes = living.iter().map(|&(at, _)| word(&live, 2 + 3 * at)).sum();
    let charged_bytes = job.charged();
    drop(group);
    for child in &mut children {
        child.kill().ok();
        child.wait().expect("it is gone");
    }
    std::thread::sleep(Duration::from_millis(100));
    job.block.reclaim(|_| {});
    let processes = word(&live, 0);
    let refused = job.block.job().did()[2];
    Result { processes, killed, live_bytes, charged_bytes, left_bytes: job.charged(), refused }
}
