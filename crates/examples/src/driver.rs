//! The few driver calls that the examples need, found by `dlopen`.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};

use anyhow::{Context as _, bail};

type Handle = *mut c_void;

/// The driver, with a context on the first GPU and one stream.
#[derive(Debug)]
pub struct Gpu {
    library: Handle,
    stream: Handle,
}

/// A kernel.
#[derive(Debug, Clone, Copy)]
pub struct Kernel(Handle);

/// Two events: how long the work between them took, in the time of the device.
#[derive(Debug, Clone, Copy)]
pub struct Timer([Handle; 2]);

/// Device memory, given back when dropped.
#[derive(Debug)]
pub struct Buffer<'a> {
    gpu: &'a Gpu,
    /// Its address on the device.
    pub address: u64,
    bytes: usize,
}

macro_rules! call {
    ($gpu:expr, $name:literal, fn($($ty:ty),* $(,)?), $($arg:expr),* $(,)?) => {{
        let symbol = $gpu.symbol($name)?;
        // SAFETY: the type is the one that cuda.h declares for this name.
        let function = unsafe {
            std::mem::transmute::<Handle, unsafe extern "C" fn($($ty),*) -> c_int>(symbol)
        };
        // SAFETY: the arguments are valid for the call; the driver checks handles and sizes.
        let result = unsafe { function($($arg),*) };
        if result != 0 {
            bail!("{} failed with CUDA error {result}", $name);
        }
    }};
}

impl Gpu {
    /// Opens the driver and makes a context on the first visible GPU.
    pub fn open() -> anyhow::Result<Gpu> {
        // SAFETY: loads the system's CUDA driver.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            bail!(
                "libcuda.so.1 cannot be opened: is there a GPU, or `muxflow emulate` around this?"
            );
        }
        let mut gpu = Gpu { library, stream: std::ptr::null_mut() };
        let (mut context, mut stream): (Handle, Handle) =
            (std::ptr::null_mut(), std::ptr::null_mut());
        call!(gpu, "cuInit", fn(c_uint), 0);
        call!(gpu, "cuDevicePrimaryCtxRetain", fn(*mut Handle, c_int), &raw mut context, 0);
        call!(gpu, "cuCtxSetCurrent", fn(Handle), context);
        call!(gpu, "cuStreamCreate", fn(*mut Handle, c_uint), &raw mut stream, 1);
        gpu.stream = stream;
        Ok(gpu)
    }

    /// Makes the context current in this thread too.
    pub fn attach(&self) -> anyhow::Result<()> {
        let mut context: Handle = std::ptr::null_mut();
        call!(self, "cuDevicePrimaryCtxRetain", fn(*mut Handle, c_int), &raw mut context, 0);
        call!(self, "cuCtxSetCurrent", fn(Handle), context);
        Ok(())
    }

    fn symbol(&self, name: &str) -> anyhow::Result<Handle> {
        let c_name = CString::new(name).context("a name with a zero in it")?;
        // SAFETY: the library is open and the name ends in zero.
        let symbol = unsafe { libc::dlsym(self.library, c_name.as_ptr()) };
        if symbol.is_null() {
            bail!("the driver lacks {name}");
        }
        Ok(symbol)
    }

    /// Loads PTX and finds a kernel in it.
    pub fn kernel(&self, ptx: &str, name: &str) -> anyhow::Result<Kernel> {
        let image = CString::new(ptx).context("PTX with a zero in it")?;
        let name = CString::new(name).context("a name with a zero in it")?;
        let (mut module, mut function): (Handle, Handle) =
            (std::ptr::null_mut(), std::ptr::null_mut());
        call!(
            self,
            "cuModuleLoadData",
            fn(*mut Handle, *const c_char),
            &raw mut module,
            image.as_ptr()
        );
        call!(
            self,
            "cuModuleGetFunction",
            fn(*mut Handle, Handle, *const c_char),
            &raw mut function,
            module,
            name.as_ptr()
        );
        Ok(Kernel(function))
    }

    /// Memory on the device; what is in it is not known before it is written.
    pub fn allocate(&self, bytes: usize) -> anyhow::Result<Buffer<'_>> {
        let mut address = 0;
        call!(self, "cuMemAlloc_v2", fn(*mut u64, usize), &raw mut address, bytes);
        Ok(Buffer { gpu: self, address, bytes })
    }

    /// Puts a kernel into the stream.
    pub fn launch(
        &self,
        kernel: Kernel,
        blocks: u32,
        threads: u32,
        arguments: &mut [*mut c_void],
    ) -> anyhow::Result<()> {
        call!(
            self,
            "cuLaunchKernel",
            fn(
                Handle,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                c_uint,
                Handle,
                *mut *mut c_void,
                *mut Handle,
            ),
            kernel.0,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            0,
            self.stream,
            arguments.as_mut_ptr(),
            std::ptr::null_mut()
        );
        Ok(())
    }

    /// A timer for work in the stream.
    pub fn timer(&self) -> anyhow::Result<Timer> {
        let mut events: [Handle; 2] = [std::ptr::null_mut(); 2];
        for event in &mut events {
            call!(self, "cuEventCreate", fn(*mut Handle, c_uint), event, 0);
        }
        Ok(Timer(events))
    }

    /// The work to be timed begins, or has been put into the stream.
    pub fn mark(&self, timer: Timer, is_end: bool) -> anyhow::Result<()> {
        let event = timer.0[usize::from(is_end)];
        call!(self, "cuEventRecord", fn(Handle, Handle), event, self.stream);
        Ok(())
    }

    /// Device time between the two marks, after [`Gpu::synchronize`].
    pub fn elapsed_us(&self, timer: Timer) -> anyhow::Result<f64> {
        let mut ms = 0.0_f32;
        let [from, to] = timer.0;
        call!(self, "cuEventElapsedTime", fn(*mut f32, Handle, Handle), &raw mut ms, from, to);
        Ok(f64::from(ms) * 1e3)
    }

    /// Waits for the stream.
    pub fn synchronize(&self) -> anyhow::Result<()> {
        call!(self, "cuStreamSynchronize", fn(Handle), self.stream);
        Ok(())
    }
}

// SAFETY: handles of the driver may be used from any thread in which the context is current.
unsafe impl Send for Gpu {}
// SAFETY: as above; the driver does its own locking.
unsafe impl Sync for Gpu {}
// SAFETY: event handles are only numbers to us; the driver does its own locking.
unsafe impl Send for Timer {}
// SAFETY: as above.
unsafe impl Sync for Timer {}
// SAFETY: a kernel handle is only a number to us.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Buffer<'_> {
    /// Copies from the host.
    pub fn write(&self, data: &[u8]) -> anyhow::Result<()> {
        let bytes = data.len().min(self.bytes);
        call!(
            self.gpu,
            "cuMemcpyHtoD_v2",
            fn(u64, *const u8, usize),
            self.address,
            data.as_ptr(),
            bytes
        );
        Ok(())
    }

    /// Copies to the host.
    pub fn read(&self, data: &mut [u8]) -> anyhow::Result<()> {
        let bytes = data.len().min(self.bytes);
        call!(
            self.gpu,
            "cuMemcpyDtoH_v2",
            fn(*mut u8, u64, usize),
            data.as_mut_ptr(),
            self.address,
            bytes
        );
        Ok(())
    }

    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        let free = || -> anyhow::Result<()> {
            call!(self.gpu, "cuMemFree_v2", fn(u64), self.address);
            Ok(())
        };
        if free().is_err() {
            // The context is gone, and with it the memory.
        }
    }
}
