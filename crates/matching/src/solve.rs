//! The ways in: from a matrix to a matching or a flow between classes.

use crate::auction::{Auction, Task};
use crate::certificate::{Certificate, Side};
use crate::classes::Classes;
use crate::error::MatchError;
use crate::grid::{Grid, times_pow2};
use crate::scalar::Tick;
use crate::start::{self, Memory};
use crate::stock::NOBODY;
use crate::weights::{Owned, Weights};

/// How to solve.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    /// Leave out edges that would lower the total. Otherwise as many vertices as possible are
    /// matched, and among all such matchings the total is the best.
    pub optional: bool,
    /// Seek the smallest total. The forbidden weight is then +∞.
    pub minimize: bool,
    /// Threads that may read rows at the same time; 0 and 1 mean none beside the caller's. The
    /// result does not depend on it.
    pub threads: usize,
    /// What the last cycle knew.
    pub warm: Option<Warm<'a>>,
}

/// The last cycle's certificate, and who is still there.
#[derive(Debug, Clone, Copy)]
pub struct Warm<'a> {
    /// The certificate of the last solution.
    pub certificate: &'a Certificate,
    /// For each row of now its place in the last problem; `None` for new ones. An empty slice
    /// means that the rows are the same. Weights may have changed all the same.
    pub rows: &'a [Option<u32>],
    /// The same for columns.
    pub cols: &'a [Option<u32>],
}

/// What the solver did, for those who measure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Effort {
    /// Bids made.
    pub bids: u64,
    /// Rows read to make a short list anew.
    pub refills: u64,
    /// Phases of falling eps.
    pub phases: u32,
}

/// A matching of rows to columns.
#[derive(Debug, Clone, PartialEq)]
pub struct Matching {
    /// The column of each row.
    pub row_to_col: Vec<Option<u32>>,
    /// Total weight.
    pub value: f64,
    /// Proof of optimality.
    pub certificate: Certificate,
    /// What it took.
    pub effort: Effort,
}

/// Units that go from one row class to one column class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Row class.
    pub row: u32,
    /// Column class.
    pub col: u32,
    /// Units; never zero.
    pub count: u32,
}

/// A solution between classes.
#[derive(Debug, Clone, PartialEq)]
pub struct Flow {
    /// Who goes where, by row and then column.
    pub shares: Vec<Share>,
    /// Total weight.
    pub value: f64,
    /// Proof of optimality.
    pub certificate: Certificate,
    /// What it took.
    pub effort: Effort,
}

/// Solves for single rows and columns. Equal rows and equal columns are found and treated as
/// classes.
pub fn solve<W: Weights>(weights: &W, options: Options<'_>) -> Result<Matching, MatchError> {
    let grid = Grid::of(weights, options.minimize)?;
    check_size(weights)?;
    let rows = Classes::of_rows(weights);
    let cols = Classes::of_cols(weights, &rows);
    let solved = orient(weights, grid, &rows.counts, &cols.counts, options)?;
    let mut row_to_col = vec![None; weights.rows()];
    let mut row_members = rows.members();
    let mut col_members = cols.members();
    for share in &solved.shares {
        for _ in 0..share.count {
            if let (Some(row), Some(col)) =
                (row_members.take(share.row), col_members.take(share.col))
            {
                row_to_col[row as usize] = Some(col);
            }
        }
    }
    let Flow { value, mut certificate, effort, .. } = solved;
    let (bidders, others) = match certificate.bidders {
        Side::Rows => (&rows, &cols),
        Side::Cols => (&cols, &rows),
    };
    bidders.spread(&mut certificate.profits);
    others.spread(&mut certificate.prices);
    Ok(Matching { row_to_col, value, certificate, effort })
}

