//! The long-run average of tenants that come and go on one GPU, in closed form: what the simulator
//! uses.
//!
//! Each tenant is on the GPU a part of the time: a request-driven one as its rate and service time
//! say, a flat-out one as its host gaps leave. Assuming these presences independent, the speed of
//! each tenant is the mean over who else is present of what [`contend`] says for exactly that set;
//! slower service means more presence, so the answer is a fixed point. The clock settles for the
//! average load, because the governor is slower than kernels.

use crate::contention::{ClientId, Load, Resident, clock_factor, contend};
use crate::device::Sharing;
use crate::profile::GpuProfile;
use crate::shape::Placed;

/// What makes a tenant leave the GPU idle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gap {
    /// The next iteration starts after this host time.
    Closed {
        /// Host time per iteration.
        gap_us: f64,
    },
    /// Iterations come from outside.
    Open {
        /// How many in a second.
        per_s: f64,
    },
}

/// One workload on the GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tenant {
    /// Its average kernel, with its cap.
    pub kernel: Resident,
    /// GPU time of one iteration alone at the highest clock and without cap.
    pub busy_us: f64,
    /// What separates iterations.
    pub gap: Gap,
    /// Share of time in which the launch gate is open: 0 to 1.
    pub gate: f64,
}

/// What holds on average.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Averaged {
    /// Progress of each tenant while it has work: seconds of full solo speed per second.
    pub rates: Vec<f64>,
    /// Share of time each tenant is on the GPU.
    pub presence: Vec<f64>,
    /// Iterations each tenant completes in a second.
    pub iterations_per_s: Vec<f64>,
    /// Mean counters.
    pub load: Load,
    /// Share of time with a kernel running.
    pub gpu_util: f64,
    /// Settled clock as a part of the highest.
    pub clock_ratio: f64,
    /// Mean power.
    pub power_w: f64,
    /// Whether some request-driven tenant gets more work than it can do.
    pub overloaded: bool,
}

/// More tenants than this on one GPU are not averaged (the sets of who is present double with each).
pub const MAX_TENANTS: usize = 12;

/// Averages up to [`MAX_TENANTS`] tenants; those beyond are left out.
pub fn averaged(profile: &GpuProfile, sharing: &Sharing, tenants: &[Tenant]) -> Averaged {
    let tenants = &tenants[..tenants.len().min(MAX_TENANTS)];
    let n = tenants.len();
    let sets = 1usize << n;
    let mut rates = vec![0.0; sets * n];
    let mut loads = vec![Load::default(); sets];
    for set in 1..sets {
        loads[set] = rates_of_set(profile, sharing, tenants, set, &mut rates[set * n..][..n]);
    }
    let mut presence: Vec<f64> = tenants.iter().map(initial_presence).collect();
    let mut out = Averaged { clock_ratio: 1.0, rates: vec![1.0; n], ..Averaged::default() };
    for _ in 0..200 {
        out.load = Load::default();
        for (set, load) in loads.iter().enumerate() {
            let weight = weight_of(set, &presence, usize::MAX);
            out.load.sm_activity += weight * load.sm_activity;
            out.load.sm_occupancy += weight * load.sm_occupancy;
            out.load.dram_activity += weight * load.dram_activity;
            out.load.intensity += weight * load.intensity;
        }
        out.clock_ratio = profile.power.settled_ratio(&out.load);
        let mut change = 0.0f64;
        for (i, t) in tenants.iter().enumerate() {
            let mut rate = 0.0;
            for set in (0..sets).filter(|set| set & (1 << i) != 0) {
                rate += weight_of(set, &presence, i) * rates[set * n + i];
            }
            out.rates[i] = (rate * clock_factor(&t.kernel, out.clock_ratio)).max(1e-9);
            let wanted = presence_at(t, out.rates[i]);
            change = change.max((wanted - presence[i]).abs());
            presence[i] += 0.6 * (wanted - presence[i]);
        }
        if change < 1e-10 {
            break;
        }
    }
    finish(profile, tenants, presence, out)
}

