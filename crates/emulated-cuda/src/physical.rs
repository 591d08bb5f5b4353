//! Physical memory without an address, and addresses without memory: `cuMemCreate` and `cuMemMap`.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
use muxflow_emulated_gpu::sys;

use crate::context::lock;
use crate::driver::{self, Device};
use crate::ffi::Answer;
use crate::memory;

/// Memory that `cuMemCreate` made or that was imported.
#[derive(Debug)]
pub(crate) struct Physical {
    pub device: &'static Device,
    pub file: OwnedFd,
    pub bytes: u64,
    pub handle_types: i32,
    /// Whether this process was charged for it.
    charged: bool,
    /// Handles and mappings that hold it.
    holds: AtomicUsize,
}

static ALL: Mutex<BTreeMap<u64, Arc<Physical>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(1);
/// Reserved ranges by address, and their bytes.
static RESERVED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());
/// Mapped ranges by address: bytes and what is mapped.
static MAPPED: Mutex<BTreeMap<u64, (u64, u64)>> = Mutex::new(BTreeMap::new());

/// What memory comes in.
pub(crate) const GRANULARITY: u64 = 2 << 20;

pub(crate) fn create(device: i32, bytes: u64, handle_types: i32) -> Answer<u64> {
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let device = driver::device(device)?;
    let gpu = device.gpu()?;
    gpu.charge(bytes)?;
    let file = sys::memfd(c"device-memory", bytes).map_err(|_| {
        gpu.discharge(bytes);
        CUDA_ERROR_OUT_OF_MEMORY
    })?;
    Ok(enter(device, file, bytes, handle_types, true))
}

fn enter(
    device: &'static Device,
    file: OwnedFd,
    bytes: u64,
    handle_types: i32,
    charged: bool,
) -> u64 {
    let number = NEXT.fetch_add(1, Ordering::Relaxed) << 12 | 0xe;
    let holds = AtomicUsize::new(1);
    let made = Physical { device, file, bytes, handle_types, charged, holds };
    lock(&ALL).insert(number, Arc::new(made));
    number
}

pub(crate) fn find(number: u64) -> Answer<Arc<Physical>> {
    lock(&ALL).get(&number).cloned().ok_or(CUDA_ERROR_INVALID_VALUE)
}

/// One hold less; the last gives the memory back. Its pages stay as long as another process has them.
pub(crate) fn release(number: u64) -> Answer {
    let it = find(number)?;
    if it.holds.fetch_sub(1, Ordering::AcqRel) == 1 {
        lock(&ALL).remove(&number);
        if it.charged {
            it.device.gpu()?.discharge(it.bytes);
        }
    }
    Ok(())
}

