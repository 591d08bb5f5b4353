//! What breaks, and what it does to the job and the service on a GPU.

use muxflow_gpu_model::{FaultKind, Sharing};
use muxflow_policy::node::health::{DisableReason, HealthEvent};

use crate::engine::{EPOCH_S, Engine, Event, micros};
use crate::number::index;

/// Repair of a device.
const REPAIR_S: f64 = 1800.0;

impl Engine<'_> {
    /// A stop by a signal: without a graceful exit it may take the service along.
    pub(crate) fn signal_stop(&mut self) {
        let propagates = self.scenario.pools[0].profile.faults.kill_propagates;
        let mps = self.policy.mode().sharing == Sharing::Mps;
        if mps && !self.scenario.graceful_exit && self.faults.uniform() < propagates {
            self.counts.propagated += 1;
            self.counts.propagated_by_signal += 1;
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
        let shared = self.gpus[g].running.is_some() && mps;
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
            self.counts.propagated += u64::from(kind != FaultKind::DeviceError);
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

    /// A job dies without a checkpoint: it loses work and must wait before it is tried again.
    pub(crate) fn kill(&mut self, g: usize) {
        let Some(r) = self.gpus[g].running else { return };
        self.stop(g, false);
        self.counts.fault_kills += 1;
        let now = micros(self.now_s());
        let job = &mut self.jobs[r.job];
        let lost = self.scenario.checkpoint_s * 0.5;
        job.left_s = (job.left_s + lost).min(job.duration_s);
        let until = job.failures.fail(now, &self.retry, self.scenario.seed ^ r.job as u64);
        job.not_before_s = until.as_secs_f64() - EPOCH_S;
    }

    pub(crate) fn repaired(&mut self, g: usize) {
        self.gpus[g].down = false;
        let now = micros(self.now_s());
        if let Some(h) = self.gpus[g].health.as_mut() {
            h.step(now, HealthEvent::Enable);
        }
    }
}
