//! `muxflow up` and its commands as real processes on emulated GPUs.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    reason = "a test that fails should say where"
)]

mod daily;
mod disk;
mod fuzz;
mod kills;
mod moves;
mod output;
mod outside;
mod replica;
mod services;
mod shadow;
mod slo;
mod users;
mod wants;
mod world;
