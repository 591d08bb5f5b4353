//! The custom resources: one object per GPU, one per profile, and one per trained model.
//!
//! Each object has one writer. The agent of a node writes its GPUs; the scheduler only reads them, and
//! says what it decided on the pods. So no two programs fight over one object, and every replica of
//! the scheduler sees the same.

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Memory is lent in whole steps: GPUs that differ by a few bytes are planned as one kind, and a few
/// bytes more or less are not worth a write.
pub(crate) const MEMORY_STEP: u64 = 256 << 20;

/// The least and the greatest speed of a profile.
pub(crate) const MIN_SOLO_SPEED: f64 = 0.001;
pub(crate) const MAX_SOLO_SPEED: f64 = 1000.0;

/// One physical GPU. Its name is the UUID in lower case.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "muxflow.dev",
    version = "v1alpha1",
    kind = "Gpu",
    plural = "gpus",
    status = "GpuStatus",
    category = "muxflow",
    printcolumn = r#"{"name":"Node","type":"string","jsonPath":".spec.node"}"#,
    printcolumn = r#"{"name":"Type","type":"string","jsonPath":".spec.gpuType"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.state"}"#,
    printcolumn = r#"{"name":"Service","type":"string","jsonPath":".status.online.service"}"#,
    printcolumn = r#"{"name":"Job","type":"string","jsonPath":".status.job"}"#,
    printcolumn = r#"{"name":"Lent SMs","type":"integer","jsonPath":".status.shareSms"}"#,
    printcolumn = r#"{"name":"SM %","type":"number","jsonPath":".status.sample.smActivityPct"}"#,
    printcolumn = r#"{"name":"Quota","type":"integer","jsonPath":".status.quotaBytes","priority":1}"#,
    printcolumn = r#"{"name":"Why","type":"string","jsonPath":".status.reason","priority":1}"#,
    printcolumn = r#"{"name":"Seen","type":"date","jsonPath":".status.observedAt"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct GpuSpec {
    /// As the driver tells it.
    pub uuid: String,
    /// The name of the Node object.
    pub node: String,
    /// Such as `T4`.
    pub gpu_type: String,
    /// Streaming multiprocessors.
    #[schemars(range(min = 1))]
    pub sms: u32,
    /// Device memory.
    pub memory_bytes: u64,
}

/// The five states of a GPU's health.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum State {
    /// Not yet known.
    Init,
    /// Offline work may be placed.
    Healthy,
    /// What runs may go on; nothing new.
    Unhealthy,
    /// Offline work leaves.
    Overlimit,
    /// The device is unavailable.
    Disabled,
}

/// What the agent knows of a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuStatus {
    /// The state of its health machine.
    pub state: State,
    /// Why it is in that state, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When the agent wrote this (RFC 3339). A status that is too old counts as Unhealthy.
    pub observed_at: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time,
    /// SMs lent to offline work in the coming interval.
    #[serde(default)]
    pub share_sms: u32,
    /// The cap on offline memory.
    #[serde(default)]
    pub quota_bytes: u64,
    /// Whether its MPS server serves every user.
    #[serde(default)]
    pub multi_user: bool,
    /// The service on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub online: Option<OnlineStatus>,
    /// The offline pod on it, as `namespace/name`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// The last sample, written at a modest rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample: Option<SampleStatus>,
}

/// The online service on a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OnlineStatus {
    /// Which service.
    pub service: String,
    /// What it runs, as far as profiles are concerned.
    pub workload: String,
    /// SM activity that it will need in the coming interval.
    pub predicted_sm_activity_pct: f64,
    /// Device memory it holds.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Whether fail-prone jobs must stay away.
    #[serde(default)]
    pub critical: bool,
    /// The user it runs as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Whether it runs under MPS; one that does not cannot share.
    #[serde(default)]
    pub in_mps: bool,
}

/// One reading.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SampleStatus {
    /// Share of time with a kernel running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_util_pct: Option<f64>,
    /// Share of SMs with work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_activity_pct: Option<f64>,
    /// Present SM clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_clock_mhz: Option<f64>,
    /// Device memory in use by everybody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_used_bytes: Option<u64>,
}

/// A workload measured alone on a GPU of one type.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "muxflow.dev",
    version = "v1alpha1",
    kind = "Profile",
    plural = "profiles",
    category = "muxflow",
    printcolumn = r#"{"name":"Workload","type":"string","jsonPath":".spec.workload"}"#,
    printcolumn = r#"{"name":"Type","type":"string","jsonPath":".spec.gpuType"}"#,
    printcolumn = r#"{"name":"SM %","type":"number","jsonPath":".spec.smActivityPct"}"#,
    printcolumn = r#"{"name":"Memory","type":"integer","jsonPath":".spec.memoryBytes"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ProfileSpec {
    /// What ran.
    pub workload: String,
    /// On which kind of GPU.
    pub gpu_type: String,
    /// Speed alone on this type, against the reference type at 1: from 0.001 to 1000.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = MIN_SOLO_SPEED, max = MAX_SOLO_SPEED))]
    pub solo_speed: Option<f64>,
    /// Share of time with a kernel running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_util_pct: Option<f64>,
    /// Share of SMs with work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_activity_pct: Option<f64>,
    /// Resident warps against what fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sm_occupancy_pct: Option<f64>,
    /// Share of the memory interface's time in use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram_activity_pct: Option<f64>,
    /// Time of one iteration or request, alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub solo_time_us: Option<u64>,
    /// Device memory at its peak.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

/// A trained model of speeds for one type of GPU.
#[derive(CustomResource, Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "muxflow.dev",
    version = "v1alpha1",
    kind = "Model",
    plural = "models",
    category = "muxflow",
    printcolumn = r#"{"name":"Type","type":"string","jsonPath":".spec.gpuType"}"#,
    printcolumn = r#"{"name":"Note","type":"string","jsonPath":".spec.note"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// The type of GPU that it was trained for; of several models for one, the newest counts.
    pub gpu_type: String,
    /// The file that `muxflow train` wrote, as base64.
    #[schemars(with = "String")]
    pub data: k8s_openapi::ByteString,
    /// What it was trained on, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}
