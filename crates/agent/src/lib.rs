//! The local executor of a node: watches its GPUs, runs MPS and the workloads, and keeps the online
//! service safe.
//!
//! Every decision is a law of `muxflow-policy`; this crate reads sensors, calls the laws and carries
//! out what they say. Plain threads and channels: one thread per GPU, because calls into a driver can
//! block for seconds and one GPU must never wait for another.
//!
//! Absent on purpose: any knowledge of whether a GPU is real, laws of its own, scheduling across
//! GPUs, an async runtime, and the interposer (it is only named in the environment of jobs).

pub mod agent;
pub mod blame;
pub mod breaker;
pub mod cgroup;
pub mod child;
pub mod config;
pub mod control_block;
pub mod descriptors;
pub mod doctor;
pub mod environment;
pub mod error;
pub mod errors;
pub mod gpu;
mod guard;
pub mod handle;
pub mod host;
pub mod http;
pub mod installed;
pub mod keeper;
pub mod launch;
pub mod logs;
pub mod marks;
pub mod metrics;
pub mod monitor;
pub mod mps;
mod namespace;
pub mod private;
pub mod process;
pub mod queue;
mod recovery;
mod relief;
pub mod runner;
pub mod stop;
mod stop_drive;
mod stuck;
pub mod sys;

pub use error::{AgentError, Result};
