//! The auction: rows bid for columns until nobody is left out.
//!
//! Every row unit without a column bids for the column worth most to it, and raises its price until
//! the column is worth as much as the next best one, less `eps`. Whoever held it is out and bids in
//! turn. When all are placed, each holds a column within `eps` of its best, so the total is within
//! `eps` per row unit of the optimum. Phases with falling `eps` get to one tick, where that is less
//! than one grid unit in total, which makes the result exact.
//!
//! Prices never fall. Where columns may stay unsold their price must be the lowest of all, the
//! *level*; a column that lost its holder at a high price is brought back under this rule by
//! raising the level (see `level`), never by lowering the price. Row units may have a way out, worth
//! a fixed value less the level: to be left unmatched.

use std::collections::VecDeque;

use crate::error::MatchError;
use crate::lists::{Lists, Look, Maker};
use crate::market::Market;
use crate::scalar::Tick;
use crate::scan::FLOOR;
use crate::stock::{NOBODY, Step, Stock};
use crate::weights::{Weights, row_of};

/// A problem ready for the auction: no more row units than column units.
#[derive(Debug)]
pub(crate) struct Task<'a, W: Weights> {
    pub(crate) weights: &'a W,
    /// Row classes: place in the matrix and units of each.
    pub(crate) rows: &'a [(u32, u32)],
    /// Units of each column; 0 leaves a column out.
    pub(crate) capacity: &'a [u32],
    /// Value of staying unmatched, in scaled units.
    pub(crate) way_out: Option<i128>,
    pub(crate) threads: usize,
}

/// Everything that changes.
#[derive(Debug)]
pub(crate) struct Auction<'a, W: Weights, T> {
    pub(crate) task: &'a Task<'a, W>,
    pub(crate) market: Market<T>,
    pub(crate) stock: Stock<T>,
    pub(crate) lists: Lists<T>,
    /// Units of each row without a place.
    pub(crate) waiting: Vec<u32>,
    /// Units of each row that took the way out.
    pub(crate) left_out: Vec<u32>,
    /// Rows without any allowed edge.
    pub(crate) isolated: Vec<bool>,
    pub(crate) queue: VecDeque<u32>,
    pub(crate) level: T,
    pub(crate) way_out: Option<T>,
    /// Whether some column units must stay unsold, or rows may leave.
    pub(crate) loose: bool,
    /// Difference between the highest and the lowest weight.
    pub(crate) span: T,
    /// How far prices may rise before rows prefer the way out.
    reach: T,
    /// How often a price war may still be cut short.
    relief: u32,
    pub(crate) bids: u64,
    pub(crate) refills: u64,
    maker: Maker<T>,
    pub(crate) buffer: Vec<W::Scalar>,
}

impl<'a, W: Weights, T: Tick> Auction<'a, W, T> {
    pub(crate) fn new(
        task: &'a Task<'a, W>,
        market: Market<T>,
        price: Vec<T>,
        level: T,
        keep: usize,
    ) -> Self {
        let grid = &market.grid;
        let sign = if grid.minimize { -1.0 } else { 1.0 };
        let (low, high) = (grid.units(sign * grid.low), grid.units(sign * grid.high));
        // With a free way out, what counts is also how far weights are above it.
        let low = if task.way_out == Some(0) { low.min(0) } else { low };
        let span = (i128::from(high) - i128::from(low)).max(0) << market.scale_bits;
        let reach =
            task.way_out.map_or(0, |v| span.max((i128::from(high) << market.scale_bits) - v));
        let (span, reach) = (T::from_i128(span.max(1)), T::from_i128(reach));
        let units: u64 = task.rows.iter().map(|&(_, c)| u64::from(c)).sum();
        let room: u64 = task.capacity.iter().map(|&c| u64::from(c)).sum();
        Self {
            market,
            stock: Stock::new(price, task.capacity),
            lists: Lists::new(task.rows.len(), keep),
            waiting: task.rows.iter().map(|&(_, c)| c).collect(),
            left_out: vec![0; task.rows.len()],
            isolated: vec![false; task.rows.len()],
            queue: VecDeque::new(),
            level,
            way_out: task.way_out.map(T::from_i128),
            loose: task.way_out.is_some() || units < room,
            span,
            reach,
            relief: 40,
            bids: 0,
            refills: 0,
            maker: Maker::new(keep),
            buffer: Vec::new(),
            task,
        }
    }

    /// One phase: everyone placed, within `eps` of the best, or within the larger one returned
    /// where rows that cannot all be matched fought each other for too long.
    pub(crate) fn phase(&mut self, mut eps: T) -> Result<T, MatchError> {
        self.release(eps);
        for row in 0..self.waiting.len() {
            if self.waiting[row] > 0 {
                #[expect(clippy::cast_possible_truncation, reason = "rows are counted in u32")]
                self.queue.push_back(row as u32);
            }
        }
        self.drain(&mut eps)?;
        let mut rounds = 0;
        while self.loose && self.raise_level(eps, rounds >= 1000) {
            rounds += 1;
            self.drain(&mut eps)?;
        }
        Ok(eps)
    }

