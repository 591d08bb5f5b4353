//! What the program is told of memory: the quota, so that frameworks size themselves by it.

use core::ffi::c_uint;

use muxflow_abi::cuda::CUdevice;
use muxflow_abi::cuda::result::CUDA_SUCCESS;

use crate::hook::{peek, poke};
use crate::{pool, process, quota};

/// Free and total as the job may see them, given what the driver says.
pub(crate) fn clamp(device: usize, free: u64, total: u64) -> (u64, u64) {
    let Some(control) = process::control() else { return (0, 0) };
    let quota = control.agent.quota_bytes(device);
    let left = quota.saturating_sub(control.job.charged_bytes(device));
    (free.min(left), total.min(quota))
}

hooks! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        let result = real(free, total);
        if result == CUDA_SUCCESS {
            pool::refresh_all();
            let device = quota::current_device();
            let told = |pointer: *mut usize| peek(pointer.cast_const()).unwrap_or(usize::MAX);
            let (left, all) = clamp(device, told(free) as u64, told(total) as u64);
            poke(free, usize::try_from(left).unwrap_or(0));
            poke(total, usize::try_from(all).unwrap_or(0));
        }
        result
    }

    fn cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |real| {
        let result = real(free, total);
        if result == CUDA_SUCCESS {
            let device = quota::current_device();
            let told = |pointer: *mut c_uint| peek(pointer.cast_const()).unwrap_or(u32::MAX);
            let (left, all) = clamp(device, told(free).into(), told(total).into());
            poke(free, u32::try_from(left).unwrap_or(u32::MAX));
            poke(total, u32::try_from(all).unwrap_or(u32::MAX));
        }
        result
    }

    fn cuDeviceTotalMem_v2(total: *mut usize, device: CUdevice) |real| {
        let result = real(total, device);
        if result == CUDA_SUCCESS {
            let told = peek(total.cast_const()).unwrap_or(0);
            let (_, all) = clamp(quota::place(device), 0, told as u64);
            poke(total, usize::try_from(all).unwrap_or(0));
        }
        result
    }

    fn cuDeviceTotalMem(total: *mut c_uint, device: CUdevice) |real| {
        let result = real(total, device);
        if result == CUDA_SUCCESS {
            let told = peek(total.cast_const()).unwrap_or(0);
            let (_, all) = clamp(quota::place(device), 0, told.into());
            poke(total, u32::try_from(all).unwrap_or(u32::MAX));
        }
        result
    }
}
