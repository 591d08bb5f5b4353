//! Chaos: many processes of one job that allocate, fork, exec and are killed at random. Afterwards the
//! charge must be exactly what the living hold.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::{Job, build};

/// Entries of the file that the processes share: each fork and each exec takes one.
const ENTRIES: u64 = 16384;
/// Words of that file before the entries: the next free entry, how many may be forked just now.
const HEAD: u64 = 2;
/// Entries that execs may take together with forks, for each process at the start; forks may take as
/// many again.
const ENTRIES_EACH: usize = 10;

/// What one run came to.
#[derive(Debug, Clone)]
pub struct Result {
    /// Processes that there were, forked ones included; one that calls exec counts again.
    pub processes: u64,
    /// The most that lived at one time.
    pub most_at_once: usize,
    /// Of them, killed by us.
    pub killed: u64,
    /// Processes that lived at the end.
    pub living: usize,
    /// Bytes that the living held at the end.
    pub live_bytes: u64,
    /// Bytes that the control block said were charged.
    pub charged_bytes: u64,
    /// Bytes charged when all were dead.
    pub left_bytes: u64,
    /// Requests that found no room.
    pub refused: u64,
    /// Each slot that says something else than its process: whose it is, what it holds, what is
    /// charged.
    pub wrong: Vec<String>,
}

/// The file that the processes share with us.
struct Live(File);

/// What a process says of itself there.
#[derive(Clone, Copy)]
struct Entry {
    bytes: u64,
    is_held: bool,
}

impl Live {
    fn word(&self, index: u64) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, index * 8).expect("the live file is long enough");
        u64::from_le_bytes(bytes)
    }

    /// Lets the living fork so many more.
    fn permit(&self, forks: usize) {
        let forks = (forks as u64).to_le_bytes();
        self.0.write_all_at(&forks, 8).expect("the live file can be written");
    }

    fn taken(&self) -> u64 {
        self.word(0)
    }

    /// Entries by the id of their process, the dead included.
    fn entries(&self) -> BTreeMap<u64, Entry> {
        let mut bytes = vec![0; usize::try_from(self.taken().min(ENTRIES) * 24).expect("small")];
        self.0.read_exact_at(&mut bytes, HEAD * 8).expect("the live file is long enough");
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
        let named = bytes.chunks_exact(24).filter(|entry| word(&entry[..8]) != 0);
        let entry = |of: &[u8]| Entry { bytes: word(&of[8..16]), is_held: word(&of[16..]) != 0 };
        named.map(|of| (word(&of[..8]), entry(of))).collect()
    }
}

/// All processes of a run, those forked since too: whatever happens, none is left.
struct Group(i32);

