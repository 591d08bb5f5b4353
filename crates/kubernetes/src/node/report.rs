//! Writes the `Gpu` objects of this node: at once when something changes that matters, else rarely.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error as KubeError};
use serde_json::json;
use tokio::sync::{Notify, watch};

use super::Settings;
use super::executor::{LocalGpu, Reading};
use super::ground::Ground;
use super::news::{self, Written};
use super::placed;
use crate::device::wire::Holders;
use crate::names;
use crate::resource::{Gpu, GpuSpec, GpuStatus, OnlineStatus, State};
use crate::scheduler::pods;

/// How often the GPUs and their services are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(5);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
const WRITER: &str = "muxflow-agent";
/// The name of processes that nobody has declared, and that cannot share.
const OUTSIDE: &str = "outside-mps";

/// The reason of a GPU whose agent has left.
const LEAVES: &str = "the agent leaves";

/// An online pod on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Service {
    pub(crate) namespace: String,
    pub(crate) pod: String,
    pub(crate) service: String,
    workload: String,
    critical: bool,
    uid: Option<u32>,
}

/// The online pods of the node, by GPU.
#[derive(Debug, Default)]
pub struct Services(Mutex<BTreeMap<String, Service>>);

impl Services {
    pub(crate) fn read(&self) -> MutexGuard<'_, BTreeMap<String, Service>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of a service: what the user calls it, else its Deployment, else its controller.
fn service_of(pod: &Pod) -> Service {
    let name = pods::PodName::of(pod);
    let labels = pod.metadata.labels.as_ref();
    let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
    let owner = pods::controller(pod).map(|owner| match hash {
        Some(hash) => owner.name.strip_suffix(&format!("-{hash}")).unwrap_or(&owner.name),
        None => owner.name.as_str(),
    });
    let own = pods::annotation(pod, names::SERVICE).map(str::to_owned);
    let service = own
        .unwrap_or_else(|| format!("{}/{}", name.namespace, owner.unwrap_or(name.name.as_str())));
    Service {
        workload: pods::annotation(pod, names::WORKLOAD).unwrap_or(&service).to_owned(),
        service,
        critical: pods::annotation(pod, names::CRITICAL) == Some("true"),
        uid: pods::runs_as(pod),
        namespace: name.namespace,
        pod: name.name,
    }
}

/// The Node object as an owner: when it goes, what is said of the node goes with it.
pub(crate) async fn owner(
    client: &Client,
    node: &str,
) -> Result<Option<OwnerReference>, KubeError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let object = nodes.get_metadata_opt(node).await?;
    Ok(object.and_then(|object| {
        Some(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.to_owned(),
            uid: object.metadata.uid?,
            ..OwnerReference::default()
        })
    }))
}

/// The writer.
pub(crate) struct Reporter {
    client: Client,
    ground: Arc<Ground>,
    node: String,
    every: Duration,
    services: Arc<Services>,
    owner: Option<OwnerReference>,
    created: BTreeSet<String>,
    written: BTreeMap<String, Written>,
}

impl Reporter {
    pub(crate) fn new(
        client: Client,
        ground: Arc<Ground>,
        settings: &Settings,
        services: Arc<Services>,
    ) -> Self {
        Reporter {
            client,
            ground,
            node: settings.node.clone(),
            every: settings.report_every,
            services,
            owner: None,
            created: BTreeSet::new(),
            written: BTreeMap::new(),
        }
    }

