//! The memory that a client process shares with a device: a ring of work that only the client
//! writes, and completion counts that only the device writes.
//!
//! There is no lock in it, so a client that dies at any instruction leaves nothing locked: an entry
//! counts from the moment `head` moves past it. All times are nanoseconds of the host's monotonic
//! clock on the way in, and of the device's clock on the way out.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::sys::Mapping;

/// Says that both sides were built from the same layout.
pub const MAGIC: u64 = 0x4d55_5846_4c4f_5702;
/// Entries in the ring; a power of two.
pub const RING: usize = 4096;
/// Streams of one process on one device.
pub const STREAMS: usize = 2048;
/// Events with times of one process on one device.
pub const EVENTS: usize = 65_536;

/// What an entry asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    /// Nothing; completes in its turn.
    Nop = 0,
    /// A kernel: `work_ns` alone at full clock, and how it loads the GPU.
    Kernel = 1,
    /// Bytes from host to device.
    CopyIn = 2,
    /// Bytes from device to host.
    CopyOut = 3,
    /// Bytes moved or set inside the device's memory.
    CopyDevice = 4,
    /// Not before another stream has come to `target_seq`.
    Wait = 5,
    /// Write the time into event slot `target`.
    Record = 6,
    /// Not before the client says so: a host function or a value that is waited for.
    Host = 7,
    /// The stream is gone; its slot may be used again after this.
    Close = 8,
    /// Nothing, but the client wants to hear of it: it has something to write then.
    Notify = 9,
}

impl Op {
    /// From the number in the ring; garbage becomes [`Op::Nop`].
    pub fn from_number(number: u32) -> Op {
        match number {
            1 => Op::Kernel,
            2 => Op::CopyIn,
            3 => Op::CopyOut,
            4 => Op::CopyDevice,
            5 => Op::Wait,
            6 => Op::Record,
            7 => Op::Host,
            8 => Op::Close,
            9 => Op::Notify,
            _ => Op::Nop,
        }
    }
}

/// One piece of work.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Entry {
    /// An [`Op`].
    pub op: u32,
    /// Which stream slot.
    pub stream: u32,
    /// Its number in the stream, rising by one.
    pub seq: u64,
    /// When the client pushed it, host's monotonic clock.
    pub time_ns: u64,
    /// Kernel: nanoseconds alone at full clock. Copies: bytes. Wait: the sequence to wait for.
    pub amount: u64,
    /// Wait: stream slot. Record: event slot. Kernel: SMs that its context may use, 0 for all.
    pub target: u32,
    /// Kernel: SMs that its blocks can fill.
    pub sm_fill: f32,
    /// Kernel: resident warps against what fits, 0 to 1.
    pub occupancy: f32,
    /// Kernel: share of issue slots, 0 to 1.
    pub issue: f32,
    /// Kernel: share of DRAM bandwidth, 0 to 1.
    pub bandwidth: f32,
    /// Stream priority: lower is more urgent.
    pub priority: i32,
}

impl Entry {
    /// Work of no size.
    pub const EMPTY: Entry = Entry {
        op: 0,
        stream: 0,
        seq: 0,
        time_ns: 0,
        amount: 0,
        target: 0,
        sm_fill: 0.0,
        occupancy: 0.0,
        issue: 0.0,
        bandwidth: 0.0,
        priority: 0,
    };
}

/// How far one stream has come.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct StreamSlot {
    /// Device: sequence that is complete. The low half is the futex word.
    pub completed: AtomicU64,
    /// Device: its own time of that completion.
    pub completed_time_ns: AtomicU64,
    /// Client: sequence that somebody waits for; the device wakes in time for it.
    pub wanted: AtomicU64,
    /// Client: how many threads sleep on `completed`.
    pub sleepers: AtomicU32,
    /// Unused.
    pub reserved: AtomicU32,
    /// Client: host functions up to this sequence have returned.
    pub host_done: AtomicU64,
    /// Device: it has come to the host function with this sequence.
    pub host_ready: AtomicU64,
}

