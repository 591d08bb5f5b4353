//! Memory pools and stream-ordered allocation.
//!
//! A pool keeps what was freed up to its release threshold, as the real one does; the rest goes
//! back to the device at the next synchronisation point, which here is the free itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
use muxflow_emulated_gpu::client::Gpu;

use crate::context::{Context, lock};
use crate::driver::Device;
use crate::ffi::{Answer, Handle, Kind};
use crate::memory::{self, Nature, Range};

/// One pool.
#[derive(Debug)]
pub(crate) struct Pool {
    pub number: u64,
    gpu: &'static Gpu,
    max_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    threshold: u64,
    used: u64,
    used_high: u64,
    reserved: u64,
    reserved_high: u64,
    /// Size to addresses of what was freed and kept.
    kept: BTreeMap<u64, Vec<u64>>,
    /// Reuse flags by attribute.
    reuse: [i32; 3],
}

impl Kind for Pool {
    const MAGIC: u64 = 0x0c0d_a009_9001_0009;
}

/// The default pool of a device, and the one in use.
#[derive(Debug, Default)]
pub(crate) struct DevicePools {
    default: OnceLock<Handle<Pool>>,
    current: Mutex<Option<Handle<Pool>>>,
}

static NEXT: AtomicU64 = AtomicU64::new(1);
static ALL: Mutex<BTreeMap<u64, Handle<Pool>>> = Mutex::new(BTreeMap::new());

/// A new pool.
pub(crate) fn create(device: &'static Device, max_bytes: u64) -> Answer<Handle<Pool>> {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let state = State { reuse: [1; 3], ..State::default() };
    let pool = Pool { number, gpu: device.gpu()?, max_bytes, state: Mutex::new(state) };
    let handle = Handle::new(pool);
    lock(&ALL).insert(number, handle);
    Ok(handle)
}

impl DevicePools {
    pub(crate) fn first(&self, device: &'static Device) -> Answer<Handle<Pool>> {
        if let Some(pool) = self.default.get() {
            return Ok(*pool);
        }
        let made = create(device, 0)?;
        Ok(*self.default.get_or_init(|| made))
    }

    /// Whether it is the one that the device has by itself.
    pub(crate) fn is_first(&self, pool: Handle<Pool>) -> bool {
        self.default.get() == Some(&pool)
    }

    pub(crate) fn current(&self, device: &'static Device) -> Answer<Handle<Pool>> {
        match *lock(&self.current) {
            // A pool that was destroyed gives way to the first one.
            Some(pool) if pool.get().is_ok() => Ok(pool),
            _ => self.first(device),
        }
    }

    pub(crate) fn set_current(&self, pool: Handle<Pool>) {
        *lock(&self.current) = Some(pool);
    }
}

/// What memory of a pool comes in.
const PIECE: u64 = 512;

impl Pool {
    /// Memory from the pool.
    pub(crate) fn allocate(&self, context: &'static Context, bytes: u64) -> Answer<u64> {
        if bytes == 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let size = bytes.checked_next_multiple_of(PIECE).ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
        let mut state = lock(&self.state);
        if self.max_bytes != 0 && state.used.saturating_add(size) > self.max_bytes {
            return Err(CUDA_ERROR_OUT_OF_MEMORY);
        }
        let kept = state.kept.get_mut(&size).and_then(Vec::pop);
        let address = match kept {
            Some(address) => address,
            None => {
                let address = match self.gpu.allocate(size) {
                    Err(CUDA_ERROR_OUT_OF_MEMORY) => {
                        // What is kept goes back before the device is called full.
                        self.trim_state(&mut state, 0);
                        self.gpu.allocate(size)?
                    }
                    other => other?,
                };
                state.reserved += size;
                state.reserved_high = state.reserved_high.max(state.reserved);
                address
            }
        };
        state.used += size;
        state.used_high = state.used_high.max(state.used);
        drop(state);
        let handle = crate::context::current_handle();
        memory::insert(context, handle, address, bytes, Nature::Pool(self.number), 0);
        Ok(address)
    }

    fn take_back(&self, address: u64, bytes: u64) {
        let size = bytes.next_multiple_of(PIECE);
        let mut state = lock(&self.state);
        state.used = state.used.saturating_sub(size);
        if state.reserved <= state.threshold {
            state.kept.entry(size).or_default().push(address);
        } else {
            state.reserved = state.reserved.saturating_sub(size);
            drop(state);
            self.gpu.free(address);
        }
    }

    fn trim_state(&self, state: &mut State, keep: u64) {
        while state.reserved > keep {
            let Some((&size, _)) = state.kept.iter().find(|(_, v)| !v.is_empty()) else { return };
            let Some(address) = state.kept.get_mut(&size).and_then(Vec::pop) else { return };
            self.gpu.free(address);
            state.reserved = state.reserved.saturating_sub(size);
        }
    }

    /// Gives back what is kept beyond `keep` bytes.
    pub(crate) fn trim(&self, keep: u64) {
        self.trim_state(&mut lock(&self.state), keep);
    }

    /// An attribute by its number in `cuda.h`.
    pub(crate) fn attribute(&self, number: u32) -> Answer<Value> {
        let state = lock(&self.state);
        Ok(match number {
            1..=3 => Value::Int(state.reuse[number as usize - 1]),
            4 => Value::Long(state.threshold),
            5 => Value::Long(state.reserved),
            6 => Value::Long(state.reserved_high),
            7 => Value::Long(state.used),
            8 => Value::Long(state.used_high),
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        })
    }

    pub(crate) fn set_attribute(&self, number: u32, int: i32, long: u64) -> Answer {
        let mut state = lock(&self.state);
        match number {
            1..=3 => state.reuse[number as usize - 1] = int,
            4 => {
                state.threshold = long;
                self.trim_state(&mut state, long);
            }
            6 if long == 0 => state.reserved_high = state.reserved,
            8 if long == 0 => state.used_high = state.used,
            _ => return Err(CUDA_ERROR_INVALID_VALUE),
        }
        Ok(())
    }
}

/// An attribute's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Value {
    Int(i32),
    Long(u64),
}

/// A range of a pool was freed.
pub(crate) fn freed(number: u64, range: &Range) {
    let pool = lock(&ALL).get(&number).copied();
    match pool.map(Handle::get) {
        Some(Ok(pool)) => pool.take_back(range.start, range.bytes),
        _ => {
            range.gpu.free(range.start);
        }
    }
}

/// Ends a pool: what it keeps goes back, what is in use is freed when it is freed.
pub(crate) fn destroy(handle: Handle<Pool>) -> Answer {
    let pool = handle.destroy()?;
    lock(&ALL).remove(&pool.number);
    pool.trim(0);
    Ok(())
}
