//! A process's side of a device: pushing work, waiting for it, asking for memory.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::channel::{Channel, Entry, MAGIC, Op, Public, RING, STREAMS, Shared, StreamSlot};
use crate::facts::Facts;
use crate::heap::Heap;
use crate::node::Node;
use crate::sys;
use crate::wire::{Kind, Message, Plain, Received, Socket};

/// CUDA errors that come from here.
pub mod code {
    /// The device does not answer.
    pub const DEVICE_UNAVAILABLE: u32 = 46;
    /// No device.
    pub const NO_DEVICE: u32 = 100;
    /// Not enough memory.
    pub const OUT_OF_MEMORY: u32 = 2;
    /// Anything else.
    pub const UNKNOWN: u32 = 999;
}

/// Work of one stream that may be unfinished before more of it waits, as in the real driver.
const IN_FLIGHT: u64 = 1024;

/// What MPS allows a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Allowance {
    /// Process of the MPS server, or 0 without MPS.
    pub server_pid: i32,
    /// Thousandths of SMs, or 0 for all.
    pub sm_cap_thousandths: u32,
    /// Bytes, or 0 for all.
    pub memory_bytes: u64,
}

/// A stream's place in the channel. Sequences go on rising when a place is used again.
#[derive(Debug)]
pub struct Lane {
    /// Which slot.
    pub slot: u32,
    /// Last sequence pushed.
    pub submitted: AtomicU64,
    /// Sequence up to which the effects on memory have happened.
    pub performed: AtomicU64,
}

/// One GPU as this process sees it.
#[derive(Debug)]
pub struct Gpu {
    /// What it is.
    pub facts: Facts,
    /// This process's number at the device.
    pub id: u32,
    /// What MPS allows.
    pub allowance: Allowance,
    /// Its memory.
    pub heap: Heap,
    channel: &'static Channel,
    public: &'static Public,
    doorbell: OwnedFd,
    socket: Mutex<Socket>,
    head: Mutex<u64>,
    lanes: Mutex<(Vec<&'static Lane>, u32)>,
    event_slots: Mutex<(Vec<u32>, u32)>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpu {
    /// Connects this process to a device.
    pub fn connect(node: &Node, index: usize, allowance: Allowance) -> Result<Gpu, u32> {
        let lost = |_| code::DEVICE_UNAVAILABLE;
        let socket = Socket::connect(&node.socket(index)).map_err(lost)?;
        let first = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).map_err(lost)?;
        let facts_at = size_of::<crate::facts::Stats>();
        let facts = first.tail.get(facts_at..).and_then(Facts::from_bytes).ok_or(code::UNKNOWN)?;
        let heap = Heap::new(facts.memory_bytes[0]).map_err(|_| code::OUT_OF_MEMORY)?;
        let hello = Message::new(
            Kind::Hello,
            &[
                1,
                u64::from(allowance.server_pid.unsigned_abs()),
                allowance.sm_cap_thousandths.into(),
                allowance.memory_bytes,
            ],
        );
        let answer = socket.ask(&hello, &[], &[heap.fd().as_raw_fd()]).map_err(lost)?;
        if answer.message.status != 0 {
            return Err(answer.message.status);
        }
        let id = answer.message.values[0] as u32;
        let [public, channel, doorbell]: [OwnedFd; 3] =
            answer.fds.try_into().map_err(|_| code::UNKNOWN)?;
        let public = Shared::<Public>::map(public.as_fd()).map_err(|_| code::UNKNOWN)?.forever();
        let channel = Shared::<Channel>::map(channel.as_fd()).map_err(|_| code::UNKNOWN)?.forever();
        if channel.magic.load(Ordering::Acquire) != MAGIC {
            return Err(code::UNKNOWN);
        }
        Ok(Gpu {
            facts,
            id,
            allowance,
            heap,
            channel,
            public,
            doorbell,
            socket: Mutex::new(socket),
            head: Mutex::new(0),
            lanes: Mutex::new((Vec::new(), 0)),
            event_slots: Mutex::new((Vec::new(), 0)),
        })
    }

    /// The error that every call returns since a fault, or 0.
    #[inline]
    pub fn fault(&self) -> u32 {
        self.channel.fault.load(Ordering::Relaxed)
    }

    /// Whether the GPU is gone from the bus.
    pub fn is_gone(&self) -> bool {
        self.public.gone.load(Ordering::Relaxed) != 0
    }

    fn ask(&self, kind: Kind, values: &[u64]) -> Result<Received, u32> {
        let socket = lock(&self.socket);
        let answer = socket
            .ask(&Message::new(kind, values), &[], &[])
            .map_err(|_| code::DEVICE_UNAVAILABLE)?;
        match answer.message.status {
            0 => Ok(answer),
            status => Err(status),
        }
    }

    /// Counts the clients of the GPU that died or were struck by a fault.
    pub fn losses(&self) -> u32 {
        self.public.losses.load(Ordering::Acquire)
    }

    /// Whether a client of the GPU is there and may still come to the end of its work.
    pub fn is_at_work(&self, id: u32) -> bool {
        self.ask(Kind::Alive, &[id.into()]).is_ok_and(|answer| answer.message.values[0] == 1)
    }

    /// Charges memory to this process.
    pub fn charge(&self, bytes: u64) -> Result<(), u32> {
        self.ask(Kind::Allocate, &[bytes]).map(drop)
    }

    /// Gives charged memory back.
    pub fn discharge(&self, bytes: u64) {
        // A device that is gone needs nothing back.
        drop(self.ask(Kind::Free, &[bytes]));
    }

    /// Free and total memory as this process may see them, and what it holds.
    pub fn memory_info(&self) -> Result<[u64; 3], u32> {
        let v = self.ask(Kind::MemoryInfo, &[])?.message.values;
        Ok([v[0], v[1], v[2]])
    }

    /// One more or one less context.
    pub fn context(&self, change: i64) -> Result<(), u32> {
        self.ask(Kind::Context, &[change.cast_unsigned()]).map(drop)
    }

    /// The heap file of another process on this GPU.
    pub fn open_heap(&self, id: u32) -> Result<OwnedFd, u32> {
        self.ask(Kind::OpenHeap, &[id.into()])?.fds.pop().ok_or(code::UNKNOWN)
    }

    /// Reports an error of this process's own making, as hardware would: an XID. What calls return from
    /// then on is `error`, or what is usual for the XID when it is 0.
    pub fn report(&self, xid: u32, error: u32) {
        let [kind, value] = crate::fault::Fault::Xid(xid).to_wire();
        // The device knows who says this.
        drop(self.ask(Kind::Inject, &[kind, value, error.into(), 0, 0]));
    }

    /// Memory for an allocation; charged first.
    pub fn allocate(&self, bytes: u64) -> Result<u64, u32> {
        self.heap.allocate(bytes, |more| self.charge(more), |less| self.discharge(less))
    }

    /// Gives an allocation back.
    pub fn free(&self, address: u64) -> bool {
        self.heap.free(address, |less| self.discharge(less))
    }

    /// A place for a new stream.
    pub fn lane(&self) -> Option<&'static Lane> {
        let mut lanes = lock(&self.lanes);
        if let Some(lane) = lanes.0.pop() {
            return Some(lane);
        }
        let slot = lanes.1;
        if slot as usize >= STREAMS {
            return None;
        }
        lanes.1 += 1;
        let zero = || AtomicU64::new(0);
        Some(Box::leak(Box::new(Lane { slot, submitted: zero(), performed: zero() })))
    }

