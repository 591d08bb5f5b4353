//! Values that NVML offers by number only.

use std::ffi::{c_int, c_uint};

use muxflow_abi::nvml::{NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS};

use crate::ffi::{Gpu, Out, api};

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`: what must happen before the GPU is whole again.
const RECOVERY_ACTION: c_uint = 230;
/// `NVML_VALUE_TYPE_UNSIGNED_INT`.
const UNSIGNED_INT: c_int = 1;

/// `nvmlFieldValue_t` of nvml.h.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct nvmlFieldValue_t {
    field: c_uint,
    scope: c_uint,
    timestamp: i64,
    latency_us: i64,
    value_type: c_int,
    result: c_uint,
    value: u64,
}

api! {
    fn nvmlDeviceGetFieldValues(gpu: Gpu, count: c_int, values: Out<nvmlFieldValue_t>) {
        let (_, stats) = gpu.stats()?;
        let count = usize::try_from(count).map_err(|_| NVML_ERROR_INVALID_ARGUMENT)?;
        for i in 0..count {
            let mut value = values.get_at(i)?;
            value.value_type = UNSIGNED_INT;
            (value.result, value.value) = match value.field {
                RECOVERY_ACTION => (NVML_SUCCESS, stats.recovery_action.into()),
                _ => (NVML_ERROR_NOT_SUPPORTED, 0),
            };
            values.put_at(i, value);
        }
        Ok(())
    }
}
