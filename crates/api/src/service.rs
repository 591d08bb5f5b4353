//! Services on the wire: what is declared, and what is seen of it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A service as it is declared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ServiceDeclaration {
    /// Its name.
    pub name: String,
    /// Program and arguments; `{port}` becomes the replica's port, which is in `PORT` too.
    #[schema(min_items = 1)]
    pub command: Vec<String>,
    /// Variables it asks for.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Where it runs; the root when left out.
    #[serde(default)]
    pub cwd: Option<String>,
    /// User that it runs as: a name, a number or `uid:gid`; whoever declares it when left out.
    #[serde(default)]
    pub user: Option<String>,
    /// GPUs of this type only, such as `T4`.
    #[serde(default)]
    pub gpu_type: Option<String>,
    /// Port of the front on this machine; 0 picks one.
    #[serde(default)]
    pub port: u16,
    /// Never fewer replicas than this.
    #[serde(default = "one")]
    #[schema(maximum = 64, default = 1)]
    pub min_replicas: u32,
    /// Never more.
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 64, default = 1)]
    pub max_replicas: u32,
    /// Requests under way at once that one replica carries well.
    #[serde(default = "load_per_replica")]
    pub load_per_replica: f64,
    /// The health check.
    #[serde(default)]
    pub health: HealthDeclaration,
    /// What the 99th percentile of latency is held against, in milliseconds.
    #[serde(default)]
    pub slo_ms: Option<f64>,
    /// Jobs that have harmed their neighbours or failed often are kept off its GPUs.
    #[serde(default)]
    pub critical: bool,
    /// A request that takes longer is answered with 504.
    #[serde(default = "request_within_ms")]
    pub request_within_ms: u64,
    /// How long requests under way may take when a replica is to leave.
    #[serde(default = "drain_within_ms")]
    pub drain_within_ms: u64,
}

impl Default for ServiceDeclaration {
    /// Nothing but what is assumed of fields that are left out.
    fn default() -> Self {
        ServiceDeclaration {
            name: String::new(),
            command: Vec::new(),
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            gpu_type: None,
            port: 0,
            min_replicas: one(),
            max_replicas: one(),
            load_per_replica: load_per_replica(),
            health: HealthDeclaration::default(),
            slo_ms: None,
            critical: false,
            request_within_ms: request_within_ms(),
            drain_within_ms: drain_within_ms(),
        }
    }
}

fn one() -> u32 {
    1
}
fn load_per_replica() -> f64 {
    2.0
}
fn request_within_ms() -> u64 {
    30_000
}
fn drain_within_ms() -> u64 {
    30_000
}

/// How a replica is asked whether it is well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct HealthDeclaration {
    /// What is fetched; any 2xx is good.
    pub path: String,
    /// How often.
    pub every_ms: u64,
    /// How long an answer may take.
    pub within_ms: u64,
    /// So many failures in a row take a replica out.
    pub down_after: u32,
    /// A replica that has been out for so long is started anew.
    pub restart_after_ms: u64,
}

impl Default for HealthDeclaration {
    fn default() -> Self {
        HealthDeclaration {
            path: "/healthz".into(),
            every_ms: 1_000,
            within_ms: 2_000,
            down_after: 2,
            restart_after_ms: 60_000,
        }
    }
}

/// All services.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServiceList {
    /// By name.
    pub items: Vec<ServiceView>,
}

/// A service as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ServiceView {
    /// What was declared.
    pub declared: ServiceDeclaration,
    /// Where the front listens; empty when the service was not taken up.
    pub address: String,
    /// How many replicas the load asks for, within bounds.
    pub wanted_replicas: u32,
    /// The replicas.
    pub replicas: Vec<ReplicaView>,
    /// A rolling restart is under way: so many replicas are still to be replaced.
    pub to_restart: u32,
    /// Latency at the front.
    pub latency: LatencyView,
    /// Requests answered, whatever the answer.
    pub requests_total: u64,
    /// Requests that the front had to refuse or that got no answer: 502, 503, 504.
    pub failed_total: u64,
    /// Attempts that were made again on another replica.
    pub retried_total: u64,
    /// Why fewer replicas run than are wanted, why the service was not taken up, or why the last rolling restart was ended.
    pub waiting_for: Option<String>,
}

/// One replica as it is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ReplicaView {
    /// Its name.
    pub name: String,
    /// The GPU it is on.
    pub gpu: String,
    /// `starting`, `ready`, `down`, `draining` or `stopping`.
    pub state: String,
    /// Where it listens.
    pub address: String,
    /// Its process.
    pub pid: Option<u32>,
    /// Requests under way.
    pub outstanding: u64,
    /// Latency of requests to it.
    pub latency: LatencyView,
}

/// Percentiles of a window of time.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize, ToSchema)]
pub struct LatencyView {
    /// The median, in milliseconds; none without requests.
    pub p50_ms: Option<f64>,
    /// The 99th percentile.
    pub p99_ms: Option<f64>,
    /// Requests per second.
    pub rate_per_s: f64,
    /// How far back this looks.
    pub window_s: f64,
}
