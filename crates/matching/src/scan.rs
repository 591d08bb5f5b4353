//! The one loop that touches whole rows: rough values in 32-bit integers, several at a time.
//!
//! A rough value is the weight on a coarse grid less the price on the same grid. The scan keeps the
//! columns with the highest ones and a threshold that no other column exceeds; exact values are
//! computed afterwards, for those few columns only. Three versions of the loop give the same
//! candidates: plain, AVX2, and AVX-512 (the plain source compiled for it). This is the crate's only
//! module with `unsafe`: calling code compiled for CPU features, after asking the CPU.

#![expect(unsafe_code, reason = "SIMD loops are called after asking the CPU for the features")]

use crate::scalar::Scalar;

/// Rough weights stay within ± 2^ROUGH_WEIGHT_BITS.
pub(crate) const ROUGH_WEIGHT_BITS: i32 = 28;
/// Rough prices stay within ± this, so that no difference overflows and none falls to [`FLOOR`].
pub(crate) const ROUGH_PRICE_MAX: i32 = (1 << 29) - 2;
/// The rough price of a column that takes no part.
pub(crate) const ABSENT: i32 = 1 << 30;
/// Below the rough value of every allowed edge of a column that takes part; not below any other.
pub(crate) const FLOOR: i32 = -(3 << 28);

const CLAMP: f32 = (1 << 30) as f32;

/// How a weight becomes a rough one: `(weight - offset) * scale`, cut to an integer.
#[derive(Debug, Clone, Copy)]
pub struct Rough {
    pub(crate) scale: f64,
    pub(crate) offset: f64,
}

/// The best columns seen so far by rough value.
#[derive(Debug)]
pub struct Candidates {
    /// No column left out has a rough value above this.
    pub(crate) threshold: i32,
    /// Packed rough values and columns; the larger the better.
    items: Vec<u64>,
    keep: usize,
}

/// Packs so that a larger number means a higher rough value, then an earlier column.
#[inline]
fn pack(rough: i32, col: u32) -> u64 {
    (u64::from(rough.cast_unsigned() ^ (1 << 31)) << 32) | u64::from(!col)
}

#[expect(clippy::cast_possible_truncation, reason = "takes the two halves apart")]
#[inline]
fn unpack(item: u64) -> (i32, u32) {
    (((item >> 32) as u32 ^ (1 << 31)).cast_signed(), !(item as u32))
}

impl Candidates {
    pub(crate) fn new(keep: usize) -> Self {
        Self { threshold: FLOOR, items: Vec::with_capacity(4 * keep), keep }
    }

    pub(crate) fn start(&mut self, threshold: i32) {
        self.items.clear();
        self.threshold = threshold.max(FLOOR);
    }

    #[inline]
    fn push<S: Scalar>(&mut self, rough: i32, col: usize, weight: S) {
        if rough > self.threshold && weight.to_f64().is_finite() {
            #[expect(clippy::cast_possible_truncation, reason = "columns are counted in u32")]
            self.items.push(pack(rough, col as u32));
            if self.items.len() == 4 * self.keep {
                self.cut();
            }
        }
    }

    /// Keeps the best; of equal ones those that come first.
    fn cut(&mut self) {
        if self.items.len() > self.keep {
            let (_, &mut last, _) = self.items.select_nth_unstable_by(self.keep, |a, b| b.cmp(a));
            self.threshold = self.threshold.max(unpack(last).0);
            self.items.truncate(self.keep);
        }
    }

    /// Rough values and columns: as many of the best, best first, and then the others in any order
    /// but for the first of them, which is next.
    pub(crate) fn leading(&mut self, count: usize) -> impl Iterator<Item = (i32, u32)> {
        self.cut();
        let sorted = count.min(self.items.len());
        if sorted < self.items.len() {
            self.items.select_nth_unstable_by(sorted, |a, b| b.cmp(a));
        }
        self.items[..sorted].sort_unstable_by(|a, b| b.cmp(a));
        self.items.iter().map(|&item| unpack(item))
    }

    /// How many columns are above the threshold; those cut off are not counted.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }

    /// Rough values and columns of all that was found, in any order.
    pub(crate) fn items(&self) -> impl Iterator<Item = (i32, u32)> {
        self.items.iter().map(|&item| unpack(item))
    }
}

/// What a pass over the rows finds out about the weights.
#[derive(Debug, Clone)]
pub struct RowFacts {
    pub(crate) low: f64,
    pub(crate) high: f64,
    /// Whether every finite weight times 2^unit_exp is an integer.
    pub(crate) on_grid: bool,
    /// Whether a weight was not finite.
    pub(crate) suspect: bool,
    pub(crate) forbidden: bool,
}

