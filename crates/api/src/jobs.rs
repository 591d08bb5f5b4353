//! Jobs on the wire: what is submitted, and what is seen of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A job as it is submitted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSubmit {
    /// A name for people; need not be unique.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 100)]
    pub name: Option<String>,
    /// Program and arguments.
    #[schema(min_items = 1, max_items = 4096)]
    pub command: Vec<String>,
    /// Variables it asks for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Where it runs: an absolute path.
    pub cwd: String,
    /// Device memory it needs; without it, what its profile says, or what the GPU lends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub memory_bytes: Option<u64>,
    /// 1 is normal; larger counts more.
    #[serde(default = "normal_priority")]
    #[schema(minimum = 1, maximum = 1000, default = 1)]
    pub priority: u32,
    /// Seconds from now in which it must have ended; later it is stopped and fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31_536_000)]
    pub deadline_s: Option<u64>,
    /// How it saves its state; without it the job is never moved by choice, and starts over when it
    /// had to be stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<Checkpoint>,
    /// How often it may fail and be tried again.
    #[serde(default)]
    #[schema(maximum = 100, default = 0)]
    pub retries: u32,
    /// Makes one job for each index, which is in `MUXFLOW_ARRAY_INDEX`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub array: Option<ArrayRange>,
    /// How many GPUs; only 1 can be had.
    #[serde(default = "one_gpu")]
    #[schema(minimum = 1, maximum = 1, default = 1)]
    pub gpus: u32,
    /// GPU types it may use, such as `T4`; empty means any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub gpu_types: Vec<String>,
    /// Processors it may use, such as `0-3,8`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 1024)]
    pub cpus: Option<String>,
    /// Host memory it may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub host_memory_bytes: Option<u64>,
}

/// The priority of a job that asks for none.
pub fn normal_priority() -> u32 {
    1
}

/// One GPU per job.
pub fn one_gpu() -> u32 {
    1
}

/// How a job saves its state when it must leave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// Told to the job in `MUXFLOW_CHECKPOINT_DIR`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dir: Option<String>,
    /// The signal that asks it to save and leave, such as `TERM` or `USR1`.
    #[serde(default = "term")]
    #[schema(default = "TERM")]
    pub signal: String,
    /// How long that may take.
    #[serde(default = "checkpoint_window_s")]
    #[schema(minimum = 1, maximum = 3600, default = 10)]
    pub window_s: u64,
}

fn term() -> String {
    "TERM".to_owned()
}

fn checkpoint_window_s() -> u64 {
    10
}

/// Indices of an array of jobs, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrayRange {
    /// The first.
    #[schema(maximum = 1_000_000)]
    pub first: u32,
    /// The last.
    #[schema(maximum = 1_000_000)]
    pub last: u32,
}

/// Where a job is in its life.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// Taken in, nothing done yet.
    Submitted,
    /// Measured on an idle GPU.
    Profiling,
    /// Waits for a GPU.
    Queued,
    /// On a GPU.
    Running,
    /// Told to save its state and leave its GPU.
    Checkpointing,
    /// Ended well.
    Done,
    /// Ended badly, for good.
    Failed,
    /// Ended because somebody asked.
    Cancelled,
}

impl JobState {
    /// All of them, in the order of a life.
    pub const ALL: [JobState; 8] = [
        JobState::Submitted,
        JobState::Profiling,
        JobState::Queued,
        JobState::Running,
        JobState::Checkpointing,
        JobState::Done,
        JobState::Failed,
        JobState::Cancelled,
    ];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Submitted => "submitted",
            JobState::Profiling => "profiling",
            JobState::Queued => "queued",
            JobState::Running => "running",
            JobState::Checkpointing => "checkpointing",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }

    /// Reads the word that [`JobState::as_str`] writes.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == text)
    }

    /// Nothing comes after it.
    pub fn is_final(self) -> bool {
        matches!(self, JobState::Done | JobState::Failed | JobState::Cancelled)
    }

    /// It has, or may have, a process.
    pub fn holds_gpu(self) -> bool {
        matches!(self, JobState::Profiling | JobState::Running | JobState::Checkpointing)
    }
}

