//! The control block of one offline job, as the agent holds it: two files mapped into memory.
//!
//! They belong in a directory on a memory file system: a page that is being written to disk would
//! make the writer wait, and the gate must close in bounded time. The agent's file is written by the
//! agent only (and by the keeper while it stops the job); the job's file belongs to the job's user.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use muxflow_abi::control::{
    AGENT_FILE, AgentPart, Counters, Gate, JOB_FILE, JobPart, Limits, Owner, Settings, SlotState,
};

use crate::error::{AgentError, Result, file};
use crate::namespace::{self, Foreign};
use crate::process;
use crate::sys::{self, SharedMemory};

/// The mapped control block of one job.
#[derive(Debug)]
pub struct ControlBlock {
    dir: PathBuf,
    agent: SharedMemory,
    job: SharedMemory,
    foreign: Foreign,
}

/// What the processes of a job say, added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct JobCounts {
    /// Processes that have registered and live.
    pub processes: usize,
    /// Kernels started.
    pub launches: u64,
    /// Kernels in flight.
    pub in_flight: u64,
    /// Time that launches waited.
    pub delayed_ns: u64,
    /// Requests for memory that were refused.
    pub refused: u64,
    /// Launches let through though nothing in flight made progress.
    pub overruns: u64,
    /// The longest smoothed time per kernel.
    pub ns_per_launch: u64,
    /// Bytes charged on the first device.
    pub charged_bytes: u64,
}

/// How far the processes of a job are with the last command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// Processes that have registered and live.
    pub live: usize,
    /// Of these, how many have nothing in flight, by the last command.
    pub drained: usize,
    /// Of these, how many have let their contexts go, by the last command.
    pub released: usize,
}

fn open(path: &Path, create_bytes: Option<usize>) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if create_bytes.is_some() {
        options.create(true).truncate(true);
    }
    let opened = options.open(path).map_err(file("open", path))?;
    if let Some(bytes) = create_bytes {
        opened.set_len(bytes as u64).map_err(file("resize", path))?;
    }
    Ok(opened)
}

