//! From a snapshot to a plan: weigh all pairs of classes, solve the matching exactly, write down who
//! runs where, who leaves and who waits, and why.

use std::collections::BTreeMap;

use muxflow_matching::{self as matching, Certificate, Options, Warm, Weights as _};
use muxflow_types::{
    Assignment, Change, ClusterPlan, ClusterSnapshot, Eviction, EvictionReason, GpuId, JobId,
    SpeedPredictor, WaitReason, Waiting,
};

use super::classes::Classes;
use super::fit;
use super::parameters::{ParameterError, Parameters};
use super::speeds::SpeedTable;
use super::weights::PairWeights;

/// A snapshot that cannot be planned.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The settings contradict each other.
    #[error("the planner's settings make no sense")]
    Parameters(#[from] ParameterError),
    /// The matching refused the weights; the predictor broke its promise of finite speeds.
    #[error("the weights of the pairs cannot be matched")]
    Matching(#[from] matching::MatchError),
    /// The matching is not what its certificate says; the plan is not carried out.
    #[error("the matching's certificate of optimality does not verify")]
    Certificate(#[from] matching::CertificateError),
}

/// How often staying is made worth more before all running jobs are simply held.
const BONUS_STEPS: usize = 6;
/// By how much, each time.
const BONUS_FACTOR: f32 = 3.0;

/// Makes plans. Keeps nothing but its settings, so that a replayed snapshot gives the same plan.
#[derive(Debug, Clone)]
pub struct Planner {
    parameters: Parameters,
}

/// What one plan leaves to the next: speeds already predicted, and the prices of the last matching.
/// A plan made with a memory is worth as much as one made without; where several plans are worth
/// the same, it may be another one of them. Belongs to one predictor: begin anew with a new one.
#[derive(Debug, Default)]
pub struct Memory {
    speeds: SpeedTable,
    /// Room for the weights; what is in it is of no use.
    room: Vec<f32>,
    last: Option<Last>,
}

/// The last matching, and which of its rows and columns each GPU and job was.
#[derive(Debug)]
struct Last {
    gpus: BTreeMap<GpuId, u32>,
    jobs: BTreeMap<JobId, u32>,
    certificate: Certificate,
}

impl Last {
    fn new(classes: &Classes<'_>, certificate: Certificate) -> Self {
        let snapshot = classes.snapshot;
        let mut last = Last { gpus: BTreeMap::new(), jobs: BTreeMap::new(), certificate };
        for (number, class) in (0u32..).zip(&classes.gpus) {
            last.gpus.extend(class.members.iter().map(|&i| (snapshot.gpus[i].gpu.clone(), number)));
        }
        for (number, class) in (0u32..).zip(&classes.jobs) {
            last.jobs.extend(class.members.iter().map(|&i| (snapshot.jobs[i].job.clone(), number)));
        }
        last
    }

    /// For each class of now the class that its first member was in.
    fn places(&self, classes: &Classes<'_>) -> [Vec<Option<u32>>; 2] {
        let gpu = |class| self.gpus.get(&classes.gpu(class).gpu).copied();
        let job = |class| self.jobs.get(&classes.job(class).job).copied();
        [(0..classes.gpus.len()).map(gpu).collect(), (0..classes.jobs.len()).map(job).collect()]
    }
}

impl Memory {
    /// How many pairs have been predicted so far.
    pub fn predicted_pairs(&self) -> u64 {
        self.speeds.predicted
    }
}

/// How many of a class pair the matching puts together.
#[derive(Debug, Clone, Copy)]
struct Flow {
    gpu_class: usize,
    job_class: usize,
    count: usize,
}

/// One job on one GPU, by their places in the snapshot.
#[derive(Debug, Clone, Copy)]
struct Placed {
    gpu: usize,
    job: usize,
    gpu_class: usize,
    job_class: usize,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Stay,
    Restart,
    Come,
}

impl Planner {
    /// A planner with these settings.
    pub fn new(parameters: Parameters) -> Result<Self, PlanError> {
        parameters.check()?;
        Ok(Planner { parameters })
    }

    /// The settings.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// The best plan for a snapshot: the one of greatest total weight among those that disturb no
    /// more running jobs than allowed. The same snapshot always gives the same plan.
    pub fn plan(
        &self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, PlanError> {
        self.plan_next(&mut Memory::default(), snapshot, predictor)
    }

    /// The same, faster, with what the last plan left.
    ///
    /// Staying is worth a bonus, the price of a restart. Where the best matching still disturbs more
    /// jobs than the limit, the bonus is raised until it does not; every matching on the way is
    /// optimal for its bonus, and the last resort is to hold all jobs that may stay.
    pub fn plan_next(
        &self,
        memory: &mut Memory,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, PlanError> {
        let classes = Classes::new(snapshot, &self.parameters);
        let [mut gpu_places, mut job_places] =
            memory.last.as_ref().map_or_else(Default::default, |last| last.places(&classes));
        let mut known = memory.last.take().map(|last| last.certificate);
        let room = std::mem::take(&mut memory.room);
        let mut weights =
            PairWeights::new(&classes, &mut memory.speeds, room, predictor, &self.parameters);
        let residents = (0..classes.jobs.len())
            .filter(|&j| weights.stay(j).is_some())
            .map(|j| classes.jobs[j].members.len())
            .sum::<usize>();
        let limit = self.parameters.disruption_limit(residents);
        let mut step = 0;
        let placed = loop {
            let warm = known.as_ref().map(|certificate| Warm {
                certificate,
                rows: &gpu_places,
                cols: &job_places,
            });
            let (flows, certificate) = self.solve(&classes, &weights, warm)?;
            // Solved again, the same rows and columns start from the prices just found.
            (gpu_places, job_places) = (Vec::new(), Vec::new());
            known = certificate;
            let placed = expand(&classes, &weights, &flows);
            let kept = placed.iter().filter(|p| p.kind == Kind::Stay).count();
            if residents - kept <= limit || step > BONUS_STEPS {
                break placed;
            }
            step += 1;
            if step > BONUS_STEPS {
                weights.hold_residents();
            } else {
                weights.raise_stay_bonus(BONUS_FACTOR);
            }
        };
        let plan = write(&classes, &weights, &placed);
        memory.room = weights.into_room();
        memory.last = known.map(|certificate| Last::new(&classes, certificate));
        Ok(plan)
    }

    fn solve(
        &self,
        classes: &Classes<'_>,
        weights: &PairWeights<'_>,
        warm: Option<Warm<'_>>,
    ) -> Result<(Vec<Flow>, Option<Certificate>), PlanError> {
        if weights.rows() == 0 || weights.cols() == 0 {
            return Ok((Vec::new(), None));
        }
        let count = |members: &Vec<usize>| u32::try_from(members.len()).unwrap_or(u32::MAX);
        let mut rows: Vec<u32> = classes.gpus.iter().map(|c| count(&c.members)).collect();
        let mut columns: Vec<u32> = classes.jobs.iter().map(|c| count(&c.members)).collect();
        let mut flows = Vec::new();
        for (job_class, jobs) in columns.iter_mut().enumerate() {
            if let Some(gpu_class) = weights.held(job_class) {
                flows.push(Flow { gpu_class, job_class, count: *jobs as usize });
                rows[gpu_class] -= *jobs;
                *jobs = 0;
            }
        }
        let options = Options {
            optional: true,
            threads: self.parameters.threads,
            warm,
            ..Options::default()
        };
        let flow = matching::solve_classes(weights, &rows, &columns, options)?;
        matching::verify_flow(weights, &rows, &columns, &flow)?;
        flows.extend(flow.shares.iter().map(|s| Flow {
            gpu_class: s.row as usize,
            job_class: s.col as usize,
            count: s.count as usize,
        }));
        Ok((flows, Some(flow.certificate)))
    }
}

/// From counts per class to single jobs on single GPUs. Residents that stay keep their own GPU;
/// then newcomers take what is left, first come, first served.
fn expand(classes: &Classes<'_>, weights: &PairWeights<'_>, flows: &[Flow]) -> Vec<Placed> {
    let snapshot = classes.snapshot;
    let mut gpu_taken = vec![false; snapshot.gpus.len()];
    let mut job_taken = vec![false; snapshot.jobs.len()];
    let mut placed = Vec::new();
    let (resident, coming): (Vec<Flow>, Vec<Flow>) = flows.iter().partition(|f| {
        classes.jobs[f.job_class].current == Some(f.gpu_class)
            && weights.stay(f.job_class).is_some()
    });
    for f in resident {
        let kind =
            if weights.restart_pays(f.gpu_class, f.job_class) { Kind::Restart } else { Kind::Stay };
        for &job in classes.jobs[f.job_class].members.iter().take(f.count) {
            let own = snapshot.jobs[job].running_on.as_ref().and_then(|g| classes.gpu_index.get(g));
            let Some(&gpu) = own else { continue };
            gpu_taken[gpu] = true;
            job_taken[job] = true;
            let (gpu_class, job_class) = (f.gpu_class, f.job_class);
            placed.push(Placed { gpu, job, gpu_class, job_class, kind });
        }
    }
    let mut next_gpu = vec![0; classes.gpus.len()];
    let mut next_job = vec![0; classes.jobs.len()];
    for f in coming {
        for _ in 0..f.count {
            let gpu = next_free(
                &classes.gpus[f.gpu_class].members,
                &mut next_gpu[f.gpu_class],
                &mut gpu_taken,
            );
            let job = next_free(
                &classes.jobs[f.job_class].members,
                &mut next_job[f.job_class],
                &mut job_taken,
            );
            let (Some(gpu), Some(job)) = (gpu, job) else { continue };
            let (gpu_class, job_class) = (f.gpu_class, f.job_class);
            placed.push(Placed { gpu, job, gpu_class, job_class, kind: Kind::Come });
        }
    }
    placed.sort_by_key(|p| p.gpu);
    placed
}

fn next_free(members: &[usize], next: &mut usize, taken: &mut [bool]) -> Option<usize> {
    while let Some(&member) = members.get(*next) {
        *next += 1;
        if !taken[member] {
            taken[member] = true;
            return Some(member);
        }
    }
    None
}

/// Writes down what was decided, with a reason for everyone who is not placed.
fn write(classes: &Classes<'_>, weights: &PairWeights<'_>, placed: &[Placed]) -> ClusterPlan {
    let snapshot = classes.snapshot;
    let mut plan = ClusterPlan { at: snapshot.at, certified: true, ..ClusterPlan::default() };
    let mut has_place = vec![false; snapshot.jobs.len()];
    for p in placed {
        has_place[p.job] = true;
        let assignment = assignment(classes, weights, p);
        plan.total_weight += f64::from(assignment.weight);
        plan.assignments.push(assignment);
    }
    let mut reasons: Vec<Option<WaitReason>> = vec![None; classes.job_fits.len()];
    for (class, members) in classes.jobs.iter().enumerate() {
        for &i in &members.members {
            if has_place[i] {
                continue;
            }
            let job = &snapshot.jobs[i];
            let reason = reasons[members.fit].get_or_insert_with(|| {
                let gpus = classes.gpu_fits.iter().map(|g| (&snapshot.gpus[g.example], g.count));
                fit::wait_reason(&classes.terms, gpus, job)
            });
            if let Some(from) = &job.running_on {
                let reason = eviction_reason(classes, weights, class, i, reason);
                plan.evictions.push(Eviction { job: job.job.clone(), gpu: from.clone(), reason });
            }
            plan.waiting.push(Waiting { job: job.job.clone(), reason: reason.clone() });
        }
    }
    let place: BTreeMap<_, _> =
        snapshot.jobs.iter().enumerate().map(|(i, j)| (&j.job, i)).collect();
    plan.evictions.sort_by_key(|e| place.get(&e.job).copied());
    plan.waiting.sort_by_key(|w| place.get(&w.job).copied());
    plan
}

fn assignment(classes: &Classes<'_>, weights: &PairWeights<'_>, p: &Placed) -> Assignment {
    let (gpu, job) = (&classes.snapshot.gpus[p.gpu], &classes.snapshot.jobs[p.job]);
    let (speed, weight) = match (p.kind, weights.stay(p.job_class)) {
        (Kind::Stay, Some(stay)) => (stay.speed, stay.weight),
        _ => weights.newcomer(p.gpu_class, p.job_class),
    };
    let change = match (p.kind, &job.running_on) {
        (Kind::Stay, _) => Change::Stay,
        (Kind::Restart, _) => Change::Restart,
        (Kind::Come, Some(from)) => Change::Move { from: from.clone() },
        (Kind::Come, None) => Change::Start,
    };
    let share = match p.kind {
        Kind::Stay => job.running_share.unwrap_or(gpu.share),
        Kind::Restart | Kind::Come => gpu.share,
    };
    Assignment {
        job: job.job.clone(),
        gpu: gpu.gpu.clone(),
        share,
        quota: if p.kind == Kind::Stay { gpu.quota } else { classes.terms.lent(gpu) },
        predicted_speed: speed,
        weight,
        change,
    }
}

fn eviction_reason(
    classes: &Classes<'_>,
    weights: &PairWeights<'_>,
    class: usize,
    job: usize,
    reason: &WaitReason,
) -> EvictionReason {
    let snapshot = classes.snapshot;
    let own = snapshot.jobs[job].running_on.as_ref().and_then(|g| classes.gpu_index.get(g));
    let Some(&gpu) = own else { return EvictionReason::GpuGone };
    if weights.stay(class).is_some() {
        return EvictionReason::Displaced;
    }
    match fit::refusal(&classes.terms, &snapshot.gpus[gpu], &snapshot.jobs[job]) {
        Some(fit::Refusal::Health) | None => EvictionReason::Health,
        Some(_) => EvictionReason::NoLongerFits(reason.clone()),
    }
}
