//! Places the few rows that a small change has left without a column, and touches little else.
//!
//! Phases of falling eps push prices up by far more than a small change asks for, and bring most of
//! the rows into motion again. Here rows without a column look for the nearest way to a free one:
//! from a row to the columns on its short list, from a column to the row that holds it, and on. The
//! length of a step is what the row loses by it. All rows search at once, each grows a tree, and
//! where a tree meets a free column everyone on the way moves up by one. Prices rise by as much as
//! each column was nearer than the end of the search, which is the least that keeps every other row
//! content with what it holds; as everywhere in this crate they never fall.
//!
//! A short list is enough until the search reaches as far as the list's bound; then the row is read.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::auction::Auction;
use crate::error::MatchError;
use crate::scalar::{Scalar, Tick};
use crate::scan::{ABSENT, Candidates, FLOOR};
use crate::stock::{NOBODY, Stock};
use crate::weights::{Weights, row_of};

/// Mark of a row that was read in this search.
const READ: u32 = u32::MAX;
/// At most one row in this many may be without a column.
const FEW: usize = 6;
/// New columns that a row is read for, at least; up to four times as many are welcome.
const FRESH: usize = 256;
/// Columns of a list that are looked at together.
const STRIDE: usize = 4;
/// With no more free columns than this, the search knows early where it will end.
const TAIL: usize = 64;

/// What is next in the search; at equal distance in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A column is reached.
    Column(u32),
    /// A row would rather be left out.
    Out(u32),
    /// More of a row's list comes into sight.
    Row(u32),
    /// What is beyond the list of a row may matter.
    Beyond(u32),
}

/// Where the search for one row ended.
#[derive(Debug, Clone, Copy)]
enum End {
    Column(u32),
    Out(u32),
}

/// One search, and what is kept between searches.
#[derive(Debug)]
struct Search<T> {
    /// Distance of each column reached; the largest number elsewhere.
    dist: Vec<T>,
    /// The row from which each column is reached.
    from: Vec<u32>,
    touched: Vec<u32>,
    settled: Vec<u32>,
    /// The row at the root of each row's tree.
    root: Vec<u32>,
    /// Distance and profit of each row in a tree.
    row: Vec<(T, T)>,
    /// How much of each row's list has been looked at.
    next: Vec<u32>,
    /// The column of each row.
    held: Vec<u32>,
    done: Vec<bool>,
    /// Columns that nobody holds, and how many of them are reached.
    free: usize,
    met: Vec<u32>,
    /// Nothing at this distance or beyond can matter any more.
    cap: T,
    heap: BinaryHeap<Reverse<(T, Event)>>,
    /// How far below the list the next columns usually lie.
    depth: T,
    columns: Vec<u32>,
    found: Candidates,
}

