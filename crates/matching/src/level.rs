//! The level: the common price of everything unsold.
//!
//! In an optimal solution with unsold column units these cost nothing and no price is lower. Between
//! phases columns lose their holders at all sorts of prices. Lowering those would break the short
//! lists, which rely on prices that only rise; so zero is moved up instead. Rows that hold something
//! cheaper than the new level lose it, and bid again.

use crate::auction::Auction;
use crate::scalar::Tick;
use crate::stock::NOBODY;
use crate::weights::Weights;

impl<W: Weights, T: Tick> Auction<'_, W, T> {
    /// Raises the level to where it can meet the prices of what is unsold; true when rows must bid
    /// again. `at_once` goes to the highest such price, after which nothing is left to raise.
    pub(crate) fn raise_level(&mut self, eps: T, at_once: bool) -> bool {
        let level = self.level;
        let unsold = self.stock.lots().filter(|(_, lot)| lot.row == NOBODY);
        let mut above: Vec<(T, i64)> = unsold
            .filter(|(_, lot)| lot.price > level)
            .map(|(_, lot)| (lot.price, i64::from(lot.count)))
            .collect();
        let Some(&(highest, _)) = above.iter().max() else {
            return false;
        };
        let meeting = if at_once { highest } else { self.meeting_price(&mut above, highest) };
        self.lift((meeting + eps).min(highest));
        true
    }

    /// The lowest price above the level at which as many row units are on the move as column units
    /// are unsold beyond it: those that hold something cheaper, and those left unmatched that would
    /// rather come back.
    fn meeting_price(&self, events: &mut Vec<(T, i64)>, highest: T) -> T {
        let mut open: i64 = events.iter().map(|&(_, count)| count).sum();
        let sold = self.stock.lots().filter(|(_, lot)| lot.row != NOBODY && lot.price < highest);
        events.extend(sold.map(|(_, lot)| (lot.price, -i64::from(lot.count))));
        if let Some(way_out) = self.way_out {
            for row in (0..self.left_out.len()).filter(|&row| self.left_out[row] > 0) {
                let best = self.lists.look(row, &self.stock.price).best.max(self.lists.bound(row));
                let back = way_out - best;
                if best > T::LOWEST && back < highest {
                    events.push((back, -i64::from(self.left_out[row])));
                }
            }
        }
        events.sort_unstable();
        let mut moving = 0;
        for group in events.chunk_by(|a, b| a.0 == b.0) {
            open -= group.iter().map(|&(_, count)| count.max(0)).sum::<i64>();
            moving -= group.iter().map(|&(_, count)| count.min(0)).sum::<i64>();
            if moving >= open {
                return group[0].0.max(self.level);
            }
        }
        highest
    }

    fn lift(&mut self, target: T) {
        self.level = target;
        let waiting = &mut self.waiting;
        let queue = &mut self.queue;
        let moved = self.stock.alter(|lot| {
            if lot.price < target {
                if lot.row != NOBODY {
                    waiting[lot.row as usize] += lot.count;
                    queue.push_back(lot.row);
                    lot.row = NOBODY;
                }
                lot.price = target;
                return true;
            }
            false
        });
        for col in moved {
            self.market.set(col as usize, &self.stock.price);
        }
        for row in 0..self.left_out.len() {
            if self.left_out[row] > 0 {
                self.waiting[row] += std::mem::take(&mut self.left_out[row]);
                #[expect(clippy::cast_possible_truncation, reason = "rows are counted in u32")]
                self.queue.push_back(row as u32);
            }
        }
    }
}
