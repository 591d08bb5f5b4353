//! Small clusters for tests: a predictor by table, and builders that fill in what a test does not
//! care about.

use std::collections::BTreeMap;

use muxflow_types::{
    Bytes, ClusterSnapshot, GpuId, GpuSnapshot, GpuType, HealthState, JobId, JobSnapshot, Micros,
    NodeId, OfflineInput, OnlineInput, OnlineSnapshot, PairSpeeds, Percent, ProfileRecord,
    Provenance, ServiceId, SmCount, SmShare, SpeedPrediction, SpeedPredictor, WorkloadName,
};

/// SMs of every GPU here.
pub(crate) const SMS: u32 = 40;

/// A fake predictor: speed by the names of the two workloads, times what the share gives.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) speeds: BTreeMap<(String, String), f32>,
    pub(crate) by_share: bool,
}

impl Table {
    pub(crate) fn new(rows: &[(&str, &str, f32)]) -> Self {
        let speeds =
            rows.iter().map(|(a, b, s)| (((*a).to_owned(), (*b).to_owned()), *s)).collect();
        Table { speeds, by_share: false }
    }
}

impl SpeedPredictor for Table {
    fn predict(&self, online: &OnlineInput, offline: &OfflineInput) -> SpeedPrediction {
        let key = (
            online.profile.workload.as_str().to_owned(),
            offline.profile.workload.as_str().to_owned(),
        );
        let mut speed = self.speeds.get(&key).copied().unwrap_or(0.0);
        if self.by_share {
            #[expect(clippy::cast_possible_truncation, reason = "a fraction")]
            let share = online.share.percent().fraction() as f32;
            speed *= share;
        }
        SpeedPrediction { speed, uncertainty: 0.0, provenance: Provenance::Seen }
    }

    fn prepare<'a>(
        &'a self,
        online: &'a [OnlineInput],
        offline: &'a [OfflineInput],
    ) -> Box<dyn PairSpeeds + 'a> {
        Box::new(Prepared { table: self, online, offline })
    }
}

struct Prepared<'a> {
    table: &'a Table,
    online: &'a [OnlineInput],
    offline: &'a [OfflineInput],
}

impl PairSpeeds for Prepared<'_> {
    fn fill(&self, row: usize, first_column: usize, out: &mut [f32]) {
        for (k, o) in out.iter_mut().enumerate() {
            *o = self.table.predict(&self.online[row], &self.offline[first_column + k]).speed;
        }
    }
}

pub(crate) fn gpu_type(name: &str) -> GpuType {
    GpuType::new(name).unwrap()
}

/// A Healthy T4 with a service that leaves half of it.
pub(crate) fn gpu(id: &str, service: &str) -> GpuSnapshot {
    let t4 = gpu_type("T4");
    GpuSnapshot {
        gpu: GpuId::new(id).unwrap(),
        node: NodeId::new("node").unwrap(),
        gpu_type: t4.clone(),
        sms: SmCount(SMS),
        memory: Bytes::from_gib(16),
        health: HealthState::Healthy,
        online: Some(OnlineSnapshot {
            service: ServiceId::new(service).unwrap(),
            profile: ProfileRecord::unknown(WorkloadName::new(service).unwrap(), t4),
            predicted_sm_activity: Percent::new(50.0).unwrap(),
            memory: Bytes::from_gib(6),
            critical: false,
            uid: None,
            in_mps: true,
        }),
        share: share(SMS / 2),
        quota: Bytes::from_gib(6),
        running: None,
        multi_user: false,
    }
}

pub(crate) fn share(sms: u32) -> SmShare {
    SmShare::new(SmCount(sms), SmCount(SMS)).unwrap()
}

/// A waiting job that asks for little.
pub(crate) fn job(id: &str, workload: &str) -> JobSnapshot {
    JobSnapshot {
        job: JobId::new(id).unwrap(),
        workload: WorkloadName::new(workload).unwrap(),
        profiles: BTreeMap::new(),
        solo_speed: BTreeMap::new(),
        memory: Bytes::from_gib(2),
        priority: 1,
        submitted_at: Micros::ZERO,
        waited: Micros::ZERO,
        running_on: None,
        running_share: None,
        gpu_types: Vec::new(),
        fail_prone: false,
        not_before: Micros::ZERO,
        pinned: false,
        uid: None,
    }
}

/// Puts job `j` on GPU `g`, with the share that the GPU offers now.
pub(crate) fn run(s: &mut ClusterSnapshot, j: usize, g: usize) {
    s.jobs[j].running_on = Some(s.gpus[g].gpu.clone());
    s.jobs[j].running_share = Some(s.gpus[g].share);
    s.gpus[g].running = Some(s.jobs[j].job.clone());
}

pub(crate) fn snapshot(gpus: Vec<GpuSnapshot>, jobs: Vec<JobSnapshot>) -> ClusterSnapshot {
    ClusterSnapshot { at: Micros::from_secs(10_000), reference_type: gpu_type("T4"), gpus, jobs }
}
