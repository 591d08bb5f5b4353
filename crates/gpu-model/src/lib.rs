//! Ground truth of a shared GPU: how fast each tenant runs, what the counters show, what the clock
//! does.
//!
//! One contention function ([`contention::contend`]) answers for a set of kernels that are resident
//! at one moment. The emulator steps kernel by kernel through [`device::Device`]; the simulator takes
//! the long-run average in closed form from [`average`]. Both therefore agree by construction, up to
//! the independence that averaging assumes.
//!
//! Everything about a type of GPU is a TOML text ([`profile::GpuProfile::from_toml`]), everything
//! about a workload is a [`shape::WorkloadShape`], also TOML: a new type or workload is a file.
//!
//! Absent on purpose: no IO and no clock (the caller owns time), no queueing of requests (the
//! simulator's), no decisions. `policy`, `predictor` and `matching` must not depend on this crate.

#![deny(unsafe_code)]

pub mod average;
pub mod contention;
pub mod device;
pub mod error;
pub mod fault;
pub mod power;
pub mod profile;
mod profile_file;
pub mod rng;
pub mod samples;
pub mod shape;
mod shape_file;

pub use average::{
    Averaged, Gap, Group, GroupOutcome, Pair, PairOutcome, Tenant, averaged, group, pair,
};
pub use contention::{ClientId, Load, Resident, contend};
pub use device::{Device, Evaluation, Sharing};
pub use error::ModelError;
pub use fault::{FaultKind, FaultRates};
pub use power::{ClockState, PowerModel};
pub use profile::GpuProfile;
pub use rng::Rng;
pub use samples::{PairSample, samples};
pub use shape::{Phase, Placed, WorkloadShape};
