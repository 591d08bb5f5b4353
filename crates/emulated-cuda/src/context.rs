//! Contexts: what a thread works in.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_NOT_INITIALIZED,
};
use muxflow_emulated_gpu::client::Gpu;

use crate::driver::{self, Device};
use crate::ffi::{Answer, Handle, Kind, regardless};
use crate::memory;
use crate::stream::{self, Stream};

/// A lock that a panic elsewhere does not spoil.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One context.
#[derive(Debug)]
pub(crate) struct Context {
    pub device: &'static Device,
    pub gpu: &'static Gpu,
    pub id: u64,
    pub flags: AtomicU32,
    pub primary: bool,
    pub alive: AtomicBool,
    /// How often it is attached; made counts as once.
    pub attached: AtomicU32,
    /// SMs that kernels of this context may use.
    pub sms: u32,
    /// Stack, printf, heap and further limits, by number.
    pub limits: Mutex<[usize; 8]>,
    pub cache_config: AtomicU32,
    pub shared_config: AtomicU32,
    /// All streams, the default one first when it was used.
    pub streams: Mutex<Vec<&'static Stream>>,
    pub legacy: OnceLock<&'static Stream>,
    /// Contexts whose memory it may use directly.
    pub peers: Mutex<BTreeSet<u64>>,
}

impl Kind for Context {
    const MAGIC: u64 = 0x0c0d_a001_c0de_0001;
}

thread_local! {
    static STACK: RefCell<Vec<Handle<Context>>> = const { RefCell::new(Vec::new()) };
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// The primary context of a device.
#[derive(Debug, Default)]
pub(crate) struct Primary(Mutex<PrimaryState>);

#[derive(Debug, Default)]
struct PrimaryState {
    uses: usize,
    handle: Option<Handle<Context>>,
    flags: u32,
}

/// Makes a context on a device.
pub(crate) fn create(
    device: &'static Device,
    flags: u32,
    primary: bool,
    sms: u32,
) -> Answer<Handle<Context>> {
    let gpu = device.gpu()?;
    fault(gpu)?;
    gpu.context(1)?;
    let stack = 1024;
    let limits = [stack, 1 << 20, 8 << 20, 2, 2048, 128, 0, 0];
    Ok(Handle::new(Context {
        device,
        gpu,
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        flags: AtomicU32::new(flags),
        primary,
        alive: AtomicBool::new(true),
        attached: AtomicU32::new(1),
        sms,
        limits: Mutex::new(limits),
        cache_config: AtomicU32::new(0),
        shared_config: AtomicU32::new(0),
        streams: Mutex::new(Vec::new()),
        legacy: OnceLock::new(),
        peers: Mutex::default(),
    }))
}

/// Ends a context: its work, its memory.
pub(crate) fn end(context: &'static Context) {
    if !context.alive.swap(false, Ordering::AcqRel) {
        return;
    }
    for stream in stream::take_all(context) {
        // What is still running ends before its memory goes.
        regardless(stream.synchronize());
        context.gpu.release(stream.lane);
    }
    memory::free_of_context(context);
    regardless(context.gpu.context(-1));
}

/// The error that a fault of the device left behind.
#[inline]
pub(crate) fn fault(gpu: &Gpu) -> Answer {
    match gpu.fault() {
        0 => Ok(()),
        error => Err(error),
    }
}

impl Primary {
    /// The context, made when it is the first use.
    pub(crate) fn retain(&self, device: &'static Device) -> Answer<Handle<Context>> {
        let mut state = lock(&self.0);
        if let Some(handle) = state.handle {
            state.uses += 1;
            return Ok(handle);
        }
        let handle = create(device, state.flags, true, device.sms)?;
        state.handle = Some(handle);
        state.uses = 1;
        Ok(handle)
    }

    pub(crate) fn release(&self) -> Answer {
        let mut state = lock(&self.0);
        if state.uses == 0 {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        state.uses -= 1;
        if state.uses == 0 {
            Primary::finish(&mut state);
        }
        Ok(())
    }

    pub(crate) fn reset(&self) {
        Primary::finish(&mut lock(&self.0));
    }

    fn finish(state: &mut PrimaryState) {
        if let Some(handle) = state.handle.take()
            && let Ok(context) = handle.destroy()
        {
            end(context);
        }
        state.uses = 0;
    }

    pub(crate) fn set_flags(&self, flags: u32) -> Answer {
        let mut state = lock(&self.0);
        if let Some(handle) = state.handle {
            handle.get()?.flags.store(flags, Ordering::Relaxed);
        }
        state.flags = flags;
        Ok(())
    }

    /// Flags, and whether it is in use.
    pub(crate) fn state(&self) -> (u32, bool) {
        let state = lock(&self.0);
        (state.flags, state.handle.is_some())
    }

    /// The context if it is there.
    pub(crate) fn present(&self) -> Option<Handle<Context>> {
        lock(&self.0).handle
    }
}

/// Handle of the current context, or null.
pub(crate) fn current_handle() -> Handle<Context> {
    STACK.with_borrow(|s| s.last().copied()).unwrap_or(Handle::null())
}

/// The current context; it must be alive and its device must be well.
#[inline]
pub(crate) fn current() -> Answer<&'static Context> {
    let handle = STACK.with_borrow(|s| s.last().copied());
    let Some(handle) = handle.filter(|h| h.number() != 0) else {
        driver::devices().map_err(|_| CUDA_ERROR_NOT_INITIALIZED)?;
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    };
    let context = handle.get().map_err(|_| CUDA_ERROR_CONTEXT_IS_DESTROYED)?;
    fault(context.gpu)?;
    Ok(context)
}

/// The context of a handle, or the current one for null.
pub(crate) fn given_or_current(handle: Handle<Context>) -> Answer<&'static Context> {
    if handle.number() == 0 {
        current()
    } else {
        handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)
    }
}

pub(crate) fn push(handle: Handle<Context>) {
    STACK.with_borrow_mut(|s| s.push(handle));
}

pub(crate) fn pop() -> Answer<Handle<Context>> {
    STACK.with_borrow_mut(Vec::pop).ok_or(CUDA_ERROR_INVALID_CONTEXT)
}

/// Puts a context in place of the top of the stack; null takes the top away.
pub(crate) fn set_current(handle: Handle<Context>) {
    STACK.with_borrow_mut(|s| {
        s.pop();
        if handle.number() != 0 {
            s.push(handle);
        }
    });
}

/// Takes an ended context off this thread's stack.
pub(crate) fn forget(handle: Handle<Context>) {
    STACK.with_borrow_mut(|s| {
        if s.last() == Some(&handle) {
            s.pop();
        }
    });
}
