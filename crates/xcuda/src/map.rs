//! What this process holds: a lock-free map from a handle to a number, in memory of its own.
//!
//! Levels of eight-entry buckets, each level eight times the last and mapped when a bucket of the
//! last is full. A key has one bucket per level and the largest level is looked at first, so every
//! operation looks at a few cache lines whatever is live. There are no tombstones, because a look-up always
//! reads whole buckets. Levels are wiped by fork: a child holds nothing.

use core::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use crate::sys;

const WAYS: usize = 8;
const LEVELS: usize = 5;
/// Buckets of each level, as a power of two.
const SIZES: [u32; LEVELS] = [10, 13, 16, 19, 22];
/// Marks an entry whose value is being written.
const BUSY: u64 = u64::MAX;

/// Keys first: one cache line tells whether the bucket has the key.
#[repr(C, align(64))]
struct Bucket {
    keys: [AtomicU64; WAYS],
    values: [AtomicU64; WAYS],
}

/// A map; `const` so that it can be a static.
pub(crate) struct Map {
    levels: [AtomicPtr<Bucket>; LEVELS],
    /// The largest level that is in use.
    top: AtomicUsize,
}

impl Map {
    pub(crate) const fn new() -> Self {
        Self {
            levels: [const { AtomicPtr::new(core::ptr::null_mut()) }; LEVELS],
            top: AtomicUsize::new(0),
        }
    }

    /// Adds an entry. Keys are handles: never zero, never all ones, and not there already.
    /// `false` only when there is no memory at all.
    #[inline]
    pub(crate) fn insert(&self, key: u64, value: u64) -> bool {
        let top = self.top.load(Ordering::Acquire);
        if self.levels[top].load(Ordering::Relaxed).is_null() && self.make_level(top).is_none() {
            return false;
        }
        self.put(top, key, value) || self.grow(top, key, value)
    }

    #[inline]
    fn put(&self, level: usize, key: u64, value: u64) -> bool {
        let Some(bucket) = self.bucket(level, key) else { return false };
        for (slot, cell) in bucket.keys.iter().zip(&bucket.values) {
            let free = slot.load(Ordering::Relaxed) == 0
                && slot.compare_exchange(0, BUSY, Ordering::Acquire, Ordering::Relaxed).is_ok();
            if free {
                cell.store(value, Ordering::Relaxed);
                slot.store(key, Ordering::Release);
                return true;
            }
        }
        false
    }

    /// The bucket of the largest level is full: take a smaller level's, or make a larger level.
    #[cold]
    fn grow(&self, top: usize, key: u64, value: u64) -> bool {
        if (0..top).any(|level| self.put(level, key, value)) {
            return true;
        }
        (top + 1..LEVELS).any(|level| {
            if self.levels[level].load(Ordering::Acquire).is_null()
                && self.make_level(level).is_none()
            {
                return false;
            }
            self.top.fetch_max(level, Ordering::AcqRel);
            self.put(level, key, value)
        })
    }

