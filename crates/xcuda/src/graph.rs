//! Graphs: a launch costs as many kernels as the graph has, and allocation nodes are charged when
//! they are added, to the graph and to what is made of it. The driver keeps memory of graphs that are
//! gone; that stays charged until it is trimmed, which we do ourselves when room is short.

use core::ffi::{c_char, c_int, c_void};

use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
use muxflow_abi::cuda::{
    CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, CU_GRAPH_NODE_TYPE_GRAPH, CU_GRAPH_NODE_TYPE_KERNEL,
    CU_GRAPH_NODE_TYPE_MEM_ALLOC, CUDA_GRAPH_INSTANTIATE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS,
    CUdevice, CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeParams, CUresult,
};

use crate::hook::peek;
use crate::quota::{self, HELD, Kind, key};

/// Deepest nesting of child graphs that is counted.
const DEEPEST: u32 = 8;
/// Nodes looked at in one go; a graph with more is costed by the kernels among the first ones,
/// scaled up.
const NODES: usize = 1024;

/// Kernels in a graph, those of child graphs included.
fn kernels(graph: CUgraph, depth: u32) -> u64 {
    let mut count = 0_usize;
    let none: *mut CUgraphNode = core::ptr::null_mut();
    let place = &raw mut count;
    let asked = driver!(cuGraphGetNodes(
        graph => CUgraph,
        none => *mut CUgraphNode,
        place => *mut usize,
    ));
    if asked != CUDA_SUCCESS || count == 0 || depth > DEEPEST {
        return 1;
    }
    let all = count;
    let mut nodes = [core::ptr::null_mut::<c_void>(); NODES];
    count = count.min(NODES);
    driver!(cuGraphGetNodes(
        graph => CUgraph,
        nodes.as_mut_ptr() => *mut CUgraphNode,
        place => *mut usize,
    ));
    let seen = count.min(NODES);
    let sum: u64 = nodes[..seen].iter().map(|&node| kernels_of(node, depth)).sum();
    sum.saturating_mul(all as u64) / (seen.max(1) as u64)
}

fn kernels_of(node: CUgraphNode, depth: u32) -> u64 {
    let mut kind: c_int = 0;
    let place = &raw mut kind;
    driver!(cuGraphNodeGetType(node => CUgraphNode, place => *mut c_int));
    match kind {
        CU_GRAPH_NODE_TYPE_KERNEL => 1,
        CU_GRAPH_NODE_TYPE_GRAPH => {
            let mut child: CUgraph = core::ptr::null_mut();
            let place = &raw mut child;
            driver!(cuGraphChildGraphNodeGetGraph(node => CUgraphNode, place => *mut CUgraph));
            if child.is_null() { 0 } else { kernels(child, depth + 1) }
        }
        _ => 0,
    }
}

/// Makes an executable graph by `call`; notes its cost, and charges what memory it will hold. The first
/// takes over the charge of the graph, whose nodes are only a plan; each further one is charged anew.
fn instantiate(out: *mut CUgraphExec, graph: CUgraph, call: impl FnOnce() -> CUresult) -> CUresult {
    let plan = HELD.get(key(Kind::GraphPlan, graph as u64)).map(quota::unpack);
    let Some((device, bytes)) = plan else { return made(out, graph, call()) };
    let note = key(Kind::Graph, graph as u64);
    let held = HELD.remove(note).map_or(0, |value| quota::unpack(value).1);
    let mut charged = 0;
    let missing = bytes.saturating_sub(held);
    let result = if missing > 0 && quota::charge(device, missing).is_err() {
        CUDA_ERROR_OUT_OF_MEMORY
    } else {
        charged = missing;
        made(out, graph, call())
    };
    match peek(out.cast_const()) {
        Some(exec) if result == CUDA_SUCCESS => {
            quota::hold(Kind::GraphExec, exec as u64, device, held + charged);
            live(device, held + charged);
        }
        _ => {
            quota::uncharge(device, charged);
            if held > 0 {
                HELD.insert(note, quota::pack(device, held));
            }
        }
    }
    settle(device);
    result
}

/// Notes the cost of an executable graph, if there is one now.
fn made(out: *mut CUgraphExec, graph: CUgraph, result: CUresult) -> CUresult {
    if let (CUDA_SUCCESS, Some(exec)) = (result, peek(out.cast_const())) {
        HELD.remove(key(Kind::GraphCost, exec as u64));
        HELD.insert(key(Kind::GraphCost, exec as u64), kernels(graph, 0));
    }
    result
}

/// Charged memory that a graph plans to take: noted as its charge, and as its plan.
pub(crate) fn plan(graph: CUgraph, device: usize, charged: u64) {
    for kind in [Kind::Graph, Kind::GraphPlan] {
        let note = key(kind, graph as u64);
        let before = HELD.remove(note).map_or(0, |value| quota::unpack(value).1);
        HELD.insert(note, quota::pack(device, before + charged));
    }
}

/// What the executable graphs of a device hold, after a change (wrapping, so that it can go down).
fn live(device: usize, change: u64) -> u64 {
    let note = key(Kind::GraphLive, device as u64 + 1);
    HELD.add(note, change).unwrap_or_else(|| {
        HELD.insert(note, change);
        change
    })
}

