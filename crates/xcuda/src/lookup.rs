//! The two ways to look a driver function up by name: `dlsym` and `cuGetProcAddress`.
//!
//! In both the real answer comes first, and only what the real driver has is replaced. Names that are
//! not ours go on to glibc by a jump, so that `RTLD_NEXT` and `RTLD_DEFAULT` see their true caller.

use core::ffi::{CStr, c_char, c_int, c_void};

use muxflow_abi::cuda::CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
use muxflow_abi::cuda::result::CUDA_SUCCESS;
use muxflow_abi::driver;

use crate::hook::{peek, poke};
use crate::{nvml, real};

/// Stands for "nobody has it": the look-up goes on under a name that nobody has, so that `dlerror`
/// says so.
const NOBODY: *const c_void = core::ptr::without_provenance(1);
static NOBODY_HAS: [u8; 40] = *b"muxflow: the driver has no such symbol\0\0";

/// The address that `dlsym(handle, name)` should give where it is a name of ours; null: not ours.
///
/// # Safety
/// `name` is what a program gave to `dlsym`: null or a C string.
unsafe extern "C" fn own_answer(handle: *mut c_void, name: *const c_char) -> *const c_void {
    if name.is_null() {
        return core::ptr::null();
    }
    // SAFETY: at least the nul can be read, and each further byte only after one that is not.
    let starts = unsafe {
        match *name.cast::<u8>() {
            b'c' => *name.cast::<u8>().add(1) == b'u',
            b'n' => *name.cast::<u8>().add(1) == b'v',
            b'd' => *name.cast::<u8>().add(1) == b'l',
            _ => false,
        }
    };
    if !starts {
        return core::ptr::null();
    }
    // SAFETY: a C string by contract.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    if text.starts_with(b"nvml") {
        return nvml::own_answer(handle, name, text);
    }
    let Some(index) = driver::index_of(text) else { return core::ptr::null() };
    if handle == libc::RTLD_NEXT {
        // Whoever asks for the next one after itself wants the driver's: give the handled one.
        let found = real::function(index);
        return if found.is_null() { NOBODY } else { real::replacement(index, found) };
    }
    let found = real::dlsym(handle, name).cast_const();
    if found.is_null() {
        return found;
    }
    let known = real::function(index);
    if known.is_null() {
        // The real driver lacks it; if only our own export was found, that is no answer.
        return if real::is_own(found) { NOBODY } else { found };
    }
    let ours = found == known || real::is_own(found);
    if ours { real::replacement(index, known) } else { found }
}

#[cfg(all(panic = "abort", not(test)))]
mod export {
    use core::arch::naked_asm;

    /// Unversioned, so that callers of `dlsym@GLIBC_2.2.5` and of `dlsym@GLIBC_2.34` both get it.
    #[unsafe(naked)]
    #[unsafe(no_mangle)]
    unsafe extern "C" fn dlsym() {
        naked_asm!(
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {own}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "test rax, rax",
            "jz 4f",
            "cmp rax, 1",
            "jne 3f",
            "lea rsi, [rip + {nobody_has}]",
            "4:",
            "mov rax, qword ptr [rip + {known}]",
            "test rax, rax",
            "jnz 2f",
            "push rdi",
            "push rsi",
            "sub rsp, 8",
            "call {find}",
            "add rsp, 8",
            "pop rsi",
            "pop rdi",
            "test rax, rax",
            "jz 3f",
            "2:",
            "jmp rax",
            "3:",
            "ret",
            own = sym super::own_answer,
            nobody_has = sym super::NOBODY_HAS,
            known = sym crate::real::DLSYM,
            find = sym crate::real::real_dlsym,
        )
    }
}

/// Puts our handler in the place of what the driver answered.
fn replace(name: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) {
    let Some(found) = peek(out) else { return };
    if name.is_null() || found.is_null() {
        return;
    }
    // SAFETY: the driver has just read the same C string.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    let per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM != 0;
    let version = u32::try_from(version).unwrap_or(0);
    let by_version = driver::resolve(text, version, per_thread);
    // The driver knows best which variant it gave: believe its address where we know it.
    let index = driver::variants(text)
        .find(|&index| real::function(index) == found.cast_const())
        .or(by_version);
    if let Some(index) = index {
        real::note(index, found);
        poke(out, real::replacement(index, found).cast_mut());
    }
}

hooks! {
    fn cuGetProcAddress(
        name: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        flags: u64,
    ) |real| {
        let result = real(name, out, version, flags);
        if result == CUDA_SUCCESS {
            replace(name, out, version, flags);
        }
        result
    }

    fn cuGetProcAddress_v2(
        name: *const c_char,
        out: *mut *mut c_void,
        version: c_int,
        flags: u64,
        status: *mut c_int,
    ) |real| {
        let result = real(name, out, version, flags, status);
        if result == CUDA_SUCCESS {
            replace(name, out, version, flags);
        }
        result
    }
}
