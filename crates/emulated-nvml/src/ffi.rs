//! The border to C: places for results, device handles, and the frame of every function.

use std::ffi::{CStr, c_char, c_uint};
use std::path::PathBuf;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use muxflow_abi::nvml::{
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_INSUFFICIENT_SIZE,
    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_UNINITIALIZED, NVML_ERROR_UNKNOWN, NVML_SUCCESS,
    nvmlReturn_t,
};
use muxflow_emulated_gpu::facts::{Facts, Process, Stats};
use muxflow_emulated_gpu::node::Node;
use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Received, Socket};

/// Nothing, or the error to return.
pub(crate) type Answer<T = ()> = Result<T, nvmlReturn_t>;

/// Where a result goes. The caller promises that a pointer that is not null can be written.
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
    pub(crate) fn put(self, value: T) -> Answer {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the C caller promises a valid place.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    pub(crate) fn get(self) -> Answer<T>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: not null, and the C caller promises a valid value.
        Ok(unsafe { self.0.read_unaligned() })
    }

    pub(crate) fn get_at(self, i: usize) -> Answer<T>
    where
        T: Copy,
    {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: the C caller promises an array long enough for the count it gave.
        Ok(unsafe { self.0.add(i).read_unaligned() })
    }

    pub(crate) fn put_at(self, i: usize, value: T) {
        if !self.0.is_null() {
            // SAFETY: the C caller promises an array long enough for the count it gave.
            unsafe { self.0.add(i).write_unaligned(value) };
        }
    }

    pub(crate) fn is_given(self) -> bool {
        !self.0.is_null()
    }

    pub(crate) fn raw(self) -> *mut T {
        self.0
    }
}

impl Out<c_char> {
    /// Writes a text with its end, if there is room.
    pub(crate) fn text(self, room: c_uint, text: &str) -> Answer {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        if text.len() >= room as usize {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for (i, byte) in text.bytes().chain([0]).enumerate() {
            self.put_at(i, byte.cast_signed());
        }
        Ok(())
    }
}

/// A text.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text(*const c_char);

impl Text {
    pub(crate) fn get(self) -> Answer<String> {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: the C caller promises a zero-ended text.
        Ok(unsafe { CStr::from_ptr(self.0) }.to_string_lossy().into_owned())
    }
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Device {
    pub index: usize,
    pub facts: Facts,
    socket: Mutex<Option<Socket>>,
}

/// A device handle from C.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gpu(*const Device);

impl Gpu {
    pub(crate) fn of(device: &'static Device) -> Gpu {
        Gpu(device)
    }

    /// The device; it must be one of ours.
    pub(crate) fn get(self) -> Answer<&'static Device> {
        let all = devices()?;
        all.iter().find(|d| std::ptr::eq(*d, self.0)).ok_or(NVML_ERROR_INVALID_ARGUMENT)
    }

    /// The device, for calls that reach the GPU itself: they block or fail with it.
    pub(crate) fn reach(self) -> Answer<&'static Device> {
        Ok(self.stats()?.0)
    }

    /// The device and how it does now.
    pub(crate) fn stats(self) -> Answer<(&'static Device, Stats)> {
        let device = self.get()?;
        Ok((device, device.stats()?))
    }
}

#[derive(Debug)]
struct Library {
    uses: usize,
    devices: Option<&'static [Device]>,
}

static LIBRARY: Mutex<Library> = Mutex::new(Library { uses: 0, devices: None });

fn library() -> std::sync::MutexGuard<'static, Library> {
    LIBRARY.lock().unwrap_or_else(PoisonError::into_inner)
}