impl<W: Weights, T: Tick> Auction<'_, W, T> {
    /// Whether every row and every column stands for one unit, and only few rows are without a
    /// column at the last eps.
    pub(crate) fn few_are_waiting(&mut self) -> bool {
        let single = self.task.rows.iter().all(|&(_, units)| units == 1)
            && self.task.capacity.iter().all(|&units| units <= 1);
        if !single {
            return false;
        }
        self.release(T::ONE);
        self.waiting.iter().filter(|&&units| units > 0).count() * FEW <= self.waiting.len()
    }

    /// The last phase, for few rows without a column. False where that is not enough: a column is
    /// left unsold above the level, which takes larger steps to mend.
    pub(crate) fn repair(&mut self) -> Result<bool, MatchError> {
        let mut search = Search::new(self);
        loop {
            let roots = self.roots();
            if roots.is_empty() || !self.search(&mut search, &roots)? {
                break;
            }
        }
        let level = self.level;
        let dear = self.stock.lots().any(|(_, lot)| lot.row == NOBODY && lot.price > level);
        let waiting = (0..self.waiting.len()).any(|r| self.waiting[r] > 0 && !self.isolated[r]);
        let left = waiting || (self.loose && dear);
        Ok(!left)
    }

    /// The rows without a column whose best is known; those without any edge are set aside, those
    /// that would rather stay out do.
    fn roots(&mut self) -> Vec<u32> {
        let mut roots = Vec::new();
        for row in 0..self.waiting.len() {
            if self.waiting[row] == 0 || self.isolated[row] {
                continue;
            }
            let way_out = self.way_out.map(|v| v - self.level);
            let best = self.look(row, way_out).best;
            if best == T::LOWEST && way_out.is_none() {
                self.isolated[row] = true;
            } else if way_out.is_some_and(|v| v >= best) {
                self.left_out[row] += std::mem::take(&mut self.waiting[row]);
            } else {
                #[expect(clippy::cast_possible_truncation, reason = "rows are counted in u32")]
                roots.push(row as u32);
            }
        }
        roots
    }

    /// One search from all roots at once. False when it placed nobody.
    fn search(&mut self, s: &mut Search<T>, roots: &[u32]) -> Result<bool, MatchError> {
        let started = roots.len();
        for &root in roots {
            s.done[root as usize] = false;
            let profit = self.lists.look(root as usize, &self.stock.price).best;
            self.enter(s, root, root, T::ZERO, profit);
        }
        let mut ends: Vec<End> = Vec::new();
        let mut reach = T::ZERO;
        let mut patience = usize::MAX;
        let mut free = s.free;
        while let Some(Reverse((distance, event))) = s.heap.pop() {
            let end = match event {
                Event::Column(col) => {
                    if distance > s.dist[col as usize] {
                        continue;
                    }
                    let from = s.from[col as usize];
                    let root = s.root[from as usize];
                    let holder = self.stock.holder(col);
                    if holder != NOBODY {
                        s.settled.push(col);
                        let profit = self.stock.profit(col);
                        self.enter(s, holder, root, distance, profit);
                        if s.settled.len() > patience {
                            reach = distance;
                            break;
                        }
                        continue;
                    }
                    End::Column(col)
                }
                Event::Row(row) => {
                    self.look_on(s, row, distance);
                    continue;
                }
                Event::Beyond(row) => {
                    self.look_beyond(s, row, distance);
                    continue;
                }
                Event::Out(row) => End::Out(row),
            };
            let root = match end {
                End::Column(col) => s.root[s.from[col as usize] as usize],
                End::Out(row) => s.root[row as usize],
            };
            reach = distance;
            if std::mem::replace(&mut s.done[root as usize], true) {
                // Nothing unsold may cost more than the level, and nobody may be worth less than
                // the way out.
                if self.loose {
                    break;
                }
            } else {
                ends.push(end);
                patience = patience.min(2 * s.settled.len() + 200);
            }
            if let End::Column(col) = end {
                s.settled.push(col);
                free -= 1;
            }
            if ends.len() == started || free == 0 {
                break;
            }
        }
        if ends.is_empty() {
            s.clear();
            return Ok(false);
        }
        self.raise_prices(s, reach)?;
        for end in &ends {
            self.move_up(s, *end);
            s.free -= usize::from(matches!(end, End::Column(_)));
        }
        s.clear();
        Ok(true)
    }

    /// A row joins a tree.
    fn enter(&mut self, s: &mut Search<T>, row: u32, root: u32, distance: T, profit: T) {
        let at = row as usize;
        s.root[at] = root;
        s.row[at] = (distance, profit);
        s.next[at] = 0;
        self.look_on(s, row, distance);
        if let Some(way_out) = self.way_out {
            let far = distance + (profit - (way_out - self.level)).max(T::ZERO);
            s.expect(far, Event::Out(row));
        }
    }

    /// Reaches the columns on a row's list that are no farther than the search has come, and a few
    /// more.
    fn look_on(&self, s: &mut Search<T>, row: u32, now: T) {
        let at = row as usize;
        let (distance, profit) = s.row[at];
        let edges = self.lists.edges(at);
        let first = s.next[at] as usize;
        for (place, edge) in (0u32..).zip(edges).skip(first) {
            let nearest = distance + (profit - edge.then).max(T::ZERO);
            if nearest > now && place as usize >= first + STRIDE {
                s.next[at] = place;
                s.expect(nearest, Event::Row(row));
                return;
            }
            let value = edge.weight - self.stock.price[edge.col as usize];
            s.reach(&self.stock, edge.col, row, distance + (profit - value).max(T::ZERO));
        }
        let bound = self.lists.bound(at);
        if bound > T::LOWEST {
            s.expect(distance + (profit - bound).max(T::ZERO), Event::Beyond(row));
        }
    }

    /// Reads a row whose list no longer reaches far enough, for columns a little farther than the
    /// search has come.
    fn look_beyond(&mut self, s: &mut Search<T>, row: u32, now: T) {
        let at = row as usize;
        let (distance, profit) = s.row[at];
        self.refills += 1;
        let line = row_of(self.task.weights, self.task.rows[at].0 as usize, &mut self.buffer);
        let near = distance + profit - now;
        s.found.start(self.market.rough_of(near - s.depth));
        W::Scalar::scan(line, &self.market.rough_price, &self.market.rough, &mut s.found);
        let threshold = s.found.threshold;
        let bound = if threshold <= FLOOR { T::LOWEST } else { self.market.bound_of(threshold) };
        if s.next[at] != READ && s.found.len() >= self.lists.edges(at).len() {
            self.lists.slot(at).write(&mut s.found, line, &self.market);
            s.next[at] = READ;
        }
        let far = distance + (profit - bound).max(T::ZERO);
        let all = bound == T::LOWEST || far <= now;
        let mut fresh = 0;
        s.columns.clear();
        if far <= now && bound > T::LOWEST {
            // So many near ties that a rough look gets no farther: every column, exactly.
            let taking_part = (0u32..).zip(line).zip(&self.market.rough_price);
            let allowed =
                taking_part.filter(|((_, x), rough)| **rough != ABSENT && x.to_f64().is_finite());
            s.columns.extend(allowed.map(|((col, _), _)| col));
        } else {
            for (rough, col) in s.found.items() {
                let value = self.market.bound_of(rough);
                fresh += usize::from(value <= near);
                if distance + (profit - value) < s.dist[col as usize] {
                    s.columns.push(col);
                }
            }
        }
        for at in 0..s.columns.len() {
            let col = s.columns[at];
            let value = self.market.weight(line[col as usize]) - self.stock.price[col as usize];
            s.reach(&self.stock, col, row, distance + (profit - value).max(T::ZERO));
        }
        if fresh < FRESH {
            s.depth = s.depth + s.depth.shr(2) + T::ONE;
        } else if fresh > 4 * FRESH {
            s.depth = s.depth - s.depth.shr(3);
        }
        if !all {
            s.expect(far, Event::Beyond(row));
        }
    }

    /// Everything nearer than `reach` becomes dearer by the difference.
    fn raise_prices(&mut self, s: &Search<T>, reach: T) -> Result<(), MatchError> {
        for &col in &s.settled {
            let by = reach - s.dist[col as usize];
            if by > T::ZERO {
                if self.stock.raise(col, by) > T::LIMIT {
                    return Err(MatchError::PricesOutOfRange);
                }
                self.market.set(col as usize, &self.stock.price);
            }
        }
        Ok(())
    }

    /// Everyone on the way from a root to the end takes the column before him.
    fn move_up(&mut self, s: &mut Search<T>, end: End) {
        let mut one = [W::Scalar::ZERO];
        let mut free = match end {
            End::Column(col) => col,
            End::Out(row) => {
                let at = row as usize;
                self.left_out[at] += 1;
                let col = std::mem::replace(&mut s.held[at], NOBODY);
                if col == NOBODY {
                    self.waiting[at] = 0;
                    return;
                }
                col
            }
        };
        loop {
            let row = s.from[free as usize];
            let at = row as usize;
            self.task.weights.fill(self.task.rows[at].0 as usize, free as usize, &mut one);
            self.stock.give(free, row, self.market.weight(one[0]));
            let before = std::mem::replace(&mut s.held[at], free);
            if before == NOBODY {
                self.waiting[at] = 0;
                return;
            }
            free = before;
        }
    }
}

