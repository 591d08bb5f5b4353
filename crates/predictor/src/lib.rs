//! Predicts how fast an offline job runs beside an online service, from what each does alone.
//!
//! The conservative [`rule`] needs no data and never promises more than the SM share allows.
//!
//! Absent on purpose: no files, clock or environment (the programs read and write), and no sight of
//! the GPU model: a prediction never peeks at the truth.

#![deny(unsafe_code)]

pub mod bound;
pub mod datasets;
pub mod error;
pub mod feature;
pub mod file;
mod gemm;
pub mod kernel_model;
pub mod linear;
pub mod mlp;
pub mod model;
mod pairs;
pub mod random;
pub mod registry;
pub mod rule;
pub mod sample;
pub mod select;
pub mod simd;
pub mod study;
pub mod trained;
pub mod trees;
pub mod validate;

pub use error::PredictorError;
pub use registry::{Registry, StandsFor};
pub use rule::ConservativeRule;
pub use sample::{Dataset, SpeedSample};
pub use trained::{Card, TrainedModel};
