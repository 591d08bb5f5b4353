//! The few system calls that std does not offer, each behind a safe function.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::time::Duration;

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Whether an open directory has a file of this name.
pub fn has_entry(directory: BorrowedFd<'_>, name: &std::ffi::CStr) -> bool {
    // SAFETY: the name ends with a zero byte and is only read.
    unsafe { libc::faccessat(directory.as_raw_fd(), name.as_ptr(), libc::F_OK, 0) == 0 }
}

/// Nanoseconds of `CLOCK_MONOTONIC`.
pub fn monotonic_ns() -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid place for the result.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut t) };
    t.tv_sec.unsigned_abs() * 1_000_000_000 + t.tv_nsec.unsigned_abs()
}

/// Waits until `word` is not `expected` any more, a wake-up comes, or the time is up.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let spec = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: i64::from(t.subsec_nanos()),
    });
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word lives as long as the reference; the kernel only reads it.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, expected, spec) };
}

/// Wakes everybody who waits on `word`, in all processes.
pub fn futex_wake(word: &AtomicU32) {
    // SAFETY: the word lives as long as the reference; the kernel only uses its address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// An anonymous shared file of `bytes`, all holes.
pub fn memfd(name: &std::ffi::CStr, bytes: u64) -> io::Result<OwnedFd> {
    // SAFETY: the name is a valid C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    check(fd.into())?;
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let size = libc::off_t::try_from(bytes).map_err(io::Error::other)?;
    // SAFETY: plain call on an owned descriptor.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), size) }.into())?;
    Ok(fd)
}

/// A counter that can be waited for by `poll`.
pub fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: plain call.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    check(fd.into())?;
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to an eventfd, which wakes who polls it.
pub fn ring(fd: BorrowedFd<'_>) {
    let one = 1_u64;
    // SAFETY: eight bytes are read from a live value.
    unsafe { libc::write(fd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Empties an eventfd.
pub fn quiet(fd: BorrowedFd<'_>) {
    let mut value = 0_u64;
    // SAFETY: eight bytes are written to a live value.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut value).cast(), 8) };
}

/// A descriptor that becomes readable when the process ends; none when it cannot be had.
pub fn pidfd(pid: i32) -> Option<OwnedFd> {
    // SAFETY: plain call.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor was just made and belongs to nobody else.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Waits until one of the descriptors can be read or was hung up; tells which.
pub fn poll(fds: &[RawFd], timeout: Option<Duration>, ready: &mut Vec<bool>) -> io::Result<()> {
    let mut polled: Vec<libc::pollfd> =
        fds.iter().map(|fd| libc::pollfd { fd: *fd, events: libc::POLLIN, revents: 0 }).collect();
    let spec = timeout.map(|t| libc::timespec {
        tv_sec: libc::time_t::try_from(t.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: i64::from(t.subsec_nanos()),
    });
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = libc::nfds_t::try_from(polled.len()).map_err(io::Error::other)?;
    // SAFETY: the array has `count` entries and the time is valid or null.
    let result = unsafe { libc::ppoll(polled.as_mut_ptr(), count, spec, std::ptr::null()) };
    ready.clear();
    if result < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        ready.resize(fds.len(), false);
        return Ok(());
    }
    ready.extend(polled.iter().map(|p| p.revents != 0));
    Ok(())
}

/// Lets timers of this thread fire to the microsecond instead of the usual fifty.
pub fn exact_timers() {
    // SAFETY: plain call that only concerns this thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000, 0, 0, 0) };
}

/// Who gets the signals that come here; 0 while there is nobody, negative for one that came before.
static HEIR: AtomicI32 = AtomicI32::new(0);

extern "C" fn hand_on(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid structure to a handler that was set with SA_SIGINFO.
    let of_terminal = unsafe { (*info).si_code } > 0;
    if signal == libc::SIGINT && of_terminal {
        // The terminal has told the whole group.
        return;
    }
    let none = HEIR.compare_exchange(0, -signal, Ordering::SeqCst, Ordering::SeqCst);
    if let Err(heir) = none
        && heir > 0
    {
        // SAFETY: may be called in a handler; the child is waited for by nobody but us.
        unsafe { libc::kill(heir, signal) };
    }
}

/// From now on, interrupts and requests to end are for the child to come.
pub fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: all-zero is a valid action; the fields that count are set below.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = hand_on;
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        // SAFETY: the handler only loads, stores and sends.
        unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    }
}

/// A signal that came before there was a child.
pub fn early_signal() -> Option<i32> {
    Some(-HEIR.load(Ordering::SeqCst)).filter(|signal| *signal > 0)
}

/// Hands all signals on to this child; one that came before it, too. 0 is nobody.
pub fn hand_signals_to(child: u32) {
    let child = child.cast_signed();
    let before = HEIR.swap(child, Ordering::SeqCst);
    if before < 0 {
        // SAFETY: our own child, which nobody has waited for yet.
        unsafe { libc::kill(child, -before) };
    }
}

/// A mapping of shared memory, given back when dropped.
#[derive(Debug)]
pub struct Mapping {
    address: *mut u8,
    bytes: usize,
}

// SAFETY: the mapping is plain memory; who shares it uses atomics or its own locks.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `bytes` of a shared file for reading and writing.
    pub fn shared(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<Mapping> {
        // SAFETY: a fresh mapping at an address of the kernel's choice disturbs nothing.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { address: address.cast(), bytes })
    }

    /// Where it is.
    pub fn address(&self) -> *mut u8 {
        self.address
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `shared` and nobody outlives its owner.
        unsafe { libc::munmap(self.address.cast(), self.bytes) };
    }
}
