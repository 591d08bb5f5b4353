//! A ring of fixed length: several minutes of history, and nothing more.

/// Keeps the newest `capacity` values.
#[derive(Debug, Clone)]
pub struct Ring<T> {
    values: Vec<T>,
    capacity: usize,
    next: usize,
}

impl<T> Ring<T> {
    /// An empty ring for at least one value. All its memory is taken now: it never grows.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        Ring { values: Vec::with_capacity(capacity), capacity, next: 0 }
    }

    /// Adds a value; the oldest goes when it is full.
    pub fn push(&mut self, value: T) {
        match self.values.get_mut(self.next) {
            Some(slot) => *slot = value,
            None => self.values.push(value),
        }
        self.next = (self.next + 1) % self.capacity;
    }

    /// From the oldest to the newest.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let full = self.values.len() == self.capacity;
        let (newer, older) = self.values.split_at(if full { self.next } else { 0 });
        older.iter().chain(newer)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_the_tail_of_what_came(values in proptest::collection::vec(any::<u16>(), 0..60), capacity in 0usize..20) {
            let mut ring = Ring::new(capacity);
            for &value in &values {
                ring.push(value);
            }
            let kept: Vec<u16> = ring.iter().copied().collect();
            let start = values.len().saturating_sub(capacity.max(1));
            prop_assert_eq!(&kept, &values[start..]);
            prop_assert_eq!(ring.len(), kept.len());
        }
    }
}
