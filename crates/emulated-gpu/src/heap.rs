//! A process's device memory: one large shared file, mapped whole, handed out in pieces.
//!
//! Small pieces come from blocks of 2 MiB, as in the real driver, so what the device counts moves
//! in steps of 2 MiB. The first block belongs to the context's own overhead and costs nothing.
//! Any other process may map the file, which is how memory is shared between processes.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use crate::sys::{self, Mapping};

/// What the driver takes from the device at a time.
pub const BLOCK: u64 = 2 << 20;
/// Alignment of every allocation.
pub const ALIGN: u64 = 512;

/// Free ranges of an address space, merged with their neighbours.
#[derive(Debug, Default)]
struct Ranges {
    by_start: BTreeMap<u64, u64>,
    by_size: BTreeSet<(u64, u64)>,
}

impl Ranges {
    fn insert(&mut self, mut start: u64, mut size: u64) -> (u64, u64) {
        if let Some((&before, &length)) = self.by_start.range(..start).next_back()
            && before + length == start
        {
            self.remove(before, length);
            start = before;
            size += length;
        }
        if let Some(&after) = self.by_start.get(&(start + size)) {
            self.remove(start + size, after);
            size += after;
        }
        self.by_start.insert(start, size);
        self.by_size.insert((size, start));
        (start, size)
    }

    fn remove(&mut self, start: u64, size: u64) {
        self.by_start.remove(&start);
        self.by_size.remove(&(size, start));
    }

    /// The smallest range that fits, cut to size.
    fn take(&mut self, size: u64) -> Option<u64> {
        let &(found, start) = self.by_size.range((size, 0)..).next()?;
        self.remove(start, found);
        if found > size {
            self.insert(start + size, found - size);
        }
        Some(start)
    }
}

#[derive(Debug)]
struct State {
    large: Ranges,
    small: Ranges,
    /// Offset to size of everything handed out.
    live: BTreeMap<u64, u64>,
}

impl State {
    /// Whole blocks, once they are charged; what cannot be had is not charged either.
    fn charged(
        &mut self,
        size: u64,
        charge: impl FnOnce(u64) -> Result<(), u32>,
        discharge: impl FnOnce(u64),
    ) -> Result<u64, u32> {
        charge(size)?;
        let taken = self.large.take(size);
        if taken.is_none() {
            discharge(size);
        }
        taken.ok_or(2)
    }
}

/// The heap of one process on one GPU.
#[derive(Debug)]
pub struct Heap {
    fd: OwnedFd,
    mapping: Mapping,
    state: Mutex<State>,
}

impl Heap {
    /// A heap for a GPU of this size.
    pub fn new(memory_bytes: u64) -> io::Result<Heap> {
        // Twice the memory, so that fragmentation never refuses what the device allows.
        let bytes = memory_bytes.next_multiple_of(BLOCK) * 2;
        let fd = sys::memfd(c"device-memory", bytes)?;
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        let mapping = Mapping::shared(fd.as_fd(), length)?;
        let mut large = Ranges::default();
        let mut small = Ranges::default();
        small.insert(0, BLOCK);
        large.insert(BLOCK, bytes - BLOCK);
        let state = Mutex::new(State { large, small, live: BTreeMap::new() });
        Ok(Heap { fd, mapping, state })
    }

    /// The file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// First address and one past the last.
    pub fn span(&self) -> (u64, u64) {
        let start = self.mapping.address() as u64;
        (start, start + self.mapping.bytes() as u64)
    }

    /// Offset of an address in the file.
    pub fn offset(&self, address: u64) -> u64 {
        address - self.span().0
    }

    /// Hands out `bytes`; `charge` is asked for whole blocks before they are taken, and `discharge` gets
    /// back what no place was found for.
    pub fn allocate(
        &self,
        bytes: u64,
        charge: impl FnOnce(u64) -> Result<(), u32>,
        discharge: impl FnOnce(u64),
    ) -> Result<u64, u32> {
        let size = bytes.max(1).checked_next_multiple_of(ALIGN).ok_or(2_u32)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = if size >= BLOCK {
            let size = size.checked_next_multiple_of(BLOCK).ok_or(2_u32)?;
            let offset = state.charged(size, charge, discharge)?;
            state.live.insert(offset, size);
            offset
        } else {
            if let Some(offset) = state.small.take(size) {
                offset
            } else {
                let block = state.charged(BLOCK, charge, discharge)?;
                if size < BLOCK {
                    state.small.insert(block + size, BLOCK - size);
                }
                block
            }
        };
        state.live.entry(offset).or_insert(size);
        Ok(self.span().0 + offset)
    }

