//! Memory in hand: charged to a process, free, and taken again by one of its threads with plain
//! loads and stores.
//!
//! Locked instructions cost more than the rest of an allocation together, so the thread that uses the
//! hand has none. It says that it is at it (`busy`), looks whether somebody has called the hand in, and
//! only then touches it. Who calls first says so, then makes every processor pass a barrier
//! (`membarrier`), then waits until the thread is not at it: from then on the thread keeps away until the
//! caller has let go. A caller that dies in between leaves the hand called: the process goes on with
//! locked instructions, and nothing waits for anybody.
//!
//! A caller takes what is in hand by one write, for it may be killed before it could make a second: it
//! sets `taken_back` to what `put_in` is. What lies between the two is in hand, and what was taken back
//! is no longer part of the charge (see [`super::job`]). `taken_back` only ever grows, also from one owner
//! of the slot to the next, so that who reads it first and the charge then never sees too little; and
//! each new owner begins with a value of its own, so that a caller that has overslept its owner fails.

use core::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use super::DEVICES;

/// How often a caller looks whether the thread is still at it, before it gives up.
const LOOKS: u32 = 200;

/// One process's hand. Its one thread uses it, others call it in.
#[repr(C)]
#[derive(Debug)]
pub struct Hand {
    busy: AtomicU64,
    /// Callers that are at it. Never reset, for a caller may outlive the owner of the slot.
    callers: AtomicU64,
    /// Put in, less what the thread has taken out again.
    put_in: [AtomicU64; DEVICES],
    /// Of that, taken back by callers.
    taken_back: [AtomicU64; DEVICES],
}