impl RowFacts {
    pub(crate) fn new() -> Self {
        Self {
            low: f64::INFINITY,
            high: f64::NEG_INFINITY,
            on_grid: true,
            suspect: false,
            forbidden: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isa {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

fn isa() -> Isa {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            return Isa::Avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return Isa::Avx2;
        }
    }
    Isa::Plain
}

/// Runs plain code compiled for the widest vectors that suit it here; what it computes stays its own.
#[inline]
pub(crate) fn vectorised<R>(code: impl FnOnce() -> R) -> R {
    match isa() {
        // SAFETY: the CPU has just said that it has the features the function is compiled for.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { with_avx2(code) },
        Isa::Plain => code(),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<R>(code: impl FnOnce() -> R) -> R {
    code()
}

/// Whether rough weights can be made in f32, where only a power of two is a faithful factor.
fn faithful(rough: &Rough) -> bool {
    rough.offset == 0.0 && rough.scale.abs() < 1e38 && rough.scale.abs() > 1e-37
}

/// Low, high, grid and finiteness of one row.
pub(crate) fn facts_f32(row: &[f32], unit_exp: i32, facts: &mut RowFacts) {
    match isa() {
        // SAFETY: the CPU has just said that it has the features the function is compiled for.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { facts_avx2(row, unit_exp, facts) },
        Isa::Plain => facts_body(row, unit_exp, facts),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn facts_avx2(row: &[f32], unit_exp: i32, facts: &mut RowFacts) {
    facts_body(row, unit_exp, facts);
}

#[expect(clippy::cast_possible_truncation, reason = "a power of two that f32 has")]
#[inline(always)]
fn facts_body(row: &[f32], unit_exp: i32, facts: &mut RowFacts) {
    // As many as leave all that is gathered in registers.
    const LANES: usize = 16;
    const INFINITE: u32 = f32::INFINITY.to_bits();
    let scale = crate::grid::pow2(unit_exp) as f32;
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let (mut odd, mut size) = ([0u32; LANES], [0u32; LANES]);
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            let x = block[lane];
            let scaled = x * scale;
            odd[lane] |= scaled.trunc().to_bits() ^ scaled.to_bits();
            size[lane] = size[lane].max(x.to_bits() & !(1 << 31));
            low[lane] = if x < low[lane] { x } else { low[lane] };
            high[lane] = if x > high[lane] { x } else { high[lane] };
        }
    }
    if size.iter().any(|&s| s >= INFINITE) {
        return facts_with_gaps(row, unit_exp, facts);
    }
    for lane in 0..LANES {
        facts.low = facts.low.min(f64::from(low[lane]));
        facts.high = facts.high.max(f64::from(high[lane]));
        facts.on_grid &= odd[lane] == 0;
    }
    facts_plain(rest, unit_exp, facts);
}

/// The same where some weights are not finite and are to be passed over.
#[expect(clippy::cast_possible_truncation, reason = "a power of two that f32 has")]
#[inline(always)]
fn facts_with_gaps(row: &[f32], unit_exp: i32, facts: &mut RowFacts) {
    const LANES: usize = 16;
    let scale = crate::grid::pow2(unit_exp) as f32;
    let (mut low, mut high) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    let mut odd = [0u32; LANES];
    let (blocks, rest) = row.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            let x = block[lane];
            let finite = x.abs() < f32::INFINITY;
            let scaled = x * scale;
            odd[lane] |= u32::from(scaled.trunc() != scaled && finite);
            let (l, h) = (low[lane], high[lane]);
            low[lane] = if finite && x < l { x } else { l };
            high[lane] = if finite && x > h { x } else { h };
        }
    }
    facts.suspect = true;
    for lane in 0..LANES {
        facts.low = facts.low.min(f64::from(low[lane]));
        facts.high = facts.high.max(f64::from(high[lane]));
        facts.on_grid &= odd[lane] == 0;
    }
    facts_plain(rest, unit_exp, facts);
}

/// The same for any kind of weight, one at a time.
pub(crate) fn facts_plain<S: Scalar>(row: &[S], unit_exp: i32, facts: &mut RowFacts) {
    let scale = crate::grid::pow2(unit_exp);
    for &x in row {
        let x = x.to_f64();
        if x.is_finite() {
            facts.low = facts.low.min(x);
            facts.high = facts.high.max(x);
            let scaled = x * scale;
            facts.on_grid &= scaled.trunc() == scaled;
        } else {
            facts.suspect = true;
        }
    }
}

/// Collects the best columns of one row of `f32` weights.
pub(crate) fn scan_f32(row: &[f32], prices: &[i32], rough: &Rough, found: &mut Candidates) {
    let prices = &prices[..row.len()];
    match isa() {
        _ if !faithful(rough) => scan_plain(row, prices, rough, found),
        // SAFETY: the CPU has just said that it has the features the function is compiled for.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { scan_avx2(row, prices, rough, found) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { scan_avx512(row, prices, rough, found) },
        Isa::Plain => scan_body(row, prices, rough, found),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn scan_avx512(row: &[f32], prices: &[i32], rough: &Rough, found: &mut Candidates) {
    scan_body(row, prices, rough, found);
}

#[expect(clippy::manual_clamp, reason = "unlike clamp, max takes the other operand of a NaN")]
#[inline(always)]
fn rough_f32(x: f32, scale: f32) -> i32 {
    let clamped = (x * scale).max(-CLAMP).min(CLAMP);
    // SAFETY: `max` turned a NaN into -CLAMP, and both clamps fit in an i32.
    unsafe { clamped.to_int_unchecked() }
}

#[expect(clippy::cast_possible_truncation, reason = "checked to be a factor that f32 has")]
#[inline(always)]
fn scan_body(row: &[f32], prices: &[i32], rough: &Rough, found: &mut Candidates) {
    const LANES: usize = 64;
    let scale = rough.scale as f32;
    let (blocks, rest) = row.as_chunks::<LANES>();
    let (price_blocks, price_rest) = prices.as_chunks::<LANES>();
    let mut values = [0i32; LANES];
    for (at, (block, price)) in blocks.iter().zip(price_blocks).enumerate() {
        let mut top = i32::MIN;
        for lane in 0..LANES {
            values[lane] = rough_f32(block[lane], scale) - price[lane];
            top = top.max(values[lane]);
        }
        if top > found.threshold {
            for lane in 0..LANES {
                found.push(values[lane], at * LANES + lane, block[lane]);
            }
        }
    }
    let first = row.len() - rest.len();
    for (at, (&x, &price)) in rest.iter().zip(price_rest).enumerate() {
        found.push(rough_f32(x, scale) - price, first + at, x);
    }
}

#[expect(clippy::cast_possible_truncation, reason = "checked to be a factor that f32 has")]
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn scan_avx2(row: &[f32], prices: &[i32], rough: &Rough, found: &mut Candidates) {
    use std::arch::x86_64::{
        __m256i, _mm256_castsi256_ps, _mm256_cmpgt_epi32, _mm256_cvttps_epi32, _mm256_loadu_ps,
        _mm256_loadu_si256, _mm256_max_epi32, _mm256_max_ps, _mm256_min_ps, _mm256_movemask_ps,
        _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_storeu_si256, _mm256_sub_epi32,
    };
    const LANES: usize = 32;
    let scale = _mm256_set1_ps(rough.scale as f32);
    let (floor, ceiling) = (_mm256_set1_ps(-CLAMP), _mm256_set1_ps(CLAMP));
    let mut threshold = _mm256_set1_epi32(found.threshold);
    let (blocks, rest) = row.as_chunks::<LANES>();
    let (price_blocks, price_rest) = prices.as_chunks::<LANES>();
    for (at, (block, price)) in blocks.iter().zip(price_blocks).enumerate() {
        let value = |part: usize| -> __m256i {
            // SAFETY: part < 4, so 8 lanes from part * 8 lie within the 32 of the block.
            let (x, p) = unsafe {
                (
                    _mm256_loadu_ps(block.as_ptr().add(part * 8)),
                    _mm256_loadu_si256(price.as_ptr().add(part * 8).cast()),
                )
            };
            let scaled = _mm256_mul_ps(x, scale);
            // A NaN becomes the second operand of max: the floor.
            let clamped = _mm256_min_ps(_mm256_max_ps(scaled, floor), ceiling);
            _mm256_sub_epi32(_mm256_cvttps_epi32(clamped), p)
        };
        let (a, b, c, d) = (value(0), value(1), value(2), value(3));
        let top = _mm256_max_epi32(_mm256_max_epi32(a, b), _mm256_max_epi32(c, d));
        if _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(top, threshold))) == 0 {
            continue;
        }
        for (part, values) in [a, b, c, d].into_iter().enumerate() {
            let above = _mm256_cmpgt_epi32(values, threshold);
            let mut mask = _mm256_movemask_ps(_mm256_castsi256_ps(above)).cast_unsigned();
            if mask == 0 {
                continue;
            }
            let mut lanes = [0i32; 8];
            // SAFETY: the array holds exactly the 8 lanes stored.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().cast(), values) };
            while mask != 0 {
                let lane = mask.trailing_zeros() as usize;
                mask &= mask - 1;
                let within = part * 8 + lane;
                found.push(lanes[lane], at * LANES + within, block[within]);
            }
        }
        threshold = _mm256_set1_epi32(found.threshold);
    }
    let first = row.len() - rest.len();
    for (at, (&x, &price)) in rest.iter().zip(price_rest).enumerate() {
        found.push(rough_f32(x, rough.scale as f32) - price, first + at, x);
    }
}

/// Raises `tops` to the rough weight less `profit`, column by column.
pub(crate) fn raise_f32(row: &[f32], profit: i32, rough: &Rough, tops: &mut [i32]) {
    match isa() {
        _ if !faithful(rough) => raise_plain(row, profit, rough, tops),
        // SAFETY: the CPU has just said that it has the features the function is compiled for.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::Avx512 => unsafe { raise_avx2(row, profit, rough, tops) },
        Isa::Plain => raise_body(row, profit, rough, tops),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn raise_avx2(row: &[f32], profit: i32, rough: &Rough, tops: &mut [i32]) {
    raise_body(row, profit, rough, tops);
}

#[expect(clippy::cast_possible_truncation, reason = "checked to be a factor that f32 has")]
#[inline(always)]
fn raise_body(row: &[f32], profit: i32, rough: &Rough, tops: &mut [i32]) {
    let scale = rough.scale as f32;
    for (top, &x) in tops.iter_mut().zip(row) {
        *top = (*top).max(rough_f32(x, scale) - profit);
    }
}

/// The same for any kind of weight, in f64.
#[expect(clippy::cast_possible_truncation, reason = "the cast to i32 saturates")]
pub(crate) fn raise_plain<S: Scalar>(row: &[S], profit: i32, rough: &Rough, tops: &mut [i32]) {
    let clamp = f64::from(CLAMP);
    for (top, &x) in tops.iter_mut().zip(row) {
        let scaled = ((x.to_f64() - rough.offset) * rough.scale).clamp(-clamp, clamp);
        *top = (*top).max(scaled as i32 - profit);
    }
}

/// The same for any kind of weight, in f64.
#[expect(clippy::cast_possible_truncation, reason = "the cast to i32 saturates")]
pub(crate) fn scan_plain<S: Scalar>(
    row: &[S],
    prices: &[i32],
    rough: &Rough,
    found: &mut Candidates,
) {
    let clamp = f64::from(CLAMP);
    for (col, (&x, &price)) in row.iter().zip(prices).enumerate() {
        let scaled = ((x.to_f64() - rough.offset) * rough.scale).clamp(-clamp, clamp);
        found.push(scaled as i32 - price, col, x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_versions(row: &[f32], prices: &[i32], rough: &Rough) -> Vec<Vec<(i32, u32)>> {
        let run = |scan: &dyn Fn(&mut Candidates)| {
            let mut found = Candidates::new(16);
            found.start(FLOOR);
            scan(&mut found);
            found.leading(16).collect::<Vec<_>>()
        };
        let mut all = vec![
            run(&|f| scan_body(row, prices, rough, f)),
            run(&|f| scan_plain(row, prices, rough, f)),
        ];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the feature was asked for in the line above.
            all.push(run(&|f| unsafe { scan_avx2(row, prices, rough, f) }));
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512dq") {
            // SAFETY: the features were asked for in the line above.
            all.push(run(&|f| unsafe { scan_avx512(row, prices, rough, f) }));
        }
        all
    }

    #[test]
    fn every_version_of_the_scan_finds_the_same_columns() {
        let mut seed = 7u64;
        let mut next = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 40) as u32
        };
        for len in [0usize, 1, 31, 32, 33, 64, 200, 1000] {
            for scale in [f64::from(1 << 28), -f64::from(1 << 28)] {
                let losing = if scale > 0.0 { f32::NEG_INFINITY } else { f32::INFINITY };
                let row: Vec<f32> = (0..len)
                    .map(|_| match next() {
                        x if x % 7 == 0 => losing,
                        x => x as f32 / (1 << 24) as f32,
                    })
                    .collect();
                let prices: Vec<i32> = (0..len)
                    .map(|_| if next() % 5 == 0 { ABSENT } else { (next() << 4) as i32 })
                    .collect();
                let all = all_versions(&row, &prices, &Rough { scale, offset: 0.0 });
                for other in &all[1..] {
                    assert_eq!(&all[0], other, "row of {len}, scale {scale}");
                }
                for &(_, col) in &all[0] {
                    assert_ne!(prices[col as usize], ABSENT);
                    assert!(row[col as usize].is_finite());
                }
            }
        }
    }
}
