//! Who is on a GPU. Clients of MPS appear in their own list; in the plain list and in utilisation
//! stands the server, as on the real thing.

use std::ffi::{c_uint, c_ulonglong};

use muxflow_abi::nvml::{
    NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_FOUND,
    nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t, nvmlProcessUtilizationSample_t,
};
use muxflow_emulated_gpu::facts::Process;

use crate::ffi::{Answer, Gpu, Out, api};

/// What the MPS server itself holds.
const SERVER_BYTES: u64 = 27 << 20;

/// `nvmlProcessUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct UtilizationInfo {
    time_us: c_ulonglong,
    pid: c_uint,
    sm: c_uint,
    memory: c_uint,
    others: [c_uint; 4],
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct UtilizationList {
    version: c_uint,
    count: c_uint,
    last_seen_us: c_ulonglong,
    list: *mut UtilizationInfo,
}

fn plain(gpu: Gpu) -> Answer<Vec<(u32, u64)>> {
    let all = gpu.get()?.processes()?;
    let shown = all.iter().filter(|p| p.server_pid == 0);
    Ok(shown.map(|p| (p.pid, if p.is_server == 1 { SERVER_BYTES } else { p.used_bytes })).collect())
}

fn under_mps(gpu: Gpu) -> Answer<Vec<(u32, u64)>> {
    let all = gpu.get()?.processes()?;
    Ok(all.iter().filter(|p| p.server_pid != 0).map(|p| (p.pid, p.used_bytes)).collect())
}

fn put<T>(
    list: Vec<(u32, u64)>,
    count: Out<c_uint>,
    out: Out<T>,
    make: impl Fn(u32, u64) -> T,
) -> Answer {
    let room = count.get()? as usize;
    count.put(list.len() as c_uint)?;
    if list.len() > room {
        return Err(NVML_ERROR_INSUFFICIENT_SIZE);
    }
    if !list.is_empty() && !out.is_given() {
        return Err(NVML_ERROR_INVALID_ARGUMENT);
    }
    for (i, (pid, bytes)) in list.into_iter().enumerate() {
        out.put_at(i, make(pid, bytes));
    }
    Ok(())
}

fn first(pid: u32, bytes: u64) -> nvmlProcessInfo_v1_t {
    nvmlProcessInfo_v1_t { pid, usedGpuMemory: bytes }
}

fn second(pid: u32, bytes: u64) -> nvmlProcessInfo_v2_t {
    let none = u32::MAX;
    nvmlProcessInfo_v2_t { pid, usedGpuMemory: bytes, gpuInstanceId: none, computeInstanceId: none }
}

/// What one process did in its last period, stamped in microseconds since 1970.
struct Sample {
    pid: u32,
    sm: u32,
    memory: u32,
    time_us: u64,
}

/// Those that did anything, where that is newer than what was seen.
fn utilisation(gpu: Gpu, seen_us: u64) -> Answer<Vec<Sample>> {
    let device = gpu.get()?;
    let all = device.processes()?;
    let of_server = |server: &Process| {
        let clients = all.iter().filter(|p| p.server_pid == server.pid);
        clients.fold(([0, 0], 0), |([sm, memory], at), c| {
            let [more_sm, more_memory] = c.utilisation_pct;
            ([100.min(sm + more_sm), 100.min(memory + more_memory)], c.time_ns.max(at))
        })
    };
    let mut found = Vec::new();
    for process in all.iter().filter(|p| p.server_pid == 0) {
        let ([sm, memory], at_ns) = if process.is_server == 1 {
            of_server(process)
        } else {
            (process.utilisation_pct, process.time_ns)
        };
        let time_us = device.facts.epoch_us(at_ns);
        if (sm > 0 || memory > 0) && time_us > seen_us {
            found.push(Sample { pid: process.pid, sm, memory, time_us });
        }
    }
    if found.is_empty() { Err(NVML_ERROR_NOT_FOUND) } else { Ok(found) }
}

api! {
    fn nvmlDeviceGetComputeRunningProcesses(gpu: Gpu, count: Out<c_uint>, out: Out<nvmlProcessInfo_v1_t>) {
        put(plain(gpu)?, count, out, first)
    }
    fn nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3(gpu: Gpu, count: Out<c_uint>, out: Out<nvmlProcessInfo_v2_t>) {
        put(plain(gpu)?, count, out, second)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses(gpu: Gpu, count: Out<c_uint>, out: Out<nvmlProcessInfo_v1_t>) {
        put(under_mps(gpu)?, count, out, first)
    }
    fn nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlDeviceGetMPSComputeRunningProcesses_v3(gpu: Gpu, count: Out<c_uint>, out: Out<nvmlProcessInfo_v2_t>) {
        put(under_mps(gpu)?, count, out, second)
    }
    fn nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlDeviceGetGraphicsRunningProcesses_v3(gpu: Gpu, count: Out<c_uint>, out: Out<nvmlProcessInfo_v2_t>) {
        gpu.stats()?;
        put(Vec::new(), count, out, second)
    }
    fn nvmlDeviceGetProcessUtilization(gpu: Gpu, out: Out<nvmlProcessUtilizationSample_t>, count: Out<c_uint>, seen_us: c_ulonglong) {
        let room = count.get()? as usize;
        let found = utilisation(gpu, seen_us);
        count.put(found.as_ref().map_or(0, Vec::len) as c_uint)?;
        let found = found?;
        if !out.is_given() || room < found.len() {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for (i, it) in found.into_iter().enumerate() {
            out.put_at(i, nvmlProcessUtilizationSample_t { pid: it.pid, timeStamp: it.time_us, smUtil: it.sm, memUtil: it.memory, encUtil: 0, decUtil: 0 });
        }
        Ok(())
    }
    fn nvmlDeviceGetProcessesUtilizationInfo(gpu: Gpu, out: Out<UtilizationList>) {
        let mut list = out.get()?;
        let found = utilisation(gpu, list.last_seen_us)?;
        let room = list.count as usize;
        list.count = found.len() as c_uint;
        out.put(list)?;
        if list.list.is_null() || room < found.len() {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        for (i, it) in found.into_iter().enumerate() {
            let info = UtilizationInfo { time_us: it.time_us, pid: it.pid, sm: it.sm, memory: it.memory, others: [0; 4] };
            // SAFETY: the caller's list has room for `room` entries, checked above.
            unsafe { list.list.add(i).write(info) };
        }
        Ok(())
    }
}
