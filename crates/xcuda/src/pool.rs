//! Stream-ordered memory: a pool counts by what it has reserved from the device, not by what is in
//! use, because that is what others cannot have.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU64, Ordering};

use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
use muxflow_abi::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CUdeviceptr, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};

use crate::capture;
use crate::hook::peek;
use crate::launch::per_thread;
use crate::map::Map;
use crate::quota::{self, HELD, Kind, key};

/// The number under which a pool is kept: the driver may give the handle of a destroyed pool to a new
/// one while memory of the old one is still in use.
static NUMBERS: Map = Map::new();
/// Pools that were destroyed so far: part of the numbers of those that come after.
static DESTROYED: AtomicU64 = AtomicU64::new(0);
/// By number: the pool's handle. A destroyed pool has none; nothing may be asked of it any more.
static HANDLES: Map = Map::new();
/// By number: what is charged for a pool that this process takes from, and on which device.
static POOLS: Map = Map::new();
/// By number: what is in use of it.
static USED: Map = Map::new();

/// The pool from which `cuMemAllocAsync` takes: the current one of the current device.
fn current_pool() -> CUmemoryPool {
    let mut device: c_int = 0;
    let mut pool: CUmemoryPool = core::ptr::null_mut();
    if driver!(cuCtxGetDevice(&raw mut device => *mut c_int)) != CUDA_SUCCESS {
        return pool;
    }
    let got = driver!(cuDeviceGetMemPool(&raw mut pool => *mut CUmemoryPool, device => c_int));
    if got == CUDA_SUCCESS { pool } else { core::ptr::null_mut() }
}

/// What the driver says that a pool holds; nothing when it does not say.
fn reserved(pool: CUmemoryPool) -> Option<u64> {
    let mut bytes = 0_u64;
    let value = (&raw mut bytes).cast::<c_void>();
    let attribute = CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
    let asked = driver!(cuMemPoolGetAttribute(
        pool => CUmemoryPool,
        attribute => c_int,
        value => *mut c_void,
    ));
    (asked == CUDA_SUCCESS).then_some(bytes)
}

/// Makes a pool known, charged with nothing so far; gives its number.
fn track(pool: CUmemoryPool, device: usize) -> u64 {
    if let Some(number) = NUMBERS.get(pool as u64) {
        return number;
    }
    // Two threads that meet here come to the same number.
    let number = pool as u64 | DESTROYED.load(Ordering::Relaxed) << 48;
    POOLS.insert(number, quota::pack(device, 0));
    USED.insert(number, 0);
    HANDLES.insert(number, pool as u64);
    NUMBERS.insert(pool as u64, number);
    number
}

/// Sets a pool's charge to what it holds now: what the driver says, or what is in use where it does
/// not say, and never less than what is in use. A destroyed pool gives its memory back with its last
/// allocation, and not before as far as the driver promises.
fn refresh(number: u64) {
    let Some(old) = POOLS.get(number) else { return };
    let (device, charged) = quota::unpack(old);
    let used = USED.get(number).unwrap_or(0);
    let now = match HANDLES.get(number) {
        Some(handle) => reserved(handle as CUmemoryPool).unwrap_or(used).max(used),
        None if used == 0 => 0,
        None => charged,
    };
    let Some(old) = POOLS.replace(number, quota::pack(device, now)) else { return };
    let (_, before) = quota::unpack(old);
    if now >= before {
        quota::charge_always(device, now - before);
    } else {
        quota::uncharge(device, before - now);
    }
    if now == 0 && HANDLES.get(number).is_none() {
        POOLS.remove(number);
        USED.remove(number);
    }
}

/// The driver has destroyed a pool: what is in use of it stays charged.
fn destroyed(pool: CUmemoryPool) {
    DESTROYED.fetch_add(1, Ordering::Relaxed);
    while let Some(number) = NUMBERS.remove(pool as u64) {
        while HANDLES.remove(number).is_some() {}
        refresh(number);
    }
}

/// As [`refresh`], for every pool that this process uses.
pub(crate) fn refresh_all() {
    if capture::any() {
        return;
    }
    let mut pools = [0_u64; 64];
    let mut count = 0;
    HANDLES.each(|number, _| {
        if let Some(place) = pools.get_mut(count) {
            *place = number;
            count += 1;
        }
    });
    for &pool in &pools[..count] {
        refresh(pool);
    }
}

