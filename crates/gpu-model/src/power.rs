//! Power, temperature and SM clock.
//!
//! Power grows with what the SMs switch, times a power of the clock, and with DRAM traffic. When it
//! would pass the limit, the clock falls, in steps, until it fits; inference cards such as the T4
//! live at that edge. Heat follows power with inertia and cuts the clock further past its limit.

use crate::contention::Load;

/// Clock and power parameters of one GPU type.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PowerModel {
    /// Highest SM clock.
    pub max_mhz: u32,
    /// Lowest SM clock under load.
    pub min_mhz: u32,
    /// The clock moves in steps of this size,
    pub step_mhz: u32,
    /// one every so often.
    pub clock_period_us: f64,
    /// Power with clients and no kernels.
    pub idle_w: f64,
    /// Power of all SMs at full intensity and the highest clock.
    pub sm_w: f64,
    /// Power of the memory at full bandwidth.
    pub dram_w: f64,
    /// Power limit.
    pub limit_w: f64,
    /// Power of the SMs goes with the clock to this exponent.
    pub exponent: f64,
    /// Air temperature.
    pub ambient_c: f64,
    /// Degrees above ambient per watt, once settled.
    pub celsius_per_w: f64,
    /// Time constant of heating.
    pub thermal_time_s: f64,
    /// Above this the clock is cut.
    pub throttle_c: f64,
}

impl PowerModel {
    /// Power at a load and a clock (as a part of the highest), averaged over a duty.
    pub fn power_w(&self, load: &Load, clock_ratio: f64) -> f64 {
        self.idle_w
            + self.sm_w * load.intensity * clock_ratio.powf(self.exponent)
            + self.dram_w * load.dram_activity
    }

    /// The clock, as a part of the highest, at which this load fits the power limit.
    pub fn settled_ratio(&self, load: &Load) -> f64 {
        let lowest = f64::from(self.min_mhz) / f64::from(self.max_mhz);
        let room = self.limit_w - self.idle_w - self.dram_w * load.dram_activity;
        let full = self.sm_w * load.intensity;
        if full <= room {
            return 1.0;
        }
        if room <= 0.0 {
            return lowest;
        }
        (room / full).powf(1.0 / self.exponent).clamp(lowest, 1.0)
    }
}

/// Clock and temperature of one GPU at one moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockState {
    /// Present SM clock.
    pub mhz: f64,
    /// Present temperature.
    pub temperature_c: f64,
    /// Load averaged over the clock governor's window; kernels are shorter than it reacts.
    smoothed: Load,
    /// Time until the governor acts again.
    until_step_us: f64,
}

impl ClockState {
    /// Cool and at the highest clock.
    pub fn cold(model: &PowerModel) -> Self {
        ClockState {
            mhz: f64::from(model.max_mhz),
            temperature_c: model.ambient_c + model.celsius_per_w * model.idle_w,
            smoothed: Load::default(),
            until_step_us: model.clock_period_us,
        }
    }

    /// Present clock as a part of the highest.
    pub fn ratio(&self, model: &PowerModel) -> f64 {
        self.mhz / f64::from(model.max_mhz)
    }

    /// Time until the governor may change the clock.
    pub fn next_step_us(&self) -> f64 {
        self.until_step_us
    }

    /// Lets `dt_us` pass under a load that does not change meanwhile.
    pub fn advance(&mut self, model: &PowerModel, load: &Load, dt_us: f64) {
        let mut left = dt_us;
        while left > 0.0 {
            let dt = left.min(self.until_step_us);
            left -= dt;
            self.until_step_us -= dt;
            self.settle(model, load, dt);
            if self.until_step_us <= 0.0 {
                self.until_step_us = model.clock_period_us;
                self.step(model);
            }
            // A long quiet stretch: jump once nothing changes any more.
            if left > 60.0 * model.thermal_time_s * 1e6 {
                left = left.min(20.0 * model.thermal_time_s * 1e6);
            }
        }
    }

    fn settle(&mut self, model: &PowerModel, load: &Load, dt_us: f64) {
        let window = 4.0 * model.clock_period_us;
        let keep = (-dt_us / window).exp();
        let blend = |old: f64, new: f64| new + (old - new) * keep;
        self.smoothed.intensity = blend(self.smoothed.intensity, load.intensity);
        self.smoothed.dram_activity = blend(self.smoothed.dram_activity, load.dram_activity);
        let power = model.power_w(load, self.ratio(model));
        let target = model.ambient_c + model.celsius_per_w * power;
        let cool = (-dt_us / 1e6 / model.thermal_time_s).exp();
        self.temperature_c = target + (self.temperature_c - target) * cool;
    }

    fn step(&mut self, model: &PowerModel) {
        let mut target = model.settled_ratio(&self.smoothed) * f64::from(model.max_mhz);
        if self.temperature_c > model.throttle_c {
            // Two per cent of the clock for each degree over.
            target *= (1.0 - 0.02 * (self.temperature_c - model.throttle_c)).max(0.1);
        }
        let step = f64::from(model.step_mhz);
        // Down fast, up slowly, as real governors do.
        let change = (target - self.mhz).clamp(-4.0 * step, step);
        if change.abs() >= step / 2.0 {
            let steps = (change / step).round();
            self.mhz =
                (self.mhz + steps * step).clamp(f64::from(model.min_mhz), f64::from(model.max_mhz));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::GpuProfile;

    #[test]
    fn a_loaded_t4_loses_clock_and_gets_it_back() {
        let t4 = GpuProfile::built_in("T4").unwrap();
        let mut clock = ClockState::cold(&t4.power);
        let heavy = Load { intensity: 1.0, dram_activity: 0.6, busy: true, ..Load::default() };
        clock.advance(&t4.power, &heavy, 5e6);
        let settled = t4.power.settled_ratio(&heavy) * f64::from(t4.power.max_mhz);
        assert!((clock.mhz - settled).abs() <= f64::from(t4.power.step_mhz), "{clock:?} {settled}");
        assert!(t4.power.power_w(&heavy, clock.ratio(&t4.power)) <= t4.power.limit_w * 1.03);
        assert!(clock.mhz < 0.85 * f64::from(t4.power.max_mhz), "{clock:?}");
        clock.advance(&t4.power, &Load::default(), 5e6);
        assert!((clock.mhz - f64::from(t4.power.max_mhz)).abs() < 1.0, "{clock:?}");
    }

    #[test]
    fn time_may_be_cut_anywhere() {
        let t4 = GpuProfile::built_in("T4").unwrap();
        let heavy = Load { intensity: 0.9, dram_activity: 0.3, busy: true, ..Load::default() };
        let mut whole = ClockState::cold(&t4.power);
        whole.advance(&t4.power, &heavy, 1e6);
        let mut parts = ClockState::cold(&t4.power);
        for _ in 0..1000 {
            parts.advance(&t4.power, &heavy, 1e3);
        }
        assert!((whole.mhz - parts.mhz).abs() <= f64::from(t4.power.step_mhz));
        assert!((whole.temperature_c - parts.temperature_c).abs() < 0.5);
    }
}