impl std::fmt::Display for JobState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.as_str())
    }
}

/// What a submission made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Submitted {
    /// The id of the job, or of the array.
    pub id: String,
    /// The ids of all jobs made: one, or one per index.
    pub jobs: Vec<String>,
}

/// A job as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobView {
    /// Its id.
    pub id: String,
    /// Its name, when it was given one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The array it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub array: Option<String>,
    /// Whose it is.
    pub user: String,
    /// Whose it is, as a number.
    pub uid: u32,
    /// Where it is in its life.
    pub state: JobState,
    /// Somebody has asked for its end and it is on its way out.
    pub cancelling: bool,
    /// Why it waits, or how it ended.
    pub reason: String,
    /// The GPU it is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// How often it was started.
    pub run: u64,
    /// What runs, as far as profiles are concerned.
    pub workload: String,
    /// What was submitted.
    pub submit: JobSubmit,
    /// When it came, in microseconds since 1970.
    pub submitted_us: u64,
    /// When its state last changed.
    pub changed_us: u64,
    /// When it was first started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_us: Option<u64>,
    /// When it ended for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_us: Option<u64>,
    /// When it must have ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_us: Option<u64>,
    /// How long it has waited in all.
    pub waited_us: u64,
    /// How often it failed.
    pub failures: u32,
    /// It has harmed its neighbours or failed often, and is kept from critical services.
    pub fail_prone: bool,
    /// Not to be started before this, after failures.
    pub not_before_us: u64,
    /// Share of the SMs it runs with, in per cent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_pct: Option<f64>,
    /// The cap on its device memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// Speed predicted when it was placed, against its speed alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_speed: Option<f64>,
    /// Speed seen where it is, against its speed alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_speed: Option<f64>,
    /// Iterations per second seen where it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iterations_per_s: Option<f64>,
    /// Exit code of its last run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// Signal that ended its last run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_signal: Option<i32>,
}

/// One start of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunView {
    /// Its number, from 1.
    pub run: u64,
    /// Where.
    pub gpu: String,
    /// `profile` or `work`.
    pub purpose: String,
    /// When it was ordered.
    pub started_us: u64,
    /// When it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_us: Option<u64>,
    /// How it ended, in words.
    pub outcome: String,
    /// Speed predicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_speed: Option<f64>,
    /// Speed seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_speed: Option<f64>,
}

/// A GPU that could hold a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CandidateView {
    /// Which.
    pub gpu: String,
    /// The share it would get, in per cent.
    pub share_pct: f64,
    /// Speed predicted there.
    pub predicted_speed: f64,
    /// One standard deviation of that.
    pub uncertainty: f64,
    /// The job that the plan gives it to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given_to: Option<String>,
}

/// A job with its past and the planner's view of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobDetail {
    /// The job.
    pub job: JobView,
    /// Its starts, oldest first; the last hundred.
    pub runs: Vec<RunView>,
    /// GPUs that could hold it, best first; at most ten.
    pub candidates: Vec<CandidateView>,
    /// Why other GPUs refuse it, with how many do.
    pub refusals: BTreeMap<String, u64>,
}

/// A page of jobs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct JobList {
    /// The jobs, newest first.
    pub items: Vec<JobView>,
    /// Give this as `before` for the next page; none when this is the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<u64>,
}

/// A piece of a job's output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogPiece {
    /// Where it begins, counted from the first byte that the job ever wrote; later than was asked for
    /// where what came before is no longer kept.
    pub offset: u64,
    /// Where to read on.
    pub next_offset: u64,
    /// The output; bytes that are no UTF-8 are replaced.
    pub text: String,
    /// The job has ended and this is the end of its output.
    pub end: bool,
}

/// What a cancellation came to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Cancelled {
    /// Jobs whose end was asked for now.
    pub jobs: Vec<String>,
}