    /// Gives a stream's place back; its work goes on to its end.
    pub fn release(&self, lane: &'static Lane) {
        lock(&self.lanes).0.push(lane);
    }

    /// A place for an event's time.
    pub fn event_slot(&self) -> Option<u32> {
        let mut slots = lock(&self.event_slots);
        if let Some(slot) = slots.0.pop() {
            return Some(slot);
        }
        let slot = slots.1;
        (slot < crate::channel::EVENTS as u32).then(|| {
            slots.1 += 1;
            slot
        })
    }

    /// Gives an event's place back.
    pub fn release_event_slot(&self, slot: u32) {
        lock(&self.event_slots).0.push(slot);
    }

    /// Device time of an event's last record.
    pub fn event_time_ns(&self, slot: u32) -> u64 {
        self.channel.events[slot as usize].load(Ordering::Acquire)
    }

    fn slot(&self, lane: &Lane) -> &'static StreamSlot {
        &self.channel.streams[lane.slot as usize]
    }

    /// Sequence that is complete.
    pub fn completed(&self, lane: &Lane) -> u64 {
        self.slot(lane).completed.load(Ordering::Acquire)
    }

    /// Waits while a stream holds too much. Apart from [`Gpu::push`], so that nobody waits here with a
    /// lock in hand that the work before needs to get done.
    #[inline]
    pub fn make_room(&self, lane: &Lane) -> Result<(), u32> {
        let submitted = lane.submitted.load(Ordering::Relaxed);
        if submitted.saturating_sub(self.completed(lane)) < IN_FLIGHT {
            return Ok(());
        }
        self.wait(lane, submitted - IN_FLIGHT / 2)
    }

    /// Pushes work into a stream; returns its sequence. Waits only for the device to take what was
    /// pushed before.
    #[inline]
    pub fn push(&self, lane: &Lane, mut entry: Entry) -> Result<u64, u32> {
        entry.stream = lane.slot;
        entry.time_ns = sys::monotonic_ns();
        let mut head = lock(&self.head);
        while *head - self.channel.tail.0.load(Ordering::Acquire) >= RING as u64 - 1 {
            if self.fault() != 0 {
                return Err(self.fault());
            }
            if !self.is_alive() {
                return Err(code::DEVICE_UNAVAILABLE);
            }
            sys::ring(self.doorbell.as_fd());
            std::thread::sleep(Duration::from_micros(50));
        }
        let seq = lane.submitted.load(Ordering::Relaxed) + 1;
        lane.submitted.store(seq, Ordering::Release);
        entry.seq = seq;
        self.channel.put(*head, entry);
        *head += 1;
        self.channel.head.0.store(*head, Ordering::Release);
        let position = *head;
        drop(head);
        // So that the ring never fills while the device sleeps.
        if position.is_multiple_of(RING as u64 / 2) {
            sys::ring(self.doorbell.as_fd());
        }
        Ok(seq)
    }

    /// Whether a stream has come to `seq`; asks the device to look when it may have.
    pub fn query(&self, lane: &Lane, seq: u64) -> Result<bool, u32> {
        if self.completed(lane) >= seq {
            return if self.fault() != 0 { Err(self.fault()) } else { Ok(true) };
        }
        if self.fault() != 0 {
            return Err(self.fault());
        }
        let quiet = self.channel.quiet_until_ns.load(Ordering::Relaxed);
        // What the device has not taken yet is not in its forecast.
        let tail = self.channel.tail.0.load(Ordering::Acquire);
        let untaken = tail < self.channel.head.0.load(Ordering::Acquire);
        if untaken || sys::monotonic_ns() >= quiet {
            sys::ring(self.doorbell.as_fd());
        }
        Ok(false)
    }

    /// Waits until a stream has come to `seq`.
    pub fn wait(&self, lane: &Lane, seq: u64) -> Result<(), u32> {
        let slot = self.slot(lane);
        let mut rung = false;
        loop {
            let fault = self.fault();
            if fault != 0 {
                return Err(fault);
            }
            let completed = slot.completed.load(Ordering::SeqCst);
            if completed >= seq {
                return Ok(());
            }
            slot.wanted.fetch_max(seq, Ordering::SeqCst);
            slot.sleepers.fetch_add(1, Ordering::SeqCst);
            if !rung {
                sys::ring(self.doorbell.as_fd());
                rung = true;
            }
            let word = Channel::word(slot);
            sys::futex_wait(word, completed as u32, Some(Duration::from_millis(500)));
            slot.sleepers.fetch_sub(1, Ordering::SeqCst);
            if slot.completed.load(Ordering::SeqCst) == completed && !self.is_alive() {
                return Err(code::DEVICE_UNAVAILABLE);
            }
        }
    }

    fn is_alive(&self) -> bool {
        let socket = lock(&self.socket);
        let mut ready = Vec::new();
        let polled = sys::poll(&[socket.fd()], Some(Duration::ZERO), &mut ready);
        // The device says nothing unasked to a client: readable means hung up.
        polled.is_ok() && !ready[0]
    }

    /// Makes the device look at the ring and at finished host functions.
    pub fn nudge(&self) {
        sys::ring(self.doorbell.as_fd());
    }

    /// Sequence of the host function that the device has come to in a stream.
    pub fn host_ready(&self, lane: &Lane) -> u64 {
        self.slot(lane).host_ready.load(Ordering::SeqCst)
    }

    /// Tells the device that a stream's host functions have returned up to `seq`.
    pub fn host_done(&self, lane: &Lane, seq: u64) {
        self.slot(lane).host_done.store(seq, Ordering::SeqCst);
        self.nudge();
    }

    /// The word that changes when a host function becomes ready, and its value now.
    pub fn host_bell(&self) -> (&'static std::sync::atomic::AtomicU32, u32) {
        let bell = &self.channel.host_bell;
        (bell, bell.load(Ordering::SeqCst))
    }

    /// Wakes who waits on the bell in this process.
    pub fn ring_host_bell(&self) {
        self.channel.host_bell.fetch_add(1, Ordering::SeqCst);
        sys::futex_wake(&self.channel.host_bell);
    }

    /// Work of no kind.
    pub fn nop() -> Entry {
        Entry { op: Op::Nop as u32, ..Entry::EMPTY }
    }
}
