//! Charging: every way to take device memory comes here before the driver is asked, and every way
//! to give it back comes here after.

use core::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use muxflow_abi::control::DEVICES;
use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
use muxflow_abi::cuda::{CUresult, CUuuid};

use crate::map::Map;
use crate::process::InHand;
use crate::{graph, notes, pool, process, sys};

/// What a handle in [`HELD`] is: kept in the key's top byte, so that handles and addresses of
/// different kinds cannot meet.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Memory = 1,
    Array = 2,
    External = 3,
    Ipc = 4,
    Module = 5,
    /// Physical memory: bytes.
    Physical = 6,
    /// Physical memory: how many handles and mappings keep it.
    PhysicalUses = 7,
    /// An address range: the physical memory behind it.
    Mapping = 8,
    /// An address range: its length.
    MappingBytes = 9,
    /// An address from a pool: which.
    PoolOf = 10,
    /// An address from a pool: its length.
    PoolBytes = 11,
    Graph = 12,
    GraphExec = 13,
    /// A graph that can be launched: its kernels.
    GraphCost = 14,
    Context = 15,
    /// A device, plus one: what its executable graphs hold.
    GraphLive = 16,
    /// A device, plus one: what the driver keeps of graphs that are gone.
    GraphKept = 17,
    /// A graph: what each executable made of it will hold. No charge of its own.
    GraphPlan = 18,
    /// A context that the program made: how often it is attached.
    ContextUses = 19,
    /// A green context: its device, plus one.
    Green = 20,
    /// A device and a limit of its contexts: the memory that it set aside.
    Limit = 21,
}

/// Everything that this process holds, but for the plain memory in [`notes`].
pub(crate) static HELD: Map = Map::new();
/// Freed memory that a process may keep in hand, to allocate again without a locked instruction.
const HAND_BYTES: u64 = 1 << 20;

/// The driver hands out memory in pieces of this size at least.
const GRAIN: u64 = 512;
/// Times that two who met at the edge of the quota try again.
const TRIES: u32 = 4;

/// A key of [`HELD`].
pub(crate) const fn key(kind: Kind, handle: u64) -> u64 {
    ((kind as u64) << 56) | (handle & 0x00ff_ffff_ffff_ffff)
}

/// Charges what a call is about to take.
///
/// # Errors
/// `CUDA_ERROR_OUT_OF_MEMORY`, never anything else: over quota, or no control block to allow it.
#[inline]
pub(crate) fn charge(device: usize, bytes: u64) -> Result<u64, CUresult> {
    charge_from(process::in_hand(), device, bytes)
}

#[inline(always)]
fn charge_from(mine: Option<InHand>, device: usize, bytes: u64) -> Result<u64, CUresult> {
    let bytes = round(bytes);
    if let Some(mine) = mine
        && mine.hand.take(device, bytes)
    {
        return Ok(bytes);
    }
    charge_anew(device, bytes)
}

/// Nothing in hand: asks the job's counters.
#[cold]
#[inline(never)]
fn charge_anew(device: usize, bytes: u64) -> Result<u64, CUresult> {
    let Some(control) = process::control() else { return Err(CUDA_ERROR_OUT_OF_MEMORY) };
    process::want_hand();
    let quota = control.agent.quota_bytes(device);
    if control.job.charge(device, control.slot, bytes, quota) {
        return Ok(bytes);
    }
    if retry(device, bytes) {
        return Ok(bytes);
    }
    count_refusal();
    Err(CUDA_ERROR_OUT_OF_MEMORY)
}

/// Over quota at first sight: look again after giving back what the dead and idle pools hold.
#[cold]
fn retry(device: usize, bytes: u64) -> bool {
    let Some(control) = process::control() else { return false };
    let quota = control.agent.quota_bytes(device);
    if bytes > quota {
        return false;
    }
    process::reclaim_dead(control.job);
    pool::refresh_all();
    graph::trim(device);
    control.job.recall(device, sys::barrier_everywhere, || sys::sleep_ns(50_000));
    for attempt in 0..TRIES {
        if control.job.charge(device, control.slot, bytes, quota) {
            return true;
        }
        // Only worth a pause when another process may just be stepping back.
        if control.job.charged_bytes(device).saturating_add(bytes) > quota {
            return false;
        }
        sys::sleep_ns(u64::from(attempt + 1) * 20_000 + u64::from(sys::tid() % 16) * 5_000);
    }
    false
}

