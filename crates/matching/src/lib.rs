//! Exact maximum-weight bipartite matching, with a certificate of optimality.
//!
//! The scheduler pairs offline jobs with online GPUs by the predicted speed of every pair. That is an
//! assignment problem of up to 20,000 by 20,000, full of near ties, that must be solved in seconds
//! and to the optimum, because anything less cannot be told from a mistake.
//!
//! - [`solve()`] takes a matrix ([`Dense`], or [`Streamed`] from a closure) and returns a [`Matching`].
//! - [`solve_classes`] takes a matrix between classes and the number of members of each.
//! - [`verify`] and [`verify_flow`] check a result against the weights, by its dual prices, with
//!   code that shares nothing with the solver.
//!
//! By default as many vertices as possible are matched, and among all such matchings the total is
//! the largest (or smallest): without forbidden edges, every vertex of the smaller side. With
//! [`Options::optional`] the total alone counts, and edges that would lower it are left out.
//! An infinite weight in the losing direction forbids an edge; NaN and the other infinity are
//! refused by position.
//!
//! The result is exact for the weights as given where they lie on a common binary grid of at most
//! 58 bits (see `grid`); the checker says so, or by how much the result may miss the optimum.
//! The same input gives the same output on every run, on every machine, with any number of threads.
//!
//! Memory beside the weights: about 1.6 kB for each vertex of the smaller side, and up to 4 kB more
//! in a warm start. When there are more rows than columns the solver makes a transposed copy of the
//! weights; hand in the smaller side as rows to avoid it.
//!
//! Absent on purpose: no knowledge of GPUs or jobs, no IO, clock, environment or randomness, no
//! threads unless asked, no dependency on any other crate.

#![deny(unsafe_code)]

mod auction;
mod certificate;
mod check;
mod classes;
mod error;
mod front;
mod grid;
mod level;
mod lists;
mod long;
mod market;
mod queue;
mod repair;
mod scalar;
mod scan;
mod solve;
mod start;
mod stock;
mod weights;

pub use certificate::{Certificate, Proof, Side};
pub use check::{CertificateError, verify, verify_flow};
pub use error::MatchError;
pub use scalar::Scalar;
pub use solve::{Effort, Flow, Matching, Options, Share, Warm, solve, solve_classes};
pub use weights::{Dense, Streamed, Weights};
