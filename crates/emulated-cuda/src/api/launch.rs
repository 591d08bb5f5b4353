//! `cuLaunch*`.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES};
use muxflow_abi::cuda::{CUDA_LAUNCH_PARAMS, CUlaunchConfig};
use muxflow_emulated_gpu::facts::Facts;
use muxflow_emulated_gpu::ptx::Grid;

use crate::context::lock;
use crate::ffi::{Answer, Handle, In, Out, api, both};
use crate::module::Function;
use crate::stream::{self, Default, Stream};
use crate::work::{Launch, Work};

/// Pointers to the arguments, or a packed buffer behind markers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arguments {
    pub params: In<*const u8>,
    pub extra: In<*const c_void>,
}

/// Packs the arguments of a launch as the kernel will see them.
fn pack(function: &Function, arguments: Arguments) -> Answer<Vec<u8>> {
    if arguments.extra.is_given() {
        return unpack_extra(arguments.extra);
    }
    let mut packed = vec![0; function.param_bytes];
    if function.params.is_empty() {
        return Ok(packed);
    }
    for (i, (offset, bytes)) in function.params.iter().enumerate() {
        let from = arguments.params.at(i)?;
        if from.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the caller promises a pointer to each argument, as long as its type, which the
        // kernel's own signature says.
        let value = unsafe { std::slice::from_raw_parts(from, *bytes) };
        packed[*offset..offset + bytes].copy_from_slice(value);
    }
    Ok(packed)
}

/// Markers: 1 buffer pointer, 2 pointer to its size, 0 end.
fn unpack_extra(extra: In<*const c_void>) -> Answer<Vec<u8>> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
    for i in (0..8).step_by(2) {
        match extra.at(i)? as usize {
            1 => buffer = extra.at(i + 1)?.cast(),
            // SAFETY: the caller promises a pointer to a size behind this marker.
            2 => size = unsafe { extra.at(i + 1)?.cast::<usize>().read_unaligned() },
            _ => break,
        }
    }
    if buffer.is_null() || size > 1 << 16 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller promises that many bytes.
    Ok(unsafe { std::slice::from_raw_parts(buffer, size) }.to_vec())
}

