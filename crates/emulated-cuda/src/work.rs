//! What a stream can be asked to do: its effect on memory, and what the device is told of it.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use muxflow_abi::cuda::result::{
    CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_MISALIGNED_ADDRESS,
};
use muxflow_emulated_gpu::channel::{Entry, Op};
use muxflow_emulated_gpu::client::{Gpu, Lane};
use muxflow_emulated_gpu::cost::Cost;
use muxflow_emulated_gpu::ptx::{Grid, Outcome};

use crate::ffi::{self, Answer};
use crate::memory::{self, Everything};
use crate::module::Function;
use crate::shared_event::SharedEvent;

/// A box of bytes to move: rows of `width`, `height` of them, `depth` slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Copy {
    pub to: u64,
    pub from: u64,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    /// Bytes from row to row, and from slice to slice.
    pub to_pitch: [usize; 2],
    pub from_pitch: [usize; 2],
}

impl Copy {
    pub(crate) fn plain(to: u64, from: u64, bytes: usize) -> Copy {
        let pitch = [bytes, bytes];
        Copy { to, from, width: bytes, height: 1, depth: 1, to_pitch: pitch, from_pitch: pitch }
    }

    /// That both ends hold all of it, as far as they are known. Only what passed here is work.
    pub(crate) fn check(&self) -> Answer {
        let known = |bytes: Option<usize>| bytes.ok_or(CUDA_ERROR_INVALID_VALUE);
        let all = self.width.checked_mul(self.height).and_then(|b| b.checked_mul(self.depth));
        if known(all)? == 0 {
            return Ok(());
        }
        let span = |[row, slice]: [usize; 2]| {
            let slices = slice.checked_mul(self.depth - 1)?;
            row.checked_mul(self.height - 1)?.checked_add(slices)?.checked_add(self.width)
        };
        memory::check(self.to, known(span(self.to_pitch))?)?;
        memory::check(self.from, known(span(self.from_pitch))?)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.width * self.height * self.depth
    }

    fn perform(&self) {
        for z in 0..self.depth {
            for y in 0..self.height {
                let at = |base: u64, pitch: [usize; 2]| {
                    (base as usize + z * pitch[1] + y * pitch[0]) as *mut u8
                };
                let from = at(self.from, self.from_pitch);
                let to = at(self.to, self.to_pitch);
                // SAFETY: device ranges were checked when the work was made; host ranges are the
                // caller's promise, as with the real driver. The two may overlap.
                unsafe { std::ptr::copy(from, to, self.width) };
            }
        }
    }

    /// Which engine moves it.
    fn op(&self) -> Op {
        match (memory::is_device(self.from), memory::is_device(self.to)) {
            (false, true) => Op::CopyIn,
            (true, false) => Op::CopyOut,
            (true, true) => Op::CopyDevice,
            (false, false) => Op::Nop,
        }
    }
}

/// A value to write over and over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fill {
    pub to: u64,
    pub pitch: usize,
    pub value: u32,
    /// Bytes of the value: 1, 2 or 4.
    pub element: usize,
    /// Elements in a row, and rows.
    pub width: usize,
    pub height: usize,
}

