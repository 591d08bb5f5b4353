//! The scheduler at scale: fake nodes and GPUs that are only objects, pods that all wait, and the time
//! until they are bound, beside the scheduler that Kubernetes ships binding the same pods.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::names::OFFLINE_RESOURCE;
use muxflow_kubernetes::resource::{Gpu, GpuSpec, GpuStatus, State};
use muxflow_test_cluster::{Cluster, Part};
use serde_json::{Value, json};

use crate::world::{NAMESPACE, World};
use crate::{Stage, install};

const GPUS_EACH: usize = 8;
const PARALLEL: usize = 24;

/// What one scheduler came to.
struct Row {
    name: &'static str,
    took: Duration,
    memory_mib: u64,
    requests: f64,
    note: String,
}

#[expect(clippy::print_stdout, reason = "it prints a table")]
pub(crate) async fn run(cluster: Cluster, nodes: usize, pods: usize) {
    let client = crate::world::client(&cluster.kubeconfig()).await;
    let mut stage = Stage { world: World::new(&client), client, cluster };
    install::install(&stage).await;
    let began = Instant::now();
    field(&stage.client, nodes).await;
    println!(
        "{nodes} nodes and {} GPUs written in {:.0} s",
        nodes * GPUS_EACH,
        began.elapsed().as_secs_f64()
    );
    let ours = muxflow(&stage, pods).await;
    clear(&stage.client).await;
    let theirs = kube_scheduler(&mut stage, pods).await;
    println!(
        "\n| scheduler | pods | until all are bound, s | bound per s | peak memory, MiB | requests per s | |\n| --- | --- | --- | --- | --- | --- | --- |"
    );
    for row in [ours, theirs] {
        let seconds = row.took.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = pods as f64 / seconds;
        let asked = row.requests / seconds;
        println!(
            "| {} | {pods} | {seconds:.1} | {rate:.0} | {} | {asked:.0} | {} |",
            row.name, row.memory_mib, row.note
        );
    }
}

async fn field(client: &Client, nodes: usize) {
    let all: Api<Node> = Api::all(client.clone());
    let gpus: Api<Gpu> = Api::all(client.clone());
    let amounts = json!({"cpu": "64", "memory": "256Gi", "pods": "110", OFFLINE_RESOURCE: "8"});
    let (all, gpus, amounts) = (&all, &gpus, &amounts);
    let write = |n: usize| async move {
        let name = format!("n{n}");
        let node: Node = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        all.create(&PostParams::default(), &node).await.unwrap();
        let free = Patch::Merge(json!({"spec": {"taints": null}}));
        all.patch(&name, &PatchParams::default(), &free).await.unwrap();
        let status = Patch::Merge(json!({"status": {"capacity": amounts, "allocatable": amounts}}));
        all.patch_status(&name, &PatchParams::default(), &status).await.unwrap();
        for g in 0..GPUS_EACH {
            let uuid = format!("gpu-{n}-{g}");
            let spec = GpuSpec {
                uuid: uuid.clone(),
                node: name.clone(),
                gpu_type: "T4".into(),
                sms: 40,
                memory_bytes: 16 << 30,
            };
            gpus.create(&PostParams::default(), &Gpu::new(&uuid, spec)).await.unwrap();
            let status = GpuStatus {
                state: State::Healthy,
                reason: None,
                // Nobody writes again, so it must not grow old.
                observed_at: Time(jiff::Timestamp::now() + Duration::from_secs(3600)),
                share_sms: u32::try_from(10 + (n + g) % 30).unwrap(),
                quota_bytes: 8 << 30,
                multi_user: true,
                online: None,
                job: None,
                sample: None,
            };
            let status = Patch::Merge(json!({"status": status}));
            gpus.patch_status(&uuid, &PatchParams::default(), &status).await.unwrap();
        }
    };
    futures::stream::iter((0..nodes).map(write)).buffer_unordered(PARALLEL).collect::<()>().await;
}

