//! Work in flight: how many launches the device has not finished.
//!
//! After every few launches into a stream a mark follows them: the stream writes the number of
//! launches so far into a word of host memory (`cuStreamWriteValue32`). That is one driver call per mark,
//! and none to read it. Where the driver cannot do that, the mark is an event, recorded half as often
//! because it must be asked for too. A word belongs to one thread and one stream, so it only grows.

use core::ffi::{c_uint, c_void};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

use muxflow_abi::cuda::result::{CUDA_ERROR_NOT_READY, CUDA_SUCCESS};
use muxflow_abi::cuda::{
    CU_EVENT_DISABLE_TIMING, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE,
    CU_STREAM_PER_THREAD, CUdeviceptr, CUevent, CUstream,
};

use crate::record::{self, ENTRIES, Entry, RECORDS, Record};
use crate::{capture, sys};

/// Launches between marks by words, and between marks by events.
pub(crate) const MARK: u32 = 16;
const MARK_EVENT: u32 = 32;
/// Launches between marks at most, where the bound on work in flight is large.
pub(crate) const MARK_MOST: u32 = 32;

/// How marks are made.
mod mode {
    pub(super) const UNKNOWN: u32 = 0;
    pub(super) const WORDS: u32 = 1;
    pub(super) const EVENTS: u32 = 2;
    pub(super) const NONE: u32 = 3;
}

static MODE: AtomicU32 = AtomicU32::new(mode::UNKNOWN);
/// Grows when a context goes: marks in it will never be reached.
static EPOCH: AtomicU32 = AtomicU32::new(1);
static WORDS: AtomicPtr<AtomicU32> = AtomicPtr::new(core::ptr::null_mut());
static DEVICE_WORDS: AtomicU64 = AtomicU64::new(0);

const WORDS_BYTES: usize = (RECORDS * ENTRIES * size_of::<u32>()).next_multiple_of(4096);

/// A context of this process is gone: what was in flight there is no more.
pub(crate) fn context_lost() {
    EPOCH.fetch_add(1, Ordering::AcqRel);
    MODE.store(mode::UNKNOWN, Ordering::Release);
}

/// Stands in an entry for a stream that was destroyed: no mark may be put into it any more.
const DESTROYED: usize = usize::MAX;

/// A stream is about to be destroyed. Marks that are in it are still reached and seen; what has none
/// yet (fewer than a mark's worth for each thread) goes uncounted.
pub(crate) fn stream_lost(stream: CUstream) {
    let gone = stream as usize + 1;
    for record in record::all() {
        // The fast path would count into the entry of this stream; a new one may have its handle.
        if record.stream.load(Ordering::Relaxed) == gone {
            record.stream.store(0, Ordering::Relaxed);
        }
        for entry in record.used_entries() {
            if entry.stream.load(Ordering::Relaxed) == gone {
                entry.stream.store(DESTROYED, Ordering::Relaxed);
                entry.pending.store(0, Ordering::Relaxed);
            }
        }
    }
}

/// Whether marks may be put into the stream of an entry.
pub(crate) fn takes_marks(entry: &Entry) -> bool {
    !matches!(entry.stream.load(Ordering::Relaxed), 0 | DESTROYED)
}

/// Launches between marks in the present mode.
pub(crate) fn mark_every() -> u32 {
    if MODE.load(Ordering::Relaxed) == mode::EVENTS { MARK_EVENT } else { MARK }
}

/// Finds out how marks can be made. Called where a context is current.
#[cold]
fn prepare() {
    let mut words = WORDS.load(Ordering::Acquire);
    if words.is_null() {
        words = sys::map_private(WORDS_BYTES).cast();
        WORDS.store(words, Ordering::Release);
    }
    if words.is_null() {
        MODE.store(mode::NONE, Ordering::Release);
        return;
    }
    let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    let memory = words.cast::<c_void>();
    let mut address: CUdeviceptr = 0;
    let place = &raw mut address;
    let usable = capture::relaxed(|| {
        driver!(cuMemHostRegister_v2(
            memory => *mut c_void,
            WORDS_BYTES => usize,
            flags => c_uint,
        ));
        let found = driver!(cuMemHostGetDevicePointer_v2(
            place => *mut CUdeviceptr,
            memory => *mut c_void,
            0 => c_uint,
        ));
        found == CUDA_SUCCESS
            && !crate::real::function(crate::table::index::cuStreamWriteValue32_v2).is_null()
    });
    DEVICE_WORDS.store(address, Ordering::Relaxed);
    MODE.store(if usable { mode::WORDS } else { mode::EVENTS }, Ordering::Release);
}

