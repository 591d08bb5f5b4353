//! The analytic rule for a GPU type or a workload with no data.
//!
//! It must never promise a speed that sharing cannot give, so each step takes the side that is worse
//! for the offline job.
//!
//! Alone, the job keeps a share `a` of the GPU's SMs busy, averaged over time. With only a share `s`
//! of the SMs, an instant in which it keeps `w` of them busy takes `max(1, w / s)` as long. The
//! average of `w` is `a`, and the stretch is convex in `w`, so no mix of instants is slower than
//! "all SMs for `a` of the time, none for the rest": the job takes `(1 - a) + a / s`.
//! What it then spends on memory, `d`, is stretched again by what the service takes of the memory
//! interface, at most to the double (an arbiter that is fair to two clients). The result is cut by
//! [`MARGIN`] for all that this does not see: caches, clocks, power.
//!
//! A missing feature is replaced by the nearest known upper bound of it, and by 1 when there is
//! none; each one widens the uncertainty.

use muxflow_types::{
    OfflineInput, OnlineInput, PairSpeeds, Percent, ProfileRecord, Provenance, SpeedPrediction,
    SpeedPredictor,
};

/// What is left of the speed after a cut for effects that the rule does not see.
pub const MARGIN: f32 = 0.9;
/// Standard deviation when every feature is known.
const BASE_UNCERTAINTY: f32 = 0.10;
/// What each missing feature adds to it.
const UNCERTAINTY_PER_MISSING: f32 = 0.05;

/// Predicts from the SM share and the activity counters alone; needs no training.
#[derive(Debug, Clone, Copy, Default)]
pub struct ConservativeRule;

/// What the online side contributes: how much longer SM time and memory time take beside it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OnlineHalf {
    pub(crate) sm_stretch: f32,
    pub(crate) memory_stretch: f32,
    missing: u8,
}

/// What the offline side contributes: how much of its time is SM time and memory time.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OfflineHalf {
    pub(crate) sm_time: f32,
    pub(crate) memory_time: f32,
    missing: u8,
}

#[expect(clippy::cast_possible_truncation, reason = "a fraction of one")]
fn fraction(value: Option<Percent>) -> Option<f32> {
    value.map(|percent| percent.fraction() as f32)
}

/// SM activity, or the nearest upper bound of it: an SM is not busy while no kernel runs.
fn sm_time(profile: &ProfileRecord) -> (f32, u8) {
    match (fraction(profile.sm_activity), fraction(profile.gpu_util)) {
        (Some(active), _) => (active, 0),
        (None, Some(util)) => (util, 1),
        (None, None) => (1.0, 2),
    }
}

impl OnlineHalf {
    pub(crate) fn new(profile: &ProfileRecord, share: f32) -> Self {
        let (memory, missing) = match fraction(profile.dram_activity) {
            Some(active) => (active, 0),
            None => {
                let (active, missing) = sm_time(profile);
                (active, missing + 1)
            }
        };
        OnlineHalf {
            sm_stretch: if share > 0.0 { 1.0 / share - 1.0 } else { f32::INFINITY },
            memory_stretch: if memory < 0.5 { memory / (1.0 - memory) } else { 1.0 },
            missing,
        }
    }
}

impl OfflineHalf {
    pub(crate) fn new(profile: &ProfileRecord) -> Self {
        let (sm_time, missing) = sm_time(profile);
        let memory = fraction(profile.dram_activity);
        OfflineHalf {
            // Not zero: without SMs nothing runs, however small the job.
            sm_time: sm_time.max(0.01),
            memory_time: memory.unwrap_or(sm_time),
            missing: missing + u8::from(memory.is_none()),
        }
    }
}

pub(crate) fn speed(online: OnlineHalf, offline: OfflineHalf) -> f32 {
    MARGIN
        / (1.0 + offline.sm_time * online.sm_stretch + offline.memory_time * online.memory_stretch)
}

fn online_half(online: &OnlineInput) -> OnlineHalf {
    let share = fraction(Some(online.share.percent())).unwrap_or(0.0);
    OnlineHalf::new(&online.profile, share)
}

/// The rule's speed for a measured pair; where nobody wrote the share down, half of the GPU.
pub fn rule_speed(online: &ProfileRecord, share: Option<Percent>, offline: &ProfileRecord) -> f64 {
    let share = fraction(share).unwrap_or(0.5);
    f64::from(speed(OnlineHalf::new(online, share), OfflineHalf::new(offline)))
}

