//! Predictors for simulations: trained ones, on what a profiling cluster would have measured; the
//! rule, which needs no data; and the truth, labelled as an oracle.

use std::ops::ControlFlow;

use muxflow_gpu_model::{GpuProfile, Pair, Placed, Sharing, WorkloadShape, pair, samples};
use muxflow_predictor::model::{FitOptions, Model, ModelKind};
use muxflow_predictor::{Card, ConservativeRule, Dataset, Registry, SpeedSample, TrainedModel};
use muxflow_types::{
    Micros, OfflineInput, OnlineInput, PairSpeeds, Provenance, SpeedPrediction, SpeedPredictor,
};

use crate::error::SimError;

/// Samples for each GPU type, as in the paper.
pub const SAMPLES: usize = 2000;

/// A predictor and what it is.
pub struct NamedPredictor {
    /// For tables and reports.
    pub name: String,
    /// The predictor.
    pub predictor: Box<dyn SpeedPredictor + Send>,
}

impl std::fmt::Debug for NamedPredictor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NamedPredictor({})", self.name)
    }
}

/// The names that [`by_name`] knows.
pub const NAMES: [&str; 5] = ["mlp", "kernel", "trees", "rule", "oracle"];

/// Makes a predictor for these GPU types.
pub fn by_name(name: &str, types: &[GpuProfile], seed: u64) -> Result<NamedPredictor, SimError> {
    match name {
        "rule" => Ok(NamedPredictor {
            name: "conservative rule".to_owned(),
            predictor: Box::new(ConservativeRule),
        }),
        "oracle" => Ok(NamedPredictor {
            name: "ORACLE (the truth; an upper bound)".to_owned(),
            predictor: Box::new(Oracle::new(types)?),
        }),
        _ => {
            let kind =
                ModelKind::parse(name).filter(|k| *k != ModelKind::Mean).ok_or_else(|| {
                    SimError::Setting {
                        field: "predictor",
                        value: name.to_owned(),
                        reason: "write mlp, kernel, trees, rule or oracle",
                    }
                })?;
            trained(kind, types, seed)
        }
    }
}

/// The labelled pairs of one type as the predictor takes them.
pub fn dataset(profile: &GpuProfile, n: usize, seed: u64) -> Result<Dataset, SimError> {
    let samples = samples(profile, n, seed)?
        .into_iter()
        .map(|s| SpeedSample {
            online: s.online,
            offline: s.offline,
            share: Some(s.share.percent()),
            speed: s.offline_speed,
            at: Micros::ZERO,
        })
        .collect();
    let origin = "pairs measured on the GPU model, with noise".to_owned();
    Ok(Dataset { gpu_type: profile.gpu_type.clone(), origin, samples })
}

fn trained(kind: ModelKind, types: &[GpuProfile], seed: u64) -> Result<NamedPredictor, SimError> {
    let fail = |e: muxflow_predictor::PredictorError| SimError::Predictor { reason: e.to_string() };
    let mut registry = Registry::default();
    let mut errors = Vec::new();
    for profile in types {
        let data = dataset(profile, SAMPLES, seed)?;
        let held = dataset(profile, SAMPLES / 4, seed ^ 0x5eed)?;
        let options = FitOptions::default().with_seed(seed);
        let (model, _) =
            Model::fit(kind, &data, &options, &mut |_| ControlFlow::Continue(())).map_err(fail)?;
        let error = held
            .samples
            .iter()
            .map(|s| (model.speed(&s.online, s.share, &s.offline) - s.speed).abs())
            .sum::<f64>()
            / crate::number::float(held.samples.len());
        errors.push(format!("{} {error:.3}", profile.gpu_type));
        let seen = |side: fn(&SpeedSample) -> &str| {
            data.samples.iter().map(|s| side(s).to_owned()).collect()
        };
        let deviation = {
            #[expect(clippy::cast_possible_truncation, reason = "an error between 0 and 1")]
            let e = error as f32;
            [e, 2.0 * e, 3.0 * e]
        };
        registry.insert(TrainedModel {
            gpu_type: data.gpu_type.clone(),
            model,
            online_seen: seen(|s| s.online.workload.as_str()),
            offline_seen: seen(|s| s.offline.workload.as_str()),
            deviation,
            card: Card {
                origin: data.origin.clone(),
                samples: data.samples.len(),
                seed,
                pair_error: error,
                ..Card::default()
            },
        });
    }
    Ok(NamedPredictor {
        name: format!(
            "{} trained on {SAMPLES} modelled pairs; mean error on fresh pairs: {}",
            kind.name(),
            errors.join(", ")
        ),
        predictor: Box::new(registry),
    })
}

/// The truth of `gpu-model`: an upper bound of what prediction can bring, never a contender.
struct Oracle {
    types: Vec<GpuProfile>,
    shapes: Vec<WorkloadShape>,
}

impl Oracle {
    fn new(types: &[GpuProfile]) -> Result<Self, SimError> {
        Ok(Oracle { types: types.to_vec(), shapes: WorkloadShape::built_in_list()? })
    }

    fn placed(&self, profile: &GpuProfile, name: &str) -> Option<Placed> {
        self.shapes.iter().find(|s| s.name.as_str() == name).map(|s| s.on(profile))
    }

    fn speed(&self, online: &OnlineInput, offline: &OfflineInput) -> Option<f32> {
        let profile = self.types.iter().find(|p| p.gpu_type == online.profile.gpu_type)?;
        let service = self.placed(profile, online.profile.workload.as_str())?;
        let job = self.placed(profile, offline.profile.workload.as_str())?;
        let busy = online.profile.gpu_util?.fraction();
        let truth = pair(
            profile,
            &Sharing::Mps,
            &Pair {
                online: Some(&service),
                batches_per_s: busy / service.busy_us * 1e6,
                offline: Some(&job),
                share: online.share.percent().fraction(),
                gate: 1.0,
            },
        );
        #[expect(clippy::cast_possible_truncation, reason = "a speed between 0 and 1")]
        let speed = truth.offline_speed as f32;
        Some(speed)
    }
}

impl SpeedPredictor for Oracle {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        SpeedPrediction {
            speed: self.speed(online, offline).unwrap_or(0.0),
            uncertainty: 0.0,
            provenance: Provenance::Oracle,
        }
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        Box::new(OraclePairs { oracle: self, online, offline })
    }
}

struct OraclePairs<'a> {
    oracle: &'a Oracle,
    online: &'a [OnlineInput],
    offline: &'a [OfflineInput],
}

impl PairSpeeds for OraclePairs<'_> {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        for (speed, offline) in out.iter_mut().zip(&self.offline[first_column..]) {
            *speed = self.oracle.speed(&self.online[row], offline).unwrap_or(0.0);
        }
    }
}
