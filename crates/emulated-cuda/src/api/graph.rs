//! `cuGraph*`: whole graphs, their launch, and edges.

use std::ffi::{c_char, c_int, c_uint, c_void};

use muxflow_abi::cuda::CUDA_GRAPH_INSTANTIATE_PARAMS;
use muxflow_abi::cuda::result::{CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, CUDA_ERROR_INVALID_VALUE};

use crate::context::lock;
use crate::ffi::{Answer, Handle, In, Out, Text, api, both, regardless};
use crate::graph::Task;
use crate::graph::{self, Executable, Graph, Node};
use crate::memory;
use crate::stream::{self, Stream};

/// Writes a list of handles, or only how many there are.
fn put_list<T: crate::ffi::Kind>(
    list: &[Handle<T>],
    out: Out<Handle<T>>,
    count: Out<usize>,
) -> Answer {
    let room = count.get()?;
    if !out.is_given() {
        return count.put(list.len());
    }
    for (i, item) in list.iter().take(room).enumerate() {
        out.put_at(i, *item);
    }
    for i in list.len()..room {
        out.put_at(i, Handle::null());
    }
    count.put(list.len())
}

fn edges(it: &Graph) -> Answer<Vec<(Handle<Node>, Handle<Node>)>> {
    let mut all = Vec::new();
    for node in lock(&it.nodes).iter() {
        let after = lock(&node.get()?.after).clone();
        all.extend(after.into_iter().map(|from| (from, *node)));
    }
    Ok(all)
}

fn put_edges(
    handle: Handle<Graph>,
    from: Out<Handle<Node>>,
    to: Out<Handle<Node>>,
    count: Out<usize>,
) -> Answer {
    let all = edges(handle.get()?)?;
    let room = count.get()?;
    if from.is_given() && to.is_given() {
        for (i, (a, b)) in all.iter().take(room).enumerate() {
            from.put_at(i, *a);
            to.put_at(i, *b);
        }
    }
    count.put(all.len())
}

fn dependents(node: Handle<Node>) -> Answer<Vec<Handle<Node>>> {
    let all = edges(node.get()?.graph.get()?)?;
    Ok(all.into_iter().filter(|(from, _)| *from == node).map(|(_, to)| to).collect())
}

