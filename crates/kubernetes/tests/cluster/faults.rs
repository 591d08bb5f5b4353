//! What breaks in real clusters, broken on purpose.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::Config;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::config::KubeConfigOptions;
use muxflow_kubernetes::resource::State;
use muxflow_kubernetes::scheduler::LEASE;
use muxflow_test_cluster::Part;
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::Stage;
use crate::install;
use crate::proxy::Proxy;
use crate::rights::Log;
use crate::world::{Scheduler, World, settings};

/// A scheduler in a process of its own.
struct Process(Child);

impl Process {
    /// With the rights of the scheduler's account and no others.
    async fn start(stage: &Stage, identity: &str) -> Self {
        let file = install::kubeconfig(stage, install::NAMESPACE, "muxflow-scheduler").await;
        let kubeconfig = stage.cluster.folder().join(format!("{identity}.kubeconfig"));
        std::fs::write(&kubeconfig, serde_json::to_string(&file).unwrap()).unwrap();
        let log =
            std::fs::File::create(stage.cluster.folder().join(format!("{identity}.log"))).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .arg("scheduler")
            .arg(kubeconfig)
            .arg(identity)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        Process(child)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

async fn field(world: &World, nodes: u32, gpus_each: u32) {
    for n in 0..nodes {
        world.node(&format!("n{n}"), json!({}), json!({})).await;
        for g in 0..gpus_each {
            world.gpu(&format!("GPU-{n}-{g}"), &format!("n{n}"), 20).await;
        }
    }
}

fn leases(stage: &Stage) -> Api<Lease> {
    Api::namespaced(stage.client.clone(), install::NAMESPACE)
}

async fn holder(leases: &Api<Lease>) -> Option<String> {
    leases.get_opt(LEASE).await.unwrap()?.spec?.holder_identity
}

fn all_apart(places: &BTreeMap<String, (String, String)>) {
    let gpus: BTreeSet<&String> = places.values().map(|(_, gpu)| gpu).collect();
    assert_eq!(gpus.len(), places.len(), "two pods on one GPU: {places:?}");
}

/// Every binding that was asked for, by pod, with the API server's answers.
type Bindings = BTreeMap<String, Vec<u64>>;

/// Adds those that are new in the log. A scheduler that does not know what it, or the leader before it,
/// has bound asks again and is refused.
fn read_bindings(log: &Log, all: &mut Bindings) {
    for line in log.news().lines() {
        let entry: Value = serde_json::from_str(line).unwrap();
        let object = &entry["objectRef"];
        if object["resource"] == "pods" && object["subresource"] == "binding" {
            let code = entry["responseStatus"]["code"].as_u64().unwrap_or(0);
            let pod = object["name"].as_str().unwrap_or_default();
            all.entry(pod.to_owned()).or_default().push(code);
        }
    }
}

/// Each of so many pods was bound once, and nobody asked to bind one that was. A busy API server may
/// have put one off, or a request broke off before it was answered: that is asked again. The log comes
/// a little after the answers.
async fn bound_once(log: &Log, pods: usize) {
    let bindings = RefCell::new(Bindings::new());
    wait("all bindings in the log", || async {
        read_bindings(log, &mut bindings.borrow_mut());
        (bindings.borrow().len() >= pods).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let mut bindings = bindings.into_inner();
    read_bindings(log, &mut bindings);
    assert_eq!(bindings.len(), pods, "{bindings:?}");
    for (pod, answers) in &bindings {
        let made = answers.iter().filter(|code| **code == 201).count();
        assert!(made <= 1 && !answers.contains(&409), "{pod} was to be bound again: {answers:?}");
    }
}

/// The leader dies while it binds. Each pod is bound once and none is forgotten.
pub(crate) async fn leader_killed(stage: &mut Stage) {
    let world = stage.world.clone();
    let leases = leases(stage);
    drop(leases.delete(LEASE, &DeleteParams::default()).await);
    const PODS: usize = 48;
    field(&world, 8, 8).await;
    let log = Log::from_now(stage);
    let mut first = Process::start(stage, "first").await;
    wait("the first leads", || async { (holder(&leases).await? == "first").then_some(()) }).await;
    let _second = Process::start(stage, "second").await;
    for n in 0..PODS {
        world.pod(&format!("p{n}"), json!({}), json!({})).await;
        if world.places().await.len() >= PODS / 4 && n < PODS {
            break;
        }
    }
    let created = world.pods.list(&ListParams::default()).await.unwrap().items.len();
    first.0.kill().unwrap();
    first.0.wait().unwrap();
    let killed = Instant::now();
    for n in created..PODS {
        world.pod(&format!("p{n}"), json!({}), json!({})).await;
    }
    let before = world.places().await;
    let after = world.wait_for_places(PODS).await;
    let took = killed.elapsed();
    assert!(before.len() < PODS, "the leader was too fast to be killed in the middle");
    bound_once(&log, PODS).await;
    all_apart(&after);
    assert_eq!(holder(&leases).await.as_deref(), Some("second"));
    let bindings = stage.cluster.folder().join("second.log");
    assert!(took < Duration::from_secs(100), "{took:?}; see {}", bindings.display());
}

/// What a replica does that holds the lease: it says so again and again.
async fn steal(leases: &Api<Lease>) {
    let now = MicroTime(k8s_openapi::jiff::Timestamp::now());
    let stolen = json!({"spec": {"holderIdentity": "thief", "renewTime": now}});
    leases.patch(LEASE, &PatchParams::default(), &Patch::Merge(stolen)).await.unwrap();
}

/// Somebody takes the lease away. The replica stops, and leads again when the thief is silent.
pub(crate) async fn lease_stolen(stage: &mut Stage) {
    let world = stage.world.clone();
    let leases = leases(stage);
    drop(leases.delete(LEASE, &DeleteParams::default()).await);
    field(&world, 1, 2).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("honest"));
    world.pod("before", json!({}), json!({})).await;
    world.wait_for_places(1).await;
    steal(&leases).await;
    let mut thief = JoinSet::new();
    thief.spawn({
        let leases = leases.clone();
        async move {
            loop {
                tokio::time::sleep(Duration::from_millis(300)).await;
                steal(&leases).await;
            }
        }
    });
    // Within two thirds of the lease's length the replica knows, or stops by its own clock.
    tokio::time::sleep(Duration::from_millis(2100)).await;
    world.pod("during", json!({}), json!({})).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(world.places().await.len(), 1, "a replica without the lease bound a pod");
    thief.shutdown().await;
    world.wait_for_places(2).await;
    assert_eq!(holder(&leases).await.as_deref(), Some("honest"));
    scheduler.stop().await;
    assert_eq!(holder(&leases).await, None, "the lease was not given back");
}

/// Others bind pods, delete them and write GPUs while the scheduler works.
pub(crate) async fn rivals(stage: &mut Stage) {
    let world = stage.world.clone();
    field(&world, 4, 8).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let writer = tokio::spawn({
        let world = world.clone();
        async move {
            for round in 0..4 {
                for n in 0..4 {
                    for g in 0..8 {
                        world.report(&format!("GPU-{n}-{g}"), State::Healthy, 20 + round).await;
                    }
                }
            }
        }
    });
    for n in 0..24 {
        let name = format!("p{n}");
        world.pod(&name, json!({}), json!({})).await;
        match n % 4 {
            // Bound by hand to a node, with no GPU: no longer ours to place.
            1 => bind_by_hand(&world.pods, &name).await,
            // Created again under the same name: the old uid must not be bound.
            2 => {
                drop(world.pods.delete(&name, &DeleteParams::default().grace_period(0)).await);
                wait("the old one gone", || async {
                    world.pods.get_opt(&name).await.unwrap().is_none().then_some(())
                })
                .await;
                world.pod(&name, json!({}), json!({})).await;
            }
            _ => {}
        }
    }
    writer.await.unwrap();
    wait("every pod on a node", || async {
        let pods = world.pods.list(&ListParams::default()).await.unwrap().items;
        let bound = pods.iter().filter(|p| p.spec.as_ref().is_some_and(|s| s.node_name.is_some()));
        (bound.count() == 24).then_some(())
    })
    .await;
    all_apart(&world.places().await);
    scheduler.stop().await;
}

async fn bind_by_hand(pods: &Api<Pod>, name: &str) {
    let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
        "target": {"kind": "Node", "name": "n0"}});
    let answer: Result<Value, _> =
        pods.create_subresource("binding", name, &PostParams::default(), &binding).await;
    match answer {
        Ok(_) => {}
        // The scheduler was faster.
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(error) => panic!("{name}: {error}"),
    }
}

/// The API server dies and comes back: all watches drop, the lease cannot be renewed. With the rights of
/// an administrator: a server that has just started refuses accounts whose rights it has not read yet.
pub(crate) async fn api_server_restarts(stage: &mut Stage) {
    let world = stage.world.clone();
    field(&world, 2, 8).await;
    let scheduler = Scheduler::start(stage.client.clone(), settings("a"));
    world.pod("before", json!({}), json!({})).await;
    let before = world.wait_for_places(1).await;
    // Their bindings are on their way when the server dies, or not yet sent.
    for n in 0..4 {
        world.pod(&format!("during{n}"), json!({}), json!({})).await;
    }
    stage.cluster.kill_part(Part::ApiServer);
    tokio::time::sleep(Duration::from_secs(5)).await; // Longer than the lease.
    tokio::task::block_in_place(|| stage.cluster.start_part(Part::ApiServer)).unwrap();
    for n in 0..4 {
        world.pod(&format!("after{n}"), json!({}), json!({})).await;
    }
    let after = world.wait_for_places(9).await;
    assert_eq!(after["before"], before["before"]);
    all_apart(&after);
    scheduler.stop().await;
}

/// Every connection to the API server is cut in the middle of things, three times: watches, the lease
/// and requests under way. Each pod is bound once.
pub(crate) async fn watches_dropped(stage: &mut Stage) {
    let world = stage.world.clone();
    field(&world, 2, 8).await;
    let to = stage.cluster.url().trim_start_matches("https://").to_owned();
    let proxy = Proxy::start(to).await;
    let mut file = install::kubeconfig(stage, install::NAMESPACE, "muxflow-scheduler").await;
    let through = file.clusters[0].cluster.as_mut().unwrap();
    through.server = Some(format!("https://127.0.0.1:{}", proxy.port));
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    let client = muxflow_kubernetes::connect::client(config).unwrap();
    let log = Log::from_now(stage);
    let scheduler = Scheduler::start(client, settings("a"));
    for round in 0..3 {
        for n in 0..4 {
            world.pod(&format!("p{round}-{n}"), json!({}), json!({})).await;
            if n == 1 && round > 0 {
                assert!(proxy.cut() > 0, "nothing went through the proxy");
            }
        }
        all_apart(&world.wait_for_places((round + 1) * 4).await);
    }
    scheduler.stop().await;
    bound_once(&log, 12).await;
}
