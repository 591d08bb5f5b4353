//! System calls and messages, without libc's `errno` and so fit for a signal handler.

use core::arch::asm;
use core::fmt::{self, Write};
use core::sync::atomic::{AtomicU32, Ordering};

/// A system call with up to six arguments; the kernel's answer as it is (negative: `-errno`).
///
/// # Safety
/// The arguments are valid for that call.
pub(crate) unsafe fn syscall(number: i64, args: [usize; 6]) -> isize {
    let result: i64;
    // SAFETY: the kernel's calling convention; rcx and r11 are clobbered by `syscall`.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    isize::try_from(result).unwrap_or(-1)
}

/// Time of the monotonic clock, the one that the agent's heartbeat uses.
pub(crate) fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to; the call is answered by the vdso.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec.cast_unsigned() * 1_000_000_000 + time.tv_nsec.cast_unsigned()
}

/// Sleeps; a signal may cut it short.
pub(crate) fn sleep_ns(ns: u64) {
    let time = libc::timespec {
        tv_sec: (ns / 1_000_000_000).cast_signed(),
        tv_nsec: (ns % 1_000_000_000).cast_signed(),
    };
    // SAFETY: reads `time`, writes nothing.
    unsafe { syscall(libc::SYS_nanosleep, [(&raw const time) as usize, 0, 0, 0, 0, 0]) };
}

/// Waits while `word` holds `expected`, at most `limit_ns`.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, limit_ns: u64) {
    let time = libc::timespec {
        tv_sec: (limit_ns / 1_000_000_000).cast_signed(),
        tv_nsec: (limit_ns % 1_000_000_000).cast_signed(),
    };
    let operation = (libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG).cast_unsigned() as usize;
    // SAFETY: `word` is a live futex word, `time` is read only.
    unsafe {
        let word = word.as_ptr() as usize;
        let time = (&raw const time) as usize;
        syscall(libc::SYS_futex, [word, operation, expected as usize, time, 0, 0]);
    }
}

/// Wakes all that wait on `word`.
pub(crate) fn futex_wake(word: &AtomicU32) {
    let operation = (libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG).cast_unsigned() as usize;
    // SAFETY: `word` is a live futex word.
    unsafe {
        syscall(libc::SYS_futex, [word.as_ptr() as usize, operation, i32::MAX as usize, 0, 0, 0]);
    }
}

/// This process, as the kernel knows it now (never cached: there is fork).
pub(crate) fn pid() -> u32 {
    // SAFETY: takes no arguments.
    let pid = unsafe { syscall(libc::SYS_getpid, [0; 6]) };
    u32::try_from(pid).unwrap_or(0)
}

/// This thread.
pub(crate) fn tid() -> u32 {
    // SAFETY: takes no arguments.
    let tid = unsafe { syscall(libc::SYS_gettid, [0; 6]) };
    u32::try_from(tid).unwrap_or(0)
}

/// Sends a signal to this process.
pub(crate) fn kill_self(signal: i32) {
    // SAFETY: plain numbers.
    unsafe {
        syscall(libc::SYS_kill, [pid() as usize, signal.cast_unsigned() as usize, 0, 0, 0, 0])
    };
}

/// Blocks signals in this thread (bit n - 1 is signal n); what was blocked before comes back. The kernel
/// leaves out those that cannot be blocked.
pub(crate) fn block_signals(more: u64) -> u64 {
    change_blocked(libc::SIG_BLOCK, more)
}

/// Unblocks signals in this thread.
pub(crate) fn unblock_signals(less: u64) -> u64 {
    change_blocked(libc::SIG_UNBLOCK, less)
}

/// Blocks exactly these signals in this thread.
pub(crate) fn set_blocked(signals: u64) -> u64 {
    change_blocked(libc::SIG_SETMASK, signals)
}

fn change_blocked(how: i32, signals: u64) -> u64 {
    let mut before = 0_u64;
    let (new, old) = ((&raw const signals) as usize, (&raw mut before) as usize);
    // SAFETY: both are masks of eight bytes.
    unsafe {
        syscall(libc::SYS_rt_sigprocmask, [how.cast_unsigned() as usize, new, old, 8, 0, 0]);
    }
    before
}

