//! This process's place in its job: the mapped control block and the slot in it.
//!
//! Both parts are opened once; the mappings are inherited by fork. The slot is not: it is kept in a
//! page that the kernel wipes in a forked child, which then takes a slot of its own at its first use of
//! the GPU.

use core::ffi::{CStr, c_char};
use core::fmt::Write;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use muxflow_abi::control::hand::Hand;
use muxflow_abi::control::{AgentPart, Invalid, JobPart, Owner, Settings, job::Slot};

use crate::front::Front;
use crate::sys;

/// Both parts of the control block, and the slot of this process.
#[derive(Clone, Copy)]
pub(crate) struct Control {
    pub(crate) agent: &'static AgentPart,
    pub(crate) job: &'static JobPart,
    pub(crate) slot: usize,
}

impl Control {
    /// What this process says of itself.
    pub(crate) fn mine(&self) -> Option<&'static Slot> {
        self.job.slot(self.slot)
    }
}

static AGENT: AtomicPtr<AgentPart> = AtomicPtr::new(core::ptr::null_mut());
static JOB: AtomicPtr<JobPart> = AtomicPtr::new(core::ptr::null_mut());
/// The page that fork wipes.
static OWN: AtomicPtr<Own> = AtomicPtr::new(core::ptr::null_mut());

/// What a forked child must not inherit.
#[repr(C)]
struct Own {
    /// The slot plus one.
    slot: AtomicUsize,
    claiming: AtomicUsize,
    /// The one thread that uses the slot's hand.
    hand_thread: AtomicUsize,
    hand: AtomicPtr<Hand>,
    /// Charges that found nothing in hand.
    charges: AtomicUsize,
    front: Front,
}

const _: () = assert!(size_of::<Own>() <= 4096);

/// What one thread of this process uses without a locked instruction.
#[derive(Clone, Copy)]
pub(crate) struct InHand {
    pub(crate) hand: &'static Hand,
    pub(crate) front: &'static Front,
}

/// A process that allocates less often than this needs no hand.
const CHARGES_BEFORE_HAND: usize = 64;
static SAID: AtomicU32 = AtomicU32::new(0);
/// Not zero: a file of the control block was cut short under us.
static TORN: AtomicU32 = AtomicU32::new(0);

/// The control block, if there is a good one and this process has a slot in it. Cheap once it is
/// known.
#[inline]
pub(crate) fn control() -> Option<Control> {
    let own = OWN.load(Ordering::Acquire);
    if !own.is_null() {
        // SAFETY: mapped for good before it was stored.
        let slot = unsafe { &*own }.slot.load(Ordering::Acquire);
        if slot != 0 {
            // SAFETY: both are mapped and validated before any slot is taken, and stay.
            unsafe {
                return Some(Control {
                    agent: &*AGENT.load(Ordering::Acquire),
                    job: &*JOB.load(Ordering::Acquire),
                    slot: slot - 1,
                });
            }
        }
    }
    register()
}

/// The agent's part alone, when it is mapped.
#[inline]
pub(crate) fn agent() -> Option<&'static AgentPart> {
    let agent = AGENT.load(Ordering::Acquire);
    // SAFETY: validated and mapped for good before it was stored.
    unsafe { agent.as_ref() }
}

/// What this process has in hand, if this is the thread that may use it.
#[inline(always)]
pub(crate) fn in_hand() -> Option<InHand> {
    // SAFETY: null, or mapped for good before it was stored.
    let own = unsafe { OWN.load(Ordering::Acquire).as_ref() }?;
    if own.hand_thread.load(Ordering::Relaxed) != sys::thread_word() {
        return None;
    }
    of(own)
}

/// What this process has in hand, if another thread uses it: to be called in.
pub(crate) fn in_other_hand() -> Option<InHand> {
    // SAFETY: as above.
    let own = unsafe { OWN.load(Ordering::Acquire).as_ref() }?;
    let thread = own.hand_thread.load(Ordering::Acquire);
    if thread == 0 || thread == sys::thread_word() {
        return None;
    }
    of(own)
}

#[inline(always)]
fn of(own: &'static Own) -> Option<InHand> {
    // SAFETY: null, or the hand of this process's slot, mapped for good.
    let hand = unsafe { own.hand.load(Ordering::Relaxed).as_ref() }?;
    Some(InHand { hand, front: &own.front })
}

