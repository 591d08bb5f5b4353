//! `cuStream*`: making, waiting, host functions, values in memory, capture.

use std::ffi::{c_int, c_uint, c_void};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_READY,
};
use muxflow_abi::cuda::{CUdevice, CUdeviceptr};

use crate::capture::{self, Capture};
use crate::context::{Context, lock};
use crate::event::Event;
use crate::ffi::{Answer, Handle, In, Out, api, both};
use crate::graph::{self, Graph, Node, Task};
use crate::memory;
use crate::stream::{self, Default, Stream};
use crate::work::{HostCall, Opaque, Work};

type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;
type Callback = Option<unsafe extern "C" fn(usize, u32, *mut c_void)>;

fn destroy(handle: Handle<Stream>) -> Answer {
    let it = handle.destroy()?;
    stream::retire(it);
    Ok(())
}

fn host(
    handle: Handle<Stream>,
    which: Default,
    function: HostFunction,
    data: *mut c_void,
) -> Answer {
    let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let call = HostCall::Function(function, Opaque(data));
    stream::resolve(handle, which)?.submit(Work::Host(call)).map(drop)
}

fn value(handle: Handle<Stream>, which: Default, work: Work) -> Answer {
    let (Work::Write(address, _, bytes) | Work::WaitValue(address, _, bytes, _)) = work else {
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    memory::check_device(address, bytes)?;
    if !address.is_multiple_of(bytes as u64) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    stream::resolve(handle, which)?.submit(work).map(drop)
}

/// One operation of a batch: six words, of which the first says which.
fn batch(handle: Handle<Stream>, which: Default, count: c_uint, list: In<[u64; 6]>) -> Answer {
    for i in 0..count as usize {
        let [kind, address, amount, flags, ..] = list.at(i)?;
        let how = flags as u32;
        let work = match kind as u32 {
            1 => Work::WaitValue(address, amount & 0xffff_ffff, 4, how),
            2 => Work::Write(address, amount & 0xffff_ffff, 4),
            4 => Work::WaitValue(address, amount, 8, how),
            5 => Work::Write(address, amount, 8),
            3 | 6 => continue,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        };
        value(handle, which, work)?;
    }
    Ok(())
}

/// None, active or spoiled, as in `cuda.h`.
fn status_of(capture: Option<&Capture>) -> c_int {
    capture.map_or(0, |capture| if capture.is_spoiled() { 2 } else { 1 })
}

fn capture_status(
    handle: Handle<Stream>,
    which: Default,
    status: Out<c_int>,
    id: Out<u64>,
    graph: Out<Handle<Graph>>,
) -> Answer<Vec<Handle<Node>>> {
    let it = stream::resolve(handle, which)?;
    it.check_implicit()?;
    let capture = lock(&it.capture);
    status.offer(status_of(capture.as_ref()));
    let Some(capture) = capture.as_ref() else { return Ok(Vec::new()) };
    id.offer(capture.id);
    graph.offer(capture.graph);
    Ok(capture.frontier.clone())
}

/// The list lives until the next question of this thread, as the interface allows.
fn put_nodes(nodes: Vec<Handle<Node>>, list: Out<*const Handle<Node>>, count: Out<usize>) {
    use std::cell::RefCell;
    thread_local! {
        static LAST: RefCell<Vec<Handle<Node>>> = const { RefCell::new(Vec::new()) };
    }
    count.offer(nodes.len());
    LAST.with_borrow_mut(|last| {
        *last = nodes;
        list.offer(last.as_ptr());
    });
}

fn begin(handle: Handle<Stream>, which: Default, mode: c_uint) -> Answer {
    if handle.number() == 0 && which == Default::Legacy || handle.number() == 1 {
        return Err(muxflow_abi::cuda::result::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    Capture::begin(stream::resolve(handle, which)?, graph::create(), Vec::new(), mode)
}

fn update_dependencies(it: &'static Stream, nodes: Vec<Handle<Node>>, replace: bool) -> Answer {
    let mut capture = lock(&it.capture);
    let capture = capture.as_mut().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
    if replace {
        capture.frontier = nodes;
    } else {
        capture.frontier.extend(nodes);
    }
    Ok(())
}

fn none<T>() -> Out<T> {
    Out::nowhere()
}

api! {
    fn cuStreamCreate(out: Out<Handle<Stream>>, flags: c_uint) {
        if !out.is_given() || flags > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(stream::create(flags, 0)?)
    }
    fn cuStreamCreateWithPriority(out: Out<Handle<Stream>>, flags: c_uint, priority: c_int) {
        if !out.is_given() || flags > 1 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        out.put(stream::create(flags, priority)?)
    }
    fn cuStreamDestroy_v2(handle: Handle<Stream>) { destroy(handle) }
    fn cuStreamDestroy(handle: Handle<Stream>) { destroy(handle) }
}

both! {
    fn cuStreamSynchronize, cuStreamSynchronize_ptsz(which; handle: Handle<Stream>) {
        stream::resolve(handle, which)?.synchronize()
    }
    fn cuStreamQuery, cuStreamQuery_ptsz(which; handle: Handle<Stream>) {
        if stream::resolve(handle, which)?.is_idle()? { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    }
    fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(which; handle: Handle<Stream>, event: Handle<Event>, flags: c_uint) {
        let (it, stream) = (event.get()?, stream::resolve(handle, which)?);
        match stream.external(flags)? {
            true => stream.capture_task(Task::Wait(event)),
            false => it.hold(stream),
        }
    }
    fn cuStreamAddCallback, cuStreamAddCallback_ptsz(which; handle: Handle<Stream>, function: Callback, data: *mut c_void, _flags: c_uint) {
        let function = function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
        let call = HostCall::Callback(function, handle.number(), Opaque(data));
        stream::resolve(handle, which)?.submit(Work::Host(call)).map(drop)
    }
    fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(which; handle: Handle<Stream>, function: HostFunction, data: *mut c_void) {
        host(handle, which, function, data)
    }
    fn cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(which; handle: Handle<Stream>, function: HostFunction, data: *mut c_void, _mode: c_uint) {
        host(handle, which, function, data)
    }
    fn cuStreamGetPriority, cuStreamGetPriority_ptsz(which; handle: Handle<Stream>, out: Out<c_int>) {
        out.put(stream::resolve(handle, which)?.priority)
    }
    fn cuStreamGetId, cuStreamGetId_ptsz(which; handle: Handle<Stream>, out: Out<u64>) {
        out.put(stream::resolve(handle, which)?.id)
    }
    fn cuStreamGetFlags, cuStreamGetFlags_ptsz(which; handle: Handle<Stream>, out: Out<c_uint>) {
        out.put(stream::resolve(handle, which)?.flags)
    }
    fn cuStreamGetDevice, cuStreamGetDevice_ptsz(which; handle: Handle<Stream>, out: Out<CUdevice>) {
        out.put(stream::resolve(handle, which)?.context.device.ordinal)
    }
    fn cuStreamGetCtx, cuStreamGetCtx_ptsz(which; handle: Handle<Stream>, out: Out<Handle<Context>>) {
        out.put(stream::resolve(handle, which)?.context_handle)
    }
    fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(which; handle: Handle<Stream>, out: Out<Handle<Context>>, green: Out<usize>) {
        green.offer(0);
        out.put(stream::resolve(handle, which)?.context_handle)
    }
    fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u32, _flags: c_uint) {
        value(handle, which, Work::Write(address, amount.into(), 4))
    }
    fn cuStreamWriteValue32, cuStreamWriteValue32_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u32, _flags: c_uint) {
        value(handle, which, Work::Write(address, amount.into(), 4))
    }
    fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u64, _flags: c_uint) {
        value(handle, which, Work::Write(address, amount, 8))
    }
    fn cuStreamWriteValue64, cuStreamWriteValue64_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u64, _flags: c_uint) {
        value(handle, which, Work::Write(address, amount, 8))
    }
    fn cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u32, flags: c_uint) {
        value(handle, which, Work::WaitValue(address, amount.into(), 4, flags))
    }
    fn cuStreamWaitValue32, cuStreamWaitValue32_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u32, flags: c_uint) {
        value(handle, which, Work::WaitValue(address, amount.into(), 4, flags))
    }
    fn cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u64, flags: c_uint) {
        value(handle, which, Work::WaitValue(address, amount, 8, flags))
    }
    fn cuStreamWaitValue64, cuStreamWaitValue64_ptsz(which; handle: Handle<Stream>, address: CUdeviceptr, amount: u64, flags: c_uint) {
        value(handle, which, Work::WaitValue(address, amount, 8, flags))
    }
    fn cuStreamBatchMemOp_v2, cuStreamBatchMemOp_v2_ptsz(which; handle: Handle<Stream>, count: c_uint, list: In<[u64; 6]>, _flags: c_uint) {
        batch(handle, which, count, list)
    }
    fn cuStreamBatchMemOp, cuStreamBatchMemOp_ptsz(which; handle: Handle<Stream>, count: c_uint, list: In<[u64; 6]>, _flags: c_uint) {
        batch(handle, which, count, list)
    }
    fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz(which; to: Handle<Stream>, from: Handle<Stream>) {
        stream::resolve(to, which)?;
        stream::resolve(from, which).map(drop)
    }
    fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz(which; handle: Handle<Stream>, _attribute: c_uint, out: Out<[u64; 8]>) {
        stream::resolve(handle, which)?;
        out.put([0; 8])
    }
    fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz(which; handle: Handle<Stream>, _attribute: c_uint, _value: In<u64>) {
        stream::resolve(handle, which).map(drop)
    }
    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz(which; handle: Handle<Stream>, mode: c_uint) {
        begin(handle, which, mode)
    }
    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz(which; handle: Handle<Stream>) {
        begin(handle, which, 0)
    }
    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz(which; handle: Handle<Stream>, graph: Handle<Graph>, nodes: In<Handle<Node>>, _data: In<u64>, count: usize, mode: c_uint) {
        graph.get()?;
        Capture::begin(stream::resolve(handle, which)?, graph, nodes.list(count)?, mode)
    }
    fn cuStreamEndCapture, cuStreamEndCapture_ptsz(which; handle: Handle<Stream>, out: Out<Handle<Graph>>) {
        let it = stream::resolve(handle, which)?;
        out.offer(Handle::null());
        out.put(capture::end(it)?)
    }
    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz(which; handle: Handle<Stream>, out: Out<c_int>) {
        let it = stream::resolve(handle, which)?;
        it.check_implicit()?;
        out.put(status_of(lock(&it.capture).as_ref()))
    }
    fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz(which; handle: Handle<Stream>, status: Out<c_int>, id: Out<u64>) {
        capture_status(handle, which, status, id, none()).map(drop)
    }
    fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz(which; handle: Handle<Stream>, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>, list: Out<*const Handle<Node>>, count: Out<usize>) {
        put_nodes(capture_status(handle, which, status, id, graph)?, list, count);
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz(which; handle: Handle<Stream>, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>, list: Out<*const Handle<Node>>, data: Out<usize>, count: Out<usize>) {
        data.offer(0);
        put_nodes(capture_status(handle, which, status, id, graph)?, list, count);
        Ok(())
    }
    fn cuStreamUpdateCaptureDependencies, cuStreamUpdateCaptureDependencies_ptsz(which; handle: Handle<Stream>, nodes: In<Handle<Node>>, count: usize, flags: c_uint) {
        update_dependencies(stream::resolve(handle, which)?, nodes.list(count)?, flags & 1 == 1)
    }
    fn cuStreamUpdateCaptureDependencies_v2, cuStreamUpdateCaptureDependencies_v2_ptsz(which; handle: Handle<Stream>, nodes: In<Handle<Node>>, _data: In<u64>, count: usize, flags: c_uint) {
        update_dependencies(stream::resolve(handle, which)?, nodes.list(count)?, flags & 1 == 1)
    }
}
