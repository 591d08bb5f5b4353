//! Stream capture: what goes into a capturing stream is neither gated nor counted, and nothing that
//! we call ourselves may invalidate a capture.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use muxflow_abi::cuda::result::CUDA_SUCCESS;
use muxflow_abi::cuda::{
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE, CUgraph, CUgraphNode, CUstream,
};

use crate::gate;
use crate::hook::peek;
use crate::quota::{self, Kind};

/// Captures begun and not ended in this process.
static ACTIVE: AtomicU32 = AtomicU32::new(0);
/// Streams in which they were begun, plus one (the default stream is null).
static STREAMS: [AtomicUsize; 16] = [const { AtomicUsize::new(0) }; 16];
/// Bytes that captured allocations will take, packed with their device; goes to the graph.
static BYTES: AtomicU64 = AtomicU64::new(0);

/// Whether any capture is going on in this process.
#[inline]
pub(crate) fn any() -> bool {
    ACTIVE.load(Ordering::Relaxed) != 0
}

/// Whether a launch into this stream is recorded instead of run. Streams in which a capture began
/// are known; others may have been drawn in by an event, and the driver is asked.
pub(crate) fn is_capturing(stream: CUstream) -> bool {
    if !any() {
        return false;
    }
    if STREAMS.iter().any(|known| known.load(Ordering::Relaxed) == stream as usize + 1) {
        return true;
    }
    let mut status: c_int = CU_STREAM_CAPTURE_STATUS_NONE;
    let status_place = &raw mut status;
    let asked = driver!(cuStreamIsCapturing(stream => CUstream, status_place => *mut c_int));
    asked == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE
}

/// Does something that a capture in global mode forbids, with this thread's mode relaxed.
pub(crate) fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    let place = &raw mut mode;
    let changed = driver!(cuThreadExchangeStreamCaptureMode(place => *mut c_int)) == CUDA_SUCCESS;
    let done = work();
    if changed {
        driver!(cuThreadExchangeStreamCaptureMode(place => *mut c_int));
    }
    done
}

/// A captured allocation was charged: the graph will hold it.
pub(crate) fn add_bytes(device: usize, bytes: u64) {
    let before = BYTES.load(Ordering::Relaxed);
    let (_, held) = quota::unpack(before);
    BYTES.store(quota::pack(device, held + bytes), Ordering::Relaxed);
}

fn begun(stream: CUstream) {
    ACTIVE.fetch_add(1, Ordering::Relaxed);
    for place in &STREAMS {
        let free =
            place.compare_exchange(0, stream as usize + 1, Ordering::Relaxed, Ordering::Relaxed);
        if free.is_ok() {
            break;
        }
    }
    gate::attend();
}

/// Whatever the driver says: a stream whose capture was ended, or broken, captures no more.
fn ended(stream: CUstream) {
    for place in &STREAMS {
        let known =
            place.compare_exchange(stream as usize + 1, 0, Ordering::Relaxed, Ordering::Relaxed);
        if known.is_ok() {
            ACTIVE.fetch_sub(1, Ordering::Relaxed);
            break;
        }
    }
    gate::attend();
}

hooks! {
    fn cuStreamBeginCapture | cuStreamBeginCapture_ptsz(stream: CUstream) |real| {
        let result = real(stream);
        if result == CUDA_SUCCESS {
            begun(stream);
        }
        result
    }

    fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: c_int) |real| {
        let result = real(stream, mode);
        if result == CUDA_SUCCESS {
            begun(stream);
        }
        result
    }

    fn cuStreamBeginCaptureToGraph | cuStreamBeginCaptureToGraph_ptsz(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        data: *const c_void,
        count: usize,
        mode: c_int,
    ) |real| {
        let result = real(stream, graph, dependencies, data, count, mode);
        if result == CUDA_SUCCESS {
            begun(stream);
        }
        result
    }

    fn cuStreamEndCapture | cuStreamEndCapture_ptsz(stream: CUstream, out: *mut CUgraph) |real| {
        let result = real(stream, out);
        ended(stream);
        let (device, bytes) = quota::unpack(BYTES.swap(0, Ordering::Relaxed));
        if bytes > 0 {
            match peek(out.cast_const()) {
                Some(graph) if result == CUDA_SUCCESS => {
                    quota::hold(Kind::Graph, graph as u64, device, bytes);
                }
                _ => quota::uncharge(device, bytes),
            }
        }
        result
    }
}
