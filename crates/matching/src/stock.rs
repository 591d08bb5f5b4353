//! The columns: what each costs, who holds it, and for how much.
//!
//! A column class of several units keeps them as lots, cheapest first; its price is that of its
//! cheapest unit. A column of one unit needs no lots.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use crate::scalar::Tick;

/// The holder of a unit that nobody holds.
pub(crate) const NOBODY: u32 = u32::MAX;

/// Some units of one column, held by one row at one price.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lot<T> {
    pub(crate) price: T,
    pub(crate) row: u32,
    pub(crate) count: u32,
    /// Value of the column to its holder at this price.
    pub(crate) profit: T,
}

impl<T: Tick> Ord for Lot<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.price.cmp(&other.price).then(self.row.cmp(&other.row))
    }
}

impl<T: Tick> PartialOrd for Lot<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: Tick> PartialEq for Lot<T> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl<T: Tick> Eq for Lot<T> {}

/// All columns.
#[derive(Debug)]
pub(crate) struct Stock<T> {
    /// Price of the cheapest unit of each column.
    pub(crate) price: Vec<T>,
    single: Vec<Lot<T>>,
    /// Columns of several units, by column.
    lots: Vec<(u32, BinaryHeap<Reverse<Lot<T>>>)>,
    /// Place in `lots` of a column of several units; empty when there are none.
    place: Vec<u32>,
}

/// What a bid changed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sale {
    pub(crate) units: u32,
    /// Who held them before.
    pub(crate) before: u32,
}

impl<T: Tick> Stock<T> {
    /// Nothing sold, at the given prices.
    pub(crate) fn new(price: Vec<T>, capacity: &[u32]) -> Self {
        let mut lots = Vec::new();
        let mut place = Vec::new();
        if capacity.iter().any(|&c| c > 1) {
            place = vec![NOBODY; price.len()];
            for (col, &count) in (0u32..).zip(capacity) {
                if count > 1 {
                    let price = price[col as usize];
                    place[col as usize] = u32::try_from(lots.len()).unwrap_or(NOBODY);
                    let lot = Lot { price, row: NOBODY, count, profit: T::ZERO };
                    lots.push((col, BinaryHeap::from([Reverse(lot)])));
                }
            }
        }
        let single = price
            .iter()
            .zip(capacity)
            .map(|(&price, &c)| Lot { price, row: NOBODY, count: c, profit: T::ZERO })
            .collect();
        Self { price, single, lots, place }
    }

    /// Sells up to `want` of the cheapest units of `col` to `row`, which values the column at
    /// `weight` and its best alternative elsewhere at `second`.
    #[inline]
    pub(crate) fn sell(
        &mut self,
        col: u32,
        row: u32,
        want: u32,
        weight: T,
        second: Option<T>,
        step: Step<T>,
    ) -> Sale {
        let at = col as usize;
        if self.place.is_empty() || self.place[at] == NOBODY {
            let lot = &mut self.single[at];
            let before = lot.row;
            let price = step.bid(lot.price, weight, second);
            *lot = Lot { price, row, count: 1, profit: weight - price };
            self.price[at] = price;
            return Sale { units: 1, before };
        }
        self.sell_lot(at, row, want, weight, second, step)
    }

    fn sell_lot(
        &mut self,
        at: usize,
        row: u32,
        want: u32,
        weight: T,
        second: Option<T>,
        step: Step<T>,
    ) -> Sale {
        let heap = &mut self.lots[self.place[at] as usize].1;
        let Some(Reverse(lot)) = heap.pop() else { return Sale { units: 0, before: NOBODY } };
        let units = want.min(lot.count);
        if units < lot.count {
            heap.push(Reverse(Lot { count: lot.count - units, ..lot }));
        }
        // The next unit of the same column is an alternative too.
        let next = heap.peek().map(|Reverse(l)| weight - l.price);
        let price = step.bid(lot.price, weight, second.max(next));
        heap.push(Reverse(Lot { price, row, count: units, profit: weight - price }));
        self.price[at] = heap.peek().map_or(price, |Reverse(l)| l.price);
        Sale { units, before: lot.row }
    }

    /// Gives a column of one unit to a row at its price.
    pub(crate) fn give(&mut self, col: u32, row: u32, weight: T) {
        let lot = &mut self.single[col as usize];
        lot.row = row;
        lot.profit = weight - lot.price;
    }

    /// Who holds a column of one unit.
    #[inline]
    pub(crate) fn holder(&self, col: u32) -> u32 {
        self.single[col as usize].row
    }

    /// What a column of one unit is worth to its holder.
    #[inline]
    pub(crate) fn profit(&self, col: u32) -> T {
        self.single[col as usize].profit
    }

    /// Raises the price of a column of one unit; the new price.
    pub(crate) fn raise(&mut self, col: u32, by: T) -> T {
        let lot = &mut self.single[col as usize];
        lot.price += by;
        lot.profit = lot.profit - by;
        self.price[col as usize] = lot.price;
        lot.price
    }

    /// All lots with their columns.
    pub(crate) fn lots(&self) -> impl Iterator<Item = (u32, &Lot<T>)> {
        let several = self
            .lots
            .iter()
            .flat_map(|(col, heap)| heap.iter().map(move |Reverse(lot)| (*col, lot)));
        let single = (0u32..).zip(&self.single).filter(|(_, lot)| lot.count == 1);
        single.chain(several)
    }

    /// Lets `change` alter lots (never their counts); says which columns' prices moved.
    pub(crate) fn alter(&mut self, mut change: impl FnMut(&mut Lot<T>) -> bool) -> Vec<u32> {
        let mut moved = Vec::new();
        for (col, lot) in (0u32..).zip(&mut self.single) {
            if lot.count == 1 && change(lot) && self.price[col as usize] != lot.price {
                self.price[col as usize] = lot.price;
                moved.push(col);
            }
        }
        for (col, heap) in &mut self.lots {
            let mut all: Vec<_> = std::mem::take(heap).into_vec();
            for Reverse(lot) in &mut all {
                change(lot);
            }
            *heap = BinaryHeap::from(all);
            let price = heap.peek().map_or(T::ZERO, |Reverse(l)| l.price);
            if self.price[*col as usize] != price {
                self.price[*col as usize] = price;
                moved.push(*col);
            }
        }
        moved
    }
}

/// How far a bid goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step<T> {
    pub(crate) eps: T,
    /// The rise where the bidder has no alternative at all.
    pub(crate) free: T,
}

impl<T: Tick> Step<T> {
    #[inline]
    fn bid(self, price: T, weight: T, second: Option<T>) -> T {
        match second {
            Some(second) => weight - second + self.eps,
            None => price + self.free,
        }
    }
}
