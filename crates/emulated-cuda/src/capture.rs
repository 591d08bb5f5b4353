//! Stream capture: streams whose work goes into a graph, and what must not be called meanwhile.
//!
//! A sequence begins in one stream, others join it by waiting for its events. Whatever breaks its rules
//! spoils it: from then on its streams refuse work, and its end gives no graph.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;

use muxflow_abi::cuda::result::{
    CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CUDA_ERROR_STREAM_CAPTURE_MERGE, CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
};

use crate::context::lock;
use crate::ffi::{Answer, Handle};
use crate::graph::{self, Graph, Node, Task};
use crate::stream::Stream;

/// Modes of a capture and of a thread, as in `cuda.h`.
const GLOBAL: u32 = 0;
const RELAXED: u32 = 2;

/// All that belongs to one capture.
#[derive(Debug)]
struct Sequence {
    thread: ThreadId,
    mode: u32,
    spoiled: AtomicBool,
    over: AtomicBool,
    members: Mutex<Vec<&'static Stream>>,
}

/// Captures under way, and how many of them keep threads from unsafe calls.
static ONGOING: Mutex<Vec<Arc<Sequence>>> = Mutex::new(Vec::new());
static STRICT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// Changes what this thread may call during captures; what was before comes back.
pub(crate) fn exchange_mode(wanted: u32) -> Answer<u32> {
    if wanted > RELAXED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(MODE.replace(wanted))
}

/// For calls that a capture does not see and that it may depend on, such as allocating: refused while
/// this thread captures, or any other does for all threads.
#[inline]
pub(crate) fn unsafe_call() -> Answer {
    if STRICT.load(Ordering::Relaxed) == 0 { Ok(()) } else { judge_unsafe_call() }
}

#[cold]
fn judge_unsafe_call() -> Answer {
    let mode = MODE.get();
    if mode == RELAXED {
        return Ok(());
    }
    let own = std::thread::current().id();
    let forbids = |s: &&Arc<Sequence>| {
        let everywhere = mode == GLOBAL && s.mode == GLOBAL;
        s.mode != RELAXED && (s.thread == own || everywhere)
    };
    let mut refused = false;
    for sequence in lock(&ONGOING).iter().filter(forbids) {
        sequence.spoiled.store(true, Ordering::Release);
        refused = true;
    }
    if refused { Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED) } else { Ok(()) }
}

/// A stream that is being captured.
#[derive(Debug)]
pub(crate) struct Capture {
    pub graph: Handle<Graph>,
    pub frontier: Vec<Handle<Node>>,
    pub id: u64,
    origin: bool,
    sequence: Arc<Sequence>,
}

/// What an event recorded in a capturing stream stands for.
#[derive(Debug, Clone)]
pub(crate) struct Captured {
    graph: Handle<Graph>,
    frontier: Vec<Handle<Node>>,
    id: u64,
    sequence: Arc<Sequence>,
}

