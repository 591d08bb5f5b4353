//! A workload measured alone on a GPU.

use crate::id::{GpuType, WorkloadName};
use crate::unit::{Bytes, Micros, Percent};

/// What is known of a workload that ran alone on a GPU of one type (the paper's execution
/// information). Every measured feature may be missing; the predictor handles that and says so.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileRecord {
    /// What ran.
    pub workload: WorkloadName,
    /// On which kind of GPU.
    pub gpu_type: GpuType,
    /// Share of time with a kernel running.
    pub gpu_util: Option<Percent>,
    /// Share of SMs with work.
    pub sm_activity: Option<Percent>,
    /// Resident warps against what fits.
    pub sm_occupancy: Option<Percent>,
    /// Share of the memory interface's time in use.
    pub dram_activity: Option<Percent>,
    /// Time of one iteration (offline) or one request (online), alone.
    pub solo_time: Option<Micros>,
    /// Device memory held at its peak.
    pub memory: Option<Bytes>,
}

impl ProfileRecord {
    /// A profile of which nothing was measured.
    pub fn unknown(workload: WorkloadName, gpu_type: GpuType) -> Self {
        ProfileRecord {
            workload,
            gpu_type,
            gpu_util: None,
            sm_activity: None,
            sm_occupancy: None,
            dram_activity: None,
            solo_time: None,
            memory: None,
        }
    }
}

/// A pair that was really run, and how fast the offline half ran: what predictors learn from.
#[derive(Debug, Clone, PartialEq)]
pub struct SpeedSample {
    /// The neighbour, alone on this GPU type.
    pub online: ProfileRecord,
    /// The workload whose speed was measured, alone on this GPU type.
    pub offline: ProfileRecord,
    /// The SMs that the offline half could use; `None` where nobody wrote it down.
    pub share: Option<Percent>,
    /// Speed when sharing divided by speed alone, 0 to 1.
    pub speed: f64,
    /// When it was measured; zero when unknown.
    pub at: Micros,
}
