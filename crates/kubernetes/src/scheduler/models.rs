//! Trained models from the cluster's objects. A type of GPU without one is left to the conservative
//! rule.

use std::sync::Arc;

use muxflow_predictor::{ConservativeRule, Registry, TrainedModel, file};
use muxflow_types::{
    GpuType, OfflineInput, OnlineInput, PairSpeeds, SpeedPrediction, SpeedPredictor,
};

use super::offer::real_type;
use crate::resource::Model;

/// The models, asked by kinds of GPUs: a kind is predicted by the model of its real type.
#[derive(Debug)]
pub(crate) struct ByKind<'a>(pub(crate) &'a Registry);

impl ByKind<'_> {
    fn model(&self, kind: &GpuType) -> Option<&TrainedModel> {
        real_type(kind).and_then(|real| self.0.get(&real)).or_else(|| self.0.get(kind))
    }
}

impl SpeedPredictor for ByKind<'_> {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        match self.model(&online.profile.gpu_type) {
            Some(model) => model.predict(online, offline),
            None => ConservativeRule.predict(online, offline),
        }
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        let kind = online.first().map(|input| &input.profile.gpu_type);
        if online.iter().any(|input| Some(&input.profile.gpu_type) != kind) {
            return Box::new(OneByOne { by: self, online, offline });
        }
        match kind.and_then(|kind| self.model(kind)) {
            Some(model) => model.prepare(online, offline),
            None => ConservativeRule.prepare(online, offline),
        }
    }
}

/// Lists of several kinds: slower, but never a wrong model.
struct OneByOne<'a> {
    by: &'a ByKind<'a>,
    online: &'a [OnlineInput],
    offline: &'a [OfflineInput],
}

impl PairSpeeds for OneByOne<'_> {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        for (speed, offline) in out.iter_mut().zip(&self.offline[first_column..]) {
            *speed = self.by.predict(&self.online[row], offline).speed;
        }
    }
}

/// The models in use, read again only when an object has changed.
#[derive(Debug, Default)]
pub(crate) struct Models {
    of: Vec<(Option<String>, Option<String>)>,
    registry: Arc<Registry>,
}

impl Models {
    /// What predicts speeds now. A model that cannot be read is named once and left out.
    pub(crate) fn registry(&mut self, objects: &[Arc<Model>]) -> Arc<Registry> {
        let mut sorted: Vec<&Arc<Model>> = objects.iter().collect();
        sorted.sort_by_key(|m| {
            (m.metadata.creation_timestamp.clone().map(|t| t.0), m.metadata.uid.clone())
        });
        let of: Vec<_> = sorted
            .iter()
            .map(|m| (m.metadata.uid.clone(), m.metadata.resource_version.clone()))
            .collect();
        if of != self.of {
            let mut registry = Registry::default();
            for object in sorted {
                match read(object) {
                    Ok(model) => {
                        registry.insert(model);
                    }
                    Err(why) => {
                        let name = object.metadata.name.as_deref().unwrap_or_default();
                        tracing::error!(model = name, why, "a model is left out");
                    }
                }
            }
            self.registry = Arc::new(registry);
            self.of = of;
        }
        Arc::clone(&self.registry)
    }
}

fn read(object: &Model) -> Result<muxflow_predictor::TrainedModel, String> {
    let gpu_type = GpuType::new(&object.spec.gpu_type).map_err(|e| format!("gpuType: {e}"))?;
    file::from_bytes_for(&object.spec.data.0, &gpu_type).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::ModelSpec;

    #[test]
    fn a_model_that_cannot_be_read_is_left_out() {
        let spec = ModelSpec {
            gpu_type: "T4".into(),
            data: k8s_openapi::ByteString(b"no model".to_vec()),
            note: None,
        };
        let object = Arc::new(Model::new("broken", spec));
        assert!(read(&object).is_err());
        let mut models = Models::default();
        assert_eq!(models.registry(&[object]).models().count(), 0);
    }
}
