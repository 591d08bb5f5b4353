//! One reading of one GPU, with its time and the age of each counter in it.

use crate::unit::{Bytes, MegaHertz, Micros, Percent, Watts};

/// What the monitor read from one GPU at one moment.
///
/// A counter that the hardware did not give is `None`: it is never a zero in disguise.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GpuSample {
    /// When the sample was taken.
    pub at: Micros,
    /// When the slowest counter in it was last refreshed by the hardware. Polling faster than the
    /// hardware refreshes repeats old values; laws that integrate must know.
    pub refreshed_at: Micros,
    /// Share of time in which at least one kernel ran.
    pub gpu_util: Option<Percent>,
    /// Share of SMs that had work, averaged over time.
    pub sm_activity: Option<Percent>,
    /// Resident warps against what fits.
    pub sm_occupancy: Option<Percent>,
    /// Share of the memory interface's time in use.
    pub dram_activity: Option<Percent>,
    /// Present SM clock.
    pub sm_clock: Option<MegaHertz>,
    /// Device memory in use by everybody.
    pub memory_used: Option<Bytes>,
    /// Device memory in all.
    pub memory_total: Option<Bytes>,
    /// Power drawn.
    pub power: Option<Watts>,
    /// Temperature in degrees Celsius.
    pub temperature_c: Option<f64>,
    /// The online service's latency at its SLO percentile, where it reports one.
    pub online_latency: Option<Micros>,
}

impl GpuSample {
    /// A sample that knows nothing but its time.
    pub fn empty(at: Micros) -> Self {
        GpuSample {
            at,
            refreshed_at: at,
            gpu_util: None,
            sm_activity: None,
            sm_occupancy: None,
            dram_activity: None,
            sm_clock: None,
            memory_used: None,
            memory_total: None,
            power: None,
            temperature_c: None,
            online_latency: None,
        }
    }

    /// Memory in use as a share of the whole, when both are known.
    pub fn memory_share(&self) -> Option<Percent> {
        self.memory_used?.share_of(self.memory_total?)
    }
}
