//! Arrays: memory with a shape, without textures.

use std::ffi::{c_int, c_uint};

use muxflow_abi::cuda::result::CUDA_ERROR_INVALID_VALUE;
use muxflow_abi::cuda::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY3D_DESCRIPTOR,
};

use crate::context;
use crate::ffi::{Answer, Handle, In, Kind, Out, api};
use crate::memory::{self, Nature};

/// An array.
#[derive(Debug)]
pub(crate) struct Array {
    pub address: u64,
    pub pitch: usize,
    pub height: usize,
    descriptor: CUDA_ARRAY3D_DESCRIPTOR,
    /// A level of a mipmapped array does not own its memory.
    owned: bool,
}

impl Kind for Array {
    const MAGIC: u64 = 0x0c0d_a00c_a44a_000c;
}

/// Arrays that get smaller by half, in one piece of memory.
#[derive(Debug)]
pub(crate) struct Mipmapped {
    address: u64,
    levels: Vec<Handle<Array>>,
}

impl Kind for Mipmapped {
    const MAGIC: u64 = 0x0c0d_a00d_3177_000d;
}

fn element_bytes(format: c_uint) -> Answer<usize> {
    match format {
        0x01 | 0x08 => Ok(1),
        0x02 | 0x09 | 0x10 => Ok(2),
        0x03 | 0x0a | 0x20 => Ok(4),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

/// Bytes of a row, and of everything.
fn size(d: &CUDA_ARRAY3D_DESCRIPTOR) -> Answer<(usize, usize)> {
    if d.Width == 0 || !matches!(d.NumChannels, 1 | 2 | 4) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let row = d.Width.checked_mul(element_bytes(d.Format)? * d.NumChannels as usize);
    let row = row.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let all = row.checked_mul(d.Height.max(1)).and_then(|a| a.checked_mul(d.Depth.max(1)));
    Ok((row, all.ok_or(CUDA_ERROR_INVALID_VALUE)?))
}

fn create(d: CUDA_ARRAY3D_DESCRIPTOR) -> Answer<Handle<Array>> {
    let it = context::current()?;
    let (pitch, bytes) = size(&d)?;
    let address = memory::allocate(it, bytes as u64, Nature::Device, 0)?;
    Ok(Handle::new(Array { address, pitch, height: d.Height, descriptor: d, owned: true }))
}

fn deep(d: CUDA_ARRAY_DESCRIPTOR) -> CUDA_ARRAY3D_DESCRIPTOR {
    CUDA_ARRAY3D_DESCRIPTOR {
        Width: d.Width,
        Height: d.Height,
        Depth: 0,
        Format: d.Format,
        NumChannels: d.NumChannels,
        Flags: 0,
    }
}

api! {
    fn cuArrayCreate_v2(out: Out<Handle<Array>>, descriptor: In<CUDA_ARRAY_DESCRIPTOR>) {
        out.put(create(deep(descriptor.get()?))?)
    }
    fn cuArray3DCreate_v2(out: Out<Handle<Array>>, descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>) {
        out.put(create(descriptor.get()?)?)
    }
    fn cuArrayGetDescriptor_v2(out: Out<CUDA_ARRAY_DESCRIPTOR>, handle: Handle<Array>) {
        let d = handle.get()?.descriptor;
        out.put(CUDA_ARRAY_DESCRIPTOR { Width: d.Width, Height: d.Height, Format: d.Format, NumChannels: d.NumChannels })
    }
    fn cuArray3DGetDescriptor_v2(out: Out<CUDA_ARRAY3D_DESCRIPTOR>, handle: Handle<Array>) {
        out.put(handle.get()?.descriptor)
    }
    fn cuArrayGetMemoryRequirements(out: Out<CUDA_ARRAY_MEMORY_REQUIREMENTS>, handle: Handle<Array>, _device: c_int) {
        let (_, bytes) = size(&handle.get()?.descriptor)?;
        out.put(CUDA_ARRAY_MEMORY_REQUIREMENTS { size: bytes.next_multiple_of(512), alignment: 512, reserved: [0; 4] })
    }
    fn cuArrayDestroy(handle: Handle<Array>) {
        if !handle.get()?.owned {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        memory::free(handle.destroy()?.address)
    }
    fn cuMipmappedArrayCreate(out: Out<Handle<Mipmapped>>, descriptor: In<CUDA_ARRAY3D_DESCRIPTOR>, count: c_uint) {
        let it = context::current()?;
        let whole = descriptor.get()?;
        let half = |n: usize, level: u32| if n == 0 { 0 } else { (n >> level).max(1) };
        let level = |i: u32| CUDA_ARRAY3D_DESCRIPTOR {
            Width: half(whole.Width, i),
            Height: half(whole.Height, i),
            Depth: half(whole.Depth, i),
            ..whole
        };
        if count == 0 || count > 16 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let sizes = (0..count).map(|i| size(&level(i))).collect::<Answer<Vec<_>>>()?;
        let bytes: usize = sizes.iter().map(|(_, all)| all.next_multiple_of(512)).sum();
        let address = memory::allocate(it, bytes as u64, Nature::Device, 0)?;
        let mut at = address;
        let mut levels = Vec::new();
        for (i, (pitch, all)) in (0_u32..).zip(sizes) {
            let descriptor = level(i);
            let height = descriptor.Height;
            levels.push(Handle::new(Array { address: at, pitch, height, descriptor, owned: false }));
            at += all.next_multiple_of(512) as u64;
        }
        out.put(Handle::new(Mipmapped { address, levels }))
    }
    fn cuMipmappedArrayGetLevel(out: Out<Handle<Array>>, handle: Handle<Mipmapped>, level: c_uint) {
        let levels = &handle.get()?.levels;
        out.put(*levels.get(level as usize).ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuMipmappedArrayDestroy(handle: Handle<Mipmapped>) {
        let it = handle.destroy()?;
        for level in &it.levels {
            level.destroy()?;
        }
        memory::free(it.address)
    }
}
