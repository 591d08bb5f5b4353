//! The rhythm of a job: how many iterations an unmodified program has made, from how often it
//! launched each kernel.
//!
//! A training loop launches each kernel a fixed number of times per iteration, so in a long enough
//! window the counts are small multiples of one number, and that number is the iterations. Kernels
//! that run now and then (set-up, evaluation) do not fit; they are outvoted by launches.

/// Counters per process; a kernel's counter is chosen by a hash of its handle.
pub const BUCKETS: usize = 64;

/// Fewest repetitions from which a rhythm is believed.
const FEWEST: u32 = 4;

/// Iterations in a window, given the launches of each kernel in it.
#[must_use]
pub fn iterations(counts: &[u32; BUCKETS]) -> Option<u32> {
    let total: u64 = counts.iter().map(|&count| u64::from(count)).sum();
    let candidates = counts.iter().copied().filter(|&count| count >= FEWEST);
    candidates
        .map(|candidate| (fit(counts, candidate), candidate))
        .filter(|&(fitting, _)| fitting * 10 >= total * 9)
        .max()
        .map(|(_, candidate)| candidate)
}

/// Launches of the kernels whose count is close to a multiple of `iterations`. "Close" allows for
/// the window's ends cutting an iteration.
fn fit(counts: &[u32; BUCKETS], iterations: u32) -> u64 {
    let iterations = u64::from(iterations);
    let fitting = counts.iter().map(|&count| u64::from(count)).filter(|&count| {
        let times = (count + iterations / 2) / iterations;
        times > 0 && count.abs_diff(times * iterations) <= times.max(iterations / 20)
    });
    fitting.sum()
}

/// The bucket of a kernel.
#[inline]
#[must_use]
pub fn bucket(handle: usize) -> usize {
    ((handle as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(some: &[u32]) -> [u32; BUCKETS] {
        let mut all = [0; BUCKETS];
        all[..some.len()].copy_from_slice(some);
        all
    }

    #[test]
    fn iterations_are_found_among_multiples_and_noise() {
        assert_eq!(iterations(&counts(&[100, 100, 200, 5300, 3])), Some(100));
        assert_eq!(iterations(&counts(&[101, 100, 200, 401, 1])), Some(101));
        assert_eq!(iterations(&counts(&[50])), Some(50));
    }

    #[test]
    fn no_rhythm_is_no_answer() {
        assert_eq!(iterations(&counts(&[])), None);
        assert_eq!(iterations(&counts(&[1, 2, 3])), None);
        assert_eq!(iterations(&[u32::MAX; BUCKETS]), Some(u32::MAX));
    }

    #[test]
    fn buckets_are_in_range() {
        for handle in (0..1 << 20).step_by(64).chain([usize::MAX]) {
            assert!(bucket(handle) < BUCKETS);
        }
    }
}
