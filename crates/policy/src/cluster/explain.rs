//! Why a job is where it is, or why it waits: every GPU's answer, counted, and the best places with
//! who has them.

use std::collections::BTreeMap;

use muxflow_types::{
    Change, ClusterPlan, ClusterSnapshot, GpuId, JobId, SmShare, SpeedPrediction, SpeedPredictor,
    WaitReason,
};

use super::fit::{Refusal, refusal, runs_here};
use super::speeds::{offline_input, online_input};
use super::weights::solo_speed;

/// One GPU that could hold the job.
#[derive(Debug, Clone, PartialEq)]
pub struct Candidate {
    /// Which.
    pub gpu: GpuId,
    /// The share it would be, or is, started with.
    pub share: SmShare,
    /// What the predictor says of the pair.
    pub prediction: SpeedPrediction,
    /// The same on the reference type.
    pub reference_speed: f64,
    /// Who gets it in the plan.
    pub given_to: Option<JobId>,
}

/// The whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// The job.
    pub job: JobId,
    /// Where the plan puts it, and how.
    pub placed: Option<(GpuId, Change)>,
    /// Why it waits, when it does.
    pub waiting: Option<WaitReason>,
    /// GPUs that could hold it, the fastest first.
    pub candidates: Vec<Candidate>,
    /// How many GPUs refuse it, by reason.
    pub refusals: BTreeMap<Refusal, usize>,
    /// What one unit of its speed counts: priority and waiting time.
    pub worth: f64,
}

/// Explains one job of a plan; `None` when the snapshot does not have it.
pub fn explain(
    snapshot: &ClusterSnapshot,
    plan: &ClusterPlan,
    predictor: &dyn SpeedPredictor,
    parameters: &super::Parameters,
    id: &JobId,
) -> Option<Explanation> {
    let job = snapshot.jobs.iter().find(|j| j.job == *id)?;
    let terms = parameters.terms(snapshot);
    let owners: BTreeMap<&GpuId, &JobId> =
        plan.assignments.iter().map(|a| (&a.gpu, &a.job)).collect();
    let mut refusals = BTreeMap::new();
    let mut candidates = Vec::new();
    for gpu in &snapshot.gpus {
        if let Some(why) = refusal(&terms, gpu, job) {
            *refusals.entry(why).or_insert(0) += 1;
            continue;
        }
        let share = match job.running_share {
            Some(share) if runs_here(gpu, job) => share,
            _ => gpu.share,
        };
        let online = online_input(gpu, share)?;
        let prediction = predictor.predict(&online, &offline_input(job, &gpu.gpu_type));
        candidates.push(Candidate {
            gpu: gpu.gpu.clone(),
            share,
            prediction,
            reference_speed: f64::from(prediction.speed) * solo_speed(job, &gpu.gpu_type),
            given_to: owners.get(&gpu.gpu).map(|&j| j.clone()),
        });
    }
    candidates.sort_by(|a, b| b.reference_speed.total_cmp(&a.reference_speed));
    Some(Explanation {
        job: id.clone(),
        placed: plan
            .assignments
            .iter()
            .find(|a| a.job == *id)
            .map(|a| (a.gpu.clone(), a.change.clone())),
        waiting: plan.waiting.iter().find(|w| w.job == *id).map(|w| w.reason.clone()),
        candidates,
        refusals,
        worth: f64::from(job.priority) * parameters.aging(job.waited),
    })
}
