//! `cuGraphAdd*Node` and the parameters of nodes.

use std::ffi::{c_uint, c_void};

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
use muxflow_abi::cuda::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUDA_MEMCPY3D, CUdeviceptr,
    CUgraphNodeParams,
};
use muxflow_emulated_gpu::ptx::Grid;

use crate::api::launch::{Arguments, prepare};
use crate::context::{self, Context, lock};
use crate::event::Event;
use crate::ffi::{Answer, Handle, In, Out, api};
use crate::graph::{self, Executable, Graph, Node, Task};
use crate::work::{Fill, HostCall, Opaque, Work};

/// `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemsetParams {
    dst: CUdeviceptr,
    pitch: usize,
    value: c_uint,
    element: c_uint,
    width: usize,
    height: usize,
}

impl MemsetParams {
    pub(crate) fn of(fill: &Fill) -> MemsetParams {
        let Fill { to: dst, pitch, value, element, width, height } = *fill;
        MemsetParams { dst, pitch, value, element: element as c_uint, width, height }
    }
}

/// `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostParams {
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
}

impl HostParams {
    pub(crate) fn of(function: unsafe extern "C" fn(*mut c_void), data: Opaque) -> HostParams {
        HostParams { function: Some(function), data: data.0 }
    }
}

fn kernel(p: &CUDA_KERNEL_NODE_PARAMS) -> Answer<Task> {
    let handle = if p.func.is_null() { p.kern } else { p.func };
    let function = Handle::from_raw(handle).get()?;
    let grid = Grid {
        blocks: [p.gridDimX, p.gridDimY, p.gridDimZ],
        threads: [p.blockDimX, p.blockDimY, p.blockDimZ],
        shared_bytes: p.sharedMemBytes,
    };
    let arguments = Arguments {
        params: In::of_pointer(p.kernelParams.cast_const().cast()),
        extra: In::of_pointer(p.extra.cast_const().cast()),
    };
    let launch = prepare(&context::current()?.gpu.facts, function, grid, arguments, true)?;
    Ok(Task::Work(Work::Kernel(launch)))
}

/// The first version of the structure ends before `kern`.
fn kernel_v1(params: In<CUDA_KERNEL_NODE_PARAMS>) -> Answer<Task> {
    let from = params.raw().cast::<u8>();
    if from.is_null() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let mut bytes = [0_u64; size_of::<CUDA_KERNEL_NODE_PARAMS>() / 8];
    // SAFETY: the caller promises the shorter structure; the rest stays zero, which is valid for
    // null handles.
    let full = unsafe {
        let length = std::mem::offset_of!(CUDA_KERNEL_NODE_PARAMS, kern);
        std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr().cast(), length);
        bytes.as_ptr().cast::<CUDA_KERNEL_NODE_PARAMS>().read()
    };
    kernel(&full)
}

fn fill(p: &MemsetParams) -> Answer<Task> {
    let element = p.element as usize;
    if !matches!(element, 1 | 2 | 4) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let (to, pitch, value) = (p.dst, p.pitch, p.value);
    let fill = Fill { to, pitch, value, element, width: p.width, height: p.height };
    fill.check()?;
    Ok(Task::Work(Work::Fill(fill)))
}

fn host(p: &HostParams) -> Answer<Task> {
    let function = p.function.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    Ok(Task::Work(Work::Host(HostCall::Function(function, Opaque(p.data)))))
}

fn copy(p: &CUDA_MEMCPY3D) -> Answer<Task> {
    let copy = crate::api::copy::deep(p)?;
    copy.check()?;
    Ok(Task::Work(Work::Copy(copy)))
}

fn child(handle: Handle<Graph>) -> Answer<Task> {
    Ok(Task::Child(handle.get()?.copy()?))
}

fn allocation(bytes: usize) -> Answer<(Task, u64)> {
    let it = context::current()?;
    let pool = it.device.pools.first(it.device)?.get()?;
    let address = pool.allocate(it, bytes as u64)?;
    Ok((Task::Allocate(address), address))
}

fn add(
    out: Out<Handle<Node>>,
    graph: Handle<Graph>,
    after: In<Handle<Node>>,
    count: usize,
    task: Task,
) -> Answer {
    out.put(graph::add(graph, after.list(count)?, task)?)
}

pub(crate) fn set(node: Handle<Node>, task: Task) -> Answer {
    let mut place = lock(&node.get()?.task);
    if place.kind() != task.kind() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    std::mem::replace(&mut *place, task).discard();
    Ok(())
}

pub(crate) fn set_exec(exec: Handle<Executable>, node: Handle<Node>, task: Task) -> Answer {
    let fixed = task.fixed()?;
    task.discard();
    let mut fits = false;
    exec.get()?.change(node, |s| {
        fits = s.task.kind() == fixed.kind();
        if fits {
            s.task = fixed;
        }
    })?;
    if fits { Ok(()) } else { Err(CUDA_ERROR_INVALID_VALUE) }
}

/// The task of a generic parameter structure.
fn generic(params: Out<CUgraphNodeParams>) -> Answer<Task> {
    let p = params.get()?;
    let body = p.params.as_ptr();
    // SAFETY: the body is a union of 232 bytes that holds the structure its type names; all of
    // these are shorter and any bits are valid for them as plain numbers and pointers.
    unsafe {
        match p.type_ {
            0 => kernel(&body.cast::<CUDA_KERNEL_NODE_PARAMS>().read()),
            // Flags and padding come first, then a context behind the copy.
            1 => copy(&body.add(1).cast::<CUDA_MEMCPY3D>().read()),
            2 => fill(&body.cast::<MemsetParams>().read()),
            3 => host(&body.cast::<HostParams>().read()),
            4 => child(Handle::from_raw(body.cast::<*mut c_void>().read())),
            5 => Ok(Task::Empty),
            6 => Ok(Task::Wait(Handle::from_raw(body.cast::<*mut c_void>().read()))),
            7 => Ok(Task::Record(Handle::from_raw(body.cast::<*mut c_void>().read()))),
            10 => {
                let mut inner = body.cast::<CUDA_MEM_ALLOC_NODE_PARAMS>().read();
                let (task, address) = allocation(inner.bytesize)?;
                inner.dptr = address;
                let mut back = p;
                back.params.as_mut_ptr().cast::<CUDA_MEM_ALLOC_NODE_PARAMS>().write(inner);
                params.put(back)?;
                Ok(task)
            }
            11 => Ok(Task::Free(body.read())),
            _ => Err(CUDA_ERROR_NOT_SUPPORTED),
        }
    }
}

