//! The scheduler at scale: fake nodes and GPUs that are only objects, agents that only write status,
//! pods that all wait, and the time until they are bound, beside the scheduler that Kubernetes ships
//! binding the same pods.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::Client;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::names::{self, OFFLINE_RESOURCE};
use muxflow_kubernetes::resource::{
    Gpu, GpuSpec, GpuStatus, OnlineStatus, Profile, ProfileSpec, State,
};
use muxflow_test_cluster::{Cluster, Part};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::world::{NAMESPACE, World};
use crate::{Stage, install};

const GPUS_EACH: usize = 8;
const PARALLEL: usize = 24;
/// How many different services and jobs there are.
const SERVICES: usize = 40;
const PROGRAMS: usize = 50;
/// A plan of everything, running jobs included, is made so often here; a restart is reckoned as a minute,
/// and an interval must be longer than that.
pub(crate) const RESCHEDULE_S: u64 = 120;

/// How large.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Size {
    nodes: usize,
    pods: usize,
    /// Status writes per second of all agents together.
    reports: usize,
}

/// What one scheduler came to.
struct Row {
    name: &'static str,
    took: Duration,
    memory_mib: u64,
    processor_s: f64,
    requests: f64,
    note: String,
}

/// Requests of the harness itself, which are not the schedulers'.
type Own = Arc<AtomicUsize>;

#[expect(clippy::print_stdout, reason = "it prints a table")]
pub(crate) async fn run(cluster: Cluster, size: Size) {
    let Size { nodes, pods, reports } = size;
    let client = crate::world::client(&cluster.kubeconfig()).await;
    let mut stage = Stage { world: World::new(&client), client, cluster };
    install::install(&stage).await;
    let began = Instant::now();
    profiles(&stage.client).await;
    field(&stage.client, nodes).await;
    println!(
        "{nodes} nodes and {} GPUs written in {:.0} s",
        nodes * GPUS_EACH,
        began.elapsed().as_secs_f64()
    );
    let own = Own::default();
    let agents = agents(&stage.client, size, &own);
    let left = pods.saturating_sub(nodes * GPUS_EACH);
    println!(
        "\n{nodes} nodes, {} GPUs, {reports} status writes of agents per s\n\n| scheduler | pods | until all that fit are bound, s | bound per s | peak memory, MiB | processor, s | requests per s | |\n| --- | --- | --- | --- | --- | --- | --- | --- |",
        nodes * GPUS_EACH
    );
    muxflow(&stage, pods, left, &own).await.print(pods, left);
    clear(&stage.client).await;
    kube_scheduler(&mut stage, pods, left, &own).await.print(pods, left);
    agents.abort();
}

impl Row {
    #[expect(clippy::print_stdout, reason = "it prints a table")]
    fn print(&self, pods: usize, left: usize) {
        let seconds = self.took.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let rate = (pods - left) as f64 / seconds;
        let asked = self.requests / seconds;
        println!(
            "| {} | {pods} | {seconds:.1} | {rate:.0} | {} | {:.1} | {asked:.0} | {} |",
            self.name, self.memory_mib, self.processor_s, self.note
        );
    }
}

fn service(n: usize) -> String {
    format!("service-{}", n % SERVICES)
}

fn program(n: usize) -> String {
    format!("program-{}", n % PROGRAMS)
}

/// What each service and each job is alone.
async fn profiles(client: &Client) {
    let api: Api<Profile> = Api::all(client.clone());
    let all = (0..SERVICES).map(|n| (service(n), n)).chain((0..PROGRAMS).map(|n| (program(n), n)));
    for (name, n) in all {
        #[expect(clippy::cast_precision_loss, reason = "small numbers")]
        let part = |of: usize| Some((5 + n % of) as f64);
        let spec = ProfileSpec {
            workload: name.clone(),
            gpu_type: "T4".to_owned(),
            solo_speed: Some(1.0),
            gpu_util_pct: part(90),
            sm_activity_pct: part(50),
            sm_occupancy_pct: part(40),
            dram_activity_pct: part(30),
            solo_time_us: Some(10_000),
            memory_bytes: Some(2 << 30),
        };
        api.create(&PostParams::default(), &Profile::new(&name, spec)).await.unwrap();
    }
}

