//! What the process as a whole has: the devices that it sees, and whether it may use them.

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock, PoisonError};

use muxflow_abi::cuda::result::{
    CUDA_ERROR_INVALID_DEVICE, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_INITIALIZED,
};
use muxflow_emulated_gpu::client::{Allowance, Gpu};
use muxflow_emulated_gpu::facts::{Facts, Stats};
use muxflow_emulated_gpu::mps::Admission;
use muxflow_emulated_gpu::node::Node;
use muxflow_emulated_gpu::wire::{Kind, Message, Plain, Socket};

use crate::context::Primary;
use crate::ffi::{Answer, FORKED};
use crate::pool::DevicePools;

/// One device of this process.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its number in this process.
    pub ordinal: i32,
    /// Its number on the node.
    pub index: usize,
    /// What it is.
    pub facts: Facts,
    /// SMs that this process may use.
    pub sms: u32,
    gpu: OnceLock<Gpu>,
    connecting: Mutex<()>,
    /// The primary context.
    pub primary: Primary,
    /// What MPS allows.
    pub allowance: Allowance,
    /// Memory pools.
    pub pools: DevicePools,
}

#[derive(Debug)]
struct Driver {
    node: Node,
    devices: Vec<Device>,
    /// The MPS connection, held so that the server sees this process end.
    _mps: Option<Admission>,
}

static DRIVER: OnceLock<Answer<Driver>> = OnceLock::new();

impl Device {
    /// The device, connected; the first call connects.
    pub(crate) fn gpu(&'static self) -> Answer<&'static Gpu> {
        if let Some(gpu) = self.gpu.get() {
            return Ok(gpu);
        }
        let _one = self.connecting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = self.gpu.get() {
            return Ok(gpu);
        }
        let gpu = Gpu::connect(&driver()?.node, self.index, self.allowance)?;
        Ok(self.gpu.get_or_init(|| gpu))
    }
}

/// Initialises once; the first result stays.
pub(crate) fn init() -> Answer {
    match DRIVER.get_or_init(start) {
        Ok(_) => Ok(()),
        Err(error) => Err(*error),
    }
}

fn driver() -> Answer<&'static Driver> {
    match DRIVER.get() {
        Some(Ok(driver)) => Ok(driver),
        Some(Err(error)) => Err(*error),
        None => Err(CUDA_ERROR_NOT_INITIALIZED),
    }
}

/// The node that this process is on.
pub(crate) fn node() -> Answer<&'static Node> {
    Ok(&driver()?.node)
}

/// All devices that this process sees.
pub(crate) fn devices() -> Answer<&'static [Device]> {
    Ok(&driver()?.devices)
}

/// One of them.
pub(crate) fn device(ordinal: i32) -> Answer<&'static Device> {
    let devices = devices()?;
    usize::try_from(ordinal).ok().and_then(|i| devices.get(i)).ok_or(CUDA_ERROR_INVALID_DEVICE)
}

/// Where this library was loaded from: the node's directory is beside it.
fn own_path() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: the address is of a function here, the place is valid.
    let found = unsafe { libc::dladdr(own_path as *const c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader gives a zero-ended name that lives as long as the library.
    let name = unsafe { std::ffi::CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

fn start() -> Answer<Driver> {
    let node = Node::find(own_path().as_deref()).ok_or(CUDA_ERROR_NO_DEVICE)?;
    let mut all = Vec::new();
    for index in 0..node.gpu_count() {
        // A GPU that fell off the bus is not seen any more.
        if let Some(facts) = ask_facts(&node, index) {
            all.push((index, facts));
        }
    }
    let named = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    if visible(&all, named.as_deref()).is_empty() {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    let mps = Admission::ask()?;
    // Under MPS numbers count among the GPUs that the daemon serves.
    if let Some(mps) = &mps {
        all = mps.served(&all);
    }
    let seen = visible(&all, named.as_deref());
    if seen.is_empty() {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    let make = |(ordinal, (index, facts)): (usize, (usize, Facts))| {
        let allowance = mps.as_ref().map(|m| m.allowance(&facts)).unwrap_or_default();
        let cap = allowance.sm_cap_thousandths;
        Device {
            ordinal: ordinal as i32,
            index,
            facts,
            sms: if cap == 0 { facts.sms } else { cap.div_ceil(1000).min(facts.sms) },
            gpu: OnceLock::new(),
            connecting: Mutex::new(()),
            primary: Primary::default(),
            allowance,
            pools: DevicePools::default(),
        }
    };
    let devices = seen.into_iter().enumerate().map(make).collect();
    // SAFETY: the handler only sets a flag.
    unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    Ok(Driver { node, devices, _mps: mps })
}

/// Version of the driver's API. All devices of a node have one driver, so it is known before `cuInit`.
pub(crate) fn version() -> Option<u32> {
    if let Some(device) = devices().ok().and_then(<[Device]>::first) {
        return Some(device.facts.cuda_version);
    }
    let node = Node::find(own_path().as_deref())?;
    (0..node.gpu_count()).find_map(|index| Some(ask_facts(&node, index)?.cuda_version))
}

fn ask_facts(node: &Node, index: usize) -> Option<Facts> {
    let socket = Socket::connect(&node.socket(index)).ok()?;
    let answer = socket.ask(&Message::new(Kind::Stats, &[]), &[], &[]).ok()?;
    let stats = Stats::from_bytes(&answer.tail)?;
    if stats.lost == 1 {
        return None;
    }
    Facts::from_bytes(answer.tail.get(size_of::<Stats>()..)?)
}

/// What `CUDA_VISIBLE_DEVICES` leaves, in its order; what is not understood ends the list.
fn visible(all: &[(usize, Facts)], variable: Option<&str>) -> Vec<(usize, Facts)> {
    let Some(list) = variable else { return all.to_vec() };
    let mut seen: Vec<(usize, Facts)> = Vec::new();
    for word in list.split(',').map(str::trim) {
        let found = match word.strip_prefix("GPU-") {
            Some(prefix) => {
                let prefix = prefix.replace('-', "").to_ascii_lowercase();
                all.iter().find(|(_, f)| {
                    let hex: String = f.uuid.iter().map(|b| format!("{b:02x}")).collect();
                    !prefix.is_empty() && hex.starts_with(&prefix)
                })
            }
            None => word.parse::<usize>().ok().and_then(|i| all.get(i)),
        };
        match found {
            Some(device) if !seen.iter().any(|(i, _)| *i == device.0) => seen.push(*device),
            _ => break,
        }
    }
    seen
}
