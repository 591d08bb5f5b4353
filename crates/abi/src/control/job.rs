//! What the processes of a job tell the agent and each other: who they are, what they hold, what
//! they did.
//!
//! **Charges without a lock.** The truth is `charged[device][slot]`; there is no total that could
//! go out of step. To charge, a process adds to its own cell, then adds up the cells of all slots;
//! over the quota it takes its own back. Two that meet at the edge may both step back, never both pass.
//! A process killed at any instruction leaves only its own cells, and they count until somebody sees
//! that the owner is dead and clears them. Clearing is idempotent, and is itself owned: a reclaimer that
//! dies leaves its name and is cleared by the next.
//!
//! What a process is charged with is its cell less what callers have taken back from its hand.
//!
//! **What is in hand.** Freed memory may stay charged and be noted in the slot's `hand`, from which one
//! thread of the process allocates again without a locked instruction (see [`super::hand`]). It is not held: all
//! sums that are shown leave it out, and whoever finds no room takes it back first.

use core::sync::atomic::{AtomicU64, Ordering};

use super::rhythm::BUCKETS;
pub use super::slot::{Owner, Slot, SlotState};
use super::{DEVICES, Header, Invalid, JOB_MAGIC, SLOTS};

/// Tells a slot that is being cleared from one in use.
const RECLAIMING: u64 = 1 << 63;
/// How many exported IPC handles are remembered.
const EXPORTS: usize = 1024;

/// Copy of a slot's numbers. Whatever the process wrote, it is just numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Index of the slot.
    pub slot: usize,
    /// Who owns it.
    pub owner: Owner,
    /// Inode of the id namespace in which `owner.pid` holds.
    pub pid_namespace: u64,
    /// How far it is.
    pub state: SlotState,
    /// With which command.
    pub acknowledged: u32,
    /// See [`Slot`].
    pub launches: u64,
    /// See [`Slot`].
    pub delayed_ns: u64,
    /// See [`Slot`].
    pub refused: u64,
    /// See [`Slot`].
    pub in_flight: u64,
    /// See [`Slot`].
    pub overruns: u64,
    /// See [`Slot`].
    pub ns_per_launch: u64,
    /// See [`Slot`].
    pub first_launch_ns: u64,
    /// See [`Slot`].
    pub last_launch_ns: u64,
    /// See [`Slot`].
    pub peak_bytes: u64,
    /// Bytes charged on each device.
    pub charged_bytes: [u64; DEVICES],
    /// See [`Slot`].
    pub rhythm: [u32; BUCKETS],
}

/// The job's file.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct JobPart {
    header: Header,
    /// One past the highest slot that was ever used.
    used_slots: AtomicU64,
    /// When the launch bucket will be empty again; see [`JobPart::take`].
    bucket_ns: AtomicU64,
    export_count: AtomicU64,
    /// What processes did whose slots were given back: launches, delay, refusals, overruns.
    retired: [AtomicU64; 4],
    /// The most that one of them held.
    retired_peak_bytes: AtomicU64,
    pad: [AtomicU64; 496],
    exports: [AtomicU64; EXPORTS],
    charged: [[AtomicU64; SLOTS]; DEVICES],
    slots: [Slot; SLOTS],
}

impl JobPart {
    /// Length of the file.
    pub const BYTES: usize = size_of::<Self>();

