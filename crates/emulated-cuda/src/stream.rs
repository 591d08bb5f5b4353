//! Streams: order of effects in this process, order of time at the device.
//!
//! Copies take effect in the calling thread when nothing before them in the stream is left to do;
//! then the order of the calls is a right order. Kernels that really compute, host functions, and
//! all work behind them wait in a queue that [`crate::executor`] empties. In both cases the device is told at once and
//! decides when the work is complete in time. Values that a stream writes into the program's own memory
//! are kept until the device says that it is there.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_ILLEGAL_STATE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
};
use muxflow_emulated_gpu::channel::Entry;
use muxflow_emulated_gpu::client::{Gpu, Lane};

use crate::capture::{self, Capture};
use crate::context::{self, Context, lock};
use crate::executor;
use crate::ffi::{Answer, Handle, Kind, regardless};
use crate::graph::Task;
use crate::work::{HostCall, Work};

/// Work that may wait for the executor before a call waits.
const QUEUE: usize = 1024;

/// Which stream 0 means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Default {
    Legacy,
    PerThread,
}

/// One stream.
#[derive(Debug)]
pub(crate) struct Stream {
    pub gpu: &'static Gpu,
    pub context: &'static Context,
    pub context_handle: Handle<Context>,
    pub lane: &'static Lane,
    /// Ordered with the legacy default stream.
    pub blocking: bool,
    pub legacy: bool,
    pub priority: i32,
    pub id: u64,
    pub flags: u32,
    queue: Mutex<VecDeque<(u64, Work)>>,
    emptied: Condvar,
    /// Values to write when the device has come to them.
    writes: Mutex<VecDeque<(u64, Work)>>,
    pub capturing: AtomicBool,
    pub capture: Mutex<Option<Capture>>,
}

impl Kind for Stream {
    const MAGIC: u64 = 0x0c0d_a002_57ea_0002;
}

static NEXT_ID: AtomicU64 = AtomicU64::new(3);

/// Default streams of one thread, by context. They go with it.
#[derive(Debug)]
struct OfThread(BTreeMap<u64, &'static Stream>);

impl Drop for OfThread {
    fn drop(&mut self) {
        self.0.values().for_each(|stream| retire(stream));
    }
}

thread_local! {
    static PER_THREAD: RefCell<OfThread> = const { RefCell::new(OfThread(BTreeMap::new())) };
}

/// Streams that are gone, but for work that goes on to its end.
static RETIRED: Mutex<Vec<&'static Stream>> = Mutex::new(Vec::new());

/// A stream is gone: its place goes back when its work is done. Nothing to do when its context went
/// before it.
pub(crate) fn retire(stream: &'static Stream) {
    capture::abandon(stream);
    let mut streams = lock(&stream.context.streams);
    let before = streams.len();
    streams.retain(|s| !std::ptr::eq(*s, stream));
    let known = streams.len() < before;
    if known {
        // With the list held: who asks for all streams of the context finds it in one of the two.
        lock(&RETIRED).push(stream);
    }
    drop(streams);
    if known {
        give_places_back();
    }
}

/// Streams of a context, and those that are gone but still have work: who waits for the context
/// waits for that too.
pub(crate) fn of_context(context: &Context) -> Vec<&'static Stream> {
    let streams = lock(&context.streams);
    let retired = lock(&RETIRED);
    let gone = retired.iter().filter(|stream| stream.context.id == context.id);
    streams.iter().chain(gone).copied().collect()
}

/// Places of streams that are gone and whose work is done can be used again.
pub(crate) fn give_places_back() {
    lock(&RETIRED).retain(|stream| {
        let is_done = stream.is_idle().unwrap_or(true);
        if is_done {
            stream.gpu.release(stream.lane);
        }
        !is_done
    });
}

/// All streams of a context that ends, those too whose work outlives them: they are no more its own.
pub(crate) fn take_all(context: &Context) -> Vec<&'static Stream> {
    let mut streams = lock(&context.streams);
    let mut all = std::mem::take(&mut *streams);
    all.extend(lock(&RETIRED).extract_if(.., |stream| stream.context.id == context.id));
    drop(streams);
    all.iter().for_each(|stream| capture::abandon(stream));
    all
}

fn make(
    context: &'static Context,
    blocking: bool,
    legacy: bool,
    priority: i32,
    flags: u32,
) -> Answer<Stream> {
    let lane = context.gpu.lane().or_else(|| {
        give_places_back();
        context.gpu.lane()
    });
    let lane = lane.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    Ok(Stream {
        gpu: context.gpu,
        context,
        context_handle: context::current_handle(),
        lane,
        blocking,
        legacy,
        priority,
        id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
        flags,
        queue: Mutex::new(VecDeque::new()),
        emptied: Condvar::new(),
        writes: Mutex::new(VecDeque::new()),
        capturing: AtomicBool::new(false),
        capture: Mutex::new(None),
    })
}

