//! Several policies on one scenario, in parallel, in the order they were named.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::engine::run;
use crate::error::SimError;
use crate::metrics::RunResult;
use crate::policy;
use crate::predictors::NamedPredictor;
use crate::scenario::Scenario;

/// Runs each policy; `progress` gets the index of the policy, virtual seconds and jobs left.
pub fn compare(
    scenario: &Scenario,
    names: &[String],
    predictor: &NamedPredictor,
    threads: usize,
    progress: &(dyn Fn(usize, f64, usize) + Sync),
) -> Result<Vec<RunResult>, SimError> {
    // Names are checked before anything runs.
    for name in names {
        policy::by_name(name, scenario.seed)?;
    }
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<Result<RunResult, SimError>>>> =
        names.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, names.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    let Some(name) = names.get(i) else { break };
                    let result = policy::by_name(name, scenario.seed).and_then(|p| {
                        let mut report = |at, left| progress(i, at, left);
                        run(scenario, p, predictor.predictor.as_ref(), &predictor.name, &mut report)
                    });
                    if let Ok(mut slot) = results[i].lock() {
                        *slot = Some(result);
                    }
                }
            });
        }
    });
    results
        .into_iter()
        .map(|slot| {
            slot.into_inner().ok().flatten().unwrap_or_else(|| {
                Err(SimError::Plan {
                    at_s: 0.0,
                    reason: "the run ended without a result".to_owned(),
                })
            })
        })
        .collect()
}
