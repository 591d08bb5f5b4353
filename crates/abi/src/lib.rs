//! Layouts that two programs must agree on: the CUDA driver API, NVML, and the control block that
//! the agent and the interposer share.
//!
//! Everything is `repr(C)` or a plain table. The driver and NVML tables are written by
//! `cargo xtask codegen` from NVIDIA's public headers, and a test compiles C against those headers to
//! hold the layouts here to them.
//!
//! Absent on purpose: dependencies, `std`, system calls, mapping of memory (the callers map), and any
//! decision about a job or a GPU.

#![no_std]

pub mod control;
pub mod cuda;
pub mod driver;
pub mod handled;
pub mod nvml;

mod generated {
    pub(crate) mod driver;
    pub(crate) mod nvml;
    pub(crate) mod symbols;
}
