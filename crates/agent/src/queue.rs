//! The jobs of an agent without a manager: a list that is worked through wherever there is room.
//!
//! The manager plans over many nodes and replaces this; here a job goes to the first GPU that may
//! take it, and one that failed waits as the laws say.

use std::collections::{BTreeMap, VecDeque};

use muxflow_policy::retry::{FailureHistory, RetryParams};
use muxflow_types::{JobId, Micros};

use crate::gpu::{GpuStatus, OfflineSpec};

#[derive(Debug)]
struct Waiting {
    spec: OfflineSpec,
    not_before: Micros,
    history: Option<FailureHistory>,
}

impl Waiting {
    fn fail(&mut self, now: Micros, retry: &RetryParams) {
        let name = self.spec.job.as_str().bytes();
        let seed = name.fold(0_u64, |sum, byte| sum.rotate_left(5) ^ u64::from(byte));
        let history = self.history.get_or_insert(FailureHistory::restore(0, now));
        self.not_before = history.fail(now, retry, seed);
    }
}

/// How a job left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// It is done.
    Finished,
    /// It was evicted and is not to blame: it may go on where there is room.
    Evicted,
    /// It failed by itself, or broke something: it waits.
    Failed,
    /// Its program or directory is not to be had: no other try would go better.
    GivenUp,
}

/// Jobs that wait and jobs that run.
#[derive(Debug)]
pub struct JobQueue {
    retry: RetryParams,
    waiting: VecDeque<Waiting>,
    running: BTreeMap<JobId, Waiting>,
    finished: usize,
    given_up: usize,
}

impl JobQueue {
    /// With these jobs, in this order.
    pub fn new(jobs: Vec<OfflineSpec>, retry: RetryParams) -> Self {
        let wait = |spec| Waiting { spec, not_before: Micros::ZERO, history: None };
        JobQueue {
            retry,
            waiting: jobs.into_iter().map(wait).collect(),
            running: BTreeMap::new(),
            finished: 0,
            given_up: 0,
        }
    }

    /// Leaves out the jobs that were done before, and says which.
    pub fn leave_out(&mut self, done: impl Fn(&OfflineSpec) -> bool) -> Vec<JobId> {
        let (out, stay): (VecDeque<_>, _) =
            std::mem::take(&mut self.waiting).into_iter().partition(|job| done(&job.spec));
        self.waiting = stay;
        self.finished += out.len();
        out.into_iter().map(|job| job.spec.job).collect()
    }

    /// A run of this job goes on from before: the next one begins after its end was told.
    pub fn hold(&mut self, job: &str) {
        let place = self.waiting.iter().position(|waiting| waiting.spec.job.as_str() == job);
        if let Some(held) = place.and_then(|place| self.waiting.remove(place)) {
            self.running.insert(held.spec.job.clone(), held);
        }
    }

    /// How many jobs could not be started at all.
    pub fn given_up(&self) -> usize {
        self.given_up
    }

