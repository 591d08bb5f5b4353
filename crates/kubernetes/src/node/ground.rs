//! What the parts of the node's side stand on together: the executor, the pods of the node, who is
//! attached, and where things are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector::Store;
use muxflow_agent::cgroup::encode;
use muxflow_agent::gpu::guest::GuestSpec;
use muxflow_agent::stop::StopLimits;
use muxflow_types::JobId;
use tokio::sync::mpsc::UnboundedSender;

use super::executor::{Executor, NotLetIn};
use super::placed::{self, Placed};
use crate::device::grpc;
use crate::device::inject::HostPaths;
use crate::device::wire::{Empty, Holders, LIST_HOLDERS};
use crate::dra::claims;
use crate::names;
use crate::scheduler::pods::{self, PodName};

/// A guest that must leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wish {
    /// Which.
    pub job: JobId,
    /// One word for the event.
    pub reason: &'static str,
    /// Why, in words.
    pub why: String,
    /// Only as long as the GPU is not well: when it recovers before the pod could be evicted, the
    /// pod may stay.
    pub while_ill: bool,
}

/// A pod that was let in.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Attached {
    pub(crate) pod: PodName,
    pub(crate) gpu: String,
    /// By a claim, whose end is its end.
    pub(crate) claimed: bool,
}

/// The common ground.
pub struct Ground {
    pub(crate) executor: Arc<dyn Executor>,
    pub(crate) pods: Store<Pod>,
    pub(crate) paths: HostPaths,
    /// Where the runtime looks for devices of the container device interface; none gives everything
    /// at allocation.
    pub(crate) cdi: Option<PathBuf>,
    pub(crate) state: PathBuf,
    pub(crate) pod_resources: PathBuf,
    pub(crate) wishes: UnboundedSender<Wish>,
    /// What was given by claims.
    pub(crate) claims: claims::Store,
    guests: Mutex<BTreeMap<JobId, Attached>>,
    /// GPUs that services hold as devices, by the kubelet.
    given: Mutex<BTreeSet<String>>,
}

impl std::fmt::Debug for Ground {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ground").field("guests", &self.guests().len()).finish_non_exhaustive()
    }
}

/// Where the node's side finds and puts things.
#[derive(Debug, Clone)]
pub struct Places {
    /// What containers get from the host.
    pub host: HostPaths,
    /// The runtime's folder of devices; none gives everything at allocation.
    pub cdi: Option<PathBuf>,
    /// The agent's state.
    pub state: PathBuf,
    /// The kubelet's folder of plugins.
    pub plugins: PathBuf,
    /// The kubelet's list of who holds what.
    pub pod_resources: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Places {
            host: HostPaths::default(),
            cdi: Some("/var/run/cdi".into()),
            state: "/var/lib/muxflow".into(),
            plugins: "/var/lib/kubelet/device-plugins".into(),
            pod_resources: "/var/lib/kubelet/pod-resources/kubelet.sock".into(),
        }
    }
}

impl Ground {
    /// On an executor and the pods of its node. Guests that must leave are told to `wishes`.
    pub fn new(
        executor: Arc<dyn Executor>,
        pods: Store<Pod>,
        places: &Places,
        wishes: UnboundedSender<Wish>,
    ) -> Self {
        Ground {
            executor,
            pods,
            paths: places.host.clone(),
            cdi: places.cdi.clone(),
            state: places.state.clone(),
            pod_resources: places.pod_resources.clone(),
            wishes,
            claims: claims::Store::open(places.state.join("claims")),
            guests: Mutex::new(BTreeMap::new()),
            given: Mutex::default(),
        }
    }

    pub(crate) fn guests(&self) -> MutexGuard<'_, BTreeMap<JobId, Attached>> {
        self.guests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All pods that were placed here and are not over, oldest first.
    pub(crate) fn placed(&self) -> Vec<Placed> {
        placed::all(&self.pods, &self.claims.offline())
    }

