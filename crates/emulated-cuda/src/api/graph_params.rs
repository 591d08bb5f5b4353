//! What the nodes of a graph were told, read back: parameters, events, and the copy of a node.

use std::ffi::c_void;
use std::mem::offset_of;

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE};
use muxflow_abi::cuda::{CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D};

use crate::api::graph_node::{HostParams, MemsetParams, set, set_exec};
use crate::context::lock;
use crate::event::Event;
use crate::ffi::{Answer, Handle, Out, api};
use crate::graph::{Executable, Graph, Node, Task};
use crate::memory;
use crate::work::{Copy, HostCall, Launch, Work};

fn work(node: Handle<Node>) -> Answer<Work> {
    match &*lock(&node.get()?.task) {
        Task::Work(work) => Ok(work.clone()),
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }
}

fn kernel(node: Handle<Node>) -> Answer<CUDA_KERNEL_NODE_PARAMS> {
    let Work::Kernel(Launch { function, grid, params, .. }) = work(node)? else {
        return Err(CUDA_ERROR_INVALID_VALUE);
    };
    let module = function.module.get().ok_or(CUDA_ERROR_INVALID_HANDLE)?;
    let handle = module.get()?.function(*module, &function.name)?;
    Ok(CUDA_KERNEL_NODE_PARAMS {
        func: handle.number() as *mut c_void,
        gridDimX: grid.blocks[0],
        gridDimY: grid.blocks[1],
        gridDimZ: grid.blocks[2],
        blockDimX: grid.threads[0],
        blockDimY: grid.threads[1],
        blockDimZ: grid.threads[2],
        sharedMemBytes: grid.shared_bytes,
        kernelParams: node.get()?.show(&params, &function.params),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    })
}

/// The first version of the structure ends before `kern`.
fn kernel_v1(node: Handle<Node>, out: Out<CUDA_KERNEL_NODE_PARAMS>) -> Answer {
    if !out.is_given() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let full = kernel(node)?;
    let from = std::ptr::from_ref(&full).cast::<u8>();
    // SAFETY: the caller promises room for the shorter structure, which is how `full` begins.
    unsafe {
        let bytes = offset_of!(CUDA_KERNEL_NODE_PARAMS, kern);
        std::ptr::copy_nonoverlapping(from, out.raw().cast::<u8>(), bytes);
    }
    Ok(())
}

/// Parameters that name the same bytes. Where an offset or an array was named, the place itself is.
fn copied(c: &Copy) -> CUDA_MEMCPY3D {
    let kind = |address: u64| if memory::is_device(address) { 2 } else { 1 };
    let (from, to) = (kind(c.from), kind(c.to));
    let host = |kind: u32, address: u64| if kind == 1 { address } else { 0 };
    let device = |kind: u32, address: u64| if kind == 2 { address } else { 0 };
    let rows = |[row, slice]: [usize; 2]| slice.checked_div(row).unwrap_or(c.height);
    CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: from,
        srcHost: host(from, c.from) as *const c_void,
        srcDevice: device(from, c.from),
        srcArray: std::ptr::null_mut(),
        reserved0: std::ptr::null_mut(),
        srcPitch: c.from_pitch[0],
        srcHeight: rows(c.from_pitch),
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: to,
        dstHost: host(to, c.to) as *mut c_void,
        dstDevice: device(to, c.to),
        dstArray: std::ptr::null_mut(),
        reserved1: std::ptr::null_mut(),
        dstPitch: c.to_pitch[0],
        dstHeight: rows(c.to_pitch),
        WidthInBytes: c.width,
        Height: c.height,
        Depth: c.depth,
    }
}

/// The node of a clone that stands for a node of what was cloned.
fn find_in_clone(node: Handle<Node>, clone: Handle<Graph>) -> Answer<Handle<Node>> {
    node.get()?;
    for new in lock(&clone.get()?.nodes).iter() {
        if new.get()?.origin == Some(node) {
            return Ok(*new);
        }
    }
    Err(CUDA_ERROR_INVALID_VALUE)
}

fn event(node: Handle<Node>, of: impl Fn(&Task) -> Option<Handle<Event>>) -> Answer<Handle<Event>> {
    of(&lock(&node.get()?.task)).ok_or(CUDA_ERROR_INVALID_VALUE)
}

fn recorded(task: &Task) -> Option<Handle<Event>> {
    if let Task::Record(event) = task { Some(*event) } else { None }
}

fn awaited(task: &Task) -> Option<Handle<Event>> {
    if let Task::Wait(event) = task { Some(*event) } else { None }
}

api! {
    fn cuGraphChildGraphNodeGetGraph(node: Handle<Node>, out: Out<Handle<Graph>>) {
        match *lock(&node.get()?.task) {
            Task::Child(graph) => out.put(graph),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuGraphKernelNodeGetParams(node: Handle<Node>, out: Out<CUDA_KERNEL_NODE_PARAMS>) { kernel_v1(node, out) }
    fn cuGraphKernelNodeGetParams_v2(node: Handle<Node>, out: Out<CUDA_KERNEL_NODE_PARAMS>) { out.put(kernel(node)?) }
    fn cuGraphMemcpyNodeGetParams(node: Handle<Node>, out: Out<CUDA_MEMCPY3D>) {
        match work(node)? {
            Work::Copy(copy) => out.put(copied(&copy)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuGraphMemsetNodeGetParams(node: Handle<Node>, out: Out<MemsetParams>) {
        match work(node)? {
            Work::Fill(fill) => out.put(MemsetParams::of(&fill)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuGraphHostNodeGetParams(node: Handle<Node>, out: Out<HostParams>) {
        match work(node)? {
            Work::Host(HostCall::Function(function, data)) => out.put(HostParams::of(function, data)),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuGraphEventRecordNodeGetEvent(node: Handle<Node>, out: Out<Handle<Event>>) { out.put(event(node, recorded)?) }
    fn cuGraphEventWaitNodeGetEvent(node: Handle<Node>, out: Out<Handle<Event>>) { out.put(event(node, awaited)?) }
    fn cuGraphEventRecordNodeSetEvent(node: Handle<Node>, event: Handle<Event>) {
        event.get()?;
        set(node, Task::Record(event))
    }
    fn cuGraphEventWaitNodeSetEvent(node: Handle<Node>, event: Handle<Event>) {
        event.get()?;
        set(node, Task::Wait(event))
    }
    fn cuGraphExecEventRecordNodeSetEvent(exec: Handle<Executable>, node: Handle<Node>, event: Handle<Event>) {
        event.get()?;
        set_exec(exec, node, Task::Record(event))
    }
    fn cuGraphExecEventWaitNodeSetEvent(exec: Handle<Executable>, node: Handle<Node>, event: Handle<Event>) {
        event.get()?;
        set_exec(exec, node, Task::Wait(event))
    }
    fn cuGraphNodeFindInClone(out: Out<Handle<Node>>, node: Handle<Node>, clone: Handle<Graph>) {
        out.put(find_in_clone(node, clone)?)
    }
}