impl Fill {
    /// That device memory holds all of it, in whole elements. Only what passed here is work.
    pub(crate) fn check(&self) -> Answer {
        if self.width == 0 || self.height == 0 {
            return Ok(());
        }
        let element = self.element as u64;
        let row = self.width.checked_mul(self.element).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Of one row the pitch does not count.
        let odd = !self.pitch.is_multiple_of(self.element) || self.pitch < row;
        if !self.to.is_multiple_of(element) || self.height > 1 && odd {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let rows = self.pitch.checked_mul(self.height - 1).and_then(|rows| rows.checked_add(row));
        memory::check_device(self.to, rows.ok_or(CUDA_ERROR_INVALID_VALUE)?)
    }

    fn perform(&self) {
        if self.width == 0 {
            return;
        }
        for y in 0..self.height {
            let row = (self.to as usize + y * self.pitch) as *mut u8;
            // SAFETY: the range was checked when the work was made.
            unsafe {
                match self.element {
                    1 => row.write_bytes(self.value as u8, self.width),
                    2 => std::slice::from_raw_parts_mut(row.cast::<u16>(), self.width)
                        .fill(self.value as u16),
                    _ => std::slice::from_raw_parts_mut(row.cast::<u32>(), self.width)
                        .fill(self.value),
                }
            }
        }
    }
}

/// A kernel with its arguments.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    pub function: &'static Function,
    pub grid: Grid,
    /// Packed parameters; empty when nothing reads them.
    pub params: Arc<[u8]>,
    pub cost: Cost,
    /// Whether it really computes.
    pub computes: bool,
}

impl Launch {
    fn perform(&self, gpu: &Gpu) -> Answer {
        if !self.computes {
            return Ok(());
        }
        let outcome = self.function.compute(&self.grid, &self.params, &Everything);
        let name = &self.function.name;
        // An XID, and the error where it alone does not tell.
        let (xid, error) = match outcome {
            Outcome::Done => return Ok(()),
            Outcome::TooLong => {
                ffi::log(&format!("kernel {name}: stopped, it ran too long"));
                return Ok(());
            }
            Outcome::IllegalAddress(address) => {
                ffi::log(&format!("kernel {name}: illegal address {address:#x}"));
                (31, 0)
            }
            Outcome::Misaligned(address) => {
                ffi::log(&format!("kernel {name}: misaligned address {address:#x}"));
                (13, CUDA_ERROR_MISALIGNED_ADDRESS)
            }
            Outcome::Trapped => (13, 0),
        };
        gpu.report(xid, error);
        crate::context::fault(gpu)?;
        Err(CUDA_ERROR_ILLEGAL_ADDRESS)
    }
}

/// A pointer of the caller's that only comes back to the caller.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Opaque(pub *mut c_void);
// SAFETY: never followed here.
unsafe impl Send for Opaque {}
// SAFETY: as above.
unsafe impl Sync for Opaque {}

/// A function that runs on the host.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HostCall {
    /// `cuLaunchHostFunc`.
    Function(unsafe extern "C" fn(*mut c_void), Opaque),
    /// `cuStreamAddCallback`.
    Callback(unsafe extern "C" fn(usize, u32, *mut c_void), usize, Opaque),
}

impl HostCall {
    fn perform(&self, status: u32) {
        // SAFETY: the caller gave function and argument to be called just so.
        unsafe {
            match self {
                HostCall::Function(function, data) => function(data.0),
                HostCall::Callback(function, stream, data) => function(*stream, status, data.0),
            }
        }
    }
}