fn word(record: &Record, entry: usize) -> Option<&'static AtomicU32> {
    let words = WORDS.load(Ordering::Acquire);
    if words.is_null() {
        return None;
    }
    // SAFETY: within the mapped words; never unmapped.
    Some(unsafe { &*words.add(record::index_of(record) * ENTRIES + entry) })
}

/// The entry of a stream in a thread's record: known, free, or idle and so free to take. When all
/// are busy, the launches go uncounted into the last one looked at.
pub(crate) fn entry_of(record: &Record, stream: usize) -> usize {
    let epoch = EPOCH.load(Ordering::Acquire);
    if record.epoch.load(Ordering::Relaxed) != epoch {
        record.epoch.store(epoch, Ordering::Relaxed);
        for (index, entry) in record.entries.iter().enumerate() {
            entry.stream.store(0, Ordering::Relaxed);
            entry.pending.store(0, Ordering::Relaxed);
            entry.event.store(0, Ordering::Relaxed);
            let word = word(record, index).map_or(0, |word| word.load(Ordering::Relaxed));
            entry.marked.store(word, Ordering::Relaxed);
        }
    }
    let wanted = stream + 1;
    let known = |entry: &Entry| entry.stream.load(Ordering::Relaxed) == wanted;
    if let Some(index) = record.entries.iter().position(known) {
        return index;
    }
    let free = record.entries.iter().position(|entry| entry.stream.load(Ordering::Relaxed) == 0);
    let index = free
        .or_else(|| (0..ENTRIES).find(|&index| is_idle(record, index)))
        .unwrap_or(stream / 64 % ENTRIES);
    record.entries[index].stream.store(wanted, Ordering::Relaxed);
    record.used.fetch_max(index + 1, Ordering::Relaxed);
    index
}

fn is_idle(record: &Record, index: usize) -> bool {
    record.entries[index].pending.load(Ordering::Relaxed) == 0 && outstanding(record, index) == 0
}

/// Launches of an entry that are marked and not finished.
fn outstanding(record: &Record, index: usize) -> u64 {
    let done = word(record, index).map_or(0, |word| word.load(Ordering::Acquire));
    let marked = record.entries[index].marked.load(Ordering::Relaxed).wrapping_sub(done);
    // A word ahead of its mark is of an older owner of the entry: nothing is outstanding.
    if marked > u32::MAX / 2 { 0 } else { marked.into() }
}

/// Launches in flight in the whole process, as far as they are marked. What other threads have
/// not marked yet (fewer than a mark's worth for each stream) is not known to be in flight.
pub(crate) fn total() -> u64 {
    let epoch = EPOCH.load(Ordering::Relaxed);
    let living = record::all().iter().filter(|record| {
        record.tid.load(Ordering::Relaxed) != 0 && record.epoch.load(Ordering::Relaxed) == epoch
    });
    living
        .flat_map(|record| (0..record.used_entries().len()).map(move |index| (record, index)))
        .filter(|(record, index)| record.entries[*index].stream.load(Ordering::Relaxed) != 0)
        .map(|(record, index)| outstanding(record, index))
        .sum()
}

/// Launches of other threads in flight, as far as they are marked.
pub(crate) fn elsewhere(record: &Record) -> u64 {
    let own: u64 = (0..record.used_entries().len()).map(|index| outstanding(record, index)).sum();
    total().saturating_sub(own)
}

/// Launches of this thread that were seen to end, wrapping.
pub(crate) fn done(record: &Record) -> u32 {
    let words = (0..record.used_entries().len()).filter_map(|index| word(record, index));
    words.fold(0, |sum, word| sum.wrapping_add(word.load(Ordering::Acquire)))
}

/// Launches of this thread that have no mark behind them yet.
pub(crate) fn unmarked(record: &Record) -> u64 {
    record.used_entries().iter().map(|entry| u64::from(entry.pending.load(Ordering::Relaxed))).sum()
}

/// Marks everything that this thread has launched, so that its end can be seen. During a capture only
/// what is in the stream into which it launches just now: a mark in one that captures would become a node
/// of the program's graph, and one in the default stream would break a capture in another stream.
pub(crate) fn mark_all(record: &Record, current: usize) {
    let captures = capture::any();
    for (index, entry) in record.used_entries().iter().enumerate() {
        let may = takes_marks(entry) && (index == current || !captures);
        if may && entry.pending.load(Ordering::Relaxed) > 0 {
            mark(record, index);
        }
    }
}