/// Counts a charge that went to the job's counters; the first thread that makes many gets the hand.
pub(crate) fn want_hand() {
    // SAFETY: null, or mapped for good before it was stored.
    let Some(own) = (unsafe { OWN.load(Ordering::Acquire).as_ref() }) else { return };
    if own.hand_thread.load(Ordering::Relaxed) != 0
        || own.charges.fetch_add(1, Ordering::Relaxed) != CHARGES_BEFORE_HAND
    {
        return;
    }
    let slot = control().and_then(|control| control.mine());
    if let (Some(slot), true) = (slot, sys::join_barriers()) {
        own.hand.store(core::ptr::from_ref(slot.hand()).cast_mut(), Ordering::Relaxed);
        own.hand_thread.store(sys::thread_word(), Ordering::Release);
    }
}

/// Whether this process (not the one it was forked from) has a slot.
pub(crate) fn is_registered() -> bool {
    let own = OWN.load(Ordering::Acquire);
    // SAFETY: mapped for good before it was stored.
    !own.is_null() && unsafe { &*own }.slot.load(Ordering::Acquire) != 0
}

/// The fixed settings, or the defaults where there is no control block.
pub(crate) fn settings() -> Settings {
    agent().filter(|_| !is_torn()).map(AgentPart::settings).unwrap_or_default()
}

#[cold]
fn register() -> Option<Control> {
    let (agent, job) = match parts() {
        Ok(parts) => parts,
        Err(why) => {
            sys::say_once(
                &SAID,
                format_args!("{why}: device memory and kernel launches are refused"),
            );
            return None;
        }
    };
    let mut own = OWN.load(Ordering::Acquire);
    if own.is_null() {
        let fresh = sys::map_wiped_on_fork(4096).cast::<Own>();
        if fresh.is_null() {
            return None;
        }
        let empty = core::ptr::null_mut();
        own = match OWN.compare_exchange(empty, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => fresh,
            Err(other) => other,
        };
    }
    // SAFETY: mapped for good, and a page is enough for it.
    let Own { slot: taken, claiming, .. } = unsafe { &*own };
    if claiming.swap(1, Ordering::AcqRel) != 0 {
        // Another thread is at it: the slot comes in microseconds, or the job has none left.
        for _ in 0..1000 {
            let slot = taken.load(Ordering::Acquire);
            if slot != 0 {
                return Some(Control { agent, job, slot: slot - 1 });
            }
            sys::sleep_ns(50_000);
        }
        return None;
    }
    let me = identity();
    let namespace = pid_namespace();
    let slot = job.claim(me, namespace).or_else(|| {
        reclaim_dead(job);
        job.claim(me, namespace)
    });
    let Some(slot) = slot else {
        sys::say_once(&SAID, "the job has too many processes: device memory is refused");
        claiming.store(0, Ordering::Release);
        return None;
    };
    taken.store(slot + 1, Ordering::Release);
    Some(Control { agent, job, slot })
}

/// Whether a file of the control block was cut short while it was mapped.
pub(crate) fn is_torn() -> bool {
    TORN.load(Ordering::Acquire) != 0
}

/// From the handler of SIGBUS: an access to this address failed. If it lies in a part of the control
/// block, somebody cut its file short: empty memory takes its place, so that the access goes on, and from
/// now on everything is refused, as without a control block. An agent whose part is empty is silent, and
/// a process that hears nothing stops by itself, cleanly.
pub(crate) fn mend(address: usize) -> bool {
    let agent = (AGENT.load(Ordering::Acquire) as usize, AgentPart::BYTES);
    let job = (JOB.load(Ordering::Acquire) as usize, JobPart::BYTES);
    let within = |&(base, bytes): &(usize, usize)| {
        base != 0 && (base..base.saturating_add(bytes)).contains(&address)
    };
    let Some((base, bytes)) = [agent, job].into_iter().find(within) else { return false };
    let protection = (libc::PROT_READ | libc::PROT_WRITE).cast_unsigned() as usize;
    let kind = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let arguments = [base, bytes, protection, kind.cast_unsigned() as usize, usize::MAX, 0];
    // SAFETY: exactly the pages of a mapping of ours that is never undone; every bit pattern is valid
    // in it, so that it may become zero under its readers.
    if unsafe { sys::syscall(libc::SYS_mmap, arguments) } < 0 {
        return false;
    }
    TORN.store(1, Ordering::Release);
    // SAFETY: null, or mapped for good before it was stored.
    if let Some(own) = unsafe { OWN.load(Ordering::Acquire).as_ref() } {
        own.hand_thread.store(0, Ordering::Release);
        own.slot.store(0, Ordering::Release);
    }
    true
}