    /// The part that lies in mapped memory, if its header is whole and ours. Only the header is
    /// vouched for.
    ///
    /// # Errors
    /// Says what is wrong with it.
    ///
    /// # Safety
    /// `base` points to `bytes` readable and writable bytes that stay mapped for `'a`, aligned to a
    /// page.
    pub unsafe fn validate<'a>(
        base: *mut u8,
        bytes: usize,
        generation: u64,
    ) -> Result<&'a Self, Invalid> {
        if bytes < Self::BYTES {
            return Err(Invalid::Truncated { bytes, needed: Self::BYTES });
        }
        // SAFETY: long enough by the check above, mapped and aligned by contract, and every bit
        // pattern is a valid JobPart, for it is made of atomics only.
        let part = unsafe { &*base.cast_const().cast::<Self>() };
        part.header.check(JOB_MAGIC, Self::BYTES, 0)?;
        if part.header.generation.load(Ordering::Relaxed) != generation {
            return Err(Invalid::Generation);
        }
        Ok(part)
    }

    /// Writes the header of a new part; the rest of a new file is zero.
    pub fn initialise(&self, generation: u64) {
        self.header.write(JOB_MAGIC, Self::BYTES, generation, 0);
    }

    /// Takes a slot for a process. A slot that already bears its name is of the program that ran
    /// before `exec`: what that held is gone, so it is cleared and taken over.
    pub fn claim(&self, owner: Owner, pid_namespace: u64) -> Option<usize> {
        let word = owner.word();
        let used = self.used();
        let mine = (0..used).find(|&i| self.owner_word(i) & !RECLAIMING == word);
        let index = mine.or_else(|| {
            (0..SLOTS).find(|&i| {
                self.slots[i]
                    .owner
                    .compare_exchange(0, word | RECLAIMING, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            })
        })?;
        self.used_slots.fetch_max(index as u64 + 1, Ordering::AcqRel);
        let slot = &self.slots[index];
        if mine.is_some() {
            self.retire(&self.counters_of(index, owner));
        }
        self.clear_cells(index);
        slot.clear();
        slot.pid_namespace.store(pid_namespace, Ordering::Relaxed);
        slot.owner.store(word, Ordering::Release);
        Some(index)
    }

    /// Gives back a slot with everything charged to it.
    pub fn release(&self, index: usize) {
        if let Some(slot) = self.slots.get(index) {
            self.clear_cells(index);
            slot.hand.clear();
            slot.owner.store(0, Ordering::Release);
        }
    }

    /// Clears the slots of owners of which `is_dead` is sure; says how many. `me` is who clears.
    /// `last_words` gets the counters of each before they go.
    pub fn reclaim(
        &self,
        me: Owner,
        is_dead: impl Fn(Owner, u64) -> bool,
        mut last_words: impl FnMut(&Counters),
    ) -> usize {
        let mut cleared = 0;
        for index in 0..self.used() {
            let word = self.owner_word(index);
            let owner = Owner::of(word);
            let namespace = self.slots[index].pid_namespace.load(Ordering::Relaxed);
            if word == 0 || !is_dead(owner, namespace) {
                continue;
            }
            let mark = me.word() | RECLAIMING;
            let slot = &self.slots[index];
            let won = slot
                .owner
                .compare_exchange(word, mark, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
            if won {
                if word & RECLAIMING == 0 {
                    let counters = self.counters_of(index, owner);
                    self.retire(&counters);
                    last_words(&counters);
                }
                self.clear_cells(index);
                slot.clear();
                slot.owner.store(0, Ordering::Release);
                cleared += 1;
            }
        }
        cleared
    }

    /// Whoever has marked the slot as its own to clear: nothing is charged to it any more.
    fn clear_cells(&self, index: usize) {
        for (device, cells) in self.charged.iter().enumerate() {
            let store = |nothing| cells[index].store(nothing, Ordering::SeqCst);
            self.slots[index].hand.begin_anew(device, store);
        }
    }

    fn retire(&self, counters: &Counters) {
        let did = [counters.launches, counters.delayed_ns, counters.refused, counters.overruns];
        for (sum, more) in self.retired.iter().zip(did) {
            sum.fetch_add(more, Ordering::Relaxed);
        }
        let held = counters.charged_bytes.iter().fold(0_u64, |sum, &more| sum.saturating_add(more));
        self.retired_peak_bytes.fetch_max(held.max(counters.peak_bytes), Ordering::Relaxed);
    }

    /// The most that a process held whose slot was given back.
    pub fn retired_peak_bytes(&self) -> u64 {
        self.retired_peak_bytes.load(Ordering::Relaxed)
    }

    /// What the job's processes did, the dead included: launches, delay in ns, refusals, overruns.
    pub fn did(&self) -> [u64; 4] {
        let mut sums = [0; 4];
        for (sum, retired) in sums.iter_mut().zip(&self.retired) {
            *sum = retired.load(Ordering::Relaxed);
        }
        self.each(|c| {
            for (sum, more) in
                sums.iter_mut().zip([c.launches, c.delayed_ns, c.refused, c.overruns])
            {
                *sum = sum.saturating_add(more);
            }
        });
        sums
    }

    /// Charges `bytes` to a slot if all slots together stay within `quota_bytes`.
    #[inline]
    pub fn charge(&self, device: usize, slot: usize, bytes: u64, quota_bytes: u64) -> bool {
        let (Some(cells), true) = (self.charged.get(device), slot < SLOTS) else { return false };
        if bytes > quota_bytes {
            return false;
        }
        cells[slot].fetch_add(bytes, Ordering::SeqCst);
        if self.taken_bytes(device) <= quota_bytes {
            return true;
        }
        self.uncharge(device, slot, bytes);
        false
    }

    /// Adds without asking: for what the driver has taken already.
    pub fn charge_always(&self, device: usize, slot: usize, bytes: u64) {
        if let Some(cell) = self.charged.get(device).and_then(|cells| cells.get(slot)) {
            cell.fetch_add(bytes, Ordering::SeqCst);
        }
    }

    /// Takes back what was charged; never below nothing.
    #[inline]
    pub fn uncharge(&self, device: usize, slot: usize, bytes: u64) {
        let Some(cell) = self.charged.get(device).and_then(|cells| cells.get(slot)) else { return };
        let least = self.slots[slot].hand.taken_back(device);
        let old = cell.fetch_sub(bytes, Ordering::SeqCst);
        if old.saturating_sub(least) < bytes {
            cell.store(least, Ordering::SeqCst);
        }
    }

    /// What all processes of the job hold on a device. Garbage cannot overflow it.
    pub fn charged_bytes(&self, device: usize) -> u64 {
        if device >= DEVICES {
            return u64::MAX;
        }
        let held = (0..self.used()).map(|slot| self.slot_bytes(device, slot));
        held.fold(0, u64::saturating_add)
    }

    /// What they hold and what they have in hand.
    #[inline]
    fn taken_bytes(&self, device: usize) -> u64 {
        let Some(cells) = self.charged.get(device) else { return u64::MAX };
        let used = self.used();
        cells[..used].iter().zip(&self.slots).fold(0, |sum, (cell, slot)| {
            // In this order, or what is taken back in between would be missed.
            let back = slot.hand.taken_back(device);
            sum.saturating_add(cell.load(Ordering::SeqCst).saturating_sub(back))
        })
    }

    /// What one slot holds on a device.
    pub fn slot_bytes(&self, device: usize, slot: usize) -> u64 {
        let cell = self.charged.get(device).and_then(|cells| cells.get(slot));
        let (Some(cell), Some(owned)) = (cell, self.slots.get(slot)) else { return 0 };
        let (back, in_hand) = (owned.hand.taken_back(device), owned.hand.bytes(device));
        cell.load(Ordering::SeqCst).saturating_sub(back).saturating_sub(in_hand)
    }

    /// Takes back what all processes have in hand on a device; says whether there was anything.
    /// `barrier` makes every thread of every process of the job see what was written before it, and
    /// says whether it could; `pause` lets a little time pass.
    pub fn recall(
        &self,
        device: usize,
        barrier: impl FnOnce() -> bool,
        mut pause: impl FnMut(),
    ) -> bool {
        let used = self.used();
        let asked = |slot: usize| self.slots[slot].hand.bytes(device) > 0;
        let mut called = [false; SLOTS];
        for (slot, called) in called[..used].iter_mut().enumerate() {
            *called = asked(slot);
            if *called {
                self.slots[slot].hand.call();
            }
        }
        if !called.contains(&true) {
            return false;
        }
        let seen = barrier();
        for slot in (0..used).filter(|slot| called[*slot]) {
            let hand = &self.slots[slot].hand;
            if seen && hand.is_left(&mut pause) {
                hand.empty(device);
            }
            hand.let_go();
        }
        seen
    }

    #[inline]
    fn used(&self) -> usize {
        usize::try_from(self.used_slots.load(Ordering::Acquire)).unwrap_or(SLOTS).min(SLOTS)
    }

    fn owner_word(&self, index: usize) -> u64 {
        self.slots[index].owner.load(Ordering::Acquire)
    }

    /// A slot, for its owner to write to.
    pub fn slot(&self, index: usize) -> Option<&Slot> {
        self.slots.get(index)
    }

    /// The counters of every owned slot.
    pub fn each(&self, mut visit: impl FnMut(&Counters)) {
        for index in 0..self.used() {
            let word = self.owner_word(index);
            if word != 0 && word & RECLAIMING == 0 {
                visit(&self.counters_of(index, Owner::of(word)));
            }
        }
    }

    fn counters_of(&self, index: usize, owner: Owner) -> Counters {
        let slot = &self.slots[index];
        let mut rhythm = [0; BUCKETS];
        for (copy, bucket) in rhythm.iter_mut().zip(&slot.rhythm) {
            *copy = bucket.load(Ordering::Relaxed);
        }
        let mut charged_bytes = [0; DEVICES];
        for (device, copy) in charged_bytes.iter_mut().enumerate() {
            *copy = self.slot_bytes(device, index);
        }
        Counters {
            slot: index,
            owner,
            pid_namespace: slot.pid_namespace.load(Ordering::Relaxed),
            state: SlotState::from_word(slot.state.load(Ordering::Relaxed)),
            acknowledged: slot.acknowledged.load(Ordering::Acquire),
            launches: slot.launches.load(Ordering::Relaxed),
            delayed_ns: slot.delayed_ns.load(Ordering::Relaxed),
            refused: slot.refused.load(Ordering::Relaxed),
            in_flight: slot.in_flight.load(Ordering::Relaxed),
            overruns: slot.overruns.load(Ordering::Relaxed),
            ns_per_launch: slot.ns_per_launch.load(Ordering::Relaxed),
            first_launch_ns: slot.first_launch_ns.load(Ordering::Relaxed),
            last_launch_ns: slot.last_launch_ns.load(Ordering::Relaxed),
            peak_bytes: slot.peak_bytes.load(Ordering::Relaxed),
            charged_bytes,
            rhythm,
        }
    }

    /// Takes `cost` kernels out of the job's launch bucket: zero, or how long to wait before trying
    /// again. One word holds the bucket (the time at which it would be full again), so that a process
    /// that dies here leaves nothing half done.
    pub fn take(&self, now_ns: u64, cost: u64, rate_milli_per_s: u64, burst: u64) -> u64 {
        if rate_milli_per_s == u64::MAX {
            return 0;
        }
        if rate_milli_per_s == 0 {
            return u64::MAX;
        }
        let price = |kernels: u64| {
            let ns = u128::from(kernels) * 1_000_000_000_000 / u128::from(rate_milli_per_s);
            u64::try_from(ns).unwrap_or(u64::MAX / 4).min(u64::MAX / 4)
        };
        // The bucket may run ahead of the clock by a burst; what is further ahead is garbage or a cost
        // larger than the burst, which waits until the bucket is full again.
        let ahead_ns = price(burst.max(1));
        let mut word = self.bucket_ns.load(Ordering::Relaxed);
        loop {
            let sane = word.min(now_ns.saturating_add(ahead_ns).saturating_add(60_000_000_000));
            let from = sane.max(now_ns);
            let after = from.saturating_add(price(cost));
            let allowed = now_ns.saturating_add(ahead_ns);
            if after > allowed && from > now_ns {
                return (after - allowed).min(from - now_ns).max(1);
            }
            match self.bucket_ns.compare_exchange_weak(
                word,
                after,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return 0,
                Err(seen) => word = seen,
            }
        }
    }

    /// Remembers that the job itself exported this memory: to open it again costs nothing.
    pub fn remember_export(&self, handle: &[u8]) {
        let at = self.export_count.fetch_add(1, Ordering::Relaxed);
        #[expect(clippy::cast_possible_truncation, reason = "reduced below the length")]
        let at = (at % EXPORTS as u64) as usize;
        self.exports[at].store(hash(handle), Ordering::Release);
    }

    /// Whether the job itself exported this memory (lately: the list is bounded).
    pub fn is_own_export(&self, handle: &[u8]) -> bool {
        let wanted = hash(handle);
        self.exports.iter().any(|word| word.load(Ordering::Acquire) == wanted)
    }
}

fn hash(bytes: &[u8]) -> u64 {
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| super::mix(sum, byte.into()));
    sum | 1
}
