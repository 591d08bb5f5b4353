//! Traces: what jobs come when, and what requests a service gets.
//!
//! Files are read line by line with a bound on the length of a line and on the number of rows, so
//! that garbage of any size ends in an error with a line number and not in a full memory.

pub mod generate;
pub mod jobs;
mod lines;
mod philly_json;
pub mod requests;
mod when;

pub use generate::{GenerateJobs, generate_jobs, generate_requests};
pub use jobs::{JobRow, JobTrace, MultiGpu, read_jobs, write_jobs};
pub use requests::{RequestCurve, read_requests, write_requests};
