//! Longer lists for the search: as long as a row turned out to need.
//!
//! Most rows need a few dozen columns in a search, some need a thousand, and the same ones search
//! after search. So each row starts with a copy of its short list, and when a search comes beyond
//! that, the row is read and much of what was found is kept, as far as there is room. As in the
//! short lists, prices never fall, so what a list knows stays true. Weights are kept as they were
//! given, which takes half the room: a search waits for memory more than it computes.

use crate::lists::Lists;
use crate::market::Market;
use crate::scalar::{Scalar, Tick};
use crate::scan::{Candidates, FLOOR};

/// Edges that are looked at together.
const GROUP: usize = 8;
/// Edges for each row, on the average, that there is room for beside the short lists.
const ROOM: usize = if cfg!(test) { 24 } else { 384 };
/// The longest list kept.
const LONGEST: usize = if cfg!(test) { 64 } else { 2048 };
/// A list that is too short grows by this factor.
const GROWTH: usize = 2;

/// Some edges of one row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Group<S, T> {
    /// No edge here or in the groups that follow was worth more when the list was made.
    pub(crate) then: T,
    weights: [S; GROUP],
    cols: [u32; GROUP],
}

impl<S: Scalar, T: Tick> Group<S, T> {
    /// A group of at least one edge; the places left over repeat the first.
    fn of(then: T, edges: &[(u32, S)]) -> Self {
        let edge = |at: usize| *edges.get(at).unwrap_or(&edges[0]);
        Self {
            then,
            weights: std::array::from_fn(|at| edge(at).1),
            cols: std::array::from_fn(|at| edge(at).0),
        }
    }

    /// Columns and weights.
    #[inline]
    pub(crate) fn edges(&self) -> impl Iterator<Item = (u32, S)> {
        self.cols.iter().copied().zip(self.weights.iter().copied())
    }
}

/// Where a list lies, in groups.
#[derive(Debug, Clone, Copy)]
struct Place {
    from: usize,
    len: u32,
    /// How long the list may become without being moved.
    room: u32,
}

/// The lists of all rows.
#[derive(Debug)]
pub(crate) struct LongLists<S, T> {
    /// Allotted once: what is not used costs no memory.
    groups: Vec<Group<S, T>>,
    most: usize,
    places: Vec<Place>,
    /// Places that lists have left, by the power of two that is their room.
    left: Vec<Vec<usize>>,
    /// No column outside the list is worth more; [`Tick::LOWEST`] when none is left out.
    bound: Vec<T>,
}

impl<S: Scalar, T: Tick> LongLists<S, T> {
    /// Copies of the short lists; `weight` gives the weight of a row's column.
    pub(crate) fn new(short: &Lists<T>, rows: usize, weight: impl Fn(usize, u32) -> S) -> Self {
        let base: usize = (0..rows).map(|row| short.edges(row).len().div_ceil(GROUP)).sum();
        let most = base + rows * ROOM / GROUP;
        let mut lists = Self {
            groups: Vec::with_capacity(most),
            most,
            places: Vec::with_capacity(rows),
            left: vec![Vec::new(); u32::BITS as usize],
            bound: (0..rows).map(|row| short.bound(row)).collect(),
        };
        let mut edges = Vec::with_capacity(GROUP);
        for row in 0..rows {
            let from = lists.groups.len();
            for entries in short.edges(row).chunks(GROUP) {
                edges.clear();
                edges.extend(entries.iter().map(|e| (e.col, weight(row, e.col))));
                lists.groups.push(Group::of(entries[0].then, &edges));
            }
            #[expect(clippy::cast_possible_truncation, reason = "a short list is short")]
            let len = (lists.groups.len() - from) as u32;
            lists.places.push(Place { from, len, room: len });
        }
        lists
    }

    /// The list of a row from one of its groups on.
    #[inline]
    pub(crate) fn rest(&self, row: usize, first: usize) -> &[Group<S, T>] {
        let Place { from, len, .. } = self.places[row];
        &self.groups[from + first..from + len as usize]
    }

    #[inline]
    pub(crate) fn bound(&self, row: usize) -> T {
        self.bound[row]
    }

