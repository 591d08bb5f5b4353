//! `cuMemcpy*`.

use std::ffi::c_uint;

use muxflow_abi::cuda::result::CUDA_ERROR_INVALID_VALUE;
use muxflow_abi::cuda::{CUDA_MEMCPY2D, CUDA_MEMCPY3D, CUdeviceptr};

use crate::api::array::Array;
use crate::context::Context;
use crate::ffi::{Answer, Handle, In, Out, both};
use crate::memory;
use crate::stream::{self, Default, Stream};
use crate::work::{Copy, Work};

/// Puts a copy into a stream. With memory that the driver does not know it is not asynchronous, as
/// with the real one: to such memory it is waited for, from such memory it has been read on return.
fn later(copy: Copy, handle: Handle<Stream>, which: Default) -> Answer {
    let (stream, seq) = submit(copy, handle, which)?;
    if seq == 0 {
        return Ok(());
    }
    if memory::is_pageable(copy.to) {
        return stream.wait(seq);
    }
    if memory::is_pageable(copy.from) {
        stream::wait_performed(stream, seq);
    }
    Ok(())
}

fn submit(copy: Copy, handle: Handle<Stream>, which: Default) -> Answer<(&'static Stream, u64)> {
    copy.check()?;
    let stream = stream::resolve(handle, which)?;
    if copy.bytes() == 0 {
        return Ok((stream, 0));
    }
    Ok((stream, stream.submit(Work::Copy(copy))?))
}

/// The same, and waits for it. Small copies to the device return before they are complete, but not
/// before they have read what they copy.
fn now(copy: Copy, which: Default) -> Answer {
    let (stream, seq) = submit(copy, Handle::null(), which)?;
    let small_upload =
        copy.bytes() <= 64 << 10 && memory::is_device(copy.to) && !memory::is_device(copy.from);
    if small_upload {
        stream::wait_performed(stream, seq);
        return Ok(());
    }
    stream.wait(seq)
}

/// An array as an end of a copy, in `cuda.h`.
const ARRAY: c_uint = 3;