    /// Takes an entry out.
    pub(crate) fn remove(&self, key: u64) -> Option<u64> {
        let (slot, cell) = self.find(key)?;
        let value = cell.load(Ordering::Relaxed);
        slot.compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed).ok().map(|_| value)
    }

    /// The value of an entry.
    pub(crate) fn get(&self, key: u64) -> Option<u64> {
        self.find(key).map(|(_, cell)| cell.load(Ordering::Relaxed))
    }

    /// Changes the value of an entry; gives the old one.
    pub(crate) fn replace(&self, key: u64, value: u64) -> Option<u64> {
        self.find(key).map(|(_, cell)| cell.swap(value, Ordering::AcqRel))
    }

    /// Adds to the value of an entry (wrapping, so that it can go down); gives the new one.
    pub(crate) fn add(&self, key: u64, delta: u64) -> Option<u64> {
        let cell = self.find(key)?.1;
        Some(cell.fetch_add(delta, Ordering::AcqRel).wrapping_add(delta))
    }

    /// Shows every entry.
    pub(crate) fn each(&self, mut visit: impl FnMut(u64, u64)) {
        self.drain(
            |key, value| {
                visit(key, value);
                false
            },
            |_, _| {},
        );
    }

    /// Takes out every entry for which `wanted` holds, and shows it.
    pub(crate) fn drain(
        &self,
        mut wanted: impl FnMut(u64, u64) -> bool,
        mut taken: impl FnMut(u64, u64),
    ) {
        for (level, base) in self.levels.iter().enumerate() {
            let base = base.load(Ordering::Acquire);
            if base.is_null() {
                continue;
            }
            for at in 0..buckets(level) {
                // SAFETY: within the mapped level.
                let bucket = unsafe { &*base.add(at) };
                for (slot, cell) in bucket.keys.iter().zip(&bucket.values) {
                    let key = slot.load(Ordering::Acquire);
                    let value = cell.load(Ordering::Relaxed);
                    let held = key != 0 && key != BUSY && wanted(key, value);
                    if held
                        && slot
                            .compare_exchange(key, 0, Ordering::AcqRel, Ordering::Relaxed)
                            .is_ok()
                    {
                        taken(key, value);
                    }
                }
            }
        }
    }

    #[inline]
    fn find(&self, key: u64) -> Option<(&AtomicU64, &AtomicU64)> {
        if key == 0 || key == BUSY {
            return None;
        }
        (0..=self.top.load(Ordering::Acquire)).rev().find_map(|level| {
            let bucket = self.bucket(level, key)?;
            let at = bucket.keys.iter().position(|slot| slot.load(Ordering::Acquire) == key)?;
            Some((&bucket.keys[at], &bucket.values[at]))
        })
    }

    #[inline]
    fn bucket(&self, level: usize, key: u64) -> Option<&Bucket> {
        let base = self.levels[level].load(Ordering::Acquire);
        if base.is_null() {
            return None;
        }
        // A bucket holds the eight smallest allocations of one page; neighbouring pages are
        // neighbours here, and allocations of a megabyte and more spread too.
        let mixed = (key >> 12) ^ (key >> 21) ^ (key >> 33) ^ (key >> 45) ^ (key >> 56);
        #[expect(clippy::cast_possible_truncation, reason = "reduced below the number of buckets")]
        let at = mixed as usize & (buckets(level) - 1);
        // SAFETY: `at` is below the number of buckets of this level, which is mapped for good.
        Some(unsafe { &*base.add(at) })
    }

    #[cold]
    fn make_level(&self, level: usize) -> Option<*mut Bucket> {
        let fresh = sys::map_wiped_on_fork(buckets(level) * size_of::<Bucket>()).cast::<Bucket>();
        if fresh.is_null() {
            return None;
        }
        let empty = core::ptr::null_mut();
        match self.levels[level].compare_exchange(empty, fresh, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => Some(fresh),
            // Another thread was first; ours is never touched and costs no memory.
            Err(other) => Some(other),
        }
    }
}

const fn buckets(level: usize) -> usize {
    1 << SIZES[level]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_thousand_entries_come_and_go() {
        let map = Map::new();
        for key in 1..=100_000_u64 {
            assert!(map.insert(key << 9, key));
        }
        for key in 1..=100_000_u64 {
            assert_eq!(map.get(key << 9), Some(key));
            assert_eq!(map.remove(key << 9), Some(key));
            assert_eq!(map.get(key << 9), None);
        }
        assert_eq!(map.remove(0), None);
        assert_eq!(map.remove(u64::MAX), None);
    }

    #[test]
    fn threads_do_not_lose_entries() {
        let map = Map::new();
        std::thread::scope(|scope| {
            for thread in 0..4_u64 {
                let map = &map;
                scope.spawn(move || {
                    for round in 0..50 {
                        for at in 0..500_u64 {
                            assert!(map.insert((thread << 32) + at * 512 + 512, round));
                        }
                        for at in 0..500_u64 {
                            assert_eq!(map.remove((thread << 32) + at * 512 + 512), Some(round));
                        }
                    }
                });
            }
        });
        let mut left = 0;
        map.drain(|_, _| true, |_, _| left += 1);
        assert_eq!(left, 0);
    }
}