fn link(from: In<Handle<Node>>, to: In<Handle<Node>>, count: usize, add: bool) -> Answer {
    for i in 0..count {
        let (a, b) = (from.at(i)?, to.at(i)?);
        if a == b || a.get()?.graph != b.get()?.graph {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut after = lock(&b.get()?.after);
        // An edge can be added that is not there, and removed that is.
        if after.contains(&a) == add {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        if add {
            after.push(a);
        } else {
            after.retain(|d| *d != a);
        }
    }
    Ok(())
}

fn destroy(handle: Handle<Graph>) -> Answer {
    let it = handle.destroy()?;
    for node in lock(&it.nodes).drain(..) {
        let Ok(node) = node.destroy() else { continue };
        let task = lock(&node.task);
        task.discard();
        if let Task::Allocate(address) = *task {
            // Freed by hand before, perhaps.
            regardless(memory::free(address));
        }
    }
    Ok(())
}

/// Updates; says what came of it in the words of `cuda.h`.
fn update(exec: Handle<Executable>, handle: Handle<Graph>) -> Answer<(c_int, Handle<Node>)> {
    Ok(exec.get()?.update(handle.get()?)?.told())
}

fn updated(result: c_int) -> Answer {
    if result == 0 { Ok(()) } else { Err(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) }
}

api! {
    fn cuGraphCreate(out: Out<Handle<Graph>>, _flags: c_uint) { out.put(graph::create()) }
    fn cuGraphDestroy(handle: Handle<Graph>) { destroy(handle) }
    fn cuGraphClone(out: Out<Handle<Graph>>, handle: Handle<Graph>) { out.put(handle.get()?.copy()?) }
    fn cuGraphInstantiateWithFlags(out: Out<Handle<Executable>>, handle: Handle<Graph>, flags: u64) {
        out.put(graph::instantiate(handle, flags)?)
    }
    fn cuGraphInstantiate(out: Out<Handle<Executable>>, handle: Handle<Graph>, error: Out<Handle<Node>>, _log: Out<c_char>, _size: usize) {
        error.offer(Handle::null());
        out.put(graph::instantiate(handle, 0)?)
    }
    fn cuGraphInstantiate_v2(out: Out<Handle<Executable>>, handle: Handle<Graph>, error: Out<Handle<Node>>, _log: Out<c_char>, _size: usize) {
        error.offer(Handle::null());
        out.put(graph::instantiate(handle, 0)?)
    }
    fn cuGraphExecDestroy(handle: Handle<Executable>) { handle.destroy().map(drop) }
    fn cuGraphExecGetFlags(handle: Handle<Executable>, out: Out<u64>) { out.put(handle.get()?.flags) }
    fn cuGraphGetId(handle: Handle<Graph>, out: Out<c_uint>) { out.put(handle.get()?.id as c_uint) }
    fn cuGraphExecGetId(handle: Handle<Executable>, out: Out<c_uint>) { out.put(handle.get()?.id as c_uint) }
    fn cuGraphExecUpdate(exec: Handle<Executable>, handle: Handle<Graph>, node: Out<Handle<Node>>, result: Out<c_int>) {
        let (said, of) = update(exec, handle)?;
        node.offer(of);
        result.offer(said);
        updated(said)
    }
    fn cuGraphExecUpdate_v2(exec: Handle<Executable>, handle: Handle<Graph>, result: Out<[u64; 3]>) {
        let (said, of) = update(exec, handle)?;
        result.offer([said.cast_unsigned().into(), of.number() as u64, 0]);
        updated(said)
    }
    fn cuGraphGetNodes(handle: Handle<Graph>, out: Out<Handle<Node>>, count: Out<usize>) {
        let nodes = lock(&handle.get()?.nodes).clone();
        put_list(&nodes, out, count)
    }
    fn cuGraphGetRootNodes(handle: Handle<Graph>, out: Out<Handle<Node>>, count: Out<usize>) {
        let nodes = lock(&handle.get()?.nodes).clone();
        let root = |n: &Handle<Node>| n.get().is_ok_and(|n| lock(&n.after).is_empty());
        let roots: Vec<_> = nodes.into_iter().filter(root).collect();
        put_list(&roots, out, count)
    }
    fn cuGraphGetEdges(handle: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, count: Out<usize>) {
        put_edges(handle, from, to, count)
    }
    fn cuGraphGetEdges_v2(handle: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, _data: Out<c_void>, count: Out<usize>) {
        put_edges(handle, from, to, count)
    }
    fn cuGraphNodeGetDependencies(node: Handle<Node>, out: Out<Handle<Node>>, count: Out<usize>) {
        let after = lock(&node.get()?.after).clone();
        put_list(&after, out, count)
    }
    fn cuGraphNodeGetDependencies_v2(node: Handle<Node>, out: Out<Handle<Node>>, _data: Out<c_void>, count: Out<usize>) {
        let after = lock(&node.get()?.after).clone();
        put_list(&after, out, count)
    }
    fn cuGraphNodeGetDependentNodes(node: Handle<Node>, out: Out<Handle<Node>>, count: Out<usize>) {
        put_list(&dependents(node)?, out, count)
    }
    fn cuGraphNodeGetDependentNodes_v2(node: Handle<Node>, out: Out<Handle<Node>>, _data: Out<c_void>, count: Out<usize>) {
        put_list(&dependents(node)?, out, count)
    }
    fn cuGraphAddDependencies(_graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, count: usize) {
        link(from, to, count, true)
    }
    fn cuGraphAddDependencies_v2(_graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count: usize) {
        link(from, to, count, true)
    }
    fn cuGraphRemoveDependencies(_graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, count: usize) {
        link(from, to, count, false)
    }
    fn cuGraphRemoveDependencies_v2(_graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count: usize) {
        link(from, to, count, false)
    }
    fn cuGraphNodeGetType(node: Handle<Node>, out: Out<c_int>) {
        out.put(lock(&node.get()?.task).kind())
    }
    fn cuGraphNodeGetLocalId(node: Handle<Node>, out: Out<c_uint>) { out.put(node.get()?.id as c_uint) }
    fn cuGraphNodeGetToolsId(node: Handle<Node>, out: Out<u64>) { out.put(node.get()?.id) }
    fn cuGraphNodeGetContainingGraph(node: Handle<Node>, out: Out<Handle<Graph>>) {
        out.put(node.get()?.graph)
    }
    fn cuGraphDestroyNode(node: Handle<Node>) {
        let graph = node.get()?.graph.get()?;
        if graph.has_memory()? {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        lock(&node.destroy()?.task).discard();
        let mut nodes = lock(&graph.nodes);
        nodes.retain(|n| *n != node);
        for other in nodes.iter() {
            lock(&other.get()?.after).retain(|d| *d != node);
        }
        Ok(())
    }
    fn cuGraphNodeSetEnabled(exec: Handle<Executable>, node: Handle<Node>, on: c_uint) {
        exec.get()?.change(node, |s| s.enabled = on != 0)
    }
    fn cuGraphNodeGetEnabled(exec: Handle<Executable>, node: Handle<Node>, out: Out<c_uint>) {
        let mut enabled = false;
        exec.get()?.change(node, |s| enabled = s.enabled)?;
        out.put(c_uint::from(enabled))
    }
    fn cuGraphDebugDotPrint(handle: Handle<Graph>, path: Text, _flags: c_uint) {
        let it = handle.get()?;
        let mut text = String::from("digraph {\n");
        for (from, to) in edges(it)? {
            text.push_str(&format!("  \"{}\" -> \"{}\"\n", from.get()?.id, to.get()?.id));
        }
        text.push_str("}\n");
        std::fs::write(path.get()?, text).map_err(|_| CUDA_ERROR_INVALID_VALUE)
    }
}

both! {
    fn cuGraphLaunch, cuGraphLaunch_ptsz(which; exec: Handle<Executable>, handle: Handle<Stream>) {
        exec.get()?.launch(stream::resolve(handle, which)?)
    }
    fn cuGraphUpload, cuGraphUpload_ptsz(which; exec: Handle<Executable>, handle: Handle<Stream>) {
        exec.get()?;
        stream::resolve(handle, which).map(drop)
    }
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz(_which; out: Out<Handle<Executable>>, handle: Handle<Graph>, params: Out<CUDA_GRAPH_INSTANTIATE_PARAMS>) {
        let mut p = params.get()?;
        out.put(graph::instantiate(handle, p.flags)?)?;
        p.hErrNode_out = std::ptr::null_mut();
        p.result_out = 0;
        params.put(p)
    }
}