/// An end of a 2D or 3D copy: where it starts and its pitches.
fn end(
    kind: c_uint,
    host: u64,
    device: CUdeviceptr,
    array: Handle<Array>,
    at: [usize; 3],
    pitch: usize,
    height: usize,
) -> Answer<(u64, [usize; 2])> {
    let (base, pitch, height) = match kind {
        1 => (host, pitch, height),
        2 | 4 => (device, pitch, height),
        ARRAY => {
            let array = array.get()?;
            (array.address, array.pitch, array.height.max(1))
        }
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    };
    let place = || {
        let slice = pitch.checked_mul(height)?;
        let far = at[2].checked_mul(slice)?.checked_add(at[1].checked_mul(pitch)?)?;
        Some((base.checked_add(far.checked_add(at[0])? as u64)?, [pitch, slice]))
    };
    place().ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// A pitch or height that is given must hold what is copied, with what lies before it.
fn fits(given: usize, before: usize, copied: usize) -> Answer {
    let enough = before.checked_add(copied).is_some_and(|needed| given == 0 || given >= needed);
    if enough { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

fn flat(c: &CUDA_MEMCPY2D) -> Answer<Copy> {
    if c.srcMemoryType != ARRAY {
        fits(c.srcPitch, c.srcXInBytes, c.WidthInBytes)?;
    }
    if c.dstMemoryType != ARRAY {
        fits(c.dstPitch, c.dstXInBytes, c.WidthInBytes)?;
    }
    let from_array = Handle::from_raw(c.srcArray);
    let to_array = Handle::from_raw(c.dstArray);
    let row = |pitch: usize| if pitch == 0 { c.WidthInBytes } else { pitch };
    let from_at = [c.srcXInBytes, c.srcY, 0];
    let (from, from_pitch) = end(
        c.srcMemoryType,
        c.srcHost as u64,
        c.srcDevice,
        from_array,
        from_at,
        row(c.srcPitch),
        c.Height,
    )?;
    let to_at = [c.dstXInBytes, c.dstY, 0];
    let (to, to_pitch) = end(
        c.dstMemoryType,
        c.dstHost as u64,
        c.dstDevice,
        to_array,
        to_at,
        row(c.dstPitch),
        c.Height,
    )?;
    Ok(Copy { to, from, width: c.WidthInBytes, height: c.Height, depth: 1, to_pitch, from_pitch })
}

pub(crate) fn deep(c: &CUDA_MEMCPY3D) -> Answer<Copy> {
    if c.srcLOD != 0 || c.dstLOD != 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if c.srcMemoryType != ARRAY {
        fits(c.srcPitch, c.srcXInBytes, c.WidthInBytes)?;
        fits(c.srcHeight, c.srcY, c.Height)?;
    }
    if c.dstMemoryType != ARRAY {
        fits(c.dstPitch, c.dstXInBytes, c.WidthInBytes)?;
        fits(c.dstHeight, c.dstY, c.Height)?;
    }
    let from_array = Handle::from_raw(c.srcArray);
    let to_array = Handle::from_raw(c.dstArray);
    let row = |pitch: usize| if pitch == 0 { c.WidthInBytes } else { pitch };
    let rows = |height: usize| if height == 0 { c.Height } else { height };
    let from_at = [c.srcXInBytes, c.srcY, c.srcZ];
    let (from, from_pitch) = end(
        c.srcMemoryType,
        c.srcHost as u64,
        c.srcDevice,
        from_array,
        from_at,
        row(c.srcPitch),
        rows(c.srcHeight),
    )?;
    let to_at = [c.dstXInBytes, c.dstY, c.dstZ];
    let (to, to_pitch) = end(
        c.dstMemoryType,
        c.dstHost as u64,
        c.dstDevice,
        to_array,
        to_at,
        row(c.dstPitch),
        rows(c.dstHeight),
    )?;
    let (width, height, depth) = (c.WidthInBytes, c.Height, c.Depth);
    Ok(Copy { to, from, width, height, depth, to_pitch, from_pitch })
}

fn array_at(array: Handle<Array>, offset: usize) -> Answer<u64> {
    Ok(array.get()?.address + offset as u64)
}

both! {
    fn cuMemcpy, cuMemcpy_ptds(which; to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        now(Copy::plain(to, from, bytes), which)
    }
    fn cuMemcpyAsync, cuMemcpyAsync_ptsz(which; to: CUdeviceptr, from: CUdeviceptr, bytes: usize, handle: Handle<Stream>) {
        later(Copy::plain(to, from, bytes), handle, which)
    }
    fn cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds(which; to: CUdeviceptr, from: u64, bytes: usize) {
        memory::check_device(to, bytes)?;
        now(Copy::plain(to, from, bytes), which)
    }
    fn cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds(which; to: u64, from: CUdeviceptr, bytes: usize) {
        memory::check_device(from, bytes)?;
        now(Copy::plain(to, from, bytes), which)
    }
    fn cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds(which; to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        memory::check_device(to, bytes)?;
        memory::check_device(from, bytes)?;
        later(Copy::plain(to, from, bytes), Handle::null(), which)
    }
    fn cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz(which; to: CUdeviceptr, from: u64, bytes: usize, handle: Handle<Stream>) {
        memory::check_device(to, bytes)?;
        later(Copy::plain(to, from, bytes), handle, which)
    }
    fn cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz(which; to: u64, from: CUdeviceptr, bytes: usize, handle: Handle<Stream>) {
        memory::check_device(from, bytes)?;
        later(Copy::plain(to, from, bytes), handle, which)
    }
    fn cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz(which; to: CUdeviceptr, from: CUdeviceptr, bytes: usize, handle: Handle<Stream>) {
        memory::check_device(to, bytes)?;
        memory::check_device(from, bytes)?;
        later(Copy::plain(to, from, bytes), handle, which)
    }
    fn cuMemcpyPeer, cuMemcpyPeer_ptds(which; to: CUdeviceptr, _there: Handle<Context>, from: CUdeviceptr, _here: Handle<Context>, bytes: usize) {
        later(Copy::plain(to, from, bytes), Handle::null(), which)
    }
    fn cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz(which; to: CUdeviceptr, _there: Handle<Context>, from: CUdeviceptr, _here: Handle<Context>, bytes: usize, handle: Handle<Stream>) {
        later(Copy::plain(to, from, bytes), handle, which)
    }
    fn cuMemcpy2D_v2, cuMemcpy2D_v2_ptds(which; copy: In<CUDA_MEMCPY2D>) {
        now(flat(&copy.get()?)?, which)
    }
    fn cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds(which; copy: In<CUDA_MEMCPY2D>) {
        now(flat(&copy.get()?)?, which)
    }
    fn cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz(which; copy: In<CUDA_MEMCPY2D>, handle: Handle<Stream>) {
        later(flat(&copy.get()?)?, handle, which)
    }
    fn cuMemcpy3D_v2, cuMemcpy3D_v2_ptds(which; copy: In<CUDA_MEMCPY3D>) {
        now(deep(&copy.get()?)?, which)
    }
    fn cuMemcpy3DAsync_v2, cuMemcpy3DAsync_v2_ptsz(which; copy: In<CUDA_MEMCPY3D>, handle: Handle<Stream>) {
        later(deep(&copy.get()?)?, handle, which)
    }
    fn cuMemcpyHtoA_v2, cuMemcpyHtoA_v2_ptds(which; to: Handle<Array>, offset: usize, from: u64, bytes: usize) {
        now(Copy::plain(array_at(to, offset)?, from, bytes), which)
    }
    fn cuMemcpyAtoH_v2, cuMemcpyAtoH_v2_ptds(which; to: u64, from: Handle<Array>, offset: usize, bytes: usize) {
        now(Copy::plain(to, array_at(from, offset)?, bytes), which)
    }
    fn cuMemcpyDtoA_v2, cuMemcpyDtoA_v2_ptds(which; to: Handle<Array>, offset: usize, from: CUdeviceptr, bytes: usize) {
        later(Copy::plain(array_at(to, offset)?, from, bytes), Handle::null(), which)
    }
    fn cuMemcpyAtoD_v2, cuMemcpyAtoD_v2_ptds(which; to: CUdeviceptr, from: Handle<Array>, offset: usize, bytes: usize) {
        later(Copy::plain(to, array_at(from, offset)?, bytes), Handle::null(), which)
    }
    fn cuMemcpyHtoAAsync_v2, cuMemcpyHtoAAsync_v2_ptsz(which; to: Handle<Array>, offset: usize, from: u64, bytes: usize, handle: Handle<Stream>) {
        later(Copy::plain(array_at(to, offset)?, from, bytes), handle, which)
    }
    fn cuMemcpyAtoHAsync_v2, cuMemcpyAtoHAsync_v2_ptsz(which; to: u64, from: Handle<Array>, offset: usize, bytes: usize, handle: Handle<Stream>) {
        later(Copy::plain(to, array_at(from, offset)?, bytes), handle, which)
    }
    fn cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz(which; to: In<CUdeviceptr>, from: In<CUdeviceptr>, bytes: In<usize>, count: usize, _attributes: In<c_uint>, _indices: In<usize>, _attribute_count: usize, failed: Out<usize>, handle: Handle<Stream>) {
        for i in 0..count {
            failed.offer(i);
            later(Copy::plain(to.at(i)?, from.at(i)?, bytes.at(i)?), handle, which)?;
        }
        failed.offer(usize::MAX);
        Ok(())
    }
    fn cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz(which; to: In<CUdeviceptr>, from: In<CUdeviceptr>, bytes: In<usize>, count: usize, _attributes: In<c_uint>, _indices: In<usize>, _attribute_count: usize, handle: Handle<Stream>) {
        (0..count).try_for_each(|i| later(Copy::plain(to.at(i)?, from.at(i)?, bytes.at(i)?), handle, which))
    }
    fn cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz(which; to: CUdeviceptr, from: CUdeviceptr, bytes: usize, _attributes: In<c_uint>, handle: Handle<Stream>) {
        later(Copy::plain(to, from, bytes), handle, which)
    }
}
