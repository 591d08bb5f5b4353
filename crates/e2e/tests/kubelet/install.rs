//! The chart on the node: the image of `cargo xtask image`, and everything that the chart renders, with
//! no rights but those.
//!
//! Changed is what a machine without a network of pods and without a GPU asks for: both programs use
//! the network of the host and find the API server there, on ports that are free; the agent is given
//! the libraries of the emulated driver, as NVIDIA's container runtime would give it the real ones.

use std::path::{Path, PathBuf};

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{Namespace, Node as NodeObject};
use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use muxflow_e2e::build::{cargo, must, products};
use muxflow_test_cluster::cluster::free_ports;
use muxflow_test_cluster::scenarios::wait;
use muxflow_test_cluster::{Cluster, Error, Node};
use serde_json::{Value, json};

use crate::stage::NODE;

/// Where the chart is installed.
pub(crate) const NAMESPACE: &str = "muxflow";
/// The name that the chart gives the image, with the registry that it means.
const IMAGE: &str = concat!("docker.io/library/muxflow:", env!("CARGO_PKG_VERSION"));

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// What the chart renders, changed as far as this machine asks for.
pub(crate) struct Chart {
    client: Client,
    documents: Vec<DynamicObject>,
    /// Where the agent serves its metrics.
    pub(crate) port: u16,
}

/// Gives the node the image that the chart names.
pub(crate) fn put_image(node: &Node) -> Result<(), Error> {
    let root = node.folder().join("muxflow-image");
    let mut make = cargo();
    make.args(["run", "--quiet", "--package", "xtask", "--", "image", "--profile", "dev"]);
    must(make.arg("--rootfs").arg(&root).current_dir(workspace()));
    // What a node's image is told to start.
    std::os::unix::fs::symlink("/usr/bin/muxflow", root.join("pause")).unwrap();
    node.put_image(IMAGE, &root)
}

impl Chart {
    pub(crate) fn render(client: Client, cluster: &Cluster, node: &Node) -> Result<Self, Error> {
        let gpus = node.folder().join("gpus");
        let settings = format!(
            "kernel_log = '{}'\ncgroup_parent = '{}'\npass_env = ['MUXFLOW_EMULATED_DIR']\n[mps]\nmulti_user = true\nprogram = '{}'\n",
            shown(&gpus.join("kernel.log")),
            node.group("agent"),
            shown(&products().join("nvidia-cuda-mps-control")),
        );
        let values = json!({
            "scheduler": {"replicas": 1, "leaseSeconds": 3},
            "agent": {"dra": true, "reportEverySeconds": 2, "config": settings},
        });
        let file = node.folder().join("values.yaml");
        std::fs::write(&file, values.to_string()).unwrap();
        let chart = workspace().join("deploy/helm/muxflow");
        let text = cluster.render_chart(&chart, NAMESPACE, Some(&file)).unwrap();
        let [port, other, _] = free_ports()?;
        let text = text.replace("9470", &port.to_string()).replace("9471", &other.to_string());
        let mut documents: Vec<DynamicObject> = serde_saphyr::from_multiple(&text).unwrap();
        for document in &mut documents {
            match document.types.as_ref().unwrap().kind.as_str() {
                "DaemonSet" => {
                    on_the_host(document, cluster);
                    among_gpus(document, &gpus);
                }
                "Deployment" => on_the_host(document, cluster),
                _ => {}
            }
        }
        Ok(Chart { client, documents, port })
    }

