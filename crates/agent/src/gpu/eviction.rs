//! How a job is made to leave for the GPU's health: the fast loop asks, the slow loop carries it out.
//!
//! A shut gate protects the service from everything but memory that the job holds. Where the service
//! waits for that, the fast loop signals the keeper itself, and the job gets hardly any time to save
//! its state.

use std::sync::atomic::Ordering;
use std::time::Duration;

use muxflow_types::{HealthState, JobId};

use super::supervisor::Supervisor;
use super::{ActiveJob, Order, StopReason};
use crate::breaker::{Ground, Verdict};
use crate::marks::Mark;
use crate::monitor;
use crate::stop::HASTENED_MS;

/// The order with which the slow loop has the job leave, when it is to be told now.
///
/// Somebody who was asked to leave, or does so slowly, is told once more when only that helps. A job
/// that an earlier agent left to its keeper is known to the slow loop alone.
pub(super) fn ask(
    ground: Ground,
    state: HealthState,
    job: Option<&ActiveJob>,
    insisted: &mut Option<(Option<JobId>, Ground)>,
) -> Option<Order> {
    let about = Some((job.map(|job| job.job.clone()), ground));
    let insists = ground != Ground::Readings && *insisted != about;
    let stopping = job.is_none_or(|job| job.stopping.load(Ordering::Acquire));
    let asks = !stopping && job.is_some_and(|job| !job.evict_asked.swap(true, Ordering::AcqRel));
    if !asks && !insists {
        return None;
    }
    *insisted = about.filter(|_| ground != Ground::Readings);
    let cause = format!("GPU is {state}");
    // The slow loop may be busy for seconds.
    if let Some(job) = job {
        if ground == Ground::Memory {
            job.hasten();
        }
        if ground != Ground::Readings && !stopping {
            job.ask_to_leave(&cause);
        }
    }
    Some(Order::Evict { cause, ground })
}

impl Supervisor {
    /// Whoever is on the GPU must leave, unless too many leave at once.
    pub(super) fn evict(&mut self, cause: String, ground: Ground) {
        let offline = self.offline.as_ref().map(|offline| &offline.job);
        let Some(job) = offline.or_else(|| self.guest.as_ref().map(|guest| &guest.job)) else {
            return;
        };
        let verdict = {
            let mut breaker = self.node.breaker();
            if breaker.is_open() && Mark::SensorsAreRight.take(&self.node.state_dir) {
                tracing::warn!("somebody says that the sensors are right: evictions go on");
                breaker.believe(monitor::now());
            }
            breaker.ask(monitor::now(), ground, job)
        };
        match verdict {
            // A shut gate gives no memory back: the guest lets go of the GPU here and now, whether
            // or not somebody outside agrees that it leaves.
            Verdict::Evict if self.guest.is_some() && ground != Ground::Readings => {
                let reason = StopReason::Health(cause);
                match ground {
                    Ground::Memory => self.stop_guest_within(None, &reason, HASTENED_MS),
                    _ => self.stop_guest(None, &reason),
                }
            }
            Verdict::Evict if self.wish_guest_away(&cause) => {}
            Verdict::Evict => {
                if let Some(offline) = self.offline.as_mut().filter(|_| ground == Ground::Memory) {
                    offline.running.hasten();
                }
                self.begin_stop(StopReason::Health(cause));
            }
            Verdict::Hold { opened } => {
                let job = self.shared.job();
                if job.as_ref().is_some_and(|job| !job.held.swap(true, Ordering::Relaxed)) {
                    self.shared.status().held += 1;
                }
                if opened {
                    self.alert(format!(
                        "too many evictions at once, the last because {cause}: sensors may lie. Jobs are held at their gates until this calms down; if they tell the truth, say so: `muxflow node sensors-are-right`"
                    ));
                }
                // Ask again later; the gate is shut meanwhile.
                if let Some(job) = job {
                    job.evict_asked.store(false, Ordering::Release);
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}
