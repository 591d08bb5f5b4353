//! `libnvidia-ml.so.1` of an emulated GPU: what monitoring tools and the agent ask.
//!
//! Every question goes to the device process of the GPU, which shows values as old as the real
//! counters would be. Functions without an implementation here return `NOT_SUPPORTED`.
//!
//! Absent on purpose: MIG, vGPU, NVLink counters, and any knowledge of jobs.

#![expect(clippy::cast_possible_truncation, reason = "names and widths are those of nvml.h")]

mod clocks;
mod events;
mod ffi;
mod fields;
mod gpm;
mod identity;
mod library;
mod memory;
mod processes;
mod stubs;
