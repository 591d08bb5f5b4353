//! The same brain's sensors and actuators on a Kubernetes cluster.
//!
//! [`resource`] has the custom resources through which the agents tell what their GPUs are like,
//! [`scheduler`] turns them and the pods into a snapshot, lets `policy` plan it and carries the plan
//! out, [`node`] is the agent's side of a node, [`device`] and [`dra`] what it tells the kubelet,
//! [`manifest`] writes what is to be installed, [`export`] makes objects of what one machine has
//! measured, and [`mod@connect`] makes clients. [`names`] lists
//! every name used.
//!
//! Absent on purpose: no cluster protocol of its own, no decisions (they are in `policy`), no state
//! that cannot be rebuilt from the API server.

#![deny(unsafe_code)]

pub mod connect;
pub mod device;
pub mod dra;
mod error;
mod events;
pub mod export;
pub mod manifest;
pub mod names;
pub mod node;
mod quantity;
pub mod resource;
pub mod scheduler;
mod whole_file;

pub use error::Error;
