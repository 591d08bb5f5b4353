//! One model per GPU type, and the rule for every type that has none.

use std::collections::BTreeMap;

use muxflow_types::{
    GpuType, OfflineInput, OnlineInput, PairSpeeds, SpeedPrediction, SpeedPredictor,
};

use crate::rule::ConservativeRule;
use crate::trained::TrainedModel;

/// What the scheduler asks.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    models: BTreeMap<GpuType, TrainedModel>,
    stands_for: Option<StandsFor>,
}

/// The type whose model answers for a type that only a caller knows.
pub type StandsFor = fn(&GpuType) -> Option<GpuType>;

impl Registry {
    /// Without models; a type that stands for another is answered by that one's model, before its own.
    pub fn with_names(stands_for: StandsFor) -> Self {
        Registry { stands_for: Some(stands_for), ..Registry::default() }
    }

    /// Takes a model into use for its GPU type; gives back the one it replaces.
    pub fn insert(&mut self, model: TrainedModel) -> Option<TrainedModel> {
        self.models.insert(model.gpu_type.clone(), model)
    }

    /// The model of a GPU type.
    pub fn get(&self, gpu_type: &GpuType) -> Option<&TrainedModel> {
        let other = self.stands_for.and_then(|stands_for| stands_for(gpu_type));
        other.and_then(|other| self.models.get(&other)).or_else(|| self.models.get(gpu_type))
    }

    /// All models.
    pub fn models(&self) -> impl Iterator<Item = &TrainedModel> {
        self.models.values()
    }
}

impl SpeedPredictor for Registry {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        match self.get(&online.profile.gpu_type) {
            Some(model) => model.predict(online, offline),
            None => ConservativeRule.predict(online, offline),
        }
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        let gpu_type = online.first().map(|input| &input.profile.gpu_type);
        let model = gpu_type.and_then(|gpu_type| self.get(gpu_type));
        if online.iter().any(|input| Some(&input.profile.gpu_type) != gpu_type) {
            // Lists of several types: every pair on its own, slower but never a wrong model.
            return Box::new(Mixed { registry: self, online, offline });
        }
        match model {
            Some(model) => model.prepare(online, offline),
            None => ConservativeRule.prepare(online, offline),
        }
    }
}

struct Mixed<'a> {
    registry: &'a Registry,
    online: &'a [OnlineInput],
    offline: &'a [OfflineInput],
}

impl PairSpeeds for Mixed<'_> {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        for (speed, offline) in out.iter_mut().zip(&self.offline[first_column..]) {
            *speed = self.registry.predict(&self.online[row], offline).speed;
        }
    }
}
