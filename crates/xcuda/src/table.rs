//! One exported symbol per driver function. Each jumps through a slot; a slot starts at a resolver
//! that keeps all argument registers, finds the real function, and points the slot at our handler or at
//! the real function.

use core::arch::naked_asm;
use core::ffi::c_void;
use core::sync::atomic::{AtomicPtr, Ordering};

use muxflow_abi::cuda::CUresult;
use muxflow_abi::driver::DRIVER;

use crate::{hook, real, sys};

const COUNT: usize = DRIVER.len();

/// Where each exported symbol jumps to.
static SLOTS: [AtomicPtr<c_void>; COUNT] = {
    let resolver = resolve_and_jump as *const () as *mut c_void;
    let mut slots = [const { AtomicPtr::new(core::ptr::null_mut()) }; COUNT];
    let mut at = 0;
    while at < COUNT {
        slots[at] = AtomicPtr::new(resolver);
        at += 1;
    }
    slots
};

/// Reached with the symbol's index in r11 and the caller's arguments in place.
#[unsafe(naked)]
unsafe extern "C" fn resolve_and_jump() {
    naked_asm!(
        "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
        "sub rsp, 128",
        "movups [rsp], xmm0", "movups [rsp + 16], xmm1", "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3", "movups [rsp + 64], xmm4", "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6", "movups [rsp + 112], xmm7",
        "mov rdi, r11",
        "call {resolve}",
        "mov r11, rax",
        "movups xmm0, [rsp]", "movups xmm1, [rsp + 16]", "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]", "movups xmm4, [rsp + 64]", "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]", "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
        "jmp r11",
        resolve = sym resolve,
    )
}

/// Decides where a symbol leads, from now on.
extern "C" fn resolve(index: usize) -> *const c_void {
    let target = match real::function(index) {
        found if found.is_null() => {
            let symbol = DRIVER.get(index).map_or("?", |row| row.symbol);
            sys::say(format_args!("the driver has no {symbol}"));
            return missing as *const c_void;
        }
        found => hook::handler(index).unwrap_or(found),
    };
    if let Some(slot) = SLOTS.get(index) {
        slot.store(target.cast_mut(), Ordering::Release);
    }
    target
}

/// Stands for a function that the real driver does not have, in a program linked against it.
extern "C" fn missing() -> CUresult {
    muxflow_abi::cuda::result::CUDA_ERROR_NOT_FOUND
}

macro_rules! indices {
    ($($name:ident $index:literal,)*) => {
        /// The place of each symbol in the table, under its own name.
        #[allow(
            dead_code,
            non_upper_case_globals,
            clippy::allow_attributes,
            reason = "the names of the driver; most functions are only forwarded"
        )]
        pub(crate) mod index {
            $(pub(crate) const $name: usize = $index;)*
        }
    };
}
muxflow_abi::driver_symbols!(indices);

#[cfg(all(panic = "abort", not(test)))]
mod exports {
    use super::*;

    macro_rules! exports {
        ($($name:ident $index:literal,)*) => {
            $(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $name() {
                    naked_asm!(
                        "mov r11d, {index}",
                        "jmp qword ptr [rip + {slots} + 8 * {index}]",
                        index = const $index,
                        slots = sym SLOTS,
                    )
                }
            )*
        };
    }
    muxflow_abi::driver_symbols!(exports);
}
