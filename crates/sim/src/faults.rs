//! What breaks, and what it does to the job and the service on a GPU.

use muxflow_gpu_model::{FaultKind, Sharing};
use muxflow_policy::node::health::{DisableReason, HealthEvent};

use crate::engine::{EPOCH_S, Engine, Event, micros};
use crate::number::index;
use crate::world::REPLICA_CLASSES;

/// Repair of a device.
const REPAIR_S: f64 = 1800.0;

impl Engine<'_> {
    /// A stop by a signal: without a graceful exit it may take the service along.
    pub(crate) fn signal_stop(&mut self, g: usize) {
        let propagates = self.scenario.pools[0].profile.faults.kill_propagates;
        let mps = self.policy.mode().sharing == Sharing::Mps;
        if mps && !self.scenario.graceful_exit && self.faults.uniform() < propagates {
            self.propagate(g, true);
        }
    }

    /// An error reaches the service of a GPU: it is away while it restarts.
    pub(crate) fn propagate(&mut self, g: usize, by_signal: bool) {
        let now = self.now_s();
        if now > self.scenario.horizon_s {
            return;
        }
        let service = &self.scenario.services[self.gpus[g].service];
        let rate = service.curve.at(now) * REPLICA_CLASSES[self.gpus[g].class];
        let lost = index((rate * self.scenario.outage_s).round()) as u64;
        self.counts.propagated += 1;
        self.counts.propagated_by_signal += u64::from(by_signal);
        self.counts.lost_requests += lost;
        if service.critical {
            self.counts.propagated_to_critical += 1;
            self.counts.lost_critical += lost;
        }
    }

    pub(crate) fn schedule_fault(&mut self, g: usize) {
        let rates = self.scenario.pools[self.gpus[g].pool].profile.faults;
        if let Some((wait, _)) = rates.next(true, &mut self.faults) {
            self.queue.push(self.now_s() + wait, Event::Fault(g));
        }
    }

    pub(crate) fn fault(&mut self, g: usize) {
        let rates = self.scenario.pools[self.gpus[g].pool].profile.faults;
        let kind = rates.next(true, &mut self.faults).map_or(FaultKind::DeviceError, |f| f.1);
        let mps = self.policy.mode().sharing == Sharing::Mps;
        let shared = !self.gpus[g].running.is_empty() && mps;
        self.schedule_fault(g);
        if kind != FaultKind::DeviceError && !shared {
            return;
        }
        if self.now_s() <= self.scenario.horizon_s {
            let day = u64::try_from(index(self.now_s() / 86_400.0)).unwrap_or(0);
            if self.gpus[g].error_day != Some(day) {
                self.gpus[g].error_day = Some(day);
                self.counts.error_devices += 1;
                self.counts.device_errors += u64::from(kind == FaultKind::DeviceError);
            }
        }
        if kind != FaultKind::DeviceError {
            self.propagate(g, false);
        }
        self.kill(g);
        if kind == FaultKind::DeviceError {
            self.gpus[g].down = true;
            let now = micros(self.now_s());
            if let Some(h) = self.gpus[g].health.as_mut() {
                let reason = DisableReason::Operator;
                h.step(now, HealthEvent::Disable(reason));
            }
            self.queue.push(self.now_s() + REPAIR_S, Event::Repaired(g));
        }
    }

    /// All jobs of a GPU die without a checkpoint: they lose work and must wait before they are
    /// tried again.
    pub(crate) fn kill(&mut self, g: usize) {
        for slot in (0..self.gpus[g].running.len()).rev() {
            let j = self.gpus[g].running[slot].job;
            self.stop(g, slot, false);
            self.counts.fault_kills += 1;
            let now = micros(self.now_s());
            let job = &mut self.jobs[j];
            let lost = self.scenario.checkpoint_s * 0.5;
            job.left_s = (job.left_s + lost).min(job.duration_s);
            let was = job.failures.is_fail_prone(now, &self.retry);
            let until = job.failures.fail(now, &self.retry, self.scenario.seed ^ j as u64);
            job.not_before_s = until.as_secs_f64() - EPOCH_S;
            let is = job.failures.is_fail_prone(now, &self.retry);
            self.counts.marked += u64::from(is && !was && self.scenario.mark_fail_prone);
        }
    }

    pub(crate) fn repaired(&mut self, g: usize) {
        self.gpus[g].down = false;
        let now = micros(self.now_s());
        if let Some(h) = self.gpus[g].health.as_mut() {
            h.step(now, HealthEvent::Enable);
        }
    }
}
