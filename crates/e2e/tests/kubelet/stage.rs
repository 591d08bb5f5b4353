//! The cluster, its one node, the agent on it, and the two schedulers.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node as NodeObject, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, CustomResourceExt as _};
use muxflow_e2e::build::{client as program, products, xcuda};
use muxflow_kubernetes::connect::connect;
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::{Gpu, Model, Profile, State};
use muxflow_test_cluster::scenarios::wait;
use muxflow_test_cluster::{Cluster, Error, Node, Part};
use serde_json::json;

pub(crate) const NODE: &str = "n1";
/// GPUs of the node.
pub(crate) const GPUS: usize = 2;

/// What a scenario gets. Fields are dropped in this order: who asks before who answers.
pub(crate) struct Stage {
    scheduler: Running,
    agent: Running,
    pub(crate) node: Node,
    pub(crate) client: Client,
    pub(crate) out: PathBuf,
    cluster: Cluster,
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
    pub(crate) async fn start() -> Result<Self, Error> {
        let mut cluster = Cluster::start()?;
        let node = Node::start(&cluster, NODE)?;
        cluster.start_part(Part::Scheduler)?;
        let client = connect(Some(&cluster.kubeconfig())).await.unwrap();
        define(&client).await;
        ready(&client, &node).await;
        let out = node.folder().join("out");
        std::fs::create_dir_all(&out).unwrap();
        let agent = start_agent(&cluster, &node);
        let scheduler = start_scheduler(&cluster, &node);
        Ok(Stage { scheduler, agent, node, client, out, cluster })
    }

    /// What the parts said last.
    pub(crate) fn told(&mut self) -> String {
        let ended = |child: &mut Child| format!("{:?}", child.try_wait());
        format!(
            "--- agent ({})\n{}\n--- scheduler ({})\n{}\n--- kubelet\n{}\n--- containerd\n{}\nmore in {}",
            ended(&mut self.agent.0),
            self.node.log("agent", 30),
            ended(&mut self.scheduler.0),
            self.node.log("scheduler", 15),
            self.node.log("kubelet", 25),
            self.node.log("containerd", 10),
            self.cluster.folder().display()
        )
    }

    /// What the agent wrote so far.
    pub(crate) fn agent_log(&self) -> String {
        self.node.log("agent", usize::MAX)
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

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// The agent on the node, among emulated GPUs. It dies with the node.
fn start_agent(cluster: &Cluster, node: &Node) -> Running {
    let built = products();
    let (gpus, config) = (node.folder().join("gpus"), node.folder().join("agent.toml"));
    let settings = format!(
        "state_dir = '{}'\nrun_dir = '/run/muxflow'\ninterposer = '{}'\nmetrics = '127.0.0.1:0'\nkernel_log = '{}'\ncgroup_parent = '{}'\npass_env = ['MUXFLOW_EMULATED_DIR']\n",
        shown(&node.folder().join("agent")),
        shown(xcuda()),
        shown(&gpus.join("kernel.log")),
        node.group("agent"),
    );
    std::fs::write(&config, settings).unwrap();
    let mut command = node.command(&built.join("muxflow-emulated-node"));
    command.args(["--gpus", &format!("t4x{GPUS}"), "--dir"]).arg(&gpus).arg("--");
    // The log of the kernel is there from the first line on.
    command.args(["sh", "-c", "touch \"$MUXFLOW_EMULATED_DIR/kernel.log\"; exec \"$@\"", "sh"]);
    command.arg(built.join("muxflow")).args(["agent", "--kubernetes", "--node-name", NODE]);
    command.args(["--report-every", "2", "--kubeconfig"]).arg(cluster.kubeconfig());
    command.arg("--config").arg(&config);
    logged(&mut command, node, "agent")
}

fn start_scheduler(cluster: &Cluster, node: &Node) -> Running {
    let mut command = Command::new(products().join("muxflow"));
    command.args(["scheduler", "--namespace", "default", "--lease", "3", "--kubeconfig"]);
    command.arg(cluster.kubeconfig());
    logged(&mut command, node, "scheduler")
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
