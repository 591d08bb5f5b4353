//! The border to C: arguments as types that check for null, handles that cannot be mixed up, and
//! the frame that every exported function has.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::marker::PhantomData;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use muxflow_abi::cuda::CUresult;
use muxflow_abi::cuda::result::{
    CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_INITIALIZED,
    CUDA_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_UNKNOWN, CUDA_SUCCESS,
};

/// Nothing, or the error to return.
pub(crate) type Answer<T = ()> = Result<T, CUresult>;

/// Where a result goes. The caller of a C interface promises that a pointer that is not null can
/// be written.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> Clone for Out<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Out<T> {}

impl<T> Out<T> {
    /// Writes; null is an invalid value.
    pub(crate) fn put(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the C caller promises a valid place.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes unless null.
    pub(crate) fn offer(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, and the C caller promises a valid place.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Whether there is a place at all.
    pub(crate) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// Reads what is there now.
    pub(crate) fn get(self) -> Answer<T>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: not null, and the C caller promises a valid value.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Writes the `i`-th of an array.
    pub(crate) fn put_at(self, i: usize, value: T) {
        if !self.0.is_null() {
            // SAFETY: the C caller promises an array long enough for the count it gave.
            unsafe { self.0.add(i).write_unaligned(value) };
        }
    }

    /// No place.
    pub(crate) fn nowhere() -> Out<T> {
        Out(std::ptr::null_mut())
    }

    /// The bare pointer.
    pub(crate) fn raw(self) -> *mut T {
        self.0
    }
}

/// Something to read. The caller of a C interface promises that it can be read if not null.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Nothing to read.
    pub(crate) fn nothing() -> In<T> {
        In(std::ptr::null())
    }

    /// A pointer found in a structure of the caller's.
    pub(crate) fn of_pointer(pointer: *const T) -> In<T> {
        In(pointer)
    }

    /// The value; null is an invalid value.
    pub(crate) fn get(self) -> Answer<T> {
        self.at(0)
    }

    /// The `i`-th of an array.
    pub(crate) fn at(self, i: usize) -> Answer<T> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the C caller promises an array long enough for the count it gave.
        Ok(unsafe { self.0.add(i).read_unaligned() })
    }

    /// `count` of them.
    pub(crate) fn list(self, count: usize) -> Answer<Vec<T>> {
        (0..count).map(|i| self.at(i)).collect()
    }

    /// Whether it is there.
    pub(crate) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    /// The bare pointer.
    pub(crate) fn raw(self) -> *const T {
        self.0
    }
}

/// A text.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// As a string; null is an invalid value.
    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the C caller promises a zero-ended text.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// Kinds of objects behind handles.
pub(crate) trait Kind: Sized + Sync + 'static {
    /// Distinguishes living objects of this kind from everything else.
    const MAGIC: u64;
}

/// What a handle points to. Never given back to the allocator, so that a stale handle is found out
/// and not followed into the void.
#[repr(C)]
struct Object<T> {
    magic: AtomicU64,
    value: T,
}

/// A handle from C.
#[repr(transparent)]
pub(crate) struct Handle<T>(*mut c_void, PhantomData<fn() -> T>);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}
// SAFETY: a handle is only a number until `get` checks it.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T: Kind> Handle<T> {
    /// A new object.
    pub(crate) fn new(value: T) -> Handle<T> {
        let object = Box::leak(Box::new(Object { magic: AtomicU64::new(T::MAGIC), value }));
        Handle(std::ptr::from_mut(object).cast(), PhantomData)
    }

    /// No object.
    pub(crate) fn null() -> Handle<T> {
        Handle(std::ptr::null_mut(), PhantomData)
    }

    /// From a structure that holds it as a bare pointer.
    pub(crate) fn from_raw(pointer: *mut c_void) -> Handle<T> {
        Handle(pointer, PhantomData)
    }

    /// As a number.
    pub(crate) fn number(self) -> usize {
        self.0 as usize
    }

    /// The object, or that the handle is not valid.
    #[inline]
    pub(crate) fn get(self) -> Answer<&'static T> {
        let address = self.0 as usize;
        if address < 4096 || !address.is_multiple_of(align_of::<Object<T>>()) {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        // SAFETY: handles come from `new`, whose objects are never freed. A caller that makes up
        // an address breaks the C interface as it would with the real driver.
        let object = unsafe { &*self.0.cast::<Object<T>>() };
        if object.magic.load(Ordering::Relaxed) != T::MAGIC {
            return Err(CUDA_ERROR_INVALID_HANDLE);
        }
        Ok(&object.value)
    }

    /// Ends the object: the handle is invalid from now on.
    pub(crate) fn destroy(self) -> Answer<&'static T> {
        let value = self.get()?;
        // SAFETY: `get` just checked it.
        let object = unsafe { &*self.0.cast::<Object<T>>() };
        let was = object.magic.swap(0, Ordering::AcqRel);
        if was == T::MAGIC { Ok(value) } else { Err(CUDA_ERROR_INVALID_HANDLE) }
    }
}

impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}
impl<T> std::fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p}", self.0)
    }
}

/// Set in a child that was forked after `cuInit`: CUDA cannot be used there.
pub(crate) static FORKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function that a stream came to: it must not call the driver.
pub(crate) fn in_host_function(call: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    call();
    IN_HOST_FUNCTION.set(false);
}

/// The frame of every exported function: nothing panics out of it, calls are logged on request.
#[inline]
pub(crate) fn enter(name: &'static str, body: impl FnOnce() -> Answer) -> CUresult {
    if FORKED.load(Ordering::Relaxed) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if IN_HOST_FUNCTION.get() {
        return CUDA_ERROR_NOT_PERMITTED;
    }
    let result = match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => CUDA_SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => CUDA_ERROR_UNKNOWN,
    };
    if logger().calls {
        log(&format!("{name} -> {result}"));
    }
    result
}

/// What unimplemented functions do.
#[cold]
pub(crate) fn missing(name: &'static str) -> CUresult {
    log(&format!("{name} is not implemented -> 801"));
    CUDA_ERROR_NOT_SUPPORTED
}

struct Log {
    file: Option<std::fs::File>,
    calls: bool,
}

#[inline]
fn logger() -> &'static Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    LOG.get_or_init(|| {
        let path = std::env::var_os("MUXFLOW_EMULATED_LOG");
        let file =
            path.and_then(|p| std::fs::OpenOptions::new().create(true).append(true).open(p).ok());
        let calls = std::env::var_os("MUXFLOW_EMULATED_LOG_CALLS").is_some();
        Log { calls: calls && file.is_some(), file }
    })
}

/// For results that nobody is left to hear of.
pub(crate) fn regardless<T, E>(_: Result<T, E>) {}

/// Whether somebody wants to know.
pub(crate) fn logging() -> bool {
    logger().file.is_some()
}

/// One line for who asked for a log.
pub(crate) fn log(line: &str) {
    if let Some(mut file) = logger().file.as_ref() {
        let line = format!("[{}] {line}\n", std::process::id());
        // A log that cannot be written must not stop the program.
        drop(file.write_all(line.as_bytes()));
    }
}

/// Exported functions: a name, arguments, and a body that answers.
macro_rules! api {
    ($(fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> muxflow_abi::cuda::CUresult {
            $crate::ffi::enter(stringify!($name), move || $body)
        }
    )*};
}

/// The same for functions that come in two variants: the default stream of all threads, and of
/// each thread. The body sees which under the name given first.
macro_rules! both {
    ($(fn $name:ident, $pt:ident($which:ident; $($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $name($($arg: $ty),*) -> muxflow_abi::cuda::CUresult {
            let $which = $crate::stream::Default::Legacy;
            $crate::ffi::enter(stringify!($name), move || $body)
        }
        #[unsafe(no_mangle)]
        pub(crate) extern "C" fn $pt($($arg: $ty),*) -> muxflow_abi::cuda::CUresult {
            let $which = $crate::stream::Default::PerThread;
            $crate::ffi::enter(stringify!($pt), move || $body)
        }
    )*};
}

pub(crate) use {api, both};