/// A copy of the file descriptor, for another process.
pub(crate) fn export(number: u64) -> Answer<i32> {
    let it = find(number)?;
    // SAFETY: duplicates our own descriptor; the copy is the caller's.
    let copy = unsafe { libc::fcntl(it.file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 { Err(CUDA_ERROR_OUT_OF_MEMORY) } else { Ok(copy) }
}

/// Memory that another process exported.
pub(crate) fn import(device: &'static Device, descriptor: i32) -> Answer<u64> {
    // SAFETY: duplicates a descriptor that the caller says is one; errors are seen below.
    let copy = unsafe { libc::fcntl(descriptor, libc::F_DUPFD_CLOEXEC, 3) };
    if copy < 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the copy is ours alone.
    let file: OwnedFd = unsafe { std::os::fd::FromRawFd::from_raw_fd(copy) };
    // SAFETY: all-zero is a valid place for the answer.
    let mut status: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: our own descriptor and a valid place.
    if unsafe { libc::fstat(file.as_raw_fd(), &raw mut status) } != 0 || status.st_size <= 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    Ok(enter(device, file, status.st_size.cast_unsigned(), 1, false))
}

/// Addresses without memory.
pub(crate) fn reserve(bytes: usize, align: usize) -> Answer<u64> {
    let align = align.max(GRANULARITY as usize);
    if bytes == 0 || !align.is_power_of_two() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let room = bytes.checked_add(align).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a fresh mapping at an address of the kernel's choice disturbs nothing.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), room, libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let start = (at as usize).next_multiple_of(align);
    let (head, tail) = (start - at as usize, room - (start - at as usize) - bytes);
    // SAFETY: cuts off the ends of the mapping that was just made.
    unsafe {
        if head > 0 {
            libc::munmap(at, head);
        }
        if tail > 0 {
            libc::munmap((start + bytes) as *mut libc::c_void, tail);
        }
    }
    lock(&RESERVED).insert(start as u64, bytes as u64);
    Ok(start as u64)
}

pub(crate) fn unreserve(address: u64, bytes: usize) -> Answer {
    // In the order of `map`.
    let mapped = lock(&MAPPED);
    let mut reserved = lock(&RESERVED);
    let whole = reserved.get(&address) == Some(&(bytes as u64));
    if !whole || mapped.range(address..address + bytes as u64).next().is_some() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    reserved.remove(&address);
    // SAFETY: exactly what `reserve` made, and nothing is mapped there.
    unsafe { libc::munmap(address as *mut libc::c_void, bytes) };
    Ok(())
}

/// Whether memory may be put at these addresses: reserved in one piece, and nothing there yet.
fn is_free(address: u64, bytes: u64, mapped: &BTreeMap<u64, (u64, u64)>) -> bool {
    let Some(end) = address.checked_add(bytes) else { return false };
    let reserved = lock(&RESERVED);
    let around = reserved.range(..=address).next_back();
    let last = mapped.range(..end).next_back();
    around.is_some_and(|(at, size)| end <= at + size)
        && last.is_none_or(|(at, (size, _))| at + size <= address)
}

/// Puts memory at reserved addresses.
pub(crate) fn map(address: u64, bytes: usize, offset: usize, number: u64) -> Answer {
    let it = find(number)?;
    let fits = offset.checked_add(bytes).is_some_and(|end| end as u64 <= it.bytes);
    let mut mapped = lock(&MAPPED);
    let free = is_free(address, bytes as u64, &mapped);
    if bytes == 0 || !fits || !free || !address.is_multiple_of(GRANULARITY) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let context = crate::context::current()
        .or_else(|_| it.device.primary.retain(it.device).and_then(crate::ffi::Handle::get))?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_FIXED;
    // SAFETY: addresses of `reserve`, where nothing is mapped.
    let at = unsafe {
        libc::mmap(
            address as *mut libc::c_void,
            bytes,
            protection,
            flags,
            it.file.as_raw_fd(),
            offset as libc::off_t,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    it.holds.fetch_add(1, Ordering::AcqRel);
    mapped.insert(address, (bytes as u64, number));
    drop(mapped);
    let handle = crate::context::current_handle();
    memory::insert(context, handle, address, bytes as u64, memory::Nature::Mapped, 0);
    Ok(())
}

/// Takes memory away from addresses, which stay reserved.
pub(crate) fn unmap(address: u64, bytes: usize) -> Answer {
    let end = address.checked_add(bytes as u64).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let found: Vec<(u64, (u64, u64))> =
        lock(&MAPPED).range(address..end).map(|(a, m)| (*a, *m)).collect();
    if found.is_empty() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    for (at, (size, number)) in found {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        // SAFETY: replaces a mapping that `map` made.
        unsafe {
            libc::mmap(at as *mut libc::c_void, size as usize, libc::PROT_NONE, flags, -1, 0)
        };
        lock(&MAPPED).remove(&at);
        drop(memory::remove(at, |_| true));
        release(number)?;
    }
    Ok(())
}

/// The memory mapped at an address, held once more.
pub(crate) fn retain_at(address: u64) -> Answer<u64> {
    let mapped = lock(&MAPPED);
    let (at, (size, number)) =
        mapped.range(..=address).next_back().ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if address >= at + size {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    find(*number)?.holds.fetch_add(1, Ordering::AcqRel);
    Ok(*number)
}
