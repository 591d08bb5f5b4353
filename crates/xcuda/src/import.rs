//! Memory of somebody else: external APIs, IPC handles, shareable handles. Memory that a process of
//! this job exported is charged to that process already, so to open it again costs nothing.

use core::ffi::{c_int, c_uint, c_void};

use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
use muxflow_abi::cuda::{
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC, CUdeviceptr, CUexternalMemory, CUipcMemHandle,
    CUmemGenericAllocationHandle, CUmemoryPool, CUresult,
};

use crate::hook::peek;
use crate::process;
use crate::quota::{self, HELD, Kind, key};

/// Stands for every shareable handle in the job's list of exports: the handles themselves are
/// descriptors, whose numbers mean nothing in another process.
const SHAREABLE: &[u8] = b"any shareable handle";

/// This process has exported physical memory or a pool.
pub(crate) fn exported() {
    if let Some(control) = process::control()
        && !control.job.is_own_export(SHAREABLE)
    {
        control.job.remember_export(SHAREABLE);
    }
}

/// An imported handle of which the size is not known until it is mapped.
const UNKNOWN: u64 = 0x00ff_ffff_ffff_ffff;

/// Charges imported physical memory at its first mapping, when its size shows.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY` when it does not fit.
pub(crate) fn charge_at_map(handle: u64, bytes: u64) -> Result<(), CUresult> {
    let Some(value) = HELD.get(key(Kind::Physical, handle)) else { return Ok(()) };
    let (device, held) = quota::unpack(value);
    if held == UNKNOWN {
        let charged = quota::charge(device, bytes)?;
        HELD.replace(key(Kind::Physical, handle), quota::pack(device, charged));
    }
    Ok(())
}

/// An imported handle that was never mapped holds no charge; says whether this was one.
pub(crate) fn forget_unmapped(handle: u64) -> bool {
    let never =
        HELD.get(key(Kind::Physical, handle)).is_some_and(|v| quota::unpack(v).1 == UNKNOWN);
    if never {
        HELD.remove(key(Kind::Physical, handle));
    }
    never
}

/// Opens an IPC handle, and charges what it turns out to be.
fn open_ipc(
    out: *mut CUdeviceptr,
    handle: &CUipcMemHandle,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let bytes: [u8; 64] = handle.reserved.map(i8::cast_unsigned);
    let own = process::control().is_some_and(|control| control.job.is_own_export(&bytes));
    let result = call();
    let (CUDA_SUCCESS, Some(address), false) = (result, peek(out.cast_const()), own) else {
        return result;
    };
    let (mut base, mut size) = (0, 0_usize);
    driver!(cuMemGetAddressRange_v2(
        &raw mut base => *mut CUdeviceptr,
        &raw mut size => *mut usize,
        address => CUdeviceptr,
    ));
    let device = quota::current_device();
    if let Ok(charged) = quota::charge(device, size as u64) {
        quota::hold(Kind::Ipc, address, device, charged);
        return CUDA_SUCCESS;
    }
    driver!(cuIpcCloseMemHandle(address => CUdeviceptr));
    CUDA_ERROR_OUT_OF_MEMORY
}

hooks! {
    fn cuImportExternalMemory(
        out: *mut CUexternalMemory,
        descriptor: *const CUDA_EXTERNAL_MEMORY_HANDLE_DESC,
    ) |real| {
        let device = quota::current_device();
        let bytes = peek(descriptor).map_or(0, |d| d.size);
        let handle = || peek(out.cast_const()).map_or(0, |handle| handle as u64);
        quota::allocate(Kind::External, device, bytes, || real(out, descriptor), handle)
    }

    fn cuDestroyExternalMemory(memory: CUexternalMemory) |real| {
        quota::free(Kind::External, memory as u64, || real(memory))
    }

    fn cuIpcGetMemHandle(out: *mut CUipcMemHandle, address: CUdeviceptr) |real| {
        let result = real(out, address);
        if let (CUDA_SUCCESS, Some(handle), Some(control)) =
            (result, peek(out.cast_const()), process::control())
        {
            control.job.remember_export(&handle.reserved.map(i8::cast_unsigned));
        }
        result
    }

    fn cuIpcOpenMemHandle | cuIpcOpenMemHandle_v2(
        out: *mut CUdeviceptr,
        handle: CUipcMemHandle,
        flags: c_uint,
    ) |real| {
        open_ipc(out, &handle, || real(out, handle, flags))
    }

    fn cuIpcCloseMemHandle(address: CUdeviceptr) |real| {
        quota::free(Kind::Ipc, address, || real(address))
    }

    fn cuMemImportFromShareableHandle(
        out: *mut CUmemGenericAllocationHandle,
        os_handle: *mut c_void,
        kind: c_int,
    ) |real| {
        let result = real(out, os_handle, kind);
        if let (CUDA_SUCCESS, Some(handle)) = (result, peek(out.cast_const())) {
            let own = process::control().is_some_and(|c| c.job.is_own_export(SHAREABLE));
            HELD.insert(key(Kind::PhysicalUses, handle), 1);
            if !own {
                let device = quota::current_device();
                HELD.insert(key(Kind::Physical, handle), quota::pack(device, UNKNOWN));
            }
        }
        result
    }

    fn cuMemPoolExportToShareableHandle(
        out: *mut c_void,
        pool: CUmemoryPool,
        kind: c_int,
        flags: u64,
    ) |real| {
        let result = real(out, pool, kind, flags);
        if result == CUDA_SUCCESS {
            exported();
        }
        result
    }
}
