//! Plain structures that the device hands to the libraries: what the GPU is, how it does, who is
//! on it.

use crate::wire::Plain;

/// What a GPU is: everything that `libcuda` and `libnvidia-ml` must know of its profile.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Facts {
    /// Product name, zero-ended.
    pub name: [u8; 96],
    /// Sixteen bytes of its UUID.
    pub uuid: [u8; 16],
    /// Serial number as text, zero-ended.
    pub serial: [u8; 16],
    /// PCI domain, bus, device.
    pub pci: [u32; 3],
    /// Vendor and device id, as NVML joins them.
    pub pci_device_id: u32,
    /// The same of the board maker.
    pub pci_subsystem_id: u32,
    /// Index on this node.
    pub index: u32,
    /// Compute capability.
    pub capability: [u32; 2],
    /// SMs of the whole GPU.
    pub sms: u32,
    /// Warps that fit on an SM.
    pub warps_per_sm: u32,
    /// Cores (FP32 lanes) per SM.
    pub cores_per_sm: u32,
    /// Blocks that fit on an SM.
    pub blocks_per_sm: u32,
    /// Bits of the memory bus.
    pub bus_bits: u32,
    /// Highest SM clock in MHz.
    pub max_mhz: u32,
    /// Memory clock in MHz.
    pub memory_mhz: u32,
    /// PCIe generation and lanes.
    pub pcie: [u32; 2],
    /// Bytes of L2.
    pub l2_bytes: u64,
    /// Shared memory of an SM, and what one block may opt into.
    pub shared_bytes: [u64; 2],
    /// What programs can have, and what the driver keeps beside it.
    pub memory_bytes: [u64; 2],
    /// Memory that a context takes.
    pub context_bytes: u64,
    /// DRAM bytes per second at full speed.
    pub dram_bytes_per_s: f64,
    /// Arithmetic operations per second at full speed.
    pub flops: f64,
    /// Bytes per second over PCIe, one direction.
    pub pcie_bytes_per_s: f64,
    /// Device nanoseconds per host nanosecond.
    pub time_factor: f64,
    /// Microseconds from 1970 to device time 0.
    pub started_us: u64,
    /// Highest and default power limit in milliwatts.
    pub power_limit_mw: [u32; 2],
    /// Degrees at which the clock is cut, and at which it shuts down.
    pub temperature_limits_c: [u32; 2],
    /// Bits: 1 GPM, 2 ECC, 4 memory pools, 8 NVLink.
    pub features: u32,
    /// CUDA version that the driver answers, as 13040.
    pub cuda_version: u32,
    /// Driver version as text, zero-ended.
    pub driver_version: [u8; 32],
    /// Milliseconds between new values: profiling, utilisation, clocks, power.
    pub refresh_ms: [u32; 4],
}
// SAFETY: repr(C); fields are ordered so that no padding arises (checked by a test), any bits are
// valid numbers.
unsafe impl Plain for Facts {}

impl Facts {
    /// Microseconds since 1970 of a device time: the same for the same time, whenever it is asked.
    pub fn epoch_us(&self, device_ns: u64) -> u64 {
        self.started_us + (device_ns as f64 / self.time_factor / 1e3) as u64
    }
}

/// How a GPU does at a moment.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Stats {
    /// Device time of the reading.
    pub time_ns: u64,
    /// Device time at which the profiling counters last changed.
    pub profiling_time_ns: u64,
    /// The same of utilisation, clock, and power.
    pub sensor_time_ns: [u64; 3],
    /// Bytes in use, the driver's reserve not counted.
    pub used_bytes: u64,
    /// Utilisation as NVML defines it: per cent of the last period with a kernel, with DRAM use.
    pub utilisation_pct: [u32; 2],
    /// SM clock and memory clock, MHz.
    pub clock_mhz: [u32; 2],
    /// Power and power limit, milliwatts.
    pub power_mw: [u32; 2],
    /// Temperature, degrees.
    pub temperature_c: u32,
    /// NVML's reasons why the clock is not at its highest.
    pub throttle_reasons: u32,
    /// Profiling over the last period, 0 to 1: graphics engine, SM active, SM occupancy, tensor,
    /// DRAM active.
    pub profiling: [f64; 5],
    /// Integrals since the start in device seconds of the same five, up to now: the truth.
    pub integrals: [f64; 5],
    /// The same five up to when the profiling counters last changed, and bytes over PCIe to the device
    /// and from it: what GPM counts.
    pub profiling_sums: [f64; 7],
    /// Bytes per device second over PCIe in the last profiling period: to the device, from it.
    pub pcie_bytes_per_s: [f64; 2],
    /// Energy since the start in millijoules.
    pub energy_mj: u64,
    /// Bytes over PCIe since the start: to the device, from it.
    pub pcie_bytes: [u64; 2],
    /// Kernels completed since the start.
    pub kernels: u64,
    /// Last XID, and how many there were.
    pub xid: [u32; 2],
    /// Uncorrectable and corrected memory errors.
    pub ecc_errors: [u32; 2],
    /// Remapped rows by corrected and uncorrectable errors.
    pub remapped_rows: [u32; 2],
    /// NVML compute mode.
    pub compute_mode: u32,
    /// 0, or the NVML error that every call about this GPU returns.
    pub nvml_error: u32,
    /// Whether NVML calls about this GPU block.
    pub nvml_blocked: u32,
    /// NVML recovery action: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset.
    pub recovery_action: u32,
    /// 1 when the GPU has fallen off the bus.
    pub lost: u32,
    /// What DCGM calls fail with, without its sign.
    pub dcgm_error: u32,
}
// SAFETY: repr(C) without padding (checked by a test), any bits are valid numbers.
unsafe impl Plain for Stats {}

/// One process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct Process {
    /// Process id as the device sees it.
    pub pid: u32,
    /// Its MPS server, or 0.
    pub server_pid: u32,
    /// Bytes it holds.
    pub used_bytes: u64,
    /// Per cent of the last utilisation period with a kernel of it, and its DRAM share.
    pub utilisation_pct: [u32; 2],
    /// Device time at which that last changed.
    pub time_ns: u64,
    /// SMs it may use, in thousandths.
    pub sm_cap_thousandths: u32,
    /// 1 for an MPS server itself.
    pub is_server: u32,
}
// SAFETY: repr(C) without padding (checked by a test), any bits are valid numbers.
unsafe impl Plain for Process {}

/// A zero-ended text in a fixed array.
pub fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    let length = text.len().min(N - 1);
    bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
    bytes
}

/// The text of such an array.
pub fn untext(bytes: &[u8]) -> String {
    let length = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_structures_have_no_padding() {
        assert_eq!(size_of::<Facts>(), 96 + 16 + 16 + 4 * 18 + 8 * 6 + 8 * 5 + 8 + 8 + 8 + 32 + 16);
        assert_eq!(size_of::<Stats>(), 48 + 8 * 3 + 8 + 40 + 40 + 72 + 8 + 16 + 8 + 8 * 3 + 24);
        assert_eq!(size_of::<Process>(), 40);
    }
}
