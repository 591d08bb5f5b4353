//! Where the prices come from before the first bid, and the order of phases.
//!
//! Good prices save most of the work. They come from the last cycle where there was one, and
//! otherwise, for large problems, from the solution of a sample of one row and one column in eight.
//! In both cases it is profits of rows that are carried over, and each column is priced at what it
//! is worth to the row that would gain most by it. This prices columns that are new or have lost
//! their holder like all others; kept at their old prices they would start long price wars.

use crate::auction::{Auction, Task};
use crate::certificate::Side;
use crate::error::MatchError;
use crate::grid::Grid;
use crate::market::Market;
use crate::scalar::{Scalar, Tick};
use crate::scan::{Candidates, FLOOR};
use crate::solve::Options;
use crate::weights::{Owned, Weights, row_of};

/// Columns in a short list. More need fewer reads of rows, but each makes a longer list.
const KEEP: usize = 64;
/// The same after a warm start.
const KEEP_WARM: usize = if cfg!(test) { 8 } else { 64 };
/// From phase to phase eps falls by 2^this.
const FALL: u32 = 3;
/// First eps, as a power of two below the span of the weights: without any knowledge, from a
/// sample, from the last cycle.
const FIRST_COLD: u32 = 3;
const FIRST_SAMPLED: u32 = 9;
const FIRST_WARM: u32 = 12;
/// Last eps of the solution of a sample, whose prices are not right to more than that anyway.
const LAST_IN_SAMPLE: u32 = 15;
/// Rows that are read to see how long a list usually is.
const READ_TO_HOPE: usize = 64;
/// Fewest rows for which a sample pays.
const ROWS_TO_SAMPLE: usize = 512;
/// One row and one column of this many are in the sample.
const SAMPLE: usize = 8;

/// What the last cycle knew of the vertices of this one.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Exponent of the ticks.
    tick_exp: i32,
    /// Profits of those who bid now.
    profits: Vec<Option<i128>>,
    /// Prices of what they bid for.
    prices: Vec<Option<i128>>,
    /// Who bids now and held it then.
    holders: Vec<Option<u32>>,
}

impl Memory {
    /// Reads the warm start in the terms of this cycle.
    pub(crate) fn of<W: Weights>(
        weights: &W,
        options: &Options<'_>,
        rows_bid: bool,
    ) -> Result<Option<Self>, MatchError> {
        let Some(warm) = &options.warm else { return Ok(None) };
        let c = warm.certificate;
        if c.minimize != options.minimize {
            return Ok(None);
        }
        let rows_bid_then = c.bidders == Side::Rows;
        let (then_rows, then_cols) =
            if rows_bid_then { (&c.profits, &c.prices) } else { (&c.prices, &c.profits) };
        let rows = carried("rows", warm.rows, then_rows, weights.rows())?;
        let cols = carried("columns", warm.cols, then_cols, weights.cols())?;
        let (profits, prices) = if rows_bid { (rows, cols) } else { (cols, rows) };
        let mut holders = vec![None; prices.len()];
        if rows_bid == rows_bid_then {
            let (bidders, others) =
                if rows_bid { (warm.rows, warm.cols) } else { (warm.cols, warm.rows) };
            let now = places(bidders, c.profits.len());
            for (at, holder) in holders.iter_mut().enumerate() {
                let then =
                    if others.is_empty() { Some(at) } else { others[at].map(|t| t as usize) };
                let held_by = then.and_then(|t| *c.holders.get(t)?);
                *holder = held_by.and_then(|b| *now.get(b as usize)?);
            }
        }
        Ok(Some(Self { tick_exp: c.tick_exp, profits, prices, holders }))
    }
}

/// For each vertex of then its place now.
fn places(map: &[Option<u32>], then: usize) -> Vec<Option<u32>> {
    if map.is_empty() {
        return (0u32..).take(then).map(Some).collect();
    }
    let mut now = vec![None; then];
    for (at, from) in (0u32..).zip(map) {
        if let Some(place) = from.and_then(|f| now.get_mut(f as usize)) {
            *place = Some(at);
        }
    }
    now
}

