//! Stream capture: what goes into a capturing stream is neither gated nor counted, and nothing that
//! we call ourselves may invalidate a capture.

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicU32, Ordering};

use muxflow_abi::cuda::result::CUDA_SUCCESS;
use muxflow_abi::cuda::{
    CU_STREAM_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_STATUS_NONE, CU_STREAM_PER_THREAD, CUgraph,
    CUgraphNode, CUresult, CUstream,
};

use crate::hook::peek;
use crate::map::Map;
use crate::{gate, graph, launch, quota, sys};

/// Captures begun and not ended in this process: as many as [`STREAMS`] has.
static ACTIVE: AtomicU32 = AtomicU32::new(0);
/// Streams in which they were begun, by [`name`].
static STREAMS: Map = Map::new();
/// Bytes that captured allocations will take, packed with their device, by [`ticket`] of the capture;
/// they go to its graph.
static BYTES: Map = Map::new();

/// Tells the numbers that the driver gives to captures from streams.
const NUMBERED: u64 = 1 << 62;
/// Tells default streams of threads from other streams.
const OF_THREAD: u64 = 1 << 63;

/// A stream as a key: each thread has a default stream of its own.
fn name(stream: CUstream) -> u64 {
    match stream as usize {
        0 => 1,
        CU_STREAM_PER_THREAD => OF_THREAD | sys::thread_word() as u64,
        handle => handle as u64,
    }
}

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
    if STREAMS.get(name(stream)).is_some() {
        return true;
    }
    let mut status: c_int = CU_STREAM_CAPTURE_STATUS_NONE;
    let status_place = &raw mut status;
    let asked = driver!(cuStreamIsCapturing(stream => CUstream, status_place => *mut c_int));
    asked == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE
}

/// The capture that a stream takes part in, as a key: by the driver's number for it, which is the same
/// in all its streams, or by the stream itself where the driver does not say.
fn ticket(stream: CUstream) -> u64 {
    let mut status: c_int = CU_STREAM_CAPTURE_STATUS_NONE;
    let mut number = 0_u64;
    let (status_place, number_place) = (&raw mut status, &raw mut number);
    let asked = driver!(cuStreamGetCaptureInfo(
        stream => CUstream,
        status_place => *mut c_int,
        number_place => *mut u64,
    ));
    if asked == CUDA_SUCCESS && number != 0 { NUMBERED | number } else { name(stream) }
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

/// A captured allocation was charged: the graph of its capture will hold it.
pub(crate) fn add_bytes(stream: CUstream, device: usize, bytes: u64) {
    let ticket = ticket(stream);
    if BYTES.add(ticket, bytes).is_none() {
        BYTES.insert(ticket, quota::pack(device, bytes));
    }
}

fn begin(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if result == CUDA_SUCCESS && STREAMS.insert(name(stream), 0) {
        ACTIVE.fetch_add(1, Ordering::Relaxed);
        gate::attend();
    }
    result
}

/// Whatever the driver says: a stream whose capture was ended, or broken, captures no more.
fn ended(stream: CUstream) {
    if STREAMS.remove(name(stream)).is_some() {
        ACTIVE.fetch_sub(1, Ordering::Relaxed);
        gate::attend();
    }
}

/// Ends a capture; what its allocations were charged with goes to the graph.
fn end(stream: CUstream, out: *mut CUgraph, call: impl FnOnce() -> CUresult) -> CUresult {
    let ticket = ticket(stream);
    let result = call();
    ended(stream);
    let Some((device, bytes)) = BYTES.remove(ticket).map(quota::unpack) else { return result };
    match peek(out.cast_const()) {
        Some(graph) if result == CUDA_SUCCESS => graph::plan(graph, device, bytes),
        _ => quota::uncharge(device, bytes),
    }
    result
}

/// A stream is destroyed, and with it its capture.
pub(crate) fn stream_lost(stream: CUstream) {
    if !any() || STREAMS.get(name(stream)).is_none() {
        return;
    }
    let bytes = BYTES.remove(ticket(stream));
    ended(stream);
    if let Some((device, bytes)) = bytes.map(quota::unpack) {
        quota::uncharge(device, bytes);
    }
}

hooks! {
    fn cuStreamBeginCapture(stream: CUstream) |real| {
        begin(stream, || real(stream))
    }

    fn cuStreamBeginCapture_ptsz(stream: CUstream) |real| {
        begin(launch::per_thread(stream), || real(stream))
    }

    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_int) |real| {
        begin(stream, || real(stream, mode))
    }

    fn cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: c_int) |real| {
        begin(launch::per_thread(stream), || real(stream, mode))
    }

    fn cuStreamBeginCaptureToGraph(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        data: *const c_void,
        count: usize,
        mode: c_int,
    ) |real| {
        begin(stream, || real(stream, graph, dependencies, data, count, mode))
    }

    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: CUstream,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        data: *const c_void,
        count: usize,
        mode: c_int,
    ) |real| {
        let own = launch::per_thread(stream);
        begin(own, || real(stream, graph, dependencies, data, count, mode))
    }

    fn cuStreamEndCapture(stream: CUstream, out: *mut CUgraph) |real| {
        end(stream, out, || real(stream, out))
    }

    fn cuStreamEndCapture_ptsz(stream: CUstream, out: *mut CUgraph) |real| {
        end(launch::per_thread(stream), out, || real(stream, out))
    }
}
