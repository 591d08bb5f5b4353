//! The control block as a test plays the agent with it: unlike the agent's own, it hands out both
//! parts, because a test must be able to damage and to read everything.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use muxflow_abi::control::{
    AGENT_FILE, AgentPart, Counters, Gate, JOB_FILE, JobPart, Owner, Settings,
};

/// Why a control block could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of it could not be made, sized or mapped.
    #[error("control block {path}: cannot {doing}")]
    File {
        /// Which file.
        path: PathBuf,
        /// What was tried.
        doing: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// One job's control block, mapped into the agent.
#[derive(Debug)]
pub struct ControlBlock {
    directory: PathBuf,
    agent: Mapping,
    job: Mapping,
}

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a mapping is plain memory; what lies in it are atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` and nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

impl ControlBlock {
    /// Makes the two files in a directory (made if need be). The agent's file can be read by all
    /// and written by its owner only; the job's file can be written by all who reach the directory.
    ///
    /// # Errors
    /// Names the file and what failed.
    pub fn create(directory: &Path, generation: u64, settings: &Settings) -> Result<Self, Error> {
        DirBuilder::new().recursive(true).mode(0o755).create(directory).map_err(|source| {
            Error::File { path: directory.to_owned(), doing: "make the directory", source }
        })?;
        let agent = make(&directory.join(AGENT_FILE), AgentPart::BYTES, 0o644)?;
        let job = make(&directory.join(JOB_FILE), JobPart::BYTES, 0o666)?;
        let block = Self { directory: directory.to_owned(), agent, job };
        block.job().initialise(generation);
        block.agent().initialise(generation, settings);
        Ok(block)
    }

    /// The directory, for `MUXFLOW_CONTROL`.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What the agent writes.
    #[must_use]
    pub fn agent(&self) -> &AgentPart {
        // SAFETY: mapped with that many bytes, page-aligned, made of atomics, alive as long as self.
        unsafe { self.agent.base.cast::<AgentPart>().as_ref() }
    }

    /// What the job's processes write.
    #[must_use]
    pub fn job(&self) -> &JobPart {
        // SAFETY: mapped with that many bytes, page-aligned, made of atomics, alive as long as self.
        unsafe { self.job.base.cast::<JobPart>().as_ref() }
    }

    /// Says that the agent lives.
    pub fn beat(&self) {
        self.agent().beat(now_ns());
    }

    /// Gives a command and says that the agent lives.
    pub fn command(&self, gate: Gate) -> u32 {
        self.beat();
        self.agent().set_gate(gate)
    }

    /// Gives back what dead processes held, showing what each had done; says how many there were.
    /// Processes of other id namespaces are judged only by those who share them.
    pub fn reclaim(&self, last_words: impl FnMut(&Counters)) -> usize {
        let namespace = pid_namespace();
        let me = Owner { pid: std::process::id(), start_ticks: 0 };
        self.job().reclaim(me, |owner, of| of == namespace && is_dead(owner), last_words)
    }

    /// What every living process says of itself.
    #[must_use]
    pub fn processes(&self) -> Vec<Counters> {
        let mut all = Vec::new();
        self.job().each(|counters| all.push(*counters));
        all
    }
}

/// Time of the monotonic clock, which the interposer reads too.
#[must_use]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

fn make(path: &Path, bytes: usize, mode: u32) -> Result<Mapping, Error> {
    let failed = |doing| move |source| Error::File { path: path.to_owned(), doing, source };
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path);
    let file = file.map_err(failed("make it (is another agent using this directory?)"))?;
    file.set_len(bytes as u64).map_err(failed("size it"))?;
    file.set_permissions(Permissions::from_mode(mode)).map_err(failed("set its mode"))?;
    map(&file, bytes).map_err(failed("map it"))
}

fn map(file: &File, bytes: usize) -> io::Result<Mapping> {
    // SAFETY: a new shared mapping of an open file.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast())
        .map(|base| Mapping { base, bytes })
        .ok_or_else(io::Error::last_os_error)
}

fn pid_namespace() -> u64 {
    let link = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let digits: String = link.to_string_lossy().chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// Whether the process is gone, a zombie, or another one with the same id.
fn is_dead(owner: Owner) -> bool {
    let Ok(pid) = i32::try_from(owner.pid) else { return true };
    if pid <= 0 {
        return true;
    }
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => {
            let Some((_, fields)) = stat.rsplit_once(") ") else { return false };
            let fields: Vec<&str> = fields.split(' ').collect();
            if matches!(fields[0], "Z" | "X") && fields.get(17).is_none_or(|count| *count <= "1") {
                return true;
            }
            let ticks: Option<u64> = fields.get(19).and_then(|field| field.parse().ok());
            ticks.is_some_and(|ticks| ticks & 0xffff_ffff != u64::from(owner.start_ticks))
        }
        // SAFETY: signal 0 only asks.
        Err(_) => unsafe {
            libc::kill(pid, 0) != 0
                && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
        },
    }
}
