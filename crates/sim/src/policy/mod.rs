//! Policies, one file each. All of them see the same snapshot and answer with the same kind of plan
//! as the real manager's; what differs is who is put where, how tenants share a GPU, and how large a
//! share is.

mod fifo;
mod muxflow;
mod muxflow_budget;
mod muxflow_m;
mod muxflow_packed;
mod muxflow_s;
mod muxflow_s_m;
mod online_only;
mod pb_time_sharing;
mod planned;
mod time_sharing;

use muxflow_gpu_model::Rng;
use muxflow_policy::node::quota::QuotaParams;
use muxflow_policy::node::share::ShareParams;
use muxflow_types::{ClusterPlan, ClusterSnapshot, Percent, SmCount, SmShare, SpeedPredictor};

use crate::error::SimError;
use crate::outcome::Mode;
use crate::scenario::Service;

/// One way to share a cluster.
pub trait Policy: Send {
    /// Its name on the command line and in tables.
    fn name(&self) -> &'static str;

    /// What it is, in a sentence.
    fn about(&self) -> &'static str;

    /// How tenants share a GPU.
    fn mode(&self) -> Mode;

    /// Whether the health machine watches each GPU, forbids placement and evicts.
    fn watched(&self) -> bool;

    /// At most so many jobs on one GPU.
    fn most_jobs(&self) -> usize {
        1
    }

    /// How much memory it lends.
    fn quota(&self) -> QuotaParams {
        QuotaParams::default()
    }

    /// Hears before each plan how much slower each service was since the last one (0.1 is 10 %):
    /// what its monitor measures against short windows with the gate closed.
    fn observe(&mut self, _services: &[Service], _slower: &[f64]) {}

    /// Where the gate holds the load beside a service, if not at the common set point.
    fn set_point(&self, _service: usize) -> Option<f64> {
        None
    }

    /// The share that a GPU lends, given what its service will need.
    fn share(&self, need: Percent, sms: SmCount, service: &Service) -> SmShare;

    /// What should hold next.
    fn plan(
        &mut self,
        snapshot: &ClusterSnapshot,
        predictor: &dyn SpeedPredictor,
    ) -> Result<ClusterPlan, String>;
}

/// Makes a policy from a seed.
type Make = fn(u64) -> Box<dyn Policy>;

/// All policies: name and maker. A new policy is a file and a line here.
const POLICIES: &[(&str, Make)] = &[
    ("online-only", |_| Box::new(online_only::OnlineOnly)),
    ("time-sharing", |_| Box::new(time_sharing::TimeSharing)),
    ("pb-time-sharing", |_| Box::new(pb_time_sharing::PriorityTimeSharing)),
    ("muxflow", |_| Box::new(muxflow::MuxFlow { matching: planned::Matching::new() })),
    ("muxflow-s", |_| Box::new(muxflow_s::MuxFlowS { matching: planned::Matching::new() })),
    ("muxflow-m", |seed| Box::new(muxflow_m::MuxFlowM { rng: Rng::fork(seed, 51) })),
    ("muxflow-s-m", |seed| Box::new(muxflow_s_m::MuxFlowSM { rng: Rng::fork(seed, 51) })),
    ("muxflow-threshold", |_| Box::new(muxflow_budget::MuxFlowBudget::strictest())),
    ("muxflow-budget", |_| Box::new(muxflow_budget::MuxFlowBudget::each())),
    ("muxflow-packed", |_| Box::new(muxflow_packed::MuxFlowPacked)),
];

/// MuxFlow, planning every GPU and every job one by one: what collapsing equal ones saves.
pub fn without_classes() -> Box<dyn Policy> {
    Box::new(muxflow::MuxFlow { matching: planned::Matching::without_classes() })
}

/// The names of all policies.
pub fn names() -> Vec<&'static str> {
    POLICIES.iter().map(|(name, _)| *name).collect()
}

/// The policy of this name.
pub fn by_name(name: &str, seed: u64) -> Result<Box<dyn Policy>, SimError> {
    POLICIES
        .iter()
        .find(|(n, _)| n.eq_ignore_ascii_case(name))
        .map(|(_, make)| make(seed))
        .ok_or_else(|| SimError::UnknownPolicy { name: name.to_owned(), known: names().join(", ") })
}

/// The share of the variants without dynamic SM allocation, in per cent, as in the paper.
const FIXED_PCT: f64 = 40.0;

/// The share that the real law lends beside a service with this need.
fn dynamic(need: Percent, sms: SmCount, allowed_slowdown: f64) -> SmShare {
    ShareParams { allowed_slowdown, ..ShareParams::default() }
        .share(need, sms)
        .unwrap_or_else(|_| part(sms, Percent::ZERO))
}

/// All of a GPU.
fn everything(sms: SmCount) -> SmShare {
    part(sms, Percent::FULL)
}

/// A part of a GPU, in whole SMs.
fn part(sms: SmCount, share: Percent) -> SmShare {
    SmShare::from_percent(share, sms)
        .or_else(|_| SmShare::new(SmCount(0), SmCount(1)))
        .unwrap_or_else(|_| unreachable!("0 of 1 SMs is a share"))
}
