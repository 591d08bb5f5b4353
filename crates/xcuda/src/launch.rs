//! Every way to start kernels, through one gate; and the calls that wait for them, which tell how long
//! kernels take.

use core::ffi::{c_int, c_uint, c_void};

use muxflow_abi::cuda::result::CUDA_ERROR_NOT_FOUND;
use muxflow_abi::cuda::{
    CU_STREAM_PER_THREAD, CUDA_LAUNCH_PARAMS, CUcontext, CUevent, CUfunction, CUgraphExec,
    CUlaunchConfig, CUresult, CUstream,
};

use crate::hook::{Hook, peek};
use crate::table::index;
use crate::{capture, flight, gate, graph};

/// The stream that null means in a per-thread variant.
#[inline(always)]
pub(crate) fn per_thread(stream: CUstream) -> CUstream {
    if stream.is_null() { CU_STREAM_PER_THREAD as CUstream } else { stream }
}

const LEGACY: CUstream = core::ptr::null_mut();

/// The commonest launch, in two functions: while the gate is open it is a few loads and a jump with the
/// arguments as they lie, for nothing else in it makes a call or needs a frame.
macro_rules! plain_launch {
    (
        fn $name:ident, $slow:ident($($arg:ident: $ty:ty),* $(,)?)
        kernel $function:ident, stream $stream:expr
    ) => {
        #[expect(non_snake_case, reason = "the driver's name")]
        unsafe extern "C" fn $name($($arg: $ty),*) -> CUresult {
            type Launch = unsafe extern "C" fn($($ty),*) -> CUresult;
            let known = crate::real::known(index::$name);
            let open = !known.is_null() && gate::is_open($function as usize, $stream);
            // SAFETY: the driver's function of this name (held to cuda.h by the header test) or our
            // own, with the program's arguments.
            unsafe {
                let next = if open { core::mem::transmute::<*const c_void, Launch>(known) } else { $slow };
                next($($arg),*)
            }
        }

        #[cold]
        #[inline(never)]
        unsafe extern "C" fn $slow($($arg: $ty),*) -> CUresult {
            if crate::real::function(index::$name).is_null() {
                return CUDA_ERROR_NOT_FOUND;
            }
            gate::pass_slowly($function as usize, $stream, 1, || driver!($name($($arg => $ty),*)))
        }
    };
}

/// Both variants: they differ in the stream that null means.
macro_rules! plain_launches {
    ($function:ident, $stream:ident, $arguments:tt) => {
        plain_launches!(@one cuLaunchKernel, wait, $arguments, $function, $stream);
        plain_launches!(@one cuLaunchKernel_ptsz, wait_per_thread, $arguments, $function, per_thread($stream));
    };
    (@one $name:ident, $slow:ident, ($($arguments:tt)*), $function:ident, $stream:expr) => {
        plain_launch! { fn $name, $slow($($arguments)*) kernel $function, stream $stream }
    };
}

plain_launches!(function, stream, (
    function: CUfunction,
    gx: c_uint, gy: c_uint, gz: c_uint,
    bx: c_uint, by: c_uint, bz: c_uint,
    shared: c_uint,
    stream: CUstream,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
));

/// The handlers of the commonest launch.
pub(crate) static PLAIN: &[Hook] = &[
    Hook { index: index::cuLaunchKernel, handler: cuLaunchKernel as *const c_void },
    Hook { index: index::cuLaunchKernel_ptsz, handler: cuLaunchKernel_ptsz as *const c_void },
];

hooks! {
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

    fn cuStreamDestroy | cuStreamDestroy_v2(stream: CUstream) |real| {
        flight::stream_lost(stream);
        capture::stream_lost(stream);
        real(stream)
    }

    fn cuStreamSynchronize | cuStreamSynchronize_ptsz(stream: CUstream) |real| {
        gate::synchronise(|| real(stream))
    }

    fn cuCtxSynchronize() |real| {
        gate::synchronise(real)
    }

    fn cuCtxSynchronize_v2(context: CUcontext) |real| {
        gate::synchronise(|| real(context))
    }

    fn cuEventSynchronize(event: CUevent) |real| {
        gate::synchronise(|| real(event))
    }
}