/// The whole channel.
#[derive(Debug)]
#[repr(C)]
pub struct Channel {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Device: 0, or the CUDA error that every call now returns.
    pub fault: AtomicU32,
    /// Device: counts host functions that became ready; futex word of the client's executor.
    pub host_bell: AtomicU32,
    /// Device: nothing of this client completes before this host time.
    pub quiet_until_ns: AtomicU64,
    /// Client: entries pushed.
    pub head: Line,
    /// Device: entries taken.
    pub tail: Line,
    /// The ring.
    pub ring: [std::cell::UnsafeCell<Entry>; RING],
    /// The streams.
    pub streams: [StreamSlot; STREAMS],
    /// Device: time of the last record of each event.
    pub events: [AtomicU64; EVENTS],
}

/// A counter on its own cache line.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Line(pub AtomicU64);

/// What all clients of a device see.
#[derive(Debug)]
#[repr(C)]
pub struct Public {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// GPU lost, or the device process said goodbye.
    pub gone: AtomicU32,
    /// Counts the clients that died or were struck: who waits for one looks again when it changes.
    pub losses: AtomicU32,
    /// Host time at which device time was zero.
    pub start_ns: AtomicU64,
    /// Device nanoseconds per host nanosecond, as the bits of an `f64`.
    pub factor: AtomicU64,
}

/// A mapped structure of shared memory.
#[derive(Debug)]
pub struct Shared<T> {
    mapping: Mapping,
    kind: std::marker::PhantomData<T>,
}

/// What may be laid over shared memory: every bit pattern is valid and all changes go through
/// atomics, except ring entries, which `head` and `tail` hand over.
///
/// # Safety
/// Implementors promise just that.
pub unsafe trait Layout {}
// SAFETY: atomics and ring entries only; any bits are valid in each.
unsafe impl Layout for Channel {}
// SAFETY: atomics only.
unsafe impl Layout for Public {}

impl<T: Layout> Shared<T> {
    /// Bytes it takes.
    pub const BYTES: usize = size_of::<T>();

    /// Lays `T` over a shared file of at least [`Self::BYTES`].
    pub fn map(fd: BorrowedFd<'_>) -> std::io::Result<Shared<T>> {
        Ok(Shared { mapping: Mapping::shared(fd, Self::BYTES)?, kind: std::marker::PhantomData })
    }

    /// Keeps the mapping for the rest of the process.
    pub fn forever(self) -> &'static T {
        let address = self.mapping.address().cast::<T>();
        std::mem::forget(self.mapping);
        // SAFETY: mapped, page-aligned, large enough, never unmapped; `Layout` allows any bits.
        unsafe { &*address }
    }
}

impl<T: Layout> std::ops::Deref for Shared<T> {
    type Target = T;
    fn deref(&self) -> &T {
        // SAFETY: mapped for as long as `self`, page-aligned, large enough; any bits are valid.
        unsafe { &*self.mapping.address().cast::<T>() }
    }
}

// SAFETY: entries are handed over by `head` and `tail`; everything else is atomic.
unsafe impl Sync for Channel {}

impl Channel {
    /// Writes an entry into the place of `position`; the caller owns that place by the protocol.
    pub fn put(&self, position: u64, entry: Entry) {
        let cell = &self.ring[usize::try_from(position).unwrap_or(0) % RING];
        // SAFETY: only the one client under its lock writes here, and the device reads it only
        // after `head` has moved past it.
        unsafe { *cell.get() = entry };
    }

    /// Reads the entry at `position`, which `head` has passed.
    pub fn take(&self, position: u64) -> Entry {
        let cell = &self.ring[usize::try_from(position).unwrap_or(0) % RING];
        // SAFETY: the client does not write this place again before `tail` has passed it; an
        // entry is plain numbers, so even a client that breaks the rule gives only odd numbers.
        unsafe { std::ptr::read_volatile(cell.get()) }
    }

    /// The futex word of a stream: the low half of its completion count.
    pub fn word(slot: &StreamSlot) -> &AtomicU32 {
        // SAFETY: an aligned atomic of eight bytes starts, little-endian, with its low four; both
        // views are atomics.
        unsafe { &*std::ptr::from_ref(&slot.completed).cast::<AtomicU32>() }
    }
}
