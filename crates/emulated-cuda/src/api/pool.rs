//! Stream-ordered allocation and memory pools.

use std::ffi::{c_int, c_uint};
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::result::CUDA_ERROR_INVALID_VALUE;
use muxflow_abi::cuda::{CUdevice, CUdeviceptr, CUmemAccessDesc, CUmemLocation, CUmemPoolProps};

use crate::driver;
use crate::ffi::{Answer, Handle, In, Out, api, both, regardless};
use crate::graph::Task;
use crate::memory::{self, Range};
use crate::pool::{self, Pool, Value};
use crate::stream::{self, Stream};
use crate::work::Work;

fn allocate(
    out: Out<CUdeviceptr>,
    bytes: usize,
    pool: Option<Handle<Pool>>,
    it: &'static Stream,
) -> Answer {
    if !out.is_given() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let device = it.context.device;
    let pool = match pool {
        Some(pool) => pool,
        None => device.pools.current(device)?,
    };
    let address = pool.get()?.allocate(it.context, bytes as u64)?;
    if it.capturing.load(Ordering::Relaxed) {
        it.capture_task(Task::Allocate(address)).inspect_err(|_| {
            regardless(memory::free(address));
        })?;
        return out.put(address);
    }
    // The memory may be used from here on in the stream.
    it.submit(Work::Nothing)?;
    out.put(address)
}

fn free(address: CUdeviceptr, it: &'static Stream) -> Answer {
    memory::look(address, Range::is_device).filter(|d| *d).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if it.capturing.load(Ordering::Relaxed) {
        return it.capture_task(Task::Free(address));
    }
    it.submit(Work::Free(address)).map(drop)
}

fn located(location: In<CUmemLocation>) -> Answer<&'static driver::Device> {
    let location = location.get()?;
    if location.type_ == 1 { driver::device(location.id) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

both! {
    fn cuMemAllocAsync, cuMemAllocAsync_ptsz(which; out: Out<CUdeviceptr>, bytes: usize, handle: Handle<Stream>) {
        allocate(out, bytes, None, stream::resolve(handle, which)?)
    }
    fn cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz(which; out: Out<CUdeviceptr>, bytes: usize, pool: Handle<Pool>, handle: Handle<Stream>) {
        allocate(out, bytes, Some(pool), stream::resolve(handle, which)?)
    }
    fn cuMemFreeAsync, cuMemFreeAsync_ptsz(which; address: CUdeviceptr, handle: Handle<Stream>) {
        free(address, stream::resolve(handle, which)?)
    }
}

api! {
    fn cuMemPoolCreate(out: Out<Handle<Pool>>, properties: In<CUmemPoolProps>) {
        let p = properties.get()?;
        if !out.is_given() || p.location.type_ != 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(pool::create(driver::device(p.location.id)?, p.maxSize as u64)?)
    }
    fn cuMemPoolDestroy(handle: Handle<Pool>) {
        // The pool that a device has by itself goes with the device.
        let first = driver::devices()?.iter().any(|d| d.pools.is_first(handle));
        if first { Err(CUDA_ERROR_INVALID_VALUE) } else { pool::destroy(handle) }
    }
    fn cuMemPoolTrimTo(handle: Handle<Pool>, keep: usize) {
        handle.get()?.trim(keep as u64);
        Ok(())
    }
    fn cuMemPoolGetAttribute(handle: Handle<Pool>, number: c_uint, out: Out<u64>) {
        if !out.is_given() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        match handle.get()?.attribute(number)? {
            Value::Long(value) => out.put(value),
            Value::Int(value) => {
                // SAFETY: the caller promises room for an int.
                unsafe { out.raw().cast::<c_int>().write_unaligned(value) };
                Ok(())
            }
        }
    }
    fn cuMemPoolSetAttribute(handle: Handle<Pool>, number: c_uint, value: In<c_int>) {
        let int = value.get()?;
        let long = if (1..=3).contains(&number) {
            0
        } else {
            In::of_pointer(value.raw().cast::<u64>()).get()?
        };
        handle.get()?.set_attribute(number, int, long)
    }
    fn cuMemPoolSetAccess(handle: Handle<Pool>, _list: In<CUmemAccessDesc>, _count: usize) {
        handle.get().map(drop)
    }
    fn cuMemPoolGetAccess(out: Out<c_int>, handle: Handle<Pool>, _where: In<CUmemLocation>) {
        handle.get()?;
        out.put(3)
    }
    fn cuDeviceGetDefaultMemPool(out: Out<Handle<Pool>>, device: CUdevice) {
        let device = driver::device(device)?;
        out.put(device.pools.first(device)?)
    }
    fn cuDeviceGetMemPool(out: Out<Handle<Pool>>, device: CUdevice) {
        let device = driver::device(device)?;
        out.put(device.pools.current(device)?)
    }
    fn cuDeviceSetMemPool(device: CUdevice, handle: Handle<Pool>) {
        let device = driver::device(device)?;
        handle.get()?;
        device.pools.set_current(handle);
        Ok(())
    }
    fn cuMemGetDefaultMemPool(out: Out<Handle<Pool>>, location: In<CUmemLocation>, _kind: c_int) {
        let device = located(location)?;
        out.put(device.pools.first(device)?)
    }
    fn cuMemGetMemPool(out: Out<Handle<Pool>>, location: In<CUmemLocation>, _kind: c_int) {
        let device = located(location)?;
        out.put(device.pools.current(device)?)
    }
    fn cuMemSetMemPool(location: In<CUmemLocation>, _kind: c_int, handle: Handle<Pool>) {
        handle.get()?;
        located(location)?.pools.set_current(handle);
        Ok(())
    }
}
