//! How long a plan takes at the size of the paper's whole fleet, and what a small change costs.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use muxflow_policy::cluster::{Memory, Parameters, Planner, lint};
use muxflow_predictor::Registry;
use muxflow_predictor::model::ModelKind;
use muxflow_types::{
    Bytes, ClusterPlan, ClusterSnapshot, GpuId, GpuSnapshot, GpuType, HealthState, JobId,
    JobSnapshot, Micros, NodeId, OnlineSnapshot, Percent, ProfileRecord, ServiceId, SmCount,
    SmShare, SpeedPredictor, WorkloadName,
};

/// Settings of the benchmark.
#[derive(Debug, Args)]
pub(crate) struct PlanBench {
    /// GPUs, and jobs.
    #[arg(long, default_value_t = 20_000)]
    size: u32,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// A model file.
    #[arg(long)]
    model: Option<std::path::PathBuf>,
    /// Without a model file, the kind that is trained on samples of the GPU model first: hybrid (the
    /// winner of the validation there), kernel, mlp, trees; or rule, which needs no training.
    #[arg(long, default_value = "hybrid")]
    kind: String,
    /// Measure only profiles that are kept per service and program, which collapse.
    #[arg(long)]
    collapsed_only: bool,
}

const SMS: u32 = 40;

/// A small generator of its own, so that the instance is the same everywhere.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> f64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let bits = (self.0 ^ (self.0 >> 31)) >> 11;
        #[expect(clippy::cast_precision_loss, reason = "53 bits")]
        let unit = bits as f64 / (1u64 << 53) as f64;
        unit
    }

    fn percent(&mut self, low: f64, high: f64) -> Option<Percent> {
        Percent::clamped(low + (high - low) * self.next())
    }

    /// Near a value, within so many points.
    fn near(&mut self, value: Option<Percent>, points: f64) -> Option<Percent> {
        Percent::clamped(value?.value() + points * (2.0 * self.next() - 1.0))
    }
}

fn profile(name: &str, gpu_type: &GpuType, dice: &mut Dice) -> anyhow::Result<ProfileRecord> {
    let mut p = ProfileRecord::unknown(WorkloadName::new(name)?, gpu_type.clone());
    p.gpu_util = dice.percent(20.0, 95.0);
    p.sm_activity = dice.percent(10.0, 80.0);
    p.sm_occupancy = dice.percent(10.0, 60.0);
    p.dram_activity = dice.percent(5.0, 70.0);
    p.solo_time = Some(Micros::from_secs_f64(0.005 + dice.next())?);
    p.memory = Some(Bytes::from_gib(4));
    Ok(p)
}

fn blurred(p: &ProfileRecord, points: f64, dice: &mut Dice) -> ProfileRecord {
    let mut p = p.clone();
    if points > 0.0 {
        p.gpu_util = dice.near(p.gpu_util, points);
        p.sm_activity = dice.near(p.sm_activity, points);
        p.sm_occupancy = dice.near(p.sm_occupancy, points);
        p.dram_activity = dice.near(p.dram_activity, points);
    }
    p
}

/// A cluster of replicas of 50 services and jobs of 20 programs, each profile blurred by so many
/// points of noise.
fn cluster(size: u32, points: f64) -> anyhow::Result<ClusterSnapshot> {
    let mut dice = Dice(7);
    let t4 = GpuType::new("T4")?;
    let services: Vec<_> = (0..50)
        .map(|i| profile(&format!("service-{i}"), &t4, &mut dice))
        .collect::<Result<_, _>>()?;
    let programs: Vec<_> = (0..20)
        .map(|i| profile(&format!("program-{i}"), &t4, &mut dice))
        .collect::<Result<_, _>>()?;
    let mut gpus = Vec::new();
    let mut jobs = Vec::new();
    for i in 0..size {
        let service = &services[i as usize % services.len()];
        let used = dice.near(service.sm_activity, 15.0).unwrap_or(Percent::ZERO);
        gpus.push(GpuSnapshot {
            gpu: GpuId::new(&format!("GPU-{i}"))?,
            node: NodeId::new(&format!("node-{}", i / 8))?,
            gpu_type: t4.clone(),
            sms: SmCount(SMS),
            memory: Bytes::from_gib(16),
            health: HealthState::Healthy,
            online: Some(OnlineSnapshot {
                service: ServiceId::new(service.workload.as_str())?,
                profile: blurred(service, points, &mut dice),
                predicted_sm_activity: used,
                memory: Bytes::from_gib(6),
                critical: false,
                uid: None,
                in_mps: true,
            }),
            share: SmShare::from_percent(used.complement(), SmCount(SMS))?,
            quota: Bytes::from_gib(6),
            running: None,
            multi_user: false,
        });
        let program = &programs[i as usize % programs.len()];
        jobs.push(JobSnapshot {
            job: JobId::new(&format!("job-{i}"))?,
            workload: program.workload.clone(),
            profiles: BTreeMap::from([(t4.clone(), blurred(program, points, &mut dice))]),
            solo_speed: BTreeMap::from([(t4.clone(), 1.0)]),
            memory: Bytes::from_gib(4),
            priority: 1 + i % 3,
            submitted_at: Micros::from_secs(u64::from(i)),
            waited: Micros::ZERO,
            running_on: None,
            running_share: None,
            gpu_types: Vec::new(),
            fail_prone: false,
            not_before: Micros::ZERO,
            pinned: false,
            uid: None,
        });
    }
    Ok(ClusterSnapshot { at: Micros::from_secs(86_400), reference_type: t4, gpus, jobs })
}

