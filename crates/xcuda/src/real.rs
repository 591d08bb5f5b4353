//! The real driver: where it is, and the addresses of its functions.
//!
//! As a preload, the program or one of its libraries loads it; as a stand-in (a `libcuda.so.1` that is
//! found first) we load it ourselves. We are never our own real driver: libraries are compared by base
//! address, files by device and inode.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::fmt::Write;
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicUsize, Ordering};

use muxflow_abi::driver::DRIVER;

use crate::elf::{self, Library};
use crate::{sys, table};

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

static REAL: [AtomicPtr<c_void>; DRIVER.len()] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; DRIVER.len()];
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
/// glibc's own `dlsym`; read by the exported one.
pub(crate) static DLSYM: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());
static OWN_BASE: AtomicUsize = AtomicUsize::new(0);

/// The driver's function at a place of the table; null when it has none.
#[inline]
pub(crate) fn function(index: usize) -> *const c_void {
    let Some(cell) = REAL.get(index) else { return core::ptr::null() };
    let known = cell.load(Ordering::Acquire);
    if known.is_null() { find(index) } else { known }
}

/// The driver's function, if it was looked up before.
#[inline(always)]
pub(crate) fn known(index: usize) -> *const c_void {
    REAL.get(index).map_or(core::ptr::null(), |cell| cell.load(Ordering::Acquire).cast_const())
}

#[cold]
fn find(index: usize) -> *const c_void {
    let driver = handle();
    if driver.is_null() {
        return core::ptr::null();
    }
    let mut name = sys::Line::new();
    if name.write_str(DRIVER[index].symbol).is_err() {
        return core::ptr::null();
    }
    let found = dlsym(driver, name.as_c());
    REAL[index].store(found, Ordering::Release);
    found
}