impl Hand {
    /// For the one thread: does something that no caller may see half done; nothing while the hand
    /// is called in.
    #[inline(always)]
    pub fn use_alone<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        self.busy.store(1, Ordering::Relaxed);
        // The processor may still reorder; that is what the caller's barrier is for.
        compiler_fence(Ordering::SeqCst);
        let done = (self.callers.load(Ordering::Acquire) == 0).then(work);
        self.busy.store(0, Ordering::Release);
        done
    }

    /// For everybody else: does something while the one thread keeps away. `barrier` makes every
    /// thread of every process of the job see what was written before it, and says whether it could;
    /// `pause` lets a little time pass. Nothing when the thread does not leave in time.
    pub fn call_in<T>(
        &self,
        barrier: impl FnOnce() -> bool,
        pause: impl FnMut(),
        work: impl FnOnce() -> T,
    ) -> Option<T> {
        self.call();
        let done = (barrier() && self.is_left(pause)).then(work);
        self.let_go();
        done
    }

    /// For the one thread: takes bytes out, if there are so many.
    #[inline(always)]
    pub fn take(&self, device: usize, bytes: u64) -> bool {
        self.change(device, |have| have.checked_sub(bytes))
    }

    /// For the one thread: puts bytes in, if no more than `most` are there then.
    #[inline(always)]
    pub fn give(&self, device: usize, bytes: u64, most: u64) -> bool {
        self.change(device, |have| have.checked_add(bytes).filter(|sum| *sum <= most))
    }

    #[inline(always)]
    fn change(&self, device: usize, change: impl FnOnce(u64) -> Option<u64>) -> bool {
        let (Some(cell), Some(back)) = (self.put_in.get(device), self.taken_back.get(device))
        else {
            return false;
        };
        let changed = self.use_alone(|| {
            let back = back.load(Ordering::Relaxed);
            match change(cell.load(Ordering::Relaxed).saturating_sub(back)) {
                Some(bytes) => {
                    cell.store(back.wrapping_add(bytes), Ordering::Relaxed);
                    true
                }
                None => false,
            }
        });
        changed == Some(true)
    }

    /// What is in hand.
    pub fn bytes(&self, device: usize) -> u64 {
        let back = self.taken_back(device);
        let put_in = self.put_in.get(device).map_or(0, |cell| cell.load(Ordering::SeqCst));
        put_in.saturating_sub(back)
    }

    /// What callers have taken back in all: to be read before the charge of which it is no part.
    #[inline]
    pub(super) fn taken_back(&self, device: usize) -> u64 {
        self.taken_back.get(device).map_or(0, |cell| cell.load(Ordering::SeqCst))
    }

    pub(super) fn call(&self) {
        self.callers.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn let_go(&self) {
        self.callers.fetch_sub(1, Ordering::SeqCst);
    }

    /// After a barrier: waits until the one thread is not at it.
    pub(super) fn is_left(&self, mut pause: impl FnMut()) -> bool {
        (0..LOOKS).any(|look| {
            if look > 0 {
                pause();
            }
            self.busy.load(Ordering::SeqCst) == 0
        })
    }

    /// For a caller: takes everything. One write, after which it is taken, and before which it is not.
    pub(super) fn empty(&self, device: usize) {
        let (Some(cell), Some(back)) = (self.put_in.get(device), self.taken_back.get(device))
        else {
            return;
        };
        // In this order: see `begin_anew`.
        let before = back.load(Ordering::SeqCst);
        let all = cell.load(Ordering::SeqCst);
        if all > before {
            // Fails if another caller was first, or the slot was cleared since.
            let _taken = back.compare_exchange(before, all, Ordering::SeqCst, Ordering::SeqCst);
        }
    }

    /// For who clears the slot, whose owner is dead: gives the charge with which `taken_back` makes
    /// nothing, to be stored by `store`. A caller that still sees the old owner's hand cannot empty it
    /// afterwards: either it has read `taken_back` before the change below and fails, or it sees nothing.
    pub(super) fn begin_anew(&self, device: usize, store: impl FnOnce(u64)) {
        let (Some(cell), Some(back)) = (self.put_in.get(device), self.taken_back.get(device))
        else {
            return;
        };
        cell.store(0, Ordering::SeqCst);
        let fresh = back.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        store(fresh);
        cell.store(fresh, Ordering::SeqCst);
    }

    pub(super) fn clear(&self) {
        self.busy.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A caller that has read the hand of an owner, overslept its death, and writes only then.
    #[test]
    fn a_caller_that_overslept_its_owner_takes_nothing_from_the_next() {
        // SAFETY: all zero is an empty hand that nobody has called in.
        let hand: Hand = unsafe { core::mem::zeroed() };
        for put_in_by_the_next in [0, 512, 4096] {
            assert!(hand.give(0, 4096, 1 << 20));
            let before = hand.taken_back[0].load(Ordering::SeqCst);
            let all = hand.put_in[0].load(Ordering::SeqCst);
            let mut nothing = 0;
            hand.begin_anew(0, |charge| nothing = charge);
            assert_eq!((hand.bytes(0), nothing), (0, hand.taken_back(0)));
            assert!(hand.give(0, put_in_by_the_next, 1 << 20));
            let late = &hand.taken_back[0];
            let late = late.compare_exchange(before, all, Ordering::SeqCst, Ordering::SeqCst);
            assert!(late.is_err(), "the hand is another's");
            assert_eq!(hand.bytes(0), put_in_by_the_next);
            hand.empty(0);
            assert_eq!((hand.bytes(0), hand.taken_back(0)), (0, nothing + put_in_by_the_next));
        }
    }

    /// The same, one that wakes up in the middle of the clearing: it sees nothing to take.
    #[test]
    fn a_caller_in_the_middle_of_a_clearing_takes_nothing() {
        // SAFETY: as above.
        let hand: Hand = unsafe { core::mem::zeroed() };
        assert!(hand.give(0, 4096, 1 << 20));
        hand.begin_anew(0, |nothing| {
            hand.empty(0);
            assert_eq!(hand.taken_back(0), nothing);
        });
        assert_eq!((hand.bytes(0), hand.taken_back(0)), (0, 1));
    }
}
