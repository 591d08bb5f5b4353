//! Which jobs were to blame for errors, remembered over a restart of the agent.
//!
//! One error can be bad luck. A job that is blamed again and again within the time after which
//! failures are forgotten counts as fail-prone, and critical services are kept from it. The numbers
//! are those of the laws for retries.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use muxflow_policy::retry::{FailureHistory, RetryParams};
use muxflow_types::{JobId, Micros};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::launch;

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Blamed {
    times: u32,
    /// Seconds since the epoch: the file outlives a boot.
    last_s: u64,
}

impl Blamed {
    fn history(self) -> FailureHistory {
        FailureHistory::restore(self.times, Micros::from_secs(self.last_s))
    }
}

/// The jobs of a node that were to blame.
#[derive(Debug)]
pub struct Blame {
    path: PathBuf,
    params: RetryParams,
    jobs: Mutex<BTreeMap<String, Blamed>>,
}

impl Blame {
    /// What the file says, and where further blame is kept.
    pub fn open(path: PathBuf, params: RetryParams) -> Result<Self> {
        let jobs = launch::read(&path)?.unwrap_or_default();
        Ok(Blame { path, params, jobs: Mutex::new(jobs) })
    }

    /// The job was to blame for an error.
    pub fn add(&self, job: &JobId) {
        self.add_at(job, launch::now_s());
    }

    fn add_at(&self, job: &JobId, now_s: u64) {
        let now = Micros::from_secs(now_s);
        let mut jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.retain(|_, blamed| blamed.history().failures(now, &self.params) > 0);
        let blamed = jobs.entry(job.as_str().to_owned()).or_insert(Blamed { times: 0, last_s: 0 });
        *blamed = Blamed { times: blamed.times.saturating_add(1), last_s: now_s };
        tracing::warn!(job = %job, times = blamed.times, "job is to blame");
        if let Err(error) = launch::write(&self.path, &*jobs) {
            tracing::warn!(error = %error, "a restart of the agent will forget who was to blame");
        }
    }

    /// Whether it was blamed so often of late that it counts as fail-prone.
    pub fn is_fail_prone(&self, job: &JobId) -> bool {
        self.is_fail_prone_at(job, launch::now_s())
    }

    fn is_fail_prone_at(&self, job: &JobId, now_s: u64) -> bool {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.get(job.as_str()).is_some_and(|blamed| {
            blamed.history().is_fail_prone(Micros::from_secs(now_s), &self.params)
        })
    }
}

impl Blame {
    /// The jobs that count as fail-prone now, each with how often it was to blame.
    pub fn fail_prone(&self) -> Vec<(String, u32)> {
        let now = Micros::from_secs(launch::now_s());
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        let prone = jobs.iter().filter(|(_, b)| b.history().is_fail_prone(now, &self.params));
        prone.map(|(job, blamed)| (job.clone(), blamed.times)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_culprits_are_marked_and_a_restart_does_not_forget_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blamed.json");
        let params = RetryParams::default();
        let (bad, once) = (JobId::new("bad").unwrap(), JobId::new("once").unwrap());
        let blame = Blame::open(path.clone(), params).unwrap();
        blame.add_at(&once, 1_000);
        for time in 0..3 {
            assert!(!blame.is_fail_prone_at(&bad, 1_000 + time), "after {time} times");
            blame.add_at(&bad, 1_000 + time);
        }
        assert!(blame.is_fail_prone_at(&bad, 1_010));
        drop(blame);
        let again = Blame::open(path.clone(), params).unwrap();
        assert!(again.is_fail_prone_at(&bad, 1_010));
        assert!(!again.is_fail_prone_at(&once, 1_010));
        let quiet = 1_010 + 7_200;
        assert!(!again.is_fail_prone_at(&bad, quiet), "forgotten");
        again.add_at(&once, quiet);
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("bad"), "the file does not grow for ever: {text}");
        std::fs::write(&path, "[").unwrap();
        assert!(Blame::open(path, params).unwrap_err().to_string().contains("blamed.json"));
    }
}