/// Notes the address that the driver itself gave for a function.
pub(crate) fn note(index: usize, address: *const c_void) {
    if let Some(cell) = REAL.get(index) {
        let empty = core::ptr::null_mut();
        let _was =
            cell.compare_exchange(empty, address.cast_mut(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// glibc's `dlsym`, asked by us.
pub(crate) fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let function = real_dlsym();
    if function.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: the address is glibc's dlsym.
    unsafe { core::mem::transmute::<*mut c_void, Dlsym>(function)(handle, name) }
}

/// Address of glibc's `dlsym`.
pub(crate) extern "C" fn real_dlsym() -> *mut c_void {
    let known = DLSYM.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    refuse_musl();
    let found = elf::libc_function(c"dlsym").cast_mut();
    DLSYM.store(found, Ordering::Release);
    found
}

/// musl's loader has other rules (no RTLD_NEXT of ours, no versions): say so and stop.
fn refuse_musl() {
    let musl =
        elf::find_library(&|path, _| elf::file_name(path.to_bytes()).starts_with(b"ld-musl"));
    if musl.is_some() {
        sys::say("this program runs on musl; MuxFlow needs glibc 2.17 or newer. Stopping it");
        sys::exit_group(126);
    }
}

/// Base address of this library.
fn own_base() -> usize {
    let known = OWN_BASE.load(Ordering::Relaxed);
    if known != 0 {
        return known;
    }
    let found = base_of(own_base as *const c_void);
    OWN_BASE.store(found, Ordering::Relaxed);
    found
}

/// Base address of the library that holds an address; zero when none does.
fn base_of(address: *const c_void) -> usize {
    let mut info = core::mem::MaybeUninit::<libc::Dl_info>::zeroed();
    let function = elf::libc_function(c"dladdr");
    if function.is_null() || address.is_null() {
        return 0;
    }
    // SAFETY: the address is glibc's dladdr; `info` is a valid place to write to, and zeroed is valid.
    unsafe {
        let dladdr = core::mem::transmute::<
            *const c_void,
            unsafe extern "C" fn(*const c_void, *mut libc::Dl_info) -> c_int,
        >(function);
        dladdr(address, info.as_mut_ptr());
        info.assume_init().dli_fbase as usize
    }
}

/// Whether an address lies in this library.
pub(crate) fn is_own(address: *const c_void) -> bool {
    !address.is_null() && base_of(address) == own_base()
}

/// The handle of the real driver; null (and said once) when there is none.
pub(crate) fn handle() -> *mut c_void {
    static SAID: AtomicU32 = AtomicU32::new(0);
    let known = HANDLE.load(Ordering::Acquire);
    if !known.is_null() {
        return known;
    }
    let found = locate();
    if found.is_null() {
        sys::say_once(&SAID, "no NVIDIA driver found: no libcuda.so.1 behind this one");
    } else {
        HANDLE.store(found, Ordering::Release);
    }
    found
}

fn locate() -> *mut c_void {
    // SAFETY: getenv reads the environment; the text lives on.
    let named = unsafe { libc::getenv(c"MUXFLOW_REAL_LIBCUDA".as_ptr()) };
    if !named.is_null() {
        return open(named);
    }
    let own = own_base();
    let loaded = elf::find_library(&|path, library| {
        elf::file_name(path.to_bytes()).starts_with(b"libcuda.so") && library.base != own
    });
    if let Some(Library { name, .. }) = loaded {
        return open(name);
    }
    // SAFETY: as above.
    let path = unsafe { libc::getenv(c"LD_LIBRARY_PATH".as_ptr()) };
    if !path.is_null() {
        // SAFETY: a value of the environment is a C string.
        let path = unsafe { CStr::from_ptr(path) };
        for directory in path.to_bytes().split(|&byte| byte == b':' || byte == b';') {
            let found = try_directory(directory);
            if !found.is_null() {
                return found;
            }
        }
    }
    let found = open(c"libcuda.so.1".as_ptr());
    if !found.is_null() && !is_own_handle(found) {
        return found;
    }
    const PLACES: [&[u8]; 5] = [
        b"/usr/lib/x86_64-linux-gnu",
        b"/usr/lib64",
        b"/usr/local/nvidia/lib64",
        b"/usr/local/cuda/compat",
        b"/usr/lib/wsl/lib",
    ];
    let found = PLACES.iter().map(|place| try_directory(place)).find(|found| !found.is_null());
    found.unwrap_or(core::ptr::null_mut())
}

fn try_directory(directory: &[u8]) -> *mut c_void {
    let Ok(directory) = core::str::from_utf8(directory) else { return core::ptr::null_mut() };
    if directory.is_empty() {
        return core::ptr::null_mut();
    }
    let mut path = sys::Line::new();
    if write!(path, "{directory}/libcuda.so.1").is_err() {
        return core::ptr::null_mut();
    }
    let path = path.as_c();
    // SAFETY: a C string.
    if unsafe { sys::syscall(libc::SYS_access, [path as usize, 0, 0, 0, 0, 0]) } != 0 {
        return core::ptr::null_mut();
    }
    let found = open(path);
    if is_own_handle(found) { core::ptr::null_mut() } else { found }
}

/// A handle is ours if looking up a driver function in it leads to our export.
fn is_own_handle(handle: *mut c_void) -> bool {
    if handle.is_null() {
        return false;
    }
    is_own(dlsym(handle, c"cuInit".as_ptr()))
}

fn open(path: *const c_char) -> *mut c_void {
    let function = elf::libc_function(c"dlopen");
    if function.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: the address is glibc's dlopen; the path is a C string.
    unsafe {
        core::mem::transmute::<*const c_void, Dlopen>(function)(
            path,
            libc::RTLD_NOW | libc::RTLD_LOCAL,
        )
    }
}

/// What a look-up that led to `address` should give for a driver function: our handler or what was
/// found.
pub(crate) fn replacement(index: usize, address: *const c_void) -> *const c_void {
    crate::hook::handler(index).unwrap_or(address)
}

const _: () = assert!(DRIVER.len() > table::index::cuInit);
