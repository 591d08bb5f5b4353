//! Events that several processes record and wait for: a page that they share.
//!
//! Each record has the next number. The stream in which it was recorded says on the page when it has
//! come to it; who waits, waits for the number that was the last when it began to wait.

use std::fs::{File, OpenOptions, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
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
    /// Who recorded last.
    recorder: AtomicI32,
}

const PAGE_BYTES: usize = 4096;

/// One event of several processes, as this one sees it.
#[derive(Debug)]
pub(crate) struct SharedEvent {
    mapping: Mapping,
    /// Process and number: its name on the node.
    pub name: [u64; 2],
}

static NEXT: AtomicU64 = AtomicU64::new(1);

fn path(device: &Device, [pid, number]: [u64; 2]) -> Answer<PathBuf> {
    Ok(driver::node()?.gpu(device.index).join(format!("event-{pid}-{number}")))
}

fn map(file: &File, name: [u64; 2]) -> Answer<&'static SharedEvent> {
    let mapping =
        Mapping::shared(file.as_fd(), PAGE_BYTES).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    // Work in streams refers to it; it is small and stays.
    Ok(Box::leak(Box::new(SharedEvent { mapping, name })))
}

/// A new one of this process.
pub(crate) fn create(device: &Device) -> Answer<&'static SharedEvent> {
    let name = [std::process::id().into(), NEXT.fetch_add(1, Ordering::Relaxed)];
    let path = path(device, name)?;
    let made = || -> std::io::Result<File> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&path)?;
        // Who may use it is decided by who is told its name, as with the real one.
        file.set_permissions(Permissions::from_mode(0o666))?;
        file.set_len(PAGE_BYTES as u64)?;
        Ok(file)
    };
    map(&made().map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?, name)
}

/// One of another process.
pub(crate) fn open(device: &Device, name: [u64; 2]) -> Answer<&'static SharedEvent> {
    let file = OpenOptions::new().read(true).write(true).open(path(device, name)?);
    map(&file.map_err(|_| CUDA_ERROR_MAP_FAILED)?, name)
}

impl SharedEvent {
    fn page(&self) -> &Page {
        // SAFETY: the mapping is a whole page, aligned to one, and lives as long as `self`; all
        // fields are atomic and any bits are valid.
        unsafe { &*self.mapping.address().cast::<Page>() }
    }

    /// Whether this process made it.
    pub(crate) fn is_own(&self) -> bool {
        self.name[0] == u64::from(std::process::id())
    }

    /// The number of one more record.
    pub(crate) fn next(&self) -> u64 {
        let pid = i32::try_from(std::process::id()).unwrap_or(0);
        self.page().recorder.store(pid, Ordering::Release);
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

    /// Whether a record was come to. Nobody waits for a process that has died before.
    pub(crate) fn is_reached(&self, number: u64) -> bool {
        if self.page().completed.load(Ordering::Acquire) >= number {
            return true;
        }
        let recorder = self.page().recorder.load(Ordering::Acquire);
        // SAFETY: signal 0 only asks whether the process is there.
        let gone = unsafe { libc::kill(recorder, 0) } != 0
            && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        gone && recorder > 0
    }

    /// Waits for a record, or for a fault of the GPU.
    pub(crate) fn wait(&self, number: u64, gpu: &Gpu) -> Answer {
        let mut pause = Duration::from_micros(20);
        while !self.is_reached(number) {
            context::fault(gpu)?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
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
