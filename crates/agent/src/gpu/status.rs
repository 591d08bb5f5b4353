//! What is known of one GPU at a moment, and whose it is.

use std::collections::BTreeMap;

use muxflow_types::{Bytes, HealthState, JobId, Micros, Percent, ServiceId, SmShare};

use super::Order;
use crate::control_block::JobCounts;
use crate::error::{AgentError, Result};
use crate::monitor::ActivitySource;
use crate::monitor::nvml::GpuFacts;

/// What is known of a GPU: for the manager's snapshot, metrics and `muxflow agent`.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuStatus {
    /// Its UUID.
    pub uuid: String,
    /// State of health.
    pub health: HealthState,
    /// Changes of state, by where they led to.
    pub transitions: BTreeMap<HealthState, u64>,
    /// Impossible samples that were dropped.
    pub glitches: u64,
    /// Whether a new job may be placed.
    pub placeable: bool,
    /// Share that a job would get now.
    pub share: Option<SmShare>,
    /// Quota that a job would get now.
    pub quota: Bytes,
    /// The launch budget in force: 0 to 1.
    pub budget: f64,
    /// GPU load as the gate sees it.
    pub load: Option<f64>,
    /// The service's part of SM activity, and how far off it may be, in points.
    pub online_activity: Option<(Percent, f64)>,
    /// What the service will need.
    pub demand: Option<Percent>,
    /// Where SM activity comes from.
    pub source: ActivitySource,
    /// Age of the slowest counter.
    pub counter_age: Micros,
    /// From the moment a sample was taken to the decision in the control block, for the last one.
    pub reaction: Micros,
    /// The longest of these so far.
    pub reaction_max: Micros,
    /// The service that the GPU was given to, whether it runs at this moment or not.
    pub claimed: Option<ServiceId>,
    /// Nothing is placed: the service that the GPU was given to does not run, or it ended again and
    /// again and has not run for long since.
    pub unsettled: bool,
    /// The service that runs.
    pub online: Option<(ServiceId, u32)>,
    /// The job, with its counters.
    pub offline: Option<(JobId, JobCounts)>,
    /// Errors seen, by name.
    pub faults: BTreeMap<String, u64>,
    /// Stops of offline work, by reason.
    pub stops: BTreeMap<&'static str, u64>,
    /// Evictions held back by the breaker.
    pub held: u64,
    /// Times that MPS was started.
    pub mps_starts: u64,
    /// Whether a client could attach when it was last tried, and how long it took.
    pub attach: Option<(bool, Micros)>,
    /// Times that the service was restarted.
    pub online_restarts: u64,
    /// Processes on the GPU that are neither ours nor clients of our MPS server.
    pub outside: Vec<u32>,
}

impl GpuStatus {
    /// Takes note, when an order is given, of whose the GPU is: orders are carried out later, and two
    /// services must not both believe that it is theirs.
    pub fn claim(&mut self, order: &Order) -> Result<()> {
        match (order, &self.claimed) {
            (Order::StartOnline(spec), Some(other)) if *other != spec.service => {
                let reason = format!("GPU {} was given to service {other}", self.uuid);
                return Err(AgentError::Start { workload: spec.service.to_string(), reason });
            }
            (Order::StartOnline(spec), _) => self.claimed = Some(spec.service.clone()),
            (Order::StopOnline(service), Some(owner)) if owner == service => self.claimed = None,
            _ => {}
        }
        Ok(())
    }

    /// Nothing is known yet.
    pub fn unknown(facts: &GpuFacts) -> Self {
        GpuStatus {
            uuid: facts.uuid.clone(),
            health: HealthState::Init,
            transitions: BTreeMap::new(),
            glitches: 0,
            placeable: false,
            share: None,
            quota: Bytes::ZERO,
            budget: 0.0,
            load: None,
            online_activity: None,
            demand: None,
            source: ActivitySource::None,
            counter_age: Micros::ZERO,
            reaction: Micros::ZERO,
            reaction_max: Micros::ZERO,
            claimed: None,
            unsettled: false,
            online: None,
            offline: None,
            faults: BTreeMap::new(),
            stops: BTreeMap::new(),
            held: 0,
            mps_starts: 0,
            attach: None,
            online_restarts: 0,
            outside: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::Limits;
    use crate::gpu::OnlineSpec;

    fn start(name: &str) -> Order {
        Order::StartOnline(Box::new(OnlineSpec {
            service: ServiceId::new(name).unwrap(),
            argv: vec!["serve".into()],
            env: BTreeMap::new(),
            cwd: "/".into(),
            user: None,
            limits: Limits::default(),
            latency_file: None,
            grace_ms: 0,
        }))
    }

    #[test]
    fn a_gpu_is_one_services_from_the_order_on() {
        let facts = GpuFacts {
            uuid: "GPU-1".into(),
            gpu_type: muxflow_types::GpuType::new("T4").unwrap(),
            name: "T4".into(),
            pci: "0000:01:00".into(),
            memory: Bytes::from_gib(15),
            highest_clock: None,
        };
        let mut status = GpuStatus::unknown(&facts);
        let stop = |name| Order::StopOnline(ServiceId::new(name).unwrap());
        status.claim(&start("web")).unwrap();
        status.claim(&start("web")).unwrap();
        let error = status.claim(&start("rank-0")).unwrap_err().to_string();
        assert!(error.contains("rank-0") && error.contains("given to service web"), "{error}");
        // One that was refused cannot take the other's place away.
        status.claim(&stop("rank-0")).unwrap();
        assert_eq!(status.claimed.as_ref().map(ServiceId::as_str), Some("web"));
        status.claim(&stop("web")).unwrap();
        status.claim(&start("rank-0")).unwrap();
    }
}
