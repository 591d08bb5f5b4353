//! Files that the agent has mapped and a job may cut short.
//!
//! The job's part of the control block belongs to the job's user, and whoever may write a file may
//! truncate it; an access beyond its new end is SIGBUS, which would end the agent. Looking at the
//! length first does not help, because the job can be faster. So SIGBUS inside of a mapped part is
//! answered where it happens: the part is replaced by empty memory of our own, the access goes on,
//! and the part is marked as torn. Nothing is registered in it any more, and its job is stopped.
//!
//! A SIGBUS anywhere else goes to whoever handled it before.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Parts that may be mapped at once: two for each job of a node, with room to spare.
const MOST: usize = 256;

struct Region {
    /// 0 when it is free, 1 while it is being set up.
    base: AtomicUsize,
    bytes: AtomicUsize,
    torn: AtomicBool,
}

static REGIONS: [Region; MOST] = [const {
    Region { base: AtomicUsize::new(0), bytes: AtomicUsize::new(0), torn: AtomicBool::new(false) }
}; MOST];

static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A mapped part that is watched over, by its place in the table.
#[derive(Debug)]
pub(crate) struct Guarded(usize);

impl Guarded {
    /// Watches over `bytes` from `base`, which must be mapped until this is dropped.
    pub(crate) fn new(base: *mut u8, bytes: usize) -> io::Result<Self> {
        install()?;
        let free = |region: &Region| {
            region.base.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
        };
        let Some(index) = REGIONS.iter().position(free) else {
            return Err(io::Error::other(format!("more than {MOST} control blocks are open")));
        };
        let region = &REGIONS[index];
        region.torn.store(false, Ordering::Release);
        region.bytes.store(bytes, Ordering::Release);
        region.base.store(base as usize, Ordering::Release);
        Ok(Guarded(index))
    }

    /// Whether the file behind it was cut short.
    pub(crate) fn is_torn(&self) -> bool {
        REGIONS[self.0].torn.load(Ordering::Acquire)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        REGIONS[self.0].base.store(0, Ordering::Release);
    }
}

/// Takes SIGBUS over, once for the process.
fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        // SAFETY: a sigaction of zeros is a valid value; the calls get pointers to locals.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            let failed = || io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL);
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), &raw mut before) != 0 {
                return Err(failed());
            }
            // Known before the first signal can come.
            BEFORE.get_or_init(|| before);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            if libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) != 0 {
                return Err(failed());
            }
        }
        Ok(())
    });
    (*done).map_err(io::Error::from_raw_os_error)
}

/// The handler. It allocates nothing and takes no lock.
extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo; SIGBUS has an address.
    let address = unsafe { (*info).si_addr() } as usize;
    for region in &REGIONS {
        let base = region.base.load(Ordering::Acquire);
        let bytes = region.bytes.load(Ordering::Acquire);
        if base <= 1 || address < base || address - base >= bytes {
            continue;
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: exactly the pages of a mapping of ours, which stays until its guard is dropped;
        // every bit pattern is valid in it, so that it may become zero under its readers.
        let mapped = unsafe {
            let base: *mut libc::c_void = std::ptr::with_exposed_provenance_mut(base);
            libc::mmap(base, bytes, access, kind, -1, 0)
        };
        if mapped != libc::MAP_FAILED {
            region.torn.store(true, Ordering::Release);
            return;
        }
    }
    pass_on(signal, info, context);
}

fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = BEFORE.get().map_or(libc::SIG_DFL, |before| before.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // The access that failed is made again and ends the process as it would have.
        // SAFETY: a sigaction of zeros is the default action.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &raw const default, std::ptr::null_mut());
        }
        return;
    }
    let with_info = BEFORE.get().is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0);
    // SAFETY: the address is that of a handler that was installed with these flags, which say how it
    // is to be called.
    unsafe {
        if with_info {
            let call: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                std::mem::transmute(handler);
            call(signal, info, context);
        } else {
            let call: extern "C" fn(libc::c_int) = std::mem::transmute(handler);
            call(signal);
        }
    }
}
