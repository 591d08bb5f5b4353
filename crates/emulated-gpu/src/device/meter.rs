//! Counters that show a new value only once per period, as the hardware's do.

use std::collections::BTreeMap;

use muxflow_gpu_model::Load;
use muxflow_gpu_model::profile::RefreshPeriods;

use crate::channel::Op;

/// Means of `N` quantities over the last whole period.
#[derive(Debug, Clone, Copy)]
struct Window<const N: usize> {
    period_ns: f64,
    phase_ns: f64,
    sums: [f64; N],
    shown: [f64; N],
    /// Device time at which `shown` changed.
    shown_ns: f64,
}

impl<const N: usize> Window<N> {
    fn new(period_ns: f64, phase_ns: f64) -> Self {
        Window { period_ns, phase_ns, sums: [0.0; N], shown: [0.0; N], shown_ns: 0.0 }
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
            self.sums = [0.0; N];
            self.phase_ns = 0.0;
            let whole = (dt / self.period_ns).floor();
            if whole >= 1.0 {
                self.shown = values;
                now += whole * self.period_ns;
                dt -= whole * self.period_ns;
                self.shown_ns = now;
            }
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

    /// Time passes under a constant load.
    pub(crate) fn pass(&mut self, dt: f64, load: &Load, power_w: f64) {
        let busy = if load.busy { 1.0 } else { 0.0 };
        // The tensor pipes see a part of what the SMs issue; no public figure says more.
        let tensor = load.intensity * load.sm_activity * 0.5;
        let five = [busy, load.sm_activity, load.sm_occupancy, tensor, load.dram_activity];
        self.profiling.pass(self.now_ns, dt, five);
        self.utilisation.pass(self.now_ns, dt, [busy, load.dram_activity]);
        self.power.pass(self.now_ns, dt, [power_w]);
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

    pub(crate) fn add_pcie(&mut self, engine: Op, bytes: f64) {
        match engine {
            Op::CopyIn => self.pcie_bytes[0] += bytes,
            Op::CopyOut => self.pcie_bytes[1] += bytes,
            _ => {}
        }
    }

    /// Means over the last profiling period, and when they changed.
    pub(crate) fn profiling(&self) -> ([f64; 5], f64) {
        (self.profiling.shown, self.profiling.shown_ns)
    }

    /// Busy and DRAM over the last utilisation period.
    pub(crate) fn utilisation(&self) -> [f64; 2] {
        self.utilisation.shown
    }

    /// Mean power over the last power period.
    pub(crate) fn power_w(&self) -> Option<f64> {
        (self.power.shown_ns > 0.0).then_some(self.power.shown[0])
    }

    /// Busy and DRAM of one client over the last utilisation period.
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
