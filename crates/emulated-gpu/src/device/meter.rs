//! Counters that show a new value only once per period, as the hardware's do.

use std::collections::BTreeMap;

use muxflow_gpu_model::Load;
use muxflow_gpu_model::profile::RefreshPeriods;

/// Means of `N` quantities over the last whole period.
#[derive(Debug, Clone, Copy)]
struct Window<const N: usize> {
    period_ns: f64,
    phase_ns: f64,
    sums: [f64; N],
    /// Sums of all periods that are over.
    total: [f64; N],
    shown: [f64; N],
    /// Device time at which `shown` changed.
    shown_ns: f64,
}

impl<const N: usize> Window<N> {
    fn new(period_ns: f64, phase_ns: f64) -> Self {
        let zero = [0.0; N];
        Window { period_ns, phase_ns, sums: zero, total: zero, shown: zero, shown_ns: 0.0 }
    }

    /// `dt` passes with constant values, beginning at `now`.
    fn pass(&mut self, mut now: f64, mut dt: f64, values: [f64; N]) {
        while dt > 0.0 {
            let step = dt.min(self.period_ns - self.phase_ns);
            for (sum, value) in self.sums.iter_mut().zip(values) {
                *sum += value * step;
            }
            self.phase_ns += step;
            dt -= step;
            now += step;
            if self.period_ns - self.phase_ns > 1e-3 {
                continue;
            }
            self.shown = self.sums.map(|s| s / self.period_ns);
            self.shown_ns = now;
            self.add_to_total(self.sums);
            self.sums = [0.0; N];
            self.phase_ns = 0.0;
            let whole = (dt / self.period_ns).floor();
            if whole >= 1.0 {
                self.shown = values;
                now += whole * self.period_ns;
                dt -= whole * self.period_ns;
                self.shown_ns = now;
                self.add_to_total(values.map(|value| value * whole * self.period_ns));
            }
        }
    }

    fn add_to_total(&mut self, more: [f64; N]) {
        for (total, more) in self.total.iter_mut().zip(more) {
            *total += more;
        }
    }
}

/// A value that is looked at once per period, and shown until the next look.
#[derive(Debug, Clone, Copy)]
struct Held {
    period_ns: f64,
    next_ns: f64,
    shown: Option<f64>,
    shown_ns: f64,
}

impl Held {
    fn new(period_ns: f64) -> Self {
        Held { period_ns, next_ns: period_ns, shown: None, shown_ns: 0.0 }
    }

    /// It is `now`, and this is the value.
    fn see(&mut self, now: f64, value: f64) {
        // A hair early is rounding.
        if self.shown.is_none() || now + 1.0 >= self.next_ns {
            self.shown = Some(value);
            let periods = ((now + 1.0) / self.period_ns).floor();
            self.shown_ns = periods * self.period_ns;
            self.next_ns = self.shown_ns + self.period_ns;
        }
    }
}

#[derive(Debug)]
struct ClientMeter {
    window: Window<2>,
    now_ns: f64,
}

/// All counters of one GPU.
#[derive(Debug)]
pub(crate) struct Meters {
    now_ns: f64,
    profiling: Window<5>,
    utilisation: Window<2>,
    power: Window<1>,
    /// Until the first power period is over.
    first_power_w: Option<f64>,
    /// Bytes per nanosecond over PCIe, to the device and from it, in the profiling counters' periods.
    pcie: Window<2>,
    clock: Held,
    temperature: Held,
    clients: BTreeMap<u32, ClientMeter>,
    utilisation_ns: f64,
    /// Integrals since the start, device seconds: graphics, SM, occupancy, tensor, DRAM.
    pub integrals: [f64; 5],
    /// Joules since the start.
    pub energy_j: f64,
    /// Bytes to and from the host.
    pub pcie_bytes: [f64; 2],
    /// Kernels completed.
    pub kernels: u64,
}

impl Meters {
    pub(crate) fn new(refresh: &RefreshPeriods) -> Meters {
        let ns = |us: u64| (us as f64 * 1e3).max(1e6);
        let utilisation_ns = ns(refresh.utilisation.0);
        Meters {
            now_ns: 0.0,
            profiling: Window::new(ns(refresh.profiling.0), 0.0),
            utilisation: Window::new(utilisation_ns, 0.0),
            power: Window::new(ns(refresh.power.0), 0.0),
            first_power_w: None,
            pcie: Window::new(ns(refresh.profiling.0), 0.0),
            clock: Held::new(ns(refresh.clock.0)),
            temperature: Held::new(ns(refresh.power.0)),
            clients: BTreeMap::new(),
            utilisation_ns,
            integrals: [0.0; 5],
            energy_j: 0.0,
            pcie_bytes: [0.0; 2],
            kernels: 0,
        }
    }

    pub(crate) fn add_client(&mut self, client: u32) {
        let phase = self.now_ns % self.utilisation_ns;
        let window = Window::new(self.utilisation_ns, phase);
        self.clients.insert(client, ClientMeter { window, now_ns: self.now_ns });
    }

    pub(crate) fn remove_client(&mut self, client: u32) {
        self.clients.remove(&client);
    }

