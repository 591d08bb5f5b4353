//! `cuInit`, `cuDevice*`, error names.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use muxflow_abi::cuda::result::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
use muxflow_abi::cuda::{CUdevice, CUdevprop, CUuuid};

use crate::attributes;
use crate::driver;
use crate::ffi::{Answer, Out, Text, api};

/// Writes a text with its end into the caller's buffer.
fn put_text(out: Out<c_char>, length: c_int, text: &str) -> Answer {
    let room = usize::try_from(length).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
    if !out.is_given() || room == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let cut = text.len().min(room - 1);
    for (i, byte) in text.as_bytes()[..cut].iter().enumerate() {
        out.put_at(i, byte.cast_signed());
    }
    out.put_at(cut, 0);
    Ok(())
}

struct ErrorText {
    code: u32,
    name: CString,
    text: CString,
}

fn errors() -> &'static [ErrorText] {
    static ERRORS: OnceLock<Vec<ErrorText>> = OnceLock::new();
    ERRORS.get_or_init(|| {
        let rows = crate::api::lookup::RESULT_NAMES.iter();
        rows.filter_map(|(code, name, text)| {
            let (name, text) = (CString::new(*name).ok()?, CString::new(*text).ok()?);
            Some(ErrorText { code: *code, name, text })
        })
        .collect()
    })
}

fn error_text(code: u32, pick: impl Fn(&ErrorText) -> &CString, out: Out<*const c_char>) -> Answer {
    match errors().iter().find(|e| e.code == code) {
        Some(found) => out.put(pick(found).as_ptr()),
        None => {
            out.offer(std::ptr::null());
            Err(CUDA_ERROR_INVALID_VALUE)
        }
    }
}

api! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        driver::init()
    }
    fn cuDriverGetVersion(version: Out<c_int>) {
        version.put(driver::version().unwrap_or(13_040).cast_signed())
    }
    fn cuDeviceGet(device: Out<CUdevice>, ordinal: c_int) {
        driver::device(ordinal)?;
        device.put(ordinal)
    }
    fn cuDeviceGetCount(count: Out<c_int>) {
        count.put(driver::devices()?.len() as c_int)
    }
    fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: CUdevice) {
        let facts = &driver::device(device)?.facts;
        put_text(name, length, &muxflow_emulated_gpu::facts::untext(&facts.name))
    }
    fn cuDeviceGetUuid(uuid: Out<CUuuid>, device: CUdevice) {
        uuid.put(CUuuid { bytes: driver::device(device)?.facts.uuid })
    }
    fn cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: CUdevice) {
        uuid.put(CUuuid { bytes: driver::device(device)?.facts.uuid })
    }
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: CUdevice) {
        bytes.put(driver::device(device)?.facts.memory_bytes[0] as usize)
    }
    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_int, device: CUdevice) {
        let device = driver::device(device)?;
        if attribute <= 0 || attribute > 1000 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        value.put(attributes::value(device, attribute))
    }
    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: CUdevice) {
        let [a, b] = driver::device(device)?.facts.capability;
        major.put(a.cast_signed())?;
        minor.put(b.cast_signed())
    }
    fn cuDeviceGetProperties(properties: Out<CUdevprop>, device: CUdevice) {
        let device = driver::device(device)?;
        properties.put(CUdevprop {
            maxThreadsPerBlock: 1024,
            maxThreadsDim: [1024, 1024, 64],
            maxGridSize: [i32::MAX, 65_535, 65_535],
            sharedMemPerBlock: 48 << 10,
            totalConstantMemory: 64 << 10,
            SIMDWidth: 32,
            memPitch: i32::MAX,
            regsPerBlock: 65_536,
            clockRate: device.facts.max_mhz.cast_signed() * 1000,
            textureAlign: 512,
        })
    }
    fn cuDeviceGetPCIBusId(id: Out<c_char>, length: c_int, device: CUdevice) {
        let [domain, bus, slot] = driver::device(device)?.facts.pci;
        put_text(id, length, &format!("{domain:04x}:{bus:02x}:{slot:02x}.0"))
    }
    fn cuDeviceGetByPCIBusId(device: Out<CUdevice>, id: Text) {
        let id = id.get()?.to_ascii_lowercase();
        let fits = |p: &[u32; 3]| {
            let long = format!("{:08x}:{:02x}:{:02x}.0", p[0], p[1], p[2]);
            let tail = id.trim_end_matches(".0");
            !tail.is_empty() && long.trim_end_matches(".0").ends_with(tail)
        };
        let found = driver::devices()?.iter().position(|d| fits(&d.facts.pci));
        device.put(found.ok_or(CUDA_ERROR_INVALID_VALUE)? as CUdevice)
    }
    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: CUdevice, peer: CUdevice) {
        let (a, b) = (driver::device(device)?, driver::device(peer)?);
        can.put(c_int::from(a.index != b.index))
    }
    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_int, from: CUdevice, to: CUdevice) {
        let (a, b) = (driver::device(from)?, driver::device(to)?);
        let different = c_int::from(a.index != b.index);
        value.put(if (2..=3).contains(&attribute) { different } else { 0 })
    }
    fn cuDeviceGetExecAffinitySupport(value: Out<c_int>, kind: c_int, device: CUdevice) {
        let device = driver::device(device)?;
        value.put(c_int::from(kind == 0 && device.allowance.server_pid != 0))
    }
    fn cuDeviceGetTexture1DLinearMaxWidth(width: Out<usize>, _format: c_int, _channels: c_uint, device: CUdevice) {
        driver::device(device)?;
        width.put(1 << 28)
    }
    fn cuDeviceGetLuid(_luid: Out<c_char>, _mask: Out<c_uint>, _device: CUdevice) {
        // Only Windows has them.
        Err(CUDA_ERROR_NOT_SUPPORTED)
    }
    fn cuDeviceGetGraphMemAttribute(_device: CUdevice, attribute: c_int, value: Out<u64>) {
        if (0..4).contains(&attribute) { value.put(0) } else { Err(CUDA_ERROR_INVALID_VALUE) }
    }
    fn cuDeviceSetGraphMemAttribute(_device: CUdevice, _attribute: c_int, _value: Out<c_void>) {
        Ok(())
    }
    fn cuDeviceGraphMemTrim(device: CUdevice) {
        driver::device(device).map(drop)
    }
    fn cuGetErrorName(code: u32, name: Out<*const c_char>) {
        error_text(code, |e| &e.name, name)
    }
    fn cuGetErrorString(code: u32, text: Out<*const c_char>) {
        error_text(code, |e| &e.text, text)
    }
    fn cuProfilerStart() { Ok(()) }
    fn cuProfilerStop() { Ok(()) }
    fn cuProfilerInitialize(_config: Text, _output: Text, _mode: c_int) { Ok(()) }
}
