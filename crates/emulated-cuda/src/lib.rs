//! `libcuda.so.1` of an emulated GPU: the driver interface over `muxflow-emulated-gpu`.
//!
//! Each module under [`api`] translates one family of C calls; behaviour is in the modules beside
//! it. Symbols without a function here are written by `build.rs` and return
//! `CUDA_ERROR_NOT_SUPPORTED`.
//!
//! Absent on purpose: NVIDIA's private export tables (so no answer to the integrity check of its
//! runtime library), graphics interop, and any knowledge of jobs or quotas.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "names, widths and argument lists are those of cuda.h"
)]

mod api;
mod attributes;
mod capture;
mod context;
mod driver;
mod event;
mod executor;
mod ffi;
mod graph;
mod image;
mod memory;
mod module;
mod native;
mod physical;
mod pool;
mod shared_event;
mod stream;
mod symbols;
mod work;
