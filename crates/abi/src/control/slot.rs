//! One process's place in the job part: who it is, how far it is, what it did.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::hand::Hand;
use super::rhythm::BUCKETS;

/// Who owns a slot: process id and start time, so that a reused id is another owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Process id, in the id namespace that the slot names.
    pub pid: u32,
    /// Start time in clock ticks since boot, low 32 bits.
    pub start_ticks: u32,
}

impl Owner {
    pub(super) const fn word(self) -> u64 {
        ((self.pid as u64 & 0x7fff_ffff) << 32) | self.start_ticks as u64
    }

    #[expect(clippy::cast_possible_truncation, reason = "takes the word apart")]
    pub(super) const fn of(word: u64) -> Self {
        Self { pid: ((word >> 32) & 0x7fff_ffff) as u32, start_ticks: word as u32 }
    }
}

/// How far a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum SlotState {
    /// Known, nothing special.
    Registered = 1,
    /// Told to drain; work is still in flight.
    Draining = 2,
    /// Nothing in flight, gate shut.
    Drained = 3,
    /// Contexts are gone.
    Released = 4,
}

impl SlotState {
    pub(super) fn from_word(word: u32) -> Self {
        match word {
            2 => Self::Draining,
            3 => Self::Drained,
            4 => Self::Released,
            _ => Self::Registered,
        }
    }
}

/// Everything that one process says of itself. Written by its owner only.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Slot {
    pub(super) owner: AtomicU64,
    pub(super) pid_namespace: AtomicU64,
    pub(super) state: AtomicU32,
    /// The command word that the state answers.
    pub acknowledged: AtomicU32,
    /// Kernels started.
    pub launches: AtomicU64,
    /// Time that launches waited at the gate.
    pub delayed_ns: AtomicU64,
    /// Requests for memory that were refused.
    pub refused: AtomicU64,
    /// Kernels in flight, as far as known.
    pub in_flight: AtomicU64,
    /// Launches let through because the work in flight made no progress.
    pub overruns: AtomicU64,
    /// Smoothed time per kernel while the pipe was full.
    pub ns_per_launch: AtomicU64,
    /// Time of the last launch that was looked at.
    pub last_launch_ns: AtomicU64,
    /// Time of the first launch.
    pub first_launch_ns: AtomicU64,
    /// Highest sum of charges of this process.
    pub peak_bytes: AtomicU64,
    pub(super) hand: Hand,
    spare: [AtomicU64; 2],
    /// Launches by hash of the kernel; see [`super::rhythm`].
    pub rhythm: [AtomicU32; BUCKETS],
}

impl Slot {
    /// Owner: says how far it is with which command.
    pub fn report(&self, state: SlotState, command_word: u32) {
        self.state.store(state as u32, Ordering::Relaxed);
        self.acknowledged.store(command_word, Ordering::Release);
    }

    /// What this process may take again without asking.
    #[inline]
    pub fn hand(&self) -> &Hand {
        &self.hand
    }

    pub(super) fn clear(&self) {
        self.hand.clear();
        let words = [
            &self.pid_namespace,
            &self.launches,
            &self.delayed_ns,
            &self.refused,
            &self.in_flight,
            &self.overruns,
            &self.ns_per_launch,
            &self.last_launch_ns,
            &self.first_launch_ns,
            &self.peak_bytes,
        ];
        for word in words {
            word.store(0, Ordering::Relaxed);
        }
        self.state.store(SlotState::Registered as u32, Ordering::Relaxed);
        self.acknowledged.store(0, Ordering::Relaxed);
        for bucket in &self.rhythm {
            bucket.store(0, Ordering::Relaxed);
        }
    }
}