fn finish(
    profile: &GpuProfile,
    tenants: &[Tenant],
    presence: Vec<f64>,
    mut out: Averaged,
) -> Averaged {
    for (t, &rate) in tenants.iter().zip(&out.rates) {
        let (per_s, overloaded) = match t.gap {
            Gap::Closed { .. } => (1e6 / period_us(t, rate), false),
            Gap::Open { per_s } => {
                let most = rate * t.gate / t.busy_us * 1e6;
                (per_s.min(most), per_s > most)
            }
        };
        out.iterations_per_s.push(per_s);
        out.overloaded |= overloaded;
    }
    out.gpu_util = 1.0 - weight_of(0, &presence, usize::MAX);
    out.load.busy = out.gpu_util > 0.0;
    out.power_w = profile.power.power_w(&out.load, out.clock_ratio);
    out.presence = presence;
    out
}

fn initial_presence(t: &Tenant) -> f64 {
    presence_at(t, 1.0)
}

fn presence_at(t: &Tenant, rate: f64) -> f64 {
    match t.gap {
        Gap::Closed { .. } => (t.busy_us / rate / period_us(t, rate)).min(1.0),
        Gap::Open { per_s } => (per_s * t.busy_us / 1e6 / rate).min(t.gate).min(1.0),
    }
}

/// Time of one iteration of a flat-out tenant; a half-closed gate makes room around its kernels.
fn period_us(t: &Tenant, rate: f64) -> f64 {
    let busy = t.busy_us / rate;
    let gap = match t.gap {
        Gap::Closed { gap_us } => gap_us,
        Gap::Open { .. } => 0.0,
    };
    if t.gate <= 0.0 { f64::INFINITY } else { (busy + gap).max(busy / t.gate) }
}

/// Probability that exactly `set` is on the GPU, given that `known` is (`usize::MAX`: nobody known).
fn weight_of(set: usize, presence: &[f64], known: usize) -> f64 {
    let mut weight = 1.0;
    for (j, &p) in presence.iter().enumerate() {
        if j != known {
            weight *= if set & (1 << j) != 0 { p } else { 1.0 - p };
        }
    }
    weight
}

fn rates_of_set(
    profile: &GpuProfile,
    sharing: &Sharing,
    tenants: &[Tenant],
    set: usize,
    out: &mut [f64],
) -> Load {
    let members: Vec<usize> = (0..tenants.len()).filter(|i| set & (1 << i) != 0).collect();
    if *sharing == Sharing::Mps || members.len() == 1 {
        let residents: Vec<Resident> = members
            .iter()
            .map(|&i| Resident { client: client_of(i), ..tenants[i].kernel })
            .collect();
        let mut rates = vec![0.0; members.len()];
        let load = contend(profile, &residents, &mut rates);
        for (&i, rate) in members.iter().zip(rates) {
            out[i] = rate;
        }
        return load;
    }
    sliced(profile, sharing, tenants, &members, out)
}

/// One at a time: each gets its part of the time, less the cost of switching.
fn sliced(
    profile: &GpuProfile,
    sharing: &Sharing,
    tenants: &[Tenant],
    members: &[usize],
    out: &mut [f64],
) -> Load {
    let weight = |i: usize| match sharing {
        Sharing::PriorityTimeSlice { favoured, weight } if favoured.contains(&client_of(i)) => {
            *weight
        }
        _ => 1.0,
    };
    let total: f64 = members.iter().map(|&i| weight(i)).sum();
    let slices = profile.time_slicing.slice_us * total;
    #[expect(clippy::cast_precision_loss, reason = "a handful of tenants")]
    let switches = match sharing {
        Sharing::Exclusive => 0.0,
        _ => profile.time_slicing.switch_us * members.len() as f64,
    };
    let useful = slices / (slices + switches);
    let mut load = Load { busy: true, ..Load::default() };
    for &i in members {
        let part = weight(i) / total * useful;
        let mut rate = [0.0];
        let own =
            contend(profile, &[Resident { client: client_of(i), ..tenants[i].kernel }], &mut rate);
        out[i] = part * rate[0];
        load.sm_activity += part * own.sm_activity;
        load.sm_occupancy += part * own.sm_occupancy;
        load.dram_activity += part * own.dram_activity;
        load.intensity += part * own.intensity;
    }
    load
}

fn client_of(index: usize) -> ClientId {
    ClientId(u32::try_from(index).unwrap_or(u32::MAX))
}

