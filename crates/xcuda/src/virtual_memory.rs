//! Physical memory made by `cuMemCreate`. Address reservations are free; physical memory is charged
//! once, and stays charged until the last handle is released and the last mapping is gone, because only
//! then does the driver give it back.

use core::ffi::{c_int, c_void};

use muxflow_abi::cuda::result::CUDA_SUCCESS;
use muxflow_abi::cuda::{
    CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, CUdeviceptr,
    CUmemAllocationProp, CUmemGenericAllocationHandle,
};

use crate::hook::peek;
use crate::import;
use crate::quota::{self, HELD, Kind, key};

/// One more handle or mapping keeps this memory.
fn keep(handle: u64) {
    HELD.add(key(Kind::PhysicalUses, handle), 1);
}

/// One less; the last gives the charge back.
fn drop_one(handle: u64) {
    if HELD.add(key(Kind::PhysicalUses, handle), 1_u64.wrapping_neg()) == Some(0) {
        HELD.remove(key(Kind::PhysicalUses, handle));
        if !import::forget_unmapped(handle) {
            quota::let_go(Kind::Physical, handle);
        }
    }
}

/// Takes the notes of all mappings that start in a range.
fn unmapped(address: u64, bytes: u64) {
    let mut at = address;
    while at < address.saturating_add(bytes) {
        let Some(handle) = HELD.remove(key(Kind::Mapping, at)) else { return };
        let length = HELD.remove(key(Kind::MappingBytes, at)).unwrap_or(0);
        drop_one(handle);
        if length == 0 {
            return;
        }
        at = at.saturating_add(length);
    }
}

hooks! {
    fn cuMemCreate(
        out: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64,
    ) |real| {
        let location = peek(properties).map(|made| made.location);
        let device = match location {
            Some(place) if place.type_ == CU_MEM_LOCATION_TYPE_DEVICE => quota::place(place.id),
            Some(place) if place.type_ == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN => {
                quota::place(place.id & 0xff)
            }
            // Host memory, or nonsense that the driver will refuse.
            _ => return real(out, bytes, properties, flags),
        };
        let handle = || peek(out.cast_const()).unwrap_or(0);
        let call = || real(out, bytes, properties, flags);
        let result = quota::allocate(Kind::Physical, device, bytes as u64, call, handle);
        if result == CUDA_SUCCESS {
            HELD.insert(key(Kind::PhysicalUses, handle()), 1);
        }
        result
    }

    fn cuMemRetainAllocationHandle(
        out: *mut CUmemGenericAllocationHandle,
        address: *mut c_void,
    ) |real| {
        let result = real(out, address);
        if let (CUDA_SUCCESS, Some(handle)) = (result, peek(out.cast_const())) {
            keep(handle);
        }
        result
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) |real| {
        let result = real(handle);
        if result == CUDA_SUCCESS {
            drop_one(handle);
        }
        result
    }

    fn cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64,
    ) |real| {
        if let Err(refused) = import::charge_at_map(handle, bytes as u64) {
            return refused;
        }
        let result = real(address, bytes, offset, handle, flags);
        if result == CUDA_SUCCESS {
            keep(handle);
            HELD.insert(key(Kind::Mapping, address), handle);
            HELD.insert(key(Kind::MappingBytes, address), bytes as u64);
        }
        result
    }

    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) |real| {
        let result = real(address, bytes);
        if result == CUDA_SUCCESS {
            unmapped(address, bytes as u64);
        }
        result
    }

    fn cuMemExportToShareableHandle(
        out: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        kind: c_int,
        flags: u64,
    ) |real| {
        let result = real(out, handle, kind, flags);
        if result == CUDA_SUCCESS {
            import::exported();
        }
        result
    }
}