impl Capture {
    /// Begins with an empty graph or behind nodes of one.
    pub(crate) fn begin(
        stream: &'static Stream,
        graph: Handle<Graph>,
        frontier: Vec<Handle<Node>>,
        mode: u32,
    ) -> Answer {
        if mode > RELAXED {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let mut place = lock(&stream.capture);
        if place.is_some() {
            return Err(CUDA_ERROR_ILLEGAL_STATE);
        }
        let sequence = Arc::new(Sequence {
            thread: std::thread::current().id(),
            mode,
            spoiled: AtomicBool::new(false),
            over: AtomicBool::new(false),
            members: Mutex::new(vec![stream]),
        });
        lock(&ONGOING).push(Arc::clone(&sequence));
        STRICT.fetch_add(usize::from(mode != RELAXED), Ordering::Relaxed);
        *place = Some(Capture { graph, frontier, id: graph::next_id(), origin: true, sequence });
        stream.capturing.store(true, Ordering::Release);
        Ok(())
    }

    /// One more node behind all that came before in this stream.
    pub(crate) fn add(&mut self, task: Task) -> Answer {
        if self.is_spoiled() {
            return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        let node = graph::add(self.graph, self.frontier.clone(), task)?;
        self.frontier = vec![node];
        Ok(())
    }

    /// Whether its rules were broken.
    pub(crate) fn is_spoiled(&self) -> bool {
        self.sequence.spoiled.load(Ordering::Acquire)
    }

    /// What an event recorded now stands for.
    pub(crate) fn mark(&self) -> Answer<Captured> {
        if self.is_spoiled() {
            return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        Ok(Captured {
            graph: self.graph,
            frontier: self.frontier.clone(),
            id: self.id,
            sequence: Arc::clone(&self.sequence),
        })
    }
}

/// Breaks the capture of a stream, if it has one; the error of the call that did it.
#[cold]
pub(crate) fn spoil(stream: &Stream, error: u32) -> u32 {
    if let Some(capture) = lock(&stream.capture).as_ref() {
        capture.sequence.spoiled.store(true, Ordering::Release);
    }
    error
}

impl Captured {
    /// A stream that waits for a captured event joins the capture.
    pub(crate) fn join(&self, stream: &'static Stream) -> Answer {
        if self.sequence.over.load(Ordering::Acquire) {
            return Err(CUDA_ERROR_CAPTURED_EVENT);
        }
        if self.sequence.spoiled.load(Ordering::Acquire) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        }
        if stream.legacy {
            self.sequence.spoiled.store(true, Ordering::Release);
            return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        let mut place = lock(&stream.capture);
        match place.as_mut() {
            Some(capture) if capture.id == self.id => {
                for node in &self.frontier {
                    if !capture.frontier.contains(node) {
                        capture.frontier.push(*node);
                    }
                }
            }
            Some(capture) => {
                capture.sequence.spoiled.store(true, Ordering::Release);
                self.sequence.spoiled.store(true, Ordering::Release);
                return Err(CUDA_ERROR_STREAM_CAPTURE_MERGE);
            }
            None => {
                *place = Some(Capture {
                    graph: self.graph,
                    frontier: self.frontier.clone(),
                    id: self.id,
                    origin: false,
                    sequence: Arc::clone(&self.sequence),
                });
                lock(&self.sequence.members).push(stream);
                stream.capturing.store(true, Ordering::Release);
            }
        }
        Ok(())
    }
}

/// Ends the capture of a stream and of all that joined; gives the graph.
pub(crate) fn end(stream: &'static Stream) -> Answer<Handle<Graph>> {
    let (graph, frontier, sequence) = {
        let place = lock(&stream.capture);
        let capture = place.as_ref().ok_or(CUDA_ERROR_ILLEGAL_STATE)?;
        if !capture.origin {
            capture.sequence.spoiled.store(true, Ordering::Release);
            return Err(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
        }
        let sequence = &capture.sequence;
        if sequence.mode != RELAXED && sequence.thread != std::thread::current().id() {
            return Err(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
        }
        (capture.graph, capture.frontier.clone(), Arc::clone(sequence))
    };
    let members = close(&sequence);
    if sequence.spoiled.load(Ordering::Acquire) {
        return Err(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    let reached = ancestors(&frontier)?;
    let joined = |c: &Capture| c.frontier.iter().all(|node| reached.contains(&node.number()));
    if members.iter().all(joined) { Ok(graph) } else { Err(CUDA_ERROR_STREAM_CAPTURE_UNJOINED) }
}

/// Lets all streams of a capture go; it forbids nothing any more.
fn close(sequence: &Arc<Sequence>) -> Vec<Capture> {
    let mut captures = Vec::new();
    let members = std::mem::take(&mut *lock(&sequence.members));
    for member in members {
        captures.extend(lock(&member.capture).take());
        member.capturing.store(false, Ordering::Release);
    }
    if !sequence.over.swap(true, Ordering::AcqRel) {
        lock(&ONGOING).retain(|s| !Arc::ptr_eq(s, sequence));
        STRICT.fetch_sub(usize::from(sequence.mode != RELAXED), Ordering::Relaxed);
    }
    captures
}

/// A stream goes away in the middle of a capture, which gives no graph any more. With the stream that it
/// began in, it is over.
pub(crate) fn abandon(stream: &'static Stream) {
    let own = lock(&stream.capture).as_ref().map(|c| (c.origin, Arc::clone(&c.sequence)));
    let Some((origin, sequence)) = own else { return };
    sequence.spoiled.store(true, Ordering::Release);
    if origin {
        close(&sequence);
        return;
    }
    lock(&sequence.members).retain(|member| !std::ptr::eq(*member, stream));
    lock(&stream.capture).take();
    stream.capturing.store(false, Ordering::Release);
}

/// These nodes and all that they stand behind.
fn ancestors(nodes: &[Handle<Node>]) -> Answer<BTreeSet<usize>> {
    let mut seen = BTreeSet::new();
    let mut left = nodes.to_vec();
    while let Some(node) = left.pop() {
        if seen.insert(node.number()) {
            left.extend(lock(&node.get()?.after).iter().copied());
        }
    }
    Ok(seen)
}
