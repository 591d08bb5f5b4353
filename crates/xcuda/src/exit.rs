//! The ways out: `exit`, `_exit`, a fatal signal. Contexts are released on each of them, and the
//! wait status stays what it would have been.

use core::ffi::c_int;

use crate::{signal, sys, worker};

/// Ends the process by a signal's default action; never returns if that action is to terminate.
pub(crate) fn by_signal(signal: c_int) {
    worker::publish();
    signal::default_action(signal);
}

/// As [`by_signal`], for a process that may not go on: by SIGKILL if it is still there, or with a code
/// where no signal can end it (the first process of an id namespace).
pub(crate) fn by_force(signal: c_int) -> ! {
    const PATIENCE_NS: u64 = 500_000_000;
    by_signal(signal);
    sys::sleep_ns(PATIENCE_NS);
    sys::kill_self(libc::SIGKILL);
    sys::sleep_ns(PATIENCE_NS);
    sys::exit_group(128 + signal)
}

#[cfg(all(panic = "abort", not(test)))]
mod export {
    use core::ffi::{CStr, c_int, c_void};

    use crate::{elf, sys, worker};

    type Exit = unsafe extern "C" fn(c_int) -> !;

    fn real(name: &CStr, status: c_int) -> ! {
        let function = elf::libc_function(name);
        if function.is_null() {
            sys::exit_group(status);
        }
        // SAFETY: the address is glibc's function of that name.
        unsafe { core::mem::transmute::<*const c_void, Exit>(function)(status) }
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn exit(status: c_int) -> ! {
        worker::settle();
        real(c"exit", status)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn quick_exit(status: c_int) -> ! {
        worker::finish();
        real(c"quick_exit", status)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn _exit(status: c_int) -> ! {
        worker::finish();
        sys::exit_group(status)
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn _Exit(status: c_int) -> ! {
        worker::finish();
        sys::exit_group(status)
    }

    /// After the program's own exit handlers: the last chance to release.
    extern "C" fn at_end() {
        worker::finish();
    }

    #[used]
    #[unsafe(link_section = ".fini_array")]
    static AT_END: extern "C" fn() = at_end;
}
