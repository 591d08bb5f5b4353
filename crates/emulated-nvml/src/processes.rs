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

/// Microseconds since 1970, as samples are stamped.
fn now_us() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |d| d.as_micros() as u64)
}

/// Process, SM and memory utilisation of those that did anything.
fn utilisation(gpu: Gpu) -> Answer<Vec<(u32, u32, u32)>> {
    let all = gpu.get()?.processes()?;
    let of_server = |server: &Process| {
        let clients = all.iter().filter(|p| p.server_pid == server.pid);
        clients.fold((0, 0), |(sm, memory), c| {
            (100.min(sm + c.utilisation_pct[0]), 100.min(memory + c.utilisation_pct[1]))
        })
    };
    let mut found = Vec::new();
    for process in all.iter().filter(|p| p.server_pid == 0) {
        let (sm, memory) = if process.is_server == 1 {
            of_server(process)
        } else {
            (process.utilisation_pct[0], process.utilisation_pct[1])
        };
        if sm > 0 || memory > 0 {
            found.push((process.pid, sm, memory));
        }
    }
    Ok(found)
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
    fn nvmlDeviceGetProcessUtilization(gpu: Gpu, out: Out<nvmlProcessUtilizationSample_t>, count: Out<c_uint>, _since_us: c_ulonglong) {
        let found = utilisation(gpu)?;
        let room = count.get()? as usize;
        count.put(found.len() as c_uint)?;
        if found.is_empty() {
            return Err(NVML_ERROR_NOT_FOUND);
        }
        if !out.is_given() || room < found.len() {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        let now = now_us();
        for (i, (pid, sm, memory)) in found.into_iter().enumerate() {
            out.put_at(i, nvmlProcessUtilizationSample_t { pid, timeStamp: now, smUtil: sm, memUtil: memory, encUtil: 0, decUtil: 0 });
        }
        Ok(())
    }
    fn nvmlDeviceGetProcessesUtilizationInfo(gpu: Gpu, out: Out<UtilizationList>) {
        let mut list = out.get()?;
        let found = utilisation(gpu)?;
        let room = list.count as usize;
        list.count = found.len() as c_uint;
        out.put(list)?;
        if list.list.is_null() || room < found.len() {
            return Err(NVML_ERROR_INSUFFICIENT_SIZE);
        }
        let time_us = now_us();
        for (i, (pid, sm, memory)) in found.into_iter().enumerate() {
            let info = UtilizationInfo { time_us, pid, sm, memory, others: [0; 4] };
            // SAFETY: the caller's list has room for `room` entries, checked above.
            unsafe { list.list.add(i).write(info) };
        }
        Ok(())
    }
}
