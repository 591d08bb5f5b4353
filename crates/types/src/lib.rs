//! The words of the domain, as types that cannot hold a nonsense value.
//!
//! Every other crate speaks in these: an id is not a string, a percentage is not a float, and a
//! value out of range cannot be built. Nothing here decides anything.
//!
//! Absent on purpose: no serialisation (wire formats live in `api`), no clock (times are
//! [`unit::Micros`] handed in by the caller), no IO, no decisions.

#![deny(unsafe_code)]

pub mod health;
pub mod id;
pub mod plan;
pub mod predict;
pub mod profile;
pub mod sample;
pub mod snapshot;
pub mod unit;

pub use health::HealthState;
pub use id::{GpuId, GpuType, IdError, JobId, NodeId, ServiceId, WorkloadName};
pub use plan::{
    Assignment, Change, ClusterPlan, Eviction, EvictionReason, Receipt, WaitReason, Waiting,
};
pub use predict::{
    OfflineInput, OnlineInput, PairSpeeds, Provenance, SpeedPrediction, SpeedPredictor,
};
pub use profile::{ProfileRecord, SpeedSample};
pub use sample::GpuSample;
pub use snapshot::{ClusterSnapshot, GpuSnapshot, JobSnapshot, OnlineSnapshot};
pub use unit::{Bytes, MegaHertz, Micros, Percent, SmCount, SmShare, UnitError, Watts};