    /// Takes a piece back; false when it is not one.
    pub fn free(&self, address: u64, mut discharge: impl FnMut(u64)) -> bool {
        let (start, end) = self.span();
        if !(start..end).contains(&address) {
            return false;
        }
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let offset = address - start;
        let Some(size) = state.live.remove(&offset) else { return false };
        if size >= BLOCK {
            self.punch(offset, size);
            state.large.insert(offset, size);
            discharge(size);
            return true;
        }
        let (merged, length) = state.small.insert(offset, size);
        // Whole blocks that became free go back, the first one excepted.
        let first = merged.next_multiple_of(BLOCK).max(BLOCK);
        let last = (merged + length) / BLOCK * BLOCK;
        if first < last {
            state.small.remove(merged, length);
            if merged < first {
                state.small.insert(merged, first - merged);
            }
            if last < merged + length {
                state.small.insert(last, merged + length - last);
            }
            self.punch(first, last - first);
            state.large.insert(first, last - first);
            discharge(last - first);
        }
        true
    }

    /// The pages go back to the host and read as zeros.
    fn punch(&self, offset: u64, size: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: plain call on our own file; nobody owns the range any more.
        unsafe {
            libc::fallocate(self.fd.as_raw_fd(), mode, offset.cast_signed(), size.cast_signed())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn pieces_never_overlap_and_all_comes_back(
            steps in prop::collection::vec((any::<bool>(), 1_u64..6 << 20), 1..120)
        ) {
            let heap = Heap::new(256 << 20).unwrap();
            let mut charged = 0_u64;
            let mut live: BTreeMap<u64, u64> = BTreeMap::new();
            for (free, size) in steps {
                if free && let Some((&address, _)) = live.iter().next() {
                    live.remove(&address);
                    prop_assert!(heap.free(address, |b| charged -= b));
                    prop_assert!(!heap.free(address, |_| ()));
                } else {
                    let address = heap.allocate(size, |b| {
                        charged += b;
                        Ok(())
                    }, |_| ()).unwrap();
                    prop_assert_eq!(address % ALIGN, 0);
                    let before = live.range(..=address).next_back();
                    prop_assert!(before.is_none_or(|(a, s)| a + s <= address));
                    let after = live.range(address..).next();
                    prop_assert!(after.is_none_or(|(a, _)| address + size <= *a));
                    live.insert(address, size);
                }
                let held: u64 = live.values().sum();
                prop_assert!(held <= charged + BLOCK);
            }
            for address in live.keys() {
                prop_assert!(heap.free(*address, |b| charged -= b));
            }
            prop_assert_eq!(charged, 0);
        }
    }

    #[test]
    fn a_refused_charge_leaves_nothing_behind() {
        let heap = Heap::new(64 << 20).unwrap();
        assert_eq!(heap.allocate(8 << 20, |_| Err(2), |_| ()), Err(2));
        assert_eq!(heap.allocate(u64::MAX, |_| Ok(()), |_| ()), Err(2));
        assert!(heap.allocate(8 << 20, |_| Ok(()), |_| ()).is_ok());
    }

    #[test]
    fn what_no_place_is_found_for_is_not_charged() {
        let heap = Heap::new(64 << 20).unwrap();
        let charged = std::cell::Cell::new(0);
        let take = |bytes: u64| {
            let charge = |more: u64| {
                charged.set(charged.get() + more);
                Ok(())
            };
            heap.allocate(bytes, charge, |less| charged.set(charged.get() - less))
        };
        // Twice the memory, without the first block.
        assert!(take(126 << 20).is_ok());
        assert_eq!(take(4 << 20), Err(2));
        assert!(take(BLOCK - ALIGN).is_ok(), "in the first block");
        assert_eq!(take(BLOCK - ALIGN), Err(2));
        assert_eq!(charged.get(), 126 << 20);
    }
}
