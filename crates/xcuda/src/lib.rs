//! The interposer inside an offline process: it holds the process's device memory under a quota and
//! its kernel launches behind a gate, and it gives contexts back before the process ends.
//!
//! It stands between the program and the real `libcuda.so.1` on all three ways to an entry point:
//! exported symbols ([`table`]), `dlsym` and `cuGetProcAddress` ([`lookup`]). What it may do comes from
//! the control block that an agent writes ([`process`]); it decides nothing itself. When the control
//! block is missing, stale or damaged it takes the safe side: slow down, then stop.
//!
//! Absent on purpose: `std` (in the built library), an allocator, unwinding, locks and allocation on
//! the launch path, answers to private driver tables (`cuGetExportTable` passes untouched), and any
//! knowledge of what kind of GPU is behind the driver.

#![cfg_attr(panic = "abort", no_std)]
#![cfg_attr(
    not(panic = "abort"),
    expect(dead_code, reason = "exports exist only in the profile that ships")
)]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("xcuda speaks the x86-64 Linux ABI");

#[macro_use]
mod hook;
mod array;
mod capture;
mod context;
mod elf;
mod exit;
mod flight;
mod front;
mod gate;
mod graph;
mod import;
mod info;
mod launch;
mod lookup;
mod map;
mod memory;
mod module;
mod notes;
mod nvml;
mod pool;
mod process;
mod quota;
mod real;
mod record;
mod signal;
mod sys;
mod table;
mod virtual_memory;
mod worker;

#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    sys::say("internal error, stopping: please report it");
    sys::exit_group(70)
}
