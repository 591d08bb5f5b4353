//! How often what breaks. Rates only: when a fault strikes is drawn by the caller with its own
//! seeded generator, and what follows from it is the caller's world.

use crate::rng::Rng;

/// What can break on a shared GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultKind {
    /// The device itself (with or without sharing).
    DeviceError,
    /// The MPS server crashes.
    MpsCrash,
    /// MPS hangs: present clients stop, new ones never get in.
    MpsHang,
    /// A memory page fault of a client (XID 31), fatal to all clients of the server.
    Xid31,
    /// A client killed with work in flight takes the others with it.
    KillPropagated,
}

/// Rates of faults of one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FaultRates {
    /// Device errors per GPU and day, sharing or not.
    pub device_error_per_day: f64,
    /// MPS server crashes per shared GPU and day.
    pub mps_crash_per_day: f64,
    /// MPS hangs per shared GPU and day.
    pub mps_hang_per_day: f64,
    /// XID 31 per shared GPU and day.
    pub xid31_per_day: f64,
    /// Probability that killing a client with work in flight fails the other clients.
    pub kill_propagates: f64,
}

impl FaultRates {
    /// Draws the next fault of a GPU: how many seconds from now and which. `shared` says whether an
    /// offline job is on it; faults of MPS need that. `None` when nothing can break.
    pub fn next(&self, shared: bool, rng: &mut Rng) -> Option<(f64, FaultKind)> {
        let on = if shared { 1.0 } else { 0.0 };
        let kinds = [
            (self.device_error_per_day, FaultKind::DeviceError),
            (self.mps_crash_per_day * on, FaultKind::MpsCrash),
            (self.mps_hang_per_day * on, FaultKind::MpsHang),
            (self.xid31_per_day * on, FaultKind::Xid31),
        ];
        let total: f64 = kinds.iter().map(|(rate, _)| rate).sum();
        if total <= 0.0 {
            return None;
        }
        let wait = rng.exponential(86_400.0 / total);
        let mut point = rng.uniform() * total;
        for (rate, kind) in kinds {
            if point < rate {
                return Some((wait, kind));
            }
            point -= rate;
        }
        Some((wait, FaultKind::DeviceError))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_come_at_their_rates() {
        let rates = FaultRates {
            device_error_per_day: 1.0,
            mps_crash_per_day: 3.0,
            ..FaultRates::default()
        };
        let mut rng = Rng::new(3);
        let n = 20_000;
        let mut crashes = 0;
        let mut waited = 0.0;
        for _ in 0..n {
            let (wait, kind) = rates.next(true, &mut rng).unwrap();
            waited += wait;
            crashes += usize::from(kind == FaultKind::MpsCrash);
        }
        assert!((f64::from(u32::try_from(crashes).unwrap()) / 20_000.0 - 0.75).abs() < 0.02);
        assert!((waited / 20_000.0 / 21_600.0 - 1.0).abs() < 0.03);
        assert_eq!(rates.next(false, &mut rng).unwrap().1, FaultKind::DeviceError);
        assert_eq!(FaultRates::default().next(true, &mut rng), None);
    }
}