/// A new stream in the current context.
pub(crate) fn create(flags: u32, priority: i32) -> Answer<Handle<Stream>> {
    let context = context::current()?;
    let priority = priority.clamp(-5, 0);
    let handle = Handle::new(make(context, flags & 1 == 0, false, priority, flags)?);
    lock(&context.streams).push(handle.get()?);
    Ok(handle)
}

/// The legacy default stream of a context.
pub(crate) fn legacy(context: &'static Context) -> Answer<&'static Stream> {
    if let Some(stream) = context.legacy.get() {
        return Ok(stream);
    }
    let mut streams = lock(&context.streams);
    if let Some(stream) = context.legacy.get() {
        return Ok(stream);
    }
    let made: &'static Stream = Box::leak(Box::new(make(context, true, true, 0, 0)?));
    streams.push(made);
    Ok(context.legacy.get_or_init(|| made))
}

fn per_thread(context: &'static Context) -> Answer<&'static Stream> {
    let known = PER_THREAD.with_borrow(|own| own.0.get(&context.id).copied());
    if let Some(stream) = known {
        return Ok(stream);
    }
    let made: &'static Stream = Box::leak(Box::new(make(context, true, false, 0, 0)?));
    lock(&context.streams).push(made);
    PER_THREAD.with_borrow_mut(|own| own.0.insert(context.id, made));
    Ok(made)
}

/// The stream that a handle means.
#[inline]
pub(crate) fn resolve(handle: Handle<Stream>, which: Default) -> Answer<&'static Stream> {
    match (handle.number(), which) {
        (0, Default::Legacy) | (1, _) => legacy(context::current()?),
        (0, Default::PerThread) | (2, _) => per_thread(context::current()?),
        _ => {
            let stream = handle.get()?;
            context::fault(stream.gpu)?;
            Ok(stream)
        }
    }
}

impl Stream {
    /// Puts work into the stream; its sequence comes back.
    #[inline]
    pub(crate) fn submit(&'static self, work: Work) -> Answer<u64> {
        if self.capturing.load(Ordering::Relaxed) {
            self.capture_work(work)?;
            return Ok(0);
        }
        if self.blocking {
            self.order_with_others()?;
        }
        self.put(work)
    }

    /// Puts work into the stream without looking at others.
    fn put(&'static self, work: Work) -> Answer<u64> {
        let mut entry = work.entry(self.priority);
        if matches!(work, Work::Kernel(_)) {
            entry.target = self.context.sms;
        }
        // Before the queue is held: the executor needs it to do what the device waits for.
        self.gpu.make_room(self.lane)?;
        let mut queue = lock(&self.queue);
        if queue.is_empty() && work.is_heard() {
            let (seq, first) = self.put_write(work, entry)?;
            // The executor looks into our lists while it holds its own.
            drop(queue);
            if first {
                executor::add(self);
                executor::poke(self.gpu, true);
            }
            return Ok(seq);
        }
        if queue.is_empty() && !work.takes_long() && work.is_ready() {
            let seq = self.gpu.push(self.lane, entry)?;
            work.perform(self.gpu)?;
            self.lane.performed.store(seq, Ordering::Release);
            return Ok(seq);
        }
        while queue.len() >= QUEUE && self.gpu.fault() == 0 {
            queue = self.emptied.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        let seq = self.gpu.push(self.lane, entry)?;
        let host = work.needs_host();
        queue.push_back((seq, work));
        drop(queue);
        executor::add(self);
        executor::poke(self.gpu, host);
        Ok(seq)
    }

    /// A value that is written when the device comes to it: its sequence, and whether the executor
    /// must be told.
    fn put_write(&'static self, work: Work, entry: Entry) -> Answer<(u64, bool)> {
        let mut writes = lock(&self.writes);
        // With the list held: whoever hears of it finds it there.
        let seq = self.gpu.push(self.lane, entry)?;
        let first = writes.is_empty();
        writes.push_back((seq, work));
        self.lane.performed.store(seq, Ordering::Release);
        Ok((seq, first))
    }

    /// Writes the values that the device has come to; says whether some are left.
    pub(crate) fn write_due(&self) -> bool {
        let mut writes = lock(&self.writes);
        let come = self.gpu.completed(self.lane);
        while let Some((seq, work)) = writes.front()
            && *seq <= come
        {
            regardless(work.perform(self.gpu));
            writes.pop_front();
        }
        !writes.is_empty()
    }

    /// The legacy stream waits for all blocking streams, and they wait for it.
    fn order_with_others(&'static self) -> Answer {
        if !self.legacy {
            let Some(legacy) = self.context.legacy.get() else { return Ok(()) };
            return self.wait_for_lane(legacy);
        }
        // Most programs have no other stream: they pay for no list.
        if lock(&self.context.streams).len() < 2 && lock(&RETIRED).is_empty() {
            return Ok(());
        }
        let mut others = of_context(self.context);
        others.retain(|s| s.blocking && !s.legacy);
        forbid_capturing(&others)?;
        others.into_iter().try_for_each(|other| self.wait_for_lane(other))
    }

    fn wait_for_lane(&'static self, other: &'static Stream) -> Answer {
        let seq = other.lane.submitted.load(Ordering::Acquire);
        let done = other.gpu.completed(other.lane) >= seq
            && other.lane.performed.load(Ordering::Acquire) >= seq;
        if done { Ok(()) } else { self.put(Work::Wait(other.lane, seq)).map(drop) }
    }

    /// Waits until everything put so far has happened and is complete.
    pub(crate) fn synchronize(&'static self) -> Answer {
        if self.capturing.load(Ordering::Relaxed) {
            return Err(capture::spoil(self, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        }
        self.wait(self.lane.submitted.load(Ordering::Acquire))
    }

    /// Waits for a sequence.
    pub(crate) fn wait(&'static self, seq: u64) -> Answer {
        self.gpu.wait(self.lane, seq)?;
        wait_performed(self, seq);
        context::fault(self.gpu)
    }

    /// Whether everything put so far is complete.
    pub(crate) fn is_idle(&'static self) -> Answer<bool> {
        if self.capturing.load(Ordering::Relaxed) {
            return Err(capture::spoil(self, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        }
        let seq = self.lane.submitted.load(Ordering::Acquire);
        let come = self.gpu.query(self.lane, seq)?;
        self.write_due();
        Ok(come && self.lane.performed.load(Ordering::Acquire) >= seq)
    }

    /// Does what can be done of the queue. Called by the executor only.
    pub(crate) fn work_off(&'static self) {
        loop {
            let next = lock(&self.queue).front().cloned();
            let Some((seq, work)) = next else { return };
            let failed = self.gpu.fault() != 0;
            if work.needs_host() && self.gpu.host_ready(self.lane) < seq && !failed {
                return;
            }
            let early = work.is_heard() && self.gpu.completed(self.lane) < seq;
            if (early || !work.is_ready()) && !failed {
                return;
            }
            let callback = matches!(work, Work::Host(HostCall::Callback(..)));
            if !failed || callback {
                regardless(work.perform(self.gpu));
            }
            if work.needs_host() {
                self.gpu.host_done(self.lane, seq);
            }
            let mut queue = lock(&self.queue);
            queue.pop_front();
            self.lane.performed.store(seq, Ordering::Release);
            self.emptied.notify_all();
        }
    }

    /// Whether nothing waits for the host.
    pub(crate) fn is_worked_off(&self) -> bool {
        lock(&self.queue).is_empty() && lock(&self.writes).is_empty()
    }

    /// Whether the head waits for something that no bell announces.
    pub(crate) fn must_poll(&self) -> bool {
        let head = |w: &Work| matches!(w, Work::Wait(..)) || w.is_polled();
        lock(&self.queue).front().is_some_and(|(_, w)| head(w))
    }

    fn capture_work(&'static self, work: Work) -> Answer {
        // Callbacks cannot be in a graph, host functions can.
        if matches!(work, Work::Host(HostCall::Callback(..))) {
            return Err(capture::spoil(self, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
        }
        self.capture_task(Task::Work(work))
    }

    /// Puts a task into the graph that is being captured.
    pub(crate) fn capture_task(&'static self, task: Task) -> Answer {
        lock(&self.capture).as_mut().ok_or(CUDA_ERROR_ILLEGAL_STATE)?.add(task)
    }

    /// Whether an event is to be a node of a graph; only where one is captured.
    pub(crate) fn external(&self, flags: u32) -> Answer<bool> {
        match (flags, self.capturing.load(Ordering::Relaxed)) {
            (0, _) => Ok(false),
            (1, true) => Ok(true),
            _ => Err(CUDA_ERROR_INVALID_VALUE),
        }
    }

    /// Whether it can be asked about capture: the legacy stream cannot while a blocking one captures.
    pub(crate) fn check_implicit(&'static self) -> Answer {
        if !self.legacy {
            return Ok(());
        }
        let streams = lock(&self.context.streams);
        let captured = |s: &Stream| s.blocking && s.capturing.load(Ordering::Relaxed);
        // Who only asks spoils nothing.
        if streams.iter().any(|s| captured(s)) {
            return Err(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
        }
        Ok(())
    }
}

/// The legacy stream would wait for these: that must not cross the border of a capture.
fn forbid_capturing(others: &[&'static Stream]) -> Answer {
    match others.iter().find(|other| other.capturing.load(Ordering::Relaxed)) {
        Some(other) => Err(capture::spoil(other, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)),
        None => Ok(()),
    }
}

/// Waits until the effects up to `seq` have happened.
pub(crate) fn wait_performed(stream: &'static Stream, seq: u64) {
    stream.write_due();
    let mut queue = lock(&stream.queue);
    while stream.lane.performed.load(Ordering::Acquire) < seq && !queue.is_empty() {
        let timeout = std::time::Duration::from_millis(100);
        queue = match stream.emptied.wait_timeout(queue, timeout) {
            Ok((queue, _)) => queue,
            Err(poisoned) => poisoned.into_inner().0,
        };
    }
}
