//! Jobs on GPUs: how they come, make progress, leave and break.

use muxflow_types::SmShare;

use crate::engine::{Engine, Event};
use crate::outcome::{MOST_JOBS, OutcomeKey, rate_step, set_point_step};
use crate::world::{REPLICA_CLASSES, Running, Stage};

/// Whose presence on a GPU is asked about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Who {
    /// The service alone.
    Nobody,
    /// The service and the jobs that make progress.
    Ready,
    /// The service and all jobs, those that still start included.
    All,
}

impl Engine<'_> {
    pub(crate) fn key(&self, g: usize, step: u32, who: Who) -> OutcomeKey {
        let gpu = &self.gpus[g];
        let now = self.now_s();
        let mut jobs = [None; MOST_JOBS];
        let here = gpu.running.iter().filter(|r| match who {
            Who::Nobody => false,
            Who::Ready => r.ready_s <= now,
            Who::All => true,
        });
        for (place, r) in jobs.iter_mut().zip(here) {
            *place = Some((self.jobs[r.job].workload, r.share.sms().0));
        }
        let set_point = if jobs[0].is_none() {
            0
        } else {
            self.policy.set_point(gpu.service).map_or(0, set_point_step)
        };
        let (pool, service) = (gpu.pool, gpu.service);
        OutcomeKey { pool, service, rate_step: step, jobs, set_point }
    }

    /// The request rate of a GPU's replica now.
    fn rate_now(&self, g: usize) -> u32 {
        let gpu = &self.gpus[g];
        let rate = self.scenario.services[gpu.service].curve.at(self.now_s());
        rate_step(rate * REPLICA_CLASSES[gpu.class])
    }

    /// Accounts for what the jobs did, then takes the new truth of this GPU.
    pub(crate) fn refresh(&mut self, g: usize, step: u32) {
        let now = self.now_s();
        self.settle(g);
        let outcome = self.outcomes.get(self.key(g, step, Who::Ready));
        self.gpus[g].outcome = outcome;
        if self.gpus[g].running.is_empty() {
            return;
        }
        // A job that becomes ready before the next tick gets the speed of the moment it is ready.
        let all = self.outcomes.get(self.key(g, step, Who::All));
        let pool = self.gpus[g].pool;
        let mut running = std::mem::take(&mut self.gpus[g].running);
        let mut ready = 0;
        for (slot, r) in running.iter_mut().enumerate() {
            let speed = if r.ready_s > now {
                all.speeds[slot]
            } else {
                ready += 1;
                outcome.speeds[ready - 1]
            };
            let job = &self.jobs[r.job];
            r.rate = speed * self.workloads.solo[pool][job.workload];
            let goal = job.left_s - job.cancel_at_left_s.min(job.left_s);
            if r.rate > 0.0 {
                let end = r.ready_s.max(now) + goal / r.rate;
                if end <= now + self.scenario.tick_s {
                    self.queue.push(end, Event::Done { gpu: g, stay: r.stay });
                }
            }
        }
        self.gpus[g].running = running;
    }

    /// Progress up to now at the rates that held.
    pub(crate) fn settle(&mut self, g: usize) {
        let now = self.now_s();
        let gpu = &mut self.gpus[g];
        for r in &mut gpu.running {
            let from = r.settled_s.max(r.ready_s);
            let worked = (now - from).max(0.0) * r.rate;
            let job = &mut self.jobs[r.job];
            let worked = worked.min(job.left_s);
            job.left_s -= worked;
            job.separate_s += worked / self.workloads.solo[gpu.pool][job.workload];
            job.real_s += (now - r.settled_s).max(0.0);
            r.settled_s = now;
        }
    }

    fn slot_of(&self, g: usize, stay: u32) -> Option<usize> {
        self.gpus[g].running.iter().position(|r| r.stay == stay)
    }

    /// A job reached its end, or the point where its user cancels it.
    pub(crate) fn done(&mut self, g: usize, stay: u32) {
        let Some(slot) = self.slot_of(g, stay) else { return };
        self.settle(g);
        let r = self.gpus[g].running[slot];
        let job = &self.jobs[r.job];
        let cancelled = job.cancel_at_left_s > 0.0;
        if job.left_s > job.cancel_at_left_s + 1e-3 {
            return;
        }
        self.gpus[g].running.remove(slot);
        let now = self.now_s();
        let job = &mut self.jobs[r.job];
        job.end_s = Some(now);
        job.stage = if cancelled { Stage::Cancelled } else { Stage::Done };
        self.open -= 1;
        self.present -= 1;
        if cancelled {
            self.signal_stop(g);
        }
        self.refresh(g, self.rate_now(g));
    }

    /// Takes one job off a GPU; it waits again.
    pub(crate) fn stop(&mut self, g: usize, slot: usize, against_its_will: bool) {
        self.settle(g);
        let now = self.now_s();
        let r = self.gpus[g].running.remove(slot);
        let job = &mut self.jobs[r.job];
        job.stage = Stage::Waiting;
        job.since_s = now;
        job.evictions += u32::from(against_its_will);
        if against_its_will {
            self.signal_stop(g);
        }
        self.refresh(g, self.rate_now(g));
    }

    /// Takes this job off a GPU, if it is there.
    pub(crate) fn stop_job(&mut self, g: usize, j: usize) {
        if let Some(slot) = self.gpus[g].running.iter().position(|r| r.job == j) {
            self.stop(g, slot, false);
        }
    }

    pub(crate) fn start(&mut self, g: usize, j: usize, share: SmShare) {
        let now = self.now_s();
        let ready_s = now + self.scenario.restart_s;
        let gpu = &mut self.gpus[g];
        gpu.stays += 1;
        let stay = gpu.stays;
        gpu.running.push(Running { job: j, share, ready_s, settled_s: now, rate: 0.0, stay });
        let job = &mut self.jobs[j];
        job.waited_s += now - job.since_s;
        job.stage = Stage::Running(g);
        job.start_s.get_or_insert(now);
        self.counts.executions += 1;
        if job.breaks {
            let wait = self.faults.exponential(self.scenario.breaks_after_s);
            self.queue.push(ready_s + wait, Event::Breaks { gpu: g, stay });
        }
        self.refresh(g, self.rate_now(g));
    }

    /// A job that is prone to it breaks, and takes its neighbours along.
    pub(crate) fn breaks(&mut self, g: usize, stay: u32) {
        if self.slot_of(g, stay).is_none() {
            return;
        }
        self.propagate(g, false);
        self.kill(g);
    }
}