impl<T: Tick> Search<T> {
    fn new<W: Weights>(auction: &Auction<'_, W, T>) -> Self {
        let (rows, cols) = (auction.waiting.len(), auction.stock.price.len());
        let mut held = vec![NOBODY; rows];
        let mut free = 0;
        for (col, lot) in auction.stock.lots() {
            match held.get_mut(lot.row as usize) {
                Some(place) => *place = col,
                None => free += 1,
            }
        }
        Self {
            dist: vec![-T::LOWEST; cols],
            from: vec![NOBODY; cols],
            touched: Vec::new(),
            settled: Vec::new(),
            root: vec![NOBODY; rows],
            row: vec![(T::ZERO, T::ZERO); rows],
            next: vec![0; rows],
            held,
            done: vec![false; rows],
            free,
            met: Vec::new(),
            cap: -T::LOWEST,
            heap: BinaryHeap::new(),
            columns: Vec::new(),
            depth: auction.span.shr(10),
            found: Candidates::new(cols.max(1)),
        }
    }

    #[inline]
    fn reach(&mut self, stock: &Stock<T>, col: u32, from: u32, distance: T) {
        let dist = &mut self.dist[col as usize];
        if distance >= *dist || distance >= self.cap {
            return;
        }
        let first = *dist == -T::LOWEST;
        *dist = distance;
        self.from[col as usize] = from;
        self.heap.push(Reverse((distance, Event::Column(col))));
        if first {
            self.touched.push(col);
        }
        if stock.holder(col) == NOBODY {
            if first {
                self.met.push(col);
            }
            // Once every free column is reached, the search ends with the farthest of them.
            if self.met.len() == self.free && self.free <= TAIL {
                let farthest = self.met.iter().map(|&col| self.dist[col as usize]).max();
                self.cap = farthest.map_or(self.cap, |d| (d + T::ONE).min(self.cap));
            }
        }
    }

    /// Something other than a column comes into sight.
    fn expect(&mut self, distance: T, event: Event) {
        if distance < self.cap {
            self.heap.push(Reverse((distance, event)));
        }
    }

    fn clear(&mut self) {
        for &col in &self.touched {
            self.dist[col as usize] = -T::LOWEST;
        }
        self.touched.clear();
        self.settled.clear();
        self.met.clear();
        self.cap = -T::LOWEST;
        self.heap.clear();
    }
}
