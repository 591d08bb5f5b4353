//! Now and then a new model is trained on what was measured and seen. It takes the place of the one
//! in use only where it is better on samples that were held out.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::RecvTimeoutError;
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
/// Speeds that were seen, that many of the newest, are trained on: minutes of work, not hours.
const MOST_OBSERVED: usize = 10_000;
/// How often somebody looks whether a training is over.
const LOOK_EVERY: Duration = Duration::from_millis(200);

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
pub fn train(store: &mut Store, gpu_type: &GpuType, leave: &AtomicBool) -> Result<Trained> {
    let mut samples = store.samples(gpu_type, Source::Measured)?;
    let mut observed = store.samples(gpu_type, Source::Observed)?;
    samples.extend(observed.drain(observed.len().saturating_sub(MOST_OBSERVED)..));
    if samples.len() < FEWEST_SAMPLES {
        return Ok(Trained::TooFew(samples.len()));
    }
    let origin = format!("the store: {} samples", samples.len());
    let data = Dataset { gpu_type: gpu_type.clone(), origin, samples };
    let options = SelectOptions::default();
    let mut quietly = |_| {
        let left = leave.load(Ordering::Acquire);
        if left { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
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
    if leave.load(Ordering::Acquire) {
        // What was broken off is no model.
        return Err(failed("the manager leaves"));
    }
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

/// This thread runs after all others of the machine from here on.
fn yield_to_others() {
    // SAFETY: a plain system call with numbers; on Linux it is about the thread that calls.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
    if done != 0 {
        tracing::debug!("a training keeps its priority");
    }
}

/// Trains in a thread of its own, which holds nothing that the rest needs: a manager that leaves does
/// not wait for it, and nothing comes back then. A model is written whole or not at all.
fn train_aside(
    store: &Path,
    gpu_type: &GpuType,
    leave: &Arc<AtomicBool>,
) -> Option<Result<Trained>> {
    let (path, of, left) = (store.to_owned(), gpu_type.clone(), Arc::clone(leave));
    let (done, trained) = std::sync::mpsc::channel();
    let work = move || {
        // Services and jobs come first.
        yield_to_others();
        let opened = Store::open(&path).map_err(ManagerError::from);
        // Whoever waited may have left.
        drop(done.send(opened.and_then(|mut store| train(&mut store, &of, &left))));
    };
    if let Err(error) = std::thread::Builder::new().name("training".to_owned()).spawn(work) {
        return Some(Err(failed(error)));
    }
    loop {
        match trained.recv_timeout(LOOK_EVERY) {
            Ok(trained) => return Some(trained),
            Err(RecvTimeoutError::Timeout) if leave.load(Ordering::Acquire) => return None,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Some(Err(failed("it broke off"))),
        }
    }
}

impl Scheduler {
    /// The GPU types of the node.
    pub fn gpu_types(&self) -> BTreeSet<GpuType> {
        self.manager.node.look().into_iter().map(|sight| sight.gpu_type).collect()
    }

    /// Trains every now and then until the manager leaves. The store is opened anew, so that nobody
    /// waits for it.
    pub fn retrain(&self, store: &Path, leave: &Arc<AtomicBool>) {
        let Some(every) = self.settings.retrain_every else { return };
        let mut next = Instant::now() + every;
        while !leave.load(Ordering::Acquire) {
            std::thread::sleep(LOOK_EVERY);
            if Instant::now() < next {
                continue;
            }
            next = Instant::now() + every;
            for gpu_type in self.gpu_types() {
                match train_aside(store, &gpu_type, leave) {
                    Some(trained) => self.tell_trained(&gpu_type, trained),
                    None => return,
                }
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
