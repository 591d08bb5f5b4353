//! Where the prices come from before the first bid, and the order of phases.

use crate::auction::{Auction, Task};
use crate::error::MatchError;
use crate::grid::Grid;
use crate::market::Market;
use crate::scalar::Tick;
use crate::solve::Options;
use crate::weights::Weights;

/// Profits of bidders known before the start, with the exponent of their ticks.
pub(crate) type Profits = Option<Vec<Option<(i128, i32)>>>;

const KEEP: usize = 64;
const FALL: u32 = 3;

/// Profits of the last cycle for the bidders of this one, with the exponent of their ticks.
pub(crate) fn known_profits<W: Weights>(
    _weights: &W,
    options: &Options<'_>,
    _rows_bid: bool,
) -> Result<Profits, MatchError> {
    let _ = options.warm;
    Ok(None)
}

/// Solves to the last tick.
pub(crate) fn run<'a, W: Weights, T: Tick>(
    task: &'a Task<'a, W>,
    grid: &Grid,
    scale_bits: u32,
    _warm: &Profits,
    phases: &mut u32,
) -> Result<Auction<'a, W, T>, MatchError> {
    let price = vec![T::ZERO; task.capacity.len()];
    let market = Market::new(grid.clone(), scale_bits, &price, task.capacity);
    let mut auction =
        Auction::new(task, market, price, T::ZERO, KEEP.min(task.capacity.len().max(1)));
    let mut eps = auction.span.shr(3).max(T::ONE);
    loop {
        eps = auction.phase(eps)?;
        *phases += 1;
        if eps == T::ONE {
            return Ok(auction);
        }
        eps = eps.shr(FALL).max(T::ONE);
    }
}