/// Why there is no control block to obey.
pub(crate) enum Missing {
    Unnamed,
    Torn,
    Unreadable(&'static str, i32),
    Bad(&'static str, Invalid),
}

impl core::fmt::Display for Missing {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Unnamed => f.write_str("MUXFLOW_CONTROL is not set"),
            Self::Torn => f.write_str("the control block was cut short while it was in use"),
            Self::Unreadable(file, errno) => {
                write!(f, "cannot map the {file} part of the control block (errno {errno})")
            }
            Self::Bad(file, invalid) => write!(f, "{file} part: {invalid}"),
        }
    }
}

fn parts() -> Result<(&'static AgentPart, &'static JobPart), Missing> {
    if is_torn() {
        return Err(Missing::Torn);
    }
    // SAFETY: null or mapped for good.
    unsafe {
        let agent = AGENT.load(Ordering::Acquire).as_ref();
        if let (Some(agent), Some(job)) = (agent, JOB.load(Ordering::Acquire).as_ref()) {
            return Ok((agent, job));
        }
    }
    // SAFETY: getenv reads the environment.
    let directory = unsafe { libc::getenv(c"MUXFLOW_CONTROL".as_ptr()) };
    if directory.is_null() {
        return Err(Missing::Unnamed);
    }
    // SAFETY: a value of the environment is a C string.
    let directory = unsafe { CStr::from_ptr(directory) };
    let (base, bytes) =
        map_file(directory, muxflow_abi::control::AGENT_FILE, AgentPart::BYTES, false)?;
    // SAFETY: the mapping is page-aligned, has that many bytes, and is never undone.
    let agent = unsafe { AgentPart::validate(base, bytes) };
    let agent: &'static AgentPart = agent.map_err(|why| Missing::Bad("agent", why))?;
    let (base, bytes) = map_file(directory, muxflow_abi::control::JOB_FILE, JobPart::BYTES, true)?;
    // SAFETY: as above, and writable.
    let job = unsafe { JobPart::validate(base, bytes, agent.generation()) };
    let job: &'static JobPart = job.map_err(|why| Missing::Bad("job", why))?;
    JOB.store(core::ptr::from_ref(job).cast_mut(), Ordering::Release);
    AGENT.store(core::ptr::from_ref(agent).cast_mut(), Ordering::Release);
    Ok((agent, job))
}

