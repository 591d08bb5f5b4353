//! Model files: documented in `docs/predictor.md`, versioned, and refused when they do not fit.
//!
//! Loading checks everything that inference relies on (shapes that chain, indices that exist, trees
//! that end), so a loaded model cannot go out of bounds.

mod container;
mod parts;

use std::collections::BTreeSet;

use muxflow_types::GpuType;
use serde_json::json;

use crate::error::PredictorError;
use crate::model::{Model, ModelKind};
use crate::trained::{Card, TrainedModel};
use container::{Container, refuse};
pub use container::{VERSION, crc32};

/// The bytes of a model file.
pub fn to_bytes(trained: &TrainedModel) -> Vec<u8> {
    let mut file = Container::default();
    let card = &trained.card;
    for (key, value) in [
        ("kind", json!(trained.model.kind().name())),
        ("gpu_type", json!(trained.gpu_type.as_str())),
        ("online_seen", json!(trained.online_seen)),
        ("offline_seen", json!(trained.offline_seen)),
        ("origin", json!(card.origin)),
        ("samples", json!(card.samples)),
        ("seed", json!(card.seed)),
        ("parent", json!(card.parent)),
    ] {
        file.header.insert(key.to_owned(), value);
    }
    let errors = vec![card.pair_error, card.unseen_error, card.mean_unseen_error];
    file.put_f64("errors", &[3], errors);
    file.put_f32("deviation", &[3], trained.deviation.to_vec());
    match &trained.model {
        Model::Mean(mean) => file.put_f64("mean", &[1], vec![*mean]),
        Model::Rule => {}
        Model::Kernel(model) => parts::put_kernel(&mut file, model),
        Model::Trees(model) => parts::put_trees(&mut file, model),
        Model::Mlp(model) => parts::put_mlp(&mut file, model),
    }
    file.to_bytes()
}

/// Reads a model file; anything that does not fit is refused with the reason.
pub fn from_bytes(bytes: &[u8]) -> Result<TrainedModel, PredictorError> {
    let file = Container::from_bytes(bytes)?;
    let kind = file.text("kind")?;
    let kind = ModelKind::parse(kind)
        .ok_or_else(|| refuse(format!("`{kind}` is not a kind of model that this program has")))?;
    let model = match kind {
        ModelKind::Mean => {
            let mean = file.f64("mean", &[Some(1)])?[0];
            if !(0.0..=1.0).contains(&mean) {
                return Err(refuse(format!("a mean speed of {mean} is not between 0 and 1")));
            }
            Model::Mean(mean)
        }
        ModelKind::Rule => Model::Rule,
        ModelKind::Kernel => Model::Kernel(Box::new(parts::kernel(&file)?)),
        ModelKind::Trees => Model::Trees(parts::trees(&file)?),
        ModelKind::Mlp | ModelKind::Hybrid => Model::Mlp(parts::mlp(&file)?),
    };
    let deviation = file.f32("deviation", &[Some(3)])?;
    let errors = file.f64("errors", &[Some(3)])?;
    let names = |key| -> Result<BTreeSet<String>, PredictorError> {
        Ok(file.texts(key)?.into_iter().collect())
    };
    Ok(TrainedModel {
        gpu_type: GpuType::new(file.text("gpu_type")?).map_err(|e| refuse(e.to_string()))?,
        model,
        online_seen: names("online_seen")?,
        offline_seen: names("offline_seen")?,
        deviation: [deviation[0], deviation[1], deviation[2]],
        card: Card {
            origin: file.text("origin")?.to_owned(),
            samples: usize::try_from(file.count("samples")?).unwrap_or(usize::MAX),
            seed: file.count("seed")?,
            pair_error: errors[0],
            unseen_error: errors[1],
            mean_unseen_error: errors[2],
            parent: file.text("parent").ok().map(str::to_owned),
        },
    })
}

/// Reads a model file that must be for this GPU type.
pub fn from_bytes_for(bytes: &[u8], gpu_type: &GpuType) -> Result<TrainedModel, PredictorError> {
    let trained = from_bytes(bytes)?;
    if trained.gpu_type != *gpu_type {
        return Err(refuse(format!(
            "it is for GPU type {}, not for {gpu_type}; train one on measurements of {gpu_type}",
            trained.gpu_type
        )));
    }
    Ok(trained)
}
