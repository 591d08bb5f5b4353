//! Every range of memory that this process's GPUs may touch, by address.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{PoisonError, RwLock};

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY};
use muxflow_emulated_gpu::client::Gpu;
use muxflow_emulated_gpu::ptx::Memory;
use muxflow_emulated_gpu::sys::Mapping;

use crate::context::Context;
use crate::ffi::{Answer, Handle, regardless};

/// What a range is.
#[derive(Debug)]
pub(crate) enum Nature {
    /// `cuMemAlloc` and the like, from the heap of a device.
    Device,
    Managed,
    /// From a pool: its number.
    Pool(u64),
    /// Pinned host memory that we allocated, of this layout.
    Host(std::alloc::Layout),
    /// Host memory of the caller that was registered.
    Registered,
    /// Memory of another process, mapped for as long as this lives.
    Imported {
        _mapping: Mapping,
    },
    /// Mapped by `cuMemMap`.
    Mapped,
    /// Variables of a module.
    Module,
}

/// One range.
#[derive(Debug)]
pub(crate) struct Range {
    pub start: u64,
    pub bytes: u64,
    pub nature: Nature,
    pub gpu: &'static Gpu,
    pub ordinal: i32,
    pub context: Handle<Context>,
    pub context_id: u64,
    pub flags: u32,
    pub id: u64,
    pub sync_memops: bool,
}

impl Range {
    pub(crate) fn is_device(&self) -> bool {
        !matches!(self.nature, Nature::Host(_) | Nature::Registered)
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes
    }
}

static RANGES: RwLock<BTreeMap<u64, Range>> = RwLock::new(BTreeMap::new());
static NEXT_ID: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);

/// Enters a range.
pub(crate) fn insert(
    context: &'static Context,
    handle: Handle<Context>,
    start: u64,
    bytes: u64,
    nature: Nature,
    flags: u32,
) {
    let range = Range {
        start,
        bytes,
        nature,
        gpu: context.gpu,
        ordinal: context.device.ordinal,
        context: handle,
        context_id: context.id,
        flags,
        id: NEXT_ID.fetch_add(1, std::sync::atomic::Ordering::Relaxed),
        sync_memops: false,
    };
    RANGES.write().unwrap_or_else(PoisonError::into_inner).insert(start, range);
}

/// Takes the range that starts exactly here, if it is of the right kind.
pub(crate) fn remove(start: u64, fits: impl Fn(&Range) -> bool) -> Option<Range> {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    if ranges.get(&start).is_some_and(fits) { ranges.remove(&start) } else { None }
}

/// Looks at the range that holds an address.
pub(crate) fn look<T>(address: u64, see: impl FnOnce(&Range) -> T) -> Option<T> {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    let (_, range) = ranges.range(..=address).next_back()?;
    (address < range.end()).then(|| see(range))
}

/// Whether any range has something between these.
pub(crate) fn overlaps(start: u64, end: u64) -> bool {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    ranges.range(..end).next_back().is_some_and(|(_, range)| range.end() > start)
}

/// Changes the range that holds an address.
pub(crate) fn change(address: u64, how: impl FnOnce(&mut Range)) -> bool {
    let mut ranges = RANGES.write().unwrap_or_else(PoisonError::into_inner);
    let Some((_, range)) = ranges.range_mut(..=address).next_back() else { return false };
    if address >= range.end() {
        return false;
    }
    how(range);
    true
}

/// Whether an address is on a device.
pub(crate) fn is_device(address: u64) -> bool {
    look(address, Range::is_device).unwrap_or(false)
}

/// Whether an address is in memory that the program has not made known.
pub(crate) fn is_pageable(address: u64) -> bool {
    look(address, |_| ()).is_none()
}

/// That a device range holds all of this; host addresses pass, as the caller answers for them.
pub(crate) fn check(address: u64, bytes: usize) -> Answer {
    if bytes == 0 {
        return Ok(());
    }
    match look(address, |r| address.checked_add(bytes as u64).is_some_and(|e| e <= r.end())) {
        Some(true) => Ok(()),
        Some(false) if mapped_on(address, bytes as u64) => Ok(()),
        Some(false) => Err(CUDA_ERROR_INVALID_VALUE),
        None if address == 0 => Err(CUDA_ERROR_INVALID_VALUE),
        None => Ok(()),
    }
}

