//! The table of the driver API: what is exported, which look-up finds it, what it does to a quota.
//!
//! One table drives the interposer's exports, its `dlsym` and its `cuGetProcAddress`, and the
//! emulated driver's own: so the two cannot disagree about a name.

pub use crate::generated::driver::DRIVER;

/// What an entry point means to a quota, a gate or a clean exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Category {
    /// Takes device memory.
    Alloc,
    /// Takes host memory (never charged).
    AllocHost,
    /// Gives memory back.
    Free,
    /// May take device memory as a side effect: modules, limits, graph instantiation.
    Implicit,
    /// Starts kernels.
    Launch,
    /// Puts a host function into a stream.
    LaunchHost,
    /// Builds or changes a graph node.
    GraphNode,
    /// Tells how much memory there is.
    MemoryInfo,
    /// Life cycle of contexts.
    Context,
    /// Finds other entry points.
    Lookup,
    /// Stream capture.
    Capture,
    /// Shares memory or state with other processes.
    Share,
    /// Everything else: forwarded as it is.
    Other,
}

/// Which header declares the entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// cuda.h
    Driver,
    /// cudaProfiler.h
    Profiler,
    /// cudaGL.h
    Gl,
    /// cudaEGL.h
    Egl,
    /// cudaVDPAU.h
    Vdpau,
}

/// One entry point of the driver library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DriverFn {
    /// The exported symbol, for example `cuMemAlloc_v2`.
    pub symbol: &'static str,
    /// The name that `cuGetProcAddress` is asked for, for example `cuMemAlloc`.
    pub base: &'static str,
    /// Whether this is the per-thread-default-stream variant.
    pub per_thread: bool,
    /// The CUDA version (major × 1000 + minor × 10) from which this variant answers to `base`.
    pub since: u32,
    /// What it means to a quota, a gate or a clean exit.
    pub category: Category,
    /// Which header declares it.
    pub origin: Origin,
    /// Whether CUDA 12.9 has it too.
    pub in_12: bool,
}

pub(crate) const fn row(
    symbol: &'static str,
    base: &'static str,
    per_thread: bool,
    since: u32,
    category: Category,
    origin: Origin,
    in_12: bool,
) -> DriverFn {
    DriverFn { symbol, base, per_thread, since, category, origin, in_12 }
}

/// The place of a symbol in [`DRIVER`].
#[must_use]
pub fn index_of(symbol: &[u8]) -> Option<usize> {
    DRIVER.binary_search_by(|row| row.symbol.as_bytes().cmp(symbol)).ok()
}

/// The places of all variants of a base name.
pub fn variants(name: &[u8]) -> impl Iterator<Item = usize> {
    let first = DRIVER.partition_point(|row| row.symbol.as_bytes() < name);
    (first..DRIVER.len())
        .take_while(move |&index| DRIVER[index].symbol.as_bytes().starts_with(name))
        .filter(move |&index| DRIVER[index].base.as_bytes() == name)
}

/// What `cuGetProcAddress(name, version, per_thread)` resolves to: the newest variant that is not
/// newer than `version`. A per-thread request falls back to the plain variant where there is no other.
#[must_use]
pub fn resolve(name: &[u8], version: u32, per_thread: bool) -> Option<usize> {
    let newest = |wanted: bool| {
        variants(name)
            .filter(|&index| DRIVER[index].per_thread == wanted && DRIVER[index].since <= version)
            .max_by_key(|&index| DRIVER[index].since)
    };
    if per_thread { newest(true).or_else(|| newest(false)) } else { newest(false) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_sorted_and_complete() {
        assert!(DRIVER.is_sorted_by(|a, b| a.symbol < b.symbol));
        let cuda = DRIVER.iter().filter(|row| row.origin == Origin::Driver);
        assert_eq!(cuda.clone().count(), 682);
        assert_eq!(cuda.filter(|row| row.in_12).count(), 616);
        for row in &DRIVER {
            assert!(row.symbol.starts_with(row.base), "{}", row.symbol);
        }
    }

    #[test]
    fn every_symbol_is_found_by_name_and_by_version() {
        for (index, row) in DRIVER.iter().enumerate() {
            assert_eq!(index_of(row.symbol.as_bytes()), Some(index));
            assert_eq!(resolve(row.base.as_bytes(), row.since, row.per_thread), Some(index));
        }
        assert_eq!(index_of(b""), None);
        assert_eq!(resolve(b"", 0, false), None);
        assert_eq!(resolve(b"cuMemAlloc", 1000, false), None);
        let symbol = |found: Option<usize>| found.map(|index| DRIVER[index].symbol);
        assert_eq!(symbol(resolve(b"cuMemAlloc", 13_040, false)), Some("cuMemAlloc_v2"));
        assert_eq!(symbol(resolve(b"cuLaunchKernel", 12_000, true)), Some("cuLaunchKernel_ptsz"));
        assert_eq!(symbol(resolve(b"cuMemAlloc", 13_040, true)), Some("cuMemAlloc_v2"));
    }
}
