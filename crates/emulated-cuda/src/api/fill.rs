//! `cuMemset*`.

use muxflow_abi::cuda::CUdeviceptr;

use crate::ffi::{Answer, Handle, both};
use crate::stream::{self, Default, Stream};
use crate::work::{Fill, Work};

fn fill(fill: Fill, handle: Handle<Stream>, which: Default) -> Answer {
    let stream = stream::resolve(handle, which)?;
    if fill.width == 0 || fill.height == 0 {
        return Ok(());
    }
    fill.check()?;
    stream.submit(Work::Fill(fill)).map(drop)
}

fn flat(to: u64, value: u32, element: usize, count: usize) -> Fill {
    Fill { to, pitch: 0, value, element, width: count, height: 1 }
}

both! {
    fn cuMemsetD8_v2, cuMemsetD8_v2_ptds(which; to: CUdeviceptr, value: u8, count: usize) {
        fill(flat(to, value.into(), 1, count), Handle::null(), which)
    }
    fn cuMemsetD16_v2, cuMemsetD16_v2_ptds(which; to: CUdeviceptr, value: u16, count: usize) {
        fill(flat(to, value.into(), 2, count), Handle::null(), which)
    }
    fn cuMemsetD32_v2, cuMemsetD32_v2_ptds(which; to: CUdeviceptr, value: u32, count: usize) {
        fill(flat(to, value, 4, count), Handle::null(), which)
    }
    fn cuMemsetD2D8_v2, cuMemsetD2D8_v2_ptds(which; to: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize) {
        fill(Fill { to, pitch, value: value.into(), element: 1, width, height }, Handle::null(), which)
    }
    fn cuMemsetD2D16_v2, cuMemsetD2D16_v2_ptds(which; to: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize) {
        fill(Fill { to, pitch, value: value.into(), element: 2, width, height }, Handle::null(), which)
    }
    fn cuMemsetD2D32_v2, cuMemsetD2D32_v2_ptds(which; to: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize) {
        fill(Fill { to, pitch, value, element: 4, width, height }, Handle::null(), which)
    }
    fn cuMemsetD8Async, cuMemsetD8Async_ptsz(which; to: CUdeviceptr, value: u8, count: usize, handle: Handle<Stream>) {
        fill(flat(to, value.into(), 1, count), handle, which)
    }
    fn cuMemsetD16Async, cuMemsetD16Async_ptsz(which; to: CUdeviceptr, value: u16, count: usize, handle: Handle<Stream>) {
        fill(flat(to, value.into(), 2, count), handle, which)
    }
    fn cuMemsetD32Async, cuMemsetD32Async_ptsz(which; to: CUdeviceptr, value: u32, count: usize, handle: Handle<Stream>) {
        fill(flat(to, value, 4, count), handle, which)
    }
    fn cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz(which; to: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, handle: Handle<Stream>) {
        fill(Fill { to, pitch, value: value.into(), element: 1, width, height }, handle, which)
    }
    fn cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz(which; to: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize, handle: Handle<Stream>) {
        fill(Fill { to, pitch, value: value.into(), element: 2, width, height }, handle, which)
    }
    fn cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz(which; to: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize, handle: Handle<Stream>) {
        fill(Fill { to, pitch, value, element: 4, width, height }, handle, which)
    }
}
