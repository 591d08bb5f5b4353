//! The event queue: virtual time, ordered by moment and, at one moment, by the order of insertion,
//! so that a run repeats exactly.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

struct Entry<E> {
    at_us: u64,
    number: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        // A max-heap: the earliest must be the greatest.
        (other.at_us, other.number).cmp(&(self.at_us, self.number))
    }
}

/// Events that have not happened yet, and the present moment.
pub struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    now_us: u64,
    next_number: u64,
}

impl<E> std::fmt::Debug for EventQueue<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EventQueue({} events at {} µs)", self.heap.len(), self.now_us)
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        EventQueue { heap: BinaryHeap::new(), now_us: 0, next_number: 0 }
    }
}

impl<E> EventQueue<E> {
    /// The present moment in seconds.
    pub fn now_s(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "2^53 microseconds are 285 years")]
        let us = self.now_us as f64;
        us / 1e6
    }

    /// The present moment in microseconds.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    /// Adds an event; one in the past happens now.
    pub fn push(&mut self, at_s: f64, event: E) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturates; negative and NaN become 0, that is: now"
        )]
        let at_us = ((at_s * 1e6).round() as u64).max(self.now_us);
        self.heap.push(Entry { at_us, number: self.next_number, event });
        self.next_number += 1;
    }

    /// Takes the next event and moves time to it.
    pub fn pop(&mut self) -> Option<E> {
        let entry = self.heap.pop()?;
        self.now_us = entry.at_us;
        Some(entry.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn events_come_in_order_and_ties_in_turn(times in proptest::collection::vec(0u32..50, 1..200)) {
            let mut q = EventQueue::default();
            for (i, t) in times.iter().enumerate() {
                q.push(f64::from(*t), (*t, i));
            }
            let mut last = (0, 0);
            let mut seen = 0;
            while let Some(next) = q.pop() {
                prop_assert!(seen == 0 || next > last);
                prop_assert!((q.now_s() - f64::from(next.0)).abs() < 1e-9);
                last = next;
                seen += 1;
            }
            prop_assert_eq!(seen, times.len());
        }
    }

    #[test]
    fn the_past_is_now() {
        let mut q = EventQueue::default();
        q.push(10.0, 1);
        assert_eq!(q.pop(), Some(1));
        q.push(3.0, 2);
        assert_eq!(q.pop(), Some(2));
        assert_eq!(q.now_s(), 10.0);
    }
}
