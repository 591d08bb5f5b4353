//! NVML tells of the whole GPU; where the agent wants it, its memory queries tell the quota too.
//!
//! Set by `MUXFLOW_NVML_CLAMP=1`, because monitors that run inside a job may want the truth.

use core::ffi::{c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use muxflow_abi::control::DEVICES;
use muxflow_abi::nvml::{
    NVML_ERROR_FUNCTION_NOT_FOUND, NVML_SUCCESS, nvmlDevice_t, nvmlMemory_t, nvmlMemory_v2_t,
    nvmlReturn_t,
};

use crate::hook::{peek, poke};
use crate::{info, process, real};

type Uuid = unsafe extern "C" fn(nvmlDevice_t, *mut c_char, u32) -> nvmlReturn_t;

static MEMORY: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static MEMORY_V2: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static UUID: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

fn is_wanted() -> bool {
    process::environment(c"MUXFLOW_NVML_CLAMP").is_some_and(|value| value.to_bytes() == b"1")
}

/// Our function in the place of NVML's, where the one that was looked up exists.
pub(crate) fn own_answer(handle: *mut c_void, name: *const c_char, text: &[u8]) -> *const c_void {
    let (place, ours): (_, *const c_void) = match text {
        b"nvmlDeviceGetMemoryInfo" => (&MEMORY, memory_info as *const c_void),
        b"nvmlDeviceGetMemoryInfo_v2" => (&MEMORY_V2, memory_info_v2 as *const c_void),
        _ => return core::ptr::null(),
    };
    if handle == libc::RTLD_NEXT || !is_wanted() {
        return core::ptr::null();
    }
    let found = real::dlsym(handle, name);
    if found.is_null() {
        return found;
    }
    place.store(found, Ordering::Release);
    UUID.store(real::dlsym(handle, c"nvmlDeviceGetUUID".as_ptr()), Ordering::Release);
    ours
}

/// The place in the control block of an NVML device: by identity where the agent named devices.
fn place_of(device: nvmlDevice_t) -> usize {
    let settings = process::settings();
    if settings.devices.iter().all(|uuid| *uuid == [0; 16]) {
        return 0;
    }
    let function = UUID.load(Ordering::Acquire);
    let mut text = [0; 96];
    if function.is_null() {
        return DEVICES;
    }
    // SAFETY: NVML's function of that name; the buffer has the length that is given.
    let asked = unsafe {
        core::mem::transmute::<*mut c_void, Uuid>(function)(device, text.as_mut_ptr(), 96)
    };
    if asked != NVML_SUCCESS {
        return DEVICES;
    }
    let uuid = parse_uuid(&text);
    settings.devices.iter().position(|known| *known == uuid).unwrap_or(DEVICES)
}

/// `GPU-01234567-89ab-…` as sixteen bytes.
fn parse_uuid(text: &[c_char]) -> [u8; 16] {
    let mut uuid = [0; 16];
    let digits = text.iter().skip(4).filter_map(|&c| char::from(c.cast_unsigned()).to_digit(16));
    for (at, digit) in digits.take(32).enumerate() {
        uuid[at / 2] = (uuid[at / 2] << 4) | u8::try_from(digit).unwrap_or(0);
    }
    uuid
}

unsafe extern "C" fn memory_info(device: nvmlDevice_t, out: *mut nvmlMemory_t) -> nvmlReturn_t {
    type Real = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_t) -> nvmlReturn_t;
    let function = MEMORY.load(Ordering::Acquire);
    if function.is_null() {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    // SAFETY: NVML's function of that name, with the program's arguments.
    let result = unsafe { core::mem::transmute::<*mut c_void, Real>(function)(device, out) };
    if let (NVML_SUCCESS, Some(told)) = (result, peek(out.cast_const())) {
        let (free, total) = info::clamp(place_of(device), told.free, told.total);
        poke(out, nvmlMemory_t { total, free, used: total - free.min(total) });
    }
    result
}

unsafe extern "C" fn memory_info_v2(
    device: nvmlDevice_t,
    out: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    type Real = unsafe extern "C" fn(nvmlDevice_t, *mut nvmlMemory_v2_t) -> nvmlReturn_t;
    let function = MEMORY_V2.load(Ordering::Acquire);
    if function.is_null() {
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    }
    // SAFETY: NVML's function of that name, with the program's arguments.
    let result = unsafe { core::mem::transmute::<*mut c_void, Real>(function)(device, out) };
    if let (NVML_SUCCESS, Some(told)) = (result, peek(out.cast_const())) {
        let (free, total) = info::clamp(place_of(device), told.free, told.total);
        let used = total - free.min(total);
        poke(out, nvmlMemory_v2_t { total, reserved: 0, free, used, ..told });
    }
    result
}
