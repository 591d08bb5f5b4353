//! The simulator: what sharing would give a cluster, in seconds instead of days.
//!
//! Discrete events on a virtual clock, everything random from one seed. The decisions are those of
//! `policy` (health machine, forecast, share, quota, retry, planner), asked through the same snapshot
//! and plan as in the real manager; the truth is `gpu-model`'s. Baselines of the paper are policies
//! beside it, one file each.
//!
//! What is averaged: between two ticks (a minute) request rates are constant, the launch gate stands
//! where its law would settle, and the health machine sees one sample for the whole tick. Latencies
//! come from a queueing model that is tested against request-by-request simulation.
//!
//! Absent on purpose: no real processes (the emulator's), no decisions of its own, and no way for a
//! policy to see the truth but the predictor that is labelled an oracle.

#![deny(unsafe_code)]

mod apply;
pub mod compare;
mod engine;
pub mod error;
pub mod exclusive;
mod faults;
pub mod latency;
pub mod metrics;
mod number;
pub mod outcome;
pub mod paper;
pub mod policy;
pub mod predictors;
pub mod queue;
pub mod report;
pub mod scenario;
mod setup;
mod snapshot;
mod stays;
mod timed;
pub mod trace;
mod world;

pub use compare::compare;
pub use engine::run;
pub use error::SimError;
pub use metrics::{RunResult, Summary};
pub use scenario::Scenario;