/// Solves for classes of equal rows and equal columns: `row_counts` and `col_counts` say how many
/// units each row and column of the matrix stands for.
pub fn solve_classes<W: Weights>(
    weights: &W,
    row_counts: &[u32],
    col_counts: &[u32],
    options: Options<'_>,
) -> Result<Flow, MatchError> {
    let counts = [
        ("the list of row counts", weights.rows(), row_counts.len()),
        ("the list of column counts", weights.cols(), col_counts.len()),
    ];
    for (what, expected, got) in counts {
        if expected != got {
            return Err(MatchError::Length { what, expected, got });
        }
    }
    check_size(weights)?;
    let grid = Grid::of(weights, options.minimize)?;
    orient(weights, grid, row_counts, col_counts, options)
}

fn check_size<W: Weights>(weights: &W) -> Result<(), MatchError> {
    for (what, count) in [("rows", weights.rows()), ("columns", weights.cols())] {
        if count >= NOBODY as usize {
            return Err(MatchError::TooLarge { what, count: count as u64 });
        }
    }
    Ok(())
}

/// Lets the smaller side bid.
fn orient<W: Weights>(
    weights: &W,
    grid: Grid,
    row_counts: &[u32],
    col_counts: &[u32],
    options: Options<'_>,
) -> Result<Flow, MatchError> {
    let total = |counts: &[u32]| counts.iter().map(|&c| u64::from(c)).sum::<u64>();
    let (units, room) = (total(row_counts), total(col_counts));
    if units.max(room) >= u64::from(NOBODY) {
        return Err(MatchError::TooLarge { what: "units", count: units.max(room) });
    }
    let warm = Memory::of(weights, &options, units <= room)?;
    if units <= room {
        return widths(weights, grid, row_counts, col_counts, &options, Side::Rows, warm);
    }
    let turned = Owned::transposed(weights);
    let mut flow = widths(&turned, grid, col_counts, row_counts, &options, Side::Cols, warm)?;
    for share in &mut flow.shares {
        (share.row, share.col) = (share.col, share.row);
    }
    flow.shares.sort_unstable_by_key(|s| (s.row, s.col));
    Ok(flow)
}

/// Takes 64-bit prices where they are surely wide enough, and 128-bit ones otherwise.
fn widths<W: Weights>(
    weights: &W,
    grid: Grid,
    row_counts: &[u32],
    col_counts: &[u32],
    options: &Options<'_>,
    bidders: Side,
    warm: Option<Memory>,
) -> Result<Flow, MatchError> {
    let rows: Vec<(u32, u32)> =
        (0u32..).zip(row_counts).filter(|&(_, &c)| c > 0).map(|(r, &c)| (r, c)).collect();
    let units: u64 = rows.iter().map(|&(_, c)| u64::from(c)).sum();
    let scale_bits = 64 - units.leading_zeros();
    let way_out = way_out(&grid, units, options.optional).map(|v| v << scale_bits);
    let task =
        Task { weights, rows: &rows, capacity: col_counts, way_out, threads: options.threads };
    let reach = way_out.unwrap_or(0).unsigned_abs();
    let bits = (128 - reach.leading_zeros()).max(grid.bits + scale_bits + 2) + 2;
    let setup = Setup { grid, scale_bits, bidders, optional: options.optional, warm };
    if bits <= <i64 as Tick>::BITS {
        match setup.run::<W, i64>(&task) {
            Err(MatchError::PricesOutOfRange) => {}
            done => return done,
        }
    }
    setup.run::<W, i128>(&task)
}

/// What staying unmatched is worth, in grid units; nothing where it cannot happen.
fn way_out(grid: &Grid, units: u64, optional: bool) -> Option<i128> {
    if optional {
        return Some(0);
    }
    if !grid.forbidden {
        return None;
    }
    let sign = if grid.minimize { -1.0 } else { 1.0 };
    let (low, high) = (grid.units(sign * grid.low), grid.units(sign * grid.high));
    let span = i128::from(high) - i128::from(low);
    Some(i128::from(low) - i128::from(units) * span - 1)
}

struct Setup {
    grid: Grid,
    scale_bits: u32,
    bidders: Side,
    optional: bool,
    warm: Option<Memory>,
}

