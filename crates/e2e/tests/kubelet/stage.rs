//! The cluster, its one node with emulated GPUs, the chart on it, and the scheduler of Kubernetes.

use std::fs::File;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

use futures::FutureExt as _;
use k8s_openapi::api::core::v1::{Node as NodeObject, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, CustomResourceExt as _};
use muxflow_e2e::build::{client as program, must, products};
use muxflow_kubernetes::connect::connect;
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::{Gpu, Model, Profile, State};
use muxflow_test_cluster::scenarios::wait;
use muxflow_test_cluster::{Cluster, Error, Node, Part};
use serde_json::json;

use crate::install::{self, Chart};

pub(crate) const NODE: &str = "n1";
/// GPUs of the node.
pub(crate) const GPUS: usize = 2;

/// Controllers that pods of users and of the chart ask for, beside those of every test.
const CONTROLLERS: &[&str] = &[
    "daemonset-controller",
    "deployment-controller",
    "endpointslice-controller",
    "horizontal-pod-autoscaler-controller",
    "replicaset-controller",
];

/// What a scenario gets. Fields are dropped in this order: who asks before who answers.
pub(crate) struct Stage {
    pub(crate) chart: Chart,
    gpus: Running,
    pub(crate) node: Node,
    pub(crate) client: Client,
    pub(crate) out: PathBuf,
    pub(crate) cluster: Cluster,
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already is what was asked for.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

impl Stage {
    #[expect(clippy::print_stdout, reason = "a test program reports on its output")]
    pub(crate) async fn start() -> Result<Self, Error> {
        let mut cluster = Cluster::start_with(CONTROLLERS)?;
        let node = Node::start(&cluster, NODE)?;
        cluster.start_part(Part::Scheduler)?;
        let client = connect(Some(&cluster.kubeconfig())).await.unwrap();
        define(&client).await;
        ready(&client, &node).await;
        let out = node.folder().join("out");
        std::fs::create_dir_all(&out).unwrap();
        let gpus = start_gpus(&node);
        install::put_image(&node)?;
        let chart = Chart::render(client.clone(), &cluster, &node)?;
        let stage = Stage { chart, gpus, node, client, out, cluster };
        let installing = AssertUnwindSafe(stage.chart.install()).catch_unwind();
        if let Err(why) = installing.await {
            println!("{}", stage.told());
            std::panic::resume_unwind(why);
        }
        Ok(stage)
    }

    /// What the parts said last.
    pub(crate) fn told(&self) -> String {
        let last = |text: &str, lines: usize| {
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        };
        format!(
            "--- agent\n{}\n--- scheduler\n{}\n--- kubelet\n{}\n--- containerd\n{}\n--- GPUs (process {})\n{}\nmore in {}",
            last(&self.agent_log(), 30),
            last(&self.pod_log("muxflow_muxflow-scheduler"), 15),
            self.node.log("kubelet", 25),
            self.node.log("containerd", 10),
            self.gpus.0.id(),
            self.node.log("gpus", 5),
            self.cluster.folder().display()
        )
    }

    /// What the agents wrote whose pods are still there.
    pub(crate) fn agent_log(&self) -> String {
        self.pod_log("muxflow_muxflow-agent")
    }

    /// What the containers of pods wrote whose namespace and name begin so, the oldest file first.
    pub(crate) fn pod_log(&self, start: &str) -> String {
        let inside = |folder: PathBuf| {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.map(|entry| entry.path()).collect::<Vec<PathBuf>>()
        };
        let named = |path: &PathBuf| {
            path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(start))
        };
        let pods = inside(self.node.folder().join("pods")).into_iter().filter(named);
        let mut files: Vec<PathBuf> = pods.flat_map(inside).flat_map(inside).collect();
        files.sort_by_key(|file| {
            std::fs::metadata(file).and_then(|data| data.modified()).unwrap_or(UNIX_EPOCH)
        });
        let text = |file: &PathBuf| std::fs::read_to_string(file).unwrap_or_default();
        let lines = files.iter().map(text).collect::<String>();
        // The runtime writes the time, the stream and a letter in front of each line.
        let own = |line: &str| line.splitn(4, ' ').nth(3).unwrap_or(line).to_owned() + "\n";
        lines.lines().map(own).collect()
    }

    /// Processes of the node, by its numbers, of whose arguments one ends so.
    pub(crate) fn processes(&self, end: &str) -> Vec<u32> {
        let is_one = |id: &u32| {
            let words = std::fs::read(self.node.inside(&format!("proc/{id}/cmdline")));
            let words = words.unwrap_or_default();
            words.split(|byte| *byte == 0).any(|word| word.ends_with(end.as_bytes()))
        };
        let entries = std::fs::read_dir(self.node.inside("proc")).unwrap().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut all: Vec<u32> = ids.filter(is_one).collect();
        all.sort_unstable();
        all
    }

    /// The MPS daemons of the node.
    pub(crate) fn mps_daemons(&self) -> Vec<u32> {
        self.processes("nvidia-cuda-mps-control")
    }

    /// Breaks a GPU.
    pub(crate) fn fault(&self, gpu: usize, words: &[&str]) {
        let mut fault = self.node.command(&products().join("muxflow-emulated-fault"));
        fault.arg("--dir").arg(self.node.folder().join("gpus"));
        must(fault.args(["--gpu", &gpu.to_string()]).args(words));
    }

