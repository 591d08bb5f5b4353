//! Code on the device: modules and libraries take about as much memory as their image has bytes.
//! Which image the driver picks from a fat binary, and what a PTX text becomes, only the driver knows,
//! so this is a charge "as far as it can be known".

use core::ffi::{c_char, c_int, c_uint, c_void};

use muxflow_abi::cuda::result::{CUDA_ERROR_OUT_OF_MEMORY, CUDA_SUCCESS};
use muxflow_abi::cuda::{
    CU_LIMIT_MALLOC_HEAP_SIZE, CU_LIMIT_PRINTF_FIFO_SIZE, CUlibrary, CUmodule,
};

use crate::hook::peek;
use crate::quota::{self, HELD, Kind, key};
use crate::sys;

const ELF_MAGIC: u32 = u32::from_le_bytes(*b"\x7fELF");
const FAT_MAGIC: u32 = 0xba55_ed50;
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
/// More than any text that is PTX; a guard against a missing nul.
const LONGEST_TEXT: usize = 1 << 28;

/// Length of an image in memory, told by its own header.
fn image_bytes(image: *const c_void) -> u64 {
    let Some(magic) = peek(image.cast::<u32>()) else { return 0 };
    let at = |offset: usize| image.cast::<u8>().wrapping_add(offset);
    match magic {
        ELF_MAGIC => {
            // The section headers are last: their offset, size and number.
            let offset = peek(at(40).cast::<u64>()).unwrap_or(0);
            let size = peek(at(58).cast::<u16>()).unwrap_or(0);
            let number = peek(at(60).cast::<u16>()).unwrap_or(0);
            offset.saturating_add(u64::from(size) * u64::from(number))
        }
        FAT_MAGIC => {
            let header = peek(at(6).cast::<u16>()).unwrap_or(0);
            peek(at(8).cast::<u64>()).unwrap_or(0).saturating_add(header.into())
        }
        WRAPPER_MAGIC => peek(at(8).cast::<*const c_void>()).map_or(0, image_bytes),
        _ => {
            // SAFETY: anything else that the driver takes is a text with a nul at the end.
            let length = unsafe { libc::strnlen(image.cast(), LONGEST_TEXT) };
            length as u64
        }
    }
}

/// Length of a file; the driver will say what is wrong with it if it is not there.
fn file_bytes(path: *const c_char) -> u64 {
    if path.is_null() {
        return 0;
    }
    // SAFETY: a C string, as the driver expects it.
    unsafe {
        let fd = sys::syscall(libc::SYS_open, [path as usize, 0, 0, 0, 0, 0]);
        let Ok(descriptor) = usize::try_from(fd) else { return 0 };
        let size = sys::syscall(libc::SYS_lseek, [descriptor, 0, 2, 0, 0, 0]);
        sys::syscall(libc::SYS_close, [descriptor, 0, 0, 0, 0, 0]);
        u64::try_from(size).unwrap_or(0)
    }
}

fn handle(out: *mut *mut c_void) -> u64 {
    peek(out.cast_const()).map_or(0, |handle| handle as u64)
}

hooks! {
    fn cuModuleLoad(out: *mut CUmodule, path: *const c_char) |real| {
        let bytes = file_bytes(path);
        let device = quota::current_device();
        quota::allocate(Kind::Module, device, bytes, || real(out, path), || handle(out))
    }

    fn cuModuleLoadData | cuModuleLoadFatBinary(out: *mut CUmodule, image: *const c_void) |real| {
        let bytes = image_bytes(image);
        let device = quota::current_device();
        quota::allocate(Kind::Module, device, bytes, || real(out, image), || handle(out))
    }

    fn cuModuleLoadDataEx(
        out: *mut CUmodule,
        image: *const c_void,
        count: c_uint,
        options: *mut c_int,
        values: *mut *mut c_void,
    ) |real| {
        let bytes = image_bytes(image);
        let device = quota::current_device();
        let call = || real(out, image, count, options, values);
        quota::allocate(Kind::Module, device, bytes, call, || handle(out))
    }

    fn cuModuleUnload(module: CUmodule) |real| {
        quota::free(Kind::Module, module as u64, || real(module))
    }

    fn cuLibraryLoadData(
        out: *mut CUlibrary,
        image: *const c_void,
        jit: *mut c_int,
        jit_values: *mut *mut c_void,
        jit_count: c_uint,
        options: *mut c_int,
        values: *mut *mut c_void,
        count: c_uint,
    ) |real| {
        let bytes = image_bytes(image);
        let device = quota::current_device();
        let call = || real(out, image, jit, jit_values, jit_count, options, values, count);
        quota::allocate(Kind::Module, device, bytes, call, || handle(out))
    }

    fn cuLibraryLoadFromFile(
        out: *mut CUlibrary,
        path: *const c_char,
        jit: *mut c_int,
        jit_values: *mut *mut c_void,
        jit_count: c_uint,
        options: *mut c_int,
        values: *mut *mut c_void,
        count: c_uint,
    ) |real| {
        let bytes = file_bytes(path);
        let device = quota::current_device();
        let call = || real(out, path, jit, jit_values, jit_count, options, values, count);
        quota::allocate(Kind::Module, device, bytes, call, || handle(out))
    }

    fn cuLibraryUnload(library: CUlibrary) |real| {
        quota::free(Kind::Module, library as u64, || real(library))
    }

    fn cuCtxSetLimit(limit: c_int, value: usize) |real| {
        if ![CU_LIMIT_PRINTF_FIFO_SIZE, CU_LIMIT_MALLOC_HEAP_SIZE].contains(&limit) {
            return real(limit, value);
        }
        let device = quota::current_device();
        let note = key(Kind::Limit, (device as u64 + 1) << 8 | u64::from(limit.cast_unsigned()));
        let before = HELD.get(note).map_or(0, |held| quota::unpack(held).1);
        let now = quota::round(value as u64);
        if now > before && quota::charge(device, now - before).is_err() {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        let result = real(limit, value);
        if result != CUDA_SUCCESS {
            quota::uncharge(device, now.saturating_sub(before));
            return result;
        }
        if HELD.replace(note, quota::pack(device, now)).is_none() {
            HELD.insert(note, quota::pack(device, now));
        }
        quota::uncharge(device, before.saturating_sub(now));
        result
    }
}
