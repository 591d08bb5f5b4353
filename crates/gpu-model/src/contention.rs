//! The one contention function: kernels that are resident on a GPU at one moment, and how fast each
//! of them goes.
//!
//! Four things are shared. **SMs**: a kernel spreads over as many SMs as its blocks fill and its
//! client's cap lets it; what it needs of them is the larger of its issue rate and a part of its
//! occupancy; when all needs exceed the GPU, each gets a part in proportion (blocks are placed as
//! they come). **DRAM bandwidth**: a kernel on few SMs cannot reach all of it, and demands beyond
//! the whole stretch everybody by how much they use it. **Caches and memory latency**: neighbours
//! slow a kernel even below saturation. **The clock**: it slows the part of a kernel that issues
//! instructions, not the part that waits for memory.
//!
//! Blocks are not preempted: where neighbours hold every SM, a kernel that starts waits until one
//! of their blocks ends. A service of short kernels beside a job of long ones, without a cap, loses
//! most of its speed to this; with a cap that leaves it enough SMs, nothing.

use crate::profile::GpuProfile;

/// Which client (process) a kernel belongs to; kernels of one client share its cap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClientId(pub u32);

/// One kernel on the GPU now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resident {
    /// Whose it is.
    pub client: ClientId,
    /// SMs that MPS lets the client use; all SMs of the GPU when it is not capped.
    pub sm_cap: f64,
    /// SMs that its blocks can fill at once; more than the GPU has means several waves.
    pub sm_fill: f64,
    /// Resident warps against what fits, on an SM that it fills: 0 to 1.
    pub occupancy: f64,
    /// Share of an SM's issue slots it uses at full solo speed: 0 to 1 (arithmetic intensity).
    pub issue: f64,
    /// Share of the GPU's DRAM bandwidth it uses at full solo speed: 0 to 1.
    pub bandwidth: f64,
    /// How long it takes at full solo speed; 0 where it is not known, and then nobody waits for
    /// its blocks, nor it for theirs.
    pub kernel_us: f64,
}

/// What the resident kernels do to the GPU, at the highest clock.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Load {
    /// Share of SMs with work, 0 to 1.
    pub sm_activity: f64,
    /// Resident warps against what fits on the whole GPU, 0 to 1.
    pub sm_occupancy: f64,
    /// Share of DRAM bandwidth in use, 0 to 1.
    pub dram_activity: f64,
    /// Switching activity of the SMs, 0 to 1: what the power model needs.
    pub intensity: f64,
    /// Whether any kernel runs.
    pub busy: bool,
}

/// A kernel's speed when it is `clock_ratio` (0 to 1) of the highest clock instead: only the part
/// that issues instructions slows.
pub fn clock_factor(resident: &Resident, clock_ratio: f64) -> f64 {
    let sensitivity = clock_sensitivity(resident);
    1.0 / (1.0 - sensitivity + sensitivity / clock_ratio.max(1e-3))
}

/// The part of a kernel's time that scales with the SM clock.
pub fn clock_sensitivity(resident: &Resident) -> f64 {
    let sum = resident.issue + resident.bandwidth;
    if sum <= 0.0 { 0.5 } else { resident.issue / sum }
}