impl Group {
    /// Whether a process is of this run and lives. Another one may have got its id since.
    fn has(&self, pid: u64) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let Some((_, rest)) = stat.rsplit_once(") ") else { return false };
        let mut fields = rest.split(' ');
        let is_dead = matches!(fields.next(), Some("Z" | "X"));
        !is_dead && fields.nth(1).is_some_and(|group| group == self.0.to_string())
    }

    /// Everybody who lives, whether it has an entry or not.
    fn living(&self) -> Vec<u64> {
        let all = std::fs::read_dir("/proc").expect("/proc").filter_map(std::result::Result::ok);
        let ids = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        ids.filter(|&pid| self.has(pid)).collect()
    }

    fn send(&self, pid: u64, signal: i32) {
        if let Ok(pid) = i32::try_from(pid) {
            // SAFETY: an id that was of this run a moment ago; ids are not used again so soon.
            unsafe { libc::kill(pid, signal) };
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: a process group that we made; its leader is a child that was not waited for, or
        // this is the end of the run.
        unsafe { libc::kill(-self.0, libc::SIGKILL) };
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
    /// Processes at the start, and at most: they fork when others have been killed.
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

/// Starts so many, kills at random for a while, holds the rest still, and compares.
#[must_use]
pub fn run(plan: Plan) -> Result {
    let job = Job::new(plan.quota_bytes);
    let path = job.path("live");
    let live = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
    let live = Live(live.expect("the live file"));
    live.0.set_len((HEAD + ENTRIES * 3) * 8).expect("it can be sized");
    let (mut children, group) = start(&plan, &job);
    let (killed, most_at_once) = kill_at_random(&plan, &live, &group);
    let living = hold(&live, &group);

    job.block.reclaim(|_| {});
    let entries = live.entries();
    let live_bytes = living.iter().map(|pid| entries[pid].bytes).sum();
    let charged_bytes = job.charged();
    let wrong = compare(&job, &living, &entries);
    drop(group);
    for child in &mut children {
        child.kill().ok();
        child.wait().expect("it is gone");
    }
    // Those who were forked are not our children: the kernel tells us through /proc when they go.
    let until = Instant::now() + Duration::from_secs(30);
    while job.charged() > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        job.block.reclaim(|_| {});
    }
    Result {
        processes: live.taken(),
        most_at_once,
        killed,
        living: living.len(),
        live_bytes,
        charged_bytes,
        left_bytes: job.charged(),
        refused: job.block.job().did()[2],
        wrong,
    }
}

fn start(plan: &Plan, job: &Job) -> (Vec<Child>, Group) {
    let program = build::client("client", &[]);
    let mut group = 0;
    let children = (0..plan.count)
        .map(|_| {
            let mut command = job.command(&program, build::stub_driver());
            command
                .env("LIVE", job.path("live"))
                .env("CHAOS_MOST", (ENTRIES_EACH * plan.count).to_string())
                .env("CHAOS_PACE_US", plan.pace_us.to_string())
                .env_remove("STUB_LOG")
                .arg(format!("chaos:{}", plan.seed));
            command.stdout(Stdio::null()).process_group(group);
            let child = command.spawn().expect("a process starts");
            if group == 0 {
                group = i32::try_from(child.id()).expect("a process id");
            }
            child
        })
        .collect();
    (children, Group(group))
}

/// Kills down to half of what was started and lets the living fork as many; says how many it killed
/// and how many lived at most.
fn kill_at_random(plan: &Plan, live: &Live, group: &Group) -> (u64, usize) {
    let mut random = plan.seed | 1;
    let (mut killed, mut most) = (0, 0);
    let until = Instant::now() + plan.duration;
    while Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
        // Those who have no entry yet too: they count, and may die before they have one.
        let mut living = group.living();
        most = most.max(living.len());
        live.permit(plan.count.saturating_sub(living.len()));
        for spared in 0..living.len().min(plan.count / 2) {
            let from = next(&mut random) % (living.len() - spared) as u64;
            living.swap(spared, spared + usize::try_from(from).expect("small"));
        }
        for pid in living.into_iter().skip(plan.count / 2) {
            if next(&mut random).is_multiple_of(8) {
                group.send(pid, libc::SIGKILL);
                killed += 1;
            }
        }
    }
    live.permit(0);
    (killed, most)
}

/// Holds everybody still: who lives then. Nobody is overlooked, for a process that was just forked or
/// has just called exec is in the group, and has no entry that says that it holds.
fn hold(live: &Live, group: &Group) -> Vec<u64> {
    let until = Instant::now() + Duration::from_secs(120);
    let mut before = Vec::new();
    loop {
        let living = group.living();
        let entries = live.entries();
        let is_held = |pid: &u64| entries.get(pid).is_some_and(|entry| entry.is_held);
        let moving: Vec<u64> = living.iter().copied().filter(|pid| !is_held(pid)).collect();
        // Twice: a child may appear where we have already looked.
        if moving.is_empty() && living == before {
            return living;
        }
        assert!(Instant::now() < until, "these processes do not hold: {moving:?}");
        for pid in moving.into_iter().filter(|pid| entries.contains_key(pid)) {
            group.send(pid, libc::SIGUSR1);
        }
        before = living;
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn compare(job: &Job, living: &[u64], entries: &BTreeMap<u64, Entry>) -> Vec<String> {
    let processes = job.block.processes();
    let alive: BTreeSet<u64> = living.iter().copied().collect();
    let slots = processes.iter().filter_map(|slot| {
        let pid = u64::from(slot.owner.pid);
        let lives = alive.contains(&pid);
        let holds = if lives { entries[&pid].bytes } else { 0 };
        let charged = slot.charged_bytes[0];
        (holds != charged).then(|| {
            format!("slot {}, process {pid} (lives: {lives}): {holds}, {charged}", slot.slot)
        })
    });
    let known = |pid: &u64| processes.iter().any(|slot| u64::from(slot.owner.pid) == *pid);
    let unknown = living.iter().filter(|pid| !known(pid) && entries[pid].bytes > 0);
    slots.chain(unknown.map(|pid| format!("process {pid} has no slot"))).collect()
}
