//! Now and then a new model is trained on what was measured and seen. It takes the place of the one
//! in use only where it is better on samples that were held out.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use muxflow_predictor::select::{SelectOptions, judge, select};
use muxflow_predictor::{Dataset, file};
use muxflow_store::events::NewEvent;
use muxflow_store::{NewModel, Source, Store};
use muxflow_types::GpuType;

use super::Scheduler;
use crate::clock;
use crate::error::{ManagerError, Result};

/// Fewer samples than this teach nothing.
const FEWEST_SAMPLES: usize = 50;

fn failed(error: impl std::fmt::Display) -> ManagerError {
    ManagerError::Conflict(format!("training failed: {error}"))
}

/// What training came to.
#[derive(Debug, Clone, PartialEq)]
pub enum Trained {
    /// There are too few samples.
    TooFew(usize),
    /// The new model is in use.
    Replaced {
        /// What it is and how it compares, in words.
        words: String,
    },
    /// The old one stays.
    Kept {
        /// How the new one compares, in words.
        words: String,
    },
}

/// Trains for one GPU type on what the store has.
pub fn train(store: &mut Store, gpu_type: &GpuType) -> Result<Trained> {
    let mut samples = store.samples(gpu_type, Source::Measured)?;
    samples.extend(store.samples(gpu_type, Source::Observed)?);
    if samples.len() < FEWEST_SAMPLES {
        return Ok(Trained::TooFew(samples.len()));
    }
    let origin = format!("the store: {} samples", samples.len());
    let data = Dataset { gpu_type: gpu_type.clone(), origin, samples };
    let options = SelectOptions::default();
    let mut quietly = |_| ControlFlow::Continue(());
    let mut selection = select(&data, &options, &mut quietly).map_err(failed)?;
    let kind = selection.model.model.kind();
    let old = store.model_in_use(gpu_type)?;
    let (better, words) = match &old {
        None => (true, format!("{kind}, the first for {gpu_type}")),
        Some(row) => match file::from_bytes_for(&row.bytes, gpu_type) {
            Err(error) => (true, format!("{kind}; the model in use is damaged: {error}")),
            Ok(model) => {
                let verdict = judge(&model, kind, &data, &options).map_err(failed)?;
                selection.model.card.parent = Some(row.checksum.clone());
                let words = format!(
                    "{kind} errs by {:.4} on {} samples held out, the one in use by {:.4}",
                    verdict.new_error, verdict.held_out, verdict.old_error
                );
                (verdict.replace(), words)
            }
        },
    };
    let bytes = file::to_bytes(&selection.model);
    let model = NewModel {
        gpu_type,
        kind: kind.name(),
        checksum: &format!("{:08x}", file::crc32(&bytes)),
        bytes: &bytes,
        card: &words,
        unseen_error: selection.model.card.unseen_error,
        parent: old.map(|row| row.id),
        created_at: clock::now(),
    };
    store.put_model(&model, better)?;
    Ok(if better { Trained::Replaced { words } } else { Trained::Kept { words } })
}

impl Scheduler {
    /// The GPU types of the node.
    pub fn gpu_types(&self) -> BTreeSet<GpuType> {
        self.manager.node.look().into_iter().map(|sight| sight.gpu_type).collect()
    }

    /// Trains every now and then until the manager leaves. The store is opened anew, so that nobody
    /// waits for it.
    pub fn retrain(&self, store: &std::path::Path, leave: &AtomicBool) {
        let Some(every) = self.settings.retrain_every else { return };
        let mut next = Instant::now() + every;
        while !leave.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(200));
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + every;
            for gpu_type in self.gpu_types() {
                let trained = Store::open(store)
                    .map_err(ManagerError::from)
                    .and_then(|mut store| train(&mut store, &gpu_type));
                self.tell_trained(&gpu_type, trained);
            }
            if let Err(error) = self.speeds.load(&self.manager.reader(), self.gpu_types()) {
                tracing::error!(error = error.in_full(), "new models are not in use");
            }
        }
    }

    fn tell_trained(&self, gpu_type: &GpuType, trained: Result<Trained>) {
        let text = match trained {
            Ok(Trained::TooFew(count)) => {
                tracing::info!(%gpu_type, count, "too few samples to train on");
                return;
            }
            Ok(Trained::Replaced { words }) => format!("new speed model in use: {words}"),
            Ok(Trained::Kept { words }) => format!("the speed model in use stays: {words}"),
            Err(error) => format!("no speed model for {gpu_type}: {}", error.in_full()),
        };
        let at = clock::now();
        let event = NewEvent { at, kind: "plan", gpu: None, job: None, service: None, text };
        self.manager.tell(event);
    }
}
