//! The control block: how the agent holds a job back, and how the job's processes answer.
//!
//! It is two files. The *agent part* is written by the agent only; the processes of the job map it
//! read-only. The *job part* is written by those processes, and the agent treats all of it as hostile
//! input. There is no lock in either: every field is an atomic, every slot has one owner, and what a
//! dead owner held is found by looking whether it lives (see [`job`]).
//!
//! This module knows the layout and the atomics; mapping the files, clocks and `/proc` belong to the
//! callers.

pub mod agent;
pub mod hand;
pub mod job;
pub mod rhythm;
mod slot;

use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

pub use agent::{AgentPart, Gate, Limits, Settings};
pub use job::{Counters, JobPart, Owner, SlotState};

/// Name of the agent part in the directory that `MUXFLOW_CONTROL` names.
pub const AGENT_FILE: &str = "agent";
/// Name of the job part beside it.
pub const JOB_FILE: &str = "job";
/// Changes whenever the layout does: the two sides refuse each other otherwise.
pub const VERSION: u64 = 3;
/// Devices that one job may use.
pub const DEVICES: usize = 16;
/// Processes that one job may have at one time.
pub const SLOTS: usize = 1024;

const AGENT_MAGIC: u64 = u64::from_le_bytes(*b"MuxFlowA");
const JOB_MAGIC: u64 = u64::from_le_bytes(*b"MuxFlowJ");

/// Why a control block cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Invalid {
    /// The file is shorter than the layout.
    Truncated {
        /// Its length.
        bytes: usize,
        /// The length it must have.
        needed: usize,
    },
    /// It does not start with the right eight bytes.
    Magic,
    /// It was written by another version of MuxFlow.
    Version {
        /// The version found.
        found: u64,
    },
    /// Header or settings do not match their checksum.
    Checksum,
    /// The two parts belong to different jobs.
    Generation,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated { bytes, needed } => {
                write!(f, "control block truncated: {bytes} of {needed} bytes")
            }
            Self::Magic => f.write_str("not a control block: wrong magic"),
            Self::Version { found } => {
                write!(f, "control block has version {found}, this program knows {VERSION}")
            }
            Self::Checksum => f.write_str("control block damaged: checksum differs"),
            Self::Generation => f.write_str("agent part and job part are of different jobs"),
        }
    }
}

impl core::error::Error for Invalid {}

/// Start of either part. All fields are fixed once written; the checksum is written last.
#[repr(C)]
#[derive(Debug)]
pub struct Header {
    magic: AtomicU64,
    version: AtomicU64,
    bytes: AtomicU64,
    generation: AtomicU64,
    checksum: AtomicU64,
    spare: [AtomicU64; 3],
}

impl Header {
    fn write(&self, magic: u64, bytes: usize, generation: u64, rest: u64) {
        self.magic.store(magic, Ordering::Relaxed);
        self.version.store(VERSION, Ordering::Relaxed);
        self.bytes.store(bytes as u64, Ordering::Relaxed);
        self.generation.store(generation, Ordering::Relaxed);
        self.checksum.store(self.sum(rest), Ordering::Release);
    }

    fn sum(&self, rest: u64) -> u64 {
        [&self.magic, &self.version, &self.bytes, &self.generation]
            .into_iter()
            .fold(rest, |sum, word| mix(sum, word.load(Ordering::Relaxed)))
    }

    fn check(&self, magic: u64, bytes: usize, rest: u64) -> Result<(), Invalid> {
        let checksum = self.checksum.load(Ordering::Acquire);
        if self.magic.load(Ordering::Relaxed) != magic {
            return Err(Invalid::Magic);
        }
        let found = self.version.load(Ordering::Relaxed);
        if found != VERSION {
            return Err(Invalid::Version { found });
        }
        let sized = self.bytes.load(Ordering::Relaxed) == bytes as u64;
        if sized && checksum == self.sum(rest) { Ok(()) } else { Err(Invalid::Checksum) }
    }
}

/// One step of FNV-1a over eight bytes at a time, with a shift so that high bits count too.
fn mix(sum: u64, word: u64) -> u64 {
    let mixed = (sum ^ word).wrapping_mul(0x0000_0100_0000_01b3);
    mixed ^ (mixed >> 29)
}
