//! Where weights come from: a slice, or a closure asked for a piece of a row at a time.

use std::marker::PhantomData;

use crate::error::MatchError;
use crate::scalar::Scalar;

/// A matrix of weights, read a piece of a row at a time, several times over.
///
/// The infinity of the losing direction (−∞ when maximising, +∞ when minimising) marks a
/// forbidden edge. The same question must always get the same answer.
pub trait Weights: Sync {
    /// `f32` or `f64`.
    type Scalar: Scalar;

    /// Number of rows.
    fn rows(&self) -> usize;

    /// Number of columns.
    fn cols(&self) -> usize;

    /// Writes the weights of `row` from column `first_col` on into the whole of `out`.
    fn fill(&self, row: usize, first_col: usize, out: &mut [Self::Scalar]);

    /// The whole row, where it lies in memory already. Saves a copy on every read.
    fn row(&self, row: usize) -> Option<&[Self::Scalar]> {
        let _: usize = row;
        None
    }
}

/// Weights in memory, row by row.
#[derive(Debug, Clone, Copy)]
pub struct Dense<'a, S> {
    rows: usize,
    cols: usize,
    data: &'a [S],
}

impl<'a, S: Scalar> Dense<'a, S> {
    /// A matrix over `data`, which holds its rows one after another.
    pub fn new(rows: usize, cols: usize, data: &'a [S]) -> Result<Self, MatchError> {
        if rows.checked_mul(cols) != Some(data.len()) {
            return Err(MatchError::Shape { rows, cols, len: data.len() });
        }
        Ok(Self { rows, cols, data })
    }
}

impl<S: Scalar> Weights for Dense<'_, S> {
    type Scalar = S;

    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn fill(&self, row: usize, first_col: usize, out: &mut [S]) {
        let from = row * self.cols + first_col;
        out.copy_from_slice(&self.data[from..from + out.len()]);
    }

    fn row(&self, row: usize) -> Option<&[S]> {
        Some(&self.data[row * self.cols..(row + 1) * self.cols])
    }
}

/// Weights computed when asked for; nothing of the matrix is held.
#[derive(Debug, Clone, Copy)]
pub struct Streamed<F, S> {
    rows: usize,
    cols: usize,
    fill: F,
    scalar: PhantomData<S>,
}

impl<S: Scalar, F: Fn(usize, usize, &mut [S]) + Sync> Streamed<F, S> {
    /// A matrix whose pieces `fill(row, first_col, out)` writes.
    pub fn new(rows: usize, cols: usize, fill: F) -> Self {
        Self { rows, cols, fill, scalar: PhantomData }
    }
}

impl<S: Scalar, F: Fn(usize, usize, &mut [S]) + Sync> Weights for Streamed<F, S> {
    type Scalar = S;

    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn fill(&self, row: usize, first_col: usize, out: &mut [S]) {
        (self.fill)(row, first_col, out);
    }
}

/// A matrix the solver made for itself: a transpose or a sample.
#[derive(Debug)]
pub(crate) struct Owned<S> {
    rows: usize,
    cols: usize,
    data: Vec<S>,
}

impl<S: Scalar> Owned<S> {
    /// The transpose of `w`, read in strips of rows so that writes stay close together.
    pub(crate) fn transposed<W: Weights<Scalar = S>>(w: &W) -> Self {
        const STRIP: usize = 16;
        let (rows, cols) = (w.rows(), w.cols());
        let mut data = vec![S::ZERO; rows * cols];
        let mut strip = vec![S::ZERO; STRIP * cols];
        for first in (0..rows).step_by(STRIP) {
            let height = STRIP.min(rows - first);
            for r in 0..height {
                read_row(w, first + r, &mut strip[r * cols..(r + 1) * cols]);
            }
            for c in 0..cols {
                for r in 0..height {
                    data[c * rows + first + r] = strip[r * cols + c];
                }
            }
        }
        Self { rows: cols, cols: rows, data }
    }

    /// The rows and columns of `w` at the given places.
    pub(crate) fn sampled<W: Weights<Scalar = S>>(w: &W, rows: &[u32], cols: &[u32]) -> Self {
        let mut data = Vec::with_capacity(rows.len() * cols.len());
        let mut buffer = Vec::new();
        for &row in rows {
            let line = row_of(w, row as usize, &mut buffer);
            data.extend(cols.iter().map(|&c| line[c as usize]));
        }
        Self { rows: rows.len(), cols: cols.len(), data }
    }
}

impl<S: Scalar> Weights for Owned<S> {
    type Scalar = S;

    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn fill(&self, row: usize, first_col: usize, out: &mut [S]) {
        let from = row * self.cols + first_col;
        out.copy_from_slice(&self.data[from..from + out.len()]);
    }

    fn row(&self, row: usize) -> Option<&[S]> {
        Some(&self.data[row * self.cols..(row + 1) * self.cols])
    }
}

/// One row, in place or through `buffer`.
pub(crate) fn row_of<'a, W: Weights>(
    w: &'a W,
    row: usize,
    buffer: &'a mut Vec<W::Scalar>,
) -> &'a [W::Scalar] {
    match w.row(row) {
        Some(slice) => slice,
        None => {
            buffer.resize(w.cols(), W::Scalar::ZERO);
            w.fill(row, 0, buffer);
            buffer
        }
    }
}

fn read_row<W: Weights>(w: &W, row: usize, out: &mut [W::Scalar]) {
    match w.row(row) {
        Some(slice) => out.copy_from_slice(slice),
        None => w.fill(row, 0, out),
    }
}