    /// Keeps the best of what a scan of the row found: `least` columns, or more where that makes the
    /// list much longer than it was. False where there is no room for so many.
    pub(crate) fn keep(
        &mut self,
        row: usize,
        least: usize,
        found: &mut Candidates,
        line: &[S],
        market: &Market<T>,
    ) -> bool {
        let longer = (GROWTH * GROUP * self.places[row].len as usize).min(LONGEST);
        let count = longer.max(least).next_power_of_two().max(GROUP).min(found.len());
        #[expect(clippy::cast_possible_truncation, reason = "less than there are columns")]
        let len = count.div_ceil(GROUP) as u32;
        if count > LONGEST || !self.make_room(row, len) {
            return false;
        }
        let from = self.places[row].from;
        self.places[row].len = len;
        let mut best = found.leading(count);
        let mut edges = Vec::with_capacity(GROUP);
        for place in &mut self.groups[from..from + len as usize] {
            edges.clear();
            let mut then = None;
            for (rough, col) in best.by_ref().take(GROUP) {
                then.get_or_insert(rough);
                edges.push((col, line[col as usize]));
            }
            *place = Group::of(market.bound_of(then.unwrap_or(FLOOR)), &edges);
        }
        let next = best.next().map(|(rough, _)| rough);
        drop(best);
        let threshold = next.unwrap_or(found.threshold);
        self.bound[row] = if threshold <= FLOOR { T::LOWEST } else { market.bound_of(threshold) };
        true
    }

    /// Moves a list that is to be made anew to where `len` groups fit. False where that is nowhere.
    fn make_room(&mut self, row: usize, len: u32) -> bool {
        let Place { from, room, .. } = self.places[row];
        if len <= room {
            return true;
        }
        let wanted = len.next_power_of_two();
        let place = match self.left[wanted.trailing_zeros() as usize].pop() {
            Some(place) => place,
            None if self.groups.len() + wanted as usize > self.most => return false,
            None => {
                let blank = Group::of(T::LOWEST, &[(0, S::ZERO)]);
                let end = self.groups.len();
                self.groups.resize(end + wanted as usize, blank);
                end
            }
        };
        if room.is_power_of_two() {
            self.left[room.trailing_zeros() as usize].push(from);
        }
        self.places[row] = Place { from: place, len: 0, room: wanted };
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::Grid;
    use crate::lists::Maker;
    use crate::weights::{Dense, Weights};
    use proptest::prelude::*;

    const SHORT: usize = 8;

    fn edges_of(lists: &LongLists<f32, i64>, row: usize) -> Vec<(u32, f32)> {
        let mut edges: Vec<_> = lists.rest(row, 0).iter().flat_map(Group::edges).collect();
        edges.sort_unstable_by_key(|&(col, _)| col);
        edges.dedup();
        edges
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Lists grow, move and are left, until there is no room; what each of them says stays true.
        #[test]
        fn a_list_holds_what_is_best_and_bounds_the_rest(seed in 1u64..1 << 40,
            cols in 1usize..90, steps in prop::collection::vec((0usize..6, 0usize..70, 0i64..40), 1..40)) {
            let rows = 6;
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                usize::try_from(state >> 44).unwrap()
            };
            let data: Vec<f32> = (0..rows * cols).map(|_| (next() % 32) as f32 / 32.0).collect();
            let weights = Dense::new(rows, cols, &data).unwrap();
            let grid = Grid::of(&weights, false).unwrap();
            let mut price = vec![0i64; cols];
            let mut market = Market::new(grid, 4, &price, &vec![1; cols]);
            let mut short = Lists::new(rows, SHORT.min(cols));
            for row in 0..rows {
                let line = weights.row(row).unwrap();
                Maker::new(SHORT.min(cols)).refill(short.slot(row), line, &market, &price);
            }
            let mut lists =
                LongLists::new(&short, rows, |row, col| data[row * cols + col as usize]);
            let mut found = Candidates::new(cols);
            for (row, least, rise) in steps {
                let line = weights.row(row).unwrap();
                found.start(FLOOR);
                f32::scan(line, &market.rough_price, &market.rough, &mut found);
                let before = edges_of(&lists, row);
                if lists.keep(row, least, &mut found, line, &market) {
                    prop_assert!(edges_of(&lists, row).len() >= least.min(cols));
                } else {
                    prop_assert_eq!(edges_of(&lists, row), before);
                }
                let col = next() % cols;
                price[col] += rise << 20;
                market.set(col, &price);
                for row in 0..rows {
                    let worth = |col: usize| market.weight(data[row * cols + col]) - price[col];
                    let on_list = edges_of(&lists, row);
                    for &(col, weight) in &on_list {
                        prop_assert_eq!(weight, data[row * cols + col as usize]);
                    }
                    for col in 0..cols {
                        let left_out = on_list.iter().all(|&(on, _)| on as usize != col);
                        prop_assert!(!left_out || worth(col) <= lists.bound(row));
                    }
                    let mut last = i64::MAX;
                    for group in lists.rest(row, 0) {
                        prop_assert!(group.then <= last);
                        prop_assert!(group.then >= lists.bound(row));
                        last = group.then;
                        for (col, _) in group.edges() {
                            prop_assert!(worth(col as usize) <= group.then);
                        }
                    }
                }
            }
            prop_assert!(lists.groups.len() <= lists.most);
        }
    }
}