/// Charges what the driver keeps for graphs beyond what the living ones hold.
fn settle(device: usize) {
    let Some(ordinal) = quota::ordinal(device) else { return };
    let mut reserved = 0_u64;
    let place = (&raw mut reserved).cast::<c_void>();
    let asked = driver!(cuDeviceGetGraphMemAttribute(
        ordinal => CUdevice,
        CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT => c_int,
        place => *mut c_void,
    ));
    if asked != CUDA_SUCCESS {
        return;
    }
    let kept = reserved.saturating_sub(live(device, 0));
    let note = key(Kind::GraphKept, device as u64 + 1);
    let before = HELD.replace(note, quota::pack(device, kept)).map(quota::unpack);
    if before.is_none() && kept > 0 {
        HELD.insert(note, quota::pack(device, kept));
    }
    let before = before.map_or(0, |(_, bytes)| bytes);
    if kept > before {
        quota::charge_always(device, kept - before);
    } else {
        quota::uncharge(device, before - kept);
    }
}

/// Lets the driver give back what it keeps of graphs that are gone.
pub(crate) fn trim(device: usize) {
    let kept = HELD.get(key(Kind::GraphKept, device as u64 + 1)).map_or(0, |v| quota::unpack(v).1);
    if let (1.., Some(ordinal)) = (kept, quota::ordinal(device)) {
        driver!(cuDeviceGraphMemTrim(ordinal => CUdevice));
        settle(device);
    }
}

/// What a launch of this graph costs, in kernels.
pub(crate) fn cost(exec: CUgraphExec) -> u64 {
    HELD.get(key(Kind::GraphCost, exec as u64)).unwrap_or(1).max(1)
}

/// Charges an allocation node to its graph.
fn add_allocation(
    graph: CUgraph,
    parameters: Option<CUDA_MEM_ALLOC_NODE_PARAMS>,
    call: impl FnOnce() -> CUresult,
) -> CUresult {
    let Some(node) = parameters else { return call() };
    let device = quota::place(node.poolProps.location.id & 0xff);
    let Ok(charged) = quota::charge(device, node.bytesize as u64) else {
        return CUDA_ERROR_OUT_OF_MEMORY;
    };
    let result = call();
    if result != CUDA_SUCCESS {
        quota::uncharge(device, charged);
        return result;
    }
    plan(graph, device, charged);
    result
}

/// The allocation in a generic node, if it is one.
fn allocation(parameters: *const CUgraphNodeParams) -> Option<CUDA_MEM_ALLOC_NODE_PARAMS> {
    let node = peek(parameters)?;
    if node.type_ != CU_GRAPH_NODE_TYPE_MEM_ALLOC {
        return None;
    }
    peek(parameters.cast::<u8>().wrapping_add(16).cast())
}

hooks! {
    fn cuGraphAddMemAllocNode(
        out: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        count: usize,
        parameters: *mut CUDA_MEM_ALLOC_NODE_PARAMS,
    ) |real| {
        add_allocation(graph, peek(parameters.cast_const()), || {
            real(out, graph, dependencies, count, parameters)
        })
    }

    fn cuGraphAddNode(
        out: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        count: usize,
        parameters: *mut CUgraphNodeParams,
    ) |real| {
        add_allocation(graph, allocation(parameters), || {
            real(out, graph, dependencies, count, parameters)
        })
    }

    fn cuGraphAddNode_v2 | cuGraphAddNode_v3(
        out: *mut CUgraphNode,
        graph: CUgraph,
        dependencies: *const CUgraphNode,
        edges: *const c_void,
        count: usize,
        parameters: *mut CUgraphNodeParams,
    ) |real| {
        add_allocation(graph, allocation(parameters), || {
            real(out, graph, dependencies, edges, count, parameters)
        })
    }

    fn cuGraphInstantiate(
        out: *mut CUgraphExec,
        graph: CUgraph,
        node: *mut CUgraphNode,
        log: *mut c_char,
        bytes: usize,
    ) |real| {
        instantiate(out, graph, || real(out, graph, node, log, bytes))
    }

    fn cuGraphInstantiate_v2(
        out: *mut CUgraphExec,
        graph: CUgraph,
        node: *mut CUgraphNode,
        log: *mut c_char,
        bytes: usize,
    ) |real| {
        instantiate(out, graph, || real(out, graph, node, log, bytes))
    }

    fn cuGraphInstantiateWithFlags(out: *mut CUgraphExec, graph: CUgraph, flags: u64) |real| {
        instantiate(out, graph, || real(out, graph, flags))
    }

    fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz(
        out: *mut CUgraphExec,
        graph: CUgraph,
        parameters: *mut CUDA_GRAPH_INSTANTIATE_PARAMS,
    ) |real| {
        instantiate(out, graph, || real(out, graph, parameters))
    }

    fn cuGraphExecDestroy(exec: CUgraphExec) |real| {
        let result = real(exec);
        if result == CUDA_SUCCESS {
            HELD.remove(key(Kind::GraphCost, exec as u64));
            let held = HELD.remove(key(Kind::GraphExec, exec as u64)).map(quota::unpack);
            if let Some((device, bytes)) = held {
                live(device, bytes.wrapping_neg());
                settle(device);
                quota::uncharge(device, bytes);
            }
        }
        result
    }

    fn cuDeviceGraphMemTrim(device: CUdevice) |real| {
        let result = real(device);
        settle(quota::place(device));
        result
    }

    fn cuGraphDestroy(graph: CUgraph) |real| {
        let result = real(graph);
        if result == CUDA_SUCCESS {
            HELD.remove(key(Kind::GraphPlan, graph as u64));
            quota::let_go(Kind::Graph, graph as u64);
        }
        result
    }
}