/// Ranges that were mapped side by side count as one.
fn mapped_on(address: u64, bytes: u64) -> bool {
    let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
    let Some(end) = address.checked_add(bytes) else { return false };
    let mut at = address;
    while at < end {
        let Some((_, range)) = ranges.range(..=at).next_back() else { return false };
        if at >= range.end() || !matches!(range.nature, Nature::Mapped) {
            return false;
        }
        at = range.end();
    }
    true
}

/// The same where only device memory will do.
pub(crate) fn check_device(address: u64, bytes: usize) -> Answer {
    check(address, bytes)?;
    if bytes == 0 || look(address, |_| ()).is_some() {
        Ok(())
    } else {
        Err(CUDA_ERROR_INVALID_VALUE)
    }
}

/// Memory of a device for the current context.
pub(crate) fn allocate(
    context: &'static Context,
    bytes: u64,
    nature: Nature,
    flags: u32,
) -> Answer<u64> {
    if bytes == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let address = context.gpu.allocate(bytes)?;
    insert(context, crate::context::current_handle(), address, bytes, nature, flags);
    Ok(address)
}

/// Frees what `allocate` gave.
pub(crate) fn free(address: u64) -> Answer {
    let owned = |r: &Range| {
        matches!(r.nature, Nature::Device | Nature::Managed | Nature::Pool(_) | Nature::Module)
    };
    let range = remove(address, owned).ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if let Nature::Pool(pool) = range.nature {
        crate::pool::freed(pool, &range);
    } else {
        range.gpu.free(address);
    }
    Ok(())
}

/// Pinned host memory.
pub(crate) fn allocate_host(context: &'static Context, bytes: usize, flags: u32) -> Answer<u64> {
    if bytes == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let layout =
        std::alloc::Layout::from_size_align(bytes, 4096).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    // SAFETY: the layout is not empty.
    let address = unsafe { std::alloc::alloc_zeroed(layout) } as u64;
    if address == 0 {
        return Err(CUDA_ERROR_OUT_OF_MEMORY);
    }
    let handle = crate::context::current_handle();
    insert(context, handle, address, bytes as u64, Nature::Host(layout), flags);
    Ok(address)
}

/// Gives pinned host memory back.
pub(crate) fn free_host(address: u64) -> Answer {
    let range = remove(address, |r| matches!(r.nature, Nature::Host(_)));
    let range = range.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    if let Nature::Host(layout) = range.nature {
        // SAFETY: allocated by `allocate_host` with this layout, and just taken out of the map.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
    }
    Ok(())
}

/// Maps memory of another process: its heap file, from `offset`.
pub(crate) fn import(
    context: &'static Context,
    file: &OwnedFd,
    offset: u64,
    bytes: u64,
) -> Answer<u64> {
    let (start, end) = context.gpu.heap.span();
    let mapping = Mapping::shared(file.as_fd(), (end - start) as usize)
        .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    let address = mapping.address() as u64 + offset;
    let handle = crate::context::current_handle();
    insert(context, handle, address, bytes, Nature::Imported { _mapping: mapping }, 0);
    Ok(address)
}

/// Everything that belongs to a context goes with it.
pub(crate) fn free_of_context(context: &'static Context) {
    let mine: Vec<(u64, bool)> = {
        let ranges = RANGES.read().unwrap_or_else(PoisonError::into_inner);
        ranges
            .values()
            .filter(|r| r.context_id == context.id)
            .map(|r| (r.start, matches!(r.nature, Nature::Host(_))))
            .collect()
    };
    for (start, host) in mine {
        if host {
            regardless(free_host(start));
        } else if free(start).is_err() {
            drop(remove(start, |r| !matches!(r.nature, Nature::Mapped)));
        }
    }
}

/// All of it, as the interpreter sees it.
#[derive(Debug)]
pub(crate) struct Everything;

impl Memory for Everything {
    fn range(&self, address: u64) -> Option<(u64, u64)> {
        look(address, |r| (r.start, r.end()))
    }
}
