//! Arrays and mipmapped arrays: charged by their extent; sparse and deferred ones take no memory
//! until physical memory (charged by itself) is mapped into them.

use core::ffi::c_uint;

use muxflow_abi::cuda::{
    CUDA_ARRAY_DESCRIPTOR, CUDA_ARRAY_DESCRIPTOR_v1, CUDA_ARRAY3D_DEFERRED_MAPPING,
    CUDA_ARRAY3D_DESCRIPTOR, CUDA_ARRAY3D_DESCRIPTOR_v1, CUDA_ARRAY3D_SPARSE, CUarray,
    CUmipmappedArray,
};

use crate::hook::peek;
use crate::quota::{self, Kind};

/// Bytes of one element of one channel. Block-compressed formats (0x91 to 0x9e) hold a byte or
/// half a byte per texel; a byte is charged.
fn element_bytes(format: c_uint) -> u64 {
    match format {
        0x01 | 0x08 | 0xc0 | 0xc3 => 1,
        0x02 | 0x09 | 0x10 | 0xc6 | 0xc9 => 2,
        0x03 | 0x0a | 0x20 => 4,
        0x91..=0x9e => 1,
        // Packed, planar and newer ones: four bytes are the most that they take per channel.
        _ => 4,
    }
}

fn bytes_of(extent: [u64; 3], format: c_uint, channels: c_uint) -> u64 {
    let texels = extent.iter().fold(1_u64, |product, &side| product.saturating_mul(side.max(1)));
    texels.saturating_mul(element_bytes(format)).saturating_mul(u64::from(channels.max(1)))
}

fn bytes_3d(descriptor: Option<CUDA_ARRAY3D_DESCRIPTOR>) -> u64 {
    descriptor.map_or(0, |d| {
        if d.Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) != 0 {
            return 0;
        }
        bytes_of([d.Width as u64, d.Height as u64, d.Depth as u64], d.Format, d.NumChannels)
    })
}

/// All levels of a mipmap: each side halves, layers and faces (depth of a layered array) do not
/// matter to the sum by more than what is charged.
fn bytes_mipmap(descriptor: Option<CUDA_ARRAY3D_DESCRIPTOR>, levels: c_uint) -> u64 {
    let Some(mut level) = descriptor else { return 0 };
    let mut sum = 0_u64;
    for _ in 0..levels.clamp(1, 32) {
        sum = sum.saturating_add(bytes_3d(Some(level)));
        level.Width = (level.Width / 2).max(1);
        level.Height = if level.Height == 0 { 0 } else { (level.Height / 2).max(1) };
    }
    sum
}

fn handle(out: *mut CUarray) -> u64 {
    peek(out.cast_const()).map_or(0, |array| array as u64)
}

hooks! {
    fn cuArrayCreate_v2(out: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR) |real| {
        let device = quota::current_device();
        let bytes = peek(descriptor).map_or(0, |d| {
            bytes_of([d.Width as u64, d.Height as u64, 1], d.Format, d.NumChannels)
        });
        quota::allocate(Kind::Array, device, bytes, || real(out, descriptor), || handle(out))
    }

    fn cuArrayCreate(out: *mut CUarray, descriptor: *const CUDA_ARRAY_DESCRIPTOR_v1) |real| {
        let device = quota::current_device();
        let bytes = peek(descriptor).map_or(0, |d| {
            bytes_of([d.Width.into(), d.Height.into(), 1], d.Format, d.NumChannels)
        });
        quota::allocate(Kind::Array, device, bytes, || real(out, descriptor), || handle(out))
    }

    fn cuArray3DCreate_v2(out: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR) |real| {
        let device = quota::current_device();
        let bytes = bytes_3d(peek(descriptor));
        quota::allocate(Kind::Array, device, bytes, || real(out, descriptor), || handle(out))
    }

    fn cuArray3DCreate(out: *mut CUarray, descriptor: *const CUDA_ARRAY3D_DESCRIPTOR_v1) |real| {
        let device = quota::current_device();
        let bytes = peek(descriptor).map_or(0, |d| {
            bytes_of([d.Width.into(), d.Height.into(), d.Depth.into()], d.Format, d.NumChannels)
        });
        quota::allocate(Kind::Array, device, bytes, || real(out, descriptor), || handle(out))
    }

    fn cuMipmappedArrayCreate(
        out: *mut CUmipmappedArray,
        descriptor: *const CUDA_ARRAY3D_DESCRIPTOR,
        levels: c_uint,
    ) |real| {
        let device = quota::current_device();
        let bytes = bytes_mipmap(peek(descriptor), levels);
        let call = || real(out, descriptor, levels);
        quota::allocate(Kind::Array, device, bytes, call, || handle(out))
    }

    fn cuArrayDestroy | cuMipmappedArrayDestroy(array: CUarray) |real| {
        quota::free(Kind::Array, array as u64, || real(array))
    }
}
