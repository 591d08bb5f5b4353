//! `cuMemAddress*`, `cuMemCreate`, `cuMemMap` and sharing by file descriptor.

use std::ffi::{c_int, c_void};

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
use muxflow_abi::cuda::{
    CUdeviceptr, CUmemAccessDesc, CUmemAllocationFlags, CUmemAllocationProp, CUmemLocation,
};

use crate::context;
use crate::driver;
use crate::ffi::{In, Out, api};
use crate::memory;
use crate::physical;

api! {
    fn cuMemAddressReserve(out: Out<CUdeviceptr>, bytes: usize, align: usize, _wish: CUdeviceptr, _flags: u64) {
        driver::devices()?;
        if !out.is_given() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(physical::reserve(bytes, align)?)
    }
    fn cuMemAddressFree(address: CUdeviceptr, bytes: usize) { physical::unreserve(address, bytes) }
    fn cuMemCreate(out: Out<u64>, bytes: usize, properties: In<CUmemAllocationProp>, _flags: u64) {
        let p = properties.get()?;
        if !out.is_given() || p.type_ != 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if p.location.type_ != 1 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        out.put(physical::create(p.location.id, bytes as u64, p.requestedHandleTypes)?)
    }
    fn cuMemRelease(handle: u64) { physical::release(handle) }
    fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: u64, _flags: u64) {
        physical::map(address, bytes, offset, handle)
    }
    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) { physical::unmap(address, bytes) }
    fn cuMemSetAccess(address: CUdeviceptr, bytes: usize, list: In<CUmemAccessDesc>, count: usize) {
        list.list(count)?;
        memory::check_device(address, bytes)
    }
    fn cuMemGetAccess(out: Out<u64>, _where: In<CUmemLocation>, address: CUdeviceptr) {
        memory::check_device(address, 1)?;
        out.put(3)
    }
    fn cuMemExportToShareableHandle(out: Out<c_int>, handle: u64, kind: c_int, _flags: u64) {
        if kind != 1 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        if physical::find(handle)?.handle_types & 1 == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(physical::export(handle)?)
    }
    fn cuMemImportFromShareableHandle(out: Out<u64>, descriptor: *mut c_void, kind: c_int) {
        if kind != 1 {
            return Err(CUDA_ERROR_NOT_SUPPORTED);
        }
        let device = context::current()?.device;
        out.put(physical::import(device, descriptor as usize as c_int)?)
    }
    fn cuMemGetAllocationGranularity(out: Out<usize>, properties: In<CUmemAllocationProp>, _which: c_int) {
        properties.get()?;
        out.put(physical::GRANULARITY as usize)
    }
    fn cuMemGetAllocationPropertiesFromHandle(out: Out<CUmemAllocationProp>, handle: u64) {
        let it = physical::find(handle)?;
        out.put(CUmemAllocationProp {
            type_: 1,
            requestedHandleTypes: it.handle_types,
            location: CUmemLocation { type_: 1, id: it.device.ordinal },
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationFlags::default(),
        })
    }
    fn cuMemRetainAllocationHandle(out: Out<u64>, address: CUdeviceptr) {
        out.put(physical::retain_at(address)?)
    }
}