/// Readings wander by a few MiB and points from one time to the next, and from one GPU to the next.
fn noise(n: usize, time: usize, of: u64) -> u64 {
    let mixed = (n as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (time as u64).rotate_left(32);
    mixed.wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_right(29) % of
}

/// What the agent of a GPU says, each time a little differently.
fn status(n: usize, time: usize) -> GpuStatus {
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let activity = (5 + n % SERVICES) as f64 + noise(n, time, 100) as f64 / 100.0;
    GpuStatus {
        state: State::Healthy,
        reason: None,
        // With few reports per second it must not grow old.
        observed_at: Time(jiff::Timestamp::now() + Duration::from_secs(3600)),
        share_sms: u32::try_from(10 + n % 30).unwrap(),
        quota_bytes: (8 << 30) + noise(n, time, 200 << 20),
        multi_user: true,
        online: Some(OnlineStatus {
            service: service(n),
            workload: service(n),
            predicted_sm_activity_pct: activity,
            memory_bytes: (4 << 30) - noise(n, time, 200 << 20),
            critical: false,
            uid: None,
            in_mps: true,
        }),
        job: None,
        sample: None,
    }
}

async fn field(client: &Client, nodes: usize) {
    let all: Api<Node> = Api::all(client.clone());
    let gpus: Api<Gpu> = Api::all(client.clone());
    let amounts = json!({"cpu": "64", "memory": "256Gi", "pods": "110", OFFLINE_RESOURCE: "8"});
    let (all, gpus, amounts) = (&all, &gpus, &amounts);
    let node = |n: usize| async move {
        let name = format!("n{n}");
        let node: Node = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
        all.create(&PostParams::default(), &node).await.unwrap();
        let free = Patch::Merge(json!({"spec": {"taints": null}}));
        all.patch(&name, &PatchParams::default(), &free).await.unwrap();
        let status = Patch::Merge(json!({"status": {"capacity": amounts, "allocatable": amounts}}));
        all.patch_status(&name, &PatchParams::default(), &status).await.unwrap();
    };
    let gpu = |n: usize| async move {
        let uuid = format!("gpu-{n}");
        let spec = GpuSpec {
            uuid: uuid.clone(),
            node: format!("n{}", n / GPUS_EACH),
            gpu_type: "T4".into(),
            sms: 40,
            memory_bytes: 16 << 30,
        };
        gpus.create(&PostParams::default(), &Gpu::new(&uuid, spec)).await.unwrap();
        let status = Patch::Merge(json!({"status": status(n, 0)}));
        gpus.patch_status(&uuid, &PatchParams::default(), &status).await.unwrap();
    };
    futures::stream::iter((0..nodes).map(node)).buffer_unordered(PARALLEL).collect::<()>().await;
    let many = (0..nodes * GPUS_EACH).map(gpu);
    futures::stream::iter(many).buffer_unordered(PARALLEL).collect::<()>().await;
}

/// All agents: each in turn says again how its GPU is.
fn agents(client: &Client, size: Size, own: &Own) -> JoinHandle<()> {
    let gpus: Api<Gpu> = Api::all(client.clone());
    let own = Arc::clone(own);
    tokio::spawn(async move {
        if size.reports == 0 {
            return;
        }
        let mut tick =
            tokio::time::interval(Duration::from_secs(1) / u32::try_from(size.reports).unwrap());
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut next = 0;
        let mut under_way = tokio::task::JoinSet::new();
        loop {
            tick.tick().await;
            while under_way.len() >= PARALLEL {
                under_way.join_next().await;
            }
            let all = size.nodes * GPUS_EACH;
            let (gpus, n, time) = (gpus.clone(), next % all, 1 + next / all);
            next += 1;
            own.fetch_add(1, Ordering::Relaxed);
            under_way.spawn(async move {
                let status = Patch::Merge(json!({"status": status(n, time)}));
                let uuid = format!("gpu-{n}");
                drop(gpus.patch_status(&uuid, &PatchParams::default(), &status).await);
            });
        }
    })
}

/// What owns the pods, so that they may be moved; nobody acts on it.
async fn owner(client: &Client) -> Value {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), NAMESPACE);
    let kept = api.get_opt("owner").await.unwrap();
    let owner = match kept {
        Some(owner) => owner,
        None => {
            let owner = serde_json::from_value(json!({"metadata": {"name": "owner"}})).unwrap();
            api.create(&PostParams::default(), &owner).await.unwrap()
        }
    };
    json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid,
        "controller": true}])
}

