//! The contexts that this process has: each is charged as far as the agent knows what one costs,
//! and all are released before the process ends.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use muxflow_abi::cuda::result::CUDA_SUCCESS;
use muxflow_abi::cuda::{CUcontext, CUdevice, CUgreenCtx, CUresult};

use crate::hook::peek;
use crate::quota::{self, HELD, Kind, key};
use crate::{capture, flight, process, sys, worker};

const CONTEXTS: usize = 64;

/// Contexts made by the program (not primary ones), and the process that made them.
static MADE: [AtomicUsize; CONTEXTS] = [const { AtomicUsize::new(0) }; CONTEXTS];
/// How often each device's primary context was retained.
static PRIMARY: [AtomicU64; 64] = [const { AtomicU64::new(0) }; 64];
/// The process that this list is of: a forked child has none of these contexts.
static OWNER: AtomicU64 = AtomicU64::new(0);

/// Forgets the parent's contexts in a forked child.
fn check_owner() {
    let me = u64::from(sys::pid());
    if OWNER.swap(me, Ordering::AcqRel) != me {
        for made in &MADE {
            made.store(0, Ordering::Relaxed);
        }
        for retained in &PRIMARY {
            retained.store(0, Ordering::Relaxed);
        }
    }
}

/// Whether this process has any context.
pub(crate) fn any() -> bool {
    OWNER.load(Ordering::Acquire) == u64::from(sys::pid())
        && (MADE.iter().any(|made| made.load(Ordering::Relaxed) != 0)
            || PRIMARY.iter().any(|retained| retained.load(Ordering::Relaxed) != 0))
}

/// What one context costs, by the agent's settings.
fn charge(device: usize) -> Result<u64, CUresult> {
    match process::settings().context_bytes {
        0 => Ok(0),
        bytes => quota::charge(device, bytes),
    }
}

/// Makes a context by `call`, charges it and remembers it.
fn create(device: CUdevice, out: *mut CUcontext, call: impl FnOnce() -> CUresult) -> CUresult {
    check_owner();
    worker::ensure();
    let place = quota::place(device);
    let charged = match charge(place) {
        Ok(charged) => charged,
        Err(refused) => return refused,
    };
    let result = call();
    match peek(out.cast_const()) {
        Some(context) if result == CUDA_SUCCESS => {
            quota::hold(Kind::Context, context as u64, place, charged);
            HELD.remove(key(Kind::ContextUses, context as u64));
            HELD.insert(key(Kind::ContextUses, context as u64), 1);
            for made in &MADE {
                let fresh = context as usize;
                if made.compare_exchange(0, fresh, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                    break;
                }
            }
        }
        _ => quota::uncharge(place, charged),
    }
    result
}

/// A context is gone, with everything in it.
fn destroyed(context: CUcontext) {
    for made in &MADE {
        let old = context as usize;
        if made.compare_exchange(old, 0, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            break;
        }
    }
    HELD.remove(key(Kind::ContextUses, context as u64));
    let device = quota::device_of(Kind::Context, context as u64);
    quota::let_go(Kind::Context, context as u64);
    flight::context_lost();
    if let Some(device) = device {
        forget_if_last(device);
    }
}

/// One less that a program is attached to: the last one's end is the context's.
fn detached(context: CUcontext) {
    let one_less = 1_u64.wrapping_neg();
    if matches!(HELD.add(key(Kind::ContextUses, context as u64), one_less), Some(0)) {
        destroyed(context);
    }
}

/// Gives back all that lies on a device, if no context of this process is left there. As long as one
/// is, what the others held is not told apart from what it holds, and stays charged.
fn forget_if_last(device: usize) {
    let made = MADE.iter().map(|made| made.load(Ordering::Acquire) as u64);
    let mut made = made.filter(|&context| context != 0);
    let primary = PRIMARY.iter().zip(0..).any(|(retained, ordinal)| {
        retained.load(Ordering::Acquire) != 0 && quota::place(ordinal) == device
    });
    if !primary && !made.any(|at| quota::device_of(Kind::Context, at) == Some(device)) {
        quota::forget_device(device);
    }
}

/// The primary context of a device is gone, if this was the last to hold it.
fn primary_released(device: CUdevice, all: bool) {
    let Some(retained) = usize::try_from(device).ok().and_then(|at| PRIMARY.get(at)) else {
        return;
    };
    let before = retained.load(Ordering::Acquire);
    if before == 0 {
        return;
    }
    let left = if all { 0 } else { before - 1 };
    retained.store(left, Ordering::Release);
    if left == 0 {
        let place = quota::place(device);
        quota::let_go(Kind::Context, primary_key(device));
        flight::context_lost();
        forget_if_last(place);
    }
}

/// Stands for a primary context among the charged handles.
fn primary_key(device: CUdevice) -> u64 {
    u64::from(device.cast_unsigned()) + 1
}

/// Waits until no context of this process has work; called by the worker's hands only.
pub(crate) fn synchronise_all() {
    if capture::any() {
        // To wait for a context would break every capture in it.
        flight::synchronise_streams(worker::drain_limit_ns());
        return;
    }
    each(|context| {
        if driver!(cuCtxPushCurrent_v2(context => CUcontext)) == CUDA_SUCCESS {
            driver!(cuCtxSynchronize());
            let mut popped: CUcontext = core::ptr::null_mut();
            let place = &raw mut popped;
            driver!(cuCtxPopCurrent_v2(place => *mut CUcontext));
        }
    });
}

