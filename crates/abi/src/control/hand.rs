//! Memory in hand: charged to a process, free, and taken again by one of its threads with plain
//! loads and stores.
//!
//! Locked instructions cost more than the rest of an allocation together, so the thread that uses the
//! hand has none. It says that it is at it (`busy`), looks whether somebody has called the hand in, and
//! only then touches it. Who calls first says so, then makes every processor pass a barrier
//! (`membarrier`), then waits until the thread is not at it: from then on the thread keeps away until the
//! caller has let go. A caller that dies in between leaves the hand called: the process goes on with
//! locked instructions, and nothing waits for anybody.

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
    bytes: [AtomicU64; DEVICES],
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
        let Some(cell) = self.bytes.get(device) else { return false };
        let changed = self.use_alone(|| match change(cell.load(Ordering::Relaxed)) {
            Some(bytes) => {
                cell.store(bytes, Ordering::Relaxed);
                true
            }
            None => false,
        });
        changed == Some(true)
    }

    /// What is in hand.
    pub fn bytes(&self, device: usize) -> u64 {
        self.bytes.get(device).map_or(0, |cell| cell.load(Ordering::SeqCst))
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

    /// For a caller: takes everything.
    pub(super) fn empty(&self, device: usize) -> u64 {
        self.bytes.get(device).map_or(0, |cell| cell.swap(0, Ordering::SeqCst))
    }

    pub(super) fn clear(&self) {
        self.busy.store(0, Ordering::Relaxed);
        for cell in &self.bytes {
            cell.store(0, Ordering::Relaxed);
        }
    }
}