    /// How many wait, run and are finished.
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.waiting.len(), self.running.len(), self.finished)
    }

    /// The next job for a GPU that may take one.
    pub fn next_for(&mut self, status: &GpuStatus, now: Micros) -> Option<OfflineSpec> {
        if !status.placeable || status.share.is_none() {
            return None;
        }
        let fits = |job: &Waiting| {
            job.not_before <= now && job.spec.quota.is_none_or(|quota| quota <= status.quota)
        };
        let index = self.waiting.iter().position(fits)?;
        let job = self.waiting.remove(index)?;
        let spec = job.spec.clone();
        self.running.insert(spec.job.clone(), job);
        Some(spec)
    }

    /// A job has left, or was refused. One that waits may have run under an earlier agent.
    pub fn left(&mut self, job: &JobId, how: Left, now: Micros) {
        let entry = self.running.remove(job).or_else(|| {
            let place = self.waiting.iter().position(|waiting| waiting.spec.job == *job)?;
            self.waiting.remove(place)
        });
        let Some(mut entry) = entry else { return };
        match how {
            Left::Finished => {
                self.finished += 1;
                return;
            }
            Left::GivenUp => {
                self.given_up += 1;
                return;
            }
            Left::Evicted => {}
            Left::Failed => entry.fail(now, &self.retry),
        }
        self.waiting.push_front(entry);
    }

    /// A job that has left is found to have broken something: it waits as one that failed.
    pub fn blame(&mut self, job: &JobId, now: Micros) {
        if let Some(entry) = self.waiting.iter_mut().find(|waiting| waiting.spec.job == *job) {
            entry.fail(now, &self.retry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::monitor::nvml::GpuFacts;
    use crate::stop::StopLimits;
    use muxflow_types::{Bytes, GpuType, SmCount, SmShare};

    fn job(name: &str, quota: Option<Bytes>) -> OfflineSpec {
        OfflineSpec {
            job: JobId::new(name).unwrap(),
            argv: vec!["true".into()],
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: crate::cgroup::Limits::default(),
            share: None,
            quota,
            stop: StopLimits::default(),
            not_after: None,
        }
    }

    fn room() -> GpuStatus {
        let facts = GpuFacts {
            uuid: "GPU-1".into(),
            gpu_type: GpuType::new("T4").unwrap(),
            name: "T4".into(),
            pci: "0000:01:00".into(),
            memory: Bytes::from_gib(15),
            highest_clock: None,
        };
        let share = SmShare::new(SmCount(20), SmCount(40)).ok();
        GpuStatus {
            placeable: true,
            share,
            quota: Bytes::from_gib(4),
            ..GpuStatus::unknown(&facts)
        }
    }

    #[test]
    fn jobs_go_where_they_fit_and_failed_ones_wait() {
        let jobs = vec![job("big", Some(Bytes::from_gib(8))), job("a", None), job("b", None)];
        let mut queue = JobQueue::new(jobs, RetryParams::default());
        let now = Micros::from_secs(100);
        let first = queue.next_for(&room(), now).unwrap();
        assert_eq!(first.job.as_str(), "a", "the big one does not fit here");
        let closed = GpuStatus { placeable: false, ..room() };
        assert!(queue.next_for(&closed, now).is_none());
        queue.left(&first.job, Left::Failed, now);
        assert_eq!(queue.next_for(&room(), now).unwrap().job.as_str(), "b", "a waits");
        let later = now.saturating_add(Micros::from_secs(60));
        let again = queue.next_for(&room(), later).unwrap();
        assert_eq!(again.job.as_str(), "a");
        queue.left(&again.job, Left::Evicted, later);
        assert_eq!(queue.next_for(&room(), later).unwrap().job.as_str(), "a", "at once");
        queue.left(&again.job, Left::Evicted, later);
        queue.blame(&again.job, later);
        assert!(queue.next_for(&room(), later).is_none(), "it broke something");
        let later = later.saturating_add(Micros::from_secs(3_600));
        assert_eq!(queue.next_for(&room(), later).unwrap().job.as_str(), "a");
        queue.left(&again.job, Left::Finished, later);
        assert_eq!(queue.counts(), (1, 1, 1));
        queue.left(&JobId::new("stranger").unwrap(), Left::Failed, later);
    }

    #[test]
    fn what_was_done_before_or_cannot_be_started_does_not_run() {
        let jobs = ["a", "b", "c", "d"].map(|name| job(name, None)).to_vec();
        let mut queue = JobQueue::new(jobs, RetryParams::default());
        let out = queue.leave_out(|spec| spec.job.as_str() == "a");
        assert_eq!(out, [JobId::new("a").unwrap()]);
        let now = Micros::from_secs(100);
        // Ended while no agent was there: that is told before it is started again.
        queue.left(&JobId::new("b").unwrap(), Left::Finished, now);
        // On its way out: it is not started beside itself.
        queue.hold("c");
        let next = queue.next_for(&room(), now).unwrap();
        assert_eq!(next.job.as_str(), "d");
        queue.left(&next.job, Left::GivenUp, now);
        assert!(queue.next_for(&room(), now).is_none());
        queue.left(&JobId::new("c").unwrap(), Left::Evicted, now);
        assert_eq!(queue.next_for(&room(), now).unwrap().job.as_str(), "c");
        assert_eq!((queue.counts(), queue.given_up()), ((0, 1, 2), 1));
    }

    #[test]
    fn work_is_known_by_what_runs_and_not_by_its_name() {
        let one = job("a", None);
        let same = OfflineSpec { quota: Some(Bytes::from_gib(1)), ..job("b", None) };
        assert_eq!(one.fingerprint(), same.fingerprint());
        let more = OfflineSpec { argv: vec!["true".into(), "2".into()], ..one.clone() };
        assert_ne!(one.fingerprint(), more.fingerprint());
        // Written into files: it must not change from one build to the next.
        assert_eq!(one.fingerprint(), 0xf38d_0ed0_52ac_8bca);
    }
}
