//! Labelled pairs for training and judging a speed predictor: what a profiling cluster would have
//! measured, noise included.

use muxflow_types::{Percent, ProfileRecord, SmShare};

use crate::average::{Pair, pair};
use crate::device::Sharing;
use crate::error::ModelError;
use crate::profile::GpuProfile;
use crate::rng::Rng;
use crate::shape::{Phase, WorkloadShape};

/// One pair, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct PairSample {
    /// The service alone, at the request rate it has in this pair.
    pub online: ProfileRecord,
    /// The job alone.
    pub offline: ProfileRecord,
    /// SMs offered to the job.
    pub share: SmShare,
    /// Speed of the job against alone, as measured: 0 to 1.
    pub offline_speed: f64,
    /// The same without measurement noise, for judging.
    pub offline_speed_true: f64,
    /// GPU time of the service against alone, as measured: about 1 and more.
    pub online_slowdown: f64,
}

/// Standard deviation of a measured speed, relative.
const LABEL_NOISE: f64 = 0.015;
/// Standard deviation of a measured counter, relative.
const COUNTER_NOISE: f64 = 0.02;
/// Standard deviation of how one run of a workload differs from another (batch size, input), relative.
const VARIANT: f64 = 0.18;

/// Draws `n` pairs on one GPU type: every built-in service with every built-in job, each varied as
/// batch sizes and inputs vary, at a random request rate and share. The same seed gives the same
/// samples.
pub fn samples(profile: &GpuProfile, n: usize, seed: u64) -> Result<Vec<PairSample>, ModelError> {
    let list = WorkloadShape::built_in_list()?;
    let (services, jobs): (Vec<_>, Vec<_>) =
        list.into_iter().partition(|w| w.phase == Phase::Inference);
    let mut rng = Rng::fork(seed, 0x5a3);
    let mut out = Vec::with_capacity(n);
    for _ in 0..n {
        let service = variant(&services[rng.below(services.len())], &mut rng);
        let job = variant(&jobs[rng.below(jobs.len())], &mut rng);
        let sms = 1 + u32::try_from(rng.below(profile.sms as usize)).unwrap_or(0);
        let share = SmShare::from_percent(
            Percent::clamped(f64::from(sms) / f64::from(profile.sms) * 100.0)
                .unwrap_or(Percent::FULL),
            profile.sm_count(),
        );
        let Ok(share) = share else { continue };
        out.push(measure(profile, &service, &job, share, &mut rng));
    }
    Ok(out)
}

fn measure(
    profile: &GpuProfile,
    service: &WorkloadShape,
    job: &WorkloadShape,
    share: SmShare,
    rng: &mut Rng,
) -> PairSample {
    let (online, offline) = (service.on(profile), job.on(profile));
    let busy_share = rng.between(0.03, 0.75);
    let batches_per_s = busy_share * 1e6 / online.busy_us;
    let truth = pair(
        profile,
        &Sharing::Mps,
        &Pair {
            online: Some(&online),
            batches_per_s,
            offline: Some(&offline),
            share: share.percent().fraction(),
            gate: 1.0,
        },
    );
    let noisy = |x: f64, rng: &mut Rng| x * (1.0 + LABEL_NOISE * rng.normal());
    PairSample {
        online: blur(&service.profile_record(profile, batches_per_s), rng),
        offline: blur(&job.profile_record(profile, 0.0), rng),
        share,
        offline_speed: noisy(truth.offline_speed, rng).clamp(0.0, 1.0),
        offline_speed_true: truth.offline_speed,
        online_slowdown: noisy(truth.online_slowdown(), rng).max(1.0),
    }
}

/// Another run of the same workload: other batch size, other input.
pub fn variant(shape: &WorkloadShape, rng: &mut Rng) -> WorkloadShape {
    let mut scale = |x: f64, most: f64| (x * (VARIANT * rng.normal()).exp()).clamp(x * 0.4, most);
    WorkloadShape {
        busy_us: scale(shape.busy_us, shape.busy_us * 2.5),
        host_gap_us: scale(shape.host_gap_us, shape.host_gap_us.mul_add(2.5, 1.0)),
        sm_fill: scale(shape.sm_fill, 400.0),
        occupancy: scale(shape.occupancy, 1.0),
        issue: scale(shape.issue, 1.0),
        bandwidth: scale(shape.bandwidth, 1.0),
        ..shape.clone()
    }
}

/// A record as counters with noise would give it.
pub fn blur(record: &ProfileRecord, rng: &mut Rng) -> ProfileRecord {
    let mut noisy = |p: Option<Percent>| {
        p.and_then(|p| Percent::clamped(p.value() * (1.0 + COUNTER_NOISE * rng.normal())))
    };
    ProfileRecord {
        gpu_util: noisy(record.gpu_util),
        sm_activity: noisy(record.sm_activity),
        sm_occupancy: noisy(record.sm_occupancy),
        dram_activity: noisy(record.dram_activity),
        ..record.clone()
    }
}