    /// All GPUs, once the agent has told of them and finds them well.
    pub(crate) async fn healthy_gpus(&self) -> Vec<String> {
        let gpus: Api<Gpu> = Api::all(self.client.clone());
        wait("all GPUs healthy", || async {
            let all = gpus.list(&Default::default()).await.unwrap().items;
            let well = |gpu: &&Gpu| gpu.status.as_ref().is_some_and(|s| s.state == State::Healthy);
            let well: Vec<String> = all.iter().filter(well).map(|g| g.spec.uuid.clone()).collect();
            (well.len() == GPUS).then_some(well)
        })
        .await
    }
}

/// Installs the definitions of the custom resources.
async fn define(client: &Client) {
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let apply = PatchParams::apply("test");
    for definition in [Gpu::crd(), Model::crd(), Profile::crd()] {
        let name = definition.metadata.name.clone().unwrap();
        definitions.patch(&name, &apply, &Patch::Apply(&definition)).await.unwrap();
    }
    let gpus: Api<Gpu> = Api::all(client.clone());
    wait("the definitions served", || async { gpus.list(&Default::default()).await.ok() }).await;
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), "default");
    wait("the default account", || async { accounts.get_opt("default").await.unwrap() }).await;
}

/// Waits until the kubelet says that its node is ready.
async fn ready(client: &Client, node: &Node) {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    let began = Instant::now();
    loop {
        let conditions = nodes.get_opt(NODE).await.unwrap().and_then(|n| n.status?.conditions);
        let ready = conditions.iter().flatten().find(|c| c.type_ == "Ready");
        if ready.is_some_and(|c| c.status == "True") {
            break;
        }
        let why = ready.and_then(|c| c.message.clone()).unwrap_or_default();
        let late = began.elapsed() > Duration::from_secs(120);
        assert!(!late, "the node is not ready: {why}\n{}", node.log("kubelet", 30));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    // New nodes are tainted as not ready, and here no controller takes that off.
    let taints = json!({"spec": {"taints": []}});
    nodes.patch(NODE, &PatchParams::default(), &Patch::Merge(taints)).await.unwrap();
}

fn logged(command: &mut Command, node: &Node, part: &str) -> Running {
    let log = File::create(node.folder().join(format!("{part}.log"))).unwrap();
    let also = log.try_clone().unwrap();
    Running(command.stdin(Stdio::null()).stdout(also).stderr(log).spawn().unwrap())
}

/// The emulated GPUs of the node. They die with it.
fn start_gpus(node: &Node) -> Running {
    let gpus = node.folder().join("gpus");
    let mut command = node.command(&products().join("muxflow-emulated-node"));
    command.args(["--gpus", &format!("t4x{GPUS}"), "--dir"]).arg(&gpus).arg("--");
    // The log of the kernel is there from the first line on.
    let script = r#"touch "$MUXFLOW_EMULATED_DIR/kernel.log"; exec sleep infinity"#;
    let running = logged(command.args(["sh", "-c", script]), node, "gpus");
    let began = Instant::now();
    while !gpus.join("kernel.log").exists() {
        assert!(began.elapsed() < Duration::from_secs(60), "{}", node.log("gpus", 20));
        std::thread::sleep(Duration::from_millis(50));
    }
    running
}

/// What pods mount and are told beside what the device plugin gives them: where the host's programs
/// and the driver's libraries are. On a real node the image has the first, and NVIDIA's container
/// runtime puts in the second.
pub(crate) fn host_side(stage: &Stage) -> (Vec<serde_json::Value>, Vec<serde_json::Value>) {
    let worker = program("worker", &[]);
    let gpus = stage.node.folder().join("gpus");
    let folders = [
        ("usr", PathBuf::from("/usr"), true),
        ("built", products().to_owned(), true),
        ("worker", worker.parent().unwrap().canonicalize().unwrap(), true),
        ("gpus", gpus.clone(), false),
        ("out", stage.out.clone(), false),
    ];
    let volumes =
        folders.iter().map(|(name, path, _)| json!({"name": name, "hostPath": {"path": path}}));
    let mounts = folders
        .iter()
        .map(|(name, path, sealed)| json!({"name": name, "mountPath": path, "readOnly": sealed}));
    (volumes.collect(), mounts.collect())
}

/// What makes a program see the node's GPUs.
pub(crate) fn driver_variables(stage: &Stage) -> serde_json::Value {
    let gpus = stage.node.folder().join("gpus");
    json!([
        {"name": "LD_LIBRARY_PATH", "value": gpus.join("lib")},
        {"name": "MUXFLOW_EMULATED_DIR", "value": gpus},
        {"name": "OUT", "value": stage.out},
        {"name": "WORKER", "value": program("worker", &[]).canonicalize().unwrap()},
    ])
}

/// A resource's amount on the node, as the kubelet last said.
pub(crate) async fn offered(client: &Client) -> (Vec<i64>, Vec<i64>) {
    let nodes: Api<NodeObject> = Api::all(client.clone());
    let status = nodes.get(NODE).await.unwrap().status.unwrap();
    let amount = |list: &Option<std::collections::BTreeMap<_, _>>, name: &str| -> i64 {
        let list: &std::collections::BTreeMap<
            String,
            k8s_openapi::apimachinery::pkg::api::resource::Quantity,
        > = match list {
            Some(list) => list,
            None => return -1,
        };
        list.get(name).and_then(|q| q.0.parse().ok()).unwrap_or(-1)
    };
    let both = [names::ONLINE_RESOURCE, names::OFFLINE_RESOURCE];
    (
        both.iter().map(|name| amount(&status.capacity, name)).collect(),
        both.iter().map(|name| amount(&status.allocatable, name)).collect(),
    )
}
