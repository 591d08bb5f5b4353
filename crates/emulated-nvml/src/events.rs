//! Waiting for XIDs.

use std::ffi::{c_uint, c_ulonglong};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use muxflow_abi::nvml::{
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED,
    NVML_ERROR_TIMEOUT, NVML_ERROR_UNKNOWN, nvmlEventData_t,
};
use muxflow_emulated_gpu::sys;
use muxflow_emulated_gpu::wire::{Kind, Message, Socket};

use crate::ffi::{Answer, Device, Gpu, Out, api, node};

/// All events that may be registered: those that exist here are the XIDs.
const KNOWN: u64 = 0x1f;

/// Connections over which events come.
#[derive(Debug, Default)]
struct EventSet {
    sources: Mutex<Vec<(&'static Device, Socket)>>,
}

/// A handle from C.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
struct Set(*mut EventSet);

impl Set {
    fn get(self) -> Answer<&'static EventSet> {
        if self.0.is_null() {
            return Err(NVML_ERROR_INVALID_ARGUMENT);
        }
        // SAFETY: handles come from `nvmlEventSetCreate` and are not used after `Free`, as the C
        // interface demands.
        Ok(unsafe { &*self.0 })
    }
}

/// Sets that were made and not freed, by address: what they hold open is closed with the library.
static SETS: Mutex<Vec<usize>> = Mutex::new(Vec::new());

fn sets() -> std::sync::MutexGuard<'static, Vec<usize>> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The library is closed: no set hears anything any more.
pub(crate) fn hang_up() {
    for set in sets().iter() {
        // SAFETY: in the list are sets that were made and not freed.
        let set = unsafe { &*(*set as *const EventSet) };
        set.sources.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

fn wait(set: Set, out: Out<nvmlEventData_t>, timeout_ms: c_uint) -> Answer {
    let set = set.get()?;
    let deadline = Instant::now() + Duration::from_millis(timeout_ms.into());
    loop {
        let mut sources = set.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let fds: Vec<i32> = sources.iter().map(|(_, s)| s.fd()).collect();
        let left = deadline.saturating_duration_since(Instant::now());
        let mut ready = Vec::new();
        // Short naps, so that another thread can register meanwhile.
        let nap = left.min(Duration::from_millis(100));
        sys::poll(&fds, Some(nap), &mut ready).map_err(|_| NVML_ERROR_UNKNOWN)?;
        if let Some(at) = ready.iter().position(|ready| *ready) {
            let (device, socket) = &sources[at];
            let Ok(Some(received)) = socket.receive() else {
                // Said once; after that there is nothing to hear from it.
                sources.remove(at);
                return Err(NVML_ERROR_GPU_IS_LOST);
            };
            let [kind, data, ..] = received.message.values;
            return out.put(nvmlEventData_t {
                device: std::ptr::from_ref(*device).cast_mut().cast(),
                eventType: kind,
                eventData: data,
                gpuInstanceId: u32::MAX,
                computeInstanceId: u32::MAX,
            });
        }
        drop(sources);
        if Instant::now() >= deadline {
            return Err(NVML_ERROR_TIMEOUT);
        }
    }
}

api! {
    fn nvmlEventSetCreate(out: Out<Set>) {
        let set = Set(Box::into_raw(Box::default()));
        sets().push(set.0 as usize);
        out.put(set)
    }
    fn nvmlEventSetFree(set: Set) {
        set.get()?;
        sets().retain(|known| *known != set.0 as usize);
        // SAFETY: made by `nvmlEventSetCreate`; the caller gives it up.
        drop(unsafe { Box::from_raw(set.0) });
        Ok(())
    }
    fn nvmlDeviceRegisterEvents(gpu: Gpu, events: c_ulonglong, set: Set) {
        let device = gpu.reach()?;
        if events & !KNOWN != 0 {
            return Err(NVML_ERROR_NOT_SUPPORTED);
        }
        let lost = |_| NVML_ERROR_UNKNOWN;
        let socket = Socket::connect(&node()?.socket(device.index)).map_err(lost)?;
        socket.ask(&Message::new(Kind::Subscribe, &[events]), &[], &[]).map_err(lost)?;
        let set = set.get()?;
        set.sources.lock().unwrap_or_else(PoisonError::into_inner).push((device, socket));
        Ok(())
    }
    fn nvmlDeviceGetSupportedEventTypes(gpu: Gpu, out: Out<c_ulonglong>) {
        gpu.reach()?;
        out.put(KNOWN)
    }
    fn nvmlEventSetWait, nvmlEventSetWait_v2(set: Set, out: Out<nvmlEventData_t>, timeout_ms: c_uint) {
        wait(set, out, timeout_ms)
    }
}