fn carried(
    what: &'static str,
    map: &[Option<u32>],
    then: &[i128],
    now: usize,
) -> Result<Vec<Option<i128>>, MatchError> {
    if map.is_empty() {
        if then.len() != now {
            return Err(MatchError::Length { what, expected: now, got: then.len() });
        }
        return Ok(then.iter().copied().map(Some).collect());
    }
    if map.len() != now {
        return Err(MatchError::Length { what, expected: now, got: map.len() });
    }
    let look_up = |(at, from): (usize, &Option<u32>)| match from {
        None => Ok(None),
        Some(from) => match then.get(*from as usize) {
            Some(&value) => Ok(Some(value)),
            None => Err(MatchError::WarmIndex { what, at }),
        },
    };
    map.iter().enumerate().map(look_up).collect()
}

/// Solves to the last tick.
pub(crate) fn run<'a, W: Weights, T: Tick>(
    task: &'a Task<'a, W>,
    grid: &Grid,
    scale_bits: u32,
    memory: Option<&Memory>,
    phases: &mut u32,
) -> Result<Auction<'a, W, T>, MatchError> {
    match memory.and_then(|memory| warm(task, grid, scale_bits, memory)) {
        Some(mut auction) => {
            if auction.few_are_waiting() {
                *phases += 1;
                if auction.repair()? {
                    return Ok(auction);
                }
            }
            phases_down(auction, FIRST_WARM, T::ONE, phases)
        }
        None => cold(task, grid, scale_bits, T::ONE, phases),
    }
}

/// Starts without knowledge, or from a sample.
fn cold<'a, W: Weights, T: Tick>(
    task: &'a Task<'a, W>,
    grid: &Grid,
    scale_bits: u32,
    last: T,
    phases: &mut u32,
) -> Result<Auction<'a, W, T>, MatchError> {
    let single = task.rows.iter().all(|&(_, c)| c == 1) && task.capacity.iter().all(|&c| c <= 1);
    if single && task.rows.len() >= ROWS_TO_SAMPLE {
        return from_sample(task, grid, scale_bits, last, phases);
    }
    let price = vec![T::ZERO; task.capacity.len()];
    let market = Market::new(grid.clone(), scale_bits, &price, task.capacity);
    let auction = Auction::new(task, market, price, T::ZERO, keep(task, KEEP));
    phases_down(auction, FIRST_COLD, last, phases)
}

/// Solves for a sample first.
fn from_sample<'a, W: Weights, T: Tick>(
    task: &'a Task<'a, W>,
    grid: &Grid,
    scale_bits: u32,
    last: T,
    phases: &mut u32,
) -> Result<Auction<'a, W, T>, MatchError> {
    let taking_part = (0u32..).zip(task.capacity).filter(|&(_, &c)| c > 0).map(|(col, _)| col);
    let rows = thinned(&task.rows.iter().map(|&(row, _)| row).collect::<Vec<_>>());
    let cols = thinned(&taking_part.collect::<Vec<_>>());
    let sample = Owned::sampled(task.weights, &rows, &cols);
    let units: Vec<(u32, u32)> = (0u32..).take(rows.len()).map(|row| (row, 1)).collect();
    let small = Task {
        weights: &sample,
        rows: &units,
        capacity: &vec![1; cols.len()],
        way_out: task.way_out,
        threads: task.threads,
    };
    let enough = span::<T>(grid, scale_bits).shr(LAST_IN_SAMPLE).max(T::ONE);
    let solved = cold::<_, T>(&small, grid, scale_bits, enough, phases)?;
    let out = solved.way_out.map_or(T::LOWEST, |value| value - solved.level);
    let best = |at: usize| solved.lists.look(at, &solved.stock.price).best;
    let mut tops = Tops::new(task, grid, scale_bits);
    let mut buffer = Vec::new();
    for (at, &row) in rows.iter().enumerate().filter(|&(at, _)| best(at) > T::LOWEST) {
        tops.raise(row_of(task.weights, row as usize, &mut buffer), best(at).max(out));
    }
    let floor = solved.loose.then_some(solved.level);
    let mut auction = priced(task, tops, &[], floor, &[], keep(task, KEEP));
    auction.bids += solved.bids;
    auction.refills += solved.refills;
    drop(solved);
    phases_down(auction, FIRST_SAMPLED, last, phases)
}

/// One of each [`SAMPLE`], at places that follow no pattern.
fn thinned(all: &[u32]) -> Vec<u32> {
    all.chunks_exact(SAMPLE).enumerate().map(|(k, chunk)| chunk[scatter(k) % SAMPLE]).collect()
}

fn keep<W: Weights>(task: &Task<'_, W>, wanted: usize) -> usize {
    wanted.min(task.capacity.len().max(1))
}

