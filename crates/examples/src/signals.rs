//! Signals as flags that a loop can look at.

use std::sync::atomic::{AtomicBool, Ordering};

static STOP: AtomicBool = AtomicBool::new(false);
static SAVE: AtomicBool = AtomicBool::new(false);

extern "C" fn note(signal: i32) {
    if signal == libc::SIGUSR1 { &SAVE } else { &STOP }.store(true, Ordering::Relaxed);
}

/// SIGTERM and SIGINT ask to stop, SIGUSR1 to save.
pub fn watch() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGUSR1] {
        let handler: extern "C" fn(i32) = note;
        // SAFETY: the handler only stores into an atomic.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// Whether to stop.
pub fn stop_asked() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// Whether to save; asked once is answered once.
pub fn save_asked() -> bool {
    SAVE.swap(false, Ordering::Relaxed)
}
