//! The checker: proves a result optimal from its prices and the weights alone.
//!
//! It shares no arithmetic with the solver. Weak duality does the work: no solution is worth more
//! than all profits and prices together, so a solution that comes within less than one grid unit of
//! that sum is optimal, because totals are whole numbers of grid units. Every sum is a 128-bit
//! integer. A row's profit is found in `f64` where all numbers involved are integers below 2^51,
//! which is exact, and in 128-bit integers otherwise.

use std::fmt;

use crate::certificate::{Certificate, Proof, Side};
use crate::scalar::Scalar;
use crate::scan::vectorised;
use crate::solve::{Flow, Matching, Share};
use crate::weights::{Weights, row_of};

/// Why a result is not proved.
#[derive(Debug, Clone, PartialEq)]
pub enum CertificateError {
    /// The result does not fit the matrix or the counts.
    Shape(String),
    /// An edge is used that does not exist or is forbidden, or more units than there are.
    Infeasible(String),
    /// The certificate claims what cannot be, such as a negative price.
    Malformed(String),
    /// A weight has no meaning.
    Weight {
        /// Row of the weight.
        row: usize,
        /// Column of the weight.
        col: usize,
    },
    /// The value stated is not the total of the edges.
    Value {
        /// As stated.
        stated: f64,
        /// As added up.
        actual: f64,
    },
    /// The prices leave room for a better solution.
    Gap {
        /// By this much, at most.
        gap: f64,
    },
}

impl fmt::Display for CertificateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape(what) | Self::Infeasible(what) | Self::Malformed(what) => f.write_str(what),
            Self::Weight { row, col } => {
                write!(f, "the weight at row {row}, column {col} has no meaning")
            }
            Self::Value { stated, actual } => {
                write!(f, "the value is stated as {stated} but adds up to {actual}")
            }
            Self::Gap { gap } => {
                write!(f, "the prices leave room for a solution better by up to {gap}")
            }
        }
    }
}

impl std::error::Error for CertificateError {}

/// Proves a matching optimal, or says what is wrong with it.
pub fn verify<W: Weights>(weights: &W, matching: &Matching) -> Result<Proof, CertificateError> {
    if matching.row_to_col.len() != weights.rows() {
        return Err(CertificateError::Shape(format!(
            "the matching has {} rows, the matrix {}",
            matching.row_to_col.len(),
            weights.rows()
        )));
    }
    let edges = (0u32..).zip(&matching.row_to_col);
    let shares: Vec<Share> =
        edges.filter_map(|(row, &col)| Some(Share { row, col: col?, count: 1 })).collect();
    let (rows, cols) = (vec![1; weights.rows()], vec![1; weights.cols()]);
    Checker { weights, counts: [&rows, &cols], certificate: &matching.certificate }
        .run(&shares, matching.value)
}

/// Proves a flow between classes optimal, or says what is wrong with it.
pub fn verify_flow<W: Weights>(
    weights: &W,
    row_counts: &[u32],
    col_counts: &[u32],
    flow: &Flow,
) -> Result<Proof, CertificateError> {
    if row_counts.len() != weights.rows() || col_counts.len() != weights.cols() {
        return Err(CertificateError::Shape("the counts do not fit the matrix".into()));
    }
    Checker { weights, counts: [row_counts, col_counts], certificate: &flow.certificate }
        .run(&flow.shares, flow.value)
}

/// Numbers below this, and their sums, are exact integers in `f64`.
const EXACT_BELOW: f64 = (1u64 << 51) as f64;
/// Adding and subtracting this rounds a smaller number to an integer.
const ROUNDER: f64 = (3u64 << 51) as f64;

struct Checker<'a, W> {
    weights: &'a W,
    /// Units of rows and of columns.
    counts: [&'a [u32]; 2],
    certificate: &'a Certificate,
}

/// What the pass over the weights finds.
struct Facts {
    /// Best value of each bidder; nothing for one without an allowed edge.
    profit: Vec<Option<i128>>,
    on_grid: bool,
    /// Extremes of the allowed weights, in ticks.
    low: i128,
    high: i128,
}

