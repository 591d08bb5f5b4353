//! Allocation, host memory, and questions about pointers.

use std::ffi::{c_int, c_uint, c_void};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_FOUND,
};
use muxflow_abi::cuda::{CUdevice, CUdeviceptr, CUmemLocation};

use crate::capture;
use crate::context;
use crate::ffi::{Answer, Handle, In, Out, api, both};
use crate::memory::{self, Nature, Range};
use crate::stream::{self, Stream};

/// An old 32-bit size or address.
fn narrow(value: u64) -> Answer<u32> {
    u32::try_from(value).map_err(|_| CUDA_ERROR_INVALID_VALUE)
}

fn free(address: CUdeviceptr) -> Answer {
    let it = context::current()?;
    if address == 0 {
        return Ok(());
    }
    capture::unsafe_call()?;
    if memory::look(address, |r| matches!(r.nature, Nature::Module)) == Some(true) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // Freeing waits for what may still use it, as the real call does.
    for stream in stream::of_context(it) {
        if !stream.capturing.load(std::sync::atomic::Ordering::Relaxed) {
            stream.synchronize()?;
        }
    }
    memory::free(address)
}

fn pitched(
    out: Out<CUdeviceptr>,
    pitch: Out<usize>,
    width: usize,
    height: usize,
    element: c_uint,
) -> Answer {
    let it = context::current()?;
    capture::unsafe_call()?;
    if !matches!(element, 4 | 8 | 16) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let row = width.checked_next_multiple_of(512).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let bytes = row.checked_mul(height).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if !out.is_given() || !pitch.is_given() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    out.put(memory::allocate(it, bytes as u64, Nature::Device, 0)?)?;
    pitch.put(row)
}

fn host_alloc(out: Out<*mut c_void>, bytes: usize, flags: c_uint) -> Answer {
    let it = context::current()?;
    capture::unsafe_call()?;
    if !out.is_given() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    out.put(memory::allocate_host(it, bytes, flags)? as *mut c_void)
}