/// One piece of work.
#[derive(Debug, Clone)]
pub(crate) enum Work {
    Kernel(Launch),
    Copy(Copy),
    Fill(Fill),
    Host(HostCall),
    /// Another stream's work up to a sequence, on the same device.
    Wait(&'static Lane, u64),
    /// The same on another device.
    WaitForeign(&'static Gpu, &'static Lane, u64),
    Record(u32),
    /// Stream-ordered free.
    Free(u64),
    /// Write a value of 4 or 8 bytes.
    Write(u64, u64, usize),
    /// Wait until memory holds: address, value, bytes, comparison.
    WaitValue(u64, u64, usize, u32),
    /// Say on its page that an event of several processes was come to.
    Reach(&'static SharedEvent, u64),
    /// Wait for such an event.
    WaitShared(&'static SharedEvent, u64),
    Nothing,
}

impl Work {
    /// What the device is told.
    pub(crate) fn entry(&self, priority: i32) -> Entry {
        let plain = |op: Op, amount: u64| Entry { op: op as u32, amount, priority, ..Entry::EMPTY };
        match self {
            Work::Kernel(l) => Entry {
                sm_fill: l.cost.sm_fill,
                occupancy: l.cost.occupancy,
                issue: l.cost.issue,
                bandwidth: l.cost.bandwidth,
                ..plain(Op::Kernel, l.cost.work_ns)
            },
            Work::Copy(c) => plain(c.op(), c.bytes() as u64),
            Work::Fill(f) => plain(Op::CopyDevice, (f.width * f.height * f.element) as u64 / 2),
            _ if self.needs_host() => plain(Op::Host, 0),
            Work::Wait(lane, seq) => Entry { target: lane.slot, ..plain(Op::Wait, *seq) },
            Work::Record(slot) => Entry { target: *slot, ..plain(Op::Record, 0) },
            _ if self.is_heard() => plain(Op::Notify, 0),
            _ => plain(Op::Nop, 0),
        }
    }

    /// Whether a program may see when it happens: a value in its own memory. It must not come
    /// before the stream is there. In device memory only work in order can see it.
    pub(crate) fn is_heard(&self) -> bool {
        match self {
            Work::Write(address, ..) => !memory::is_device(*address),
            Work::Reach(..) => true,
            _ => false,
        }
    }

    /// Whether the device waits for this process to do it.
    pub(crate) fn needs_host(&self) -> bool {
        matches!(self, Work::Host(_)) || self.is_polled()
    }

    /// Whether it waits for something that no bell announces.
    pub(crate) fn is_polled(&self) -> bool {
        matches!(self, Work::WaitForeign(..) | Work::WaitValue(..) | Work::WaitShared(..))
    }

    /// Whether a launching thread must not wait for it.
    pub(crate) fn takes_long(&self) -> bool {
        self.needs_host() || matches!(self, Work::Kernel(launch) if launch.computes)
    }

    /// Whether it may take effect now.
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Work::Wait(lane, seq) => lane.performed.load(Ordering::Acquire) >= *seq,
            Work::WaitForeign(gpu, lane, seq) => {
                lane.performed.load(Ordering::Acquire) >= *seq
                    && gpu.query(lane, *seq).unwrap_or(true)
            }
            Work::WaitValue(address, value, bytes, how) => {
                satisfied(*address, *value, *bytes, *how)
            }
            Work::WaitShared(event, number) => event.is_reached(*number),
            _ => true,
        }
    }

    /// Takes effect.
    pub(crate) fn perform(&self, gpu: &'static Gpu) -> Answer {
        match self {
            Work::Kernel(launch) => launch.perform(gpu)?,
            Work::Copy(copy) => copy.perform(),
            Work::Fill(fill) => fill.perform(),
            Work::Host(call) => ffi::in_host_function(|| call.perform(gpu.fault())),
            Work::Free(address) => ffi::regardless(memory::free(*address)),
            Work::Write(address, value, bytes) => {
                // SAFETY: the range was checked when the work was made.
                unsafe {
                    if *bytes == 8 {
                        (*address as *mut u64).write_volatile(*value);
                    } else {
                        (*address as *mut u32).write_volatile(*value as u32);
                    }
                }
            }
            Work::Reach(event, number) => event.reach(*number),
            Work::Wait(..) | Work::WaitForeign(..) | Work::WaitValue(..) => {}
            Work::WaitShared(..) | Work::Record(_) | Work::Nothing => {}
        }
        Ok(())
    }
}

fn satisfied(address: u64, value: u64, bytes: usize, how: u32) -> bool {
    // SAFETY: the range was checked when the work was made.
    let now = unsafe {
        if bytes == 8 {
            (address as *const u64).read_volatile()
        } else {
            u64::from((address as *const u32).read_volatile())
        }
    };
    match how & 3 {
        0 if bytes == 8 => now.wrapping_sub(value).cast_signed() >= 0,
        0 => (now as u32).wrapping_sub(value as u32).cast_signed() >= 0,
        1 => now == value,
        2 => now & value != 0,
        _ => !(now | value) != 0,
    }
}
