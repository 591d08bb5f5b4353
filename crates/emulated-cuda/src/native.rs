//! Kernels known by name that compute even when only their machine code is there.

use muxflow_emulated_gpu::ptx::{Grid, Outcome};

use crate::memory;

/// Which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Native {
    /// (a, b, out, n): out = a + b, floats.
    AddThree,
    /// (a, x, y, n): y += a * x, floats.
    Saxpy,
}

/// The kernel of a name; C++ names are looked at without their mangling.
pub(crate) fn find(name: &str) -> Option<Native> {
    let plain = match name.strip_prefix("_Z") {
        Some(rest) => rest.trim_start_matches(|c: char| c.is_ascii_digit()),
        None => name,
    };
    let is = |known: &str| plain == known || (name != plain && plain.starts_with(known));
    if ["vadd", "vecadd", "vecAdd", "vectorAdd", "vector_add", "add_vectors"].iter().any(|n| is(n))
    {
        Some(Native::AddThree)
    } else if is("saxpy") {
        Some(Native::Saxpy)
    } else {
        None
    }
}

fn word(params: &[u8], at: usize) -> u64 {
    params.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn half(params: &[u8], at: usize) -> u32 {
    params.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

/// Runs it on as many elements as there are threads, and not more than said.
pub(crate) fn run(native: Native, grid: &Grid, params: &[u8]) -> Outcome {
    let threads = grid.block_count() * u64::from(grid.block_threads());
    let (pointers, count, factor) = match native {
        Native::AddThree => {
            let pointers = [word(params, 0), word(params, 8), word(params, 16)];
            (pointers, params.len().ge(&28).then(|| half(params, 24)), 0.0)
        }
        Native::Saxpy => {
            let pointers = [word(params, 8), word(params, 16), word(params, 16)];
            (pointers, Some(half(params, 24)), f32::from_bits(half(params, 0)))
        }
    };
    let n = usize::try_from(threads.min(count.map_or(threads, u64::from))).unwrap_or(0);
    for pointer in pointers {
        if memory::check_device(pointer, n * 4).is_err() {
            return Outcome::IllegalAddress(pointer);
        }
    }
    let [a, b, out] = pointers.map(|p| p as *mut f32);
    for i in 0..n {
        // SAFETY: all three ranges were just found to hold `n` floats; unaligned ones too.
        unsafe {
            let (x, y) = (a.add(i).read_unaligned(), b.add(i).read_unaligned());
            let value = match native {
                Native::AddThree => x + y,
                Native::Saxpy => factor * x + y,
            };
            out.add(i).write_unaligned(value);
        }
    }
    Outcome::Done
}
