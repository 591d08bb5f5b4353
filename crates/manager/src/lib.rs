//! The global manager of one machine: takes jobs in, has them measured, decides with `policy` who
//! runs where, has a node carry it out, and tells everybody through an HTTP API.
//!
//! The truth about jobs is the store: a change is written before it is acted upon, and after a
//! `kill -9` the manager goes on from what is written and from what the node finds
//! ([`ends`]). The node is behind [`node::NodePort`]; decisions are `policy`'s.
//!
//! Start reading at [`lifecycle`] (the states of a job) and [`manager`].
//!
//! Absent on purpose: laws of its own, a cluster protocol (many machines are Kubernetes), knowledge
//! of whether a GPU is real, an async runtime outside the API server ([`http`]).

pub mod agent_port;
pub mod bus;
pub mod client;
pub mod clock;
pub mod config;
pub mod ending;
pub mod ends;
pub mod error;
pub mod explain;
pub mod history;
pub mod hosting;
pub mod http;
pub mod lifecycle;
pub mod logs;
pub mod manager;
pub mod node;
pub mod retention;
pub mod scheduler;
pub mod settings;
pub mod submit;
pub mod summary;
pub mod up;
pub mod user;
pub mod views;

pub use error::{ManagerError, Result};
pub use manager::Manager;