impl SpeedPredictor for ConservativeRule {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        let (online, offline) = (online_half(online), OfflineHalf::new(&offline.profile));
        SpeedPrediction {
            speed: speed(online, offline),
            uncertainty: BASE_UNCERTAINTY
                + UNCERTAINTY_PER_MISSING * f32::from(online.missing + offline.missing),
            provenance: Provenance::Rule,
        }
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        Box::new(RulePairs {
            online: online.iter().map(online_half).collect(),
            offline: offline.iter().map(|job| OfflineHalf::new(&job.profile)).collect(),
        })
    }
}

struct RulePairs {
    online: Vec<OnlineHalf>,
    offline: Vec<OfflineHalf>,
}

impl PairSpeeds for RulePairs {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        let online = self.online[row];
        for (speed_out, &offline) in out.iter_mut().zip(&self.offline[first_column..]) {
            *speed_out = speed(online, offline);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use muxflow_types::{GpuType, Percent, SmCount, SmShare, WorkloadName};
    use proptest::prelude::*;

    fn profile(sm: Option<f64>, util: Option<f64>, dram: Option<f64>) -> ProfileRecord {
        let mut record =
            ProfileRecord::unknown(WorkloadName::new("w").unwrap(), GpuType::new("T4").unwrap());
        record.sm_activity = sm.map(|v| Percent::new(v).unwrap());
        record.gpu_util = util.map(|v| Percent::new(v).unwrap());
        record.dram_activity = dram.map(|v| Percent::new(v).unwrap());
        record
    }

    fn online(record: ProfileRecord, sms: u32) -> OnlineInput {
        OnlineInput { profile: record, share: SmShare::new(SmCount(sms), SmCount(40)).unwrap() }
    }

    fn predict(on: ProfileRecord, sms: u32, off: ProfileRecord) -> SpeedPrediction {
        ConservativeRule.predict(&online(on, sms), &OfflineInput { profile: off })
    }

    #[test]
    fn with_nothing_known_the_speed_is_below_the_share() {
        for sms in 0..=40u32 {
            let unknown = profile(None, None, None);
            let got = predict(unknown.clone(), sms, unknown);
            let share = f64::from(sms) / 40.0;
            assert!(f64::from(got.speed) <= share, "{sms} SMs: {got:?}");
            assert_eq!(got.provenance, Provenance::Rule);
        }
    }

    #[test]
    fn no_sms_no_speed_even_for_an_idle_job() {
        let idle = profile(Some(0.0), Some(0.0), Some(0.0));
        assert_eq!(predict(idle.clone(), 0, idle).speed, 0.0);
    }

    #[test]
    fn missing_features_lower_the_speed_and_widen_the_uncertainty() {
        let known = || profile(Some(30.0), Some(60.0), Some(20.0));
        let full = predict(known(), 20, known());
        let less = predict(known(), 20, profile(None, Some(60.0), Some(20.0)));
        let least = predict(profile(None, None, None), 20, profile(None, None, None));
        assert!(full.speed > less.speed && less.speed > least.speed);
        assert!(full.uncertainty < less.uncertainty && less.uncertainty < least.uncertainty);
    }

    fn percent() -> impl Strategy<Value = Option<f64>> {
        proptest::option::of(0.0f64..=100.0)
    }

    proptest! {
        #[test]
        fn pairs_equal_single_predictions_and_stay_in_range(
            sms in 0u32..=40,
            on in (percent(), percent(), percent()),
            off in proptest::collection::vec((percent(), percent(), percent()), 1..6),
        ) {
            let online = [online(profile(on.0, on.1, on.2), sms)];
            let offline: Vec<_> = off
                .into_iter()
                .map(|(a, b, c)| OfflineInput { profile: profile(a, b, c) })
                .collect();
            let pairs = ConservativeRule.prepare(&online, &offline);
            let mut out = vec![f32::NAN; offline.len()];
            pairs.fill(0, 0, &mut out);
            for (column, (speed, job)) in out.iter().zip(&offline).enumerate() {
                prop_assert!((0.0..=1.0).contains(speed), "{speed}");
                prop_assert_eq!(*speed, ConservativeRule.predict(&online[0], job).speed);
                let mut one = [f32::NAN];
                pairs.fill(0, column, &mut one);
                prop_assert_eq!(one[0], *speed);
            }
        }

        #[test]
        fn more_share_never_slows_the_job(
            sms in 0u32..40,
            on in (percent(), percent(), percent()),
            off in (percent(), percent(), percent()),
        ) {
            let speed = |sms| {
                predict(profile(on.0, on.1, on.2), sms, profile(off.0, off.1, off.2)).speed
            };
            prop_assert!(speed(sms + 1) >= speed(sms));
        }
    }
}
