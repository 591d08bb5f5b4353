//! The cluster as the policies see it: what monitors, profilers and queues would tell the manager.

use muxflow_types::{
    ClusterSnapshot, GpuSnapshot, GpuType, HealthState, JobSnapshot, Micros, OnlineSnapshot,
    ServiceId,
};

use crate::engine::{Engine, micros};
use crate::error::SimError;
use crate::world::Stage;

impl Engine<'_> {
    pub(crate) fn snapshot(&mut self) -> Result<ClusterSnapshot, SimError> {
        let at_s = self.now_s();
        let value = |what, reason: muxflow_types::IdError| SimError::Value {
            what,
            reason: reason.to_string(),
        };
        let jobs = &self.jobs;
        self.active.retain(|&j| matches!(jobs[j].stage, Stage::Waiting | Stage::Running(_)));
        let rates = self.replica_rates(at_s);
        self.profiles.refresh(self.scenario, &rates);
        let services = self
            .scenario
            .services
            .iter()
            .map(|s| ServiceId::new(&s.name).map_err(|e| value("a service id", e)))
            .collect::<Result<Vec<_>, _>>()?;
        let gpus = (0..self.gpus.len()).map(|g| self.gpu_snapshot(g, at_s, &services)).collect();
        let jobs = self.active.iter().map(|&j| self.job_snapshot(j, at_s)).collect();
        let reference_type = GpuType::new(muxflow_gpu_model::shape::REFERENCE)
            .map_err(|e| value("the reference type", e))?;
        Ok(ClusterSnapshot { at: micros(at_s), reference_type, gpus, jobs })
    }

    fn gpu_snapshot(&self, g: usize, at_s: f64, services: &[ServiceId]) -> GpuSnapshot {
        let gpu = &self.gpus[g];
        let pool = &self.scenario.pools[gpu.pool].profile;
        let service = &self.scenario.services[gpu.service];
        let need = self.forecasts.need(gpu.pool, gpu.service, gpu.class, at_s);
        let health = match self.health(g) {
            Some(h) => h.state(),
            None if gpu.down => HealthState::Disabled,
            None => HealthState::Healthy,
        };
        let memory = service.shape.memory;
        GpuSnapshot {
            gpu: gpu.id.clone(),
            node: gpu.node.clone(),
            gpu_type: pool.gpu_type.clone(),
            sms: pool.sm_count(),
            memory: pool.memory,
            health,
            online: Some(OnlineSnapshot {
                service: services[gpu.service].clone(),
                profile: self.profiles.services[gpu.pool][gpu.service][gpu.class].clone(),
                predicted_sm_activity: need,
                memory,
                critical: service.critical,
                uid: None,
                in_mps: true,
            }),
            share: self.policy.share(need, pool.sm_count(), service),
            quota: self.policy.quota().beside(pool.memory, memory),
            running: gpu.running.first().map(|r| self.jobs[r.job].id.clone()),
            multi_user: true,
        }
    }

    fn job_snapshot(&self, j: usize, at_s: f64) -> JobSnapshot {
        let job = &self.jobs[j];
        let on = match job.stage {
            Stage::Running(g) => Some(g),
            _ => None,
        };
        let shape = &self.workloads.shapes[job.workload];
        JobSnapshot {
            job: job.id.clone(),
            workload: shape.name.clone(),
            profiles: self.profiles.workloads[job.workload].clone(),
            solo_speed: self.profiles.solo[job.workload].clone(),
            memory: shape.memory,
            priority: 1,
            submitted_at: micros(job.submit_s),
            waited: Micros::from_secs_f64(
                job.waited_s + if on.is_none() { at_s - job.since_s } else { 0.0 },
            )
            .unwrap_or(Micros::ZERO),
            running_on: on.map(|g| self.gpus[g].id.clone()),
            running_share: on
                .and_then(|g| self.gpus[g].running.iter().find(|r| r.job == j))
                .map(|r| r.share),
            gpu_types: Vec::new(),
            fail_prone: self.scenario.mark_fail_prone
                && job.failures.is_fail_prone(micros(at_s), &self.retry),
            not_before: micros(job.not_before_s.max(0.0).min(at_s + 1e7)),
            pinned: false,
            uid: None,
        }
    }
}