/// Carries out the plan, and changes 2 % of the services.
fn next(s: &ClusterSnapshot, plan: &ClusterPlan, points: f64) -> ClusterSnapshot {
    let mut dice = Dice(11);
    let mut s = s.clone();
    let gpus: BTreeMap<GpuId, usize> =
        s.gpus.iter().enumerate().map(|(i, g)| (g.gpu.clone(), i)).collect();
    let jobs: BTreeMap<JobId, usize> =
        s.jobs.iter().enumerate().map(|(i, j)| (j.job.clone(), i)).collect();
    for a in &plan.assignments {
        s.gpus[gpus[&a.gpu]].running = Some(a.job.clone());
        let job = &mut s.jobs[jobs[&a.job]];
        (job.running_on, job.running_share) = (Some(a.gpu.clone()), Some(a.share));
    }
    for (i, gpu) in s.gpus.iter_mut().enumerate() {
        if i % 50 != 0 {
            continue;
        }
        if let Some(online) = &mut gpu.online {
            online.profile = blurred(&online.profile, points, &mut dice);
            let used = dice.near(Some(online.predicted_sm_activity), 10.0).unwrap_or(Percent::ZERO);
            gpu.share = SmShare::from_percent(used.complement(), gpu.sms).unwrap_or(gpu.share);
        }
    }
    s.at = s.at.saturating_add(Micros::from_secs(900));
    s
}

fn peak_memory_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// CPU time of this process so far, in seconds, to a hundredth.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |n: usize| after_name.split_whitespace().nth(n).and_then(|t| t.parse::<f64>().ok());
    (ticks(11).unwrap_or(0.0) + ticks(12).unwrap_or(0.0)) / 100.0
}

/// Wall and CPU time of one call.
fn timed<T>(call: impl FnOnce() -> T) -> (T, String) {
    let (begin, cpu) = (Instant::now(), cpu_s());
    let result = call();
    let text = format!("{:.2} ({:.2})", begin.elapsed().as_secs_f64(), cpu_s() - cpu);
    (result, text)
}

fn measure(
    name: &str,
    s: &ClusterSnapshot,
    points: f64,
    planner: &Planner,
    predictor: &dyn SpeedPredictor,
) -> anyhow::Result<()> {
    let mut memory = Memory::default();
    let (cold, cold_time) = timed(|| planner.plan_next(&mut memory, s, predictor));
    let (cold, cold_pairs) = (cold?, memory.predicted_pairs());
    anyhow::ensure!(
        lint(s, &cold, planner.parameters()).is_empty(),
        "the cold plan fails its lint"
    );
    let s = next(s, &cold, points);
    let (warm, warm_time) = timed(|| planner.plan_next(&mut memory, &s, predictor));
    anyhow::ensure!(
        lint(&s, &warm?, planner.parameters()).is_empty(),
        "the warm plan fails its lint"
    );
    println!(
        "| {name} | {cold_time} | {cold_pairs} | {warm_time} | {} | {} |",
        memory.predicted_pairs() - cold_pairs,
        peak_memory_mib()
    );
    Ok(())
}

/// Runs the benchmark.
pub(crate) fn run(bench: &PlanBench) -> anyhow::Result<()> {
    let mut registry = Registry::default();
    let mut model = match &bench.model {
        Some(path) => {
            let bytes =
                std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            muxflow_predictor::file::from_bytes(&bytes)
                .with_context(|| path.display().to_string())?
        }
        None => {
            let kind = ModelKind::parse(&bench.kind)
                .with_context(|| format!("--kind: there is no kind `{}`", bench.kind))?;
            super::predictor::synthetic(kind)?
        }
    };
    model.gpu_type = GpuType::new("T4")?;
    println!("model: {}", model.model.kind().name());
    registry.insert(model);
    let predictor: &dyn SpeedPredictor = &registry;
    let planner = Planner::new(Parameters { threads: bench.threads, ..Parameters::default() })?;
    let size = bench.size;
    println!(
        "{size} GPUs × {size} jobs, {} threads, wall seconds (CPU seconds); every plan verified and linted\n",
        bench.threads
    );
    println!(
        "| profiles | cold | pairs predicted | 2 % of GPUs changed | pairs predicted | peak memory, MiB |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    measure(
        "per service and program (classes collapse)",
        &cluster(size, 0.0)?,
        0.0,
        &planner,
        predictor,
    )?;
    if !bench.collapsed_only {
        measure(
            "noise in every profile (nothing collapses)",
            &cluster(size, 2.0)?,
            2.0,
            &planner,
            predictor,
        )?;
    }
    Ok(())
}
