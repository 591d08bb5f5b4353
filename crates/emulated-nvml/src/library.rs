//! Starting, versions, errors, finding devices.

use std::ffi::{CString, c_char, c_int, c_uint};
use std::sync::OnceLock;

use muxflow_abi::nvml::{NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND};
use muxflow_emulated_gpu::facts::untext;

use crate::ffi::{self, Answer, Gpu, Out, Text, api};
use crate::identity::{bus_id, uuid};

const ERRORS: [(c_uint, &str); 29] = [
    (0, "The operation was successful"),
    (1, "NVML was not first initialized with nvmlInit()"),
    (2, "A supplied argument is invalid"),
    (3, "The requested operation is not available on target device"),
    (4, "The current user does not have permission for operation"),
    (5, "Deprecated: Multiple initializations are now allowed"),
    (6, "A query to find an object was unsuccessful"),
    (7, "An input argument is not large enough"),
    (8, "A device's external power cables are not properly attached"),
    (9, "NVIDIA driver is not loaded"),
    (10, "User provided timeout passed"),
    (11, "NVIDIA Kernel detected an interrupt issue with a GPU"),
    (12, "NVML Shared Library couldn't be found or loaded"),
    (13, "Local version of NVML doesn't implement this function"),
    (14, "infoROM is corrupted"),
    (15, "The GPU has fallen off the bus or has otherwise become inaccessible"),
    (16, "The GPU requires a reset before it can be used again"),
    (17, "The GPU control device has been blocked by the operating system/cgroups"),
    (18, "RM detects a driver/library version mismatch"),
    (19, "An operation cannot be performed because the GPU is currently in use"),
    (20, "Insufficient memory"),
    (21, "No data"),
    (22, "The requested vgpu operation is not available on target device"),
    (23, "Insufficient resources"),
    (24, "Resource not in use"),
    (25, "Argument version mismatch"),
    (26, "Deprecated"),
    (27, "Not ready"),
    (999, "An internal driver error occurred"),
];

/// Words for a result; static, as callers keep the pointer.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: c_uint) -> *const c_char {
    static TEXTS: OnceLock<Vec<(c_uint, CString)>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        ERRORS.iter().filter_map(|(c, t)| Some((*c, CString::new(*t).ok()?))).collect()
    });
    let found = texts.iter().find(|(c, _)| *c == code).or_else(|| texts.last());
    found.map_or(std::ptr::null(), |(_, text)| text.as_ptr())
}

fn first_version() -> (u32, String) {
    let devices = ffi::devices().ok();
    devices.and_then(|d| d.first()).map_or((13_040, "615.71".to_owned()), |d| {
        (d.facts.cuda_version, untext(&d.facts.driver_version))
    })
}

fn by_index(index: c_uint, out: Out<Gpu>) -> Answer {
    let device = ffi::devices()?.get(index as usize).ok_or(NVML_ERROR_INVALID_ARGUMENT)?;
    // A GPU that is gone cannot be opened.
    device.stats()?;
    out.put(Gpu::of(device))
}

api! {
    fn nvmlInit, nvmlInit_v2() { ffi::open() }
    fn nvmlInitWithFlags(_flags: c_uint) { ffi::open() }
    fn nvmlShutdown() { ffi::close() }
    fn nvmlSystemGetDriverVersion(text: Out<c_char>, room: c_uint) {
        ffi::devices()?;
        text.text(room, &first_version().1)
    }
    fn nvmlSystemGetNVMLVersion(text: Out<c_char>, room: c_uint) {
        ffi::devices()?;
        let (cuda, driver) = first_version();
        text.text(room, &format!("{}.{driver}", cuda / 1000))
    }
    fn nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2(version: Out<c_int>) {
        version.put(first_version().0.cast_signed())
    }
    fn nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, room: c_uint) {
        ffi::devices()?;
        let path = format!("/proc/{pid}/cmdline");
        let line = std::fs::read(path).map_err(|_| NVML_ERROR_NOT_FOUND)?;
        let first = line.split(|b| *b == 0).next().unwrap_or_default();
        let text = String::from_utf8_lossy(first).into_owned();
        let cut: String = text.chars().take(room.saturating_sub(1) as usize).collect();
        name.text(room, &cut)
    }
    fn nvmlDeviceGetCount, nvmlDeviceGetCount_v2(count: Out<c_uint>) {
        count.put(ffi::devices()?.len() as c_uint)
    }
    fn nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<Gpu>) {
        by_index(index, out)
    }
    fn nvmlDeviceGetHandleByUUID(text: Text, out: Out<Gpu>) {
        let wanted = text.get()?;
        let found = ffi::devices()?.iter().position(|d| uuid(&d.facts) == wanted);
        by_index(found.ok_or(NVML_ERROR_NOT_FOUND)? as c_uint, out)
    }
    fn nvmlDeviceGetHandleBySerial(text: Text, out: Out<Gpu>) {
        let wanted = text.get()?;
        let found = ffi::devices()?.iter().position(|d| untext(&d.facts.serial) == wanted);
        by_index(found.ok_or(NVML_ERROR_NOT_FOUND)? as c_uint, out)
    }
    fn nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2(text: Text, out: Out<Gpu>) {
        let wanted = text.get()?.to_ascii_lowercase();
        let fits = |id: &str| id.to_ascii_lowercase().ends_with(&wanted) && !wanted.is_empty();
        let found = ffi::devices()?.iter().position(|d| fits(&bus_id(&d.facts)));
        by_index(found.ok_or(NVML_ERROR_NOT_FOUND)? as c_uint, out)
    }
}
