//! Weights and prices as the auction sees them: exact integers, and rough ones for whole rows.
//!
//! Scaled weights are the weights in grid units times a power of two larger than the number of row
//! units, so that an error of one tick per row unit cannot add up to one grid unit.

use crate::grid::{Grid, pow2, top_bit_exp};
use crate::scalar::{Scalar, Tick};
use crate::scan::{ABSENT, ROUGH_PRICE_MAX, ROUGH_WEIGHT_BITS, Rough};

/// What rows need to know of weights and prices to judge columns.
#[derive(Debug)]
pub(crate) struct Market<T> {
    pub(crate) grid: Grid,
    /// Scaled weights are weights in grid units times 2^this.
    pub(crate) scale_bits: u32,
    pub(crate) rough_price: Vec<i32>,
    pub(crate) rough: Rough,
    /// The price whose rough price is zero.
    base: T,
    /// The scaled weight whose rough weight is zero.
    origin: T,
    /// One rough unit is 2^this ticks.
    shift: u32,
    least_shift: u32,
    /// Rough values may be too low by this much.
    slack: i32,
}

impl<T: Tick> Market<T> {
    /// A market at the given prices; columns with no `capacity` take no part.
    pub(crate) fn new(grid: Grid, scale_bits: u32, price: &[T], capacity: &[u32]) -> Self {
        let span = grid.high - grid.low;
        let largest = grid.high.abs().max(grid.low.abs());
        let offset = if largest > 4.0 * span { grid.low } else { 0.0 };
        let reach = if offset == 0.0 { largest } else { span };
        let bits = if reach == 0.0 { 0 } else { top_bit_exp(reach) + 1 + grid.unit_exp };
        let least_shift = (scale_bits.cast_signed() + bits - ROUGH_WEIGHT_BITS).max(0);
        let raw_offset = if grid.minimize { -offset } else { offset };
        let mut market = Self {
            origin: T::ZERO,
            grid,
            scale_bits,
            rough_price: capacity.iter().map(|&c| if c == 0 { ABSENT } else { 0 }).collect(),
            rough: Rough { scale: 1.0, offset: raw_offset },
            base: T::ZERO,
            shift: 0,
            least_shift: least_shift.unsigned_abs(),
            slack: 0,
        };
        market.origin = market.ticks(raw_offset);
        market.rebase(price);
        market
    }

    /// The scaled weight; meaningless for a forbidden one.
    #[inline]
    pub(crate) fn weight<S: Scalar>(&self, x: S) -> T {
        self.ticks(x.to_f64())
    }

    #[inline]
    fn ticks(&self, x: f64) -> T {
        T::from_i128(i128::from(self.grid.units(x))).shl(self.scale_bits)
    }

    /// Follows a rise of one price.
    #[inline]
    pub(crate) fn set(&mut self, col: usize, price: &[T]) {
        let rough = (price[col] - self.base).shr(self.shift);
        if rough > T::from_i128(i128::from(ROUGH_PRICE_MAX)) {
            self.rebase(price);
        } else {
            self.rough_price[col] = narrow(rough);
        }
    }

    /// Chooses the rough grid for these prices, as fine as their spread allows.
    #[expect(clippy::cast_possible_truncation, reason = "a small count of rough units")]
    pub(crate) fn rebase(&mut self, price: &[T]) {
        let active = || price.iter().zip(&self.rough_price).filter(|&(_, &r)| r != ABSENT);
        self.base = active().map(|(&p, _)| p).min().unwrap_or(T::ZERO);
        let top = active().map(|(&p, _)| p).max().unwrap_or(T::ZERO);
        self.shift = self.least_shift;
        while (top - self.base).shr(self.shift) > T::from_i128(i128::from(ROUGH_PRICE_MAX / 2)) {
            self.shift += 1;
        }
        let (base, shift) = (self.base, self.shift);
        for (&p, rough) in price.iter().zip(&mut self.rough_price) {
            if *rough != ABSENT {
                *rough = narrow((p - base).shr(shift));
            }
        }
        let exponent = self.grid.unit_exp + self.scale_bits.cast_signed() - shift.cast_signed();
        let factor = pow2(exponent);
        self.rough.scale = if self.grid.minimize { -factor } else { factor };
        let faithful = self.grid.exact && self.rough.offset == 0.0 && self.scale_bits >= shift;
        let largest = self.grid.high.abs().max(self.grid.low.abs());
        self.slack =
            if faithful { 0 } else { 2 + (largest * factor * pow2(-51)).min(1e6).ceil() as i32 };
    }

    /// An upper bound on the exact value of every edge whose rough value is at most `rough`.
    pub(crate) fn bound_of(&self, rough: i32) -> T {
        T::from_i128(i128::from(rough) + i128::from(self.slack)).shl(self.shift) - self.base
            + self.origin
    }

    /// A profit on the rough grid, nearest to where a rough weight less it is a price.
    pub(crate) fn rough_profit(&self, profit: T) -> i32 {
        let rough = (profit - self.origin).shr(self.shift).to_i128();
        narrow_wide(rough.clamp(-i128::from(ROUGH_PRICE_MAX), i128::from(ROUGH_PRICE_MAX)))
    }

    /// The price that a rough weight less a rough profit stands for.
    pub(crate) fn price_of(&self, rough: i32) -> T {
        T::from_i128(i128::from(rough)).shl(self.shift)
    }

    /// A price surely not below the exact one that a rough weight less a rough profit stands for.
    pub(crate) fn price_above(&self, rough: i32) -> T {
        self.price_of(rough + 2 + self.slack)
    }

    /// A rough value that an edge of this exact value surely exceeds.
    pub(crate) fn rough_of(&self, value: T) -> i32 {
        let least = T::from_i128(i128::from(i32::MIN / 2));
        let rough = (value + self.base - self.origin).shr(self.shift).clamp(least, -least);
        narrow(rough) - 2 - self.slack
    }
}

fn narrow<T: Tick>(rough: T) -> i32 {
    narrow_wide(rough.to_i128())
}

#[expect(clippy::cast_possible_truncation, reason = "callers have compared with ROUGH_PRICE_MAX")]
fn narrow_wide(rough: i128) -> i32 {
    rough as i32
}
