//! `cuCtx*` and `cuDevicePrimaryCtx*`.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::CUdevice;
use muxflow_abi::cuda::result::{
    CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    CUDA_ERROR_UNSUPPORTED_LIMIT,
};

use crate::capture;
use crate::context::{self, Context, lock};
use crate::driver;
use crate::event::Event;
use crate::ffi::{Answer, Handle, In, Out, api};
use crate::stream::{self, Stream};

/// Makes a context and puts it on the stack.
fn create(out: Out<Handle<Context>>, flags: c_uint, device: CUdevice, sms: Option<u32>) -> Answer {
    let device = driver::device(device)?;
    if !out.is_given() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let sms = sms.map_or(device.sms, |s| s.clamp(1, device.sms));
    let handle = context::create(device, flags, false, sms)?;
    context::push(handle);
    out.put(handle)
}

/// The SM count of an execution affinity list: kind 0, then the number.
fn affinity(list: In<[u32; 2]>, count: c_int) -> Answer<Option<u32>> {
    let count = usize::try_from(count).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if count == 0 || !list.is_given() {
        return Ok(None);
    }
    let [kind, sms] = list.get()?;
    if kind == 0 { Ok(Some(sms)) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

fn destroy(handle: Handle<Context>) -> Answer {
    let it = handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
    if it.primary {
        return Err(CUDA_ERROR_INVALID_CONTEXT);
    }
    context::forget(handle);
    context::end(handle.destroy()?);
    Ok(())
}

fn synchronize(it: &'static Context) -> Answer {
    capture::unsafe_call()?;
    // A stream that is being captured refuses, and its capture is spoiled.
    stream::of_context(it).into_iter().try_for_each(Stream::synchronize)?;
    stream::give_places_back();
    Ok(())
}

api! {
    fn cuCtxCreate_v2(out: Out<Handle<Context>>, flags: c_uint, device: CUdevice) {
        create(out, flags, device, None)
    }
    fn cuCtxCreate(out: Out<Handle<Context>>, flags: c_uint, device: CUdevice) {
        create(out, flags, device, None)
    }
    fn cuCtxCreate_v3(out: Out<Handle<Context>>, list: In<[u32; 2]>, count: c_int, flags: c_uint, device: CUdevice) {
        create(out, flags, device, affinity(list, count)?)
    }
    fn cuCtxCreate_v4(out: Out<Handle<Context>>, params: In<[usize; 2]>, flags: c_uint, device: CUdevice) {
        // The structure begins with a pointer to the affinity list and its length.
        let sms = if params.is_given() {
            let [list, count] = params.get()?;
            // SAFETY: the type is a transparent pointer, and the caller's structure holds one.
            let list = unsafe { std::mem::transmute::<usize, In<[u32; 2]>>(list) };
            affinity(list, count as c_int)?
        } else {
            None
        };
        create(out, flags, device, sms)
    }
    fn cuCtxDestroy_v2(handle: Handle<Context>) { destroy(handle) }
    fn cuCtxDestroy(handle: Handle<Context>) { destroy(handle) }
    fn cuCtxAttach(out: Out<Handle<Context>>, _flags: c_uint) {
        let it = context::current()?;
        out.put(context::current_handle())?;
        it.attached.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn cuCtxDetach(handle: Handle<Context>) {
        let it = handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        let last = it.attached.fetch_sub(1, Ordering::Relaxed) <= 1;
        if it.primary || !last { Ok(()) } else { destroy(handle) }
    }
    fn cuCtxPushCurrent_v2(handle: Handle<Context>) {
        handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        context::push(handle);
        Ok(())
    }
    fn cuCtxPushCurrent(handle: Handle<Context>) {
        handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        context::push(handle);
        Ok(())
    }
    fn cuCtxPopCurrent_v2(out: Out<Handle<Context>>) {
        let handle = context::pop()?;
        out.offer(handle);
        Ok(())
    }
    fn cuCtxPopCurrent(out: Out<Handle<Context>>) {
        let handle = context::pop()?;
        out.offer(handle);
        Ok(())
    }
    fn cuCtxSetCurrent(handle: Handle<Context>) {
        driver::devices()?;
        if handle.number() != 0 {
            handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        }
        context::set_current(handle);
        Ok(())
    }
    fn cuCtxGetCurrent(out: Out<Handle<Context>>) {
        driver::devices()?;
        out.put(context::current_handle())
    }
    fn cuCtxGetDevice(out: Out<CUdevice>) {
        out.put(context::current()?.device.ordinal)
    }
    fn cuCtxGetDevice_v2(out: Out<CUdevice>, handle: Handle<Context>) {
        out.put(context::given_or_current(handle)?.device.ordinal)
    }
    fn cuCtxGetFlags(out: Out<c_uint>) {
        out.put(context::current()?.flags.load(Ordering::Relaxed))
    }
    fn cuCtxSetFlags(flags: c_uint) {
        context::current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }
    fn cuCtxGetId(handle: Handle<Context>, id: Out<u64>) {
        id.put(context::given_or_current(handle)?.id)
    }
    fn cuCtxSynchronize() { synchronize(context::current()?) }
    fn cuCtxSynchronize_v2(handle: Handle<Context>) {
        synchronize(context::given_or_current(handle)?)
    }
    fn cuCtxSetLimit(limit: c_uint, value: usize) {
        let it = context::current()?;
        let mut limits = lock(&it.limits);
        let place = limits.get_mut(limit as usize).ok_or(CUDA_ERROR_UNSUPPORTED_LIMIT)?;
        *place = value;
        Ok(())
    }
    fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) {
        let it = context::current()?;
        let found = lock(&it.limits).get(limit as usize).copied();
        value.put(found.ok_or(CUDA_ERROR_UNSUPPORTED_LIMIT)?)
    }
    fn cuCtxGetCacheConfig(out: Out<c_uint>) {
        out.put(context::current()?.cache_config.load(Ordering::Relaxed))
    }
    fn cuCtxSetCacheConfig(config: c_uint) {
        context::current()?.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    }
    fn cuCtxGetSharedMemConfig(out: Out<c_uint>) {
        out.put(context::current()?.shared_config.load(Ordering::Relaxed))
    }
    fn cuCtxSetSharedMemConfig(config: c_uint) {
        context::current()?.shared_config.store(config, Ordering::Relaxed);
        Ok(())
    }
    fn cuCtxGetApiVersion(handle: Handle<Context>, version: Out<c_uint>) {
        context::given_or_current(handle)?;
        version.put(3020)
    }
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        context::current()?;
        least.offer(0);
        greatest.offer(-5);
        Ok(())
    }
    fn cuCtxResetPersistingL2Cache() { context::current().map(drop) }
    fn cuCtxGetExecAffinity(out: Out<[u32; 2]>, kind: c_uint) {
        let it = context::current()?;
        if kind != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put([0, it.sms])
    }
    fn cuCtxEnablePeerAccess(handle: Handle<Context>, flags: c_uint) {
        let it = context::current()?;
        let peer = handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        if std::ptr::eq(it, peer) {
            return Err(CUDA_ERROR_INVALID_CONTEXT);
        }
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if it.device.index == peer.device.index {
            return Err(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
        }
        let new = lock(&it.peers).insert(peer.id);
        if new { Ok(()) } else { Err(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) }
    }
    fn cuCtxDisablePeerAccess(handle: Handle<Context>) {
        let it = context::current()?;
        let peer = handle.get().map_err(|_| CUDA_ERROR_INVALID_CONTEXT)?;
        let was = lock(&it.peers).remove(&peer.id);
        if was { Ok(()) } else { Err(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED) }
    }
    fn cuCtxRecordEvent(handle: Handle<Context>, event: Handle<Event>) {
        event.get()?.record(stream::legacy(context::given_or_current(handle)?)?)
    }
    fn cuCtxWaitEvent(handle: Handle<Context>, event: Handle<Event>) {
        event.get()?.hold(stream::legacy(context::given_or_current(handle)?)?)
    }
    fn cuDevicePrimaryCtxRetain(out: Out<Handle<Context>>, device: CUdevice) {
        let device = driver::device(device)?;
        if !out.is_given() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(device.primary.retain(device)?)
    }
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) {
        driver::device(device)?.primary.release()
    }
    fn cuDevicePrimaryCtxRelease(device: CUdevice) {
        driver::device(device)?.primary.release()
    }
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) {
        driver::device(device)?.primary.reset();
        Ok(())
    }
    fn cuDevicePrimaryCtxReset(device: CUdevice) {
        driver::device(device)?.primary.reset();
        Ok(())
    }
    fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) {
        driver::device(device)?.primary.set_flags(flags)
    }
    fn cuDevicePrimaryCtxSetFlags(device: CUdevice, flags: c_uint) {
        driver::device(device)?.primary.set_flags(flags)
    }
    fn cuDevicePrimaryCtxGetState(device: CUdevice, flags: Out<c_uint>, active: Out<c_int>) {
        let (now, used) = driver::device(device)?.primary.state();
        flags.offer(now);
        active.offer(c_int::from(used));
        Ok(())
    }
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) {
        mode.put(capture::exchange_mode(mode.get()?)?)
    }
    fn cuFlushGPUDirectRDMAWrites(_target: c_int, _scope: c_int) { Ok(()) }
    fn cuCtxGetDevResource(_handle: Handle<Context>, _resource: Out<c_void>, _kind: c_int) {
        Err(muxflow_abi::cuda::result::CUDA_ERROR_NOT_SUPPORTED)
    }
}