    /// Takes columns from rows that want another by more than `eps`.
    pub(crate) fn release(&mut self, eps: T) {
        for row in 0..self.left_out.len() {
            self.waiting[row] += std::mem::take(&mut self.left_out[row]);
        }
        let way_out = self.way_out.map_or(T::LOWEST, |v| v - self.level);
        let (lists, price) = (&self.lists, &self.stock.price);
        let wish: Vec<T> = (0..self.waiting.len())
            .map(|row| lists.look(row, price).best.max(lists.bound(row)).max(way_out) - eps)
            .collect();
        let waiting = &mut self.waiting;
        self.stock.alter(|lot| {
            if lot.row != NOBODY && lot.profit < wish[lot.row as usize] {
                waiting[lot.row as usize] += lot.count;
                lot.row = NOBODY;
            }
            false
        });
    }

    /// Lets rows bid until none waits.
    fn drain(&mut self, eps: &mut T) -> Result<(), MatchError> {
        let patience = 64 * (self.waiting.len() + self.stock.price.len() + 16) as u64;
        let mut until = self.bids + patience;
        while let Some(row) = self.queue.pop_front() {
            while self.waiting[row as usize] > 0 && !self.isolated[row as usize] {
                if self.bids > until {
                    until = self.bids + patience;
                    if self.relief > 0 && *eps < self.reach.shr(3) {
                        self.relief -= 1;
                        *eps = eps.shl(3);
                    }
                }
                self.bid(row, Step { eps: *eps, free: self.span.max(*eps) })?;
            }
        }
        Ok(())
    }

    /// What a row finds; its list is made anew until the best is on it, or surely worth less than
    /// the way out.
    pub(crate) fn look(&mut self, at: usize, way_out: Option<T>) -> Look<T> {
        let mut look = self.lists.look(at, &self.stock.price);
        let mut exactly = false;
        while look.best < self.lists.bound(at) {
            if way_out.is_some_and(|v| v >= self.lists.bound(at)) {
                break;
            }
            self.refill(at, exactly);
            exactly = true;
            look = self.lists.look(at, &self.stock.price);
        }
        look
    }

    fn bid(&mut self, row: u32, step: Step<T>) -> Result<(), MatchError> {
        let at = row as usize;
        let way_out = self.way_out.map(|v| v - self.level);
        let look = self.look(at, way_out);
        let bound = self.lists.bound(at);
        if look.best == T::LOWEST && bound == T::LOWEST {
            self.isolated[at] = true;
            return Ok(());
        }
        if way_out.is_some_and(|v| v >= look.best) {
            self.left_out[at] += std::mem::take(&mut self.waiting[at]);
            return Ok(());
        }
        let second = look.second.max(bound);
        let second = if second == T::LOWEST { way_out } else { Some(second).max(way_out) };
        let sale = self.stock.sell(look.col, row, self.waiting[at], look.weight, second, step);
        self.bids += 1;
        let price = self.stock.price[look.col as usize];
        if price > T::LIMIT {
            return Err(MatchError::PricesOutOfRange);
        }
        self.market.set(look.col as usize, &self.stock.price);
        self.waiting[at] -= sale.units;
        if sale.before != NOBODY {
            self.waiting[sale.before as usize] += sale.units;
            if sale.before != row {
                self.queue.push_back(sale.before);
            }
        }
        Ok(())
    }

    fn refill(&mut self, row: usize, exactly: bool) {
        self.refills += 1;
        let line = row_of(self.task.weights, self.task.rows[row].0 as usize, &mut self.buffer);
        let (slot, price) = (self.lists.slot(row), &self.stock.price);
        if exactly {
            self.maker.refill_exactly(slot, line, &self.market, price);
        } else {
            self.maker.refill(slot, line, &self.market, price);
        }
    }

    /// Makes the lists of all rows at the prices of now. `hopes` are rough values that enough columns
    /// exceed, where they are known; a row for which it is too high gets a shorter list.
    pub(crate) fn fill_lists(&mut self, keep: usize, hopes: &[i32]) {
        let (market, task) = (&self.market, self.task);
        self.refills += task.rows.len() as u64;
        let mut rows = (0..).zip(task.rows.iter());
        std::thread::scope(|scope| {
            let stretches = self.lists.stretches(task.threads);
            let alone = stretches.len() <= 1;
            for slots in stretches {
                let rows: Vec<(u32, i32)> = rows
                    .by_ref()
                    .take(slots.len())
                    .map(|(at, &(row, _))| (row, hopes.get(at).copied().unwrap_or(FLOOR)))
                    .collect();
                let work = move || {
                    let (mut maker, mut buffer) = (Maker::new(keep), Vec::new());
                    for (slot, (row, hope)) in slots.into_iter().zip(rows) {
                        let line = row_of(task.weights, row as usize, &mut buffer);
                        maker.fill(slot, line, market, hope);
                    }
                };
                if alone {
                    work();
                } else {
                    scope.spawn(work);
                }
            }
        });
    }
}
