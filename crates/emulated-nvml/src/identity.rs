//! What a GPU is.

use std::ffi::{c_char, c_int, c_uint};

use muxflow_abi::nvml::{NVML_ERROR_NOT_SUPPORTED, nvmlPciInfo_t};
use muxflow_emulated_gpu::facts::{Facts, untext};

use crate::ffi::{Answer, Gpu, Out, api};

/// `GPU-xxxxxxxx-xxxx-...`
pub(crate) fn uuid(facts: &Facts) -> String {
    let hex: String = facts.uuid.iter().map(|b| format!("{b:02x}")).collect();
    let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
    format!("GPU-{}", parts.join("-"))
}

/// `00000000:3B:00.0`
pub(crate) fn bus_id(facts: &Facts) -> String {
    let [domain, bus, slot] = facts.pci;
    format!("{domain:08X}:{bus:02X}:{slot:02X}.0")
}

fn characters<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(text.bytes().take(N - 1)) {
        *to = from.cast_signed();
    }
    out
}

fn pci(facts: &Facts) -> nvmlPciInfo_t {
    let [domain, bus, device] = facts.pci;
    nvmlPciInfo_t {
        busIdLegacy: characters(&bus_id(facts)[4..]),
        domain,
        bus,
        device,
        pciDeviceId: facts.pci_device_id,
        pciSubSystemId: facts.pci_subsystem_id,
        busId: characters(&bus_id(facts)),
    }
}

/// NVML's numbers of architectures.
fn architecture([major, minor]: [u32; 2]) -> c_uint {
    match (major, minor) {
        (3, _) => 2,
        (5, _) => 3,
        (6, _) => 4,
        (7, 5) => 6,
        (7, _) => 5,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        _ => 10,
    }
}

fn unsupported<T>(gpu: Gpu) -> Answer<T> {
    gpu.reach()?;
    Err(NVML_ERROR_NOT_SUPPORTED)
}

api! {
    fn nvmlDeviceGetName(gpu: Gpu, text: Out<c_char>, room: c_uint) {
        let (device, _) = gpu.stats()?;
        text.text(room, &untext(&device.facts.name))
    }
    fn nvmlDeviceGetUUID(gpu: Gpu, text: Out<c_char>, room: c_uint) {
        text.text(room, &uuid(&gpu.reach()?.facts))
    }
    fn nvmlDeviceGetSerial(gpu: Gpu, text: Out<c_char>, room: c_uint) {
        text.text(room, &untext(&gpu.reach()?.facts.serial))
    }
    fn nvmlDeviceGetBoardPartNumber(gpu: Gpu, text: Out<c_char>, room: c_uint) {
        gpu.reach()?;
        text.text(room, "900-00000-0000-000")
    }
    fn nvmlDeviceGetVbiosVersion(gpu: Gpu, text: Out<c_char>, room: c_uint) {
        gpu.reach()?;
        text.text(room, "90.04.96.00.01")
    }
    fn nvmlDeviceGetIndex(gpu: Gpu, out: Out<c_uint>) { out.put(gpu.get()?.index as c_uint) }
    fn nvmlDeviceGetMinorNumber(gpu: Gpu, out: Out<c_uint>) { out.put(gpu.get()?.index as c_uint) }
    fn nvmlDeviceGetModuleId(gpu: Gpu, out: Out<c_uint>) { out.put(gpu.reach()?.index as c_uint) }
    fn nvmlDeviceGetBrand(gpu: Gpu, out: Out<c_uint>) {
        let tesla = untext(&gpu.reach()?.facts.name).starts_with("Tesla");
        out.put(if tesla { 2 } else { 14 })
    }
    fn nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3(gpu: Gpu, out: Out<nvmlPciInfo_t>) {
        out.put(pci(&gpu.reach()?.facts))
    }
    fn nvmlDeviceGetCudaComputeCapability(gpu: Gpu, major: Out<c_int>, minor: Out<c_int>) {
        let [a, b] = gpu.reach()?.facts.capability;
        major.put(a.cast_signed())?;
        minor.put(b.cast_signed())
    }
    fn nvmlDeviceGetNumGpuCores(gpu: Gpu, out: Out<c_uint>) {
        let f = &gpu.reach()?.facts;
        out.put(f.sms * f.cores_per_sm)
    }
    fn nvmlDeviceGetArchitecture(gpu: Gpu, out: Out<c_uint>) {
        out.put(architecture(gpu.reach()?.facts.capability))
    }
    fn nvmlDeviceGetMemoryBusWidth(gpu: Gpu, out: Out<c_uint>) { out.put(gpu.reach()?.facts.bus_bits) }
    fn nvmlDeviceGetBusType(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(2)
    }
    fn nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration, nvmlDeviceGetGpuMaxPcieLinkGeneration(gpu: Gpu, out: Out<c_uint>) {
        out.put(gpu.reach()?.facts.pcie[0])
    }
    fn nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth(gpu: Gpu, out: Out<c_uint>) {
        out.put(gpu.reach()?.facts.pcie[1])
    }
    fn nvmlDeviceGetMultiGpuBoard(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(0)
    }
    fn nvmlDeviceGetComputeMode(gpu: Gpu, out: Out<c_uint>) { out.put(gpu.stats()?.1.compute_mode) }
    fn nvmlDeviceSetComputeMode(gpu: Gpu, mode: c_uint) {
        let (device, _) = gpu.stats()?;
        if mode > 3 || mode == 1 {
            return Err(muxflow_abi::nvml::NVML_ERROR_INVALID_ARGUMENT);
        }
        device.ask(muxflow_emulated_gpu::wire::Kind::Set, &[2, mode.into()]).map(drop)
    }
    fn nvmlDeviceGetPersistenceMode(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(1)
    }
    fn nvmlDeviceSetPersistenceMode(gpu: Gpu, _mode: c_uint) { gpu.reach().map(drop) }
    fn nvmlDeviceGetDisplayMode, nvmlDeviceGetDisplayActive(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(0)
    }
    fn nvmlDeviceIsMigDeviceHandle(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(0)
    }
    fn nvmlDeviceGetMigMode(gpu: Gpu, _now: Out<c_uint>, _later: Out<c_uint>) { unsupported(gpu) }
    fn nvmlDeviceGetMaxMigDeviceCount(gpu: Gpu, out: Out<c_uint>) {
        gpu.reach()?;
        out.put(0)
    }
    fn nvmlDeviceGetTopologyCommonAncestor(a: Gpu, b: Gpu, out: Out<c_uint>) {
        a.reach()?;
        b.reach()?;
        out.put(50)
    }
    fn nvmlDeviceOnSameBoard(a: Gpu, b: Gpu, out: Out<c_int>) {
        out.put(c_int::from(a.get()?.index == b.get()?.index))
    }
}
