//! The limits of a manager, as its configuration sets them.

use muxflow_types::Micros;

/// What the manager is held to.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Open jobs that one user may have.
    pub jobs_per_user: Option<u64>,
    /// Bytes that these may take in the store, and in memory when a plan is made.
    pub queue_bytes_per_user: Option<u64>,
    /// A job that has ended is kept for so long.
    pub keep_jobs_for: Micros,
    /// And at most so many of those that have ended.
    pub keep_jobs: u64,
    /// Bytes that the submissions of one user's jobs may take that have ended.
    pub keep_bytes_per_user: u64,
    /// And the output of these.
    pub keep_output_bytes_per_user: u64,
    /// Plans are made and reported, and not carried out.
    pub shadow: bool,
    /// Readings kept for each GPU.
    pub history_points: usize,
    /// Time between two readings.
    pub history_step_ms: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            jobs_per_user: Some(10_000),
            queue_bytes_per_user: Some(128 << 20),
            keep_jobs_for: Micros::from_secs(30 * 24 * 3600),
            keep_jobs: 100_000,
            keep_bytes_per_user: 256 << 20,
            keep_output_bytes_per_user: 16 << 30,
            shadow: false,
            history_points: 900,
            history_step_ms: 1_000,
        }
    }
}
