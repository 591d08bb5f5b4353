//! Functions that are there and say that they are not supported.

use muxflow_abi::nvml::{NVML_ERROR_NOT_SUPPORTED, nvmlReturn_t};

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