/// Maps a file of the control block, no further than it reaches.
fn map_file(
    directory: &CStr,
    file: &'static str,
    bytes: usize,
    writable: bool,
) -> Result<(*mut u8, usize), Missing> {
    let unreadable = |answer: isize| Missing::Unreadable(file, i32::try_from(-answer).unwrap_or(0));
    let mut path = sys::Line::new();
    let directory = core::str::from_utf8(directory.to_bytes()).unwrap_or("");
    if write!(path, "{directory}/{file}").is_err() {
        return Err(unreadable(0));
    }
    let access = if writable { libc::O_RDWR } else { libc::O_RDONLY };
    let flags = (access | libc::O_CLOEXEC).cast_unsigned() as usize;
    // SAFETY: a C string and flags; the mapping is new.
    unsafe {
        let fd = sys::syscall(libc::SYS_open, [path.as_c() as usize, flags, 0, 0, 0, 0]);
        let Ok(descriptor) = usize::try_from(fd) else { return Err(unreadable(fd)) };
        let size = sys::syscall(libc::SYS_lseek, [descriptor, 0, 2, 0, 0, 0]);
        let length = usize::try_from(size).unwrap_or(0).min(bytes);
        let protection =
            if writable { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        let base = if length == 0 {
            -(libc::EINVAL as isize)
        } else {
            let protection = protection.cast_unsigned() as usize;
            let shared = libc::MAP_SHARED.cast_unsigned() as usize;
            sys::syscall(libc::SYS_mmap, [0, length, protection, shared, descriptor, 0])
        };
        sys::syscall(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
        if length == 0 {
            return Err(Missing::Bad(file, Invalid::Truncated { bytes: 0, needed: bytes }));
        }
        if base < 0 { Err(unreadable(base)) } else { Ok((base as *mut u8, length)) }
    }
}

/// This process's name in the control block. By `self`, for `/proc` may be that of another id
/// namespace, where our id is somebody else's.
fn identity() -> Owner {
    let start_ticks = match started(c"/proc/self/stat") {
        Started::At(ticks) => ticks,
        _ => 0,
    };
    Owner { pid: sys::pid(), start_ticks }
}

/// Gives back what dead processes of this job held.
pub(crate) fn reclaim_dead(job: &JobPart) -> usize {
    let namespace = pid_namespace();
    let me = identity();
    let told = matches!(start_ticks(me.pid), Started::At(ticks) if ticks == me.start_ticks);
    let dead = |owner: Owner, of: u64| {
        of == namespace && owner.pid != me.pid && me.start_ticks != 0 && is_dead(owner, told)
    };
    job.reclaim(me, dead, |_| {})
}

/// Whether the process with this id is gone, a zombie, or another one. What cannot be known is
/// taken for living: memory stays charged rather than being given out twice. `told`: `/proc` speaks
/// of our own id namespace.
fn is_dead(owner: Owner, told: bool) -> bool {
    // Without its start nobody can tell by its name: the agent, whose id may be of another namespace, or
    // a process that could not read its own.
    if owner.start_ticks == 0 {
        return false;
    }
    // SAFETY: signal 0 only asks.
    let answer = unsafe { sys::syscall(libc::SYS_kill, [owner.pid as usize, 0, 0, 0, 0, 0]) };
    if answer == -(libc::ESRCH as isize) {
        return true;
    }
    match start_ticks(owner.pid) {
        _ if !told => false,
        Started::At(ticks) => ticks != owner.start_ticks,
        Started::Zombie => true,
        Started::Unknown => false,
    }
}

/// Inode of the process id namespace: ids of another one mean nothing here.
fn pid_namespace() -> u64 {
    let mut text = [0_u8; 64];
    let path = c"/proc/self/ns/pid".as_ptr() as usize;
    // SAFETY: a C string and a buffer with its length.
    let length = unsafe {
        sys::syscall(libc::SYS_readlink, [path, text.as_mut_ptr() as usize, text.len(), 0, 0, 0])
    };
    let length = usize::try_from(length).unwrap_or(0);
    text[..length].iter().filter(|b| b.is_ascii_digit()).fold(0, |number: u64, &digit| {
        number.wrapping_mul(10).wrapping_add(u64::from(digit - b'0'))
    })
}

/// When a process started.
enum Started {
    At(u32),
    Zombie,
    Unknown,
}

fn start_ticks(pid: u32) -> Started {
    let mut path = sys::Line::new();
    if write!(path, "/proc/{pid}/stat").is_err() {
        return Started::Unknown;
    }
    // SAFETY: ends with a nul.
    started(unsafe { CStr::from_ptr(path.as_c()) })
}

fn started(path: &CStr) -> Started {
    let mut text = [0_u8; 1024];
    // SAFETY: a C string, then a buffer with its length.
    let length = unsafe {
        let fd = sys::syscall(libc::SYS_open, [path.as_ptr() as usize, 0, 0, 0, 0, 0]);
        let Ok(fd) = usize::try_from(fd) else { return Started::Unknown };
        let length =
            sys::syscall(libc::SYS_read, [fd, text.as_mut_ptr() as usize, text.len(), 0, 0, 0]);
        sys::syscall(libc::SYS_close, [fd, 0, 0, 0, 0, 0]);
        usize::try_from(length).unwrap_or(0)
    };
    parse_stat(&text[..length])
}

/// `/proc/PID/stat`. The name may contain anything, so fields count from its closing bracket.
fn parse_stat(text: &[u8]) -> Started {
    let after = text.iter().rposition(|&byte| byte == b')').and_then(|at| text.get(at + 2..));
    let Some(after) = after else { return Started::Unknown };
    let mut fields = after.split(|&byte| byte == b' ');
    let ended = matches!(fields.next(), Some(b"Z" | b"X"));
    let number = |field: &[u8]| core::str::from_utf8(field).ok()?.parse::<u64>().ok();
    let threads = fields.nth(16).and_then(number);
    // Its first thread may have left while others run.
    if ended && threads.is_none_or(|threads| threads <= 1) {
        return Started::Zombie;
    }
    match fields.nth(1).and_then(number) {
        #[expect(clippy::cast_possible_truncation, reason = "the slot keeps the low 32 bits")]
        Some(ticks) => Started::At(ticks as u32),
        None => Started::Unknown,
    }
}

/// A value of the environment.
pub(crate) fn environment(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: getenv reads the environment; values are C strings.
    unsafe {
        let value: *const c_char = libc::getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value))
    }
}
