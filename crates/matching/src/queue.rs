//! What the search does next: a queue by distance, for distances that never fall.
//!
//! A radix heap. An entry lies in the bucket of the highest bit in which its distance differs from
//! the last one taken out; the lowest bucket that is not empty is spread over those below it when
//! its turn comes. An entry is moved a few times in all, and every move is to the end of a list.

use crate::scalar::Tick;

/// Entries by distance; of equal ones the last to come is the first to go.
#[derive(Debug)]
pub(crate) struct Queue<T, E> {
    /// The last distance taken out.
    now: T,
    buckets: Vec<Vec<(T, E)>>,
    /// One bit for each bucket that is not empty.
    filled: u128,
    spare: Vec<(T, E)>,
}

impl<T: Tick, E: Copy> Queue<T, E> {
    pub(crate) fn new() -> Self {
        Self { now: T::ZERO, buckets: Vec::new(), filled: 0, spare: Vec::new() }
    }

    /// Adds an entry; one that is nearer than the last taken out is next.
    #[inline]
    pub(crate) fn push(&mut self, distance: T, entry: E) {
        let at = if distance <= self.now { 0 } else { distance.highest_difference(self.now) };
        if at >= self.buckets.len() {
            self.buckets.resize_with(at + 1, Vec::new);
        }
        self.buckets[at].push((distance, entry));
        self.filled |= 1 << at;
    }

    /// Takes out a nearest entry.
    pub(crate) fn pop(&mut self) -> Option<(T, E)> {
        let first = self.filled.trailing_zeros() as usize;
        if first > 0 {
            let spare = std::mem::take(&mut self.spare);
            let mut moving = std::mem::replace(self.buckets.get_mut(first)?, spare);
            self.filled &= !(1 << first);
            self.now = moving.iter().map(|&(distance, _)| distance).min()?;
            for (distance, entry) in moving.drain(..) {
                self.push(distance, entry);
            }
            self.spare = moving;
        }
        let next = self.buckets[0].pop();
        if self.buckets[0].is_empty() {
            self.filled &= !1;
        }
        next
    }

    pub(crate) fn clear(&mut self) {
        self.now = T::ZERO;
        self.filled = 0;
        self.buckets.iter_mut().for_each(Vec::clear);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// As a sorted list would do it, for both widths.
        #[test]
        fn nearest_first(steps in prop::collection::vec((0i64..1 << 40, 0u32..41, 0u8..3), 1..300)) {
            let mut narrow = Queue::new();
            let mut wide = Queue::new();
            let (mut plain, mut now) = (Vec::new(), 0i64);
            for (id, &(far, shift, pops)) in steps.iter().enumerate() {
                let distance = now + (far >> shift);
                narrow.push(distance, id);
                wide.push(i128::from(distance) << 60, id);
                plain.push(distance);
                for _ in 0..pops {
                    plain.sort_unstable_by(|a, b| b.cmp(a));
                    let expected = plain.pop();
                    let got = narrow.pop();
                    prop_assert_eq!(expected, got.map(|(distance, _)| distance));
                    prop_assert_eq!(wide.pop().map(|(d, id)| (d >> 60, id)),
                        got.map(|(d, id)| (i128::from(d), id)));
                    now = expected.unwrap_or(now);
                }
            }
            narrow.clear();
            prop_assert!(narrow.pop().is_none());
        }
    }
}
