//! What the last plan says of one job.

use std::collections::BTreeMap;

use muxflow_api::jobs::CandidateView;
use muxflow_policy::cluster::{Parameters, explain};
use muxflow_types::JobId;

use crate::manager::Manager;

/// So many of the best places are told.
const BEST: usize = 10;

impl Manager {
    /// The GPUs that could hold a job, best first, and why the others refuse it; nothing when the
    /// last plan does not know the job.
    pub fn explained(&self, id: &JobId) -> (Vec<CandidateView>, BTreeMap<String, u64>) {
        let nothing = (Vec::new(), BTreeMap::new());
        let Some(last) = self.planned() else { return nothing };
        let parameters = Parameters::default();
        let explained = explain(&last.snapshot, &last.plan, &*last.registry, &parameters, id);
        let Some(answer) = explained else { return nothing };
        let candidates = answer.candidates.iter().take(BEST).map(|candidate| CandidateView {
            gpu: candidate.gpu.as_str().to_owned(),
            share_pct: candidate.share.percent().value(),
            predicted_speed: f64::from(candidate.prediction.speed),
            uncertainty: f64::from(candidate.prediction.uncertainty),
            given_to: candidate.given_to.as_ref().map(|job| job.as_str().to_owned()),
        });
        let refusals =
            answer.refusals.iter().map(|(why, count)| (why.words().to_owned(), *count as u64));
        (candidates.collect(), refusals.collect())
    }
}