impl Setup {
    fn run<W: Weights, T: Tick>(&self, task: &Task<'_, W>) -> Result<Flow, MatchError> {
        let mut phases = 0;
        let auction =
            start::run::<W, T>(task, &self.grid, self.scale_bits, self.warm.as_ref(), &mut phases)?;
        Ok(self.finish(&auction, phases))
    }

    fn finish<W: Weights, T: Tick>(&self, auction: &Auction<'_, W, T>, phases: u32) -> Flow {
        let task = auction.task;
        let shares = shares_of(auction);
        let floor = if auction.loose {
            auction.level
        } else {
            let taking_part = auction.stock.price.iter().zip(task.capacity);
            taking_part.filter(|&(_, &c)| c > 0).map(|(&p, _)| p).min().unwrap_or(T::ZERO)
        };
        let prices =
            auction.stock.price.iter().map(|&p| (p - floor).max(T::ZERO).to_i128()).collect();
        let mut profits = vec![0; task.weights.rows()];
        let mut held = vec![T::LOWEST; task.rows.len()];
        for (_, lot) in auction.stock.lots().filter(|(_, lot)| lot.row != NOBODY) {
            held[lot.row as usize] = lot.profit.max(held[lot.row as usize]);
        }
        for (at, &(row, _)) in task.rows.iter().enumerate() {
            let best = auction.lists.look(at, &auction.stock.price).best.max(held[at]);
            if best > T::LOWEST {
                profits[row as usize] = (best + floor).to_i128();
            }
        }
        let certificate = Certificate {
            bidders: self.bidders,
            optional: self.optional,
            minimize: self.grid.minimize,
            grid_exp: self.grid.unit_exp,
            tick_exp: self.grid.unit_exp + self.scale_bits.cast_signed(),
            prices,
            profits,
            holders: holders_of(auction),
            way_out: task.way_out,
        };
        Flow {
            value: value_of(task.weights, &self.grid, &shares),
            shares,
            certificate,
            effort: Effort { bids: auction.bids, refills: auction.refills, phases },
        }
    }
}

/// Who holds each column, where both are single.
fn holders_of<W: Weights, T: Tick>(auction: &Auction<'_, W, T>) -> Vec<Option<u32>> {
    let mut holders = vec![None; auction.task.capacity.len()];
    for (col, lot) in auction.stock.lots() {
        if lot.row != NOBODY && auction.task.capacity[col as usize] == 1 {
            let (row, units) = auction.task.rows[lot.row as usize];
            holders[col as usize] = (units == 1).then_some(row);
        }
    }
    holders
}

fn shares_of<W: Weights, T: Tick>(auction: &Auction<'_, W, T>) -> Vec<Share> {
    let held = auction.stock.lots().filter(|(_, lot)| lot.row != NOBODY);
    let mut shares: Vec<Share> = held
        .map(|(col, lot)| Share {
            row: auction.task.rows[lot.row as usize].0,
            col,
            count: lot.count,
        })
        .collect();
    shares.sort_unstable_by_key(|s| (s.row, s.col));
    shares.dedup_by(|next, kept| {
        let same = (next.row, next.col) == (kept.row, kept.col);
        if same {
            kept.count += next.count;
        }
        same
    });
    shares
}

/// The total, exact in integers where the grid is, rounded once.
fn value_of<W: Weights>(weights: &W, grid: &Grid, shares: &[Share]) -> f64 {
    let mut units: i128 = 0;
    let mut plain = 0.0;
    let mut one = [<W::Scalar as crate::scalar::Scalar>::ZERO];
    for share in shares {
        weights.fill(share.row as usize, share.col as usize, &mut one);
        let weight = crate::scalar::Scalar::to_f64(one[0]);
        units += i128::from(grid.units(weight)) * i128::from(share.count);
        plain += weight * f64::from(share.count);
    }
    if !grid.exact {
        return plain;
    }
    let total = times_pow2(units as f64, -grid.unit_exp);
    if grid.minimize { -total } else { total }
}