api! {
    fn cuGraphAddKernelNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        add(out, graph, after, count, kernel_v1(params)?)
    }
    fn cuGraphAddKernelNode_v2(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        add(out, graph, after, count, kernel(&params.get()?)?)
    }
    fn cuGraphKernelNodeSetParams(node: Handle<Node>, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        set(node, kernel_v1(params)?)
    }
    fn cuGraphKernelNodeSetParams_v2(node: Handle<Node>, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        set(node, kernel(&params.get()?)?)
    }
    fn cuGraphExecKernelNodeSetParams(exec: Handle<Executable>, node: Handle<Node>, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        set_exec(exec, node, kernel_v1(params)?)
    }
    fn cuGraphExecKernelNodeSetParams_v2(exec: Handle<Executable>, node: Handle<Node>, params: In<CUDA_KERNEL_NODE_PARAMS>) {
        set_exec(exec, node, kernel(&params.get()?)?)
    }
    fn cuGraphAddMemcpyNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: In<CUDA_MEMCPY3D>, _context: Handle<Context>) {
        add(out, graph, after, count, copy(&params.get()?)?)
    }
    fn cuGraphMemcpyNodeSetParams(node: Handle<Node>, params: In<CUDA_MEMCPY3D>) {
        set(node, copy(&params.get()?)?)
    }
    fn cuGraphExecMemcpyNodeSetParams(exec: Handle<Executable>, node: Handle<Node>, params: In<CUDA_MEMCPY3D>, _context: Handle<Context>) {
        set_exec(exec, node, copy(&params.get()?)?)
    }
    fn cuGraphAddMemsetNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: In<MemsetParams>, _context: Handle<Context>) {
        add(out, graph, after, count, fill(&params.get()?)?)
    }
    fn cuGraphMemsetNodeSetParams(node: Handle<Node>, params: In<MemsetParams>) {
        set(node, fill(&params.get()?)?)
    }
    fn cuGraphExecMemsetNodeSetParams(exec: Handle<Executable>, node: Handle<Node>, params: In<MemsetParams>, _context: Handle<Context>) {
        set_exec(exec, node, fill(&params.get()?)?)
    }
    fn cuGraphAddHostNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: In<HostParams>) {
        add(out, graph, after, count, host(&params.get()?)?)
    }
    fn cuGraphHostNodeSetParams(node: Handle<Node>, params: In<HostParams>) {
        set(node, host(&params.get()?)?)
    }
    fn cuGraphExecHostNodeSetParams(exec: Handle<Executable>, node: Handle<Node>, params: In<HostParams>) {
        set_exec(exec, node, host(&params.get()?)?)
    }
    fn cuGraphAddChildGraphNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, inner: Handle<Graph>) {
        add(out, graph, after, count, child(inner)?)
    }
    fn cuGraphExecChildGraphNodeSetParams(exec: Handle<Executable>, node: Handle<Node>, inner: Handle<Graph>) {
        set_exec(exec, node, child(inner)?)
    }
    fn cuGraphAddEmptyNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize) {
        add(out, graph, after, count, Task::Empty)
    }
    fn cuGraphAddEventRecordNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, event: Handle<Event>) {
        event.get()?;
        add(out, graph, after, count, Task::Record(event))
    }
    fn cuGraphAddEventWaitNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, event: Handle<Event>) {
        event.get()?;
        add(out, graph, after, count, Task::Wait(event))
    }
    fn cuGraphAddMemAllocNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: Out<CUDA_MEM_ALLOC_NODE_PARAMS>) {
        let mut p = params.get()?;
        graph.get()?;
        let (task, address) = allocation(p.bytesize)?;
        p.dptr = address;
        params.put(p)?;
        add(out, graph, after, count, task)
    }
    fn cuGraphAddMemFreeNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, address: CUdeviceptr) {
        add(out, graph, after, count, Task::Free(address))
    }
    fn cuGraphMemFreeNodeGetParams(node: Handle<Node>, out: Out<CUdeviceptr>) {
        match *lock(&node.get()?.task) {
            Task::Free(address) => out.put(address),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    fn cuGraphAddNode(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: usize, params: Out<CUgraphNodeParams>) {
        add(out, graph, after, count, generic(params)?)
    }
    fn cuGraphAddNode_v2(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, _data: In<u64>, count: usize, params: Out<CUgraphNodeParams>) {
        add(out, graph, after, count, generic(params)?)
    }
    fn cuGraphAddNode_v3(out: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, _data: In<u64>, count: usize, params: Out<CUgraphNodeParams>) {
        add(out, graph, after, count, generic(params)?)
    }
    fn cuGraphNodeSetParams(node: Handle<Node>, params: Out<CUgraphNodeParams>) {
        set(node, generic(params)?)
    }
    fn cuGraphExecNodeSetParams(exec: Handle<Executable>, node: Handle<Node>, params: Out<CUgraphNodeParams>) {
        set_exec(exec, node, generic(params)?)
    }
}
