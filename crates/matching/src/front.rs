//! How far a search has come: the distance of every column, and what comes into sight next.

use crate::queue::Queue;
use crate::scalar::Tick;
use crate::stock::NOBODY;

/// With no more free columns than this, the search knows early where it will end.
const TAIL: usize = 64;

/// What is next in the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A column is reached.
    Column(u32),
    /// A row would rather be left out.
    Out(u32),
    /// More of a row's list comes into sight.
    Row(u32),
    /// What is beyond the list of a row may matter.
    Beyond(u32),
}

/// A column as the search sees it.
#[derive(Debug, Clone, Copy)]
struct Place<T> {
    /// The largest number until the column is reached.
    distance: T,
    price: T,
}

/// One search; empty between searches.
#[derive(Debug)]
pub(crate) struct Front<T> {
    places: Vec<Place<T>>,
    /// The row from which each column is reached.
    from: Vec<u32>,
    is_free: Vec<bool>,
    /// Columns that nobody holds, and which of them are reached.
    free: usize,
    met: Vec<u32>,
    touched: Vec<u32>,
    /// Nothing at this distance or beyond can matter any more.
    cap: T,
    queue: Queue<T, Event>,
}

impl<T: Tick> Front<T> {
    pub(crate) fn new(price: &[T], is_free: Vec<bool>) -> Self {
        let unreached = |&price: &T| Place { distance: -T::LOWEST, price };
        Self {
            places: price.iter().map(unreached).collect(),
            from: vec![NOBODY; price.len()],
            free: is_free.iter().filter(|&&free| free).count(),
            is_free,
            met: Vec::new(),
            touched: Vec::new(),
            cap: -T::LOWEST,
            queue: Queue::new(),
        }
    }

    #[inline]
    pub(crate) fn distance(&self, col: u32) -> T {
        self.places[col as usize].distance
    }

    /// The row from which a column is reached.
    #[inline]
    pub(crate) fn from(&self, col: u32) -> u32 {
        self.from[col as usize]
    }

    /// How many columns nobody holds.
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// `row` at `distance` weighs a column; `profit` is what it has.
    #[inline]
    pub(crate) fn weigh(&mut self, col: u32, row: u32, weight: T, distance: T, profit: T) {
        let place = &mut self.places[col as usize];
        let reached = distance + (profit - (weight - place.price)).max(T::ZERO);
        if reached >= place.distance || reached >= self.cap {
            return;
        }
        let first = place.distance == -T::LOWEST;
        place.distance = reached;
        self.from[col as usize] = row;
        self.queue.push(reached, Event::Column(col));
        if first {
            self.touched.push(col);
        }
        if self.is_free[col as usize] {
            self.meet(col, first);
        }
    }

    /// Once every free column is reached, the search ends with the farthest of them.
    fn meet(&mut self, col: u32, first: bool) {
        if first {
            self.met.push(col);
        }
        if self.met.len() == self.free && self.free <= TAIL {
            let farthest = self.met.iter().map(|&col| self.places[col as usize].distance).max();
            self.cap = farthest.map_or(self.cap, |d| (d + T::ONE).min(self.cap));
        }
    }

    /// Something other than a column comes into sight.
    #[inline]
    pub(crate) fn expect(&mut self, distance: T, event: Event) {
        if distance < self.cap {
            self.queue.push(distance, event);
        }
    }

    #[inline]
    pub(crate) fn next(&mut self) -> Option<(T, Event)> {
        self.queue.pop()
    }

    /// Between searches: a column has become dearer.
    pub(crate) fn set_price(&mut self, col: u32, price: T) {
        self.places[col as usize].price = price;
    }

    /// Between searches: a free column has been taken.
    pub(crate) fn taken(&mut self, col: u32) {
        self.free -= usize::from(std::mem::take(&mut self.is_free[col as usize]));
    }

    pub(crate) fn clear(&mut self) {
        for &col in &self.touched {
            self.places[col as usize].distance = -T::LOWEST;
        }
        self.touched.clear();
        self.met.clear();
        self.cap = -T::LOWEST;
        self.queue.clear();
    }
}
