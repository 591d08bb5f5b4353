//! What the scenarios need of a cluster: nodes and GPUs that a test writes, a fake kubelet that makes
//! pods run and leave, and waits that say what they waited for.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Event, Node, Pod, ResourceQuota};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::{Gpu, GpuSpec, GpuStatus, Model, Profile, State};
use muxflow_kubernetes::scheduler::{self, Settings};
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::{dra, install};

pub(crate) const NAMESPACE: &str = "default";

/// A client of the administrator.
pub(crate) async fn client(kubeconfig: &Path) -> Client {
    muxflow_kubernetes::connect::connect(Some(kubeconfig)).await.unwrap()
}

/// A scheduler in this process.
pub(crate) struct Scheduler {
    stop: oneshot::Sender<()>,
    task: JoinHandle<Result<(), muxflow_kubernetes::Error>>,
}

impl Scheduler {
    pub(crate) fn start(client: Client, settings: Settings) -> Self {
        let (stop, stopped) = oneshot::channel();
        let until = async {
            drop(stopped.await);
        };
        Scheduler { stop, task: tokio::spawn(scheduler::run(client, settings, until)) }
    }

    pub(crate) async fn stop(self) {
        assert!(self.stop.send(()).is_ok(), "the scheduler ended by itself");
        self.task.await.unwrap().unwrap();
    }
}

/// Fast enough for a test.
pub(crate) fn settings(identity: &str) -> Settings {
    Settings {
        lease: Duration::from_secs(3),
        settle: Duration::from_millis(50),
        listen: Duration::from_secs(1),
        ..Settings::new(install::NAMESPACE, identity)
    }
}

/// Makes bound pods run, and lets pods that are told to leave go, as a kubelet would.
pub(crate) struct FakeKubelet(JoinHandle<()>);

impl FakeKubelet {
    pub(crate) fn start(client: Client) -> Self {
        FakeKubelet(tokio::spawn(async move {
            loop {
                let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
                // The API server may be down on purpose.
                for pod in
                    pods.list(&ListParams::default()).await.map(|l| l.items).unwrap_or_default()
                {
                    tend(&pods, &pod).await;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }))
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn tend(pods: &Api<Pod>, pod: &Pod) {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let spec = pod.spec.as_ref();
    if spec.and_then(|s| s.node_name.as_ref()).is_none() {
        return;
    }
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default();
    if pod.metadata.deletion_timestamp.is_some() {
        if phase == "Running" {
            set_phase_of(pods, pod, "Failed").await;
        }
        drop(pods.delete(name, &DeleteParams::default().grace_period(0)).await);
    } else if phase == "Pending" {
        set_phase_of(pods, pod, "Running").await;
    }
}

/// The same, unless the pod has changed since it was read.
async fn set_phase_of(pods: &Api<Pod>, pod: &Pod, phase: &str) {
    let ready = if phase == "Running" { "True" } else { "False" };
    let patch = json!({
        "metadata": {"resourceVersion": pod.metadata.resource_version},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]},
    });
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    drop(pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)).await);
}

