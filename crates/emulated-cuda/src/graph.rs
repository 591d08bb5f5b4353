//! Graphs: work without time, captured from streams or built by hand.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
};

use crate::context::lock;
use crate::event::Event;
use crate::ffi::{Answer, Handle, Kind};
use crate::stream::Stream;
use crate::work::Work;

/// What a node does.
#[derive(Debug, Clone)]
pub(crate) enum Task {
    Work(Work),
    Child(Arc<Vec<Task>>),
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
            Task::Child(_) => 4,
            Task::Wait(_) => 6,
            Task::Record(_) => 7,
            Task::Allocate(_) => 10,
            Task::Free(_) => 11,
            Task::Work(Work::Write(..) | Work::WaitValue(..)) => 12,
            Task::Work(_) | Task::Empty => 5,
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
}

impl Kind for Node {
    const MAGIC: u64 = 0x0c0d_a006_0de0_0006;
}

/// A graph.
#[derive(Debug)]
pub(crate) struct Graph {
    pub id: u64,
    pub nodes: Mutex<Vec<Handle<Node>>>,
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
}

impl Kind for Executable {
    const MAGIC: u64 = 0x0c0d_a008_e8ec_0008;
}

static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn next_id() -> u64 {
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

/// A graph without nodes.
pub(crate) fn create() -> Handle<Graph> {
    Handle::new(Graph { id: next_id(), nodes: Mutex::new(Vec::new()) })
}

/// A new node behind others.
pub(crate) fn add(
    graph: Handle<Graph>,
    after: Vec<Handle<Node>>,
    task: Task,
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

    /// Its tasks in order, for use inside another graph.
    pub(crate) fn tasks(&self) -> Answer<Vec<Task>> {
        self.ordered()?.into_iter().map(|n| Ok(lock(&n.get()?.task).clone())).collect()
    }

    fn steps(&self) -> Answer<Vec<Step>> {
        let step = |node: Handle<Node>| {
            Ok(Step { node, task: lock(&node.get()?.task).clone(), enabled: true })
        };
        self.ordered()?.into_iter().map(step).collect()
    }

    /// A copy, node by node.
    pub(crate) fn copy(&self) -> Answer<Handle<Graph>> {
        let graph = create();
        let mut pairs: Vec<(Handle<Node>, Handle<Node>)> = Vec::new();
        for node in self.ordered()? {
            let old = node.get()?;
            let find = |d: &Handle<Node>| pairs.iter().find(|(o, _)| o == d).map(|(_, n)| *n);
            let after = lock(&old.after).iter().filter_map(find).collect();
            let new = add(graph, after, lock(&old.task).clone())?;
            pairs.push((node, new));
        }
        Ok(graph)
    }
}

/// Makes a graph ready for launching.
pub(crate) fn instantiate(graph: Handle<Graph>, flags: u64) -> Answer<Handle<Executable>> {
    let steps = graph.get()?.steps()?;
    Ok(Handle::new(Executable { id: next_id(), flags, steps: Mutex::new(steps) }))
}

impl Executable {
    /// Puts all tasks into a stream, one after the other.
    pub(crate) fn launch(&self, stream: &'static Stream) -> Answer {
        let steps = lock(&self.steps).clone();
        steps.iter().filter(|s| s.enabled).try_for_each(|s| submit(&s.task, stream))
    }

    /// Takes over the parameters of a graph of the same shape.
    pub(crate) fn update(&self, graph: &Graph) -> Answer<bool> {
        let new = graph.steps()?;
        let mut steps = lock(&self.steps);
        let same = steps.len() == new.len()
            && steps.iter().zip(&new).all(|(a, b)| a.task.kind() == b.task.kind());
        if same {
            for (old, new) in steps.iter_mut().zip(new) {
                old.task = new.task;
                old.node = new.node;
            }
        }
        Ok(same)
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
        Task::Child(tasks) => tasks.iter().try_for_each(|t| submit(t, stream)),
        Task::Record(event) => event.get()?.record(stream),
        Task::Wait(event) => event.get()?.hold(stream),
        // Memory of a graph is there as long as the graph: see `docs/emulated-gpu.md`.
        Task::Allocate(_) | Task::Free(_) | Task::Empty => Ok(()),
    }
}

/// A stream that is being captured.
#[derive(Debug)]
pub(crate) struct Capture {
    pub graph: Handle<Graph>,
    pub frontier: Vec<Handle<Node>>,
    pub id: u64,
    pub origin: bool,
    thread: Option<std::thread::ThreadId>,
    /// All streams that joined this capture.
    members: Arc<Mutex<Vec<&'static Stream>>>,
}

/// What an event recorded in a capturing stream stands for.
#[derive(Debug, Clone)]
pub(crate) struct Captured {
    graph: Handle<Graph>,
    frontier: Vec<Handle<Node>>,
    id: u64,
    members: Arc<Mutex<Vec<&'static Stream>>>,
}

impl Capture {
    /// Begins with an empty graph or behind nodes of one.
    pub(crate) fn begin(
        stream: &'static Stream,
        graph: Handle<Graph>,
        frontier: Vec<Handle<Node>>,
        mode: u32,
    ) -> Answer {
        let mut place = lock(&stream.capture);
        if place.is_some() {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        *place = Some(Capture {
            graph,
            frontier,
            id: next_id(),
            origin: true,
            // Only the relaxed mode lets another thread end it.
            thread: (mode != 2).then(|| std::thread::current().id()),
            members: Arc::new(Mutex::new(vec![stream])),
        });
        stream.capturing.store(true, Ordering::Release);
        Ok(())
    }

    /// One more node behind all that came before in this stream.
    pub(crate) fn add(&mut self, work: Work) {
        self.add_task(Task::Work(work));
    }

    pub(crate) fn add_task(&mut self, task: Task) {
        if let Ok(node) = add(self.graph, self.frontier.clone(), task) {
            self.frontier = vec![node];
        }
    }

    /// What an event recorded now stands for.
    pub(crate) fn mark(&self) -> Captured {
        Captured {
            graph: self.graph,
            frontier: self.frontier.clone(),
            id: self.id,
            members: Arc::clone(&self.members),
        }
    }
}

impl Captured {
    /// A stream that waits for a captured event joins the capture.
    pub(crate) fn join(&self, stream: &'static Stream) -> Answer {
        let mut place = lock(&stream.capture);
        match place.as_mut() {
            Some(capture) if capture.id == self.id => {
                for node in &self.frontier {
                    if !capture.frontier.contains(node) {
                        capture.frontier.push(*node);
                    }
                }
            }
            Some(_) => return Err(CUDA_ERROR_STREAM_CAPTURE_MERGE),
            None => {
                *place = Some(Capture {
                    graph: self.graph,
                    frontier: self.frontier.clone(),
                    id: self.id,
                    origin: false,
                    thread: None,
                    members: Arc::clone(&self.members),
                });
                lock(&self.members).push(stream);
                stream.capturing.store(true, Ordering::Release);
            }
        }
        Ok(())
    }
}

/// Ends the capture of a stream and of all that joined; gives the graph.
pub(crate) fn end_capture(stream: &'static Stream) -> Answer<Handle<Graph>> {
    let (graph, members) = {
        let place = lock(&stream.capture);
        let capture = place.as_ref().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        if !capture.origin {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        if capture.thread.is_some_and(|t| t != std::thread::current().id()) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        (capture.graph, Arc::clone(&capture.members))
    };
    for member in lock(&members).drain(..) {
        member.capturing.store(false, Ordering::Release);
        *lock(&member.capture) = None;
    }
    Ok(graph)
}