async fn submit(client: &Client, pods: usize, scheduler: &str) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let owner = owner(client).await;
    let (api, owner) = (&api, &owner);
    let write = |n: usize| async move {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": format!("p{n}"),
                "ownerReferences": owner, "annotations": {names::WORKLOAD: program(n), names::MEMORY: "2GiB"}}, "spec": {
            "schedulerName": scheduler, "automountServiceAccountToken": false,
            "containers": [{"name": "c", "image": "none", "resources":
                {"limits": {OFFLINE_RESOURCE: "1"}, "requests": {"cpu": "100m"}}}]}}))
        .unwrap();
        api.create(&PostParams::default(), &pod).await.unwrap();
    };
    futures::stream::iter((0..pods).map(write)).buffer_unordered(PARALLEL).collect::<()>().await;
}

/// Removes all pods, some hundreds with each request: one for all takes longer than the API server gives
/// a request.
async fn clear(client: &Client) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let (now, some) = (DeleteParams::default().grace_period(0), ListParams::default().limit(500));
    let began = Instant::now();
    while !api.list(&ListParams::default().limit(1)).await.unwrap().items.is_empty() {
        assert!(began.elapsed() < Duration::from_secs(1200), "pods are left after 20 minutes");
        // One that was cut off goes on with the next.
        drop(api.delete_collection(&now, &some).await);
    }
}

/// Waits until no more than so many pods are without a node, as long as the scheduler lives.
async fn all_bound(client: &Client, own: &Own, left: usize, mut lives: impl FnMut() -> bool) {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let most = u32::try_from(left + 1).unwrap();
    let waiting = ListParams::default().fields("spec.nodeName=").limit(most);
    let pause = Duration::from_millis(if left == 0 { 250 } else { 1000 });
    let began = Instant::now();
    while api.list_metadata(&waiting).await.unwrap().items.len() > left {
        assert!(lives(), "the scheduler has ended; its log is in the folder of the control plane");
        assert!(began.elapsed() < Duration::from_secs(1200), "not all bound after 20 minutes");
        own.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(pause).await;
    }
}

/// Waits until all pods that are left know why they wait; how long that took.
async fn all_told(client: &Client, own: &Own) -> Duration {
    let api: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let waiting = ListParams::default().fields("spec.nodeName=");
    let began = Instant::now();
    loop {
        let pods = api.list(&waiting).await.unwrap().items;
        own.fetch_add(1, Ordering::Relaxed);
        let told = |pod: &Pod| {
            let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
            conditions.into_iter().flatten().any(|c| c.type_ == "PodScheduled")
        };
        if pods.iter().all(told) {
            return began.elapsed();
        }
        assert!(began.elapsed() < Duration::from_secs(1200), "not all told after 20 minutes");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// How many requests the API server has answered that were not the harness's own.
async fn requests(client: &Client, own: &Own) -> f64 {
    let request = http::Request::get("/metrics").body(Vec::new()).unwrap();
    let text = client.request_text(request).await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with("apiserver_request_total{"));
    let all: f64 = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    #[expect(clippy::cast_precision_loss, reason = "a rate is made of it")]
    let own = own.load(Ordering::Relaxed) as f64;
    all - own
}

fn peak_mib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|l| l.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}