/// Checks a launch and works out what it costs. Arguments that nothing reads are kept only where
/// they may be asked for again: in a graph.
pub(crate) fn prepare(
    facts: &Facts,
    function: &'static Function,
    grid: Grid,
    arguments: Arguments,
    for_graph: bool,
) -> Answer<Launch> {
    let [bx, by, bz] = grid.blocks;
    let [x, y, z] = grid.threads;
    let sane = bx > 0 && by > 0 && bz > 0 && x > 0 && y > 0 && z > 0;
    if !sane || by > 65_535 || bz > 65_535 || bx > i32::MAX as u32 || x > 1024 || y > 1024 || z > 64
    {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if u64::from(x) * u64::from(y) * u64::from(z) > u64::from(function.max_threads.min(1024)) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // More than the usual must be asked for by an attribute of the function.
    let allowed = function.max_dynamic_shared.load(Ordering::Relaxed).cast_unsigned();
    let shared = function.static_shared_bytes as u64 + u64::from(grid.shared_bytes);
    if grid.shared_bytes > allowed || shared > facts.shared_bytes[1] {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if muxflow_emulated_gpu::cost::resident_blocks(facts, x * y * z, shared) == 0 {
        return Err(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    }
    let asked_for = for_graph && (arguments.params.is_given() || arguments.extra.is_given());
    let params: Arc<[u8]> = if function.reads_params() || asked_for {
        pack(function, arguments)?.into()
    } else {
        Arc::default()
    };
    let (cost, computes) = function.cost(facts, &grid, &params);
    Ok(Launch { function, grid, params, cost, computes })
}

/// Puts a launch into a stream.
fn launch(
    handle: Handle<Function>,
    grid: Grid,
    stream: Handle<Stream>,
    which: Default,
    arguments: Arguments,
) -> Answer {
    let function = handle.get()?;
    let stream = stream::resolve(stream, which)?;
    let captured = stream.capturing.load(Ordering::Relaxed);
    let launch = prepare(&stream.gpu.facts, function, grid, arguments, captured)?;
    stream.submit(Work::Kernel(launch)).map(drop)
}

/// The old way: block shape, shared size and parameters were set before.
fn launch_set(handle: Handle<Function>, blocks: [c_int; 2], stream: Handle<Stream>) -> Answer {
    let function = handle.get()?;
    let (threads, shared_bytes) = *lock(&function.block_shape);
    let [x, y] = blocks.map(|b| b.max(0).cast_unsigned());
    let grid = Grid { blocks: [x, y, 1], threads, shared_bytes };
    let buffer = lock(&function.param_buffer).clone();
    let size = buffer.len();
    let extra: [*const c_void; 5] = [
        std::ptr::without_provenance(1),
        buffer.as_ptr().cast(),
        std::ptr::without_provenance(2),
        (&raw const size).cast(),
        std::ptr::null(),
    ];
    let arguments = Arguments { params: In::nothing(), extra: In::of_pointer(extra.as_ptr()) };
    launch(handle, grid, stream, Default::Legacy, arguments)
}

/// A cooperative launch must fit at once.
fn check_cooperative(
    handle: Handle<Function>,
    stream: Handle<Stream>,
    which: Default,
    grid: Grid,
) -> Answer {
    let facts = &stream::resolve(stream, which)?.gpu.facts;
    let shared = handle.get()?.static_shared_bytes as u64 + u64::from(grid.shared_bytes);
    let each = muxflow_emulated_gpu::cost::resident_blocks(facts, grid.block_threads(), shared);
    if grid.block_count() > u64::from(each) * u64::from(facts.sms) {
        return Err(muxflow_abi::cuda::result::CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    }
    Ok(())
}

fn grid(b: [c_uint; 3], t: [c_uint; 3], shared_bytes: c_uint) -> Grid {
    Grid { blocks: b, threads: t, shared_bytes }
}

both! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz(which; handle: Handle<Function>, bx: c_uint, by: c_uint, bz: c_uint, x: c_uint, y: c_uint, z: c_uint, shared: c_uint, stream: Handle<Stream>, params: In<*const u8>, extra: In<*const c_void>) {
        launch(handle, grid([bx, by, bz], [x, y, z], shared), stream, which, Arguments { params, extra })
    }
    fn cuLaunchKernelEx, cuLaunchKernelEx_ptsz(which; config: In<CUlaunchConfig>, handle: Handle<Function>, params: In<*const u8>, extra: In<*const c_void>) {
        let c = config.get()?;
        let grid = grid([c.gridDimX, c.gridDimY, c.gridDimZ], [c.blockDimX, c.blockDimY, c.blockDimZ], c.sharedMemBytes);
        launch(handle, grid, Handle::from_raw(c.hStream), which, Arguments { params, extra })
    }
    fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz(which; handle: Handle<Function>, bx: c_uint, by: c_uint, bz: c_uint, x: c_uint, y: c_uint, z: c_uint, shared: c_uint, stream: Handle<Stream>, params: In<*const u8>) {
        let grid = grid([bx, by, bz], [x, y, z], shared);
        check_cooperative(handle, stream, which, grid)?;
        launch(handle, grid, stream, which, Arguments { params, extra: In::nothing() })
    }
}

api! {
    fn cuLaunch(handle: Handle<Function>) { launch_set(handle, [1, 1], Handle::null()) }
    fn cuLaunchGrid(handle: Handle<Function>, width: c_int, height: c_int) {
        launch_set(handle, [width, height], Handle::null())
    }
    fn cuLaunchGridAsync(handle: Handle<Function>, width: c_int, height: c_int, stream: Handle<Stream>) {
        launch_set(handle, [width, height], stream)
    }
    fn cuLaunchCooperativeKernelMultiDevice(list: Out<CUDA_LAUNCH_PARAMS>, count: c_uint, _flags: c_uint) {
        let list = In::of_pointer(list.raw());
        for i in 0..count as usize {
            let l: CUDA_LAUNCH_PARAMS = list.at(i)?;
            let grid = grid([l.gridDimX, l.gridDimY, l.gridDimZ], [l.blockDimX, l.blockDimY, l.blockDimZ], l.sharedMemBytes);
            let params = In::of_pointer(l.kernelParams.cast_const().cast());
            let arguments = Arguments { params, extra: In::nothing() };
            launch(Handle::from_raw(l.function), grid, Handle::from_raw(l.hStream), Default::Legacy, arguments)?;
        }
        Ok(())
    }
}
