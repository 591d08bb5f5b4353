//! Stream-ordered memory: a pool counts by what it has reserved from the device, not by what is in
//! use, because that is what others cannot have.

use core::ffi::{c_int, c_void};

use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
use muxflow_abi::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CUdeviceptr, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream,
};

use crate::capture;
use crate::hook::peek;
use crate::map::Map;
use crate::quota::{self, HELD, Kind, key};

/// Pools that this process takes from: what is charged for each, and on which device.
static POOLS: Map = Map::new();
/// What is in use of each.
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

/// Makes a pool known, charged with nothing so far.
fn track(pool: CUmemoryPool, device: usize) {
    let handle = pool as u64;
    if POOLS.get(handle).is_none() {
        POOLS.insert(handle, quota::pack(device, 0));
        USED.insert(handle, 0);
    }
}

/// Sets a pool's charge to what it holds now: what the driver says, or what is in use where it does
/// not say, and never less than what is in use.
fn refresh(pool: u64) {
    let used = USED.get(pool).unwrap_or(0);
    let now = reserved(pool as CUmemoryPool).unwrap_or(used).max(used);
    let Some(old) = POOLS.get(pool) else { return };
    let (device, _) = quota::unpack(old);
    let Some(old) = POOLS.replace(pool, quota::pack(device, now)) else { return };
    let (_, before) = quota::unpack(old);
    if now >= before {
        quota::charge_always(device, now - before);
    } else {
        quota::uncharge(device, before - now);
    }
}

/// As [`refresh`], for every pool that this process uses.
pub(crate) fn refresh_all() {
    if capture::any() {
        return;
    }
    let mut pools = [0_u64; 64];
    let mut count = 0;
    POOLS.each(|pool, _| {
        if let Some(place) = pools.get_mut(count) {
            *place = pool;
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
        return allocate_in_capture(device, bytes, call);
    }
    let wanted = quota::round(bytes as u64);
    track(pool, device);
    let handle = pool as u64;
    let used = USED.get(handle).unwrap_or(0);
    let held = POOLS.get(handle).map_or(0, |value| quota::unpack(value).1);
    // What the pool has to spare is charged already.
    let missing = wanted.saturating_sub(held.saturating_sub(used));
    if missing > 0 && quota::charge(device, missing).is_err() {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let result = call();
    quota::uncharge(device, missing);
    if result != CUDA_SUCCESS {
        refresh(handle);
        return result;
    }
    let address = peek(out.cast_const()).unwrap_or(0);
    USED.add(handle, wanted);
    HELD.insert(key(Kind::PoolOf, address), handle);
    HELD.insert(key(Kind::PoolBytes, address), wanted);
    refresh(handle);
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
fn allocate_in_capture(device: usize, bytes: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    let Ok(charged) = quota::charge(device, bytes as u64) else { return CUDA_ERROR_OUT_OF_MEMORY };
    let result = call();
    if result == CUDA_SUCCESS {
        capture::add_bytes(device, charged);
    } else {
        quota::uncharge(device, charged);
    }
    result
}

/// An address from a pool is free again; says from which pool.
fn forget(address: u64) -> Option<u64> {
    let pool = HELD.remove(key(Kind::PoolOf, address))?;
    let bytes = HELD.remove(key(Kind::PoolBytes, address)).unwrap_or(0);
    USED.add(pool, bytes.wrapping_neg());
    refresh(pool);
    Some(pool)
}

/// For `cuMemFree` of an address that came from a pool.
pub(crate) fn freed(address: u64) {
    if HELD.get(key(Kind::PoolOf, address)).is_some() {
        forget(address);
    }
}

hooks! {
    fn cuMemAllocAsync | cuMemAllocAsync_ptsz(
        out: *mut CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) |real| {
        allocate(current_pool(), out, bytes, stream, || real(out, bytes, stream))
    }

    fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(
        out: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream,
    ) |real| {
        allocate(pool, out, bytes, stream, || real(out, bytes, pool, stream))
    }

    fn cuMemFreeAsync | cuMemFreeAsync_ptsz(address: CUdeviceptr, stream: CUstream) |real| {
        if HELD.get(key(Kind::PoolOf, address)).is_none() {
            // Plain memory may be freed in stream order too.
            return quota::free(Kind::Memory, address, || real(address, stream));
        }
        let result = real(address, stream);
        if result == CUDA_SUCCESS && !capture::is_capturing(stream) {
            forget(address);
        }
        result
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
        let result = real(pool);
        if result == CUDA_SUCCESS {
            USED.remove(pool as u64);
            if let Some(value) = POOLS.remove(pool as u64) {
                let (device, bytes) = quota::unpack(value);
                quota::uncharge(device, bytes);
            }
        }
        result
    }

    fn cuMemPoolTrimTo(pool: CUmemoryPool, keep: usize) |real| {
        let result = real(pool, keep);
        refresh(pool as u64);
        result
    }
}