    /// Installs all of it and waits until both programs are ready by their probes.
    pub(crate) async fn install(&self) {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let label = json!({"metadata": {"name": NAMESPACE}});
        let apply = PatchParams::apply("install").force();
        namespaces.patch(NAMESPACE, &apply, &patch("v1", "Namespace", label)).await.unwrap();
        let nodes: Api<NodeObject> = Api::all(self.client.clone());
        let label = json!({"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}});
        nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
        for document in &self.documents {
            let name = document.metadata.name.as_deref().unwrap();
            let answer = self.api(document).patch(name, &apply, &Patch::Apply(document)).await;
            answer.unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        self.ready().await;
    }

    /// Removes all of it, as `helm uninstall` does; the definitions stay.
    pub(crate) async fn remove(&self) {
        for document in self.documents.iter().rev() {
            let name = document.metadata.name.as_deref().unwrap();
            self.api(document).delete(name, &DeleteParams::background()).await.unwrap();
        }
        let pods = self.pods();
        wait("no pod of the chart left", || async {
            pods.list(&ListParams::default()).await.unwrap().items.is_empty().then_some(())
        })
        .await;
    }

    /// Another version of the agent, as far as the cluster can see: its pod is replaced.
    pub(crate) async fn update_agent(&self) {
        let sets = self.sets();
        let before = sets.get("muxflow-agent").await.unwrap().metadata.generation;
        let moment = std::time::UNIX_EPOCH.elapsed().unwrap().as_micros().to_string();
        let version = json!({"spec": {"template": {"metadata": {"annotations":
            {"muxflow.dev/version": moment}}}}});
        let patch = Patch::Merge(version);
        let after = sets.patch("muxflow-agent", &PatchParams::default(), &patch).await.unwrap();
        assert!(after.metadata.generation > before, "nothing was updated");
        self.ready().await;
    }

    /// Waits until all pods of the present version are ready and no other is left.
    pub(crate) async fn ready(&self) {
        let (sets, pods) = (self.sets(), self.pods());
        let deployments: Api<Deployment> = Api::namespaced(self.client.clone(), NAMESPACE);
        wait("the agent and the scheduler ready by their probes", || async {
            let set = sets.get("muxflow-agent").await.unwrap();
            let (generation, status) = (set.metadata.generation, set.status?);
            let current = status.observed_generation == generation
                && status.updated_number_scheduled == Some(1)
                && status.number_ready == 1;
            let scheduler = deployments.get("muxflow-scheduler").await.unwrap().status?;
            let all = pods.list(&ListParams::default()).await.unwrap().items.len();
            (current && scheduler.ready_replicas == Some(1) && all == 2).then_some(())
        })
        .await;
    }

    fn sets(&self) -> Api<DaemonSet> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    pub(crate) fn pods(&self) -> Api<k8s_openapi::api::core::v1::Pod> {
        Api::namespaced(self.client.clone(), NAMESPACE)
    }

    /// The path of a document's kind: namespaced where the document names a namespace.
    fn api(&self, document: &DynamicObject) -> Api<DynamicObject> {
        let types = document.types.clone().unwrap();
        let (group, version) =
            types.api_version.rsplit_once('/').unwrap_or(("", &types.api_version));
        let gvk = GroupVersionKind::gvk(group, version, &types.kind);
        let mut resource = ApiResource::from_gvk(&gvk);
        if let Some(stem) = types.kind.to_lowercase().strip_suffix('y') {
            resource.plural = format!("{stem}ies");
        }
        match document.metadata.namespace.as_deref() {
            Some(namespace) => Api::namespaced_with(self.client.clone(), namespace, &resource),
            None => Api::all_with(self.client.clone(), &resource),
        }
    }
}

fn patch(version: &str, kind: &str, mut object: Value) -> Patch<Value> {
    object["apiVersion"] = json!(version);
    object["kind"] = json!(kind);
    Patch::Apply(object)
}

fn add(list: &mut Value, more: Value) {
    match list {
        Value::Array(all) => all.push(more),
        none => *none = json!([more]),
    }
}

/// There is no network between pods and none to the API server's service.
fn on_the_host(document: &mut DynamicObject, cluster: &Cluster) {
    let spec = &mut document.data["spec"]["template"]["spec"];
    spec["hostNetwork"] = json!(true);
    let port = cluster.port().to_string();
    for (name, value) in
        [("KUBERNETES_SERVICE_HOST", "127.0.0.1"), ("KUBERNETES_SERVICE_PORT", &port)]
    {
        add(&mut spec["containers"][0]["env"], json!({"name": name, "value": value}));
    }
}

/// What NVIDIA's container runtime would put in: the driver's libraries and the MPS programs.
fn among_gpus(document: &mut DynamicObject, gpus: &Path) {
    let spec = &mut document.data["spec"]["template"]["spec"];
    for (name, path) in [("gpus", gpus), ("built", products())] {
        add(&mut spec["volumes"], json!({"name": name, "hostPath": {"path": path}}));
        let mount = json!({"name": name, "mountPath": path});
        add(&mut spec["containers"][0]["volumeMounts"], mount);
    }
    let lib = gpus.join("lib");
    for (name, value) in [("LD_LIBRARY_PATH", lib.as_path()), ("MUXFLOW_EMULATED_DIR", gpus)] {
        add(&mut spec["containers"][0]["env"], json!({"name": name, "value": value}));
    }
}