/// One allocation from a pool.
fn allocate(
    pool: CUmemoryPool,
    out: *mut CUdeviceptr,
    bytes: usize,
    stream: CUstream,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let device = quota::current_device();
    if capture::is_capturing(stream) {
        return allocate_in_capture(stream, device, bytes, call);
    }
    let wanted = quota::round(bytes as u64);
    let number = track(pool, device);
    let used = USED.get(number).unwrap_or(0);
    let held = POOLS.get(number).map_or(0, |value| quota::unpack(value).1);
    // What the pool has to spare is charged already.
    let missing = wanted.saturating_sub(held.saturating_sub(used));
    if missing > 0 && quota::charge(device, missing).is_err() {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    quota::uncharge(device, missing);
    if result != CUDA_SUCCESS {
        refresh(number);
        return result;
    }
    let address = peek(out.cast_const()).unwrap_or(0);
    USED.add(number, wanted);
    HELD.insert(key(Kind::PoolOf, address), number);
    HELD.insert(key(Kind::PoolBytes, address), wanted);
    refresh(number);
    if quota::is_over(device) {
        // The pool grew by more than was asked for, and that does not fit: give it back.
        driver!(cuMemFreeAsync(address => CUdeviceptr, stream => CUstream));
        driver!(cuStreamSynchronize(stream => CUstream));
        driver!(cuMemPoolTrimTo(pool => CUmemoryPool, 0 => usize));
        forget(address);
        quota::count_refusal();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUDA_SUCCESS
}

/// In a capture nothing is allocated yet: the graph will, and is charged when it is made.
fn allocate_in_capture(
    stream: CUstream,
    device: usize,
    bytes: usize,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Ok(charged) = quota::charge(device, bytes as u64) else { return CUDA_ERROR_OUT_OF_MEMORY };
    let result = call();
    if result == CUDA_SUCCESS {
        capture::add_bytes(stream, device, charged);
    } else {
        quota::uncharge(device, charged);
    }
    result
}

/// An address from a pool is free again.
fn forget(address: u64) {
    let Some(number) = HELD.remove(key(Kind::PoolOf, address)) else { return };
    let bytes = HELD.remove(key(Kind::PoolBytes, address)).unwrap_or(0);
    USED.add(number, bytes.wrapping_neg());
    refresh(number);
}

/// Frees in stream order, from a pool or plain memory.
fn free(address: u64, stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if HELD.get(key(Kind::PoolOf, address)).is_none() {
        return quota::free(Kind::Memory, address, call);
    }
    if capture::is_capturing(stream) {
        return call();
    }
    // In this order, because the driver may give the same address to another thread at once.
    let pool = HELD.remove(key(Kind::PoolOf, address));
    let bytes = HELD.remove(key(Kind::PoolBytes, address)).unwrap_or(0);
    let result = call();
    let Some(number) = pool else { return result };
    if result == CUDA_SUCCESS {
        USED.add(number, bytes.wrapping_neg());
        refresh(number);
    } else {
        HELD.insert(key(Kind::PoolOf, address), number);
        HELD.insert(key(Kind::PoolBytes, address), bytes);
    }
    result
}

/// For `cuMemFree` of an address that came from a pool.
pub(crate) fn freed(address: u64) {
    forget(address);
}

hooks! {
    fn cuMemAllocAsync(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) |real| {
        allocate(current_pool(), out, bytes, stream, || real(out, bytes, stream))
    }

    fn cuMemAllocAsync_ptsz(out: *mut CUdeviceptr, bytes: usize, stream: CUstream) |real| {
        allocate(current_pool(), out, bytes, per_thread(stream), || real(out, bytes, stream))
    }

    fn cuMemAllocFromPoolAsync(
        out: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) |real| {
        allocate(pool, out, bytes, stream, || real(out, bytes, pool, stream))
    }

    fn cuMemAllocFromPoolAsync_ptsz(
        out: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) |real| {
        allocate(pool, out, bytes, per_thread(stream), || real(out, bytes, pool, stream))
    }

    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) |real| {
        free(address, stream, || real(address, stream))
    }

    fn cuMemFreeAsync_ptsz(address: CUdeviceptr, stream: CUstream) |real| {
        free(address, per_thread(stream), || real(address, stream))
    }

    fn cuMemPoolCreate(out: *mut CUmemoryPool, properties: *const CUmemPoolProps) |real| {
        let result = real(out, properties);
        if let (CUDA_SUCCESS, Some(pool), Some(made)) =
            (result, peek(out.cast_const()), peek(properties))
        {
            let on_device = matches!(
                made.location.type_,
                CU_MEM_LOCATION_TYPE_DEVICE | CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN
            );
            if on_device {
                // A locality domain's id has the device in its low byte.
                track(pool, quota::place(made.location.id & 0xff));
            }
        }
        result
    }

    fn cuMemPoolDestroy(pool: CUmemoryPool) |real| {
        if let Some(number) = NUMBERS.get(pool as u64) {
            refresh(number);
        }
        let result = real(pool);
        if result == CUDA_SUCCESS {
            destroyed(pool);
        }
        result
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) |real| {
        let result = real(pool, keep);
        if let Some(number) = NUMBERS.get(pool as u64) {
            refresh(number);
        }
        result
    }
}
