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

const ADD: [&str; 6] = ["vadd", "vecadd", "vecAdd", "vectorAdd", "vector_add", "add_vectors"];

/// The kernel of a name. A C++ name says its parameters too: only those that are known will do, as
/// others would be taken for floats.
pub(crate) fn find(name: &str) -> Option<Native> {
    let Some(mangled) = name.strip_prefix("_Z") else {
        return known(name);
    };
    let digits = mangled.bytes().take_while(u8::is_ascii_digit).count();
    let (length, rest) = mangled.split_at(digits);
    let (plain, parameters) = rest.split_at_checked(length.parse().ok()?)?;
    let native = known(plain)?;
    let fitting = match native {
        Native::AddThree => ["PKfS", "PfS"],
        Native::Saxpy => ["fPKf", "fPf"],
    };
    fitting.iter().any(|begin| parameters.starts_with(begin)).then_some(native)
}

fn known(plain: &str) -> Option<Native> {
    match plain {
        "saxpy" => Some(Native::Saxpy),
        _ => ADD.contains(&plain).then_some(Native::AddThree),
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
