//! What can be wrong with the weights handed in, each with its place.

use std::fmt;

/// Why there is no matching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MatchError {
    /// A weight is not a number.
    NotANumber {
        /// Row of the weight, from 0.
        row: usize,
        /// Column of the weight, from 0.
        col: usize,
    },
    /// A weight is infinite in the winning direction (the losing one means "forbidden").
    Infinite {
        /// Row of the weight, from 0.
        row: usize,
        /// Column of the weight, from 0.
        col: usize,
    },
    /// The slice of weights does not hold rows × columns numbers.
    Shape {
        /// Rows claimed.
        rows: usize,
        /// Columns claimed.
        cols: usize,
        /// Numbers handed in.
        len: usize,
    },
    /// A list that must have one entry for each row or column has another length.
    Length {
        /// Which list.
        what: &'static str,
        /// Entries needed.
        expected: usize,
        /// Entries handed in.
        got: usize,
    },
    /// An entry of a warm start points at a row or column the previous matching did not have.
    WarmIndex {
        /// Which list.
        what: &'static str,
        /// Position in the list.
        at: usize,
    },
    /// More rows, columns or units than 32-bit indices can name.
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How many.
        count: u64,
    },
    /// The prices left the range of 128-bit integers. No input is known that does this.
    PricesOutOfRange,
}

impl fmt::Display for MatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotANumber { row, col } => {
                write!(f, "the weight at row {row}, column {col} is not a number")
            }
            Self::Infinite { row, col } => write!(
                f,
                "the weight at row {row}, column {col} is infinite; only the losing infinity \
                 (-inf when maximising, inf when minimising) has a meaning: forbidden"
            ),
            Self::Shape { rows, cols, len } => {
                write!(f, "{rows} rows of {cols} columns need another count of weights than {len}")
            }
            Self::Length { what, expected, got } => {
                write!(f, "{what} has {got} entries where {expected} are needed")
            }
            Self::WarmIndex { what, at } => {
                write!(f, "{what} of the warm start points outside the previous matching at {at}")
            }
            Self::TooLarge { what, count } => {
                write!(f, "{count} {what} are more than 32-bit indices can name")
            }
            Self::PricesOutOfRange => write!(f, "the prices left the range of 128-bit integers"),
        }
    }
}

impl std::error::Error for MatchError {}