    /// Time passes under a constant load, with so many bytes per nanosecond to and from the host.
    pub(crate) fn pass(&mut self, dt: f64, load: &Load, power_w: f64, pcie: [f64; 2]) {
        let busy = if load.busy { 1.0 } else { 0.0 };
        // The tensor pipes see a part of what the SMs issue; no public figure says more.
        let tensor = load.intensity * load.sm_activity * 0.5;
        let five = [busy, load.sm_activity, load.sm_occupancy, tensor, load.dram_activity];
        self.profiling.pass(self.now_ns, dt, five);
        self.utilisation.pass(self.now_ns, dt, [busy, load.dram_activity]);
        self.power.pass(self.now_ns, dt, [power_w]);
        self.first_power_w.get_or_insert(power_w);
        self.pcie.pass(self.now_ns, dt, pcie);
        for (bytes, rate) in self.pcie_bytes.iter_mut().zip(pcie) {
            *bytes += rate * dt;
        }
        for (integral, value) in self.integrals.iter_mut().zip(five) {
            *integral += value * dt / 1e9;
        }
        self.energy_j += power_w * dt / 1e9;
        self.now_ns += dt;
    }

    /// A client's kernel ran for the `dt` that just passed; two at once count once.
    pub(crate) fn pass_client(&mut self, client: u32, dt: f64, dram: f64) {
        let now = self.now_ns;
        let Some(it) = self.clients.get_mut(&client) else { return };
        let begin = now - dt;
        if it.now_ns < begin {
            it.window.pass(it.now_ns, begin - it.now_ns, [0.0, 0.0]);
            it.now_ns = begin;
        }
        if it.now_ns < now {
            it.window.pass(it.now_ns, now - it.now_ns, [1.0, dram]);
            it.now_ns = now;
        }
    }

    /// What the clock and the temperature are now.
    pub(crate) fn see(&mut self, clock_mhz: f64, temperature_c: f64) {
        self.clock.see(self.now_ns, clock_mhz);
        self.temperature.see(self.now_ns, temperature_c);
    }

    /// Clock as it was last looked at, and when; none before the first look.
    pub(crate) fn clock_mhz(&self) -> Option<(f64, f64)> {
        self.clock.shown.map(|mhz| (mhz, self.clock.shown_ns))
    }

    /// Temperature as it was last looked at.
    pub(crate) fn temperature_c(&self) -> Option<f64> {
        self.temperature.shown
    }

    /// Bytes per second to and from the host over the last profiling period.
    pub(crate) fn pcie_bytes_per_s(&self) -> [f64; 2] {
        self.pcie.shown.map(|rate| rate * 1e9)
    }

    /// Sums up to the end of the last profiling period: the five counters in seconds, and bytes to and
    /// from the host.
    pub(crate) fn profiling_sums(&self) -> [f64; 7] {
        let [a, b, c, d, e] = self.profiling.total.map(|sum| sum / 1e9);
        let [to, from] = self.pcie.total;
        [a, b, c, d, e, to, from]
    }

    /// Means over the last profiling period, and when they changed.
    pub(crate) fn profiling(&self) -> ([f64; 5], f64) {
        (self.profiling.shown, self.profiling.shown_ns)
    }

    /// Busy and DRAM over the last utilisation period, and when they changed.
    pub(crate) fn utilisation(&self) -> ([f64; 2], f64) {
        (self.utilisation.shown, self.utilisation.shown_ns)
    }

    /// Mean power over the last power period, and when it changed.
    pub(crate) fn power_w(&self) -> Option<(f64, f64)> {
        let first = self.first_power_w.map(|watts| (watts, 0.0));
        let shown = (self.power.shown[0], self.power.shown_ns);
        if self.power.shown_ns > 0.0 { Some(shown) } else { first }
    }

    /// Busy and DRAM of one client over the last utilisation period, and when they changed.
    pub(crate) fn client(&mut self, client: u32) -> ([f64; 2], f64) {
        let now = self.now_ns;
        let Some(it) = self.clients.get_mut(&client) else { return ([0.0; 2], 0.0) };
        if it.now_ns < now {
            it.window.pass(it.now_ns, now - it.now_ns, [0.0, 0.0]);
            it.now_ns = now;
        }
        (it.window.shown, it.window.shown_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// However time is cut into pieces, a value is shown for a whole period and is its mean.
        #[test]
        fn a_window_shows_the_mean_of_each_period(cuts in prop::collection::vec((1.0_f64..5000.0, 0.0_f64..1.0), 1..60)) {
            let mut window = Window::<1>::new(1000.0, 0.0);
            let mut now = 0.0;
            let mut exact = 0.0;
            for (dt, value) in cuts {
                window.pass(now, dt, [value]);
                now += dt;
                exact += dt * value;
                let over = (now / 1000.0 + 1e-6).floor() * 1000.0;
                prop_assert!((window.shown_ns - over).abs() < 1.0, "{} at {now}", window.shown_ns);
                prop_assert!((0.0..=1.0 + 1e-9).contains(&window.shown[0]));
                prop_assert!((window.total[0] + window.sums[0] - exact).abs() < 1e-3);
            }
        }

        /// A held value changes at multiples of its period only.
        #[test]
        fn a_held_value_is_as_old_as_it_says(steps in prop::collection::vec(1.0_f64..300.0, 1..100)) {
            let mut held = Held::new(100.0);
            let mut now = 0.0;
            for (i, step) in steps.into_iter().enumerate() {
                let before = (held.shown, held.shown_ns);
                held.see(now, i as f64);
                if (held.shown, held.shown_ns) != before {
                    prop_assert_eq!(held.shown, Some(i as f64));
                }
                prop_assert!(held.shown_ns <= now + 1.0 && now - held.shown_ns < 100.0 + 1.0);
                now += step;
            }
        }
    }
}
