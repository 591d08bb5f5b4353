//! What a workload asks of a GPU, written down once on the reference type and carried over to the
//! others.

use muxflow_types::{Bytes, Micros, Percent, ProfileRecord, WorkloadName};

use crate::average::{Gap, Tenant, averaged};
use crate::contention::{ClientId, Resident};
use crate::error::ModelError;
use crate::profile::GpuProfile;
use crate::shape_file;

/// What a workload does with its iterations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// One iteration after the other, as fast as they go.
    Training,
    /// One iteration per batch of requests.
    Inference,
}

/// A workload on the reference type (T4, at its highest clock, alone).
#[derive(Debug, Clone, PartialEq)]
pub struct WorkloadShape {
    /// Its name.
    pub name: WorkloadName,
    /// Training or inference.
    pub phase: Phase,
    /// GPU time of one iteration (training) or of a batch of one (inference).
    pub busy_us: f64,
    /// Host time of one iteration in which the GPU has nothing to do.
    pub host_gap_us: f64,
    /// Kernels launched in one iteration.
    pub kernels: u32,
    /// SMs that its kernels fill on average; may exceed what a GPU has.
    pub sm_fill: f64,
    /// Resident warps against what fits, on the SMs it fills.
    pub occupancy: f64,
    /// Share of the issue slots it uses on those SMs.
    pub issue: f64,
    /// Share of the reference type's DRAM bandwidth it uses while busy.
    pub bandwidth: f64,
    /// Device memory at its peak, with its context.
    pub memory: Bytes,
    /// What each further request of a batch adds, as a part of the first.
    pub batch_cost: f64,
}

/// A workload on one type of GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Placed {
    /// Its average kernel, of client 0 and not capped.
    pub kernel: Resident,
    /// GPU time of one iteration alone, at the highest clock.
    pub busy_us: f64,
    /// Host time of one iteration.
    pub host_gap_us: f64,
    /// Kernels in one iteration.
    pub kernels: u32,
}

/// The reference type that shapes are written for.
pub const REFERENCE: &str = "T4";
const REFERENCE_SMS: f64 = 40.0;
const REFERENCE_TFLOPS: f64 = 8.1;
const REFERENCE_GB_S: f64 = 320.0;

impl WorkloadShape {
    /// Reads and checks a list of workloads.
    pub fn list_from_toml(text: &str) -> Result<Vec<WorkloadShape>, ModelError> {
        shape_file::read(text)
    }

    /// All workloads that come with the program.
    pub fn built_in_list() -> Result<Vec<WorkloadShape>, ModelError> {
        Self::list_from_toml(include_str!("../profiles/workloads.toml"))
    }

    /// A workload that comes with the program.
    pub fn built_in(name: &str) -> Result<WorkloadShape, ModelError> {
        let list = Self::built_in_list()?;
        let known = list.iter().map(|w| w.name.as_str()).collect::<Vec<_>>().join(", ");
        list.into_iter().find(|w| w.name.as_str() == name).ok_or_else(|| ModelError::Unknown {
            what: "workload",
            name: name.to_owned(),
            known,
        })
    }

    /// The same workload serving batches of `n` requests.
    pub fn with_batch(&self, n: f64) -> WorkloadShape {
        let n = n.max(1.0);
        let grown = n.sqrt();
        WorkloadShape {
            busy_us: self.busy_us * (1.0 + self.batch_cost * (n - 1.0)),
            sm_fill: self.sm_fill * grown,
            ..self.clone()
        }
    }

    /// What it is on another type: arithmetic goes with the compute of the SMs it fills, the rest
    /// with the bandwidth.
    pub fn on(&self, profile: &GpuProfile) -> Placed {
        let sms = f64::from(profile.sms);
        let compute_of = |tflops: f64, sms: f64| tflops / sms * self.sm_fill.min(sms);
        let compute =
            compute_of(REFERENCE_TFLOPS, REFERENCE_SMS) / compute_of(profile.compute_tflops, sms);
        let memory = REFERENCE_GB_S / profile.bandwidth_gb_s;
        let sum = self.issue + self.bandwidth;
        let arithmetic = if sum > 0.0 { self.issue / sum } else { 0.5 };
        let stretch = arithmetic * compute + (1.0 - arithmetic) * memory;
        Placed {
            kernel: Resident {
                client: ClientId(0),
                sm_cap: sms,
                sm_fill: self.sm_fill,
                occupancy: self.occupancy,
                issue: (self.issue * compute / stretch).min(1.0),
                bandwidth: (self.bandwidth * memory / stretch).min(1.0),
                kernel_us: self.busy_us * stretch / f64::from(self.kernels.max(1)),
            },
            busy_us: self.busy_us * stretch,
            host_gap_us: self.host_gap_us,
            kernels: self.kernels,
        }
    }

    /// What a profiler would measure of it alone on this type. An inference workload is measured at
    /// `requests_per_s`; a training workload runs flat out.
    pub fn profile_record(&self, profile: &GpuProfile, requests_per_s: f64) -> ProfileRecord {
        let placed = self.on(profile);
        let gap = match self.phase {
            Phase::Training => Gap::Closed { gap_us: placed.host_gap_us },
            Phase::Inference => Gap::Open { per_s: requests_per_s },
        };
        let solo = averaged(profile, &crate::Sharing::Mps, &[placed.tenant(gap)]);
        let busy_us = placed.busy_us / solo.rates[0];
        let percent = |x: f64| Percent::clamped(x * 100.0);
        ProfileRecord {
            workload: self.name.clone(),
            gpu_type: profile.gpu_type.clone(),
            gpu_util: percent(solo.gpu_util),
            sm_activity: percent(solo.load.sm_activity),
            sm_occupancy: percent(solo.load.sm_occupancy),
            dram_activity: percent(solo.load.dram_activity),
            solo_time: Micros::from_secs_f64((busy_us + placed.host_gap_us) / 1e6).ok(),
            memory: Some(self.memory),
        }
    }
}

impl Placed {
    /// This workload as a tenant of the averaged model, alone and not capped.
    pub fn tenant(&self, gap: Gap) -> Tenant {
        Tenant { kernel: self.kernel, busy_us: self.busy_us, gap, gate: 1.0 }
    }
}
