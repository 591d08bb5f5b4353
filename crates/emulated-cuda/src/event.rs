//! Events: marks in streams, with device times.

use std::sync::Mutex;
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::result::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_NOT_READY, CUDA_ERROR_OUT_OF_MEMORY,
};
use muxflow_emulated_gpu::client::Gpu;

use crate::context::{self, lock};
use crate::ffi::{Answer, Handle, Kind};
use crate::graph::Captured;
use crate::stream::{Stream, wait_performed};
use crate::work::Work;

/// One event.
#[derive(Debug)]
pub(crate) struct Event {
    pub gpu: &'static Gpu,
    slot: Option<u32>,
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

pub(crate) fn create(flags: u32) -> Answer<Handle<Event>> {
    let context = context::current()?;
    let slot = if flags & DISABLE_TIMING == 0 {
        Some(context.gpu.event_slot().ok_or(CUDA_ERROR_OUT_OF_MEMORY)?)
    } else {
        None
    };
    Ok(Handle::new(Event { gpu: context.gpu, slot, state: Mutex::default() }))
}

impl Event {
    /// Marks the end of what the stream holds now.
    pub(crate) fn record(&'static self, stream: &'static Stream) -> Answer {
        if stream.capturing.load(Ordering::Relaxed) {
            lock(&self.state).captured = lock(&stream.capture).as_ref().map(|c| c.mark());
            return Ok(());
        }
        if !std::ptr::eq(stream.gpu, self.gpu) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        let seq = stream.submit(self.slot.map_or(Work::Nothing, Work::Record))?;
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
        let Some((other, seq)) = recorded else { return Ok(()) };
        if std::ptr::eq(other, stream) && !stream.capturing.load(Ordering::Relaxed) {
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

    /// Whether the mark was passed.
    pub(crate) fn query(&self) -> Answer<bool> {
        let Some((stream, seq)) = lock(&self.state).recorded else { return Ok(true) };
        let performed = stream.lane.performed.load(Ordering::Acquire) >= seq;
        Ok(self.gpu.query(stream.lane, seq)? && performed)
    }

    pub(crate) fn synchronize(&self) -> Answer {
        let Some((stream, seq)) = lock(&self.state).recorded else { return Ok(()) };
        self.gpu.wait(stream.lane, seq)?;
        wait_performed(stream, seq);
        Ok(())
    }

    /// Milliseconds from this to another.
    pub(crate) fn elapsed_ms(&self, end: &Event) -> Answer<f32> {
        let (Some(from), Some(to)) = (self.slot, end.slot) else {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        };
        if lock(&self.state).recorded.is_none() || lock(&end.state).recorded.is_none() {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        if !self.query()? || !end.query()? {
            return Err(CUDA_ERROR_NOT_READY);
        }
        let (from, to) = (self.gpu.event_time_ns(from), end.gpu.event_time_ns(to));
        Ok(((to as f64 - from as f64) / 1e6) as f32)
    }

    /// Gives its place for a time back, unless something may still write there.
    pub(crate) fn end(&self) {
        if let Some(slot) = self.slot
            && self.query().unwrap_or(false)
        {
            self.gpu.release_event_slot(slot);
        }
    }
}
