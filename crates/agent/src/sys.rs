//! The system calls that the standard library does not offer, behind safe functions.
//!
//! Everything unsafe that the agent asks of the kernel is here, so that the rest can be read without
//! looking at pointers. Each function does one call and turns `-1` into an [`io::Error`].

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use crate::guard::Guarded;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn check_long(result: libc::c_long) -> io::Result<libc::c_int> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    libc::c_int::try_from(result).map_err(|_| io::Error::from(io::ErrorKind::InvalidData))
}

/// A process id as the kernel's calls want it. Ids beyond its range cannot exist.
pub(crate) fn raw_pid(pid: u32) -> io::Result<libc::pid_t> {
    match libc::pid_t::try_from(pid) {
        Ok(raw) if raw > 0 => Ok(raw),
        _ => Err(io::Error::from_raw_os_error(libc::ESRCH)),
    }
}

/// Nanoseconds of the monotonic clock: the clock of heartbeats.
pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec to write to; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// A handle on a process that stays with this process even when its id is used again.
pub fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    let raw = raw_pid(pid)?;
    // SAFETY: plain integers; the kernel checks them.
    let fd = check_long(unsafe { libc::syscall(libc::SYS_pidfd_open, raw, 0) })?;
    // SAFETY: the kernel just gave us this descriptor and nobody else knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Sends a signal to the process behind a handle.
pub fn pidfd_signal(process: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    let none: *const libc::siginfo_t = std::ptr::null();
    // SAFETY: the descriptor is open for as long as it is borrowed; no siginfo is passed.
    let result =
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), signal, none, 0) };
    check_long(result).map(drop)
}

/// Sends a signal by id.
pub fn kill(pid: u32, signal: i32) -> io::Result<()> {
    let raw = raw_pid(pid)?;
    // SAFETY: plain integers, and `raw_pid` excludes 0 and -1, which would mean whole groups.
    check(unsafe { libc::kill(raw, signal) }).map(drop)
}

/// Sends a signal to a whole process group.
pub fn kill_group(leader: u32, signal: i32) -> io::Result<()> {
    let raw = raw_pid(leader)?;
    if raw == 1 {
        // kill(-1) is everybody.
        return Err(io::Error::from_raw_os_error(libc::EPERM));
    }
    // SAFETY: plain integers.
    check(unsafe { libc::kill(-raw, signal) }).map(drop)
}

/// Waits until one of the descriptors can be read, or time is over; says which can.
pub fn poll_readable(fds: &[RawFd], timeout: Duration) -> io::Result<Vec<bool>> {
    let mut list: Vec<libc::pollfd> =
        fds.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let count = libc::nfds_t::try_from(list.len()).unwrap_or(0);
    let timeout_ms = i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
    // SAFETY: `list` has `count` entries and lives through the call.
    match check(unsafe { libc::poll(list.as_mut_ptr(), count, timeout_ms) }) {
        Ok(_) => Ok(list.iter().map(|entry| entry.revents != 0).collect()),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(vec![false; fds.len()]),
        Err(error) => Err(error),
    }
}

/// Blocks these signals in this thread and gives a descriptor that tells of them.
pub fn signal_fd(signals: &[i32]) -> io::Result<OwnedFd> {
    let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset writes the whole set; after it the set is initialised.
    let mut set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for &signal in signals {
        // SAFETY: `set` is initialised; a wrong number is refused by the call.
        check(unsafe { libc::sigaddset(&raw mut set, signal) })?;
    }
    // SAFETY: `set` is initialised; the old mask is not asked for.
    let blocked =
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
    if blocked != 0 {
        return Err(io::Error::from_raw_os_error(blocked));
    }
    // SAFETY: `set` is initialised; -1 asks for a new descriptor.
    let fd = check(unsafe {
        libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
    })?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Takes one signal from a [`signal_fd`], if there is one: its number and who sent it.
pub fn take_signal(fd: BorrowedFd<'_>) -> Option<(i32, u32)> {
    let mut info = std::mem::MaybeUninit::<libc::signalfd_siginfo>::uninit();
    let size = size_of::<libc::signalfd_siginfo>();
    // SAFETY: `info` has room for `size` bytes.
    let read = unsafe { libc::read(fd.as_raw_fd(), info.as_mut_ptr().cast(), size) };
    if usize::try_from(read) != Ok(size) {
        return None;
    }
    // SAFETY: the kernel filled all of it.
    let info = unsafe { info.assume_init() };
    i32::try_from(info.ssi_signo).ok().map(|signal| (signal, info.ssi_pid))
}

/// Orphans below this process become its children: it can reap them.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: plain integers.
    check(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }).map(drop)
}

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// With this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// Reaps one child that has ended, if there is one.
pub fn reap_any() -> Option<(u32, Ended)> {
    let mut status = 0;
    // SAFETY: `status` is a valid place to write to.
    let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
    let pid = u32::try_from(pid).ok().filter(|&pid| pid != 0)?;
    let ended = if libc::WIFSIGNALED(status) {
        Ended::Signal(libc::WTERMSIG(status))
    } else {
        Ended::Code(libc::WEXITSTATUS(status))
    };
    Some((pid, ended))
}

