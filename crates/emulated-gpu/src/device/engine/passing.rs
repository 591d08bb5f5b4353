//! How time passes: everything gets on at its rate, and what has nothing left is complete.

use super::Engine;
use crate::channel::Op;

/// What is left by rounding: half a nanosecond, or half a byte.
const ROUNDING: f64 = 0.5;

impl Engine {
    /// Time passes at constant rates.
    pub(super) fn pass(&mut self, to_ns: f64) {
        let dt = to_ns - self.now_ns;
        if dt <= 0.0 {
            return;
        }
        for k in &mut self.kernels {
            k.left_ns -= dt * k.rate;
        }
        let mut pcie = [0.0; 2];
        for c in &mut self.copies {
            c.left_bytes -= dt * c.rate;
            match c.engine {
                Op::CopyIn => pcie[0] += c.rate,
                Op::CopyOut => pcie[1] += c.rate,
                _ => {}
            }
        }
        let power = self.power_w();
        self.meters.pass(dt, &self.load, power, pcie);
        for k in self.kernels.iter().filter(|k| k.rate > 0.0) {
            self.meters.pass_client(k.client, dt, k.resident.bandwidth * k.rate);
        }
        let before = self.clock.mhz;
        self.clock.advance(&self.profile.power, &self.load, dt / 1e3);
        #[expect(clippy::float_cmp, reason = "any change at all asks for new rates")]
        if self.clock.mhz != before {
            self.dirty = true;
        }
        self.meters.see(self.clock_mhz(), self.temperature_c());
        let was = self.now_ns;
        self.now_ns = to_ns;
        if was < self.switch_until_ns && to_ns >= self.switch_until_ns {
            self.dirty = true;
        }
    }

    /// Whether the clock can show the time that is left. When it has run for months, its steps are
    /// nanoseconds wide: what is less than a step is over.
    fn can_pass(&self, left: f64, rate: f64) -> bool {
        rate <= 0.0 || self.now_ns + left / rate > self.now_ns
    }

    /// Completes what has nothing left.
    pub(super) fn finish(&mut self) {
        let mut i = 0;
        while i < self.kernels.len() {
            let k = self.kernels[i];
            if k.left_ns > ROUNDING && self.can_pass(k.left_ns, k.rate) {
                i += 1;
                continue;
            }
            self.kernels.remove(i);
            self.dirty = true;
            self.meters.kernels += 1;
            if let Some(it) = self.clients.get_mut(&k.client) {
                it.running = it.running.saturating_sub(1);
            }
            self.complete(k.client, k.stream);
        }
        let mut i = 0;
        while i < self.copies.len() {
            let c = self.copies[i];
            if c.left_bytes > ROUNDING && self.can_pass(c.left_bytes, c.rate) {
                i += 1;
                continue;
            }
            self.copies.remove(i);
            self.dirty = true;
            self.complete(c.client, c.stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use muxflow_gpu_model::GpuProfile;

    use super::*;
    use crate::channel::Entry;
    use crate::device::engine::{CopyRates, Effect, Limits};

    /// Device time that a thousand kernels and copies of odd sizes take, begun at some moment.
    fn time_of_work(began_ns: f64) -> f64 {
        let rates = CopyRates { pcie: 12.0, device: 128.0 };
        let mut engine = Engine::new(GpuProfile::built_in("T4").unwrap(), rates);
        engine.now_ns = began_ns;
        engine.add_client(1, Limits { sm_cap: 40.0, group: 1 });
        for seq in 1..=1000 {
            let (sm_fill, occupancy, issue, bandwidth) = (13.0, 0.5, 0.6, 0.3);
            let kernel =
                Entry { op: Op::Kernel as u32, seq, amount: 997 + seq * 7 % 501, ..Entry::EMPTY };
            engine.submit(1, Entry { sm_fill, occupancy, issue, bandwidth, ..kernel }, began_ns);
            let copy = Entry { op: Op::CopyIn as u32, seq, amount: 1 + seq * 13, ..Entry::EMPTY };
            engine.submit(1, Entry { stream: 1, ..copy }, began_ns);
        }
        let mut effects = Vec::new();
        engine.advance(began_ns + 1e9, &mut effects);
        let ends = effects.iter().filter_map(|effect| match effect {
            Effect::Completed { seq: 1000, stream, time_ns, .. } => Some((*stream, *time_ns)),
            _ => None,
        });
        let ends: Vec<(u32, f64)> = ends.collect();
        assert_eq!(ends.len(), 2, "both streams come to their end");
        ends.into_iter().map(|(_, at)| at - began_ns).fold(0.0, f64::max)
    }

    /// Four months and more of device time: its steps are two nanoseconds wide, and then sixteen.
    #[test]
    fn a_clock_that_has_run_for_long_does_not_stop_the_work() {
        let early = time_of_work(0.0);
        for began_ns in [1e16, 1e17] {
            let late = time_of_work(began_ns);
            assert!(
                (late / early - 1.0).abs() < 0.02,
                "{late} ns at {began_ns}, {early} ns at first"
            );
        }
    }
}
