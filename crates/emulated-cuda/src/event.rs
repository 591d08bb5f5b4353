//! Events: marks in streams, with device times.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::result::{
    CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE,
    CUDA_ERROR_NOT_READY, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
};
use muxflow_emulated_gpu::client::Gpu;

use crate::capture::{self, Capture, Captured};
use crate::context::{self, Context, lock};
use crate::ffi::{Answer, Handle, Kind};
use crate::shared_event::{self, SharedEvent};
use crate::stream::{Stream, wait_performed};
use crate::work::Work;

/// One event.
#[derive(Debug)]
pub(crate) struct Event {
    pub gpu: &'static Gpu,
    /// Streams of other contexts cannot record it.
    context: &'static Context,
    slot: Option<u32>,
    /// Of several processes.
    shared: Option<&'static SharedEvent>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where it was recorded last.
    recorded: Option<(&'static Stream, u64)>,
    captured: Option<Captured>,
}

impl Kind for Event {
    const MAGIC: u64 = 0x0c0d_a005_e4e7_0005;
}

const DISABLE_TIMING: u32 = 2;
const INTERPROCESS: u32 = 4;

pub(crate) fn create(flags: u32) -> Answer<Handle<Event>> {
    let context = context::current()?;
    let interprocess = flags & INTERPROCESS != 0;
    if flags > 7 || interprocess && flags & DISABLE_TIMING == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let slot = if flags & DISABLE_TIMING == 0 {
        let slot = context.gpu.event_slot().or_else(|| {
            give_slots_back();
            context.gpu.event_slot()
        });
        Some(slot.ok_or(CUDA_ERROR_OUT_OF_MEMORY)?)
    } else {
        None
    };
    let shared = interprocess.then(|| shared_event::create(context.device)).transpose()?;
    Ok(Handle::new(Event { gpu: context.gpu, context, slot, shared, state: Mutex::default() }))
}

/// An event of another process, by its name.
pub(crate) fn open(name: [u64; 2]) -> Answer<Handle<Event>> {
    let context = context::current()?;
    let shared = Some(shared_event::open(context.device, name)?);
    let state = Mutex::default();
    Ok(Handle::new(Event { gpu: context.gpu, context, slot: None, shared, state }))
}

impl Event {
    /// Marks the end of what the stream holds now.
    pub(crate) fn record(&'static self, stream: &'static Stream) -> Answer {
        if !std::ptr::eq(stream.context, self.context) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        if stream.capturing.load(Ordering::Relaxed) {
            let mark = lock(&stream.capture).as_ref().map(Capture::mark).transpose()?;
            lock(&self.state).captured = mark;
            return Ok(());
        }
        let work = match (self.shared, self.slot) {
            (Some(shared), _) => Work::Reach(shared, shared.next()),
            (None, Some(slot)) => Work::Record(slot),
            (None, None) => Work::Nothing,
        };
        let seq = stream.submit(work)?;
        let mut state = lock(&self.state);
        state.recorded = Some((stream, seq));
        state.captured = None;
        Ok(())
    }

    /// Makes a stream wait for the mark.
    pub(crate) fn hold(&'static self, stream: &'static Stream) -> Answer {
        let (recorded, captured) = {
            let state = lock(&self.state);
            (state.recorded, state.captured.clone())
        };
        if let Some(captured) = captured {
            return captured.join(stream);
        }
        let shared = self.shared.map(|s| (s, s.last())).filter(|(_, last)| *last > 0);
        if recorded.is_none() && shared.is_none() {
            return Ok(());
        }
        if stream.capturing.load(Ordering::Relaxed) {
            // What was recorded outside stays outside.
            return Err(capture::spoil(stream, CUDA_ERROR_STREAM_CAPTURE_ISOLATION));
        }
        if let Some((shared, last)) = shared {
            return stream.submit(Work::WaitShared(shared, last)).map(drop);
        }
        let Some((other, seq)) = recorded else { return Ok(()) };
        if std::ptr::eq(other, stream) {
            return Ok(());
        }
        if std::ptr::eq(other.gpu, stream.gpu) {
            if other.gpu.completed(other.lane) >= seq
                && other.lane.performed.load(Ordering::Acquire) >= seq
            {
                return Ok(());
            }
            return stream.submit(Work::Wait(other.lane, seq)).map(drop);
        }
        stream.submit(Work::WaitForeign(other.gpu, other.lane, seq)).map(drop)
    }

    /// The mark, unless it stands in a graph.
    fn mark(&self) -> Answer<Option<(&'static Stream, u64)>> {
        let state = lock(&self.state);
        if state.captured.is_some() { Err(CUDA_ERROR_CAPTURED_EVENT) } else { Ok(state.recorded) }
    }

    /// Whether the mark was passed.
    pub(crate) fn query(&self) -> Answer<bool> {
        let mark = self.mark()?;
        if let Some(shared) = self.shared {
            context::fault(self.gpu)?;
            return Ok(shared.is_reached(shared.last()));
        }
        let Some((stream, seq)) = mark else { return Ok(true) };
        let performed = stream.lane.performed.load(Ordering::Acquire) >= seq;
        Ok(self.gpu.query(stream.lane, seq)? && performed)
    }

    pub(crate) fn synchronize(&self) -> Answer {
        let mark = self.mark()?;
        if let Some(shared) = self.shared {
            return shared.wait(shared.last(), self.gpu);
        }
        let Some((stream, seq)) = mark else { return Ok(()) };
        self.gpu.wait(stream.lane, seq)?;
        wait_performed(stream, seq);
        Ok(())
    }

    /// Milliseconds from this to another.
    pub(crate) fn elapsed_ms(&self, end: &Event) -> Answer<f32> {
        let (Some(from), Some(to)) = (self.slot, end.slot) else {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        };
        if self.mark()?.is_none() || end.mark()?.is_none() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        if !self.query()? || !end.query()? {
            return Err(CUDA_ERROR_NOT_READY);
        }
        let (from, to) = (self.gpu.event_time_ns(from), end.gpu.event_time_ns(to));
        Ok(((to as f64 - from as f64) / 1e6) as f32)
    }

    /// Its name for other processes.
    pub(crate) fn shared_name(&self) -> Answer<[u64; 2]> {
        Ok(self.shared.ok_or(CUDA_ERROR_INVALID_HANDLE)?.name)
    }

    /// Gives its place for a time back, when nothing can write there any more.
    pub(crate) fn end(&self) {
        if let Some(shared) = self.shared {
            shared.end(self.context.device);
        }
        let Some(slot) = self.slot else { return };
        match lock(&self.state).recorded {
            Some((stream, seq)) if !is_passed(stream, seq) => {
                lock(&RETIRED).push(Retired { slot, stream, seq });
            }
            _ => self.gpu.release_event_slot(slot),
        }
    }
}

/// A place that a record under way will still write to.
#[derive(Debug)]
struct Retired {
    slot: u32,
    stream: &'static Stream,
    seq: u64,
}

/// Places of events that were destroyed before their record had passed.
static RETIRED: Mutex<Vec<Retired>> = Mutex::new(Vec::new());

fn is_passed(stream: &'static Stream, seq: u64) -> bool {
    // After a fault nothing passes any more, and nothing is written.
    stream.gpu.query(stream.lane, seq).unwrap_or(true)
}

fn give_slots_back() {
    lock(&RETIRED).retain(|it| {
        let passed = is_passed(it.stream, it.seq);
        if passed {
            it.stream.gpu.release_event_slot(it.slot);
        }
        !passed
    });
}
