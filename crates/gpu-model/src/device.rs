//! One GPU, stepped kernel by kernel: what the emulator runs on.
//!
//! The caller keeps the list of resident kernels and their remaining work. It asks
//! [`Device::evaluate`] for rates, takes the earliest of the next completion (`remaining / rate`),
//! its own next launch, and [`Evaluation::next_change_us`], lets that time pass with
//! [`Device::advance`], subtracts `rate × time` from each kernel, and asks again.

use crate::contention::{ClientId, Load, Resident, clock_factor, contend};
use crate::power::ClockState;
use crate::profile::GpuProfile;

/// How clients share the GPU.
#[derive(Debug, Clone, PartialEq)]
pub enum Sharing {
    /// Space sharing: all resident kernels run at once.
    Mps,
    /// One client at a time, until it has nothing on the GPU any more.
    Exclusive,
    /// The driver's round of equal slices among the clients that have work.
    TimeSlice,
    /// The same with slices of favoured clients so many times as long.
    PriorityTimeSlice {
        /// Who is favoured.
        favoured: Vec<ClientId>,
        /// How many times as long their slices are.
        weight: f64,
    },
}

/// What holds until the next change.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Evaluation {
    /// Progress of each resident kernel: seconds of full solo speed per second, 0 to 1.
    pub rates: Vec<f64>,
    /// What the counters show.
    pub load: Load,
    /// Power drawn.
    pub power_w: f64,
    /// SM clock.
    pub sm_clock_mhz: f64,
    /// Temperature.
    pub temperature_c: f64,
    /// The rates hold at most so long: then the clock or the slice changes.
    pub next_change_us: f64,
}

/// One GPU with its clock, its heat and its time slices.
#[derive(Debug, Clone)]
pub struct Device {
    profile: GpuProfile,
    sharing: Sharing,
    clock: ClockState,
    owner: Option<ClientId>,
    slice_left_us: f64,
    switch_left_us: f64,
}

impl Device {
    /// A cool, idle GPU.
    pub fn new(profile: GpuProfile, sharing: Sharing) -> Self {
        let clock = ClockState::cold(&profile.power);
        Device { profile, sharing, clock, owner: None, slice_left_us: 0.0, switch_left_us: 0.0 }
    }

    /// The type of this GPU.
    pub fn profile(&self) -> &GpuProfile {
        &self.profile
    }

    /// Changes how clients share, as starting or stopping the MPS daemon does.
    pub fn set_sharing(&mut self, sharing: Sharing) {
        self.sharing = sharing;
        self.owner = None;
        self.switch_left_us = 0.0;
    }

    /// Lowers or lifts the power limit.
    pub fn set_power_limit_w(&mut self, limit_w: f64) {
        self.profile.power.limit_w = limit_w.max(self.profile.power.idle_w);
    }

    /// Rates and counters for these kernels, until `next_change_us`.
    pub fn evaluate(&mut self, residents: &[Resident]) -> Evaluation {
        let mut out = Evaluation::default();
        self.evaluate_into(residents, &mut out);
        out
    }

    /// The same, into a value that is used again and again.
    pub fn evaluate_into(&mut self, residents: &[Resident], out: &mut Evaluation) {
        out.rates.clear();
        out.rates.resize(residents.len(), 0.0);
        out.next_change_us = self.clock.next_step_us();
        out.load = if self.sharing == Sharing::Mps {
            contend(&self.profile, residents, &mut out.rates)
        } else {
            self.pass_turn(residents);
            if self.switch_left_us > 0.0 {
                out.next_change_us = out.next_change_us.min(self.switch_left_us);
            } else if self.contested(residents) {
                out.next_change_us = out.next_change_us.min(self.slice_left_us);
            }
            self.turn_rates(residents, &mut out.rates)
        };
        let ratio = self.clock.ratio(&self.profile.power);
        for (rate, r) in out.rates.iter_mut().zip(residents) {
            *rate *= clock_factor(r, ratio);
        }
        out.power_w = self.profile.power.power_w(&out.load, ratio);
        out.sm_clock_mhz = self.clock.mhz;
        out.temperature_c = self.clock.temperature_c;
    }

    /// Lets time pass under what [`Device::evaluate`] said last. Not more than its
    /// `next_change_us`; what is beyond is counted under the same load.
    pub fn advance(&mut self, residents: &[Resident], last: &Evaluation, dt_us: f64) {
        self.clock.advance(&self.profile.power, &last.load, dt_us);
        let switching = self.switch_left_us.min(dt_us);
        self.switch_left_us -= switching;
        if self.sharing != Sharing::Mps && self.contested(residents) {
            self.slice_left_us -= dt_us - switching;
        }
    }

    fn contested(&self, residents: &[Resident]) -> bool {
        residents.iter().any(|r| Some(r.client) != self.owner)
    }

    /// Hands the GPU to the next client when the owner has nothing on it, or its slice is over.
    fn pass_turn(&mut self, residents: &[Resident]) {
        let present = self.owner.is_some_and(|owner| residents.iter().any(|r| r.client == owner));
        let slice_over = self.slice_left_us <= 1e-9 && self.contested(residents);
        if present && !slice_over {
            return;
        }
        let next = next_client(residents, self.owner);
        let changed = next.is_some() && self.owner.is_some() && next != self.owner;
        self.switch_left_us = if changed { self.profile.time_slicing.switch_us } else { 0.0 };
        self.owner = next;
        self.slice_left_us = match (&self.sharing, next) {
            (Sharing::Exclusive, _) => f64::INFINITY,
            (Sharing::PriorityTimeSlice { favoured, weight }, Some(c)) if favoured.contains(&c) => {
                self.profile.time_slicing.slice_us * weight
            }
            _ => self.profile.time_slicing.slice_us,
        };
    }

    fn turn_rates(&self, residents: &[Resident], rates: &mut [f64]) -> Load {
        if self.switch_left_us > 0.0 {
            return Load { busy: !residents.is_empty(), ..Load::default() };
        }
        let mine: Vec<Resident> =
            residents.iter().filter(|r| Some(r.client) == self.owner).copied().collect();
        let mut own_rates = vec![0.0; mine.len()];
        let load = contend(&self.profile, &mine, &mut own_rates);
        let mut next = own_rates.into_iter();
        for (rate, r) in rates.iter_mut().zip(residents) {
            if Some(r.client) == self.owner {
                *rate = next.next().unwrap_or(0.0);
            }
        }
        load
    }
}

/// The client after `owner` in the order of ids, around the circle.
fn next_client(residents: &[Resident], owner: Option<ClientId>) -> Option<ClientId> {
    let after = residents.iter().map(|r| r.client).filter(|&c| Some(c) > owner).min();
    after.or_else(|| residents.iter().map(|r| r.client).min())
}
