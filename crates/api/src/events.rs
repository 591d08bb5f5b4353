//! What happened, as a list and as a stream.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventView {
    /// Its number; they only grow.
    pub seq: u64,
    /// When, in microseconds since 1970.
    pub at_us: u64,
    /// `job`, `health`, `eviction`, `fault`, `alert`, `plan`, `service`, `operator`.
    pub kind: String,
    /// The GPU it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
    /// The job it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The service it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// In words.
    pub text: String,
}

/// A page of events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Oldest first.
    pub items: Vec<EventView>,
    /// Give this as `after` to read on.
    pub next: u64,
    /// There are more already.
    pub more: bool,
}
