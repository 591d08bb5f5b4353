//! What the end-to-end tests share: the built interposer, a stub driver, a C client, and jobs with a
//! control block.
//!
//! Everything is built once per test run into the target directory, under a lock, so that the tests of
//! several programs do not build over each other.

pub mod block;
pub mod browser;
pub mod build;
pub mod chaos;
pub mod job;
pub mod python;

pub use build::{client, stub, stub_driver, target, xcuda};
pub use job::{Job, Outcome, default_signals};
