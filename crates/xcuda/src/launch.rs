//! Every way to start kernels, through one gate.

use core::ffi::{c_int, c_uint, c_void};

use muxflow_abi::cuda::{
    CU_STREAM_PER_THREAD, CUDA_LAUNCH_PARAMS, CUfunction, CUgraphExec, CUlaunchConfig, CUstream,
};

use crate::hook::peek;
use crate::{gate, graph};

/// The stream that null means in a per-thread variant.
#[inline(always)]
fn per_thread(stream: CUstream) -> CUstream {
    if stream.is_null() { CU_STREAM_PER_THREAD as CUstream } else { stream }
}

const LEGACY: CUstream = core::ptr::null_mut();

hooks! {
    fn cuLaunchKernel(
        function: CUfunction,
        gx: c_uint, gy: c_uint, gz: c_uint,
        bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) |real| {
        if gate::is_open(function as usize, stream) {
            return real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
        }
        gate::pass_slowly(function as usize, stream, 1, move || {
            real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
        })
    }

    fn cuLaunchKernel_ptsz(
        function: CUfunction,
        gx: c_uint, gy: c_uint, gz: c_uint,
        bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) |real| {
        let own = per_thread(stream);
        if gate::is_open(function as usize, own) {
            return real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
        }
        gate::pass_slowly(function as usize, own, 1, move || {
            real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra)
        })
    }

    fn cuLaunchKernelEx(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) |real| {
        let stream = peek(config).map_or(LEGACY, |config| config.hStream);
        gate::pass(function as usize, stream, || real(config, function, parameters, extra))
    }

    fn cuLaunchKernelEx_ptsz(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) |real| {
        let stream = per_thread(peek(config).map_or(LEGACY, |config| config.hStream));
        gate::pass(function as usize, stream, || real(config, function, parameters, extra))
    }

    fn cuLaunchCooperativeKernel(
        function: CUfunction,
        gx: c_uint, gy: c_uint, gz: c_uint,
        bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
    ) |real| {
        gate::pass(function as usize, stream, || {
            real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters)
        })
    }

    fn cuLaunchCooperativeKernel_ptsz(
        function: CUfunction,
        gx: c_uint, gy: c_uint, gz: c_uint,
        bx: c_uint, by: c_uint, bz: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
    ) |real| {
        gate::pass(function as usize, per_thread(stream), || {
            real(function, gx, gy, gz, bx, by, bz, shared, stream, parameters)
        })
    }

    fn cuLaunchCooperativeKernelMultiDevice(
        list: *mut CUDA_LAUNCH_PARAMS,
        count: c_uint,
        flags: c_uint,
    ) |real| {
        let first = peek(list.cast_const());
        let stream = first.map_or(LEGACY, |launch| launch.hStream);
        let function = first.map_or(0, |launch| launch.function as usize);
        gate::pass_slowly(function, stream, count.max(1).into(), || real(list, count, flags))
    }

    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) |real| {
        gate::pass_slowly(exec as usize, stream, graph::cost(exec), || real(exec, stream))
    }

    fn cuGraphLaunch_ptsz(exec: CUgraphExec, stream: CUstream) |real| {
        let own = per_thread(stream);
        gate::pass_slowly(exec as usize, own, graph::cost(exec), || real(exec, stream))
    }

    fn cuLaunch(function: CUfunction) |real| {
        gate::pass(function as usize, LEGACY, || real(function))
    }

    fn cuLaunchGrid(function: CUfunction, width: c_int, height: c_int) |real| {
        gate::pass(function as usize, LEGACY, || real(function, width, height))
    }

    fn cuLaunchGridAsync(
        function: CUfunction,
        width: c_int,
        height: c_int,
        stream: CUstream,
    ) |real| {
        gate::pass(function as usize, stream, || real(function, width, height, stream))
    }
}
