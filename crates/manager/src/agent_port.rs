//! The agent of this machine as the manager's node.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use muxflow_abi::control::rhythm::BUCKETS;
use muxflow_agent::agent::{Agent, AgentHandle};
use muxflow_agent::cgroup::encode;
use muxflow_agent::config::AgentConfig;
use muxflow_agent::gpu::{Event, GpuShared, OfflineSpec, Order, StopReason};
use muxflow_agent::launch::Exit;
use muxflow_agent::monitor;
use muxflow_types::{Bytes, GpuId, GpuSample, JobId, Micros, SmCount};

use crate::node::{GpuSight, NodePort, OnlineSight, Rhythm};

/// The agent in this process.
#[derive(Debug)]
pub struct AgentPort {
    agent: Arc<Agent>,
    handle: AgentHandle,
    mps_dir: Option<PathBuf>,
    multi_user: bool,
}

impl AgentPort {
    /// Looks at and orders this agent.
    pub fn new(agent: Arc<Agent>, config: &AgentConfig) -> Self {
        AgentPort {
            handle: agent.handle(),
            agent,
            mps_dir: config.mps.as_ref().map(|_| config.run_dir.join("mps")),
            multi_user: config.mps.as_ref().is_some_and(|mps| mps.multi_user),
        }
    }

    fn sight(&self, index: usize, shared: &GpuShared) -> Option<GpuSight> {
        use std::os::unix::fs::MetadataExt;
        let status = shared.status().clone();
        let seen = shared.monitor.published();
        let latency = Some(shared.latency_us.load(Ordering::Relaxed)).filter(|us| *us > 0);
        let owner = |pid: u32| std::fs::metadata(format!("/proc/{pid}")).ok().map(|m| m.uid());
        let words = |map: std::collections::BTreeMap<&'static str, u64>| {
            map.into_iter().map(|(word, count)| (word.to_owned(), count)).collect()
        };
        Some(GpuSight {
            gpu: GpuId::new(&shared.facts.uuid).ok()?,
            index: u32::try_from(index).unwrap_or(u32::MAX),
            gpu_type: shared.facts.gpu_type.clone(),
            name: shared.facts.name.clone(),
            sms: SmCount(shared.sms.load(Ordering::Relaxed)),
            memory: shared.facts.memory,
            health: status.health,
            placeable: status.placeable,
            share: status.share,
            quota: status.quota,
            budget: status.budget,
            load: status.load,
            online: status.online.map(|(service, pid)| OnlineSight {
                service,
                pid: Some(pid),
                uid: owner(pid),
                latency: latency.map(Micros),
                critical: shared.critical.load(Ordering::Relaxed),
            }),
            online_activity: status.online_activity.map(|(activity, _)| activity),
            demand: status.demand,
            offline: status.offline,
            sample: seen.sample,
            outside_mps: status.outside,
            mps_pipe_dir: self
                .mps_dir
                .as_ref()
                .map(|dir| dir.join(encode(&shared.facts.uuid)).join("pipe")),
            multi_user: self.multi_user,
            stops: words(status.stops),
            faults: status.faults,
            mps_starts: status.mps_starts,
            online_restarts: status.online_restarts,
        })
    }
}

impl NodePort for AgentPort {
    fn look(&self) -> Vec<GpuSight> {
        let all = self.handle.numbered_gpus();
        all.filter_map(|(index, uuid)| self.sight(index, self.handle.shared(uuid)?)).collect()
    }

    fn start(&self, gpu: &GpuId, spec: OfflineSpec) -> Result<(), String> {
        let order = Order::StartOffline(Box::new(spec));
        self.handle.order(gpu.as_str(), order).map_err(|error| error.to_string())
    }

    fn stop(&self, gpu: &GpuId, job: &JobId) -> Result<(), String> {
        let order = Order::StopOffline { job: Some(job.clone()), reason: StopReason::Asked };
        self.handle.order(gpu.as_str(), order).map_err(|error| error.to_string())
    }

    fn next_event(&self, limit: Duration) -> Option<(String, Event)> {
        self.agent.next_event(limit)
    }

    fn found(&self) -> Vec<(JobId, u64)> {
        let found = self.handle.found().iter();
        found.filter_map(|(name, run)| Some((JobId::new(name).ok()?, *run))).collect()
    }

    fn last_exit(&self, job: &JobId) -> Option<Exit> {
        self.handle
            .last_exit(job.as_str())
            .inspect_err(|error| tracing::error!(error = %error, "how a job ended cannot be read"))
            .ok()
            .flatten()
    }

    fn log_file(&self, job: &JobId, stream: &str) -> PathBuf {
        self.handle.log_file(job.as_str(), stream)
    }

    fn output_bytes(&self, job: &JobId) -> u64 {
        // What stands beside it are a few lines of the agent's own.
        let file = self.handle.log_file(job.as_str(), "stdout");
        let entries = file.parent().and_then(|dir| std::fs::read_dir(dir).ok());
        let files = entries.into_iter().flatten().flatten().filter_map(|file| file.metadata().ok());
        files.filter(std::fs::Metadata::is_file).map(|file| file.len()).sum()
    }

    fn forget(&self, job: &JobId) -> Result<(), String> {
        self.handle.forget(job.as_str()).map_err(|error| error.to_string())
    }

    fn rhythm(&self, gpu: &GpuId) -> Option<Rhythm> {
        let job = self.handle.shared(gpu.as_str())?.job()?;
        let mut launches = [0_u32; BUCKETS];
        let mut peak = 0_u64;
        job.block.job().each(|counters| {
            for (sum, count) in launches.iter_mut().zip(counters.rhythm) {
                *sum = sum.wrapping_add(count);
            }
            peak = peak.saturating_add(counters.peak_bytes);
        });
        let (at, peak) = (monitor::now(), Bytes(peak));
        Some(Rhythm { job: job.job.clone(), at, launches, peak })
    }

    fn samples(&self, gpu: &GpuId, span: Micros) -> Vec<GpuSample> {
        let shared = self.handle.shared(gpu.as_str());
        shared.map(|shared| shared.monitor.history(monitor::now(), span)).unwrap_or_default()
    }
}
