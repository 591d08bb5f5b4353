//! Who holds which address: a table by the address itself, for plain memory.
//!
//! The driver gives an address to one allocation at a time, so each has a cell of its own and nobody
//! needs a locked instruction: an allocation writes its size, a free reads it and writes zero. A cell is
//! four bytes for 512 of device memory, mapped by the gibibyte and touched only where memory is. What
//! does not fit (odd addresses, sizes beyond 128 GiB) is left to [`crate::map`]. Tables are wiped by
//! fork: a child holds nothing. Before it stands the small [`crate::front`] of the thread that
//! allocates most.

use core::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, Ordering};

use crate::process::{self, InHand};
use crate::quota::{self, Kind};
use crate::sys;

static NOTES: Notes = Notes::new();

/// Notes that an address holds bytes of a device. `false` when that cannot be noted here.
#[inline(always)]
pub(crate) fn put(mine: Option<InHand>, address: u64, device: usize, bytes: u64) -> bool {
    let Some(value) = cell(device, bytes) else { return false };
    if place(address).is_none() {
        return false;
    }
    if let Some(mine) = mine
        && let Some(pushed_out) = mine.hand.use_alone(|| mine.front.put(address, value))
    {
        if let Some((other, value)) = pushed_out {
            keep(other, value);
        }
        return true;
    }
    NOTES.put(address, value)
}

/// Takes a note out: device and bytes.
#[inline(always)]
pub(crate) fn take(mine: Option<InHand>, address: u64) -> Option<(usize, u64)> {
    if let Some(mine) = mine
        && let Some(Some(value)) = mine.hand.use_alone(|| mine.front.take(address))
    {
        return Some(split(value));
    }
    take_far(address)
}

/// Finds a place for a note that had to leave the front.
#[inline(never)]
fn keep(address: u64, value: u32) {
    if !NOTES.put(address, value) {
        let (device, bytes) = split(value);
        quota::HELD.insert(quota::key(Kind::Memory, address), quota::pack(device, bytes));
    }
}

#[cold]
#[inline(never)]
fn take_far(address: u64) -> Option<(usize, u64)> {
    if let Some(found) = NOTES.take(address) {
        return Some(found);
    }
    let other = process::in_other_hand().or_else(process::in_hand)?;
    take_from(&other, address).map(split).or_else(|| NOTES.take(address))
}

/// Takes a note out of the front of another thread, which may be held up (by the scheduler, or by a signal)
/// just when it is at its hand. To give up would be to lose the charge for good, for the memory is about
/// to be freed; so it is called again, for as long as no thread is held up that will ever go on.
fn take_from(other: &InHand, address: u64) -> Option<u32> {
    const CALLS: u32 = 1_000;
    // Whoever handed us the address let us see that it is noted there.
    other.front.get(address)?;
    (0..CALLS).find_map(|_| called_in(other, || other.front.take(address))).flatten()
}

fn called_in<T>(other: &InHand, work: impl FnOnce() -> T) -> Option<T> {
    other.hand.call_in(sys::barrier_everywhere, || sys::sleep_ns(20_000), work)
}

/// Puts a note back that was just taken, unless the address has a new one.
#[cold]
pub(crate) fn put_back(address: u64, device: usize, bytes: u64) -> bool {
    cell(device, bytes).is_some_and(|value| NOTES.put_back(address, value))
}

/// What an address holds.
pub(crate) fn get(address: u64) -> Option<(usize, u64)> {
    let fronts = [process::in_hand(), process::in_other_hand()];
    let noted = fronts.into_iter().flatten().find_map(|mine| mine.front.get(address));
    noted.map(split).or_else(|| NOTES.get(address))
}

/// Takes out every note of a device, and shows its bytes.
pub(crate) fn drain(device: usize, mut taken: impl FnMut(u64)) {
    let mut all = |front: &crate::front::Front| {
        front.drain(|value| split(value).0 == device, |value| taken(split(value).1));
    };
    if let Some(mine) = process::in_hand() {
        all(mine.front);
    } else if let Some(other) = process::in_other_hand() {
        // Not called again and again: it may wait in a signal handler until this is done.
        called_in(&other, || all(other.front));
    }
    NOTES.drain(device, taken);
}

/// Device memory per cell, as a power of two.
const GRAIN_BITS: u32 = 9;
/// Device memory per leaf, as a power of two.
const LEAF_BITS: u32 = 30;
/// Addresses are below this power of two.
const ADDRESS_BITS: u32 = 48;
/// Bits of a cell that hold the size in grains; the rest is the device.
const SIZE_BITS: u32 = 28;
const CELLS: usize = 1 << (LEAF_BITS - GRAIN_BITS);
const LEAVES: usize = 1 << (ADDRESS_BITS - LEAF_BITS);
/// Cells that one mark of `touched` stands for: a page of them.
const PAGE: usize = 1024;
const PAGES: usize = CELLS / PAGE;
/// Pages that are mapped at once where one follows the other.
const AHEAD: usize = 32;