/// An online service (client 0) and, beside it, an offline job (client 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair<'a> {
    /// The service, already batched.
    pub online: Option<&'a Placed>,
    /// Batches that it gets in a second.
    pub batches_per_s: f64,
    /// The job.
    pub offline: Option<&'a Placed>,
    /// Share of SMs that MPS gives the job: 0 to 1.
    pub share: f64,
    /// Share of time in which the launch gate lets the job launch: 0 to 1.
    pub gate: f64,
}

/// What comes of a pair.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PairOutcome {
    /// GPU time of one batch of the service.
    pub online_busy_us: f64,
    /// The same alone on this GPU at the same request rate.
    pub online_solo_busy_us: f64,
    /// Speed of the job against its speed alone on this type: 0 to 1.
    pub offline_speed: f64,
    /// Mean counters of the GPU.
    pub gpu: Averaged,
}

impl PairOutcome {
    /// GPU time of a batch against the same alone: 1 and more.
    pub fn online_slowdown(&self) -> f64 {
        if self.online_solo_busy_us > 0.0 {
            self.online_busy_us / self.online_solo_busy_us
        } else {
            1.0
        }
    }
}

/// Averages a service and a job; both normalised by what each does alone on this type.
pub fn pair(profile: &GpuProfile, sharing: &Sharing, pair: &Pair<'_>) -> PairOutcome {
    let job = pair.offline.map(|placed| (placed, pair.share));
    let all = Group {
        online: pair.online,
        batches_per_s: pair.batches_per_s,
        offline: job.as_slice(),
        gate: pair.gate,
    };
    let out = group(profile, sharing, &all);
    PairOutcome {
        online_busy_us: out.online_busy_us,
        online_solo_busy_us: out.online_solo_busy_us,
        offline_speed: out.offline_speeds.first().copied().unwrap_or(0.0),
        gpu: out.gpu,
    }
}

/// An online service (client 0) and any number of offline jobs beside it, under one launch gate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Group<'a> {
    /// The service, already batched.
    pub online: Option<&'a Placed>,
    /// Batches that it gets in a second.
    pub batches_per_s: f64,
    /// The jobs, each with the share of SMs that MPS gives it: 0 to 1.
    pub offline: &'a [(&'a Placed, f64)],
    /// Share of time in which the launch gate lets the jobs launch: 0 to 1.
    pub gate: f64,
}

/// What comes of a group.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GroupOutcome {
    /// GPU time of one batch of the service.
    pub online_busy_us: f64,
    /// The same alone on this GPU at the same request rate.
    pub online_solo_busy_us: f64,
    /// Speed of each job against its speed alone on this type: 0 to 1.
    pub offline_speeds: Vec<f64>,
    /// Mean counters of the GPU.
    pub gpu: Averaged,
}

/// Averages a service and several jobs; each normalised by what it does alone on this type.
pub fn group(profile: &GpuProfile, sharing: &Sharing, group: &Group<'_>) -> GroupOutcome {
    let mut tenants = Vec::with_capacity(1 + group.offline.len());
    let mut out = GroupOutcome::default();
    if let Some(online) = group.online {
        let tenant = online.tenant(Gap::Open { per_s: group.batches_per_s });
        let alone = averaged(profile, &Sharing::Mps, &[tenant]);
        out.online_solo_busy_us = online.busy_us / alone.rates[0];
        tenants.push(tenant);
    }
    let first_job = tenants.len();
    let mut solo_per_s = Vec::with_capacity(group.offline.len());
    for (offline, share) in group.offline {
        let free = offline.tenant(Gap::Closed { gap_us: offline.host_gap_us });
        solo_per_s.push(averaged(profile, &Sharing::Mps, &[free]).iterations_per_s[0]);
        let sm_cap = share.clamp(0.0, 1.0) * f64::from(profile.sms);
        let kernel = Resident { sm_cap, ..free.kernel };
        tenants.push(Tenant { kernel, gate: group.gate.clamp(0.0, 1.0), ..free });
    }
    out.gpu = averaged(profile, sharing, &tenants);
    if let Some(online) = group.online {
        out.online_busy_us = online.busy_us / out.gpu.rates[0];
    }
    for (solo, per_s) in solo_per_s.iter().zip(&out.gpu.iterations_per_s[first_job..]) {
        out.offline_speeds.push((per_s / solo).clamp(0.0, 1.0));
    }
    out
}
