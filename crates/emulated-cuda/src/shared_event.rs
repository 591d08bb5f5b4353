//! Events that several processes record and wait for: a page that they share.
//!
//! Each record has the next number. The stream in which it was recorded says on the page when it has
//! come to it; who waits, waits for the number that was the last when it began to wait. Who recorded is
//! known by its number at the device, which knows whether it lives: a process id may be of another
//! namespace, of a process that nobody has waited for, or of the next one with that number.

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use muxflow_abi::cuda::result::{CUDA_ERROR_MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY};
use muxflow_emulated_gpu::client::Gpu;
use muxflow_emulated_gpu::sys::Mapping;

use crate::context;
use crate::driver::{self, Device};
use crate::ffi::{Answer, regardless};

/// What is on the page.
#[repr(C)]
#[derive(Debug)]
struct Page {
    recorded: AtomicU64,
    completed: AtomicU64,
    /// Who recorded last: its number at the device, 0 for nobody.
    recorder: AtomicU32,
}

const PAGE_BYTES: usize = 4096;

/// One event of several processes, as this one sees it.
#[derive(Debug)]
pub(crate) struct SharedEvent {
    mapping: Mapping,
    gpu: &'static Gpu,
    /// Client at the device and number: its name there.
    pub name: [u64; 2],
    /// Who recorded and was there, and the device's losses up to then.
    seen: AtomicU64,
}

static NEXT: AtomicU64 = AtomicU64::new(1);

fn path(device: &Device, name: [u64; 2]) -> Answer<PathBuf> {
    Ok(driver::node()?.shared_event(device.index, name))
}

fn map(file: &File, name: [u64; 2], gpu: &'static Gpu) -> Answer<&'static SharedEvent> {
    let mapping =
        Mapping::shared(file.as_fd(), PAGE_BYTES).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    // Work in streams refers to it; it is small and stays.
    Ok(Box::leak(Box::new(SharedEvent { mapping, gpu, name, seen: AtomicU64::new(0) })))
}

/// A new one of this process.
pub(crate) fn create(device: &'static Device) -> Answer<&'static SharedEvent> {
    let gpu = device.gpu()?;
    let name = [gpu.id.into(), NEXT.fetch_add(1, Ordering::Relaxed)];
    let path = path(device, name)?;
    let made = || -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path)?;
        // Who may use it is decided by who is told its name, as with the real one.
        file.set_permissions(Permissions::from_mode(0o666))?;
        file.set_len(PAGE_BYTES as u64)?;
        Ok(file)
    };
    map(&made().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?, name, gpu)
}

/// One of another process.
pub(crate) fn open(device: &'static Device, name: [u64; 2]) -> Answer<&'static SharedEvent> {
    let file = OpenOptions::new().read(true).write(true).open(path(device, name)?);
    map(&file.map_err(|_| CUDA_ERROR_MAP_FAILED)?, name, device.gpu()?)
}

impl SharedEvent {
    fn page(&self) -> &Page {
        // SAFETY: the mapping is a whole page, aligned to one, and lives as long as `self`; all
        // fields are atomic and any bits are valid.
        unsafe { &*self.mapping.address().cast::<Page>() }
    }

    /// Whether this process made it.
    pub(crate) fn is_own(&self) -> bool {
        self.name[0] == u64::from(self.gpu.id)
    }

    /// The number of one more record.
    pub(crate) fn next(&self) -> u64 {
        self.page().recorder.store(self.gpu.id, Ordering::Release);
        self.page().recorded.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The last record; 0 when there was none.
    pub(crate) fn last(&self) -> u64 {
        self.page().recorded.load(Ordering::Acquire)
    }

    /// A stream has come to a record.
    pub(crate) fn reach(&self, number: u64) {
        self.page().completed.fetch_max(number, Ordering::AcqRel);
    }

    /// Whether a record was come to. Nobody waits for a process that has died or was struck before.
    pub(crate) fn is_reached(&self, number: u64) -> bool {
        if self.page().completed.load(Ordering::Acquire) >= number {
            return true;
        }
        let recorder = self.page().recorder.load(Ordering::Acquire);
        recorder != 0 && !self.is_at_work(recorder)
    }

    /// Whether who recorded may still come there; the device is asked again when it has lost somebody.
    fn is_at_work(&self, recorder: u32) -> bool {
        // Read before it is asked: a loss after the answer is seen at the next look.
        let now = u64::from(self.gpu.losses()) << 32 | u64::from(recorder);
        if self.seen.load(Ordering::Acquire) == now {
            return true;
        }
        let at_work = self.gpu.is_at_work(recorder);
        if at_work {
            self.seen.store(now, Ordering::Release);
        }
        at_work
    }

    /// Waits for a record, or for a fault of the GPU.
    pub(crate) fn wait(&self, number: u64, gpu: &Gpu) -> Answer {
        let mut pause = Duration::from_micros(20);
        while !self.is_reached(number) {
            context::fault(gpu)?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        context::fault(gpu)
    }

    /// The event is gone; those who have it open keep their page.
    pub(crate) fn end(&self, device: &Device) {
        if self.is_own()
            && let Ok(path) = path(device, self.name)
        {
            regardless(std::fs::remove_file(path));
        }
    }
}
