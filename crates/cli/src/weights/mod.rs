//! Weights from files: NumPy's `.npy` and `.csv`, read once into the memory they need and no more.
//!
//! The shorter side of the matrix always becomes the rows, whatever the file's order, because the
//! solver would otherwise make a turned copy. [`Matrix::turned`] says whether that swapped them.

mod csv;
mod npy;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context as _, bail};
use muxflow_matching::{Dense, MatchError, Scalar};

/// How numbers of the file are taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading {
    /// This number means that the edge is forbidden.
    pub(crate) forbid: Option<f64>,
    /// The smallest total is sought, so that +∞ means forbidden rather than -∞.
    pub(crate) minimize: bool,
}

impl Reading {
    fn losing(self) -> f64 {
        if self.minimize { f64::INFINITY } else { f64::NEG_INFINITY }
    }
}

/// A kind of number that files hold.
pub(crate) trait Number: Scalar {
    /// Bytes in a file.
    const BYTES: usize;
    /// From its bytes, the least significant first.
    fn from_bytes(bytes: &[u8]) -> Self;
    /// Rounded to this kind.
    fn from_f64(x: f64) -> Self;
}

impl Number for f32 {
    const BYTES: usize = 4;

    fn from_bytes(bytes: &[u8]) -> Self {
        bytes.try_into().map_or(f32::NAN, f32::from_le_bytes)
    }

    #[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
    fn from_f64(x: f64) -> Self {
        x as f32
    }
}

impl Number for f64 {
    const BYTES: usize = 8;

    fn from_bytes(bytes: &[u8]) -> Self {
        bytes.try_into().map_or(f64::NAN, f64::from_le_bytes)
    }

    fn from_f64(x: f64) -> Self {
        x
    }
}

/// A matrix with no more rows than columns.
#[derive(Debug)]
pub(crate) struct Matrix<S> {
    rows: usize,
    cols: usize,
    data: Vec<S>,
    /// Whether the rows here are the columns of the file.
    pub(crate) turned: bool,
}

impl<S: Number> Matrix<S> {
    /// For the solver.
    pub(crate) fn weights(&self) -> Result<Dense<'_, S>, MatchError> {
        Dense::new(self.rows, self.cols, &self.data)
    }

    /// Rows and columns of the file.
    pub(crate) fn shape(&self) -> (usize, usize) {
        if self.turned { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// The weight at a place of the file.
    pub(crate) fn at(&self, row: usize, col: usize) -> f64 {
        let (r, c) = if self.turned { (col, row) } else { (row, col) };
        self.data[r * self.cols + c].to_f64()
    }

    /// Puts numbers that come line by line where they belong.
    fn arrange(
        lines: usize,
        width: usize,
        lines_are_rows: bool,
        mut next: impl FnMut(usize, &mut [S]) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let total = lines.checked_mul(width).context("the shape overflows")?;
        let mut data = Vec::new();
        data.try_reserve_exact(total)
            .with_context(|| format!("{lines} × {width} numbers do not fit into memory"))?;
        data.resize(total, S::from_f64(0.0));
        if lines <= width {
            for line in 0..lines {
                next(line, &mut data[line * width..(line + 1) * width])?;
            }
            return Ok(Self { rows: lines, cols: width, data, turned: !lines_are_rows });
        }
        let mut buffer = vec![S::from_f64(0.0); width];
        for line in 0..lines {
            next(line, &mut buffer)?;
            for (at, &x) in buffer.iter().enumerate() {
                data[at * lines + line] = x;
            }
        }
        Ok(Self { rows: width, cols: lines, data, turned: lines_are_rows })
    }
}

/// A matrix of either kind.
#[derive(Debug)]
pub(crate) enum Loaded {
    F32(Matrix<f32>),
    F64(Matrix<f64>),
}

/// Reads a file by the ending of its name.
pub(crate) fn load(path: &Path, reading: Reading) -> anyhow::Result<Loaded> {
    let name = path.display();
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    let open = || File::open(path).with_context(|| format!("{name}: cannot open the file"));
    match ending.to_ascii_lowercase().as_str() {
        "npy" => {
            let file = open()?;
            let bytes =
                file.metadata().with_context(|| format!("{name}: cannot see its size"))?.len();
            npy::read(&mut BufReader::with_capacity(1 << 20, file), bytes, reading)
                .with_context(|| name.to_string())
        }
        "csv" => csv::read(BufReader::new(open()?), reading)
            .map(Loaded::F64)
            .with_context(|| name.to_string()),
        _ => bail!(
            "{name}: the name must end in .npy or .csv, to tell how to read it; \
             numpy.save(\"weights.npy\", array) writes the former"
        ),
    }
}