/// Takes an exclusive lock on an open file without waiting; `false` when another holds it.
pub fn try_lock(file: &std::fs::File) -> io::Result<bool> {
    // SAFETY: the descriptor is open while `file` lives.
    match check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) }) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error),
    }
}

/// The same for a file that one process holds as long as it lives. One that was killed leaves its lock to
/// what it had forked and not yet made another program of: that holds it for a moment more.
pub fn lock_for_life(file: &std::fs::File) -> io::Result<bool> {
    let deadline = Instant::now() + Duration::from_secs(3);
    loop {
        if try_lock(file)? {
            return Ok(true);
        }
        if Instant::now() > deadline {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The processors that this process may use.
pub fn affinity() -> io::Result<Vec<usize>> {
    // SAFETY: a cpu_set_t is made of integers; all zero is a valid, empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` has the size that is passed; 0 is this thread.
    check(unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) })?;
    let limit = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
    // SAFETY: `cpu` is below CPU_SETSIZE.
    Ok((0..limit).filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &set) }).collect())
}

/// Memory shared with other processes through a file.
#[derive(Debug)]
pub struct SharedMemory {
    base: *mut u8,
    bytes: usize,
    guarded: Option<Guarded>,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is reached only as atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: every access goes through atomics of `muxflow-abi`.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Maps the first `bytes` of a file that is at least so long.
    pub fn map(file: &std::fs::File, bytes: usize) -> io::Result<Self> {
        if file.metadata()?.len() < bytes as u64 || bytes == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof));
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address the kernel chooses; the file is open.
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mut memory = SharedMemory { base: base.cast(), bytes, guarded: None };
        memory.guarded = Some(Guarded::new(memory.base, bytes)?);
        Ok(memory)
    }

    /// Whether somebody cut the file short: what is read then is zero, what is written is lost.
    pub fn is_torn(&self) -> bool {
        self.guarded.as_ref().is_some_and(Guarded::is_torn)
    }

    /// Where it begins; valid while `self` lives.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        self.guarded = None;
        // SAFETY: exactly the region that `map` made; nobody borrows it any more.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

/// Wakes whoever waits on this word of shared memory.
pub(crate) fn futex_wake_all(word: *const u32) {
    // SAFETY: FUTEX_WAKE only uses the address as a key; a wrong one is refused.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX) };
}

/// How readily the kernel ends a process when the machine is out of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OomScore {
    /// As any other process.
    Usual,
    /// Before those that serve somebody.
    First,
}

impl OomScore {
    fn text(self) -> &'static [u8] {
        match self {
            OomScore::Usual => b"0",
            OomScore::First => b"500",
        }
    }
}

/// What a child does to itself between fork and exec. Only calls that are allowed there.
#[derive(Debug, Default)]
pub struct ChildSetup {
    /// `cgroup.procs` files to enter, opened before the fork.
    pub groups: Vec<OwnedFd>,
    /// Processors to keep to, where no cgroup does it.
    pub affinity: Option<Vec<usize>>,
    /// User and group to become.
    pub user: Option<(u32, u32)>,
    /// The user's other groups, looked up before the fork; empty leaves only the one above.
    pub supplementary: Vec<u32>,
    /// Signal to get when the parent dies.
    pub death_signal: Option<i32>,
    /// Start a session of its own.
    pub new_session: bool,
    /// Where to work. Entered as the user above: what is closed to him stays closed.
    pub cwd: Option<CString>,
    /// How readily the kernel ends it for want of memory; none leaves what this
    /// process has.
    pub oom_score: Option<OomScore>,
}

impl ChildSetup {
    /// Does it. Runs in the child: it allocates nothing.
    pub fn apply(&self) -> io::Result<()> {
        for group in &self.groups {
            // SAFETY: open descriptor, one byte of static memory; write is async-signal-safe.
            if unsafe { libc::write(group.as_raw_fd(), b"0".as_ptr().cast(), 1) } != 1 {
                return Err(io::Error::last_os_error());
            }
        }
        if let Some(cpus) = &self.affinity {
            // SAFETY: a cpu_set_t is made of integers.
            let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            let limit = usize::try_from(libc::CPU_SETSIZE).unwrap_or(0);
            for &cpu in cpus.iter().filter(|&&cpu| cpu < limit) {
                // SAFETY: `cpu` is below CPU_SETSIZE.
                unsafe { libc::CPU_SET(cpu, &mut set) };
            }
            // SAFETY: `set` has the size that is passed.
            check(unsafe {
                libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
            })?;
        }
        if let Some(score) = self.oom_score {
            // SAFETY: a path that ends in zero, static bytes, and the descriptor just opened; all
            // three calls are async-signal-safe.
            unsafe {
                let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY);
                let text = score.text();
                // Where it is refused the workload runs with what the agent has.
                libc::write(file, text.as_ptr().cast(), text.len());
                libc::close(file);
            }
        }
        crate::descriptors::give_back()?;
        // SAFETY: no arguments; it fails harmlessly when the child already leads a group.
        if self.new_session && unsafe { libc::setsid() } < 0 {
            return Err(io::Error::last_os_error());
        }
        if let Some((uid, gid)) = self.user {
            let own = std::slice::from_ref(&gid);
            let all = if self.supplementary.is_empty() { own } else { &self.supplementary };
            // SAFETY: group ids in memory that lives through the call; then plain integers.
            unsafe {
                if libc::geteuid() == 0 {
                    check(libc::setgroups(all.len(), all.as_ptr()))?;
                }
                check(libc::setresgid(gid, gid, gid))?;
                check(libc::setresuid(uid, uid, uid))?;
            }
        }
        if let Some(cwd) = &self.cwd {
            // SAFETY: a string that ends in zero and lives through the call; chdir is
            // async-signal-safe.
            check(unsafe { libc::chdir(cwd.as_ptr()) })?;
        }
        // After the change of user, which would clear it.
        if let Some(signal) = self.death_signal {
            // SAFETY: plain integers.
            check(unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, signal, 0, 0, 0) })?;
        }
        // SAFETY: the set is written by sigemptyset before it is read.
        unsafe {
            let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
            libc::sigemptyset(none.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
        }
        Ok(())
    }
}

