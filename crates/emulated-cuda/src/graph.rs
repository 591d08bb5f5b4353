//! Graphs: work without time, captured from streams or built by hand.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use muxflow_abi::cuda::result::CUDA_ERROR_INVALID_VALUE;

use crate::context::lock;
use crate::event::Event;
use crate::ffi::{Answer, Handle, Kind};
use crate::stream::Stream;
use crate::work::Work;

/// What a node does.
#[derive(Debug, Clone)]
pub(crate) enum Task {
    Work(Work),
    /// A graph that belongs to the node, a copy of the one that it was given.
    Child(Handle<Graph>),
    /// The same in a graph that can be launched: nobody changes it any more.
    Inner(Arc<Vec<Task>>),
    Record(Handle<Event>),
    Wait(Handle<Event>),
    /// Memory at this address.
    Allocate(u64),
    Free(u64),
    Empty,
}

impl Task {
    /// The number of its type in `cuda.h`.
    pub(crate) fn kind(&self) -> i32 {
        match self {
            Task::Work(Work::Kernel(_)) => 0,
            Task::Work(Work::Copy(_)) => 1,
            Task::Work(Work::Fill(_)) => 2,
            Task::Work(Work::Host(_)) => 3,
            Task::Child(_) | Task::Inner(_) => 4,
            Task::Wait(_) => 6,
            Task::Record(_) => 7,
            Task::Allocate(_) => 10,
            Task::Free(_) => 11,
            Task::Work(Work::Write(..) | Work::WaitValue(..)) => 12,
            Task::Work(_) | Task::Empty => 5,
        }
    }

    /// For a copy of its node: a graph of its own is copied along.
    fn copy(&self) -> Answer<Task> {
        match self {
            Task::Child(graph) => Ok(Task::Child(graph.get()?.copy()?)),
            other => Ok(other.clone()),
        }
    }

    /// As it is now, whatever becomes of its node.
    pub(crate) fn fixed(&self) -> Answer<Task> {
        match self {
            Task::Child(graph) => Ok(Task::Inner(Arc::new(graph.get()?.tasks()?))),
            other => Ok(other.clone()),
        }
    }

    /// It is needed no more. Memory stays: it is of the graph that this one was copied from.
    pub(crate) fn discard(&self) {
        let Task::Child(graph) = self else { return };
        let Ok(it) = graph.destroy() else { return };
        for node in lock(&it.nodes).drain(..) {
            if let Ok(node) = node.destroy() {
                lock(&node.task).discard();
            }
        }
    }
}

/// A node of a graph.
#[derive(Debug)]
pub(crate) struct Node {
    pub graph: Handle<Graph>,
    pub id: u64,
    pub task: Mutex<Task>,
    pub after: Mutex<Vec<Handle<Node>>>,
    /// The node that it is a copy of.
    pub origin: Option<Handle<Node>>,
    shown: Mutex<Option<Shown>>,
}

/// Arguments of a kernel as they were handed out, with the address of each.
#[derive(Debug)]
struct Shown {
    params: Arc<[u8]>,
    addresses: Vec<usize>,
}

impl Kind for Node {
    const MAGIC: u64 = 0x0c0d_a006_0de0_0006;
}

impl Node {
    /// Pointers to the arguments of its kernel, each at an offset, which hold until they are set anew;
    /// null when there are none.
    pub(crate) fn show(&self, params: &Arc<[u8]>, places: &[(usize, usize)]) -> *mut *mut c_void {
        if places.is_empty() || places.iter().any(|(at, bytes)| at + bytes > params.len()) {
            return std::ptr::null_mut();
        }
        let mut shown = lock(&self.shown);
        let shown = match &mut *shown {
            Some(known) if Arc::ptr_eq(&known.params, params) => known,
            other => {
                let start = params.as_ptr() as usize;
                let addresses = places.iter().map(|(at, _)| start + at).collect();
                other.insert(Shown { params: Arc::clone(params), addresses })
            }
        };
        shown.addresses.as_ptr().cast_mut().cast()
    }
}

/// A graph.
#[derive(Debug)]
pub(crate) struct Graph {
    pub id: u64,
    pub nodes: Mutex<Vec<Handle<Node>>>,
    /// What was last made of it.
    instance: Mutex<Option<Handle<Executable>>>,
}

impl Kind for Graph {
    const MAGIC: u64 = 0x0c0d_a007_96a9_0007;
}

/// A graph that can be launched: tasks in an order that respects all edges.
#[derive(Debug)]
pub(crate) struct Executable {
    pub id: u64,
    pub flags: u64,
    pub steps: Mutex<Vec<Step>>,
}

/// One task of an executable graph, with the node that it came from.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub node: Handle<Node>,
    pub task: Task,
    pub enabled: bool,
    /// The steps that it stands behind.
    after: Vec<usize>,
}

/// What came of an update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Update {
    Done,
    /// Nodes or edges are others; the node in question, if there is one.
    OtherShape(Handle<Node>),
    /// This node does something else.
    OtherKind(Handle<Node>),
}

impl Update {
    /// The number of it in `cuda.h`, and the node in question.
    pub(crate) fn told(self) -> (i32, Handle<Node>) {
        match self {
            Update::Done => (0, Handle::null()),
            Update::OtherShape(node) => (2, node),
            Update::OtherKind(node) => (3, node),
        }
    }
}

