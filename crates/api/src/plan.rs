//! A plan as JSON, version 1.

use muxflow_types::{Change, ClusterPlan, EvictionReason};
use serde::Serialize;

/// The version that this program writes.
pub const VERSION: u32 = 1;

#[derive(Debug, Serialize)]
struct WirePlan<'a> {
    version: u32,
    at_us: u64,
    certified: bool,
    total_weight: f64,
    assignments: Vec<WireAssignment<'a>>,
    evictions: Vec<WireEviction<'a>>,
    waiting: Vec<WireWaiting<'a>>,
}

#[derive(Debug, Serialize)]
struct WireAssignment<'a> {
    job: &'a str,
    gpu: &'a str,
    share_sms: u32,
    share_pct: f64,
    quota_bytes: u64,
    predicted_speed: f32,
    weight: f32,
    change: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<&'a str>,
}

#[derive(Debug, Serialize)]
struct WireEviction<'a> {
    job: &'a str,
    gpu: &'a str,
    reason: String,
}

#[derive(Debug, Serialize)]
struct WireWaiting<'a> {
    job: &'a str,
    reason: String,
}

/// The word for a change in tables and JSON.
pub fn change_word(change: &Change) -> &'static str {
    match change {
        Change::Start => "start",
        Change::Stay => "stay",
        Change::Restart => "restart",
        Change::Move { .. } => "move",
    }
}

/// Why a job is taken off its GPU, in words.
pub fn eviction_words(reason: &EvictionReason) -> String {
    match reason {
        EvictionReason::Health => "the GPU's health does not let offline work run".to_owned(),
        EvictionReason::GpuGone => "the GPU is no longer there".to_owned(),
        EvictionReason::NoLongerFits(why) => format!("it no longer fits: {why}"),
        EvictionReason::Displaced => "a job that counts more takes the place".to_owned(),
    }
}

/// Writes a plan.
pub fn render(plan: &ClusterPlan) -> String {
    let wire = WirePlan {
        version: VERSION,
        at_us: plan.at.0,
        certified: plan.certified,
        total_weight: plan.total_weight,
        assignments: plan
            .assignments
            .iter()
            .map(|a| WireAssignment {
                job: a.job.as_str(),
                gpu: a.gpu.as_str(),
                share_sms: a.share.sms().0,
                share_pct: a.share.percent().value(),
                quota_bytes: a.quota.0,
                predicted_speed: a.predicted_speed,
                weight: a.weight,
                change: change_word(&a.change),
                from: match &a.change {
                    Change::Move { from } => Some(from.as_str()),
                    _ => None,
                },
            })
            .collect(),
        evictions: plan
            .evictions
            .iter()
            .map(|e| WireEviction {
                job: e.job.as_str(),
                gpu: e.gpu.as_str(),
                reason: eviction_words(&e.reason),
            })
            .collect(),
        waiting: plan
            .waiting
            .iter()
            .map(|w| WireWaiting { job: w.job.as_str(), reason: w.reason.to_string() })
            .collect(),
    };
    serde_json::to_string_pretty(&wire).unwrap_or_default()
}
