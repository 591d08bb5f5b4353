//! What happens in the demo: services, jobs, and the moments at which things go wrong. It goes from
//! the outer process to the inner one as JSON.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::load::Curve;

/// How offline work is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Offline {
    /// None: the services alone.
    None,
    /// Under MuxFlow.
    Protected,
    /// As plain MPS clients: no interposer, no gate, no eviction, no answer to errors.
    Bare,
}

impl Offline {
    /// For people.
    pub(super) fn title(self) -> &'static str {
        match self {
            Offline::None => "services alone",
            Offline::Protected => "with MuxFlow",
            Offline::Bare => "without protection",
        }
    }
}

/// One service.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Served {
    pub(super) name: String,
    pub(super) network: String,
    pub(super) batch: u32,
    pub(super) replicas: u32,
    /// Requests per second at noon, all replicas together.
    pub(super) noon_per_s: f64,
    /// It gets the burst.
    pub(super) bursts: bool,
    /// What its latency is held against; known after the first phase.
    pub(super) slo_ms: Option<f64>,
}

/// One phase, complete.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Phase {
    pub(super) offline: Offline,
    pub(super) day_s: f64,
    pub(super) seed: u64,
    pub(super) services: Vec<Served>,
    pub(super) jobs: u32,
    /// Iterations per second of a job alone on a GPU; measured in the first phase.
    pub(super) solo_per_s: Option<f64>,
    /// Everything of this phase is in here.
    pub(super) dir: PathBuf,
    /// Control blocks and MPS pipes: on a memory file system.
    pub(super) run_dir: PathBuf,
    /// Of control groups.
    pub(super) label: String,
    pub(super) programs: Programs,
    /// Port of the dashboard.
    pub(super) port: u16,
    /// Who has it may use the dashboard.
    pub(super) token: String,
}

/// What the demo starts.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Programs {
    pub(super) node: PathBuf,
    pub(super) fault: PathBuf,
    pub(super) inference: PathBuf,
    pub(super) training: PathBuf,
    pub(super) interposer: PathBuf,
}

/// The burst, as shares of the day, and how many times the usual rate it is.
pub(super) const BURST: (f64, f64, f64) = (0.40, 0.50, 5.0);
/// A job touches memory that is not its own: XID 31.
pub(super) const FAULT_AT: f64 = 0.62;
/// Somebody ends a job with SIGTERM in the middle of its work.
pub(super) const SIGTERM_AT: f64 = 0.80;
/// Images in a batch of a job.
pub(super) const TRAINING_BATCH: u32 = 256;
/// The network that jobs train.
pub(super) const TRAINED: &str = "mobilenet-v2";

impl Served {
    /// Its requests.
    pub(super) fn curve(&self, phase: &Phase, index: usize) -> Curve {
        Curve {
            noon_per_s: self.noon_per_s,
            day_s: phase.day_s,
            burst: self.bursts.then_some(BURST),
            seed: phase.seed + 1 + index as u64,
        }
    }
}

/// The services of the demo, for four GPUs.
pub(super) fn services() -> Vec<Served> {
    let served = |name: &str, network: &str, batch, replicas, noon_per_s, bursts| Served {
        name: name.into(),
        network: network.into(),
        batch,
        replicas,
        noon_per_s,
        bursts,
        slo_ms: None,
    };
    vec![
        served("ranking", "resnet50", 4, 2, 24.0, true),
        served("vision", "inception-v3", 2, 1, 12.0, false),
        served("speech", "resnet50", 4, 1, 12.0, false),
    ]
}
