//! One type of GPU: what the vendor says about it, and the parameters of the model for it.

use muxflow_types::{Bytes, GpuType, MegaHertz, Micros, SmCount};

use crate::error::ModelError;
use crate::fault::FaultRates;
use crate::power::PowerModel;
use crate::profile_file;

/// Parameters of the contention function.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contention {
    /// Share of SMs that is enough to reach the whole DRAM bandwidth.
    pub bandwidth_saturation_share: f64,
    /// How much of a kernel's occupancy counts as need for SMs, beside its issue rate.
    pub residency_weight: f64,
    /// Slowing by neighbours' DRAM traffic, for a kernel that lives on bandwidth.
    pub dram_interference: f64,
    /// Slowing by neighbours on the other SMs, through L2 and the launch path.
    pub cache_interference: f64,
    /// How much of the life of a neighbour's block a kernel waits where no SM is free; 0 is not at
    /// all.
    pub block_hold: f64,
    /// Switching activity of an SM that holds warps but issues nothing.
    pub idle_issue_power: f64,
}

/// How the driver cuts time when clients do not share under MPS.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimeSlicing {
    /// Length of one slice.
    pub slice_us: f64,
    /// Cost of changing from one client to the other.
    pub switch_us: f64,
}

/// How often each family of counters gets a new value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefreshPeriods {
    /// Profiling counters (SM activity, occupancy, DRAM) through DCGM or GPM.
    pub profiling: Micros,
    /// NVML utilisation.
    pub utilisation: Micros,
    /// Clocks.
    pub clock: Micros,
    /// Power and temperature.
    pub power: Micros,
}

/// One type of GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuProfile {
    /// Its name.
    pub gpu_type: GpuType,
    /// How many SMs it has.
    pub sms: u32,
    /// All its memory, as the vendor's tools show it; the driver keeps a few per cent of it.
    pub memory: Bytes,
    /// Memory that each client's context takes.
    pub context_memory: Bytes,
    /// Peak DRAM bandwidth in GB/s.
    pub bandwidth_gb_s: f64,
    /// Peak arithmetic in the precision that training and inference use, in TFLOP/s.
    pub compute_tflops: f64,
    /// Warps that fit on one SM.
    pub warps_per_sm: u32,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
    /// Clock and power.
    pub power: PowerModel,
    /// Contention parameters.
    pub contention: Contention,
    /// Time slices.
    pub time_slicing: TimeSlicing,
    /// Counter refresh.
    pub refresh: RefreshPeriods,
    /// Fault rates.
    pub faults: FaultRates,
}

const BUILT_IN: [(&str, &str); 6] = [
    ("T4", include_str!("../profiles/t4.toml")),
    ("A10", include_str!("../profiles/a10.toml")),
    ("V100", include_str!("../profiles/v100.toml")),
    ("A100", include_str!("../profiles/a100.toml")),
    ("P100", include_str!("../profiles/p100.toml")),
    ("K80", include_str!("../profiles/k80.toml")),
];

impl GpuProfile {
    /// Reads and checks the text of a profile file.
    pub fn from_toml(text: &str) -> Result<Self, ModelError> {
        profile_file::read(text)
    }

    /// A profile that comes with the program.
    pub fn built_in(name: &str) -> Result<Self, ModelError> {
        match BUILT_IN.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)) {
            Some((_, text)) => Self::from_toml(text),
            None => Err(ModelError::Unknown {
                what: "GPU type",
                name: name.to_owned(),
                known: BUILT_IN.map(|(n, _)| n).join(", "),
            }),
        }
    }

    /// The names of the profiles that come with the program.
    pub fn built_in_names() -> [&'static str; 6] {
        BUILT_IN.map(|(n, _)| n)
    }

    /// SM count as a unit.
    pub fn sm_count(&self) -> SmCount {
        SmCount(self.sms)
    }

    /// Highest SM clock.
    pub fn max_clock(&self) -> MegaHertz {
        MegaHertz(self.power.max_mhz)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_is_read() {
        for name in GpuProfile::built_in_names() {
            let p = GpuProfile::built_in(name).unwrap();
            assert_eq!(p.gpu_type.as_str(), name);
        }
        let err = GpuProfile::built_in("H9000").unwrap_err().to_string();
        assert!(err.contains("H9000") && err.contains("T4"), "{err}");
    }

    #[test]
    fn bad_profiles_name_the_field() {
        let good = include_str!("../profiles/t4.toml");
        let cases = [
            ("sms = 40", "sms = 0", "sms"),
            ("max_mhz = 1590", "max_mhz = 100", "max_mhz"),
            ("sms = 40", "sms = -4", "sms"),
            ("sms = 40", "smss = 40", "smss"),
            ("sms = 40", "sms = nan", "sms"),
        ];
        for (from, to, field) in cases {
            assert!(good.contains(from), "{from}");
            let err = GpuProfile::from_toml(&good.replace(from, to)).unwrap_err().to_string();
            assert!(err.contains(field), "{to}: {err}");
        }
    }
}