pub(crate) async fn set_phase(pods: &Api<Pod>, name: &str, phase: &str) {
    let ready = if phase == "Running" { "True" } else { "False" };
    let patch =
        json!({"status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]}});
    drop(pods.patch_status(name, &PatchParams::default(), &Patch::Strategic(patch)).await);
}

/// The administrator's hands.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) client: Client,
    pub(crate) pods: Api<Pod>,
    pub(crate) gpus: Api<Gpu>,
    pub(crate) nodes: Api<Node>,
    pub(crate) jobs: Api<Job>,
}

impl World {
    pub(crate) fn new(client: &Client) -> Self {
        World {
            client: client.clone(),
            pods: Api::namespaced(client.clone(), NAMESPACE),
            gpus: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            jobs: Api::namespaced(client.clone(), NAMESPACE),
        }
    }

    /// Removes everything that a scenario left.
    pub(crate) async fn clean(&self) {
        let (all, now) = (ListParams::default(), DeleteParams::default().grace_period(0));
        let budgets: Api<PodDisruptionBudget> = Api::namespaced(self.client.clone(), NAMESPACE);
        self.jobs.delete_collection(&DeleteParams::background(), &all).await.unwrap();
        budgets.delete_collection(&now, &all).await.unwrap();
        self.gpus.delete_collection(&now, &all).await.unwrap();
        self.nodes.delete_collection(&now, &all).await.unwrap();
        self.clean_what_few_write().await;
        wait("all pods gone", || async {
            self.pods.delete_collection(&now, &all).await.unwrap();
            let left = self.pods.list(&all).await.unwrap().items;
            for pod in &left {
                self.let_go(pod).await;
            }
            left.is_empty().then_some(())
        })
        .await;
    }

    /// Quotas, priorities, profiles, models and claims: a scenario that failed has not taken them away.
    async fn clean_what_few_write(&self) {
        let (all, now) = (ListParams::default(), DeleteParams::default());
        let quotas: Api<ResourceQuota> = Api::namespaced(self.client.clone(), NAMESPACE);
        quotas.delete_collection(&now, &all).await.unwrap();
        let profiles: Api<Profile> = Api::all(self.client.clone());
        profiles.delete_collection(&now, &all).await.unwrap();
        let models: Api<Model> = Api::all(self.client.clone());
        models.delete_collection(&now, &all).await.unwrap();
        let classes: Api<PriorityClass> = Api::all(self.client.clone());
        for class in classes.list(&all).await.unwrap().items {
            let name = class.metadata.name.unwrap_or_default();
            if !name.starts_with("system-") {
                classes.delete(&name, &now).await.unwrap();
            }
        }
        let claims = dra::api(&self.client, "ResourceClaim", "resourceclaims", true);
        for claim in claims.list(&all).await.unwrap().items {
            let name = claim.metadata.name.unwrap_or_default();
            let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
            // It may be gone by now.
            drop(claims.patch(&name, &PatchParams::default(), &none).await);
            drop(claims.delete(&name, &now).await);
        }
    }

    /// Takes off what keeps a pod: the controller of a Job that is gone may never do it.
    async fn let_go(&self, pod: &Pod) {
        if pod.metadata.finalizers.as_ref().is_some_and(|all| !all.is_empty()) {
            let none = Patch::Merge(json!({"metadata": {"finalizers": null}}));
            let name = pod.metadata.name.as_deref().unwrap_or_default();
            // It may be gone by now.
            drop(self.pods.patch(name, &PatchParams::default(), &none).await);
        }
    }

    pub(crate) async fn node(&self, name: &str, labels: Value, spec: Value) {
        let taints = json!({"spec": {"taints": spec["taints"]}});
        let node = json!({"metadata": {"name": name, "labels": labels}, "spec": spec});
        let node: Node = serde_json::from_value(node).unwrap();
        self.nodes.create(&PostParams::default(), &node).await.unwrap();
        // A new node is tainted as not ready; here no controller takes that off.
        self.nodes.patch(name, &PatchParams::default(), &Patch::Merge(taints)).await.unwrap();
        let status = json!({"status": {"allocatable":
            {"cpu": "8", "memory": "32Gi", "pods": "110", "muxflow.dev/offline": "8"},
            "capacity": {"cpu": "8", "memory": "32Gi", "pods": "110", "muxflow.dev/offline": "8"}}});
        let as_kubelet = PatchParams::default();
        self.nodes.patch_status(name, &as_kubelet, &Patch::Merge(status)).await.unwrap();
    }

    /// A GPU that lends so many of its 40 SMs.
    pub(crate) async fn gpu(&self, uuid: &str, node: &str, share_sms: u32) {
        let spec = GpuSpec {
            uuid: uuid.to_owned(),
            node: node.to_owned(),
            gpu_type: "T4".to_owned(),
            sms: 40,
            memory_bytes: 16 << 30,
        };
        let gpu = Gpu::new(&uuid.to_lowercase(), spec);
        self.gpus.create(&PostParams::default(), &gpu).await.unwrap();
        self.report(uuid, State::Healthy, share_sms).await;
    }

    /// What an agent does: write the status.
    pub(crate) async fn report(&self, uuid: &str, state: State, share_sms: u32) {
        self.report_of(uuid, state, share_sms, Duration::ZERO).await;
    }

    /// What an agent wrote that has been silent for an hour.
    pub(crate) async fn last_word(&self, uuid: &str, state: State) {
        self.report_of(uuid, state, 0, Duration::from_secs(3600)).await;
    }

    async fn report_of(&self, uuid: &str, state: State, share_sms: u32, ago: Duration) {
        let status = GpuStatus {
            state,
            reason: None,
            observed_at: Time(k8s_openapi::jiff::Timestamp::now() - ago),
            share_sms,
            quota_bytes: 8 << 30,
            multi_user: false,
            online: None,
            job: None,
            sample: None,
        };
        let patch = Patch::Merge(json!({"status": status}));
        let name = uuid.to_lowercase();
        self.gpus.patch_status(&name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// A pod for our scheduler; `spec` and `metadata` are merged into it.
    pub(crate) async fn pod(&self, name: &str, metadata: Value, spec: Value) -> Pod {
        let mut pod = json!({"metadata": {"name": name}, "spec": pod_spec()});
        merge(&mut pod["metadata"], metadata);
        merge(&mut pod["spec"], spec);
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.pods.create(&PostParams::default(), &pod).await.unwrap()
    }

    /// A Job that survives evictions.
    pub(crate) async fn job(&self, name: &str, pods: u32) {
        let ignore = json!({"rules": [{"action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]});
        self.job_with(name, pods, Some(ignore)).await;
    }

    /// A Job with a podFailurePolicy of its own, or none.
    pub(crate) async fn job_with(&self, name: &str, pods: u32, policy: Option<Value>) {
        self.create_job(name, pods, json!({"podFailurePolicy": policy})).await;
    }

    /// A Job that somebody else lets go.
    pub(crate) async fn suspended_job(&self, name: &str, pods: u32) {
        self.create_job(name, pods, json!({"suspend": true})).await;
    }

    async fn create_job(&self, name: &str, pods: u32, own: Value) {
        let mut template = pod_spec();
        template["restartPolicy"] = json!("Never");
        let mut job = json!({"metadata": {"name": name}, "spec": {
            "parallelism": pods, "completions": pods, "backoffLimit": 0,
            "template": {"spec": template}}});
        merge(&mut job["spec"], own);
        let job: Job = serde_json::from_value(job).unwrap();
        self.jobs.create(&PostParams::default(), &job).await.unwrap();
    }

    /// Living pods and the GPU that each was bound to.
    pub(crate) async fn places(&self) -> BTreeMap<String, (String, String)> {
        let pods = self.pods.list(&ListParams::default()).await.unwrap().items;
        pods.iter()
            .filter(|p| p.metadata.deletion_timestamp.is_none())
            .filter_map(|p| {
                let node = p.spec.as_ref()?.node_name.clone()?;
                let gpu = p.metadata.annotations.as_ref()?.get(names::GPU)?.clone();
                Some((p.metadata.name.clone()?, (node, gpu)))
            })
            .collect()
    }

    pub(crate) async fn wait_for_places(&self, count: usize) -> BTreeMap<String, (String, String)> {
        wait(&format!("{count} pods bound"), || async {
            let places = self.places().await;
            (places.len() == count).then_some(places)
        })
        .await
    }

    /// The message of the pod's PodScheduled condition, once it contains some words.
    pub(crate) async fn wait_for_message(&self, pod: &str, words: &str) -> String {
        wait(&format!("{pod} told about {words:?}"), || async {
            let pod = self.pods.get(pod).await.unwrap();
            let conditions = pod.status?.conditions?;
            let message = conditions.into_iter().find(|c| c.type_ == "PodScheduled")?.message?;
            message.contains(words).then_some(message)
        })
        .await
    }

    /// An event with this reason about the pod.
    pub(crate) async fn wait_for_event(&self, pod: &str, reason: &str) -> String {
        self.wait_for_event_with(pod, reason, "").await
    }

    /// The same, with these words in it.
    pub(crate) async fn wait_for_event_with(&self, pod: &str, reason: &str, words: &str) -> String {
        let events: Api<Event> = Api::namespaced(self.client.clone(), NAMESPACE);
        wait(&format!("event {reason} of {pod} with {words:?}"), || async {
            let fields = ListParams::default().fields(&format!("involvedObject.name={pod}"));
            let all = events.list(&fields).await.unwrap().items;
            let mut own = all.into_iter().filter(|e| e.reason.as_deref() == Some(reason));
            own.find_map(|e| e.message.filter(|message| message.contains(words)))
        })
        .await
    }
}

fn pod_spec() -> Value {
    json!({"schedulerName": "muxflow", "terminationGracePeriodSeconds": 2,
        "automountServiceAccountToken": false,
        "containers": [{"name": "c", "image": "none", "resources":
            {"limits": {"muxflow.dev/offline": "1"}, "requests": {"cpu": "100m"}}}]})
}

fn merge(into: &mut Value, from: Value) {
    if let (Some(into), Value::Object(from)) = (into.as_object_mut(), from) {
        into.extend(from);
    }
}

/// An owner that exists but whose controller does not run: enough to make a pod movable.
pub(crate) async fn owner(client: &Client) -> Value {
    let sets: Api<ReplicaSet> = Api::namespaced(client.clone(), NAMESPACE);
    let set: ReplicaSet = serde_json::from_value(json!({"metadata": {"generateName": "owner-"}, "spec": {
        "replicas": 0, "selector": {"matchLabels": {"a": "b"}},
        "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "none"}]}}}}))
    .unwrap();
    let set = sets.create(&PostParams::default(), &set).await.unwrap().metadata;
    json!({"ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set.name,
        "uid": set.uid, "controller": true}]})
}
