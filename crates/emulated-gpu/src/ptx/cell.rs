//! Single values of one to eight bytes in memory.

/// # Safety
/// `bytes` bytes are readable at `place`.
pub(crate) unsafe fn read(place: *const u8, bytes: usize) -> u64 {
    // SAFETY: promised by the caller; aligned or not.
    unsafe {
        match bytes {
            1 => u64::from(place.read()),
            2 => u64::from(place.cast::<u16>().read_unaligned()),
            4 => u64::from(place.cast::<u32>().read_unaligned()),
            _ => place.cast::<u64>().read_unaligned(),
        }
    }
}

/// # Safety
/// `bytes` bytes are writable at `place`.
pub(crate) unsafe fn write(place: *mut u8, bytes: usize, value: u64) {
    // SAFETY: promised by the caller; aligned or not.
    unsafe {
        match bytes {
            1 => place.write(value as u8),
            2 => place.cast::<u16>().write_unaligned(value as u16),
            4 => place.cast::<u32>().write_unaligned(value as u32),
            _ => place.cast::<u64>().write_unaligned(value),
        }
    }
}
