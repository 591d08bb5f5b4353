//! `cuFunc*`, `cuParam*` and occupancy.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::CUlaunchConfig;
use muxflow_abi::cuda::result::CUDA_ERROR_INVALID_VALUE;
use muxflow_emulated_gpu::cost::resident_blocks;

use crate::context::{self, lock};
use crate::ffi::{Answer, Handle, In, Out, api};
use crate::module::{Function, Module};

/// An attribute by its number in `cuda.h`.
pub(crate) fn attribute(it: &Function, number: c_int) -> Answer<c_int> {
    Ok(match number {
        0 => it.max_threads.cast_signed(),
        1 => it.static_shared_bytes as c_int,
        2 | 3 => 0,
        4 => 32,
        5 => 75,
        6 => 75,
        7 => 0,
        8 => it.max_dynamic_shared.load(Ordering::Relaxed),
        9 => it.carveout.load(Ordering::Relaxed),
        10..=15 => 0,
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    })
}

pub(crate) fn set_attribute(it: &Function, number: c_int, value: c_int) -> Answer {
    match number {
        8 => {
            let most = context::current().map_or(u64::MAX, |c| c.device.facts.shared_bytes[1]);
            if value < 0 || value as u64 > most {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
            it.max_dynamic_shared.store(value, Ordering::Relaxed);
        }
        9 => it.carveout.store(value, Ordering::Relaxed),
        10..=15 => {}
        _ => return Err(CUDA_ERROR_INVALID_VALUE),
    }
    Ok(())
}

pub(crate) fn param(it: &Function, index: usize, offset: Out<usize>, bytes: Out<usize>) -> Answer {
    let (at, size) = it.params.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    offset.offer(*at);
    bytes.offer(*size);
    Ok(())
}

fn blocks(it: &Function, threads: c_int, shared: usize) -> Answer<c_int> {
    let facts = &context::current()?.device.facts;
    let threads = u32::try_from(threads).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    let shared = (it.static_shared_bytes + shared) as u64;
    Ok(resident_blocks(facts, threads, shared).cast_signed())
}

type SharedOfBlock = Option<unsafe extern "C" fn(c_int) -> usize>;

fn potential(
    grid: Out<c_int>,
    block: Out<c_int>,
    it: &Function,
    of_block: SharedOfBlock,
    shared: usize,
    limit: c_int,
) -> Answer {
    let sms = context::current()?.sms.cast_signed();
    let most = if limit <= 0 { 1024 } else { limit.min(1024) }.min(it.max_threads.cast_signed());
    let mut best = (0, 0, 0);
    for threads in (1..=most / 32).rev().map(|w| w * 32) {
        // SAFETY: the caller gave this function to be called with block sizes.
        let shared = of_block.map_or(shared, |f| unsafe { f(threads) });
        let fitting = blocks(it, threads, shared)?;
        if fitting * threads > best.0 {
            best = (fitting * threads, threads, fitting);
        }
    }
    grid.offer(best.2 * sms);
    block.offer(best.1);
    Ok(())
}

fn with_buffer(handle: Handle<Function>, offset: c_int, bytes: &[u8]) -> Answer {
    let at = usize::try_from(offset).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    let mut buffer = lock(&handle.get()?.param_buffer);
    if at + bytes.len() > 4096 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if buffer.len() < at + bytes.len() {
        buffer.resize(at + bytes.len(), 0);
    }
    buffer[at..at + bytes.len()].copy_from_slice(bytes);
    Ok(())
}

api! {
    fn cuFuncGetAttribute(out: Out<c_int>, number: c_int, handle: Handle<Function>) {
        out.put(attribute(handle.get()?, number)?)
    }
    fn cuFuncSetAttribute(handle: Handle<Function>, number: c_int, value: c_int) {
        set_attribute(handle.get()?, number, value)
    }
    fn cuFuncSetCacheConfig(handle: Handle<Function>, _config: c_int) { handle.get().map(drop) }
    fn cuFuncSetSharedMemConfig(handle: Handle<Function>, _config: c_int) { handle.get().map(drop) }
    fn cuFuncGetModule(out: Out<Handle<Module>>, handle: Handle<Function>) {
        let module = handle.get()?.module.get().copied();
        out.put(module.ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }
    fn cuFuncGetName(out: Out<*const c_char>, handle: Handle<Function>) {
        out.put(handle.get()?.c_name.as_ptr())
    }
    fn cuFuncGetParamInfo(handle: Handle<Function>, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        param(handle.get()?, index, offset, bytes)
    }
    fn cuFuncGetParamCount(handle: Handle<Function>, out: Out<usize>) {
        out.put(handle.get()?.params.len())
    }
    fn cuFuncIsLoaded(out: Out<c_int>, handle: Handle<Function>) {
        handle.get()?;
        out.put(1)
    }
    fn cuFuncLoad(handle: Handle<Function>) { handle.get().map(drop) }
    fn cuFuncSetBlockShape(handle: Handle<Function>, x: c_int, y: c_int, z: c_int) {
        if x < 1 || y < 1 || z < 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        lock(&handle.get()?.block_shape).0 = [x, y, z].map(c_int::cast_unsigned);
        Ok(())
    }
    fn cuFuncSetSharedSize(handle: Handle<Function>, bytes: c_uint) {
        lock(&handle.get()?.block_shape).1 = bytes;
        Ok(())
    }
    fn cuParamSetSize(handle: Handle<Function>, bytes: c_uint) {
        if bytes > 4096 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        lock(&handle.get()?.param_buffer).resize(bytes as usize, 0);
        Ok(())
    }
    fn cuParamSeti(handle: Handle<Function>, offset: c_int, value: c_uint) {
        with_buffer(handle, offset, &value.to_le_bytes())
    }
    fn cuParamSetf(handle: Handle<Function>, offset: c_int, value: f32) {
        with_buffer(handle, offset, &value.to_le_bytes())
    }
    fn cuParamSetv(handle: Handle<Function>, offset: c_int, data: *const c_void, bytes: c_uint) {
        if data.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller promises that many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), bytes as usize) };
        with_buffer(handle, offset, bytes)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<c_int>, handle: Handle<Function>, threads: c_int, shared: usize) {
        out.put(blocks(handle.get()?, threads, shared)?)
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out: Out<c_int>, handle: Handle<Function>, threads: c_int, shared: usize, _flags: c_uint) {
        out.put(blocks(handle.get()?, threads, shared)?)
    }
    fn cuOccupancyMaxPotentialBlockSize(grid: Out<c_int>, block: Out<c_int>, handle: Handle<Function>, of_block: SharedOfBlock, shared: usize, limit: c_int) {
        potential(grid, block, handle.get()?, of_block, shared, limit)
    }
    fn cuOccupancyMaxPotentialBlockSizeWithFlags(grid: Out<c_int>, block: Out<c_int>, handle: Handle<Function>, of_block: SharedOfBlock, shared: usize, limit: c_int, _flags: c_uint) {
        potential(grid, block, handle.get()?, of_block, shared, limit)
    }
    fn cuOccupancyAvailableDynamicSMemPerBlock(out: Out<usize>, handle: Handle<Function>, count: c_int, _threads: c_int) {
        let it = handle.get()?;
        let all = context::current()?.device.facts.shared_bytes[0] as usize;
        let each = all / usize::try_from(count.max(1)).unwrap_or(1);
        out.put(each.saturating_sub(it.static_shared_bytes + 1024))
    }
    fn cuOccupancyMaxPotentialClusterSize(out: Out<c_int>, handle: Handle<Function>, _config: In<CUlaunchConfig>) {
        handle.get()?;
        out.put(1)
    }
    fn cuOccupancyMaxActiveClusters(out: Out<c_int>, handle: Handle<Function>, config: In<CUlaunchConfig>) {
        let c = config.get()?;
        let threads = (c.blockDimX * c.blockDimY * c.blockDimZ).cast_signed();
        let each = blocks(handle.get()?, threads, c.sharedMemBytes as usize)?;
        out.put(each * context::current()?.sms.cast_signed())
    }
}