/// Waits for all streams that have a handle and do not capture, then for all marks in the others, so
/// long at most. What has no mark yet in a default stream is not waited for.
pub(crate) fn synchronise_streams(limit_ns: u64) {
    let until_ns = sys::now_ns().saturating_add(limit_ns);
    for entry in record::all().iter().flat_map(|record| record.used_entries()) {
        let stream = entry.stream.load(Ordering::Relaxed).wrapping_sub(1);
        let has_handle = takes_marks(entry) && stream > CU_STREAM_PER_THREAD;
        if has_handle && !capture::is_capturing(stream as CUstream) {
            let stream = stream as CUstream;
            capture::relaxed(|| driver!(cuStreamSynchronize(stream => CUstream)));
        }
    }
    loop {
        record::all().iter().for_each(poll);
        if total() == 0 || sys::now_ns() >= until_ns {
            return;
        }
        sys::sleep_ns(500_000);
    }
}

/// Puts a mark behind what this thread has launched into a stream.
pub(crate) fn mark(record: &Record, index: usize) {
    let entry = &record.entries[index];
    let stream = (entry.stream.load(Ordering::Relaxed) - 1) as CUstream;
    let pending = entry.pending.load(Ordering::Relaxed);
    if MODE.load(Ordering::Acquire) == mode::UNKNOWN {
        prepare();
    }
    let reached = entry.marked.load(Ordering::Relaxed).wrapping_add(pending);
    match MODE.load(Ordering::Acquire) {
        mode::WORDS => {
            let offset = (record::index_of(record) * ENTRIES + index) * size_of::<u32>();
            let address = DEVICE_WORDS.load(Ordering::Relaxed) + offset as u64;
            let written = driver!(cuStreamWriteValue32_v2(
                stream => CUstream,
                address => CUdeviceptr,
                reached => u32,
                0 => c_uint,
            ));
            if written == CUDA_SUCCESS {
                entry.marked.store(reached, Ordering::Relaxed);
                entry.pending.store(0, Ordering::Relaxed);
            } else {
                MODE.store(mode::EVENTS, Ordering::Release);
            }
        }
        mode::EVENTS => mark_by_event(entry, stream, reached),
        _ => entry.pending.store(0, Ordering::Relaxed),
    }
}

fn mark_by_event(entry: &Entry, stream: CUstream, reached: u32) {
    let mut event = entry.event.load(Ordering::Relaxed) as CUevent;
    if event.is_null() {
        let place = &raw mut event;
        let made = capture::relaxed(
            || driver!(cuEventCreate(place => *mut CUevent, CU_EVENT_DISABLE_TIMING => c_uint)),
        );
        if made != CUDA_SUCCESS {
            MODE.store(mode::NONE, Ordering::Release);
            return;
        }
        entry.event.store(event as usize, Ordering::Relaxed);
    }
    if driver!(cuEventRecord(event => CUevent, stream => CUstream)) == CUDA_SUCCESS {
        entry.marked.store(reached, Ordering::Relaxed);
        entry.pending.store(0, Ordering::Relaxed);
    }
}

/// Looks whether marks by events were reached. Marks by words need no looking.
pub(crate) fn poll(record: &Record) {
    if MODE.load(Ordering::Relaxed) != mode::EVENTS {
        return;
    }
    for (index, entry) in record.used_entries().iter().enumerate() {
        let event = entry.event.load(Ordering::Relaxed) as CUevent;
        let Some(word) = word(record, index) else { return };
        let marked = entry.marked.load(Ordering::Relaxed);
        if event.is_null() || word.load(Ordering::Relaxed) == marked {
            continue;
        }
        let ask = || driver!(cuEventQuery(event => CUevent));
        let answer = if capture::any() { capture::relaxed(ask) } else { ask() };
        if answer != CUDA_ERROR_NOT_READY {
            word.store(marked, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_put_into_a_stream_that_was_destroyed() {
        let record = record::claim().expect("a record");
        let stream = 0x1000_usize;
        let index = entry_of(record, stream);
        let entry = &record.entries[index];
        entry.pending.store(3, Ordering::Relaxed);
        record.stream.store(stream + 1, Ordering::Relaxed);
        assert_eq!(unmarked(record), 3);

        stream_lost(stream as CUstream);
        assert_eq!(unmarked(record), 0);
        assert!(!takes_marks(entry));
        assert_eq!(record.stream.load(Ordering::Relaxed), 0, "the fast path is off");

        // A mark is on its way: a new stream of the same handle gets an entry of its own.
        entry.marked.store(entry.marked.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        WORDS.store(sys::map_private(WORDS_BYTES).cast(), Ordering::Release);
        assert_ne!(entry_of(record, stream), index);
    }
}
