//! Every decision that MuxFlow takes, as functions of what was seen and of the time.
//!
//! [`node`] holds the laws of one GPU: its health, its launch gate, the share that it lends, what
//! follows from an error. [`cluster`] decides which offline job shares which GPU. [`retry`] says when a
//! failed job may be tried again.
//!
//! Absent on purpose: no clock, no IO, no environment (all of them are arguments), no knowledge of
//! `gpu-model`: a decision never peeks at the truth.

#![deny(unsafe_code)]

pub mod cluster;
pub mod node;
pub mod retry;
