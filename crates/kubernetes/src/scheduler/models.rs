//! Trained models from the cluster's objects. A type of GPU without one is left to the conservative
//! rule.

use std::sync::Arc;

use muxflow_predictor::{Registry, TrainedModel, file};
use muxflow_types::GpuType;

use super::offer::real_type;
use crate::resource::Model;

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
            // A kind of GPUs is predicted by the model of its real type.
            let mut registry = Registry::with_names(real_type);
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

fn read(object: &Model) -> Result<TrainedModel, String> {
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
