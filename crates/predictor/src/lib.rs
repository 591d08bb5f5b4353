//! Predicts how fast an offline job runs beside an online service, from what each does alone.
//!
//! The conservative [`rule`] needs no data and never promises more than the SM share allows.
//!
//! Absent on purpose: no files, clock or environment (the programs read and write), and no sight of
//! the GPU model: a prediction never peeks at the truth.

#![deny(unsafe_code)]

pub mod datasets;
pub mod error;
pub mod feature;
mod gemm;
pub mod kernel_model;
pub mod linear;
pub mod mlp;
pub mod model;
pub mod random;
pub mod rule;
pub mod sample;
mod simd;
pub mod trees;
pub mod validate;

pub use error::PredictorError;
pub use rule::ConservativeRule;
pub use sample::{Dataset, SpeedSample};
