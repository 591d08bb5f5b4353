//! The laws of one GPU: they see samples and the time, and say what offline work may do.
//!
//! Each law is one file and knows nothing of the others; the agent and the simulator join them.
//! `docs/node-laws.md` explains them in prose, with every parameter and its default.

pub mod budget;
pub mod builtin;
pub mod config;
pub mod fault;
pub mod forecast;
pub mod gate;
pub mod health;
pub mod load;
pub mod quota;
pub mod rate;
pub mod repair;
pub mod share;
pub mod split;
pub mod xid;