impl Kind for Executable {
    const MAGIC: u64 = 0x0c0d_a008_e8ec_0008;
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

pub(crate) fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// A graph without nodes.
pub(crate) fn create() -> Handle<Graph> {
    let nodes = Mutex::new(Vec::new());
    Handle::new(Graph { id: next_id(), nodes, instance: Mutex::new(None) })
}

/// A new node behind others.
pub(crate) fn add(
    graph: Handle<Graph>,
    after: Vec<Handle<Node>>,
    task: Task,
) -> Answer<Handle<Node>> {
    add_copy(graph, after, task, None)
}

fn add_copy(
    graph: Handle<Graph>,
    after: Vec<Handle<Node>>,
    task: Task,
    origin: Option<Handle<Node>>,
) -> Answer<Handle<Node>> {
    for node in &after {
        if node.get()?.graph != graph {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
    }
    let owner = graph.get()?;
    let node = Handle::new(Node {
        graph,
        id: next_id(),
        task: Mutex::new(task),
        after: Mutex::new(after),
        origin,
        shown: Mutex::new(None),
    });
    lock(&owner.nodes).push(node);
    Ok(node)
}

impl Graph {
    /// Nodes in an order that respects all edges; none when they run in a circle.
    pub(crate) fn ordered(&self) -> Answer<Vec<Handle<Node>>> {
        let nodes = lock(&self.nodes).clone();
        let mut done: Vec<Handle<Node>> = Vec::with_capacity(nodes.len());
        let mut left = nodes;
        while !left.is_empty() {
            let before = left.len();
            let mut rest = Vec::new();
            for node in left {
                let after = lock(&node.get()?.after).clone();
                if after.iter().all(|d| done.contains(d)) {
                    done.push(node);
                } else {
                    rest.push(node);
                }
            }
            left = rest;
            if left.len() == before {
                return Err(CUDA_ERROR_INVALID_VALUE);
            }
        }
        Ok(done)
    }

    /// Whether it allocates or frees.
    pub(crate) fn has_memory(&self) -> Answer<bool> {
        for node in lock(&self.nodes).iter() {
            if matches!(*lock(&node.get()?.task), Task::Allocate(_) | Task::Free(_)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Its tasks in order, for use inside another graph.
    pub(crate) fn tasks(&self) -> Answer<Vec<Task>> {
        self.ordered()?.into_iter().map(|n| lock(&n.get()?.task).fixed()).collect()
    }

    fn steps(&self) -> Answer<Vec<Step>> {
        let ordered = self.ordered()?;
        let step = |node: &Handle<Node>| {
            let it = node.get()?;
            let place = |d: &Handle<Node>| ordered.iter().position(|o| o == d);
            let after = lock(&it.after).iter().filter_map(place).collect();
            Ok(Step { node: *node, task: lock(&it.task).fixed()?, enabled: true, after })
        };
        ordered.iter().map(step).collect()
    }

    /// A copy, node by node.
    pub(crate) fn copy(&self) -> Answer<Handle<Graph>> {
        let graph = create();
        let mut pairs: Vec<(Handle<Node>, Handle<Node>)> = Vec::new();
        for node in self.ordered()? {
            let old = node.get()?;
            let find = |d: &Handle<Node>| pairs.iter().find(|(o, _)| o == d).map(|(_, n)| *n);
            let after = lock(&old.after).iter().filter_map(find).collect();
            let new = add_copy(graph, after, lock(&old.task).copy()?, Some(node))?;
            pairs.push((node, new));
        }
        Ok(graph)
    }
}

/// Makes a graph ready for launching.
pub(crate) fn instantiate(graph: Handle<Graph>, flags: u64) -> Answer<Handle<Executable>> {
    let it = graph.get()?;
    let steps = it.steps()?;
    let mut instance = lock(&it.instance);
    // A graph with memory of its own can be there only once.
    if it.has_memory()? && instance.is_some_and(|old| old.get().is_ok()) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let made = Handle::new(Executable { id: next_id(), flags, steps: Mutex::new(steps) });
    *instance = Some(made);
    Ok(made)
}

impl Executable {
    /// Puts all tasks into a stream, one after the other.
    pub(crate) fn launch(&self, stream: &'static Stream) -> Answer {
        let steps = lock(&self.steps).clone();
        steps.iter().filter(|s| s.enabled).try_for_each(|s| submit(&s.task, stream))
    }

    /// Takes over the parameters of a graph of the same shape.
    pub(crate) fn update(&self, graph: &Graph) -> Answer<Update> {
        let new = graph.steps()?;
        let mut steps = lock(&self.steps);
        if steps.len() != new.len() {
            return Ok(Update::OtherShape(Handle::null()));
        }
        for (old, new) in steps.iter().zip(&new) {
            if old.task.kind() != new.task.kind() {
                return Ok(Update::OtherKind(new.node));
            }
            if old.after != new.after {
                return Ok(Update::OtherShape(new.node));
            }
        }
        for (old, new) in steps.iter_mut().zip(new) {
            old.task = new.task;
            old.node = new.node;
        }
        Ok(Update::Done)
    }

    /// Changes the step of a node.
    pub(crate) fn change(&self, node: Handle<Node>, how: impl FnOnce(&mut Step)) -> Answer {
        let mut steps = lock(&self.steps);
        let step = steps.iter_mut().find(|s| s.node == node).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        how(step);
        Ok(())
    }
}

fn submit(task: &Task, stream: &'static Stream) -> Answer {
    match task {
        Task::Work(work) => stream.submit(work.clone()).map(drop),
        Task::Child(graph) => graph.get()?.tasks()?.iter().try_for_each(|t| submit(t, stream)),
        Task::Inner(tasks) => tasks.iter().try_for_each(|t| submit(t, stream)),
        Task::Record(event) => event.get()?.record(stream),
        Task::Wait(event) => event.get()?.hold(stream),
        // Memory of a graph is there as long as the graph: see `docs/emulated-gpu.md`.
        Task::Allocate(_) | Task::Free(_) | Task::Empty => Ok(()),
    }
}
