//! A thread for each device that runs host functions, and the work that waits behind them.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use muxflow_emulated_gpu::client::Gpu;
use muxflow_emulated_gpu::sys;

use crate::stream::Stream;

struct Executor {
    gpu: &'static Gpu,
    streams: Vec<&'static Stream>,
}

static EXECUTORS: Mutex<Vec<Executor>> = Mutex::new(Vec::new());

/// A stream has work that waits for the host.
pub(crate) fn add(stream: &'static Stream) {
    let mut all = EXECUTORS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(executor) = all.iter_mut().find(|e| std::ptr::eq(e.gpu, stream.gpu)) {
        if !executor.streams.iter().any(|s| std::ptr::eq(*s, stream)) {
            executor.streams.push(stream);
        }
        return;
    }
    all.push(Executor { gpu: stream.gpu, streams: vec![stream] });
    let gpu = stream.gpu;
    let named = std::thread::Builder::new().name("cuda-host".to_owned());
    // Signals are for the program's own threads.
    let started = named.spawn(move || {
        block_signals();
        run(gpu);
    });
    drop(started);
}

fn block_signals() {
    // SAFETY: fills a set and gives it to this thread only.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, std::ptr::null_mut());
    }
}

/// Something changed: look again; the device too when it waits for the host.
pub(crate) fn poke(gpu: &Gpu, device_too: bool) {
    gpu.ring_host_bell();
    if device_too {
        gpu.nudge();
    }
}

fn run(gpu: &'static Gpu) {
    sys::exact_timers();
    loop {
        let (bell, value) = gpu.host_bell();
        let streams: Vec<&'static Stream> = {
            let all = EXECUTORS.lock().unwrap_or_else(PoisonError::into_inner);
            let mine = all.iter().find(|e| std::ptr::eq(e.gpu, gpu));
            mine.map(|e| e.streams.clone()).unwrap_or_default()
        };
        let mut poll = false;
        for stream in streams {
            stream.work_off();
            poll |= stream.must_poll();
            if stream.write_due() {
                // The device may have looked before the last of them came.
                gpu.nudge();
            }
        }
        // Who adds work does so before it calls `add`: an empty stream can be left out safely.
        let mut all = EXECUTORS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mine) = all.iter_mut().find(|e| std::ptr::eq(e.gpu, gpu)) {
            mine.streams.retain(|s| !s.is_worked_off());
        }
        drop(all);
        let timeout = if poll { Duration::from_micros(200) } else { Duration::from_secs(3600) };
        sys::futex_wait(bell, value, Some(timeout));
    }
}