/// Shows every context, primary ones included.
fn each(mut visit: impl FnMut(CUcontext)) {
    for made in &MADE {
        let context = made.load(Ordering::Acquire);
        if context != 0 {
            visit(context as CUcontext);
        }
    }
    for (device, retained) in PRIMARY.iter().enumerate() {
        if retained.load(Ordering::Acquire) == 0 {
            continue;
        }
        let Ok(device) = c_int::try_from(device) else { continue };
        let mut context: CUcontext = core::ptr::null_mut();
        let place = &raw mut context;
        let got = driver!(cuDevicePrimaryCtxRetain(place => *mut CUcontext, device => CUdevice));
        if got == CUDA_SUCCESS {
            visit(context);
            driver!(cuDevicePrimaryCtxRelease_v2(device => CUdevice));
        }
    }
}

/// Destroys every context, and with it all that lay in it; called by the worker's hands only.
pub(crate) fn release_all() {
    HELD.drain(
        |key, _| key >> 56 == Kind::Green as u64,
        |key, _| {
            let green = (key & 0x00ff_ffff_ffff_ffff) as usize as CUgreenCtx;
            driver!(cuGreenCtxDestroy(green => CUgreenCtx));
        },
    );
    for made in &MADE {
        let context = made.swap(0, Ordering::AcqRel) as CUcontext;
        if !context.is_null() {
            driver!(cuCtxDestroy_v2(context => CUcontext));
            destroyed(context);
        }
    }
    for (device, retained) in PRIMARY.iter().enumerate() {
        if retained.load(Ordering::Acquire) != 0 {
            let Ok(device) = c_int::try_from(device) else { continue };
            driver!(cuDevicePrimaryCtxReset_v2(device => CUdevice));
            primary_released(device, true);
        }
    }
}

/// Makes the use of a primary context by `call` known, and charges the first.
fn retain(device: CUdevice, call: impl FnOnce() -> CUresult) -> CUresult {
    check_owner();
    worker::ensure();
    let place = quota::place(device);
    let first = !quota::holds(Kind::Context, primary_key(device));
    let charged = match first.then(|| charge(place)) {
        Some(Err(refused)) => return refused,
        Some(Ok(charged)) => charged,
        None => 0,
    };
    let result = call();
    if result != CUDA_SUCCESS {
        quota::uncharge(place, charged);
        return result;
    }
    if first {
        quota::hold(Kind::Context, primary_key(device), place, charged);
    }
    if let Some(retained) = usize::try_from(device).ok().and_then(|at| PRIMARY.get(at)) {
        retained.fetch_add(1, Ordering::AcqRel);
    }
    result
}

hooks! {
    fn cuInit(flags: c_uint) |real| {
        let result = real(flags);
        if result == CUDA_SUCCESS {
            // Registers early: the agent stops GPU processes that it does not know.
            let _known = process::control();
        }
        result
    }

    fn cuCtxCreate | cuCtxCreate_v2(out: *mut CUcontext, flags: c_uint, device: CUdevice) |real| {
        create(device, out, || real(out, flags, device))
    }

    fn cuCtxCreate_v3(
        out: *mut CUcontext,
        affinity: *mut c_void,
        count: c_int,
        flags: c_uint,
        device: CUdevice,
    ) |real| {
        create(device, out, || real(out, affinity, count, flags, device))
    }

    fn cuCtxCreate_v4(
        out: *mut CUcontext,
        parameters: *mut c_void,
        flags: c_uint,
        device: CUdevice,
    ) |real| {
        create(device, out, || real(out, parameters, flags, device))
    }

    fn cuCtxDestroy | cuCtxDestroy_v2(context: CUcontext) |real| {
        let result = real(context);
        if result == CUDA_SUCCESS {
            destroyed(context);
        }
        result
    }

    fn cuCtxAttach(out: *mut CUcontext, flags: c_uint) |real| {
        let result = real(out, flags);
        if let (CUDA_SUCCESS, Some(context)) = (result, peek(out.cast_const())) {
            HELD.add(key(Kind::ContextUses, context as u64), 1);
        }
        result
    }

    fn cuCtxDetach(context: CUcontext) |real| {
        let result = real(context);
        if result == CUDA_SUCCESS {
            detached(context);
        }
        result
    }

    fn cuDevicePrimaryCtxRetain(out: *mut CUcontext, device: CUdevice) |real| {
        retain(device, || real(out, device))
    }

    fn cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2(device: CUdevice) |real| {
        let result = real(device);
        if result == CUDA_SUCCESS {
            primary_released(device, false);
        }
        result
    }

    fn cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2(device: CUdevice) |real| {
        let result = real(device);
        if result == CUDA_SUCCESS {
            primary_released(device, true);
        }
        result
    }

    fn cuGreenCtxCreate(
        out: *mut CUgreenCtx,
        resources: *mut c_void,
        device: CUdevice,
        flags: c_uint,
    ) |real| {
        // Lives inside the device's primary context, which it keeps.
        let result = retain(device, || real(out, resources, device, flags));
        if let (CUDA_SUCCESS, Some(green)) = (result, peek(out.cast_const())) {
            let ordinal = u64::from(device.cast_unsigned());
            HELD.insert(key(Kind::Green, green as u64), ordinal + 1);
        }
        result
    }

    fn cuGreenCtxDestroy(green: CUgreenCtx) |real| {
        let result = real(green);
        if result == CUDA_SUCCESS
            && let Some(device) = HELD.remove(key(Kind::Green, green as u64))
            && let Ok(device) = CUdevice::try_from(device - 1)
        {
            primary_released(device, false);
        }
        result
    }
}
