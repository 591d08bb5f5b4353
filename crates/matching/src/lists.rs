//! Short lists: for each row the few columns worth bidding for, and a bound on all others.
//!
//! Prices only rise, so the value of a column to a row only falls: the value an entry had when the
//! list was made, and the bound on what was left out, stay upper bounds for ever. A row is read again
//! only when the best of its list has fallen below the bound.

use std::cmp::Ordering;

use crate::market::Market;
use crate::scalar::{Scalar, Tick};
use crate::scan::{ABSENT, Candidates, FLOOR};

/// What a row finds when it looks at its list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look<T> {
    pub(crate) col: u32,
    pub(crate) weight: T,
    /// Value of the best column.
    pub(crate) best: T,
    /// Value of the next best column in the list.
    pub(crate) second: T,
}

/// A column on a list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry<T> {
    /// Scaled weight.
    pub(crate) weight: T,
    /// The value was at most this when the list was made.
    pub(crate) then: T,
    pub(crate) col: u32,
}

/// Short lists of all rows.
#[derive(Debug)]
pub(crate) struct Lists<T> {
    keep: usize,
    entries: Vec<Entry<T>>,
    len: Vec<u32>,
    /// No column outside the list is worth more; [`Tick::LOWEST`] when none is left out.
    bound: Vec<T>,
}

/// Where the list of one row lies.
#[derive(Debug)]
pub(crate) struct Slot<'a, T> {
    entries: &'a mut [Entry<T>],
    len: &'a mut u32,
    bound: &'a mut T,
}

impl<T: Tick> Lists<T> {
    pub(crate) fn new(rows: usize, keep: usize) -> Self {
        let blank = Entry { weight: T::ZERO, then: T::LOWEST, col: 0 };
        Self {
            keep,
            entries: vec![blank; rows * keep],
            len: vec![0; rows],
            bound: vec![-T::LOWEST; rows],
        }
    }

    #[inline]
    pub(crate) fn bound(&self, row: usize) -> T {
        self.bound[row]
    }

    /// Best and second best of the list at today's prices.
    #[inline]
    pub(crate) fn look(&self, row: usize, price: &[T]) -> Look<T> {
        let list = self.edges(row);
        let mut look = Look { col: u32::MAX, weight: T::ZERO, best: T::LOWEST, second: T::LOWEST };
        for entry in list {
            if entry.then <= look.second {
                break;
            }
            let value = entry.weight - price[entry.col as usize];
            if value > look.best {
                look.second = look.best;
                look.best = value;
                look.col = entry.col;
                look.weight = entry.weight;
            } else if value > look.second {
                look.second = value;
            }
        }
        look
    }

    /// The list as it stands.
    #[inline]
    pub(crate) fn edges(&self, row: usize) -> &[Entry<T>] {
        let from = row * self.keep;
        &self.entries[from..from + self.len[row] as usize]
    }

    pub(crate) fn slot(&mut self, row: usize) -> Slot<'_, T> {
        let from = row * self.keep;
        Slot {
            entries: &mut self.entries[from..from + self.keep],
            len: &mut self.len[row],
            bound: &mut self.bound[row],
        }
    }

    /// All slots, in as many stretches of rows as asked for.
    pub(crate) fn stretches(&mut self, count: usize) -> Vec<Vec<Slot<'_, T>>> {
        let rows = self.len.len();
        let each = rows.div_ceil(count.max(1)).max(1);
        let entries = self.entries.chunks_mut(self.keep.max(1));
        let mut slots = entries
            .zip(&mut self.len)
            .zip(&mut self.bound)
            .map(|((entries, len), bound)| Slot { entries, len, bound });
        let mut out = Vec::new();
        while out.len() * each < rows {
            out.push(slots.by_ref().take(each).collect());
        }
        out
    }
}

