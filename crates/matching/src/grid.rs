//! How weights become integers.
//!
//! A binary float is an integer times a power of two, so a matrix of them lies on a common grid
//! 2^-s. Where the numbers on that grid need at most [`MAX_BITS`] bits the solver works on the very
//! weights it was given ([`Grid::exact`]); this holds for all `f32` weights whose sizes differ by
//! less than a factor 2^34, and for `f64` ones on a grid such as 2^-53. Otherwise the weights are
//! rounded to [`MAX_BITS`] bits below the largest, the result is the optimum of the rounded weights,
//! and the checker states how far that can be from the optimum of the true ones.

use crate::error::MatchError;
use crate::scalar::Scalar;
use crate::scan::RowFacts;
use crate::weights::{Weights, row_of};

/// Widest integer a weight may become.
pub(crate) const MAX_BITS: i32 = 58;

/// Finest grid used, so that scaled numbers stay well inside the range of `f64`.
const FINEST_EXP: i32 = 900;

/// The first grid tried: what a predictor's speeds in [0, 1) are rounded to.
const USUAL_EXP: i32 = 24;
const USUAL_BITS: i32 = 28;

/// What one pass over the weights tells.
#[derive(Debug, Clone)]
pub(crate) struct Grid {
    /// Weights times 2^unit_exp are integers (or are rounded to such).
    pub(crate) unit_exp: i32,
    /// Whether no weight was rounded.
    pub(crate) exact: bool,
    /// Whether the smallest total is sought.
    pub(crate) minimize: bool,
    /// Bits of the largest integer weight.
    pub(crate) bits: u32,
    /// Smallest and largest allowed weight, in the direction of maximising.
    pub(crate) low: f64,
    /// See `low`.
    pub(crate) high: f64,
    /// Whether any edge is forbidden.
    pub(crate) forbidden: bool,
}

impl Grid {
    /// Reads every weight, refuses those without a meaning, and picks the grid.
    pub(crate) fn of<W: Weights>(w: &W, minimize: bool) -> Result<Self, MatchError> {
        let mut facts = RowFacts::new();
        let mut buffer = Vec::new();
        for row in 0..w.rows() {
            W::Scalar::facts(row_of(w, row, &mut buffer), USUAL_EXP, &mut facts);
            if facts.suspect {
                refuse(row_of(w, row, &mut buffer), row, minimize, &mut facts)?;
            }
        }
        let largest = facts.low.abs().max(facts.high.abs());
        let mut grid = Self {
            unit_exp: USUAL_EXP,
            exact: true,
            minimize,
            bits: USUAL_BITS as u32,
            low: if minimize { -facts.high } else { facts.low },
            high: if minimize { -facts.low } else { facts.high },
            forbidden: facts.forbidden,
        };
        if facts.low > facts.high {
            (grid.low, grid.high) = (0.0, 0.0);
            return Ok(grid);
        }
        if !facts.on_grid || largest > f64::from(1 << (USUAL_BITS - USUAL_EXP)) {
            grid.find(w, largest);
        }
        Ok(grid)
    }

    fn find<W: Weights>(&mut self, w: &W, largest: f64) {
        let mut lowest_bit = i32::MAX;
        let mut buffer = Vec::new();
        for row in 0..w.rows() {
            for &x in row_of(w, row, &mut buffer) {
                let x = x.to_f64();
                if x.is_finite() && x != 0.0 {
                    lowest_bit = lowest_bit.min(lowest_bit_exp(x));
                }
            }
        }
        let top = top_bit_exp(largest) + 1;
        let wanted =
            if top.saturating_sub(lowest_bit) <= MAX_BITS { -lowest_bit } else { MAX_BITS - top };
        self.unit_exp = wanted.min(FINEST_EXP);
        self.exact = self.unit_exp == -lowest_bit;
        self.bits = (top + self.unit_exp).max(1).unsigned_abs();
    }

    /// The integer a weight becomes; meaningless for a forbidden one.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_BITS bits by choice of grid")]
    #[inline]
    pub(crate) fn units(&self, x: f64) -> i64 {
        let scaled = times_pow2(x, self.unit_exp);
        let scaled = if self.exact { scaled as i64 } else { rounded(scaled) };
        if self.minimize { -scaled } else { scaled }
    }
}

/// Apart and cold, so that nobody rounds in vain: without special instructions it is a call.
#[cold]
#[inline(never)]
#[expect(clippy::cast_possible_truncation, reason = "at most MAX_BITS bits by choice of grid")]
fn rounded(x: f64) -> i64 {
    x.round_ties_even() as i64
}

fn refuse<S: Scalar>(
    row: &[S],
    at: usize,
    minimize: bool,
    facts: &mut RowFacts,
) -> Result<(), MatchError> {
    facts.suspect = false;
    let losing = if minimize { f64::INFINITY } else { f64::NEG_INFINITY };
    for (col, &x) in row.iter().enumerate() {
        let x = x.to_f64();
        if x.is_nan() {
            return Err(MatchError::NotANumber { row: at, col });
        }
        if x.is_infinite() && x != losing {
            return Err(MatchError::Infinite { row: at, col });
        }
        facts.forbidden |= x == losing;
    }
    Ok(())
}

/// `x` times 2^exp, without a detour through an infinite factor.
#[inline]
pub(crate) fn times_pow2(x: f64, exp: i32) -> f64 {
    if exp.abs() <= 1000 { x * pow2(exp) } else { x * pow2(exp / 2) * pow2(exp - exp / 2) }
}

/// 2^exp, for exponents from -1074 to 1023.
#[expect(clippy::cast_sign_loss, reason = "clamped to the exponents that f64 has")]
#[inline]
pub(crate) fn pow2(exp: i32) -> f64 {
    if exp < -1022 {
        return f64::from_bits(1 << (exp + 1074).max(0));
    }
    f64::from_bits(((exp.min(1023) + 1023) as u64) << 52)
}

/// Exponent of the highest set bit of a finite number that is not zero.
pub(crate) fn top_bit_exp(x: f64) -> i32 {
    let (mantissa, exp) = parts(x);
    exp + 63 - mantissa.leading_zeros().cast_signed()
}

/// Exponent of the lowest set bit of a finite number that is not zero.
pub(crate) fn lowest_bit_exp(x: f64) -> i32 {
    let (mantissa, exp) = parts(x);
    exp + mantissa.trailing_zeros().cast_signed()
}

fn parts(x: f64) -> (u64, i32) {
    let bits = x.to_bits();
    let field = ((bits >> 52) & 0x7ff) as i32;
    let fraction = bits & ((1 << 52) - 1);
    if field == 0 { (fraction, -1074) } else { (fraction | (1 << 52), field - 1075) }
}
