//! GPUs, pairings, plans and the whole at a glance, as the HTTP API tells them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Whether the manager is there, and how it works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthView {
    /// `ok`.
    pub status: String,
    /// Version of the program.
    pub version: String,
    /// Offline work is held back by an operator.
    pub paused: bool,
    /// Plans are made and reported, and not carried out.
    pub shadow: bool,
    /// How long it has run.
    pub uptime_s: u64,
    /// Who the caller is taken for.
    pub user: String,
}

/// The service on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuService {
    /// Its name.
    pub service: String,
    /// Its process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Latency that it reports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<u64>,
    /// Jobs that have harmed their neighbours or failed often are kept away from it.
    #[serde(default)]
    pub critical: bool,
}

/// The job on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuJob {
    /// Its id.
    pub job: String,
    /// Kernels it has started.
    pub launches: u64,
    /// Kernels in flight.
    pub in_flight: u64,
    /// Device memory it holds.
    pub charged_bytes: u64,
    /// Time that its launches waited at the gate.
    pub delayed_us: u64,
}

/// One GPU as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuView {
    /// Its UUID.
    pub id: String,
    /// Its number on this machine.
    pub index: u32,
    /// Its type, as laws and predictors name it.
    pub gpu_type: String,
    /// What the driver calls it.
    pub name: String,
    /// How many SMs it has; 0 while nobody has asked it.
    pub sms: u32,
    /// Device memory in all.
    pub memory_bytes: u64,
    /// State of health: `Init`, `Healthy`, `Unhealthy`, `Overlimit`, `Disabled`.
    pub health: String,
    /// A new job may be placed.
    pub placeable: bool,
    /// Share that a job would get, in per cent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_pct: Option<f64>,
    /// Device memory that a job would get.
    pub quota_bytes: u64,
    /// The launch budget of offline work: 0 to 1.
    pub budget: f64,
    /// GPU load as the launch gate sees it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<f64>,
    /// The newest reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reading: Option<Reading>,
    /// The service.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub online: Option<GpuService>,
    /// The job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offline: Option<GpuJob>,
    /// Processes on it that are not under MPS and not ours: nothing is paired with them.
    pub outside_mps: Vec<u32>,
    /// How to bring them in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outside_mps_remedy: Option<String>,
    /// Stops of offline work, by reason.
    pub stops: BTreeMap<String, u64>,
    /// Errors seen, by name.
    pub faults: BTreeMap<String, u64>,
    /// How often MPS was started.
    pub mps_starts: u64,
    /// How often the service was restarted.
    pub online_restarts: u64,
}

/// What the sensors of a GPU said at one moment.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct Reading {
    /// When, in microseconds since 1970.
    pub at_us: u64,
    /// Share of time with a kernel running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_util_pct: Option<f64>,
    /// Share of SMs with work, everybody's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_activity_pct: Option<f64>,
    /// The service's part of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub online_sm_activity_pct: Option<f64>,
    /// Device memory in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
    /// SM clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<u32>,
    /// Power drawn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power_w: Option<f64>,
    /// Temperature.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature_c: Option<f64>,
    /// Latency that the service reports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<u64>,
    /// State of health.
    pub health: String,
    /// The launch budget of offline work.
    pub budget: f64,
    /// An offline job is on it.
    pub offline: bool,
}

/// All GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuList {
    /// In the order of the driver.
    pub items: Vec<GpuView>,
}

/// What a GPU went through, for charts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GpuHistory {
    /// Time between two points.
    pub step_ms: u64,
    /// Oldest first.
    pub points: Vec<Reading>,
}

/// One service and one job on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PairingView {
    /// Where.
    pub gpu: String,
    /// The service; none on a GPU without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service: Option<String>,
    /// The job.
    pub job: String,
    /// Share of the job, in per cent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_pct: Option<f64>,
    /// Speed predicted, against the job alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_speed: Option<f64>,
    /// Speed seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seen_speed: Option<f64>,
    /// Since when, in microseconds since 1970.
    pub since_us: u64,
}

/// All pairings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PairingList {
    /// In the order of the GPUs.
    pub items: Vec<PairingView>,
}

/// The last plan with everything that it was made from: `muxflow replay` makes it again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRecord {
    /// Of this form; 1.
    pub version: u32,
    /// When, in microseconds since 1970.
    pub at_us: u64,
    /// Why it was made: `interval` or what happened.
    pub cause: String,
    /// It was carried out.
    pub applied: bool,
    /// How long planning took.
    pub took_us: u64,
    /// What the lint found; a plan with findings is not carried out.
    pub findings: Vec<String>,
    /// Where the speeds come from, in words.
    pub speeds: String,
    /// Per cent of running jobs that it may disturb.
    pub max_disruption_pct: f64,
    /// Time between two plans that it reckoned with.
    pub interval_us: u64,
    /// What a restart was reckoned to cost.
    pub restart_cost_us: u64,
    /// The snapshot, as `muxflow plan` reads it.
    pub snapshot: String,
    /// The plan, as `muxflow plan --json` writes it.
    pub plan: String,
    /// Models in use, in base64, by GPU type.
    pub models: BTreeMap<String, String>,
}

/// The last plan without the models and texts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PlanView {
    /// There has been one.
    pub made: bool,
    /// When, in microseconds since 1970.
    pub at_us: u64,
    /// Why it was made.
    pub cause: String,
    /// It was carried out.
    pub applied: bool,
    /// How long planning took.
    pub took_us: u64,
    /// What the lint found.
    pub findings: Vec<String>,
    /// Where the speeds come from.
    pub speeds: String,
    /// The plan.
    #[schema(value_type = Object)]
    pub plan: serde_json::Value,
    /// The snapshot it was made from; only when asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub snapshot: Option<serde_json::Value>,
}

/// The whole at a glance.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct Summary {
    /// GPUs in all.
    pub gpus: u64,
    /// GPUs by state of health.
    pub gpus_by_health: BTreeMap<String, u64>,
    /// GPUs with a job.
    pub gpus_shared: u64,
    /// Jobs by state.
    pub jobs: BTreeMap<String, u64>,
    /// Mean over GPUs and the kept history: share of time with a kernel running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_util_pct: Option<f64>,
    /// The same over the moments without a job, a mean of each GPU's mean; GPUs with fewer than 30 such
    /// readings are left out, as nobody knows what they would be without sharing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_util_without_pct: Option<f64>,
    /// Mean SM activity.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_activity_pct: Option<f64>,
    /// Mean of the services' own part of it: what it would be without sharing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sm_activity_without_pct: Option<f64>,
    /// Time that jobs beside services would have needed alone, divided by the time they took.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oversold_gpu: Option<f64>,
    /// Seconds of running that this figure rests on.
    pub oversold_over_s: f64,
    /// Jobs taken off their GPUs to protect services since the manager started.
    pub evictions: u64,
    /// Errors on GPUs since the manager started.
    pub faults: u64,
    /// Seconds of history that the means are over.
    pub history_s: f64,
}

/// Whether offline work is held back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PauseView {
    /// It is.
    pub paused: bool,
    /// Jobs that are being stopped.
    pub stopping: u64,
}
