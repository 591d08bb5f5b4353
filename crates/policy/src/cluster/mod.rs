//! The decisions over the whole cluster: which offline job shares which GPU (Algorithm 1 of the
//! paper, and what a real cluster needs beyond it).
//!
//! A [`ClusterSnapshot`](muxflow_types::ClusterSnapshot) goes in, a
//! [`ClusterPlan`](muxflow_types::ClusterPlan) comes out; nothing else is looked at. The stages are
//! one file each: [`fit`] says whether a job may be on a GPU at all, `classes` collapses equal GPUs
//! and equal jobs, `speeds` keeps what was predicted, `weights` gives every pair its
//! worth, [`planner`] solves and writes the plan,
//! [`mod@lint`] checks a plan against its snapshot without trusting the planner, and [`mod@explain`] answers
//! why a job is where it is. [`pack`] and `packed` plan with several
//! jobs on one GPU, without a proof.

mod classes;
pub mod explain;
pub mod fit;
pub mod lint;
pub mod pack;
mod packed;
pub mod parameters;
pub mod planner;
mod speeds;
mod weights;

pub use explain::{Explanation, explain};
pub use lint::{Finding, lint};
pub use packed::plan_packed;
pub use parameters::{ParameterError, Parameters};
pub use planner::{Memory, PlanError, Planner};
