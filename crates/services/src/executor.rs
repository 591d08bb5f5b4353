//! The port through which replicas become processes, and the agent behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use muxflow_agent::agent::AgentHandle;
use muxflow_agent::cgroup::Limits;
use muxflow_agent::gpu::{GpuShared, OnlineSpec, Order};
use muxflow_types::{GpuType, HealthState, Micros, ServiceId};

use crate::ServiceError;

/// Where a replica can run: one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The GPU's UUID.
    pub id: String,
    /// Its type.
    pub gpu_type: GpuType,
    /// The replica that it was given to, with its process when it runs.
    pub taken_by: Option<(String, Option<u32>)>,
    /// What took it was declared, and not configured for the agent: a service may take its own back.
    pub is_declared: bool,
    /// A job is there, which a replica would have to share the GPU with.
    pub has_job: bool,
    /// Whether something new may be put there.
    pub usable: bool,
}

/// What a replica is started with.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaLaunch {
    /// Its name, unique on the machine.
    pub name: String,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables.
    pub env: BTreeMap<String, String>,
    /// Where it runs.
    pub cwd: PathBuf,
    /// User and group.
    pub user: Option<(u32, u32)>,
    /// How long it may take to leave after SIGTERM.
    pub grace_ms: u64,
    /// What its latency is held against.
    pub slo: Option<Micros>,
    /// Fail-prone jobs are kept off its GPU.
    pub critical: bool,
}

/// What the front and the declaration say of the replica on a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Standing {
    /// The latency at the SLO's percentile, as seen in front; none when nobody asks.
    pub latency: Option<Micros>,
    /// What it is held against.
    pub slo: Option<Micros>,
    /// Fail-prone jobs are kept away.
    pub critical: bool,
}

/// Starts and stops replicas. No call may wait: what was ordered shows in [`Executor::places`] later.
pub trait Executor: Send + Sync + 'static {
    /// Every GPU.
    fn places(&self) -> Vec<Place>;
    /// Orders a replica to be started and kept alive.
    fn start(&self, place: &str, launch: &ReplicaLaunch) -> Result<(), ServiceError>;
    /// Orders the replica on a place to leave. Orders to one place are carried out one after another.
    fn stop(&self, place: &str, replica: &str) -> Result<(), ServiceError>;
    /// Tells how the replica on a place stands, again and again.
    fn tell(&self, place: &str, standing: Standing);
    /// Nothing may be started or stopped: what runs is looked at and served, and that is all.
    fn is_shadow(&self) -> bool {
        false
    }
}

/// The agent of this machine.
#[derive(Debug, Clone)]
pub struct AgentExecutor {
    agent: AgentHandle,
    configured: BTreeSet<String>,
    shadow: bool,
}

impl AgentExecutor {
    /// Orders go to this agent; services that it is configured with are not touched.
    pub fn new(agent: AgentHandle, configured: BTreeSet<String>, shadow: bool) -> Self {
        AgentExecutor { agent, configured, shadow }
    }

    fn order(&self, place: &str, replica: &str, order: Order) -> Result<(), ServiceError> {
        self.agent.order(place, order).map_err(|error| ServiceError::Executor {
            replica: replica.to_owned(),
            reason: error.to_string(),
        })
    }
}

impl Executor for AgentExecutor {
    fn places(&self) -> Vec<Place> {
        let all = self.agent.gpus().iter();
        all.filter_map(|uuid| {
            let shared = self.agent.shared(uuid)?;
            let status = shared.status();
            let runs = status.online.as_ref().map(|(name, pid)| (name, Some(*pid)));
            let taken_by = runs.or_else(|| status.claimed.as_ref().map(|name| (name, None)));
            let taken_by = taken_by.map(|(name, pid)| (name.as_str().to_owned(), pid));
            Some(Place {
                id: uuid.clone(),
                gpu_type: shared.facts.gpu_type.clone(),
                is_declared: taken_by.as_ref().is_some_and(|(n, _)| !self.configured.contains(n)),
                taken_by,
                has_job: status.offline.is_some() || shared.job().is_some(),
                usable: status.health != HealthState::Disabled,
            })
        })
        .collect()
    }

    fn start(&self, place: &str, launch: &ReplicaLaunch) -> Result<(), ServiceError> {
        let service = ServiceId::new(&launch.name).map_err(|error| ServiceError::Executor {
            replica: launch.name.clone(),
            reason: error.to_string(),
        })?;
        let spec = OnlineSpec {
            service,
            argv: launch.argv.clone(),
            env: launch.env.clone(),
            cwd: launch.cwd.clone(),
            user: launch.user,
            limits: Limits::default(),
            latency_file: None,
            grace_ms: launch.grace_ms,
        };
        self.order(place, &launch.name, Order::StartOnline(Box::new(spec)))?;
        let (slo, critical) = (launch.slo, launch.critical);
        self.tell(place, Standing { latency: None, slo, critical });
        Ok(())
    }

    fn stop(&self, place: &str, replica: &str) -> Result<(), ServiceError> {
        let service = ServiceId::new(replica).map_err(|error| ServiceError::Executor {
            replica: replica.to_owned(),
            reason: error.to_string(),
        })?;
        self.order(place, replica, Order::StopOnline(service))?;
        let free = |shared: &GpuShared| shared.status().claimed.is_none();
        if self.agent.shared(place).is_some_and(|shared| free(shared)) {
            self.tell(place, Standing::default());
        }
        Ok(())
    }

    fn tell(&self, place: &str, standing: Standing) {
        if let Some(shared) = self.agent.shared(place) {
            let us = |time: Option<Micros>| time.map_or(0, |time| time.0);
            shared.slo_us.store(us(standing.slo), Ordering::Relaxed);
            shared.latency_us.store(us(standing.latency), Ordering::Relaxed);
            shared.critical.store(standing.critical, Ordering::Relaxed);
        }
    }

    fn is_shadow(&self) -> bool {
        self.shadow
    }
}