fn span<T: Tick>(grid: &Grid, scale_bits: u32) -> T {
    let sign = if grid.minimize { -1.0 } else { 1.0 };
    let (low, high) = (grid.units(sign * grid.low), grid.units(sign * grid.high));
    T::from_i128((i128::from(high) - i128::from(low)).max(1) << scale_bits)
}

/// Phases from a fraction of the span of the weights down to `last`.
fn phases_down<'a, W: Weights, T: Tick>(
    mut auction: Auction<'a, W, T>,
    first: u32,
    last: T,
    phases: &mut u32,
) -> Result<Auction<'a, W, T>, MatchError> {
    let mut eps = auction.span.shr(first).max(last);
    loop {
        eps = auction.phase(eps)?;
        *phases += 1;
        if eps <= last {
            return Ok(auction);
        }
        eps = eps.shr(FALL).max(last);
    }
}

/// What columns are worth to the rows whose profits are known, on the rough grid of free columns.
struct Tops<T> {
    market: Market<T>,
    tops: Vec<i32>,
}

impl<T: Tick> Tops<T> {
    fn new<W: Weights>(task: &Task<'_, W>, grid: &Grid, scale_bits: u32) -> Self {
        let zero = vec![T::ZERO; task.capacity.len()];
        let market = Market::new(grid.clone(), scale_bits, &zero, task.capacity);
        Self { market, tops: vec![i32::MIN; task.capacity.len()] }
    }

    /// Each column is worth at least what this row gives for it.
    fn raise<S: Scalar>(&mut self, line: &[S], profit: T) {
        S::raise(line, self.market.rough_profit(profit), &self.market.rough, &mut self.tops);
    }
}

/// An auction at the prices that known profits give, with all lists made.
fn priced<'a, W: Weights, T: Tick>(
    task: &'a Task<'a, W>,
    Tops { mut market, tops }: Tops<T>,
    then: &[Option<T>],
    floor: Option<T>,
    profits: &[Option<T>],
    keep: usize,
) -> Auction<'a, W, T> {
    let lowest = floor.unwrap_or_else(|| {
        let allowed = tops.iter().filter(|&&t| t > FLOOR);
        allowed.min().map_or(T::ZERO, |&t| market.price_of(t))
    });
    // Where the rough price confirms an exact one, that is it.
    let near = market.price_of(8);
    let exactly = |at: usize, top: i32| {
        let rough = market.price_of(top);
        match then.get(at) {
            Some(&Some(p)) if p - near < rough && rough < p + near => p,
            // Rounded up: nobody who is content is to be drawn away by a rounding error.
            Some(_) => market.price_above(top),
            None => rough,
        }
    };
    let price: Vec<T> =
        (0..).zip(&tops).map(|(at, &top)| exactly(at, top.max(FLOOR)).max(lowest)).collect();
    market.rebase(&price);
    let mut auction = Auction::new(task, market, price, lowest, keep);
    let hopes = hopes(&auction, profits, keep);
    auction.fill_lists(keep, &hopes);
    auction
}

/// For each row a rough value that about as many columns exceed as a list holds, where its profit is
/// known: a few rows are read to see how far below that the last column of a list usually lies.
fn hopes<W: Weights, T: Tick>(
    auction: &Auction<'_, W, T>,
    profits: &[Option<T>],
    keep: usize,
) -> Vec<i32> {
    let (market, task) = (&auction.market, auction.task);
    let known: Vec<(usize, i32)> =
        (0..).zip(profits).filter_map(|(at, &p)| Some((at, market.rough_of(p?)))).collect();
    let (mut found, mut buffer) = (Candidates::new(keep), Vec::new());
    let mut depths = Vec::new();
    for &(at, best) in known.iter().step_by(known.len().div_ceil(READ_TO_HOPE).max(1)) {
        let line = row_of(task.weights, task.rows[at].0 as usize, &mut buffer);
        found.start(FLOOR);
        W::Scalar::scan(line, &market.rough_price, &market.rough, &mut found);
        if let Some((last, _)) = found.leading(keep).take(keep).last() {
            depths.push(best.saturating_sub(last));
        }
    }
    depths.sort_unstable();
    let usual = depths.get(depths.len() * 3 / 4).copied().unwrap_or(i32::MAX);
    let mut hopes = vec![FLOOR; profits.len()];
    for (at, best) in known {
        hopes[at] = best.saturating_sub(usual).max(FLOOR);
    }
    hopes
}

