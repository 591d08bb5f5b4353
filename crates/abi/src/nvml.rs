//! NVML's function names and the structs that the clamp and the emulated NVML fill in. Names and
//! fields are NVIDIA's; the C test of `crates/e2e` holds sizes and offsets to nvml.h.

#![expect(
    non_camel_case_types,
    non_snake_case,
    missing_docs,
    reason = "the names of nvml.h, so that its documentation applies"
)]

use core::ffi::{c_char, c_double, c_int, c_uint, c_ulonglong, c_void};

pub use crate::generated::nvml::NVML;

/// One function of NVML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvmlFn {
    /// The exported symbol.
    pub symbol: &'static str,
    /// Whether nvml.h of 12.9 declares it.
    pub in_12: bool,
    /// Whether nvml.h of 13.4 declares it.
    pub in_13: bool,
}

pub(crate) const fn nvml(symbol: &'static str, in_12: bool, in_13: bool) -> NvmlFn {
    NvmlFn { symbol, in_12, in_13 }
}

/// What every NVML call returns.
pub type nvmlReturn_t = c_uint;
/// Handle of a device.
pub type nvmlDevice_t = *mut c_void;
/// Handle of a set of events.
pub type nvmlEventSet_t = *mut c_void;
/// Handle of a GPM sample.
pub type nvmlGpmSample_t = *mut c_void;

pub const NVML_SUCCESS: nvmlReturn_t = 0;
pub const NVML_ERROR_UNINITIALIZED: nvmlReturn_t = 1;
pub const NVML_ERROR_INVALID_ARGUMENT: nvmlReturn_t = 2;
pub const NVML_ERROR_NOT_SUPPORTED: nvmlReturn_t = 3;
pub const NVML_ERROR_NO_PERMISSION: nvmlReturn_t = 4;
pub const NVML_ERROR_ALREADY_INITIALIZED: nvmlReturn_t = 5;
pub const NVML_ERROR_NOT_FOUND: nvmlReturn_t = 6;
pub const NVML_ERROR_INSUFFICIENT_SIZE: nvmlReturn_t = 7;
pub const NVML_ERROR_INSUFFICIENT_POWER: nvmlReturn_t = 8;
pub const NVML_ERROR_DRIVER_NOT_LOADED: nvmlReturn_t = 9;
pub const NVML_ERROR_TIMEOUT: nvmlReturn_t = 10;
pub const NVML_ERROR_IRQ_ISSUE: nvmlReturn_t = 11;
pub const NVML_ERROR_LIBRARY_NOT_FOUND: nvmlReturn_t = 12;
pub const NVML_ERROR_FUNCTION_NOT_FOUND: nvmlReturn_t = 13;
pub const NVML_ERROR_CORRUPTED_INFOROM: nvmlReturn_t = 14;
pub const NVML_ERROR_GPU_IS_LOST: nvmlReturn_t = 15;
pub const NVML_ERROR_RESET_REQUIRED: nvmlReturn_t = 16;
pub const NVML_ERROR_NO_DATA: nvmlReturn_t = 21;
pub const NVML_ERROR_ARGUMENT_VERSION_MISMATCH: nvmlReturn_t = 25;
pub const NVML_ERROR_UNKNOWN: nvmlReturn_t = 999;
pub const NVML_VALUE_NOT_AVAILABLE: c_ulonglong = c_ulonglong::MAX;

pub const NVML_CLOCK_GRAPHICS: c_int = 0;
pub const NVML_CLOCK_SM: c_int = 1;
pub const NVML_CLOCK_MEM: c_int = 2;
pub const NVML_CLOCK_VIDEO: c_int = 3;
pub const NVML_TEMPERATURE_GPU: c_int = 0;

pub const NVML_EVENT_TYPE_XID_CRITICAL_ERROR: c_ulonglong = 0x8;
pub const NVML_GPM_METRIC_GRAPHICS_UTIL: c_uint = 1;
pub const NVML_GPM_METRIC_SM_UTIL: c_uint = 2;
pub const NVML_GPM_METRIC_SM_OCCUPANCY: c_uint = 3;
pub const NVML_GPM_METRIC_DRAM_BW_UTIL: c_uint = 10;
pub const NVML_GPM_METRICS_GET_VERSION: c_uint = 1;
pub const NVML_GPM_SUPPORT_VERSION: c_uint = 1;

/// The value that the `version` field of a versioned struct carries.
#[must_use]
pub const fn struct_version(size: usize, version: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "sizes of small structs")]
    let size = size as u32;
    size | (version << 24)
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlMemory_t {
    pub total: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlMemory_v2_t {
    pub version: c_uint,
    pub total: c_ulonglong,
    pub reserved: c_ulonglong,
    pub free: c_ulonglong,
    pub used: c_ulonglong,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlBAR1Memory_t {
    pub bar1Total: c_ulonglong,
    pub bar1Free: c_ulonglong,
    pub bar1Used: c_ulonglong,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlUtilization_t {
    pub gpu: c_uint,
    pub memory: c_uint,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlProcessInfo_v1_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
}

/// Also what the `_v3` functions fill in.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlProcessInfo_v2_t {
    pub pid: c_uint,
    pub usedGpuMemory: c_ulonglong,
    pub gpuInstanceId: c_uint,
    pub computeInstanceId: c_uint,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlProcessUtilizationSample_t {
    pub pid: c_uint,
    pub timeStamp: c_ulonglong,
    pub smUtil: c_uint,
    pub memUtil: c_uint,
    pub encUtil: c_uint,
    pub decUtil: c_uint,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvmlEventData_t {
    pub device: nvmlDevice_t,
    pub eventType: c_ulonglong,
    pub eventData: c_ulonglong,
    pub gpuInstanceId: c_uint,
    pub computeInstanceId: c_uint,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvmlPciInfo_t {
    pub busIdLegacy: [c_char; 16],
    pub domain: c_uint,
    pub bus: c_uint,
    pub device: c_uint,
    pub pciDeviceId: c_uint,
    pub pciSubSystemId: c_uint,
    pub busId: [c_char; 32],
}

/// One GPM metric; the list behind `nvmlGpmMetricsGet_t` holds 210 of them in 12.9, 477 in 13.4.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvmlGpmMetric_t {
    pub metricId: c_uint,
    pub nvmlReturn: nvmlReturn_t,
    pub value: c_double,
    pub shortName: *mut c_char,
    pub longName: *mut c_char,
    pub unit: *mut c_char,
}

/// Head of `nvmlGpmMetricsGet_t`; `numMetrics` entries of [`nvmlGpmMetric_t`] follow.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct nvmlGpmMetricsGetHead_t {
    pub version: c_uint,
    pub numMetrics: c_uint,
    pub sample1: nvmlGpmSample_t,
    pub sample2: nvmlGpmSample_t,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct nvmlGpmSupport_t {
    pub version: c_uint,
    pub isSupportedDevice: c_uint,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn function_list_is_sorted_and_complete() {
        assert!(NVML.is_sorted_by(|a, b| a.symbol < b.symbol));
        assert_eq!(NVML.iter().filter(|f| f.in_12).count(), 386);
        assert_eq!(NVML.iter().filter(|f| f.in_13).count(), 427);
    }
}
