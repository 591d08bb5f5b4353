//! The file that describes an emulated GPU: what `gpu-model` needs, and what the vendor's libraries
//! tell about such a GPU beside it.

use std::path::Path;

use muxflow_gpu_model::GpuProfile;
use serde::Deserialize;

use crate::EmulationError;
use crate::facts::{Facts, text};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Name of a description built into `gpu-model`; or give a `[model]` table.
    model_name: Option<String>,
    model: Option<toml::Table>,
    product: String,
    pci_device_id: u32,
    pci_subsystem_id: u32,
    reserved_memory_mib: u64,
    cores_per_sm: u32,
    blocks_per_sm: u32,
    bus_bits: u32,
    memory_mhz: u32,
    pcie_generation: u32,
    pcie_lanes: u32,
    pcie_gb_s: f64,
    l2_kib: u64,
    shared_memory_per_sm_kib: u64,
    shared_memory_per_block_optin_kib: u64,
    shutdown_c: u32,
    #[serde(default)]
    gpm: bool,
    #[serde(default)]
    ecc: bool,
    #[serde(default)]
    nvlink: bool,
    #[serde(default = "default_cuda")]
    cuda_version: u32,
    #[serde(default = "default_driver")]
    driver_version: String,
}

fn default_cuda() -> u32 {
    13_040
}

fn default_driver() -> String {
    "615.71".to_owned()
}

/// A profile that was read and checked.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Ground truth.
    pub model: GpuProfile,
    /// What the libraries tell; ids and times are filled in per device.
    pub facts: Facts,
}

const BUILT_IN: [(&str, &str); 5] = [
    ("t4", include_str!("../profiles/t4.toml")),
    ("a10", include_str!("../profiles/a10.toml")),
    ("v100", include_str!("../profiles/v100.toml")),
    ("a100", include_str!("../profiles/a100.toml")),
    ("h100", include_str!("../profiles/h100.toml")),
];

impl Profile {
    /// The text of a profile that comes with the program.
    pub fn built_in_text(name: &str) -> Option<&'static str> {
        BUILT_IN.iter().find(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, text)| *text)
    }

    /// Names of the profiles that come with the program.
    pub fn built_in_names() -> Vec<&'static str> {
        BUILT_IN.iter().map(|(n, _)| *n).collect()
    }

    /// Reads a profile file.
    pub fn read(path: &Path) -> Result<Profile, EmulationError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| EmulationError::Read { path: path.to_owned(), source })?;
        Profile::parse(&text)
            .map_err(|reason| EmulationError::Profile { path: path.to_owned(), reason })
    }

    /// Reads the text of a profile.
    pub fn parse(source: &str) -> Result<Profile, String> {
        let file: File = toml::from_str(source).map_err(|e| e.to_string())?;
        let model = match (&file.model_name, &file.model) {
            (Some(name), None) => GpuProfile::built_in(name),
            (None, Some(table)) => {
                GpuProfile::from_toml(&toml::to_string(table).map_err(|e| e.to_string())?)
            }
            _ => return Err("give either `model_name` or a `[model]` table".to_owned()),
        }
        .map_err(|e| e.to_string())?;
        let pcie = file.pcie_gb_s;
        if !(0.1..=1000.0).contains(&pcie) {
            return Err(format!("`pcie_gb_s` is {pcie}, it must lie between 0.1 and 1000"));
        }
        let reserved = file.reserved_memory_mib << 20;
        let usable = model.memory.0.checked_sub(reserved).filter(|b| *b > 0).ok_or_else(|| {
            format!(
                "`reserved_memory_mib` is {}, it must be less than the model's memory of {} MiB",
                file.reserved_memory_mib,
                model.memory.0 >> 20
            )
        })?;
        let features =
            u32::from(file.gpm) | u32::from(file.ecc) << 1 | 4 | u32::from(file.nvlink) << 3;
        let watts = (model.power.limit_w * 1000.0) as u32;
        let ms = |m: muxflow_types::Micros| (m.0 / 1000).max(1) as u32;
        let facts = Facts {
            name: text(&file.product),
            uuid: [0; 16],
            serial: [0; 16],
            pci: [0; 3],
            pci_device_id: file.pci_device_id,
            pci_subsystem_id: file.pci_subsystem_id,
            index: 0,
            capability: [model.compute_capability.0, model.compute_capability.1],
            sms: model.sms,
            warps_per_sm: model.warps_per_sm,
            cores_per_sm: file.cores_per_sm,
            blocks_per_sm: file.blocks_per_sm,
            bus_bits: file.bus_bits,
            max_mhz: model.power.max_mhz,
            memory_mhz: file.memory_mhz,
            pcie: [file.pcie_generation, file.pcie_lanes],
            l2_bytes: file.l2_kib << 10,
            shared_bytes: [
                file.shared_memory_per_sm_kib << 10,
                file.shared_memory_per_block_optin_kib << 10,
            ],
            memory_bytes: [usable, reserved],
            context_bytes: model.context_memory.0,
            dram_bytes_per_s: model.bandwidth_gb_s * 1e9,
            flops: model.compute_tflops * 1e12,
            pcie_bytes_per_s: pcie * 1e9,
            time_factor: 1.0,
            started_us: 0,
            power_limit_mw: [watts, watts],
            temperature_limits_c: [model.power.throttle_c as u32, file.shutdown_c],
            features,
            cuda_version: file.cuda_version,
            driver_version: text(&file.driver_version),
            refresh_ms: [
                ms(model.refresh.profiling),
                ms(model.refresh.utilisation),
                ms(model.refresh.clock),
                ms(model.refresh.power),
            ],
        };
        Ok(Profile { model, facts })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_is_read() {
        for name in Profile::built_in_names() {
            let text = Profile::built_in_text(name).unwrap();
            let profile = Profile::parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(profile.facts.memory_bytes[0] > 1 << 30, "{name}");
        }
    }

    #[test]
    fn memory_is_what_the_vendors_tools_show() {
        for (name, total_mib) in [("t4", 15_360), ("a10", 23_028), ("a100", 40_960)] {
            let profile = Profile::parse(Profile::built_in_text(name).unwrap()).unwrap();
            let [usable, reserved] = profile.facts.memory_bytes;
            assert_eq!((usable + reserved) >> 20, total_mib, "{name}");
            assert!(reserved > 0, "{name}");
        }
    }

    #[test]
    fn an_h100_contends_as_the_a100_that_it_says_it_takes() {
        let [a, h] =
            ["a100", "h100"].map(|n| Profile::parse(Profile::built_in_text(n).unwrap()).unwrap());
        assert_eq!(h.model.contention, a.model.contention);
    }

    #[test]
    fn a_bad_profile_names_the_field() {
        let t4 = Profile::built_in_text("t4").unwrap();
        let error = Profile::parse(&t4.replace("pcie_gb_s", "pcie_gbs")).unwrap_err();
        assert!(error.contains("pcie_gbs"), "{error}");
        let error = Profile::parse(&t4.replace("model_name", "# model_name")).unwrap_err();
        assert!(error.contains("model_name"), "{error}");
        let all = t4.replace("reserved_memory_mib = 450", "reserved_memory_mib = 15360");
        let error = Profile::parse(&all).unwrap_err();
        assert!(error.contains("reserved_memory_mib"), "{error}");
    }
}