fn own_path() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address is of a function here, the place is valid.
    let found = unsafe { libc::dladdr(own_path as *const libc::c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader gives a zero-ended name that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

/// The node that this library belongs to.
pub(crate) fn node() -> Answer<&'static Node> {
    static NODE: OnceLock<Option<Node>> = OnceLock::new();
    NODE.get_or_init(|| Node::find(own_path().as_deref()))
        .as_ref()
        .ok_or(NVML_ERROR_DRIVER_NOT_LOADED)
}

/// One more user of the library.
pub(crate) fn open() -> Answer {
    let mut library = library();
    if library.devices.is_none() {
        let node = node()?;
        let mut found = Vec::new();
        for index in 0..node.gpu_count() {
            let lost = |_| NVML_ERROR_DRIVER_NOT_LOADED;
            let socket = Socket::connect(&node.socket(index)).map_err(lost)?;
            let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).map_err(lost)?;
            let facts = answer.tail.get(size_of::<Stats>()..).and_then(Facts::from_bytes);
            let facts = facts.ok_or(NVML_ERROR_UNKNOWN)?;
            found.push(Device { index, facts, socket: Mutex::new(Some(socket)) });
        }
        library.devices = Some(Box::leak(found.into_boxed_slice()));
    }
    library.uses += 1;
    Ok(())
}

/// One user less.
pub(crate) fn close() -> Answer {
    let mut library = library();
    if library.uses == 0 {
        return Err(NVML_ERROR_UNINITIALIZED);
    }
    library.uses -= 1;
    if library.uses == 0 {
        // Who comes next sees what is there then. Handles are never followed, only compared.
        for device in library.devices.take().unwrap_or_default() {
            *device.socket.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        crate::events::hang_up();
    }
    Ok(())
}

/// All GPUs.
pub(crate) fn devices() -> Answer<&'static [Device]> {
    let library = library();
    if library.uses == 0 {
        return Err(NVML_ERROR_UNINITIALIZED);
    }
    library.devices.ok_or(NVML_ERROR_UNINITIALIZED)
}

impl Device {
    /// Asks the device process; a forked child makes its own connection.
    pub(crate) fn ask(&self, kind: Kind, values: &[u64]) -> Answer<Received> {
        let mut socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let message = Message::new(kind, values);
        if let Some(open) = socket.as_ref()
            && open.belongs_here()
            && let Ok(answer) = open.ask(&message, &[], &[])
        {
            return Ok(answer);
        }
        let lost = |_| NVML_ERROR_GPU_IS_LOST;
        let fresh = Socket::connect(&node()?.socket(self.index)).map_err(lost)?;
        let answer = fresh.ask(&message, &[], &[]).map_err(lost)?;
        *socket = Some(fresh);
        Ok(answer)
    }

    /// How it does now. A GPU that is told to fail or to block its callers does so here.
    pub(crate) fn stats(&self) -> Answer<Stats> {
        loop {
            let answer = self.ask(Kind::Stats, &[])?;
            let stats = Stats::from_bytes(&answer.tail).ok_or(NVML_ERROR_UNKNOWN)?;
            if stats.nvml_blocked != 0 {
                std::thread::sleep(Duration::from_millis(50));
                continue;
            }
            if stats.nvml_error != 0 {
                return Err(stats.nvml_error);
            }
            if stats.lost == 1 {
                return Err(NVML_ERROR_GPU_IS_LOST);
            }
            return Ok(stats);
        }
    }

    /// Who is on it.
    pub(crate) fn processes(&self) -> Answer<Vec<Process>> {
        self.stats()?;
        let answer = self.ask(Kind::Processes, &[])?;
        let each = answer.tail.chunks_exact(size_of::<Process>());
        Ok(each.filter_map(Process::from_bytes).collect())
    }
}

/// The frame of every exported function: nothing panics out of it.
pub(crate) fn enter(body: impl FnOnce() -> Answer) -> nvmlReturn_t {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)) {
        Ok(Ok(())) => NVML_SUCCESS,
        Ok(Err(error)) => error,
        Err(_) => NVML_ERROR_UNKNOWN,
    }
}

/// Exported functions: names (older and newer ones of the same shape), arguments, and a body.
macro_rules! api {
    ($(fn $($name:ident),+ ($($args:tt)*) $body:block)*) => {$(
        $crate::ffi::api!(@each [$($name)+] ($($args)*) $body);
    )*};
    (@each [$first:ident $($rest:ident)*] $args:tt $body:block) => {
        $crate::ffi::api!(@one $first $args $body);
        $crate::ffi::api!(@each [$($rest)*] $args $body);
    };
    (@each [] $args:tt $body:block) => {};
    (@one $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name($($arg: $ty),*) -> muxflow_abi::nvml::nvmlReturn_t {
            $crate::ffi::enter(move || $body)
        }
    };
}

pub(crate) use api;