impl<W: Weights> Checker<'_, W> {
    fn run(&self, shares: &[Share], stated: f64) -> Result<Proof, CertificateError> {
        let c = self.certificate;
        let (bidders, others) = match c.bidders {
            Side::Rows => (0, 1),
            Side::Cols => (1, 0),
        };
        self.well_formed(others)?;
        let used = self.feasible(shares)?;
        let facts = self.scan()?;
        let units: i128 = self.counts[bidders].iter().map(|&n| i128::from(n)).sum();
        self.way_out_is_sound(&facts, units)?;
        let (mut dual, mut primal) = (0i128, self.primal(shares)?);
        for (&price, &n) in c.prices.iter().zip(self.counts[others]) {
            dual += price * i128::from(n);
        }
        for (at, profit) in facts.profit.iter().enumerate() {
            let (n, in_use) = (self.counts[bidders][at], used[bidders][at]);
            let idle = i128::from(n - in_use);
            match (c.way_out, profit) {
                (Some(out), profit) => {
                    dual += profit.map_or(out, |p| p.max(out)) * i128::from(n);
                    primal += out * idle;
                }
                (None, Some(profit)) if idle == 0 => dual += profit * i128::from(n),
                (None, None) => {}
                (None, Some(_)) => {
                    return Err(CertificateError::Infeasible(format!(
                        "{idle} units of bidder {at} are left unmatched without a reason"
                    )));
                }
            }
        }
        let (matched, value) = self.total(shares)?;
        if (stated - value).abs() > 1e-12 * value.abs().max(f64::MIN_POSITIVE) * (matched as f64) {
            return Err(CertificateError::Value { stated, actual: value });
        }
        let unit = 1i128 << (c.tick_exp - c.grid_exp);
        let gap = dual - primal;
        let room = scaled(gap, -c.tick_exp);
        if facts.on_grid {
            if (0..unit).contains(&gap) {
                return Ok(Proof { value, gap: 0.0, exact: true, matched });
            }
        } else if gap >= 0 && gap <= unit * (2 * units + 2) {
            return Ok(Proof { value, gap: room, exact: false, matched });
        }
        Err(CertificateError::Gap { gap: room })
    }

    fn well_formed(&self, others: usize) -> Result<(), CertificateError> {
        let c = self.certificate;
        if c.prices.len() != self.counts[others].len() {
            return Err(CertificateError::Shape(format!(
                "{} prices for {} vertices",
                c.prices.len(),
                self.counts[others].len()
            )));
        }
        if let Some(at) = c.prices.iter().position(|&p| !(0..1 << 90).contains(&p)) {
            return Err(CertificateError::Malformed(format!(
                "the price of vertex {at} is negative or beyond reason"
            )));
        }
        let ok = (0..64).contains(&(i64::from(c.tick_exp) - i64::from(c.grid_exp)))
            && (-1100..=1000).contains(&c.grid_exp)
            && (!c.optional || c.way_out == Some(0));
        if ok {
            Ok(())
        } else {
            Err(CertificateError::Malformed("the certificate contradicts itself".into()))
        }
    }

    /// Units used on each side; an error when there are not as many.
    fn feasible(&self, shares: &[Share]) -> Result<[Vec<u32>; 2], CertificateError> {
        let mut used = [vec![0u32; self.counts[0].len()], vec![0u32; self.counts[1].len()]];
        for share in shares {
            for (side, at) in [(0, share.row as usize), (1, share.col as usize)] {
                let fits = used[side].get_mut(at).is_some_and(|n| {
                    *n = n.saturating_add(share.count);
                    *n <= self.counts[side][at]
                });
                if !fits {
                    return Err(CertificateError::Infeasible(format!(
                        "{} {at} is used more often than it exists",
                        ["row", "column"][side]
                    )));
                }
            }
        }
        Ok(used)
    }

    fn weight(&self, share: &Share) -> f64 {
        let mut one = [W::Scalar::ZERO];
        self.weights.fill(share.row as usize, share.col as usize, &mut one);
        let x = one[0].to_f64();
        if self.certificate.minimize { -x } else { x }
    }

    fn primal(&self, shares: &[Share]) -> Result<i128, CertificateError> {
        let mut sum = 0;
        for share in shares {
            let (ticks, _) = self.ticks(self.weight(share)).ok_or_else(|| {
                CertificateError::Infeasible(format!(
                    "the edge from row {} to column {} is forbidden",
                    share.row, share.col
                ))
            })?;
            sum += ticks * i128::from(share.count);
        }
        Ok(sum)
    }

    fn total(&self, shares: &[Share]) -> Result<(u64, f64), CertificateError> {
        // Two-term sums keep the rounding error of the total near that of one operation.
        let (mut sum, mut carry, mut matched) = (0.0f64, 0.0f64, 0u64);
        for share in shares {
            let x = self.weight(share) * f64::from(share.count);
            let next = sum + x;
            carry += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
            sum = next;
            matched += u64::from(share.count);
        }
        let value = sum + carry;
        Ok((matched, if self.certificate.minimize { -value } else { value }))
    }

    fn way_out_is_sound(&self, facts: &Facts, units: i128) -> Result<(), CertificateError> {
        match self.certificate.way_out {
            Some(out) if !self.certificate.optional => {
                let span = (facts.high - facts.low).max(0);
                // One more edge, at the lowest weight, and all others at their worst instead of
                // their best, must still be worth more than staying unmatched once.
                if out < facts.low - units * span {
                    Ok(())
                } else {
                    Err(CertificateError::Malformed(
                        "staying unmatched is not costly enough to prove that as many as possible \
                         are matched"
                            .into(),
                    ))
                }
            }
            _ => Ok(()),
        }
    }

    /// One pass over all weights.
    fn scan(&self) -> Result<Facts, CertificateError> {
        let c = self.certificate;
        let bidders =
            if c.bidders == Side::Rows { self.weights.rows() } else { self.weights.cols() };
        let mut facts =
            Facts { profit: vec![None; bidders], on_grid: true, low: i128::MAX, high: i128::MIN };
        let small = c.prices.iter().all(|&p| (p as f64) < EXACT_BELOW);
        // A vertex of no units takes no part, whatever its price.
        let counts = self.counts[if c.bidders == Side::Rows { 1 } else { 0 }];
        let priced = c.prices.iter().zip(counts);
        let prices: Vec<f64> =
            priced.map(|(&p, &n)| if n > 0 { p as f64 } else { f64::INFINITY }).collect();
        let mut tops = vec![f64::NEG_INFINITY; self.weights.cols()];
        let extremes = c.way_out.is_some() && !c.optional;
        let mut buffer = Vec::new();
        for row in 0..self.weights.rows() {
            let line = row_of(self.weights, row, &mut buffer);
            let fast = small
                && !extremes
                && vectorised(
                    #[inline(always)]
                    || self.fast_row(row, line, &prices, &mut tops, &mut facts),
                );
            if !fast {
                self.slow_row(row, line, &mut facts)?;
            }
        }
        if c.bidders == Side::Cols {
            for (profit, &top) in facts.profit.iter_mut().zip(&tops) {
                *profit = (*profit).max(whole(top));
            }
        }
        if facts.low > facts.high {
            (facts.low, facts.high) = (0, 0);
        }
        Ok(facts)
    }

    /// The pass in `f64`; false when a number in this row is not an exact integer there.
    #[inline(always)]
    fn fast_row(
        &self,
        row: usize,
        line: &[W::Scalar],
        prices: &[f64],
        tops: &mut [f64],
        facts: &mut Facts,
    ) -> bool {
        const LANES: usize = 16;
        let c = self.certificate;
        if c.grid_exp.abs() > 900 {
            return false;
        }
        let sign = if c.minimize { -1.0 } else { 1.0 };
        let to_grid = sign * 2f64.powi(c.grid_exp);
        let to_tick = 2f64.powi(c.tick_exp - c.grid_exp);
        let value = |x: W::Scalar, wrong: &mut u64| {
            let unit = x.to_f64() * to_grid;
            let tick = unit * to_tick;
            let integer = (unit + ROUNDER) - ROUNDER == unit;
            let fits = (tick < EXACT_BELOW) & ((tick > -EXACT_BELOW) | (tick == f64::NEG_INFINITY));
            *wrong |= u64::from(!(integer & fits));
            tick
        };
        let mut wrong = [0u64; LANES];
        if c.bidders == Side::Rows {
            let mut top = [f64::NEG_INFINITY; LANES];
            let (blocks, rest) = line.as_chunks::<LANES>();
            let (price_blocks, price_rest) = prices.as_chunks::<LANES>();
            for (block, price) in blocks.iter().zip(price_blocks) {
                for lane in 0..LANES {
                    let v = value(block[lane], &mut wrong[lane]) - price[lane];
                    top[lane] = if v > top[lane] { v } else { top[lane] };
                }
            }
            for (&x, &price) in rest.iter().zip(price_rest) {
                top[0] = top[0].max(value(x, &mut wrong[0]) - price);
            }
            if wrong.iter().any(|&w| w != 0) {
                return false;
            }
            facts.profit[row] = whole(top.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        } else {
            // Checked first, so that a row is done either here or slowly, not half and half.
            for &x in line {
                value(x, &mut wrong[0]);
            }
            if wrong[0] != 0 {
                return false;
            }
            for (top, &x) in tops.iter_mut().zip(line) {
                let v = value(x, &mut wrong[0]) - prices[row];
                *top = if v > *top { v } else { *top };
            }
        }
        true
    }

    fn slow_row(
        &self,
        row: usize,
        line: &[W::Scalar],
        facts: &mut Facts,
    ) -> Result<(), CertificateError> {
        let c = self.certificate;
        let unit = 1i128 << (c.tick_exp - c.grid_exp);
        for (col, x) in line.iter().enumerate() {
            let x = if c.minimize { -x.to_f64() } else { x.to_f64() };
            if x == f64::NEG_INFINITY {
                continue;
            }
            let (down, whole) = self.ticks(x).ok_or(CertificateError::Weight { row, col })?;
            facts.on_grid &= whole && down % unit == 0;
            let up = if whole { down } else { down + 1 };
            facts.low = facts.low.min(down);
            facts.high = facts.high.max(up);
            let (bidder, other) = if c.bidders == Side::Rows { (row, col) } else { (col, row) };
            if self.counts[if c.bidders == Side::Rows { 1 } else { 0 }][other] == 0 {
                continue;
            }
            let profit = &mut facts.profit[bidder];
            *profit = (*profit).max(Some(up - c.prices[other]));
        }
        Ok(())
    }

    /// A weight in ticks, rounded down, and whether nothing was lost. Nothing for what is not
    /// finite or too large to be on any grid.
    fn ticks(&self, x: f64) -> Option<(i128, bool)> {
        if !x.is_finite() {
            return None;
        }
        let bits = x.abs().to_bits();
        let field = (bits >> 52) as i32;
        let fraction = i128::from(bits & ((1 << 52) - 1));
        let (mantissa, exp) =
            if field == 0 { (fraction, -1074) } else { (fraction | (1 << 52), field - 1075) };
        let mantissa = if x < 0.0 { -mantissa } else { mantissa };
        let shift = exp + self.certificate.tick_exp;
        if mantissa == 0 {
            Some((0, true))
        } else if shift >= 0 {
            if shift > 60 {
                return None;
            }
            Some((mantissa << shift, true))
        } else {
            let right = (-shift).min(120).unsigned_abs();
            let down = mantissa >> right;
            Some((down, down << right == mantissa))
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "an integer below 2^53 by construction")]
fn whole(x: f64) -> Option<i128> {
    x.is_finite().then_some(x as i128)
}

fn scaled(x: i128, exp: i32) -> f64 {
    let half = exp / 2;
    x as f64 * 2f64.powi(half) * 2f64.powi(exp - half)
}
