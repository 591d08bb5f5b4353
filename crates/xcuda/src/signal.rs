//! SIGINT, SIGTERM and SIGABRT, and SIGBUS for the control block's sake. Once the process has a context, the kernel calls our handler for
//! them; what the program sets with `sigaction` or `signal` is kept aside and called from there, so that
//! it does not matter who came first.
//!
//! The handler itself only sets flags, waits on a futex and chains: everything else is done by the
//! worker ([`crate::worker`]). Of SIGBUS it keeps what an access to the control block raised, whose files
//! others may cut short.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicUsize, Ordering};

use crate::{context, elf, exit, gate, process, sys, worker};

type Action = unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;

const SIGNALS: [c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGABRT, libc::SIGBUS];

/// What the program wants done about one signal.
struct Wanted {
    handler: AtomicUsize,
    flags: AtomicI32,
    /// Not zero: the kernel calls our handler. Guarded by [`BUSY`].
    armed: AtomicU32,
    /// The whole of it, to be given back; guarded by [`BUSY`], never touched in a handler.
    whole: UnsafeCell<core::mem::MaybeUninit<libc::sigaction>>,
}

// SAFETY: the cell is only used while BUSY is held.
unsafe impl Sync for Wanted {}

static WANTED: [Wanted; 4] = [const {
    Wanted {
        handler: AtomicUsize::new(0),
        flags: AtomicI32::new(0),
        armed: AtomicU32::new(0),
        whole: UnsafeCell::new(core::mem::MaybeUninit::zeroed()),
    }
}; 4];
/// The process that is at it, for a forked child must not wait for a thread that it has not got.
static BUSY: AtomicU32 = AtomicU32::new(0);

fn place(signal: c_int) -> Option<&'static Wanted> {
    SIGNALS.iter().position(|&ours| ours == signal).map(|at| &WANTED[at])
}

/// glibc's own `sigaction`.
fn real(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    static KNOWN: AtomicUsize = AtomicUsize::new(0);
    let mut function = KNOWN.load(Ordering::Relaxed);
    if function == 0 {
        function = elf::libc_function(c"sigaction") as usize;
        KNOWN.store(function, Ordering::Relaxed);
    }
    if function == 0 {
        return -1;
    }
    // SAFETY: the address is glibc's sigaction; the arguments are the caller's.
    unsafe { core::mem::transmute::<usize, Action>(function)(signal, new, old) }
}