impl<T: Tick> Slot<'_, T> {
    /// Writes down the best of what a scan of the row found.
    pub(crate) fn write<S: Scalar>(self, found: &mut Candidates, line: &[S], market: &Market<T>) {
        let mut best = found.leading(self.entries.len());
        let mut len = 0;
        for (entry, (rough, col)) in self.entries.iter_mut().zip(best.by_ref()) {
            let weight = market.weight(line[col as usize]);
            *entry = Entry { weight, then: market.bound_of(rough), col };
            len += 1;
        }
        let next = best.next().map(|(rough, _)| rough);
        drop(best);
        *self.len = len;
        let threshold = next.unwrap_or(found.threshold);
        *self.bound = if threshold <= FLOOR { T::LOWEST } else { market.bound_of(threshold) };
    }
}

/// Makes lists; holds the space needed meanwhile.
#[derive(Debug)]
pub(crate) struct Maker<T> {
    keep: usize,
    found: Candidates,
    exact: Vec<Entry<T>>,
    hopes: Vec<i32>,
}

impl<T: Tick> Maker<T> {
    pub(crate) fn new(keep: usize) -> Self {
        Self {
            keep,
            found: Candidates::new(keep),
            exact: Vec::with_capacity(4 * keep),
            hopes: Vec::with_capacity(keep),
        }
    }

    /// Reads the row again and makes its list anew.
    pub(crate) fn refill<S: Scalar>(
        &mut self,
        slot: Slot<'_, T>,
        line: &[S],
        market: &Market<T>,
        price: &[T],
    ) {
        let hope = self.hopeful(&slot, price, market);
        self.fill(slot, line, market, hope);
    }

    /// Makes the list of a row, of columns above the rough value `hope`.
    pub(crate) fn fill<S: Scalar>(
        &mut self,
        slot: Slot<'_, T>,
        line: &[S],
        market: &Market<T>,
        hope: i32,
    ) {
        self.found.start(hope);
        S::scan(line, &market.rough_price, &market.rough, &mut self.found);
        slot.write(&mut self.found, line, market);
    }

    /// As [`Self::refill`], by exact values: for rows with more near ties than a list is long.
    pub(crate) fn refill_exactly<S: Scalar>(
        &mut self,
        slot: Slot<'_, T>,
        line: &[S],
        market: &Market<T>,
        price: &[T],
    ) {
        let keep = self.keep;
        self.exact.clear();
        let mut bound = T::LOWEST;
        for (col, (&x, &rough)) in (0u32..).zip(line.iter().zip(&market.rough_price)) {
            if rough == ABSENT || !x.to_f64().is_finite() {
                continue;
            }
            let weight = market.weight(x);
            let then = weight - price[col as usize];
            if then > bound {
                self.exact.push(Entry { weight, then, col });
                if self.exact.len() == 4 * keep {
                    let (_, last, _) = self.exact.select_nth_unstable_by(keep, best_first);
                    bound = last.then;
                    self.exact.truncate(keep);
                }
            }
        }
        if self.exact.len() > keep {
            let (_, last, _) = self.exact.select_nth_unstable_by(keep, best_first);
            bound = bound.max(last.then);
            self.exact.truncate(keep);
        }
        self.store(slot, bound);
    }

    fn store(&mut self, slot: Slot<'_, T>, bound: T) {
        self.exact.sort_unstable_by(best_first);
        slot.entries[..self.exact.len()].copy_from_slice(&self.exact);
        #[expect(clippy::cast_possible_truncation, reason = "at most `keep`")]
        {
            *slot.len = self.exact.len() as u32;
        }
        *slot.bound = bound;
    }

    /// A rough value that half of the old list still exceeds, so that the new one is long enough.
    fn hopeful(&mut self, slot: &Slot<'_, T>, price: &[T], market: &Market<T>) -> i32 {
        let len = *slot.len as usize;
        if len < self.keep / 2 || len < 2 {
            return FLOOR;
        }
        self.hopes.clear();
        let now = slot.entries[..len].iter().map(|e| e.weight - price[e.col as usize]);
        self.hopes.extend(now.map(|value| market.rough_of(value)));
        let middle = (self.keep / 2).min(len - 1);
        *self.hopes.select_nth_unstable_by(middle, |a, b| b.cmp(a)).1
    }
}

fn best_first<T: Tick>(a: &Entry<T>, b: &Entry<T>) -> Ordering {
    b.then.cmp(&a.then).then(a.col.cmp(&b.col))
}