/// Starts from what the last cycle knew; nothing when too little of it still holds.
fn warm<'a, W: Weights, T: Tick>(
    task: &'a Task<'a, W>,
    grid: &Grid,
    scale_bits: u32,
    memory: &Memory,
) -> Option<Auction<'a, W, T>> {
    let shift = grid.unit_exp + scale_bits.cast_signed() - memory.tick_exp;
    let ticks = |x: i128| -> Option<T> {
        let limit = T::LIMIT.to_i128() / 4;
        let moved = if shift >= 0 {
            let room = limit.checked_shr(shift.unsigned_abs())?;
            (x.abs() < room).then(|| x << shift)?
        } else {
            x >> (-shift).min(127)
        };
        (moved.abs() < limit).then(|| T::from_i128(moved))
    };
    let then: Vec<Option<T>> = memory.prices.iter().map(|known| known.and_then(ticks)).collect();
    let price: Vec<T> = then.iter().map(|p| p.unwrap_or(T::ZERO)).collect();
    let taking_part = then.iter().zip(task.capacity);
    let capacity: Vec<u32> = taking_part.map(|(p, &c)| if p.is_some() { c } else { 0 }).collect();
    let market = Market::new(grid.clone(), scale_bits, &price, &capacity);
    let mut found = Candidates::new(4);
    let mut buffer = Vec::new();
    let (mut tops, mut content) = (Tops::new(task, grid, scale_bits), 0);
    let mut profits = vec![None; task.rows.len()];
    let out = task.way_out.map_or(T::LOWEST, T::from_i128);
    let held = held_by(task, &memory.holders);
    for (at, (&(row, _), &held)) in task.rows.iter().zip(&held).enumerate() {
        let line = row_of(task.weights, row as usize, &mut buffer);
        let kept = held
            .filter(|&col| then[col as usize].is_some() && line[col as usize].to_f64().is_finite());
        // What its column is worth to it now, or its profit then, where nothing is worth more.
        let profit = match kept {
            Some(col) => Some(market.weight(line[col as usize]) - price[col as usize]),
            None => memory.profits[row as usize].and_then(ticks),
        };
        let Some(profit) = profit else { continue };
        let rough = market.rough_of(profit);
        found.start(rough.saturating_sub(8));
        W::Scalar::scan(line, &market.rough_price, &market.rough, &mut found);
        let best = found.items().map(|(rough, _)| rough).max();
        if best.is_some_and(|b| b <= rough.saturating_add(8)) {
            // While the row is still near.
            tops.raise(line, profit.max(out));
            profits[at] = Some(profit);
            content += 1;
        }
    }
    if content * 2 <= task.rows.len() {
        return None;
    }
    let mut auction = priced(task, tops, &then, Some(T::ZERO), &profits, keep(task, KEEP_WARM));
    seat(&mut auction, &held);
    Some(auction)
}

/// For each row the column that it held, where both are still there and single.
fn held_by<W: Weights>(task: &Task<'_, W>, holders: &[Option<u32>]) -> Vec<Option<u32>> {
    let ids = (0u32..).zip(task.rows).map(|(id, &(row, _))| (row, id));
    let id_of: std::collections::BTreeMap<u32, u32> = ids.collect();
    let mut held = vec![None; task.rows.len()];
    for (col, holder) in (0u32..).zip(holders) {
        let Some(&id) = holder.and_then(|row| id_of.get(&row)) else { continue };
        if task.rows[id as usize].1 == 1 && task.capacity[col as usize] == 1 {
            held[id as usize] = Some(col);
        }
    }
    held
}

/// Gives columns back to those who held them; the first phase takes away what no longer fits.
fn seat<W: Weights, T: Tick>(auction: &mut Auction<'_, W, T>, held: &[Option<u32>]) {
    let task = auction.task;
    let mut one = [W::Scalar::ZERO];
    for ((id, &held), &(row, _)) in (0u32..).zip(held).zip(task.rows) {
        let Some(col) = held else { continue };
        task.weights.fill(row as usize, col as usize, &mut one);
        if one[0].to_f64().is_finite() {
            auction.stock.give(col, id, auction.market.weight(one[0]));
            auction.waiting[id as usize] = 0;
        }
    }
}

/// A number that depends on `x` in no simple way.
#[expect(clippy::cast_possible_truncation, reason = "only the low bits are used")]
fn scatter(x: usize) -> usize {
    let x = x as u64;
    let z = (x ^ (x >> 30)).wrapping_add(1).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 31)) as usize
}
