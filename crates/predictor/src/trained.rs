//! A fitted model with all that the scheduler and the reader of its card must know: for which GPU
//! type, what it has seen, how far off it was on what it had not seen.

use std::collections::BTreeSet;

use muxflow_types::{
    GpuType, OfflineInput, OnlineInput, PairSpeeds, ProfileRecord, Provenance, SpeedPrediction,
    SpeedPredictor,
};

use crate::feature::Half;
use crate::model::Model;
use crate::pairs::{
    ConstantPairs, Halves, KernelPairs, MlpPairs, OfflineHalves, OnlineHalves, TreesPairs, narrow,
};
use crate::rule::{ConservativeRule, OfflineHalf, OnlineHalf};
use crate::simd::InstructionSet;
use crate::validate::Familiarity;

/// Where a model comes from and how good it was found to be.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Card {
    /// The data it was trained on, in words.
    pub origin: String,
    /// How many samples.
    pub samples: usize,
    /// Of the random parts.
    pub seed: u64,
    /// Mean absolute error on pairs left out at random.
    pub pair_error: f64,
    /// Mean absolute error on workloads left out.
    pub unseen_error: f64,
    /// Mean absolute error of the mean predictor on the same workloads.
    pub mean_unseen_error: f64,
    /// The checksum of the model that it replaced, if any.
    pub parent: Option<String>,
}

/// A model in use.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainedModel {
    /// For which GPU type; it answers for no other.
    pub gpu_type: GpuType,
    /// The model.
    pub model: Model,
    /// Workloads it has seen on the online side.
    pub online_seen: BTreeSet<String>,
    /// Workloads it has seen on the offline side.
    pub offline_seen: BTreeSet<String>,
    /// Root mean square error in cross-validation when both, one or neither of the workloads had
    /// been seen.
    pub deviation: [f32; 3],
    /// Its card.
    pub card: Card,
}

impl TrainedModel {
    /// How much of a pair it has seen.
    pub fn familiarity(&self, online: &ProfileRecord, offline: &ProfileRecord) -> Familiarity {
        let known = usize::from(self.online_seen.contains(online.workload.as_str()))
            + usize::from(self.offline_seen.contains(offline.workload.as_str()));
        [Familiarity::Neither, Familiarity::One, Familiarity::Both][known]
    }

    /// Whether nothing is known of a half: a new name, and not one measured feature.
    fn unknown(seen: &BTreeSet<String>, profile: &ProfileRecord) -> bool {
        let measured = [profile.gpu_util, profile.sm_activity, profile.sm_occupancy]
            .iter()
            .chain([&profile.dram_activity])
            .any(Option::is_some)
            || profile.solo_time.is_some()
            || profile.memory.is_some();
        !measured && !seen.contains(profile.workload.as_str())
    }

    fn online_halves(&self, online: &[OnlineInput]) -> OnlineHalves {
        let share = |input: &OnlineInput| input.share.percent();
        Halves {
            halves: online.iter().map(|i| Half::new(&i.profile, Some(share(i)))).collect(),
            rule: online
                .iter()
                .map(|i| OnlineHalf::new(&i.profile, narrow(share(i).fraction())))
                .collect(),
            unknown: online.iter().map(|i| Self::unknown(&self.online_seen, &i.profile)).collect(),
        }
    }

    fn offline_halves(&self, offline: &[OfflineInput]) -> OfflineHalves {
        Halves {
            halves: offline.iter().map(|i| Half::new(&i.profile, None)).collect(),
            rule: offline.iter().map(|i| OfflineHalf::new(&i.profile)).collect(),
            unknown: offline
                .iter()
                .map(|i| Self::unknown(&self.offline_seen, &i.profile))
                .collect(),
        }
    }

    /// [`SpeedPredictor::prepare`] with chosen instructions, for tests and benchmarks.
    pub fn prepare_with<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
        set: InstructionSet,
    ) -> Box<dyn PairSpeeds + 'a> {
        let (on, off) = (self.online_halves(online), self.offline_halves(offline));
        match &self.model {
            Model::Rule => ConservativeRule.prepare(online, offline),
            Model::Mean(mean) => {
                Box::new(ConstantPairs { speed: narrow(*mean), online: on, offline: off })
            }
            Model::Kernel(model) => Box::new(KernelPairs::new(model, on, off, set)),
            Model::Trees(model) => Box::new(TreesPairs { model, online: on, offline: off }),
            Model::Mlp(model) => Box::new(MlpPairs::new(model, on, off, set)),
        }
    }

    /// Floating-point operations of one pair where the model is a perceptron.
    pub fn flops_per_pair(&self) -> Option<u64> {
        match &self.model {
            Model::Mlp(model) => Some(MlpPairs::flops_per_pair(model)),
            _ => None,
        }
    }
}

impl SpeedPredictor for TrainedModel {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        if matches!(self.model, Model::Rule)
            || Self::unknown(&self.online_seen, &online.profile)
            || Self::unknown(&self.offline_seen, &offline.profile)
        {
            return ConservativeRule.predict(online, offline);
        }
        let share = Some(online.share.percent());
        let familiarity = self.familiarity(&online.profile, &offline.profile);
        SpeedPrediction {
            speed: narrow(self.model.speed(&online.profile, share, &offline.profile)),
            uncertainty: self.deviation[familiarity as usize],
            provenance: match familiarity {
                Familiarity::Both => Provenance::Seen,
                Familiarity::One | Familiarity::Neither => Provenance::Unseen,
            },
        }
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        self.prepare_with(online, offline, InstructionSet::best())
    }
}