/// Does something that no other thread does at the same time. All signals wait meanwhile: `sigaction`
/// may be called by a handler, and one that interrupts its own thread in here would wait for ever.
fn exclusively<T>(work: impl FnOnce() -> T) -> T {
    let before = sys::block_signals(u64::MAX);
    let me = sys::pid();
    loop {
        let by = BUSY.load(Ordering::Relaxed);
        // Free, or held by a thread of the process that this one was forked from.
        let free = by != me && {
            BUSY.compare_exchange(by, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        if free {
            break;
        }
        sys::sleep_ns(10_000);
    }
    let done = work();
    BUSY.store(0, Ordering::Release);
    sys::set_blocked(before);
    done
}

/// Puts our handler before what the program has set so far.
pub(crate) fn arm() {
    for signal in SIGNALS {
        let Some(wanted) = place(signal) else { continue };
        exclusively(|| {
            // A forked child has inherited it.
            if wanted.armed.swap(1, Ordering::Relaxed) != 0 {
                return;
            }
            let mut old = core::mem::MaybeUninit::<libc::sigaction>::zeroed();
            real(signal, core::ptr::null(), old.as_mut_ptr());
            // SAFETY: zeroed is a valid action, and BUSY is held.
            unsafe { install(signal, wanted, &old.assume_init()) };
        });
    }
}

/// Keeps what the program wants, and sets what the kernel shall do: ignore if the program ignores,
/// else call us, with the program's mask and its flags that the kernel acts on.
///
/// # Safety
/// BUSY is held.
unsafe fn install(signal: c_int, wanted: &Wanted, action: &libc::sigaction) {
    wanted.flags.store(action.sa_flags, Ordering::Relaxed);
    wanted.handler.store(action.sa_sigaction, Ordering::Release);
    // SAFETY: BUSY is held.
    unsafe { (*wanted.whole.get()).write(*action) };
    let mut ours = *action;
    if action.sa_sigaction != libc::SIG_IGN {
        ours.sa_sigaction = handle as *const () as usize;
        ours.sa_flags = (action.sa_flags & !libc::SA_RESETHAND) | libc::SA_SIGINFO;
        if action.sa_sigaction == libc::SIG_DFL {
            ours.sa_flags |= libc::SA_RESTART;
        }
    }
    real(signal, &raw const ours, core::ptr::null_mut());
}

/// What the program calls instead of glibc's.
pub(crate) fn replace(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let Some(wanted) = place(signal) else { return real(signal, new, old) };
    // SAFETY: null or the caller's, as sigaction demands; read and written where a fault is its own.
    let fresh = unsafe { new.as_ref().copied() };
    let answered = exclusively(|| {
        if wanted.armed.load(Ordering::Relaxed) == 0 {
            return Err(real(signal, new, old));
        }
        // SAFETY: BUSY is held.
        unsafe {
            let mut before = (*wanted.whole.get()).assume_init();
            // A handler for one time only is gone after that.
            before.sa_sigaction = wanted.handler.load(Ordering::Relaxed);
            if let Some(fresh) = fresh {
                install(signal, wanted, &fresh);
            }
            Ok(before)
        }
    });
    match answered {
        Ok(before) => {
            // SAFETY: null or the caller's.
            if let Some(old) = unsafe { old.as_mut() } {
                *old = before;
            }
            0
        }
        Err(answer) => answer,
    }
}

unsafe extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, machine: *mut c_void) {
    let Some(wanted) = place(signal) else { return };
    let handler = wanted.handler.load(Ordering::Acquire);
    let flags = wanted.flags.load(Ordering::Relaxed);
    let by_default = handler == libc::SIG_DFL;
    if signal == libc::SIGBUS {
        // SAFETY: the kernel gives a valid siginfo; what it raised itself has an address.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
        if code > 0 && process::mend(address) {
            gate::attend();
            return;
        }
        if by_default {
            // An access of the program's own is made again and ends it as it would have.
            if code > 0 {
                restore_default(signal)
            } else {
                default_action(signal)
            }
            return;
        }
    } else if worker::is_mine() && context::any() {
        worker::stop_by(signal, by_default);
    }
    if by_default {
        exit::by_signal(signal);
        return;
    }
    if handler == libc::SIG_IGN {
        return;
    }
    if flags & libc::SA_RESETHAND != 0 {
        wanted.handler.store(libc::SIG_DFL, Ordering::Release);
    }
    // SAFETY: the program set this address as its handler, of the kind that the flag tells.
    unsafe {
        if flags & libc::SA_SIGINFO != 0 {
            let run = core::mem::transmute::<
                usize,
                unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void),
            >(handler);
            run(signal, info, machine);
        } else {
            core::mem::transmute::<usize, unsafe extern "C" fn(c_int)>(handler)(signal);
        }
    }
}

fn restore_default(signal: c_int) {
    let mut action = core::mem::MaybeUninit::<libc::sigaction>::zeroed();
    // Zeroed is the default action with an empty mask.
    real(signal, action.as_mut_ptr(), core::ptr::null_mut());
}

/// Restores the kernel's default action and dies of the signal: the parent sees what it would have.
pub(crate) fn default_action(signal: c_int) {
    restore_default(signal);
    sys::unblock_signals(1 << (signal - 1));
    sys::kill_self(signal);
}

#[cfg(all(panic = "abort", not(test)))]
mod export {
    use super::*;

    type Handler = libc::sighandler_t;

    #[unsafe(no_mangle)]
    unsafe extern "C" fn sigaction(
        signal: c_int,
        new: *const libc::sigaction,
        old: *mut libc::sigaction,
    ) -> c_int {
        replace(signal, new, old)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __sigaction(
        signal: c_int,
        new: *const libc::sigaction,
        old: *mut libc::sigaction,
    ) -> c_int {
        replace(signal, new, old)
    }

    fn set(signal: c_int, handler: Handler, flags: c_int) -> Handler {
        let mut new = core::mem::MaybeUninit::<libc::sigaction>::zeroed();
        let mut old = core::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: zeroed actions are valid.
        unsafe {
            (*new.as_mut_ptr()).sa_sigaction = handler;
            (*new.as_mut_ptr()).sa_flags = flags;
            if replace(signal, new.as_ptr(), old.as_mut_ptr()) != 0 {
                return libc::SIG_ERR;
            }
            old.assume_init().sa_sigaction
        }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn signal(signal: c_int, handler: Handler) -> Handler {
        set(signal, handler, libc::SA_RESTART)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn bsd_signal(signal: c_int, handler: Handler) -> Handler {
        set(signal, handler, libc::SA_RESTART)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn ssignal(signal: c_int, handler: Handler) -> Handler {
        set(signal, handler, libc::SA_RESTART)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn sysv_signal(signal: c_int, handler: Handler) -> Handler {
        set(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn __sysv_signal(signal: c_int, handler: Handler) -> Handler {
        set(signal, handler, libc::SA_RESETHAND | libc::SA_NODEFER)
    }
}
