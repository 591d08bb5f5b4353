//! Writes the `Gpu` objects of this node: at once when a state changes, else at a modest rate.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{OwnerReference, Time};
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error as KubeError};
use serde_json::json;
use tokio::sync::{Notify, watch};

use super::Settings;
use super::executor::{LocalGpu, Reading};
use super::ground::Ground;
use super::placed;
use crate::device::wire::Holders;
use crate::names;
use crate::resource::{Gpu, GpuSpec, GpuStatus, OnlineStatus};
use crate::scheduler::pods;

/// No GPU is written more often than this, however often it changes.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
const WRITER: &str = "muxflow-agent";

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
        }
    }

    pub(crate) async fn run(mut self, urgent: Arc<Notify>, mut stop: watch::Receiver<bool>) {
        loop {
            self.find_services().await;
            for gpu in self.ground.executor.gpus() {
                self.report(&gpu).await;
            }
            tokio::select! {
                () = tokio::time::sleep(AT_MOST_EVERY) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            tokio::select! {
                () = tokio::time::sleep(self.every.saturating_sub(AT_MOST_EVERY)) => {}
                () = urgent.notified() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    /// Which online pod holds which GPU, by the kubelet.
    async fn find_services(&self) {
        let asked = tokio::time::timeout(Duration::from_secs(5), self.ground.holders()).await;
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
        match tokio::time::timeout(REQUEST_LIMIT, self.write(gpu, &reading)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                // Somebody may have deleted the object; it is made again next time.
                self.created.remove(&gpu.uuid);
                tracing::warn!(gpu = gpu.uuid, %error, "the state of a GPU could not be written");
            }
            Err(_) => tracing::warn!(gpu = gpu.uuid, "the API server does not answer"),
        }
    }

    async fn write(&mut self, gpu: &LocalGpu, reading: &Reading) -> Result<(), KubeError> {
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
        let status = self.status(gpu, reading);
        let object = json!({"apiVersion": "muxflow.dev/v1alpha1", "kind": "Gpu",
            "metadata": {"name": name}, "status": status});
        api.patch_status(&name, &apply, &Patch::Apply(&object)).await.map(drop)
    }

    fn status(&self, gpu: &LocalGpu, reading: &Reading) -> GpuStatus {
        let service = self.services.read().get(&gpu.uuid).cloned();
        let guests = self.ground.guests();
        let job = guests.values().find(|attached| attached.gpu == gpu.uuid);
        GpuStatus {
            state: reading.state,
            reason: reading.reason.clone(),
            observed_at: Time(jiff::Timestamp::now()),
            share_sms: reading.share_sms,
            quota_bytes: reading.quota_bytes,
            multi_user: gpu.multi_user,
            online: service.map(|service| OnlineStatus {
                service: service.service,
                workload: service.workload,
                predicted_sm_activity_pct: reading.demand_pct,
                memory_bytes: reading.online_memory_bytes,
                critical: service.critical,
                uid: service.uid,
                in_mps: gpu.mps_pipe.is_some(),
            }),
            job: job.map(|attached| attached.pod.path()),
            sample: Some(reading.sample),
        }
    }
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
}
