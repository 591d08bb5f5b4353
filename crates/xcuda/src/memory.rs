//! Plain, pitched and managed memory, in the variants of CUDA 2 and of CUDA 3.2.

use core::ffi::c_uint;

use muxflow_abi::cuda::CUdeviceptr;
use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};

use crate::hook::peek;
use crate::pool;
use crate::quota::{self, Kind};

/// The address that the driver has just written.
fn address(out: *mut CUdeviceptr) -> u64 {
    peek(out.cast_const()).unwrap_or(0)
}

fn address32(out: *mut u32) -> u64 {
    peek(out.cast_const()).unwrap_or(0).into()
}

hooks! {
    fn cuMemAlloc_v2(out: *mut CUdeviceptr, bytes: usize) |real| {
        let device = quota::current_device();
        quota::allocate(Kind::Memory, device, bytes as u64, || real(out, bytes), || address(out))
    }

    fn cuMemAlloc(out: *mut u32, bytes: c_uint) |real| {
        let device = quota::current_device();
        quota::allocate(Kind::Memory, device, bytes.into(), || real(out, bytes), || address32(out))
    }

    fn cuMemAllocManaged(out: *mut CUdeviceptr, bytes: usize, flags: c_uint) |real| {
        let device = quota::current_device();
        let call = || real(out, bytes, flags);
        quota::allocate(Kind::Memory, device, bytes as u64, call, || address(out))
    }

    fn cuMemAllocPitch_v2(
        out: *mut CUdeviceptr,
        pitch: *mut usize,
        width: usize,
        height: usize,
        element: c_uint,
    ) |real| {
        let device = quota::current_device();
        let least = (width as u64).saturating_mul(height as u64);
        let Ok(charged) = quota::charge(device, least) else { return CUDA_ERROR_OUT_OF_MEMORY };
        let result = real(out, pitch, width, height, element);
        if result != CUDA_SUCCESS {
            quota::uncharge(device, charged);
            return result;
        }
        // What it really takes is known only now, by the pitch that the driver chose.
        let rows = peek(pitch.cast_const()).unwrap_or(width) as u64;
        let rest = quota::round(rows.saturating_mul(height as u64)).saturating_sub(charged);
        if rest > 0 && quota::charge(device, rest).is_err() {
            driver!(cuMemFree_v2(address(out) => CUdeviceptr));
            quota::uncharge(device, charged);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        quota::hold(Kind::Memory, address(out), device, charged + rest);
        CUDA_SUCCESS
    }

    fn cuMemAllocPitch(
        out: *mut u32,
        pitch: *mut u32,
        width: c_uint,
        height: c_uint,
        element: c_uint,
    ) |real| {
        let device = quota::current_device();
        // Pitches of that time are multiples of 512 at most.
        let bytes = quota::round(width.into()).saturating_mul(height.into());
        let call = || real(out, pitch, width, height, element);
        quota::allocate(Kind::Memory, device, bytes, call, || address32(out))
    }

    fn cuMemFree_v2(address: CUdeviceptr) |real| {
        let mut plain = false;
        let result = quota::free_or(Kind::Memory, address, || real(address), &mut plain);
        if !plain && result == CUDA_SUCCESS {
            pool::freed(address);
        }
        result
    }

    fn cuMemFree(address: u32) |real| {
        quota::free(Kind::Memory, address.into(), || real(address))
    }
}
