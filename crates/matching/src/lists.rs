//! Short lists: for each row the few columns worth bidding for, and a bound on all others.
//!
//! Prices only rise, so the value of a column to a row only falls: the value an entry had when the
//! list was made, and the bound on what was left out, stay upper bounds for ever. A row is read again
//! only when the best of its list has fallen below the bound.

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

#[derive(Debug, Clone, Copy)]
struct Entry<T> {
    /// Scaled weight.
    weight: T,
    /// Value when the list was made.
    then: T,
    col: u32,
}

/// Short lists of a stretch of rows.
#[derive(Debug)]
pub(crate) struct Lists<T> {
    keep: usize,
    entries: Vec<Entry<T>>,
    len: Vec<u32>,
    /// No column outside the list is worth more; [`Tick::LOWEST`] when none is left out.
    bound: Vec<T>,
    found: Candidates,
    exact: Vec<Entry<T>>,
}

impl<T: Tick> Lists<T> {
    pub(crate) fn new(rows: usize, keep: usize) -> Self {
        let blank = Entry { weight: T::ZERO, then: T::LOWEST, col: 0 };
        Self {
            keep,
            entries: vec![blank; rows * keep],
            len: vec![0; rows],
            bound: vec![-T::LOWEST; rows],
            found: Candidates::new(keep),
            exact: Vec::with_capacity(4 * keep),
        }
    }

    #[inline]
    pub(crate) fn bound(&self, row: usize) -> T {
        self.bound[row]
    }

    /// Best and second best of the list at today's prices.
    #[inline]
    pub(crate) fn look(&self, row: usize, price: &[T]) -> Look<T> {
        let from = row * self.keep;
        let list = &self.entries[from..from + self.len[row] as usize];
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

    /// Reads the row again and makes its list anew.
    pub(crate) fn refill<S: Scalar>(
        &mut self,
        row: usize,
        line: &[S],
        market: &Market<T>,
        price: &[T],
    ) {
        let start = self.hopeful(row, price, market);
        self.found.start(start);
        S::scan(line, &market.rough_price, &market.rough, &mut self.found);
        self.found.cut();
        self.exact.clear();
        for &(_, col) in &self.found.items {
            let weight = market.weight(line[col as usize]);
            self.exact.push(Entry { weight, then: weight - price[col as usize], col });
        }
        let bound = if self.found.threshold <= FLOOR {
            T::LOWEST
        } else {
            market.bound_of(self.found.threshold)
        };
        self.store(row, bound);
    }

    /// As [`Self::refill`], by exact values: for rows with more near ties than a list is long.
    pub(crate) fn refill_exactly<S: Scalar>(
        &mut self,
        row: usize,
        line: &[S],
        market: &Market<T>,
        price: &[T],
    ) {
        let keep = self.keep;
        let order = |a: &Entry<T>, b: &Entry<T>| b.then.cmp(&a.then).then(a.col.cmp(&b.col));
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
                    let (_, last, _) = self.exact.select_nth_unstable_by(keep, order);
                    bound = last.then;
                    self.exact.truncate(keep);
                }
            }
        }
        if self.exact.len() > keep {
            let (_, last, _) = self.exact.select_nth_unstable_by(keep, order);
            bound = bound.max(last.then);
            self.exact.truncate(keep);
        }
        self.store(row, bound);
    }

    fn store(&mut self, row: usize, bound: T) {
        self.exact.sort_unstable_by(|a, b| b.then.cmp(&a.then).then(a.col.cmp(&b.col)));
        let from = row * self.keep;
        self.entries[from..from + self.exact.len()].copy_from_slice(&self.exact);
        #[expect(clippy::cast_possible_truncation, reason = "at most `keep`")]
        {
            self.len[row] = self.exact.len() as u32;
        }
        self.bound[row] = bound;
    }

    /// A rough value that half of the old list still exceeds, so that the new one is long enough.
    fn hopeful(&mut self, row: usize, price: &[T], market: &Market<T>) -> i32 {
        let len = self.len[row] as usize;
        if len < self.keep {
            return FLOOR;
        }
        let from = row * self.keep;
        self.exact.clear();
        self.exact.extend(self.entries[from..from + len].iter().map(|e| Entry {
            weight: e.weight,
            then: e.weight - price[e.col as usize],
            col: e.col,
        }));
        let (_, middle, _) = self
            .exact
            .select_nth_unstable_by(len / 2, |a, b| b.then.cmp(&a.then).then(a.col.cmp(&b.col)));
        market.rough_of(middle.then)
    }
}