/// Writes each kernel's speed, as a part of its full solo speed at the highest clock, into `rates`
/// (as long as `residents`), and returns what the counters show.
///
/// # Panics
/// When `rates` and `residents` differ in length.
pub fn contend(profile: &GpuProfile, residents: &[Resident], rates: &mut [f64]) -> Load {
    assert_eq!(residents.len(), rates.len(), "one rate for each resident kernel");
    let c = &profile.contention;
    let sms = f64::from(profile.sms);
    let mut spread_total = 0.0;
    let mut need_total = 0.0;
    for r in residents {
        let spread = spread(residents, r, sms);
        spread_total += spread;
        need_total += need(c.residency_weight, r, sms).min(spread);
    }
    // Beyond a full GPU, sharing SMs costs a little more than the plain proportion.
    let crowding = (need_total / sms).max(1.0);
    let mut demand = 0.0;
    let mut demand_square = 0.0;
    for (r, rate) in residents.iter().zip(rates.iter_mut()) {
        let spread = spread(residents, r, sms);
        let need = need(c.residency_weight, r, sms);
        let from_sms = if need > 0.0 { (need.min(spread) / crowding / need).min(1.0) } else { 1.0 };
        let reach = (spread / sms / c.bandwidth_saturation_share).min(1.0);
        let from_dram = if r.bandwidth > 0.0 { (reach / r.bandwidth).min(1.0) } else { 1.0 };
        *rate = soft_min(from_sms, from_dram);
        demand += r.bandwidth * *rate;
        demand_square += r.bandwidth * r.bandwidth * *rate;
    }
    let mean_bandwidth = if demand > 0.0 { demand_square / demand } else { 1.0 };
    let excess = (demand - 1.0).max(0.0);
    let spread_scale = if spread_total > sms { sms / spread_total } else { 1.0 };
    // What the neighbours take of the memory system, at their speed before cache interference.
    let mut load = Load { busy: !residents.is_empty(), ..Load::default() };
    for (r, rate) in residents.iter().zip(rates.iter_mut()) {
        *rate /= 1.0 + excess * r.bandwidth / mean_bandwidth;
        load.dram_activity += r.bandwidth * *rate;
    }
    let dram_total = load.dram_activity.min(1.0);
    load.dram_activity = 0.0;
    for (r, rate) in residents.iter().zip(rates.iter_mut()) {
        let spread = spread(residents, r, sms) * spread_scale;
        let others_dram = (dram_total - own(residents, r, |k| k.bandwidth) * *rate).max(0.0);
        let others_sms =
            ((spread_total * spread_scale) - own_spread(residents, r, sms) * spread_scale).max(0.0)
                / sms;
        *rate /= 1.0
            + c.dram_interference * r.bandwidth * others_dram
            + c.cache_interference * others_sms
            + block_wait(c.block_hold, residents, r, sms);
        load.dram_activity += r.bandwidth * *rate;
        load.intensity +=
            spread / sms * (c.idle_issue_power + (1.0 - c.idle_issue_power) * r.issue);
        load.sm_occupancy += r.occupancy * spread / sms;
    }
    load.sm_activity = (spread_total / sms).min(1.0);
    load.sm_occupancy = load.sm_occupancy.min(1.0);
    load.dram_activity = load.dram_activity.min(1.0);
    load.intensity = load.intensity.min(1.0);
    load
}

/// SMs this kernel spreads over: what it fills, within its client's cap, which all kernels of the
/// client share in proportion.
fn spread(residents: &[Resident], r: &Resident, sms: f64) -> f64 {
    let mine = r.sm_fill.min(sms);
    let client: f64 =
        residents.iter().filter(|k| k.client == r.client).map(|k| k.sm_fill.min(sms)).sum();
    let cap = r.sm_cap.min(sms);
    if client > cap { mine * cap / client } else { mine }
}

/// SM-equivalents that the kernel needs for its full solo speed.
fn need(residency_weight: f64, r: &Resident, sms: f64) -> f64 {
    r.sm_fill.min(sms) * r.issue.max(residency_weight * r.occupancy)
}

/// Waiting for a neighbour's block to end, against the kernel's own length: on the part of its SMs
/// that neighbours hold too, for `hold` times the life of their blocks.
fn block_wait(hold: f64, residents: &[Resident], r: &Resident, sms: f64) -> f64 {
    if hold <= 0.0 || r.kernel_us <= 0.0 {
        return 0.0;
    }
    let (mut held, mut life) = (0.0, 0.0);
    for k in residents.iter().filter(|k| k.client != r.client) {
        let spread = spread(residents, k, sms);
        held += spread;
        life += spread * k.kernel_us / (k.sm_fill / sms).max(1.0);
    }
    let own = own_spread(residents, r, sms);
    let covered = (own + held - sms).clamp(0.0, own);
    if covered <= 0.0 || held <= 0.0 {
        return 0.0;
    }
    hold * covered / own * life / held / r.kernel_us
}

fn own(residents: &[Resident], r: &Resident, what: impl Fn(&Resident) -> f64) -> f64 {
    residents.iter().filter(|k| k.client == r.client).map(what).sum()
}

fn own_spread(residents: &[Resident], r: &Resident, sms: f64) -> f64 {
    residents.iter().filter(|k| k.client == r.client).map(|k| spread(residents, k, sms)).sum()
}

/// The smaller of two speeds, rounded where they are close: two limits at once cost more than one.
fn soft_min(a: f64, b: f64) -> f64 {
    if a >= 1.0 {
        return b;
    }
    if b >= 1.0 {
        return a;
    }
    let stretch = a.powi(-4) + b.powi(-4) - 1.0;
    stretch.powf(-0.25)
}
