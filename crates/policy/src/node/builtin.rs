//! The parameters that ship with the program, for the two GPU types of the paper.
//!
//! The paper chose its values by trial and does not print them, so these are ours. They follow from
//! the data sheets and from what the other laws do; `docs/node-laws.md` gives the reasons. They hold
//! until an operator sets better ones from the solo profiles of the services.

use muxflow_types::GpuType;

use super::gate::GateParams;
use super::health::{Bands, Metric, Thresholds};
use super::load::ClockLaw;

/// Everything that depends on the type of the GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuLaws {
    /// The clock factor of the GPU load.
    pub clock: ClockLaw,
    /// The launch gate.
    pub gate: GateParams,
    /// The thresholds of health.
    pub thresholds: Thresholds,
}

impl GpuLaws {
    /// The load up to which SM activity stays clear of Unhealthy, at whatever clock: where the gate
    /// may hold it when a service allows more than the common set point. At least that set point.
    pub fn most_load(&self) -> f64 {
        // The margin is for the gate, which holds a load on average.
        const CLEAR_OF: f64 = 0.97;
        let bands = self.thresholds.bands.iter().find(|b| b.metric() == Metric::SmActivity);
        let unhealthy_pct = bands.map_or(0.0, |b| b.thresholds().1);
        // The factor is smallest, and activity highest for a load, at the highest clock.
        let most = unhealthy_pct / 100.0 * self.clock.factor(self.clock.highest()) * CLEAR_OF;
        most.max(self.gate.set_point)
    }
}

/// GPU types with built-in parameters.
pub const BUILT_IN_TYPES: [&str; 2] = ["T4", "A10"];

/// The built-in parameters of a GPU type.
pub fn laws_of(gpu_type: &GpuType) -> Option<GpuLaws> {
    match gpu_type.as_str() {
        // Boost 1590 MHz, base 585 MHz, 70 W: the clock falls early and far.
        "T4" => Some(laws(ClockLaw::built_in(1200, 1590), [1050.0, 900.0, 750.0])),
        // Boost 1695 MHz, base 885 MHz, 150 W.
        "A10" => Some(laws(ClockLaw::built_in(1350, 1695), [1200.0, 1050.0, 930.0])),
        _ => None,
    }
}

fn laws(clock: ClockLaw, [healthy, unhealthy, overlimit]: [f64; 3]) -> GpuLaws {
    let thresholds = Thresholds {
        // GPU utilisation is not judged: one small kernel after another makes it 100 %, and filling
        // it is what sharing is for (the paper reaches 76 % on average).
        bands: vec![
            Bands::built_in(Metric::SmActivity, 80.0, 88.0, 96.0),
            Bands::built_in(Metric::SmClock, healthy, unhealthy, overlimit),
            Bands::built_in(Metric::Memory, 88.0, 91.0, 95.0),
            Bands::built_in(Metric::Latency, 90.0, 100.0, 120.0),
        ],
        highest_clock: clock.highest(),
        clock_counts_from_pct: 20.0,
    };
    GpuLaws { clock, gate: GateParams::default(), thresholds }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::quota::QuotaParams;

    #[test]
    fn what_ships_passes_the_checks_that_files_must_pass() {
        for name in BUILT_IN_TYPES {
            let laws = laws_of(&GpuType::new(name).unwrap()).unwrap();
            let (low, high) = laws.clock.gains();
            ClockLaw::new(laws.clock.threshold(), laws.clock.highest(), low, high).unwrap();
            laws.gate.check().unwrap();
            for bands in &laws.thresholds.bands {
                let (h, u, o) = bands.thresholds();
                Bands::new(bands.metric(), h, u, o).unwrap();
            }
        }
        assert!(laws_of(&GpuType::new("H100").unwrap()).is_none());
    }

    #[test]
    fn the_laws_do_not_work_against_each_other() {
        for name in BUILT_IN_TYPES {
            let laws = laws_of(&GpuType::new(name).unwrap()).unwrap();
            let bands = |metric| {
                let all = &laws.thresholds.bands;
                all.iter().find(|b| b.metric() == metric).unwrap().thresholds()
            };
            // Where the gate holds the load at the highest clock, SM activity is still Healthy.
            let held = laws.gate.set_point / laws.clock.factor(laws.clock.highest()) * 100.0;
            assert!(held < bands(Metric::SmActivity).0, "{held}");
            // Nor does the most that a budget makes the gate hold make it Unhealthy.
            let most = laws.most_load();
            assert!(most > laws.gate.set_point && most < laws.gate.shut_at, "{most}");
            let held = most / laws.clock.factor(laws.clock.highest()) * 100.0;
            assert!(held < bands(Metric::SmActivity).1, "{held}");
            // The gate fights for the clock before health complains about it.
            assert!(f64::from(laws.clock.threshold().0) > bands(Metric::SmClock).0);
            // A pair that fills its quota is not Unhealthy by that.
            let filled = QuotaParams::default().reserve.complement().value();
            assert!(filled < bands(Metric::Memory).1);
        }
    }
}
