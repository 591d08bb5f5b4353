//! Instances to measure matching with, and the clock to measure it by.
//!
//! All seeded: the same name gives the same matrix on every machine.

pub mod instance;
pub mod meter;