impl ControlBlock {
    /// Makes a new one in `dir`. The gate is closed and no heartbeat has come: nothing runs yet.
    pub fn create(
        dir: &Path,
        settings: &Settings,
        quota_bytes: u64,
        owner: Option<(u32, u32)>,
    ) -> Result<Self> {
        fs::create_dir_all(dir).map_err(file("create", dir))?;
        // Whoever still holds one of before must not take its successor's heartbeat for its own.
        for old in [dir.join(AGENT_FILE), dir.join(JOB_FILE)] {
            match fs::remove_file(&old) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(file("remove", &old)(error));
                }
                _ => {}
            }
        }
        let block = Self::map(dir, Some(()))?;
        let generation = sys::monotonic_ns() ^ (u64::from(std::process::id()) << 48);
        block.job_unchecked().initialise(generation);
        block.agent_unchecked().initialise(generation, settings);
        block.agent_unchecked().set_quota(0, quota_bytes);
        let mode = |name: &str, mode: u32| {
            let path = dir.join(name);
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                .map_err(file("set the mode of", &path))
        };
        mode(AGENT_FILE, 0o644)?;
        mode(JOB_FILE, 0o600)?;
        if let Some((uid, gid)) = owner {
            let path = dir.join(JOB_FILE);
            std::os::unix::fs::chown(&path, Some(uid), Some(gid))
                .map_err(file("change the owner of", &path))?;
        }
        Ok(block)
    }

    /// Lets every user write the job's part: for a job whose user is not known yet, in a directory
    /// that only that job sees.
    pub fn open_to_all(&self) -> Result<()> {
        let path = self.dir.join(JOB_FILE);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))
            .map_err(file("set the mode of", &path))
    }

    /// Maps one that is there, and checks it.
    pub fn open(dir: &Path) -> Result<Self> {
        let block = Self::map(dir, None)?;
        let invalid = |reason| AgentError::ControlBlock { path: dir.to_owned(), reason };
        // SAFETY: mapped for as long as `block` lives, and page-aligned by mmap.
        let agent = unsafe { AgentPart::validate(block.agent.base(), block.agent.bytes()) };
        let generation = agent.map_err(invalid)?.generation();
        // SAFETY: as above, and mapped for writing.
        unsafe { JobPart::validate(block.job.base(), block.job.bytes(), generation) }
            .map_err(invalid)?;
        Ok(block)
    }

    fn map(dir: &Path, create: Option<()>) -> Result<Self> {
        let part = |name: &str, bytes: usize| {
            let path = dir.join(name);
            let opened = open(&path, create.map(|()| bytes))?;
            SharedMemory::map(&opened, bytes).map_err(file("map", &path))
        };
        let agent = part(AGENT_FILE, AgentPart::BYTES)?;
        let job = part(JOB_FILE, JobPart::BYTES)?;
        Ok(ControlBlock { dir: dir.to_owned(), agent, job, foreign: Foreign::default() })
    }

    fn agent_unchecked(&self) -> &AgentPart {
        // SAFETY: `map` maps AgentPart::BYTES, page-aligned, for the life of `self`; the type is
        // made of atomics, for which every bit pattern is valid.
        unsafe { &*self.agent.base().cast_const().cast::<AgentPart>() }
    }

    pub(crate) fn job_unchecked(&self) -> &JobPart {
        // SAFETY: as above, with JobPart::BYTES.
        unsafe { &*self.job.base().cast_const().cast::<JobPart>() }
    }

    /// Whether somebody cut one of its files short. It says nothing true any more, and nobody reads
    /// what is written into it.
    pub fn is_torn(&self) -> bool {
        self.agent.is_torn() || self.job.is_torn()
    }

    /// Its directory: the value of `MUXFLOW_CONTROL`.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The agent lives.
    pub fn beat(&self) {
        self.agent_unchecked().beat(sys::monotonic_ns());
    }

    /// Changes the gate, unless it stands so already, and wakes whoever waits at it.
    pub fn set_gate(&self, gate: Gate) {
        self.change_gate(gate, |old| old != gate);
    }

    /// As [`Self::set_gate`], unless the job is being stopped: whoever stops it holds the gate then,
    /// and a stop is never taken back.
    pub fn steer_gate(&self, gate: Gate) {
        let steered = |old| matches!(old, Gate::Open | Gate::Closed);
        self.change_gate(gate, |old| old != gate && steered(old));
    }

    fn change_gate(&self, gate: Gate, may: impl Fn(Gate) -> bool) {
        let agent = self.agent_unchecked();
        if agent.change_gate(gate, may).is_some() {
            sys::futex_wake_all(agent.command_address());
        }
    }

    /// How the gate stands.
    pub fn gate(&self) -> Gate {
        Gate::from_word(self.agent_unchecked().command_word())
    }

    /// New limits.
    pub fn set_limits(&self, limits: &Limits) {
        self.agent_unchecked().set_limits(limits);
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.agent_unchecked().limits()
    }

    /// The hard cap on the job's memory.
    pub fn set_quota(&self, bytes: u64) {
        self.agent_unchecked().set_quota(0, bytes);
    }

    /// The hard cap on the job's memory on one of several devices, by its place in the settings.
    pub fn set_quota_of(&self, device: usize, bytes: u64) {
        self.agent_unchecked().set_quota(device, bytes);
    }

    /// The hard cap in force.
    pub fn quota_bytes(&self) -> u64 {
        self.agent_unchecked().quota_bytes(0)
    }

    fn each_live(&self, mut visit: impl FnMut(&Counters)) {
        self.job_unchecked().each(|counters| {
            if self.is_alive(counters) {
                visit(counters);
            }
        });
    }

    /// Whether its process names itself by an id of another namespace.
    fn is_foreign(&self, counters: &Counters) -> bool {
        let own = namespace::own();
        counters.pid_namespace != 0 && own != 0 && counters.pid_namespace != own
    }

    /// Whether the owner of a slot lives, wherever it is.
    fn is_alive(&self, counters: &Counters) -> bool {
        let owner = counters.owner;
        if self.is_foreign(counters) {
            return self.foreign.is_alive(owner, counters.pid_namespace);
        }
        let ticks = |at: u64| at & u64::from(u32::MAX);
        let same = |at: u64| owner.start_ticks == 0 || ticks(at) == u64::from(owner.start_ticks);
        process::stat(owner.pid).map_or_else(
            |error| !process::is_gone(&error),
            |stat| same(stat.start_ticks) && !stat.has_ended(),
        )
    }

    /// Processes that have registered and live, by their ids here. One in a namespace that cannot be
    /// seen from here is left out: its number would be that of somebody else.
    pub fn registered(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        self.each_live(|counters| pids.extend(self.pid_here(counters)));
        pids
    }

    /// Those of [`Self::registered`] that have not done what the last command asks: to let go of their
    /// contexts, or else to have nothing in flight.
    pub fn lagging(&self) -> Vec<u32> {
        let word = self.agent_unchecked().command_word();
        let must_release = Gate::from_word(word) == Gate::Reset;
        let mut pids = Vec::new();
        self.each_live(|counters| {
            let done = match counters.state {
                SlotState::Released => true,
                SlotState::Drained => !must_release,
                _ => false,
            };
            if !done || counters.acknowledged != word {
                pids.extend(self.pid_here(counters));
            }
        });
        pids
    }

    /// The process of a slot as it is named here.
    fn pid_here(&self, counters: &Counters) -> Option<u32> {
        match self.is_foreign(counters) {
            true => self.foreign.pid_here(counters.owner, counters.pid_namespace),
            false => Some(counters.owner.pid),
        }
    }

    /// Processes that have registered, also those that are gone since.
    pub fn owners(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        self.job_unchecked().each(|counters| {
            pids.extend((!self.is_foreign(counters)).then_some(counters.owner.pid));
        });
        pids
    }

    /// As [`Self::registered`], each as it names itself: see [`process::own_name`].
    pub fn registered_names(&self) -> Vec<(u32, u64)> {
        let mut names = Vec::new();
        let namespace = |of: u64| if of == 0 { namespace::own() } else { of };
        self.each_live(|c| names.push((c.owner.pid, namespace(c.pid_namespace))));
        names
    }

    /// How far they are with the last command.
    pub fn answers(&self) -> Answers {
        let word = self.agent_unchecked().command_word();
        let mut answers = Answers { live: 0, drained: 0, released: 0 };
        self.each_live(|counters| {
            answers.live += 1;
            let by_last = counters.acknowledged == word;
            let drained = matches!(counters.state, SlotState::Drained | SlotState::Released);
            answers.drained += usize::from(by_last && drained);
            answers.released += usize::from(by_last && counters.state == SlotState::Released);
        });
        answers
    }

    /// Their counters, added up.
    pub fn counts(&self) -> JobCounts {
        let mut sum = JobCounts::default();
        self.job_unchecked().each(|counters| {
            sum.processes += usize::from(self.is_alive(counters));
            sum.launches = sum.launches.saturating_add(counters.launches);
            sum.in_flight = sum.in_flight.saturating_add(counters.in_flight);
            sum.delayed_ns = sum.delayed_ns.saturating_add(counters.delayed_ns);
            sum.refused = sum.refused.saturating_add(counters.refused);
            sum.overruns = sum.overruns.saturating_add(counters.overruns);
            sum.ns_per_launch = sum.ns_per_launch.max(counters.ns_per_launch);
            sum.charged_bytes = sum.charged_bytes.saturating_add(counters.charged_bytes[0]);
        });
        sum
    }

    /// The job's part, of which only the header can be trusted.
    pub fn job(&self) -> &JobPart {
        self.job_unchecked()
    }

    /// Gives back what dead processes held; says how many there were.
    pub fn reclaim(&self) -> usize {
        let me = Owner { pid: std::process::id(), start_ticks: 0 };
        let mut dead = Vec::new();
        self.job_unchecked().each(|counters| {
            if !self.is_alive(counters) {
                dead.push((counters.owner, counters.pid_namespace));
            }
        });
        // An agent of before that died while it cleared a slot has left its name there.
        let is_dead = |owner: Owner, of: u64| {
            let agent_of_before = owner.start_ticks == 0 && owner.pid != me.pid;
            dead.contains(&(owner, of)) || (agent_of_before && !process::is_there(owner.pid))
        };
        self.job_unchecked().reclaim(me, is_dead, |_| {})
    }

    /// Removes the files; mappings of others stay valid.
    pub fn remove(self) -> Result<()> {
        let dir = self.dir.clone();
        drop(self);
        fs::remove_dir_all(&dir).map_err(file("remove", &dir))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_slot(block: &ControlBlock) -> usize {
        let own = process::ProcessKey::own();
        let start_ticks = u32::try_from(own.start_ticks & u64::from(u32::MAX)).unwrap();
        let owner = Owner { pid: own.pid, start_ticks };
        block.job_unchecked().claim(owner, namespace::own()).unwrap()
    }

    #[test]
    fn what_one_side_writes_the_other_reads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job");
        let mine = ControlBlock::create(&path, &Settings::default(), 1 << 30, None).unwrap();
        let other = ControlBlock::open(&path).unwrap();
        assert_eq!(other.gate(), Gate::Closed, "closed until the agent says otherwise");
        assert_eq!(other.quota_bytes(), 1 << 30);
        mine.set_gate(Gate::Open);
        mine.beat();
        assert_eq!(other.gate(), Gate::Open);
        assert_eq!(other.agent_unchecked().heartbeat_age_ms(sys::monotonic_ns()) / 1000, 0);

        let slot = own_slot(&other);
        other
            .job_unchecked()
            .slot(slot)
            .unwrap()
            .launches
            .store(7, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(mine.registered(), [std::process::id()]);
        assert_eq!(mine.registered_names(), [process::own_name(std::process::id()).unwrap()]);
        assert_eq!(mine.counts().launches, 7);
        mine.set_gate(Gate::Drain);
        assert_eq!(mine.answers(), Answers { live: 1, drained: 0, released: 0 });
        let word = other.agent_unchecked().command_word();
        other.job_unchecked().slot(slot).unwrap().report(SlotState::Drained, word);
        assert_eq!(mine.answers(), Answers { live: 1, drained: 1, released: 0 });
        mine.set_gate(Gate::Reset);
        assert_eq!(mine.answers().drained, 0, "an answer to an older command does not count");
    }

    #[test]
    fn who_holds_the_block_of_an_earlier_run_hears_nothing_of_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job");
        drop(ControlBlock::create(&path, &Settings::default(), 7, None).unwrap());
        let old = ControlBlock::open(&path).unwrap();
        let age_ms = |block: &ControlBlock| {
            block.agent_unchecked().heartbeat_age_ms(sys::monotonic_ns() + 60_000_000_000)
        };
        let before = age_ms(&old);
        let new = ControlBlock::create(&path, &Settings::default(), 9, None).unwrap();
        new.beat();
        new.set_gate(Gate::Open);
        assert!(age_ms(&new) < 120_000 && age_ms(&old) >= before, "its agent is dead to it");
        assert_eq!((old.gate(), old.quota_bytes()), (Gate::Closed, 7));
    }

    #[test]
    fn a_stop_is_never_taken_back_by_who_steers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job");
        let keeper = ControlBlock::create(&path, &Settings::default(), 0, None).unwrap();
        let agent = ControlBlock::open(&path).unwrap();
        agent.steer_gate(Gate::Open);
        assert_eq!(keeper.gate(), Gate::Open);
        for stop in [Gate::Drain, Gate::Checkpoint, Gate::Reset] {
            keeper.set_gate(stop);
            agent.steer_gate(Gate::Open);
            agent.steer_gate(Gate::Closed);
            assert_eq!(keeper.gate(), stop);
        }
        // Two that write at the same time: whatever the order, the stop stands at the end.
        for _ in 0..200 {
            keeper.set_gate(Gate::Closed);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for gate in [Gate::Open, Gate::Closed].into_iter().cycle().take(50) {
                        agent.steer_gate(gate);
                    }
                });
                keeper.set_gate(Gate::Drain);
            });
            assert_eq!(keeper.gate(), Gate::Drain);
        }
    }

    #[test]
    fn a_file_that_is_cut_short_under_its_readers_ends_nobody() {
        let dir = tempfile::tempdir().unwrap();
        for (name, cut) in [(JOB_FILE, 0), (JOB_FILE, 10), (AGENT_FILE, 0)] {
            let path = dir.path().join(format!("{name}-{cut}"));
            let block = ControlBlock::create(&path, &Settings::default(), 7, None).unwrap();
            own_slot(&block);
            assert_eq!(block.registered(), [std::process::id()]);
            assert!(!block.is_torn());
            let file = OpenOptions::new().write(true).open(path.join(name)).unwrap();
            file.set_len(cut).unwrap();
            // Beyond the end of the file from the first page on.
            assert_eq!((block.counts().launches, block.reclaim()), (0, 0));
            block.set_gate(Gate::Open);
            block.beat();
            // What is left of the first page reads as zero.
            assert!(block.is_torn() || cut > 0, "{name} cut to {cut}");
            if name == JOB_FILE {
                assert!(block.registered().is_empty(), "nothing that it says counts");
            }
        }
    }

    #[test]
    fn the_dead_and_the_damaged_are_seen() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job");
        let block = ControlBlock::create(&path, &Settings::default(), 0, None).unwrap();
        let gone = Owner { pid: 4_000_000, start_ticks: 1 };
        block.job_unchecked().claim(gone, namespace::own()).unwrap();
        assert_eq!(block.answers().live, 0);
        assert!(block.registered().is_empty());
        fs::write(path.join(AGENT_FILE), vec![0; AgentPart::BYTES]).unwrap();
        let error = ControlBlock::open(&path).unwrap_err().to_string();
        assert!(error.contains("magic") && error.contains("job"), "{error}");
        let file = File::create(path.join(AGENT_FILE)).unwrap();
        file.set_len(10).unwrap();
        assert!(ControlBlock::open(&path).is_err(), "a short file is not mapped");
    }
}