async fn submit(client: &Client, pods: usize, scheduler: &str) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let api = &api;
    let write = |n: usize| async move {
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {"name": format!("p{n}")}, "spec": {
            "schedulerName": scheduler, "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "none", "resources":
                {"limits": {OFFLINE_RESOURCE: "1"}, "requests": {"cpu": "100m"}}}]}}))
            .unwrap();
        api.create(&PostParams::default(), &pod).await.unwrap();
    };
    futures::stream::iter((0..pods).map(write)).buffer_unordered(PARALLEL).collect::<()>().await;
}

async fn clear(client: &Client) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let now = DeleteParams::default().grace_period(0);
    while !api.list(&ListParams::default().limit(1)).await.unwrap().items.is_empty() {
        api.delete_collection(&now, &ListParams::default()).await.unwrap();
    }
}

/// Waits until no pod is without a node.
async fn all_bound(client: &Client) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let waiting = ListParams::default().fields("spec.nodeName=").limit(1);
    let began = Instant::now();
    while !api.list(&waiting).await.unwrap().items.is_empty() {
        assert!(began.elapsed() < Duration::from_secs(1200), "not all bound after 20 minutes");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How many requests the API server has answered.
async fn requests(client: &Client) -> f64 {
    let request = http::Request::get("/metrics").body(Vec::new()).unwrap();
    let text = client.request_text(request).await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with("apiserver_request_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn peak_mib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

async fn muxflow(stage: &Stage, pods: usize) -> Row {
    submit(&stage.client, pods, "muxflow").await;
    let before = requests(&stage.client).await;
    let log = stage.cluster.folder().join("bench.log");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("scheduler")
        .arg(stage.cluster.kubeconfig())
        .arg("bench")
        .env("RUST_LOG", "muxflow_kubernetes=info")
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let began = Instant::now();
    all_bound(&stage.client).await;
    let took = began.elapsed();
    let requests = requests(&stage.client).await - before;
    let memory_mib = peak_mib(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    let of = |word: &str| -> Vec<f64> {
        let part = |line: &str| line.split(word).nth(1)?.split_whitespace().next()?.parse().ok();
        text.lines().filter_map(part).collect()
    };
    let most = |values: Vec<f64>| values.into_iter().fold(0.0, f64::max);
    let note = format!(
        "{} cycles; the longest plan {:.0} ms, the longest cycle with its requests {:.0} ms",
        of("cycle_ms=").len(),
        most(of("plan_ms=")),
        most(of("cycle_ms="))
    );
    Row { name: "muxflow", took, memory_mib, requests, note }
}

async fn kube_scheduler(stage: &mut Stage, pods: usize) -> Row {
    submit(&stage.client, pods, "default-scheduler").await;
    let before = requests(&stage.client).await;
    tokio::task::block_in_place(|| stage.cluster.start_part(Part::Scheduler)).unwrap();
    let began = Instant::now();
    all_bound(&stage.client).await;
    let took = began.elapsed();
    let requests = requests(&stage.client).await - before;
    let memory_mib = stage.cluster.process(Part::Scheduler).map_or(0, peak_mib);
    stage.cluster.kill_part(Part::Scheduler);
    let note =
        "nodes only: it knows no GPUs; its limit of requests raised to 5000 per s".to_owned();
    Row { name: "kube-scheduler", took, memory_mib, requests, note }
}

/// The arguments `bench NODES PODS`.
pub(crate) fn wanted(arguments: &[String]) -> Option<(usize, usize)> {
    match arguments {
        [word, nodes, pods] if word == "bench" => {
            let number = |text: &Value| text.as_u64().and_then(|n| usize::try_from(n).ok());
            let read = |text: &str| serde_json::from_str(text).ok().as_ref().and_then(number);
            Some((read(nodes)?, read(pods)?))
        }
        _ => None,
    }
}
