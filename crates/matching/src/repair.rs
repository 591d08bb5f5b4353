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
//! A list is enough until the search reaches as far as the list's bound; then the row is read, and
//! what it was read for is kept for the searches to come (see `long`).

use crate::auction::Auction;
use crate::error::MatchError;
use crate::front::{Event, Front};
use crate::long::LongLists;
use crate::market::Market;
use crate::scalar::{Scalar, Tick};
use crate::scan::{ABSENT, Candidates, FLOOR};
use crate::stock::NOBODY;
use crate::weights::{Weights, row_of};

/// At most one row in this many may be without a column.
const FEW: usize = 6;
/// New columns that a row is read for, at least; up to four times as many are welcome.
const FRESH: usize = if cfg!(test) { 4 } else { 128 };

/// Where the search for one row ended.
#[derive(Debug, Clone, Copy)]
enum End {
    Column(u32),
    Out(u32),
}

/// A row in a tree.
#[derive(Debug, Clone, Copy)]
struct Branch<T> {
    distance: T,
    profit: T,
    /// The row at the root of the tree.
    root: u32,
    /// The group of the row's list to be looked at next.
    next: u32,
}

/// One search, and what is kept between searches.
#[derive(Debug)]
struct Search<S, T> {
    front: Front<T>,
    lists: LongLists<S, T>,
    settled: Vec<u32>,
    rows: Vec<Branch<T>>,
    /// The column of each row.
    held: Vec<u32>,
    done: Vec<bool>,
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
        let mut roots = self.roots();
        let mut search = Search::new(self);
        while !roots.is_empty() && self.search(&mut search, &roots)? {
            roots = self.roots();
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
    fn search(&mut self, s: &mut Search<W::Scalar, T>, roots: &[u32]) -> Result<bool, MatchError> {
        let started = roots.len();
        for &root in roots {
            s.done[root as usize] = false;
            let profit = self.lists.look(root as usize, &self.stock.price).best;
            self.enter(s, root, root, T::ZERO, profit);
        }
        let mut ends: Vec<End> = Vec::new();
        let mut reach = T::ZERO;
        let mut patience = usize::MAX;
        let mut free = s.front.free();
        while let Some((distance, event)) = s.front.next() {
            let end = match event {
                Event::Column(col) => {
                    if distance > s.front.distance(col) {
                        continue;
                    }
                    let root = s.root_of(col);
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
                    s.look_on(&self.market, row, distance);
                    continue;
                }
                Event::Beyond(row) => {
                    self.look_beyond(s, row, distance);
                    continue;
                }
                Event::Out(row) => End::Out(row),
            };
            let root = match end {
                End::Column(col) => s.root_of(col),
                End::Out(row) => s.rows[row as usize].root,
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
        }
        s.clear();
        Ok(true)
    }

    /// A row joins a tree.
    fn enter(&mut self, s: &mut Search<W::Scalar, T>, row: u32, root: u32, distance: T, profit: T) {
        s.rows[row as usize] = Branch { distance, profit, root, next: 0 };
        s.look_on(&self.market, row, distance);
        if let Some(way_out) = self.way_out {
            let far = distance + (profit - (way_out - self.level)).max(T::ZERO);
            s.front.expect(far, Event::Out(row));
        }
    }

    /// Reads a row whose list no longer reaches far enough, for columns a little farther than the
    /// search has come.
    fn look_beyond(&mut self, s: &mut Search<W::Scalar, T>, row: u32, now: T) {
        let at = row as usize;
        let Branch { distance, profit, .. } = s.rows[at];
        self.refills += 1;
        let line = row_of(self.task.weights, self.task.rows[at].0 as usize, &mut self.buffer);
        let near = distance + profit - now;
        s.found.start(self.market.rough_of(near - s.depth));
        W::Scalar::scan(line, &self.market.rough_price, &self.market.rough, &mut s.found);
        let threshold = s.found.threshold;
        let bound = if threshold <= FLOOR { T::LOWEST } else { self.market.bound_of(threshold) };
        let far = distance + (profit - bound).max(T::ZERO);
        let stuck = far <= now && bound > T::LOWEST;
        let fresh = s.found.items().filter(|&(r, _)| self.market.bound_of(r) <= near).count();
        if fresh < FRESH {
            s.depth = s.depth + s.depth.shr(2) + T::ONE;
        } else if fresh > 4 * FRESH {
            s.depth = s.depth - s.depth.shr(3);
        }
        let least = s.found.len() - fresh + FRESH;
        if !stuck && s.lists.keep(at, least, &mut s.found, line, &self.market) {
            // Unless those kept are all as near as those before.
            let bound = s.lists.bound(at);
            if bound == T::LOWEST || distance + (profit - bound) > now {
                s.rows[at].next = 0;
                s.look_on(&self.market, row, now);
                return;
            }
        }
        s.columns.clear();
        if stuck {
            // So many near ties that a rough look gets no farther: every column, exactly.
            let taking_part = (0u32..).zip(line).zip(&self.market.rough_price);
            let allowed =
                taking_part.filter(|((_, x), rough)| **rough != ABSENT && x.to_f64().is_finite());
            s.columns.extend(allowed.map(|((col, _), _)| col));
        } else {
            s.columns.extend(s.found.items().map(|(_, col)| col));
        }
        for &col in &s.columns {
            let weight = self.market.weight(line[col as usize]);
            s.front.weigh(col, row, weight, distance, profit);
        }
        if !stuck && bound > T::LOWEST {
            s.front.expect(far, Event::Beyond(row));
        }
    }

    /// Everything nearer than `reach` becomes dearer by the difference.
    fn raise_prices(&mut self, s: &mut Search<W::Scalar, T>, reach: T) -> Result<(), MatchError> {
        for &col in &s.settled {
            let by = reach - s.front.distance(col);
            if by > T::ZERO {
                let price = self.stock.raise(col, by);
                if price > T::LIMIT {
                    return Err(MatchError::PricesOutOfRange);
                }
                s.front.set_price(col, price);
                self.market.set(col as usize, &self.stock.price);
            }
        }
        Ok(())
    }

    /// Everyone on the way from a root to the end takes the column before him.
    fn move_up(&mut self, s: &mut Search<W::Scalar, T>, end: End) {
        let mut one = [W::Scalar::ZERO];
        let mut free = match end {
            End::Column(col) => {
                s.front.taken(col);
                col
            }
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
            let row = s.front.from(free);
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

impl<S: Scalar, T: Tick> Search<S, T> {
    fn new<W: Weights<Scalar = S>>(auction: &Auction<'_, W, T>) -> Self {
        let (rows, cols) = (auction.waiting.len(), auction.stock.price.len());
        let mut held = vec![NOBODY; rows];
        let mut is_free = vec![false; cols];
        for (col, lot) in auction.stock.lots() {
            match held.get_mut(lot.row as usize) {
                Some(place) => *place = col,
                None => is_free[col as usize] = true,
            }
        }
        let task = auction.task;
        let weight = |row: usize, col: u32| {
            let mut one = [S::ZERO];
            task.weights.fill(task.rows[row].0 as usize, col as usize, &mut one);
            one[0]
        };
        let blank = Branch { distance: T::ZERO, profit: T::ZERO, root: NOBODY, next: 0 };
        Self {
            front: Front::new(&auction.stock.price, is_free),
            lists: LongLists::new(&auction.lists, rows, weight),
            settled: Vec::new(),
            rows: vec![blank; rows],
            held,
            done: vec![false; rows],
            columns: Vec::new(),
            depth: auction.span.shr(10),
            found: Candidates::new(cols.max(1)),
        }
    }

    /// The root of the tree that reached a column.
    fn root_of(&self, col: u32) -> u32 {
        self.rows[self.front.from(col) as usize].root
    }

    /// Reaches the columns on a row's list that are no farther than the search has come, and a few
    /// more.
    fn look_on(&mut self, market: &Market<T>, row: u32, now: T) {
        let at = row as usize;
        let Branch { distance, profit, next, .. } = self.rows[at];
        for (place, group) in (0u32..).zip(self.lists.rest(at, next as usize)) {
            let nearest = distance + (profit - group.then).max(T::ZERO);
            if nearest > now && place > 0 {
                self.rows[at].next = next + place;
                self.front.expect(nearest, Event::Row(row));
                return;
            }
            for (col, weight) in group.edges() {
                self.front.weigh(col, row, market.weight(weight), distance, profit);
            }
        }
        let bound = self.lists.bound(at);
        if bound > T::LOWEST {
            let far = distance + (profit - bound).max(T::ZERO);
            self.front.expect(far, Event::Beyond(row));
        }
    }

    fn clear(&mut self) {
        self.settled.clear();
        self.front.clear();
    }
}

/// With lists as short as they are in tests, so that searches go beyond them all the time.
#[cfg(test)]
mod tests {
    use crate::{Dense, Matching, Options, Warm, solve, verify};
    use proptest::prelude::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695);
            ((self.0 >> 33) % n as u64) as usize
        }
    }

    /// Replicas of a few services and job families with so little noise that most of it ties.
    fn row(cols: usize, ties: usize, random: &mut Random) -> Vec<f32> {
        let service = random.below(4);
        let weigh = |col: usize| (service * 7 + col % 5 * 3) % 11 * 4096 + random.below(ties);
        (0..cols).map(weigh).map(|x| x as f32 / 65536.0).collect()
    }

    fn proved(rows: usize, cols: usize, data: &[f32], options: Options<'_>) -> Matching {
        let weights = Dense::new(rows, cols, data).unwrap();
        let matching = solve(&weights, options).unwrap();
        assert!(verify(&weights, &matching).unwrap().exact);
        matching
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn a_repair_gives_the_value_of_a_cold_start(seed: u64, rows in 12usize..150, more in 0usize..20,
            ties in 2usize..3000, changes in 1usize..12, optional: bool, forbid in 0usize..3) {
            let cols = rows + more.saturating_sub(10);
            let mut random = Random(seed);
            let mut data: Vec<f32> = (0..rows).flat_map(|_| row(cols, ties, &mut random)).collect();
            for _ in 0..forbid * rows {
                data[random.below(rows * cols)] = f32::NEG_INFINITY;
            }
            let options = Options { optional, ..Options::default() };
            let last = proved(rows, cols, &data, options);
            for _ in 0..changes {
                let at = random.below(rows) * cols;
                data[at..at + cols].copy_from_slice(&row(cols, ties, &mut random));
            }
            let warm = Warm { certificate: &last.certificate, rows: &[], cols: &[] };
            let warm = proved(rows, cols, &data, Options { warm: Some(warm), ..options });
            prop_assert_eq!(warm.value, proved(rows, cols, &data, options).value);
        }
    }

    #[test]
    fn searches_go_beyond_their_lists() {
        let (n, mut random) = (300, Random(5));
        let mut data: Vec<f32> = (0..n).flat_map(|_| row(n, 3000, &mut random)).collect();
        let mut last = proved(n, n, &data, Options::default());
        let mut beyond = 0;
        for _ in 0..5 {
            for _ in 0..n / 20 {
                let at = random.below(n) * n;
                data[at..at + n].copy_from_slice(&row(n, 3000, &mut random));
            }
            let warm = Warm { certificate: &last.certificate, rows: &[], cols: &[] };
            let repaired = proved(n, n, &data, Options { warm: Some(warm), ..Options::default() });
            assert_eq!(repaired.value, proved(n, n, &data, Options::default()).value);
            assert_eq!((repaired.effort.phases, repaired.effort.bids), (1, 0));
            beyond += repaired.effort.refills - n as u64;
            last = repaired;
        }
        assert!(beyond > 100, "only {beyond} rows were read beyond their lists");
    }
}