    /// The pod of a guest, if it is not over, whatever its annotations have come to say.
    pub(crate) fn pod_of(&self, job: &JobId) -> Option<Arc<Pod>> {
        let is_it = |pod: &Pod| pod.metadata.uid.as_deref() == Some(job.as_str());
        self.pods.find(|pod| is_it(pod) && !pods::is_finished(pod))
    }

    /// What the pod of a guest is called, also when it is over: an error often ends the pod that caused
    /// it before anybody is told.
    pub(crate) fn name_of(&self, job: &JobId) -> Option<PodName> {
        let is_it = |pod: &Pod| pod.metadata.uid.as_deref() == Some(job.as_str());
        let here = self.pods.find(is_it).map(|pod| PodName::of(&pod));
        here.or_else(|| self.guests().get(job).map(|attached| attached.pod.clone()))
    }

    /// Pods that have been let in.
    pub(crate) fn attached(&self) -> BTreeSet<JobId> {
        self.guests().keys().cloned().collect()
    }

    /// The file that remembers what the holder of a place was promised.
    pub(crate) fn place_file(&self, device: &str) -> PathBuf {
        self.state.join("places").join(encode(device))
    }

    /// Lets a pod in on the GPU that it was planned for.
    pub(crate) async fn attach(&self, placed: &Placed) -> Result<PathBuf, NotLetIn> {
        let (executor, gpu) = (Arc::clone(&self.executor), placed.gpu.to_string());
        let spec = GuestSpec {
            job: placed.job.clone(),
            share: placed.share,
            quota: placed.quota,
            stop: stop_limits(placed.grace_s),
        };
        let letting = tokio::task::spawn_blocking(move || executor.attach(&gpu, spec));
        let dir = letting.await.map_err(|error| NotLetIn::NoAnswer(error.to_string()))??;
        let attached = Attached {
            pod: placed.pod.clone(),
            gpu: placed.gpu.to_string(),
            claimed: self.claims.offline().contains_key(&placed.job),
        };
        self.guests().insert(placed.job.clone(), attached);
        Ok(dir)
    }

    /// Has a pod taken away, with the word of its event.
    pub(crate) fn must_leave(&self, job: &JobId, reason: &'static str, why: &str) {
        // Nobody listens any more when the agent leaves.
        let wish = Wish { job: job.clone(), reason, why: why.to_owned(), while_ill: false };
        drop(self.wishes.send(wish));
    }

    /// GPUs that services hold by claims.
    pub(crate) fn claimed_by_services(&self) -> BTreeSet<String> {
        self.claims.online().into_iter().map(|(gpu, _)| gpu).collect()
    }

    /// GPUs that services hold as devices, as far as the kubelet has told.
    pub(crate) fn given_to_services(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.given.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the kubelet which GPUs services hold as devices, and remembers it.
    pub(crate) async fn look_who_holds(&self) -> Result<Holders, tonic::Status> {
        let holders = self.holders().await?;
        let held = holders.pods.iter().flat_map(|pod| &pod.containers);
        let devices = held.flat_map(|container| &container.devices);
        let online = devices.filter(|held| held.resource_name == names::ONLINE_RESOURCE);
        *self.given_to_services() = online.flat_map(|held| held.ids.clone()).collect();
        Ok(holders)
    }

    /// Who holds what, by the kubelet.
    pub(crate) async fn holders(&self) -> Result<Holders, tonic::Status> {
        let channel = grpc::connect(&self.pod_resources)
            .await
            .map_err(|error| tonic::Status::unavailable(error.to_string()))?;
        grpc::ask(&channel, LIST_HOLDERS, Empty {}).await
    }
}

/// A pod's grace period, spent: all of it but what draining and letting go take is for saving.
fn stop_limits(grace_s: u64) -> StopLimits {
    let usual = StopLimits::default();
    let others_ms = usual.drain_ms + usual.release_ms + usual.terminate_ms;
    let checkpoint_ms = (grace_s * 1_000).saturating_sub(others_ms);
    StopLimits { checkpoint_ms, ..usual }
}
