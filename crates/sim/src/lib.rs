//! The simulator: what sharing would give a cluster, in seconds instead of days.

#![deny(unsafe_code)]

pub mod error;
mod number;
pub mod trace;

pub use error::SimError;