/// Ends the process at once.
pub(crate) fn exit_group(status: i32) -> ! {
    loop {
        // SAFETY: does not return.
        unsafe { syscall(libc::SYS_exit_group, [status.cast_unsigned() as usize, 0, 0, 0, 0, 0]) };
    }
}

/// Zeroed private memory; null when there is none.
pub(crate) fn map_private(bytes: usize) -> *mut u8 {
    let protection = (libc::PROT_READ | libc::PROT_WRITE).cast_unsigned() as usize;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let flags = flags.cast_unsigned() as usize;
    // SAFETY: a new mapping, wherever the kernel puts it.
    let base = unsafe { syscall(libc::SYS_mmap, [0, bytes, protection, flags, usize::MAX, 0]) };
    if base < 0 { core::ptr::null_mut() } else { base as *mut u8 }
}

/// As [`map_private`], and a forked child sees it zeroed.
pub(crate) fn map_wiped_on_fork(bytes: usize) -> *mut u8 {
    const MADV_WIPEONFORK: usize = 18;
    let base = map_private(bytes);
    if !base.is_null() {
        // SAFETY: the range was just mapped.
        unsafe { syscall(libc::SYS_madvise, [base as usize, bytes, MADV_WIPEONFORK, 0, 0, 0]) };
    }
    base
}

/// Lets this process take part in [`barrier_everywhere`]; says whether it does.
pub(crate) fn join_barriers() -> bool {
    const REGISTER_GLOBAL_EXPEDITED: usize = 1 << 2;
    // SAFETY: changes nothing but what barriers reach.
    unsafe { syscall(libc::SYS_membarrier, [REGISTER_GLOBAL_EXPEDITED, 0, 0, 0, 0, 0]) == 0 }
}

/// A full memory barrier on every processor that runs a process which has joined; says whether it
/// was made.
pub(crate) fn barrier_everywhere() -> bool {
    const GLOBAL_EXPEDITED: usize = 1 << 1;
    // SAFETY: a barrier.
    unsafe { syscall(libc::SYS_membarrier, [GLOBAL_EXPEDITED, 0, 0, 0, 0, 0]) == 0 }
}

/// What tells this thread from all others that live: the address of its control block.
#[inline(always)]
pub(crate) fn thread_word() -> usize {
    let word: usize;
    // SAFETY: the first word at fs is its own address, by the ABI of thread-local storage.
    unsafe {
        core::arch::asm!(
            "mov {word}, qword ptr fs:[0]",
            word = out(reg) word,
            options(nostack, readonly, preserves_flags),
        );
    }
    word
}

/// A line of text on the stack.
pub(crate) struct Line {
    bytes: [u8; 512],
    length: usize,
}

impl Line {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; 512], length: 0 }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// With a nul at the end, for C.
    pub(crate) fn as_c(&mut self) -> *const core::ffi::c_char {
        let end = self.length.min(self.bytes.len() - 1);
        self.bytes[end] = 0;
        self.bytes.as_ptr().cast()
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = self.bytes.len() - self.length;
        let taken = text.len().min(room);
        self.bytes[self.length..self.length + taken].copy_from_slice(&text.as_bytes()[..taken]);
        self.length += taken;
        Ok(())
    }
}

/// One line on stderr.
pub(crate) fn say(text: impl fmt::Display) {
    let mut line = Line::new();
    if writeln!(line, "muxflow-xcuda[{}]: {text}", pid()).is_ok() {
        let bytes = line.as_bytes();
        // SAFETY: the bytes are ours; descriptor 2 may be anything, the answer is not needed.
        unsafe { syscall(libc::SYS_write, [2, bytes.as_ptr() as usize, bytes.len(), 0, 0, 0]) };
    }
}

/// One line on stderr, the first time only.
pub(crate) fn say_once(said: &AtomicU32, text: impl fmt::Display) {
    if said.swap(1, Ordering::Relaxed) == 0 {
        say(text);
    }
}
