//! An emulated GPU that real CUDA clients cannot tell from the driver: the device process, what its
//! clients share with it, and the programs beside it.
//!
//! One process per GPU ([`device`]) steps `gpu-model` from event to event. The libraries
//! `emulated-cuda`, `emulated-nvml` and `emulated-dcgm` are thin: they translate the vendor's C
//! interfaces into work pushed through shared memory ([`channel`], [`client`]) and questions asked
//! over a socket ([`wire`]). Kernels given as PTX are interpreted in the client's own process
//! ([`ptx`]).
//!
//! Absent on purpose: no exported C symbols (the three libraries have them), no answer to the
//! integrity check of NVIDIA's runtime library, no decision about jobs.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "the layouts of other people's interfaces: widths are chosen by them"
)]

pub mod channel;
pub mod client;
pub mod cost;
pub mod device;
pub mod facts;
pub mod fault;
pub mod heap;
pub mod launcher;
pub mod mps;
pub mod node;
pub mod profile;
pub mod ptx;
pub mod sys;
pub mod wire;

use std::path::PathBuf;

/// What can go wrong around an emulated GPU.
#[derive(Debug, thiserror::Error)]
pub enum EmulationError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file or directory cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A directory in which another node runs.
    #[error("an emulated node runs in {path} already: end it, or give another directory")]
    InUse {
        /// Which.
        path: PathBuf,
    },
    /// A profile that makes no sense.
    #[error("the GPU profile {path} cannot be used: {reason}")]
    Profile {
        /// Which file.
        path: PathBuf,
        /// The field and what is wrong with it.
        reason: String,
    },
    /// The list of GPUs cannot be read.
    #[error("`{text}` is not a list of GPUs: {reason}")]
    Gpus {
        /// What was given.
        text: String,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// A fault that cannot be injected.
    #[error("`{text}` is not a fault: {reason}")]
    Fault {
        /// What was given.
        text: String,
        /// What would be right.
        reason: String,
    },
    /// No device answers.
    #[error("no emulated GPU answers at {path}: is its device process running?")]
    NoDevice {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}