    /// Reports until the agent leaves, and says so last.
    pub(crate) async fn run(mut self, urgent: Arc<Notify>, mut leaves: watch::Receiver<bool>) {
        loop {
            self.find_services().await;
            for gpu in self.ground.executor.gpus() {
                self.report(&gpu).await;
            }
            tokio::select! {
                () = tokio::time::sleep(news::AT_MOST_EVERY) => {}
                _ = leaves.wait_for(|leaves| *leaves) => break,
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY.min(self.every)) => {}
                () = urgent.notified() => {}
                _ = leaves.wait_for(|leaves| *leaves) => break,
            }
        }
        self.take_leave().await;
    }

    /// GPUs that would take a pod take none until the next agent speaks. Where offline work must leave,
    /// that stays the last word: if no agent comes, the scheduler acts upon it.
    async fn take_leave(&mut self) {
        for gpu in self.ground.executor.gpus() {
            let known = self.created.contains(&gpu.uuid);
            let Some(reading) = self.ground.executor.read(&gpu.uuid).filter(|_| known) else {
                continue;
            };
            let mut status = self.status(&gpu, &reading);
            if matches!(status.state, State::Overlimit | State::Disabled) {
                continue;
            }
            (status.state, status.reason) = (State::Init, Some(LEAVES.to_owned()));
            if let Err(error) = self.write(&gpu, &reading, &status).await {
                tracing::warn!(gpu = gpu.uuid, %error, "that the agent leaves could not be told");
            }
        }
    }

    /// Which online pod holds which GPU, by the kubelet.
    async fn find_services(&self) {
        let asked =
            tokio::time::timeout(Duration::from_secs(5), self.ground.look_who_holds()).await;
        // Who holds what by claims is known here; what only the kubelet knows stays as it was.
        let mut services = match asked {
            Ok(Ok(holders)) => self.holding(&holders),
            Ok(Err(status)) => {
                tracing::warn!(why = status.message(), "the kubelet does not say who holds GPUs");
                self.services.read().clone()
            }
            Err(_) => {
                tracing::warn!("the kubelet does not answer who holds GPUs");
                self.services.read().clone()
            }
        };
        for (gpu, uid) in self.ground.claims.online() {
            let uid = uid.as_str();
            if let Some(pod) = self.ground.pods.find(|p| p.metadata.uid.as_deref() == Some(uid)) {
                services.insert(gpu, service_of(&pod));
            }
        }
        *self.services.read() = services;
    }

    fn holding(&self, holders: &Holders) -> BTreeMap<String, Service> {
        let mut services = BTreeMap::new();
        for holder in &holders.pods {
            let Some(pod) = placed::find(&self.ground.pods, &holder.namespace, &holder.name) else {
                continue;
            };
            let held = holder.containers.iter().flat_map(|container| &container.devices);
            for device in held.filter(|held| held.resource_name == names::ONLINE_RESOURCE) {
                services.extend(device.ids.iter().map(|id| (id.clone(), service_of(&pod))));
            }
        }
        services
    }

    async fn report(&mut self, gpu: &LocalGpu) {
        let Some(reading) = self.ground.executor.read(&gpu.uuid) else { return };
        if reading.sms == 0 {
            return; // Not counted yet; the first probe does that.
        }
        let status = self.status(gpu, &reading);
        let (before, now) = (self.written.get(&gpu.uuid), Instant::now());
        if !news::is_due(before, &status, &gpu.uuid, self.every, now) {
            return;
        }
        match tokio::time::timeout(REQUEST_LIMIT, self.write(gpu, &reading, &status)).await {
            Ok(Ok(())) => {
                self.written.insert(gpu.uuid.clone(), Written { status, at: now });
                return;
            }
            Ok(Err(error)) => {
                // Somebody may have deleted the object; it is made again next time.
                self.created.remove(&gpu.uuid);
                tracing::warn!(gpu = gpu.uuid, %error, "the state of a GPU could not be written");
            }
            Err(_) => tracing::warn!(gpu = gpu.uuid, "the API server does not answer"),
        }
        // Whatever the API server has made of it: it is said again.
        self.written.remove(&gpu.uuid);
    }

    async fn write(
        &mut self,
        gpu: &LocalGpu,
        reading: &Reading,
        status: &GpuStatus,
    ) -> Result<(), KubeError> {
        let api: Api<Gpu> = Api::all(self.client.clone());
        let apply = PatchParams::apply(WRITER).force();
        let name = gpu.uuid.to_lowercase();
        if !self.created.contains(&gpu.uuid) {
            let spec = GpuSpec {
                uuid: gpu.uuid.clone(),
                node: self.node.clone(),
                gpu_type: gpu.gpu_type.clone(),
                sms: reading.sms,
                memory_bytes: gpu.memory_bytes,
            };
            let mut object = Gpu::new(&name, spec);
            if self.owner.is_none() {
                self.owner = owner(&self.client, &self.node).await?;
            }
            object.metadata.owner_references = self.owner.clone().map(|owner| vec![owner]);
            api.patch(&name, &apply, &Patch::Apply(&object)).await?;
            self.created.insert(gpu.uuid.clone());
        }
        let object = json!({"apiVersion": "muxflow.dev/v1alpha1", "kind": "Gpu",
            "metadata": {"name": name}, "status": status});
        api.patch_status(&name, &apply, &Patch::Apply(&object)).await.map(drop)
    }

    fn status(&self, gpu: &LocalGpu, reading: &Reading) -> GpuStatus {
        let service = self.services.read().get(&gpu.uuid).cloned();
        let guests = self.ground.guests();
        let job = guests.values().find(|attached| attached.gpu == gpu.uuid);
        let in_mps = gpu.mps_pipe.is_some() && reading.outside.is_empty();
        let online = service.map(|service| OnlineStatus {
            service: service.service,
            workload: service.workload,
            predicted_sm_activity_pct: reading.demand_pct,
            memory_bytes: reading.online_memory_bytes,
            critical: service.critical,
            uid: service.uid,
            in_mps,
        });
        let (state, reason) = standing(reading);
        GpuStatus {
            state,
            reason,
            observed_at: Time(jiff::Timestamp::now()),
            share_sms: reading.share_sms,
            quota_bytes: reading.quota_bytes,
            multi_user: gpu.multi_user,
            online: online.or_else(|| undeclared(reading)),
            job: job.map(|attached| attached.pod.path()),
            sample: Some(reading.sample),
        }
    }
}