/// What is known of a page of cells.
mod page {
    pub(super) const NEW: u8 = 0;
    pub(super) const USED: u8 = 1;
    /// Mapped ahead, and not used.
    pub(super) const READY: u8 = 2;
}

#[repr(C, align(4096))]
struct Leaf {
    cells: [AtomicU32; CELLS],
    /// Which pages of cells were ever used, so that a search need not touch the others.
    touched: [AtomicU8; PAGES],
}

impl Leaf {
    /// Notes that a page is used. Where the page before it is used too, addresses are rising: the
    /// next pages are mapped in one go, for a fault costs more than a hundred allocations.
    #[cold]
    #[inline(never)]
    fn touch(&self, number: usize) {
        const MADV_POPULATE_WRITE: usize = 23;
        let known = self.touched[number].swap(page::USED, Ordering::Relaxed);
        let rising = number > 0 && self.touched[number - 1].load(Ordering::Relaxed) == page::USED;
        if known != page::NEW || !rising {
            return;
        }
        let ahead = &self.touched[number..PAGES.min(number + AHEAD)];
        let base = core::ptr::from_ref(&self.cells[number * PAGE]) as usize;
        // SAFETY: within the leaf's own mapping; an old kernel refuses, and each page faults then.
        unsafe {
            let bytes = ahead.len() * PAGE * size_of::<u32>();
            sys::syscall(libc::SYS_madvise, [base, bytes, MADV_POPULATE_WRITE, 0, 0, 0]);
        }
        for mark in &ahead[1..] {
            let new = page::NEW;
            let _used =
                mark.compare_exchange(new, page::READY, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// The table; `const` so that it can be a static.
struct Notes {
    directory: AtomicPtr<AtomicPtr<Leaf>>,
}

impl Notes {
    const fn new() -> Self {
        Self { directory: AtomicPtr::new(core::ptr::null_mut()) }
    }

    /// Writes a cell. `false` when there is none for the address, or no memory.
    #[inline(never)]
    fn put(&self, address: u64, value: u32) -> bool {
        let found = match self.leaf(address) {
            Some(found) => Some(found),
            None => self.make(address),
        };
        let Some((leaf, at)) = found else { return false };
        if leaf.touched[at / PAGE].load(Ordering::Relaxed) != page::USED {
            leaf.touch(at / PAGE);
        }
        leaf.cells[at].store(value, Ordering::Release);
        true
    }

    fn take(&self, address: u64) -> Option<(usize, u64)> {
        let (leaf, at) = self.leaf(address)?;
        let value = leaf.cells[at].load(Ordering::Acquire);
        if value == 0 {
            return None;
        }
        leaf.cells[at].store(0, Ordering::Release);
        Some(split(value))
    }

    fn put_back(&self, address: u64, value: u32) -> bool {
        let Some((leaf, at)) = self.leaf(address) else { return self.put(address, value) };
        let cell = &leaf.cells[at];
        cell.compare_exchange(0, value, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn get(&self, address: u64) -> Option<(usize, u64)> {
        let (leaf, at) = self.leaf(address)?;
        let value = leaf.cells[at].load(Ordering::Acquire);
        (value != 0).then(|| split(value))
    }

    fn drain(&self, device: usize, mut taken: impl FnMut(u64)) {
        let directory = self.directory.load(Ordering::Acquire);
        if directory.is_null() {
            return;
        }
        for number in 0..LEAVES {
            // SAFETY: LEAVES pointers were mapped; each is null or a leaf, for good.
            let leaf = unsafe { (*directory.add(number)).load(Ordering::Acquire).as_ref() };
            let Some(leaf) = leaf else { continue };
            for (number, cells) in leaf.cells.chunks(PAGE).enumerate() {
                if leaf.touched[number].load(Ordering::Relaxed) != page::USED {
                    continue;
                }
                for cell in cells {
                    let value = cell.load(Ordering::Acquire);
                    let mine = value != 0 && split(value).0 == device;
                    if mine
                        && cell
                            .compare_exchange(value, 0, Ordering::AcqRel, Ordering::Relaxed)
                            .is_ok()
                    {
                        taken(split(value).1);
                    }
                }
            }
        }
    }

    #[inline]
    fn leaf(&self, address: u64) -> Option<(&'static Leaf, usize)> {
        let (number, at) = place(address)?;
        let directory = self.directory.load(Ordering::Acquire);
        if directory.is_null() {
            return None;
        }
        // SAFETY: `number` is below LEAVES, and so many pointers were mapped; each is null or a leaf.
        let leaf = unsafe { (*directory.add(number)).load(Ordering::Acquire).as_ref() }?;
        Some((leaf, at))
    }

    #[cold]
    #[inline(never)]
    fn make(&self, address: u64) -> Option<(&'static Leaf, usize)> {
        let (number, _) = place(address)?;
        let empty = core::ptr::null_mut();
        let mut directory = self.directory.load(Ordering::Acquire);
        if directory.is_null() {
            let fresh: *mut AtomicPtr<Leaf> =
                sys::map_private(LEAVES * size_of::<AtomicPtr<Leaf>>()).cast();
            if fresh.is_null() {
                return None;
            }
            // If another thread was first, ours is never touched and costs no memory.
            let first = self.directory.compare_exchange(
                core::ptr::null_mut(),
                fresh,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
            directory = first.map_or_else(|other| other, |_| fresh);
        }
        let fresh = sys::map_wiped_on_fork(size_of::<Leaf>()).cast::<Leaf>();
        if fresh.is_null() {
            return None;
        }
        // SAFETY: as in `leaf`; a second leaf of a race is never touched.
        unsafe {
            let slot = &*directory.add(number);
            let _first = slot.compare_exchange(empty, fresh, Ordering::AcqRel, Ordering::Acquire);
        }
        self.leaf(address)
    }
}

/// The leaf and the cell of an address; nothing for one that has no cell of its own.
#[inline(always)]
fn place(address: u64) -> Option<(usize, usize)> {
    let odd = address & ((1 << GRAIN_BITS) - 1) != 0 || address >> ADDRESS_BITS != 0;
    if odd {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, reason = "48 bits")]
    let address = address as usize;
    Some((address >> LEAF_BITS, (address >> GRAIN_BITS) & (CELLS - 1)))
}

/// The cell of a device and a size; nothing when that does not fit.
#[inline(always)]
fn cell(device: usize, bytes: u64) -> Option<u32> {
    let grains = bytes >> GRAIN_BITS;
    let fits =
        bytes & ((1 << GRAIN_BITS) - 1) == 0 && grains.wrapping_sub(1) < (1 << SIZE_BITS) - 1;
    #[expect(clippy::cast_possible_truncation, reason = "checked")]
    let value = (device as u32) << SIZE_BITS | grains as u32;
    (fits && device < 16).then_some(value)
}

#[inline]
fn split(value: u32) -> (usize, u64) {
    let bytes = u64::from(value & ((1 << SIZE_BITS) - 1)) << GRAIN_BITS;
    ((value >> SIZE_BITS) as usize, bytes)
}

#[cfg(test)]
mod tests {
    use muxflow_abi::control::hand::Hand;

    use super::*;
    use crate::front::Front;

    #[test]
    fn notes_come_and_go() {
        let notes = Notes::new();
        let page = cell(3, 4096).unwrap();
        for at in 1..100_000_u64 {
            assert!(notes.put(at << 12, page));
        }
        assert_eq!(notes.get(5 << 12), Some((3, 4096)));
        assert_eq!(notes.take(5 << 12), Some((3, 4096)));
        assert_eq!(notes.take(5 << 12), None);
        assert!(notes.put_back(5 << 12, page));
        assert!(!notes.put_back(5 << 12, 1), "it has a note");
        assert!(notes.put(0x7fff_ffff_fe00, cell(15, (1 << 37) - 512).unwrap()));
        let (mut three, mut fifteen) = (0, 0);
        notes.drain(3, |bytes| three += bytes);
        notes.drain(15, |bytes| fifteen += bytes);
        assert_eq!((three, fifteen), (99_999 * 4096, (1 << 37) - 512));
        notes.drain(3, |_| panic!("nothing is left"));
    }

    /// A thread may be preempted at its hand for longer than a caller looks.
    #[test]
    fn a_note_is_found_also_when_its_thread_is_held_up() {
        // SAFETY: all zero is an empty hand that nobody has called in, and an empty front.
        let (hand, front): (Hand, Front) = unsafe { (core::mem::zeroed(), core::mem::zeroed()) };
        let (hand, front): (&Hand, &Front) =
            (Box::leak(Box::new(hand)), Box::leak(Box::new(front)));
        let mine = InHand { hand, front };
        hand.use_alone(|| front.put(4096, 7));
        assert!(sys::join_barriers());
        let (at_it, is_at_it) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                hand.use_alone(|| {
                    at_it.send(()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(400));
                });
            });
            is_at_it.recv().unwrap();
            assert_eq!(take_from(&mine, 4096), Some(7));
        });
        assert_eq!(take_from(&mine, 4096), None, "it is taken");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert_eq!(place(513), None, "no address of the driver's");
        assert_eq!(place(1 << 48), None);
        assert_eq!(cell(0, 513), None, "no charge is of this size");
        assert_eq!((cell(0, 0), cell(0, 1 << 37), cell(16, 512)), (None, None, None));
        assert_eq!(Notes::new().take(512), None);
    }
}
