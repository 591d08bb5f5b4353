//! One record per launching thread, found through thread-local storage: how many launches it may
//! still make before it must look up, and what it has put into which stream.
//!
//! Only the thread itself writes its record, so a launch needs no locked instruction. Others read it for
//! sums. The pages are wiped by fork.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::sys;

/// Threads that may launch at one time with a record of their own.
pub(crate) const RECORDS: usize = 128;
/// Streams that one thread is followed in.
pub(crate) const ENTRIES: usize = 16;

/// What a thread has put into one stream.
#[repr(C)]
pub(crate) struct Entry {
    /// The stream, plus one; zero: unused.
    pub(crate) stream: AtomicUsize,
    /// Launches since the last mark.
    pub(crate) pending: AtomicU32,
    /// Launches up to the last mark, wrapping.
    pub(crate) marked: AtomicU32,
    /// The event that marks, where marks are events.
    pub(crate) event: AtomicUsize,
}

/// A thread's record.
#[repr(C, align(64))]
pub(crate) struct Record {
    /// Launches left before the slow path.
    pub(crate) left: AtomicI64,
    /// The stream of the current entry, plus one.
    pub(crate) stream: AtomicUsize,
    /// Where the process counts launches by kernel.
    pub(crate) rhythm: AtomicPtr<AtomicU32>,
    /// What `left` was when it was last set.
    pub(crate) granted: AtomicI64,
    /// Launches paid for with the rate limit, beyond `left`.
    pub(crate) credit: AtomicI64,
    /// Launches counted, without those since `granted` was set.
    pub(crate) launched: AtomicU64,
    /// When a mark was last seen to be reached, zero when the pipe was empty since, and how many
    /// launches had ended then.
    pub(crate) seen_ns: AtomicU64,
    pub(crate) seen_done: AtomicU32,
    /// Launches made when this thread last waited for the device.
    pub(crate) synchronised: AtomicU64,
    /// The context generation that the entries are of.
    pub(crate) epoch: AtomicU32,
    /// The thread; zero: free.
    pub(crate) tid: AtomicU32,
    /// Index of the current entry.
    pub(crate) current: AtomicUsize,
    /// One past the highest entry that was ever used.
    pub(crate) used: AtomicUsize,
    pub(crate) entries: [Entry; ENTRIES],
}

impl Record {
    /// The entries that were ever used.
    pub(crate) fn used_entries(&self) -> &[Entry] {
        &self.entries[..self.used.load(Ordering::Relaxed).min(ENTRIES)]
    }

    /// Launches made by this thread so far.
    pub(crate) fn total(&self) -> u64 {
        let unflushed = self.granted.load(Ordering::Relaxed) - self.left.load(Ordering::Relaxed);
        self.launched.load(Ordering::Relaxed).wrapping_add(unflushed.max(0).cast_unsigned())
    }
}

static BASE: AtomicPtr<Record> = AtomicPtr::new(core::ptr::null_mut());
/// One past the highest record that was ever used.
static USED: AtomicUsize = AtomicUsize::new(0);
/// Launches of threads whose record was taken over.
static RETIRED: AtomicU64 = AtomicU64::new(0);

// Initial-exec thread-local storage: one load through the global offset table and no call.
global_asm!(
    ".pushsection .tbss,\"awT\",@nobits",
    ".globl xcuda_record",
    ".hidden xcuda_record",
    ".type xcuda_record, @object",
    ".size xcuda_record, 8",
    ".p2align 3",
    "xcuda_record:",
    ".zero 8",
    ".popsection",
);

/// This thread's record; null before it has one.
#[inline(always)]
pub(crate) fn mine() -> *const Record {
    let record: *const Record;
    // SAFETY: reads this thread's word of the variable defined above.
    unsafe {
        asm!(
            "mov {record}, qword ptr [rip + xcuda_record@GOTTPOFF]",
            "mov {record}, qword ptr fs:[{record}]",
            record = out(reg) record,
            options(nostack, readonly, preserves_flags),
        );
    }
    record
}

fn set_mine(record: *const Record) {
    // SAFETY: writes this thread's word of the variable defined above.
    unsafe {
        asm!(
            "mov {place}, qword ptr [rip + xcuda_record@GOTTPOFF]",
            "mov qword ptr fs:[{place}], {record}",
            place = out(reg) _,
            record = in(reg) record,
            options(nostack, preserves_flags),
        );
    }
}

/// All records that were ever used.
pub(crate) fn all() -> &'static [Record] {
    let records = slots();
    &records[..USED.load(Ordering::Acquire).min(records.len())]
}

fn slots() -> &'static [Record] {
    let base = BASE.load(Ordering::Acquire);
    if base.is_null() {
        return &[];
    }
    // SAFETY: RECORDS records were mapped, zeroed, for good.
    unsafe { core::slice::from_raw_parts(base, RECORDS) }
}

/// Launches of all threads of this process.
pub(crate) fn launches() -> u64 {
    let living = all().iter().filter(|record| record.tid.load(Ordering::Relaxed) != 0);
    living.fold(RETIRED.load(Ordering::Relaxed), |sum, record| sum.wrapping_add(record.total()))
}

/// This thread's record, made if need be; nothing when too many threads launch.
pub(crate) fn claim() -> Option<&'static Record> {
    // SAFETY: null or a record of `all`. One that fork has wiped has no thread.
    if let Some(record) = unsafe { mine().as_ref() }
        && record.tid.load(Ordering::Relaxed) != 0
    {
        return Some(record);
    }
    let tid = sys::tid();
    if BASE.load(Ordering::Acquire).is_null() {
        let fresh = sys::map_wiped_on_fork(RECORDS * size_of::<Record>()).cast::<Record>();
        if fresh.is_null() {
            return None;
        }
        let empty = core::ptr::null_mut();
        // If another thread was first, ours is never touched and costs no memory.
        let _first = BASE.compare_exchange(empty, fresh, Ordering::AcqRel, Ordering::Acquire);
    }
    let index = slots().iter().position(|record| take(record, tid))?;
    USED.fetch_max(index + 1, Ordering::AcqRel);
    let record = &slots()[index];
    set_mine(record);
    Some(record)
}

/// Takes a free record, or one of a thread that is gone.
fn take(record: &Record, tid: u32) -> bool {
    let owner = record.tid.load(Ordering::Relaxed);
    if owner != 0 && owner != tid && is_alive(owner) {
        return false;
    }
    if record.tid.compare_exchange(owner, tid, Ordering::AcqRel, Ordering::Relaxed).is_err() {
        return false;
    }
    if owner != 0 {
        RETIRED.fetch_add(record.total(), Ordering::Relaxed);
    }
    record.left.store(0, Ordering::Relaxed);
    record.granted.store(0, Ordering::Relaxed);
    record.credit.store(0, Ordering::Relaxed);
    record.launched.store(0, Ordering::Relaxed);
    record.stream.store(0, Ordering::Relaxed);
    record.seen_ns.store(0, Ordering::Relaxed);
    record.synchronised.store(0, Ordering::Relaxed);
    true
}

fn is_alive(tid: u32) -> bool {
    let pid = sys::pid() as usize;
    // SAFETY: signal 0 only asks.
    let answer = unsafe { sys::syscall(libc::SYS_tgkill, [pid, tid as usize, 0, 0, 0, 0]) };
    answer != -(libc::ESRCH as isize)
}

/// Index of a record, for its words in [`crate::flight`].
pub(crate) fn index_of(record: &Record) -> usize {
    let base = BASE.load(Ordering::Acquire) as usize;
    (core::ptr::from_ref(record) as usize - base) / size_of::<Record>()
}
