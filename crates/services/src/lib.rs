//! Online services of one machine: declared once, deployed as replicas on GPUs, found behind one
//! port each, balanced, scaled and restarted without losing a request.
//!
//! | module | what it holds |
//! | --- | --- |
//! | [`spec`] | what is declared, checked |
//! | [`executor`] | the port through which processes are started, and the agent behind it |
//! | [`pool`] | the replicas of a service as the front sees them, and the choice among them |
//! | [`front`] | HTTP/1.1 in front of the pool: balance, wait, try again |
//! | `patient` | the connection of a client that is not waited for for ever |
//! | [`check`] | health checks |
//! | [`latency`] | percentiles in windows |
//! | [`scale`] | how many replicas a load needs |
//! | [`service`] | one service: brings what runs to what is wanted, step by step |
//! | `service_loop` | its loop: orders, steps, what is written down of it |
//! | [`manager`] | all services |
//! | `state` | what is written down of them, to be found again after a restart |
//!
//! Latency is measured at the front and told to the executor, which holds it against the SLO: that is
//! how a service that slows down sends offline work away.
//!
//! Absent on purpose: laws of a GPU (they are in `policy`, behind the agent), TLS, HTTP/2, routing by
//! content, and more than one replica of any service on one GPU.

#![deny(unsafe_code)]

pub mod check;
pub mod error;
pub mod executor;
pub mod front;
pub mod latency;
pub mod manager;
mod patient;
pub mod pool;
pub mod scale;
pub mod service;
mod service_loop;
pub mod spec;
mod state;
mod upstream;

pub use error::ServiceError;