/// The state that the cluster is told, and why. A GPU that is well but takes nobody now is no place for
/// a pod; for a guest that is there, the health machine alone counts.
fn standing(reading: &Reading) -> (State, Option<String>) {
    if !reading.outside.is_empty() {
        let pids: Vec<String> = reading.outside.iter().map(u32::to_string).collect();
        let why = format!("process {} runs outside MPS", pids.join(", "));
        return (reading.state, Some(why));
    }
    if reading.state == State::Healthy && reading.guest.is_none() && !reading.placeable {
        let why = "it cools down, or its host has no room for a job";
        return (State::Unhealthy, reading.reason.clone().or_else(|| Some(why.to_owned())));
    }
    (reading.state, reading.reason.clone())
}

/// Whoever uses the GPU outside MPS without having been given it: nobody can be beside it.
fn undeclared(reading: &Reading) -> Option<OnlineStatus> {
    (!reading.outside.is_empty()).then(|| OnlineStatus {
        service: OUTSIDE.to_owned(),
        workload: OUTSIDE.to_owned(),
        predicted_sm_activity_pct: reading.demand_pct,
        memory_bytes: reading.online_memory_bytes,
        critical: false,
        uid: None,
        in_mps: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_is_called_after_its_deployment() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {
            "name": "web-7c9f-x1", "namespace": "shop", "labels": {"pod-template-hash": "7c9f"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7c9f",
                "uid": "u", "controller": true}]}}))
        .unwrap();
        let service = service_of(&pod);
        assert_eq!((service.service.as_str(), service.workload.as_str()), ("shop/web", "shop/web"));
        let bare: Pod = serde_json::from_value(json!({"metadata": {"name": "a", "namespace": "b",
                "annotations": {"muxflow.dev/critical": "true", "muxflow.dev/workload": "bert"}}}))
        .unwrap();
        let service = service_of(&bare);
        assert_eq!((service.service.as_str(), service.workload.as_str()), ("b/a", "bert"));
        assert!(service.critical);
    }

    fn reading() -> Reading {
        Reading {
            state: State::Healthy,
            reason: None,
            sms: 40,
            share_sms: 20,
            quota_bytes: 8 << 30,
            demand_pct: 30.0,
            online_activity_pct: None,
            online_memory_bytes: 1 << 30,
            sample: crate::resource::SampleStatus::default(),
            guest: None,
            placeable: true,
            outside: Vec::new(),
        }
    }

    #[test]
    fn a_gpu_that_takes_nobody_now_is_no_place_for_a_pod() {
        assert_eq!(standing(&reading()), (State::Healthy, None));
        let (state, why) = standing(&Reading { placeable: false, ..reading() });
        assert_eq!(state, State::Unhealthy);
        assert!(why.unwrap().contains("cools down"));
        // With a guest on it, a GPU never takes another.
        let guest = muxflow_types::JobId::new("j").ok();
        let held = Reading { placeable: false, guest, ..reading() };
        assert_eq!(standing(&held).0, State::Healthy);
        let ill = Reading { placeable: false, state: State::Overlimit, ..reading() };
        assert_eq!(standing(&ill).0, State::Overlimit);
    }

    #[test]
    fn a_process_outside_mps_is_told_as_a_service_that_cannot_share() {
        assert_eq!(undeclared(&reading()), None);
        let strange = Reading { outside: vec![7, 9], ..reading() };
        let told = undeclared(&strange).unwrap();
        assert_eq!((told.service.as_str(), told.in_mps), (OUTSIDE, false));
        assert_eq!(standing(&strange).1.unwrap(), "process 7, 9 runs outside MPS");
    }
}
