//! The newest notes of the thread that allocates most: a few cache lines, where a program that frees
//! what it has just allocated never leaves.
//!
//! Everything here happens under [`muxflow_abi::control::hand::Hand`]: in its one thread, or with that
//! thread kept away. Only [`Front::get`] may look at any time.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

const ENTRIES: usize = 128;

/// The notes: addresses, and the cells of [`crate::notes`]. An address has one place.
#[repr(C, align(64))]
pub(crate) struct Front {
    addresses: [AtomicU64; ENTRIES],
    values: [AtomicU32; ENTRIES],
}

impl Front {
    /// Adds a note; gives the one that had its place.
    #[inline(always)]
    pub(crate) fn put(&self, address: u64, value: u32) -> Option<(u64, u32)> {
        let at = place(address);
        let before = self.addresses[at].load(Ordering::Relaxed);
        let pushed_out = (before != 0).then(|| (before, self.values[at].load(Ordering::Relaxed)));
        self.values[at].store(value, Ordering::Relaxed);
        self.addresses[at].store(address, Ordering::Release);
        pushed_out
    }

    /// Takes a note out.
    #[inline(always)]
    pub(crate) fn take(&self, address: u64) -> Option<u32> {
        let at = place(address);
        if self.addresses[at].load(Ordering::Relaxed) != address || address == 0 {
            return None;
        }
        self.addresses[at].store(0, Ordering::Relaxed);
        Some(self.values[at].load(Ordering::Relaxed))
    }

    /// A note, as far as it can be seen from here.
    pub(crate) fn get(&self, address: u64) -> Option<u32> {
        let at = place(address);
        let here = address != 0 && self.addresses[at].load(Ordering::Acquire) == address;
        here.then(|| self.values[at].load(Ordering::Relaxed))
    }

    /// Takes out every note whose value is wanted, and shows it.
    pub(crate) fn drain(&self, wanted: impl Fn(u32) -> bool, mut taken: impl FnMut(u32)) {
        for (address, value) in self.addresses.iter().zip(&self.values) {
            let value = value.load(Ordering::Relaxed);
            if address.load(Ordering::Relaxed) != 0 && wanted(value) {
                address.store(0, Ordering::Relaxed);
                taken(value);
            }
        }
    }
}

#[inline(always)]
fn place(address: u64) -> usize {
    // Small allocations of one page have places of their own; larger ones are spread too.
    #[expect(clippy::cast_possible_truncation, reason = "reduced below the number of entries")]
    let mixed = ((address >> 9) ^ (address >> 16) ^ (address >> 23)) as usize;
    mixed % ENTRIES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_place_for_each_address() {
        // SAFETY: all zero is an empty front.
        let front: Front = unsafe { core::mem::zeroed() };
        assert_eq!(front.take(0), None, "no address");
        assert_eq!(front.put(512, 7), None);
        assert_eq!((front.get(512), front.take(1024)), (Some(7), None));
        let same = (1..).map(|at| at * 512).find(|at| *at != 512 && place(*at) == place(512));
        let same = same.unwrap();
        assert_eq!(front.put(same, 8), Some((512, 7)));
        assert_eq!((front.take(512), front.take(same), front.take(same)), (None, Some(8), None));
        front.put(1024, 9);
        let mut all = Vec::new();
        front.drain(|value| value == 1, |value| all.push(value));
        front.drain(|value| value == 9, |value| all.push(value));
        assert_eq!((all, front.get(1024)), (vec![9], None));
    }
}