/// Charges what the driver has taken already.
pub(crate) fn charge_always(device: usize, bytes: u64) {
    if let Some(control) = process::control() {
        control.job.charge_always(device, control.slot, bytes);
    }
}

/// Whether the job holds more than it may: something took more than it said.
pub(crate) fn is_over(device: usize) -> bool {
    process::control()
        .is_none_or(|control| control.job.charged_bytes(device) > control.agent.quota_bytes(device))
}

/// Notes a refusal in the statistics.
pub(crate) fn count_refusal() {
    if let Some(mine) = process::control().and_then(|control| control.mine()) {
        mine.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Gives back what was charged.
#[inline]
pub(crate) fn uncharge(device: usize, bytes: u64) {
    uncharge_to(process::in_hand(), device, bytes);
}

#[inline(always)]
fn uncharge_to(mine: Option<InHand>, device: usize, bytes: u64) {
    if let Some(mine) = mine
        && mine.hand.give(device, bytes, HAND_BYTES)
    {
        return;
    }
    uncharge_at_once(device, bytes);
}

#[cold]
#[inline(never)]
fn uncharge_at_once(device: usize, bytes: u64) {
    if let Some(control) = process::control() {
        control.job.uncharge(device, control.slot, bytes);
    }
}

/// Notes that a handle holds charged bytes.
pub(crate) fn hold(kind: Kind, handle: u64, device: usize, bytes: u64) {
    hold_from(process::in_hand(), kind, handle, device, bytes);
}

#[inline(always)]
fn hold_from(mine: Option<InHand>, kind: Kind, handle: u64, device: usize, bytes: u64) {
    if kind == Kind::Memory && notes::put(mine, handle, device, bytes) {
        return;
    }
    HELD.insert(key(kind, handle), pack(device, bytes));
}

/// Whether a handle holds anything.
pub(crate) fn holds(kind: Kind, handle: u64) -> bool {
    device_of(kind, handle).is_some()
}

/// Gives back what a handle held.
pub(crate) fn let_go(kind: Kind, handle: u64) {
    if let Some((device, bytes)) = take_note(process::in_hand(), kind, handle) {
        uncharge(device, bytes);
    }
}

#[inline(always)]
fn take_note(mine: Option<InHand>, kind: Kind, handle: u64) -> Option<(usize, u64)> {
    if kind == Kind::Memory
        && let Some(noted) = notes::take(mine, handle)
    {
        return Some(noted);
    }
    HELD.remove(key(kind, handle)).map(unpack)
}

/// The driver kept what it was to free: so do we.
#[cold]
fn put_back(kind: Kind, handle: u64, device: usize, bytes: u64) {
    if kind != Kind::Memory || !notes::put_back(handle, device, bytes) {
        HELD.insert(key(kind, handle), pack(device, bytes));
    }
}

/// Charges, calls the driver, and keeps or undoes the charge. `handle` is read after success.
#[inline]
pub(crate) fn allocate(
    kind: Kind,
    device: usize,
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    handle: impl FnOnce() -> u64,
) -> CUresult {
    let mine = process::in_hand();
    let bytes = match charge_from(mine, device, bytes) {
        Ok(bytes) => bytes,
        Err(refused) => return refused,
    };
    let result = call();
    if result == CUDA_SUCCESS {
        hold_from(mine, kind, handle(), device, bytes);
    } else {
        uncharge(device, bytes);
    }
    result
}

/// Takes the note of a handle out, calls the driver, and gives the charge back or restores the
/// note. In this order, because the driver may give the same address to another thread at once.
#[inline]
pub(crate) fn free(kind: Kind, handle: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    free_or(kind, handle, call, &mut false)
}

/// As [`free`]; says in `held` whether there was a note.
#[inline]
pub(crate) fn free_or(
    kind: Kind,
    handle: u64,
    call: impl FnOnce() -> CUresult,
    held: &mut bool,
) -> CUresult {
    let mine = process::in_hand();
    let note = take_note(mine, kind, handle);
    let result = call();
    if let Some((device, bytes)) = note {
        *held = true;
        if result == CUDA_SUCCESS {
            uncharge_to(mine, device, bytes);
        } else {
            put_back(kind, handle, device, bytes);
        }
    }
    result
}

/// Gives back everything of some kinds that lies on a device: its context is gone.
pub(crate) fn forget_device(device: usize) {
    notes::drain(device, |bytes| uncharge(device, bytes));
    HELD.drain(
        |key, value| {
            let kind = key >> 56;
            let in_context = [
                Kind::Memory,
                Kind::Array,
                Kind::External,
                Kind::Ipc,
                Kind::Module,
                Kind::GraphKept,
                Kind::Limit,
            ]
            .iter()
            .any(|&of| of as u64 == kind);
            in_context && unpack(value).0 == device
        },
        |_, value| {
            let (device, bytes) = unpack(value);
            uncharge(device, bytes);
        },
    );
}

pub(crate) const fn round(bytes: u64) -> u64 {
    bytes.saturating_add(GRAIN - 1) & !(GRAIN - 1)
}

pub(crate) const fn pack(device: usize, bytes: u64) -> u64 {
    ((device as u64) << 56) | (bytes & 0x00ff_ffff_ffff_ffff)
}

pub(crate) const fn unpack(value: u64) -> (usize, u64) {
    ((value >> 56) as usize, value & 0x00ff_ffff_ffff_ffff)
}

/// Place in the control block of each device of this process, plus one.
static PLACES: [AtomicU32; DEVICES] = [const { AtomicU32::new(0) }; DEVICES];
/// Number of devices that the driver shows; zero: not asked yet.
static COUNT: AtomicI32 = AtomicI32::new(0);

/// Place in the control block of the device that is current in this thread.
#[inline]
pub(crate) fn current_device() -> usize {
    let mut device = 0;
    if COUNT.load(Ordering::Relaxed) != 1 && several_devices() {
        driver!(cuCtxGetDevice(&raw mut device => *mut i32));
    }
    place(device)
}

#[cold]
fn several_devices() -> bool {
    if COUNT.load(Ordering::Relaxed) == 0 {
        let mut count = 0;
        if driver!(cuDeviceGetCount(&raw mut count => *mut i32)) == CUDA_SUCCESS {
            COUNT.store(count, Ordering::Relaxed);
        }
    }
    COUNT.load(Ordering::Relaxed) != 1
}

/// Place in the control block of a device of this process: by identity where the agent named
/// devices, else by ordinal. A device that the job was not given has a place with no quota.
#[inline]
pub(crate) fn place(device: i32) -> usize {
    let Ok(ordinal) = usize::try_from(device) else { return DEVICES };
    let Some(known) = PLACES.get(ordinal) else { return DEVICES };
    match known.load(Ordering::Relaxed) {
        0 => find_place(device, ordinal),
        place => place as usize - 1,
    }
}

/// The device of this process that has a place in the control block; nothing before it was used.
pub(crate) fn ordinal(place: usize) -> Option<i32> {
    let here = |known: &AtomicU32| known.load(Ordering::Relaxed) as usize == place + 1;
    PLACES.iter().position(here).and_then(|at| i32::try_from(at).ok())
}

#[cold]
fn find_place(device: i32, ordinal: usize) -> usize {
    let settings = process::settings();
    let place = if settings.devices.iter().all(|uuid| *uuid == [0; 16]) {
        ordinal
    } else {
        let mut uuid = CUuuid::default();
        let asked = driver!(cuDeviceGetUuid_v2(&raw mut uuid => *mut CUuuid, device => i32));
        if asked != CUDA_SUCCESS {
            driver!(cuDeviceGetUuid(&raw mut uuid => *mut CUuuid, device => i32));
        }
        settings.devices.iter().position(|known| *known == uuid.bytes).unwrap_or(DEVICES)
    };
    if process::agent().is_some() {
        PLACES[ordinal].store(u32::try_from(place).unwrap_or(0) + 1, Ordering::Relaxed);
    }
    place
}

/// The device on which a handle holds something.
pub(crate) fn device_of(kind: Kind, handle: u64) -> Option<usize> {
    if kind == Kind::Memory
        && let Some((device, _)) = notes::get(handle)
    {
        return Some(device);
    }
    HELD.get(key(kind, handle)).map(|value| unpack(value).0)
}