/// Runs `setup` in the child of this command, before exec.
pub fn with_setup(
    command: &mut std::process::Command,
    setup: ChildSetup,
) -> &mut std::process::Command {
    use std::os::unix::process::CommandExt;
    // SAFETY: `apply` makes only async-signal-safe calls and allocates nothing.
    unsafe { command.pre_exec(move || setup.apply()) }
}

/// The id of a user by name or number; with the number also the primary group when it is known.
pub fn user_by_name(name: &str) -> Option<(u32, u32)> {
    let c_name = CString::new(name).ok()?;
    let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut buffer = vec![0_u8; 16 * 1024];
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are valid for the lengths given and outlive the call.
    unsafe {
        libc::getpwnam_r(
            c_name.as_ptr(),
            entry.as_mut_ptr(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &raw mut found,
        );
        (!found.is_null()).then(|| ((*found).pw_uid, (*found).pw_gid))
    }
}

/// A user as the system knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub uid: u32,
    /// Its primary group.
    pub gid: u32,
    /// Its name.
    pub name: String,
    /// Its home directory.
    pub home: String,
}

/// A user by number.
pub fn user_by_id(uid: u32) -> Option<User> {
    let mut entry = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut buffer = vec![0_u8; 16 * 1024];
    let mut found = std::ptr::null_mut();
    // SAFETY: all pointers are valid for the lengths given and outlive the call; the texts that the
    // entry points to lie in `buffer` and are copied before it goes.
    unsafe {
        libc::getpwuid_r(
            uid,
            entry.as_mut_ptr(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            &raw mut found,
        );
        if found.is_null() {
            return None;
        }
        let text =
            |at: *const libc::c_char| std::ffi::CStr::from_ptr(at).to_string_lossy().into_owned();
        Some(User {
            uid: (*found).pw_uid,
            gid: (*found).pw_gid,
            name: text((*found).pw_name),
            home: text((*found).pw_dir),
        })
    }
}

/// All groups of a user, its own among them; only its own when the system does not know it.
pub fn groups_of((uid, gid): (u32, u32)) -> Vec<u32> {
    let name = user_by_id(uid).and_then(|user| CString::new(user.name).ok());
    let Some(name) = name else { return vec![gid] };
    let mut groups = vec![0_u32; 256];
    let mut count = 256;
    // SAFETY: the name ends with a zero byte, and `groups` has room for as many as `count` says.
    let found =
        unsafe { libc::getgrouplist(name.as_ptr(), gid, groups.as_mut_ptr(), &raw mut count) };
    groups.truncate(usize::try_from(count).unwrap_or(0).min(256));
    if found < 0 || groups.is_empty() { vec![gid] } else { groups }
}

/// The parent of this process.
pub fn parent() -> u32 {
    // SAFETY: no arguments, never fails.
    u32::try_from(unsafe { libc::getppid() }).unwrap_or(0)
}

/// The user that this process acts as.
pub fn own_uid() -> u32 {
    // SAFETY: no arguments, never fails.
    unsafe { libc::geteuid() }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_working_directory_is_entered_as_the_user() {
        if own_uid() != 0 {
            println!("SKIPPED: only root can start something as somebody else");
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let inner = base.path().join("open");
        std::fs::create_dir(&inner).unwrap();
        let run = |mode| {
            let closed = std::fs::Permissions::from_mode(mode);
            std::fs::set_permissions(base.path(), closed).unwrap();
            let setup = ChildSetup {
                user: Some((65_534, 65_534)),
                cwd: CString::new(inner.to_str().unwrap()).ok(),
                ..ChildSetup::default()
            };
            with_setup(&mut std::process::Command::new("/bin/true"), setup).status()
        };
        assert!(run(0o755).unwrap().success());
        let error = run(0o700).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{error}");
    }
}
