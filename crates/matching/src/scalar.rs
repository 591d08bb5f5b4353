//! The two kinds of numbers a weight may be, and the integers that prices are made of.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Neg, Sub};

use crate::scan::{self, Candidates, Rough, RowFacts};

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// A weight: `f32` or `f64`.
pub trait Scalar: Copy + Debug + PartialEq + PartialOrd + Send + Sync + 'static + Sealed {
    #[doc(hidden)]
    const ZERO: Self;
    #[doc(hidden)]
    fn to_f64(self) -> f64;
    #[doc(hidden)]
    fn facts(row: &[Self], unit_exp: i32, facts: &mut RowFacts);
    #[doc(hidden)]
    fn scan(row: &[Self], prices: &[i32], rough: &Rough, found: &mut Candidates);
    #[doc(hidden)]
    fn raise(row: &[Self], profit: i32, rough: &Rough, tops: &mut [i32]);
}

use sealed::Sealed;

impl Scalar for f32 {
    const ZERO: Self = 0.0;

    fn to_f64(self) -> f64 {
        f64::from(self)
    }

    fn facts(row: &[Self], unit_exp: i32, facts: &mut RowFacts) {
        scan::facts_f32(row, unit_exp, facts);
    }

    fn scan(row: &[Self], prices: &[i32], rough: &Rough, found: &mut Candidates) {
        scan::scan_f32(row, prices, rough, found);
    }

    fn raise(row: &[Self], profit: i32, rough: &Rough, tops: &mut [i32]) {
        scan::raise_f32(row, profit, rough, tops);
    }
}

impl Scalar for f64 {
    const ZERO: Self = 0.0;

    fn to_f64(self) -> f64 {
        self
    }

    fn facts(row: &[Self], unit_exp: i32, facts: &mut RowFacts) {
        scan::facts_plain(row, unit_exp, facts);
    }

    fn scan(row: &[Self], prices: &[i32], rough: &Rough, found: &mut Candidates) {
        scan::scan_plain(row, prices, rough, found);
    }

    fn raise(row: &[Self], profit: i32, rough: &Rough, tops: &mut [i32]) {
        scan::raise_plain(row, profit, rough, tops);
    }
}

/// An integer wide enough for scaled weights and prices.
pub(crate) trait Tick:
    Copy
    + Ord
    + Debug
    + Send
    + Sync
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Neg<Output = Self>
{
    const ZERO: Self;
    const ONE: Self;
    /// Below every value that can occur, and far enough from the edge to subtract from once.
    const LOWEST: Self;
    /// Prices beyond this mean that the type is too narrow for the problem.
    const LIMIT: Self;
    /// Bits that weights, scaling and path lengths may fill together.
    const BITS: u32;
    fn from_i128(x: i128) -> Self;
    fn to_i128(self) -> i128;
    fn shl(self, by: u32) -> Self;
    fn shr(self, by: u32) -> Self;
    /// One more than the place of the highest bit in which two numbers differ.
    fn highest_difference(self, other: Self) -> usize;
}

macro_rules! tick {
    ($t:ty, $bits:expr, $narrow:expr) => {
        impl Tick for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const LOWEST: Self = <$t>::MIN / 2;
            const LIMIT: Self = 1 << $bits;
            const BITS: u32 = $bits - 2;
            #[inline]
            fn from_i128(x: i128) -> Self {
                $narrow(x)
            }
            #[inline]
            fn to_i128(self) -> i128 {
                i128::from(self)
            }
            #[inline]
            fn shl(self, by: u32) -> Self {
                self << by
            }
            #[inline]
            fn shr(self, by: u32) -> Self {
                self >> by
            }
            #[inline]
            fn highest_difference(self, other: Self) -> usize {
                (<$t>::BITS - (self ^ other).leading_zeros()) as usize
            }
        }
    };
}

#[expect(clippy::cast_possible_truncation, reason = "callers stay within BITS")]
#[inline]
fn narrow(x: i128) -> i64 {
    x as i64
}

tick!(i64, 61, narrow);
tick!(i128, 124, std::convert::identity);