/// Processor time of a process so far.
fn processor_s(pid: u32) -> f64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2);
    // A hundred ticks a second on every Linux there is.
    ticks.filter_map(|text| text.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// The numbers after a word in a log.
fn of(text: &str, word: &str) -> Vec<f64> {
    let part = |line: &str| line.split(word).nth(1)?.split_whitespace().next()?.parse().ok();
    text.lines().filter_map(part).collect()
}

async fn muxflow(stage: &Stage, pods: usize, left: usize, own: &Own) -> Row {
    submit(&stage.client, pods, "muxflow").await;
    let before = requests(&stage.client, own).await;
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
    all_bound(&stage.client, own, left, || matches!(child.try_wait(), Ok(None))).await;
    let took = began.elapsed();
    let requests = requests(&stage.client, own).await - before;
    let processor = processor_s(child.id());
    let told = all_told(&stage.client, own).await;
    let binding = std::fs::read_to_string(&log).unwrap();
    // What it takes while nothing waits, and then a plan of everything that runs.
    let idle = processor_s(child.id());
    tokio::time::sleep(Duration::from_secs(10)).await;
    let idle = (processor_s(child.id()) - idle) * 10.0;
    let deadline = Instant::now() + Duration::from_secs(3 * RESCHEDULE_S);
    let anew = loop {
        let text = std::fs::read_to_string(&log).unwrap();
        let line =
            text.lines().skip(binding.lines().count()).find(|l| l.contains("reschedule=true"));
        if let Some(line) = line {
            break line.to_owned();
        }
        assert!(Instant::now() < deadline, "what runs was never planned anew");
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    let memory_mib = peak_mib(child.id());
    child.kill().unwrap();
    child.wait().unwrap();
    let most = |values: Vec<f64>| values.into_iter().fold(0.0, f64::max);
    let rest = match left {
        0 => String::new(),
        _ => format!("; {left} wait, all told why {:.0} s later", told.as_secs_f64()),
    };
    let note = format!(
        "{} cycles: the longest plan {:.0} ms, the longest cycle with its requests {:.0} ms; {idle:.0} % of a processor while nothing waits; a plan of all {} that run {:.0} ms{rest}",
        of(&binding, "cycle_ms=").len(),
        most(of(&binding, "plan_ms=")),
        most(of(&binding, "cycle_ms=")),
        pods - left,
        most(of(&anew, "plan_ms=")),
    );
    Row { name: "muxflow", took, memory_mib, processor_s: processor, requests, note }
}

async fn kube_scheduler(stage: &mut Stage, pods: usize, left: usize, own: &Own) -> Row {
    submit(&stage.client, pods, "default-scheduler").await;
    let before = requests(&stage.client, own).await;
    tokio::task::block_in_place(|| stage.cluster.start_part(Part::Scheduler)).unwrap();
    let began = Instant::now();
    all_bound(&stage.client, own, left, || true).await;
    let took = began.elapsed();
    let requests = requests(&stage.client, own).await - before;
    let pid = stage.cluster.process(Part::Scheduler);
    let (memory_mib, processor_s) = (pid.map_or(0, peak_mib), pid.map_or(0.0, processor_s));
    stage.cluster.kill_part(Part::Scheduler);
    let note =
        "nodes only: it knows no GPUs; its limit of requests raised to 5000 per s".to_owned();
    Row { name: "kube-scheduler", took, memory_mib, processor_s, requests, note }
}

/// The arguments `bench NODES PODS REPORTS`.
pub(crate) fn wanted(arguments: &[String]) -> Option<Size> {
    match arguments {
        [word, nodes, pods, reports] if word == "bench" => Some(Size {
            nodes: nodes.parse().ok()?,
            pods: pods.parse().ok()?,
            reports: reports.parse().ok()?,
        }),
        _ => None,
    }
}