fn register(address: u64, bytes: usize, flags: c_uint) -> Answer {
    let it = context::current()?;
    let end = address.checked_add(bytes as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if address == 0 || bytes == 0 || flags > 0xf {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if memory::overlaps(address, end) {
        return Err(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    }
    let handle = context::current_handle();
    memory::insert(it, handle, address, bytes as u64, Nature::Registered, flags);
    Ok(())
}

/// One attribute of a pointer, as bytes to be copied out.
fn attribute(number: c_uint, address: u64) -> Answer<Vec<u8>> {
    let from = |r: &Range| -> Option<Vec<u8>> {
        Some(match number {
            1 => (r.context.number() as u64).to_le_bytes().to_vec(),
            2 => (if r.is_device() { 2_u32 } else { 1 }).to_le_bytes().to_vec(),
            3 | 4 => address.to_le_bytes().to_vec(),
            6 => vec![u8::from(r.sync_memops)],
            7 => r.id.to_le_bytes().to_vec(),
            8 => u32::from(matches!(r.nature, Nature::Managed)).to_le_bytes().to_vec(),
            9 => r.ordinal.to_le_bytes().to_vec(),
            10 => vec![u8::from(matches!(r.nature, Nature::Device))],
            11 => r.start.to_le_bytes().to_vec(),
            12 => r.bytes.to_le_bytes().to_vec(),
            13 => vec![1],
            14 => 0_u64.to_le_bytes().to_vec(),
            15 => 3_u32.to_le_bytes().to_vec(),
            16 | 18..=20 => 0_u64.to_le_bytes().to_vec(),
            17 => 0_u64.to_le_bytes().to_vec(),
            _ => return None,
        })
    };
    memory::look(address, from).flatten().ok_or(CUDA_ERROR_INVALID_VALUE)
}

fn put_bytes(out: *mut c_void, bytes: &[u8]) {
    // SAFETY: the caller promises room for the attribute's type, which is as long as the bytes.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), bytes.len()) };
}

fn info() -> Answer<[u64; 3]> {
    context::current()?.gpu.memory_info()
}

api! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let [now, all, _] = info()?;
        free.offer(now as usize);
        total.offer(all as usize);
        Ok(())
    }
    fn cuMemGetInfo(free: Out<c_uint>, total: Out<c_uint>) {
        let [now, all, _] = info()?;
        free.offer(now.min(u64::from(u32::MAX)) as c_uint);
        total.offer(all.min(u64::from(u32::MAX)) as c_uint);
        Ok(())
    }
    fn cuMemAlloc_v2(out: Out<CUdeviceptr>, bytes: usize) {
        let it = context::current()?;
        capture::unsafe_call()?;
        if !out.is_given() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(memory::allocate(it, bytes as u64, Nature::Device, 0)?)
    }
    fn cuMemAllocPitch_v2(out: Out<CUdeviceptr>, pitch: Out<usize>, width: usize, height: usize, element: c_uint) {
        pitched(out, pitch, width, height, element)
    }
    fn cuMemAllocManaged(out: Out<CUdeviceptr>, bytes: usize, flags: c_uint) {
        let it = context::current()?;
        capture::unsafe_call()?;
        // Global or for the host; a single stream is chosen later.
        if !out.is_given() || !matches!(flags, 1 | 2) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(memory::allocate(it, bytes as u64, Nature::Managed, flags)?)
    }
    fn cuMemFree_v2(address: CUdeviceptr) { free(address) }
    fn cuMemFree(address: c_uint) { free(address.into()) }
    fn cuMemGetAddressRange_v2(base: Out<CUdeviceptr>, bytes: Out<usize>, address: CUdeviceptr) {
        let (start, size) = memory::look(address, |r| (r.start, r.bytes)).ok_or(CUDA_ERROR_NOT_FOUND)?;
        base.offer(start);
        bytes.offer(size as usize);
        Ok(())
    }
    fn cuMemAllocHost_v2(out: Out<*mut c_void>, bytes: usize) { host_alloc(out, bytes, 0) }
    fn cuMemAllocHost(out: Out<*mut c_void>, bytes: c_uint) { host_alloc(out, bytes as usize, 0) }
    fn cuMemHostAlloc(out: Out<*mut c_void>, bytes: usize, flags: c_uint) {
        host_alloc(out, bytes, flags)
    }
    fn cuMemFreeHost(address: u64) {
        context::current()?;
        capture::unsafe_call()?;
        memory::free_host(address)
    }
    fn cuMemHostRegister_v2(address: u64, bytes: usize, flags: c_uint) {
        register(address, bytes, flags)
    }
    fn cuMemHostRegister(address: u64, bytes: usize, flags: c_uint) {
        register(address, bytes, flags)
    }
    fn cuMemHostUnregister(address: u64) {
        context::current()?;
        let found = memory::remove(address, |r| matches!(r.nature, Nature::Registered));
        found.map(drop).ok_or(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
    }
    fn cuMemHostGetDevicePointer_v2(out: Out<CUdeviceptr>, address: u64, _flags: c_uint) {
        context::current()?;
        memory::look(address, |_| ()).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        out.put(address)
    }
    fn cuMemHostGetDevicePointer(out: Out<c_uint>, address: u64, _flags: c_uint) {
        out.put(narrow(address)?)
    }
    fn cuMemHostGetFlags(flags: Out<c_uint>, address: u64) {
        context::current()?;
        let host = |r: &Range| (!r.is_device()).then_some(r.flags);
        flags.put(memory::look(address, host).flatten().ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuPointerGetAttribute(out: Out<c_void>, number: c_uint, address: CUdeviceptr) {
        if !out.is_given() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        put_bytes(out.raw(), &attribute(number, address)?);
        Ok(())
    }
    fn cuPointerGetAttributes(count: c_uint, numbers: In<c_uint>, out: In<*mut c_void>, address: CUdeviceptr) {
        for i in 0..count as usize {
            let (number, place) = (numbers.at(i)?, out.at(i)?);
            // Unknown pointers give zeros here, not an error.
            let wide = matches!(number, 1 | 3 | 4 | 7 | 11 | 12 | 14 | 16..=20);
            let zeros = vec![0; if wide { 8 } else { 4 }];
            let narrow = matches!(number, 6 | 10 | 13);
            let none = if narrow { vec![0] } else { zeros };
            put_bytes(place, &attribute(number, address).unwrap_or(none));
        }
        Ok(())
    }
    fn cuPointerSetAttribute(value: In<u32>, number: c_uint, address: CUdeviceptr) {
        if number != 6 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let on = value.get()? != 0;
        if memory::change(address, |r| r.sync_memops = on) { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
    fn cuMemAdvise(address: CUdeviceptr, bytes: usize, _advice: c_int, _device: CUdevice) {
        memory::check_device(address, bytes)
    }
    fn cuMemAdvise_v2(address: CUdeviceptr, bytes: usize, _advice: c_int, _where: CUmemLocation) {
        memory::check_device(address, bytes)
    }
    fn cuMemRangeGetAttribute(out: Out<i32>, size: usize, attribute: c_int, address: CUdeviceptr, bytes: usize) {
        memory::check_device(address, bytes)?;
        let ordinal = memory::look(address, |r| r.ordinal).unwrap_or(0);
        for i in 0..size / 4 {
            out.put_at(i, if attribute == 1 { 0 } else { ordinal });
        }
        Ok(())
    }
}

both! {
    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz(which; address: CUdeviceptr, bytes: usize, _device: CUdevice, handle: Handle<Stream>) {
        memory::check_device(address, bytes)?;
        stream::resolve(handle, which)?.submit(crate::work::Work::Nothing).map(drop)
    }
    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz(which; address: CUdeviceptr, bytes: usize, _where: CUmemLocation, _flags: c_uint, handle: Handle<Stream>) {
        memory::check_device(address, bytes)?;
        stream::resolve(handle, which)?.submit(crate::work::Work::Nothing).map(drop)
    }
    fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, bytes: usize, flags: c_uint) {
        let whole = |r: &Range| {
            let of_it = r.start == address && (bytes == 0 || bytes as u64 == r.bytes);
            matches!(r.nature, Nature::Managed) && of_it
        };
        // All of a managed range, to all, to the host, or to one stream that is not the default one.
        let single_default = flags == 4 && handle.number() == 0;
        if memory::look(address, whole) != Some(true) || !matches!(flags, 1 | 2 | 4) || single_default {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        stream::resolve(handle, which)?.submit(crate::work::Work::Nothing).map(drop)
    }
}
