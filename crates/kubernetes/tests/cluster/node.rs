//! The node's side against a real API server, with an executor that only remembers what it was told.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use muxflow_agent::gpu::guest::GuestSpec;
use muxflow_kubernetes::dra::driver::Sockets;
use muxflow_kubernetes::names;
use muxflow_kubernetes::node::executor::{Executor, LocalGpu, NotLetIn, Reading};
use muxflow_kubernetes::node::ground::{Places, Wish};
use muxflow_kubernetes::node::{Node, Settings};
use muxflow_kubernetes::resource::{SampleStatus, State};
use muxflow_test_cluster::scenarios::wait;
use muxflow_types::{JobId, Micros};
use serde_json::json;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::Stage;
use crate::install;
use crate::world::{self, NAMESPACE, Scheduler, World};

pub(crate) const GPU: &str = "GPU-real";

/// One GPU whose state a test sets.
pub(crate) struct FakeExecutor {
    uuid: String,
    state: Mutex<State>,
    guests: Mutex<BTreeMap<String, GuestSpec>>,
    told: Mutex<BTreeSet<String>>,
}

impl FakeExecutor {
    pub(crate) fn new(uuid: &str) -> Arc<Self> {
        Arc::new(FakeExecutor {
            uuid: uuid.to_owned(),
            state: Mutex::new(State::Healthy),
            guests: Mutex::default(),
            told: Mutex::default(),
        })
    }

    pub(crate) fn set(&self, state: State) {
        *self.state.lock().unwrap() = state;
    }

    pub(crate) fn guest(&self, uid: &str) -> Option<GuestSpec> {
        self.guests.lock().unwrap().get(uid).cloned()
    }

    fn tell(&self, word: &str, job: &JobId) {
        self.told.lock().unwrap().insert(format!("{word} {job}"));
    }

    /// Whether the gate may open again; asked once.
    pub(crate) fn has_relented(&self) -> bool {
        self.told.lock().unwrap().remove("relent")
    }

    pub(crate) fn was_told(&self, word: &str, job: &str) -> bool {
        self.told.lock().unwrap().contains(&format!("{word} {job}"))
    }
}

impl Executor for FakeExecutor {
    fn gpus(&self) -> Vec<LocalGpu> {
        vec![LocalGpu {
            uuid: self.uuid.clone(),
            gpu_type: "T4".into(),
            pci: "0000:01:00".into(),
            memory_bytes: 16 << 30,
            mps_pipe: None,
            multi_user: false,
        }]
    }

    fn read(&self, _: &str) -> Option<Reading> {
        Some(Reading {
            state: *self.state.lock().unwrap(),
            reason: None,
            sms: 40,
            share_sms: 20,
            quota_bytes: 8 << 30,
            demand_pct: 30.0,
            online_activity_pct: Some(20.0),
            online_memory_bytes: 1 << 30,
            sample: SampleStatus { sm_activity_pct: Some(25.0), ..SampleStatus::default() },
            guest: None,
            placeable: true,
            outside: Vec::new(),
        })
    }

    fn attach(&self, _: &str, guest: GuestSpec) -> Result<PathBuf, NotLetIn> {
        self.guests.lock().unwrap().insert(guest.job.as_str().to_owned(), guest);
        Ok("/nowhere".into())
    }

    fn drain(&self, _: &str, guest: &JobId, _: &str) {
        self.tell("drain", guest);
    }

    fn detach(&self, _: &str, guest: &JobId) {
        self.tell("detach", guest);
        self.guests.lock().unwrap().remove(guest.as_str());
    }

    fn relent(&self, _: &str) {
        self.told.lock().unwrap().insert("relent".to_owned());
    }

    fn namespaces(&self, _: &str) -> Vec<u64> {
        Vec::new()
    }
}

pub(crate) struct Side {
    pub(crate) node: Node,
    pub(crate) executor: Arc<FakeExecutor>,
    pub(crate) wishes: UnboundedSender<Wish>,
}

async fn side(stage: &Stage, client: Client) -> Side {
    side_with(stage, client, None).await
}

/// Reports often, so that a test sees what is told.
const OFTEN: Duration = Duration::from_secs(2);

/// An agent with all its files in one folder.
pub(crate) fn settings(folder: &Path, node: &str, dra: Option<Sockets>) -> Settings {
    Settings {
        places: Places {
            state: folder.join("state"),
            plugins: folder.join("device-plugins"),
            pod_resources: folder.join("pod-resources.sock"),
            cdi: Some(folder.join("cdi")),
            ..Places::default()
        },
        dra,
        report_every: OFTEN,
        ..Settings::new(node)
    }
}

/// The same, as a driver for claims too.
pub(crate) async fn side_with(stage: &Stage, client: Client, dra: Option<Sockets>) -> Side {
    side_in(stage, client, dra, State::Healthy).await
}

/// The same, of an agent whose GPU is in this state when it starts.
async fn side_in(stage: &Stage, client: Client, dra: Option<Sockets>, state: State) -> Side {
    let executor = FakeExecutor::new(GPU);
    executor.set(state);
    let settings = settings(&stage.cluster.folder().join("node"), "n1", dra);
    let (wishes, told) = unbounded_channel();
    let node = Node::start(client, &settings, executor.clone(), told).await.unwrap();
    Side { node, executor, wishes }
}

pub(crate) fn overlimit(job: &str) -> Wish {
    Wish {
        job: JobId::new(job).unwrap(),
        reason: "GpuOverlimit",
        why: "GPU is Overlimit".into(),
        while_ill: true,
    }
}

/// With the rights of its account and no others: the agent reports its GPU, the scheduler uses it, the
/// pod is let in, and leaves when the GPU says so although no scheduler runs any more.
pub(crate) async fn life_of_a_guest(stage: &mut Stage) {
    let world = stage.world.clone();
    let client = install::limited(stage, "muxflow-agent").await;
    world.node("n1", json!({}), json!({})).await;
    let Side { node, executor, wishes } = side(stage, client).await;
    let gpu = wait("the GPU reported", || async {
        world.gpus.get_opt("gpu-real").await.unwrap()?.status
    })
    .await;
    assert_eq!((gpu.state, gpu.share_sms, gpu.job), (State::Healthy, 20, None));
    let owner = world.gpus.get("gpu-real").await.unwrap().metadata.owner_references.unwrap();
    assert_eq!((owner[0].kind.as_str(), owner[0].name.as_str()), ("Node", "n1"));

    let scheduler = Scheduler::start(stage.limited().await, world::settings("a"));
    world.pod("job", json!({}), json!({})).await;
    assert_eq!(world.wait_for_places(1).await["job"].1, GPU);
    let uid = world.pods.get("job").await.unwrap().metadata.uid.unwrap();
    wait("the pod let in", || async { executor.guests.lock().unwrap().get(&uid).cloned() }).await;
    wait("the pairing told", || async {
        let status = world.gpus.get("gpu-real").await.unwrap().status?;
        (status.job.as_deref() == Some("default/job")).then_some(())
    })
    .await;
    scheduler.stop().await;

    executor.set(State::Overlimit);
    wishes.send(overlimit(&uid)).unwrap();
    wait("the state told at once", || async {
        let status = world.gpus.get("gpu-real").await.unwrap().status?;
        (status.state == State::Overlimit).then_some(())
    })
    .await;
    world.wait_for_event("job", "GpuOverlimit").await;
    wait("the guest gone", || async { executor.was_told("detach", &uid).then_some(()) }).await;
    assert!(executor.was_told("drain", &uid));
    node.stop().await;
}

/// A disruption budget says no: the pod stays, and when the GPU has recovered it may go on.
pub(crate) async fn a_budget_says_no(stage: &mut Stage) {
    let world = stage.world.clone();
    world.node("n1", json!({}), json!({})).await;
    let Side { node, executor, wishes } = side(stage, stage.client.clone()).await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(stage.client.clone(), NAMESPACE);
    for (whom, label) in [("me", "keep"), ("too", "keep"), ("twice", "also")] {
        let budget = serde_json::from_value(json!({"metadata": {"name": whom}, "spec":
            {"minAvailable": 1, "selector": {"matchLabels": {label: whom}}}}))
        .unwrap();
        budgets.create(&PostParams::default(), &budget).await.unwrap();
    }
    // Of two budgets the API server asks neither, and fails; the pod is told that too.
    let labels = json!({"labels": {"keep": "me", "also": "twice"}});
    let uid = bound(stage, "held", labels).await;
    wait("the pod let in", || async { executor.guests.lock().unwrap().get(&uid).cloned() }).await;
    executor.set(State::Overlimit);
    wishes.send(overlimit(&uid)).unwrap();
    let said = world.wait_for_event("held", "EvictionRefused").await;
    assert!(said.contains("held at its gate") && said.contains("more than one"), "{said}");
    executor.set(State::Healthy);
    wait("the gate may open again", || async {
        executor.told.lock().unwrap().contains("relent").then_some(())
    })
    .await;
    let pod = world.pods.get("held").await.unwrap();
    assert!(pod.metadata.deletion_timestamp.is_none());
    assert!(!executor.was_told("drain", &uid));

    // A pod that must leave whatever becomes of the GPU leaves though the GPU recovers meanwhile.
    let uid = bound(stage, "astray", json!({"labels": {"keep": "too"}})).await;
    wait("the pod let in", || async { executor.guests.lock().unwrap().get(&uid).cloned() }).await;
    executor.set(State::Overlimit);
    wishes.send(overlimit(&uid)).unwrap();
    world.wait_for_event("astray", "EvictionRefused").await;
    let astray = Wish { reason: "WrongGpu", while_ill: false, ..overlimit(&uid) };
    wishes.send(astray).unwrap();
    executor.set(State::Healthy);
    budgets.delete("too", &DeleteParams::default()).await.unwrap();
    world.wait_for_event("astray", "WrongGpu").await;
    wait("the guest gone", || async { executor.was_told("detach", &uid).then_some(()) }).await;
    node.stop().await;
}

/// An agent is updated under a scheduler that lives: while the new one does not know yet how its GPU
/// is, and while its object has no status at all, the pod stays where it is; and it is taken over.
pub(crate) async fn restarted(stage: &mut Stage) {
    let world = stage.world.clone();
    let client = install::limited(stage, "muxflow-agent").await;
    world.node("n1", json!({}), json!({})).await;
    let first = side(stage, client.clone()).await;
    let mut settings = world::settings("a");
    // Plans of everything all the time.
    settings.parameters.interval = Micros::from_secs(1);
    settings.parameters.restart_cost = Micros(1000);
    let scheduler = Scheduler::start(stage.limited().await, settings);
    let owner = world::owner(&stage.client).await;
    world.pod("job", owner, json!({})).await;
    world.wait_for_places(1).await;
    let uid = world.pods.get("job").await.unwrap().metadata.uid.unwrap();
    wait("the pod let in", || async { first.executor.guest(&uid) }).await;
    let told = |state: State| {
        let world = &world;
        async move {
            wait(&format!("{state:?} told"), || async {
                let status = world.gpus.get("gpu-real").await.unwrap().status?;
                (status.state == state).then_some(())
            })
            .await;
        }
    };
    first.node.stop().await;
    left(&world, State::Init, Some("the agent leaves")).await;
    let Side { node, executor, .. } = side_in(stage, client, None, State::Init).await;
    wait("the new one heard", || async {
        let status = world.gpus.get("gpu-real").await.unwrap().status?;
        status.reason.is_none().then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    world.gpus.delete("gpu-real", &DeleteParams::default()).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    let pod = world.pods.get("job").await.unwrap();
    assert_eq!((pod.metadata.uid.as_deref(), pod.metadata.deletion_timestamp), (Some(&*uid), None));
    wait("the pod taken over", || async { executor.guest(&uid) }).await;
    wait("the GPU told again", || async { world.gpus.get_opt("gpu-real").await.unwrap() }).await;
    executor.set(State::Healthy);
    told(State::Healthy).await;
    scheduler.stop().await;
    node.stop().await;
}

/// What an agent that has stopped said last, by the time it is gone.
async fn left(world: &World, state: State, reason: Option<&str>) {
    let status = world.gpus.get("gpu-real").await.unwrap().status.unwrap();
    assert_eq!((status.state, status.reason.as_deref()), (state, reason));
}

/// An agent that leaves says so first: a pod that comes then waits for the next agent and is not put
/// where no plugin would answer. A GPU whose last word was that offline work leaves keeps it.
pub(crate) async fn leaving(stage: &mut Stage) {
    let world = stage.world.clone();
    let client = install::limited(stage, "muxflow-agent").await;
    world.node("n1", json!({}), json!({})).await;
    let first = side(stage, client.clone()).await;
    wait("the GPU reported", || async { world.gpus.get_opt("gpu-real").await.unwrap()?.status })
        .await;
    let scheduler = Scheduler::start(stage.limited().await, world::settings("a"));
    first.node.stop().await;
    left(&world, State::Init, Some("the agent leaves")).await;
    world.pod("job", json!({}), json!({})).await;
    world.wait_for_event("job", "FailedScheduling").await;
    assert_eq!(world.places().await.len(), 0, "bound where nobody lets it in");
    let second = side(stage, client).await;
    world.wait_for_places(1).await;
    second.executor.set(State::Overlimit);
    wait("Overlimit told", || async {
        let status = world.gpus.get("gpu-real").await.unwrap().status?;
        (status.state == State::Overlimit).then_some(())
    })
    .await;
    second.node.stop().await;
    left(&world, State::Overlimit, None).await;
    scheduler.stop().await;
}

/// `kubectl delete pod`: the guest is drained as soon as it is asked to leave, whatever its first
/// process is. An agent that restarts takes over who is there.
pub(crate) async fn deleting_drains(stage: &mut Stage) {
    let world = stage.world.clone();
    world.node("n1", json!({}), json!({})).await;
    let first = side(stage, stage.client.clone()).await;
    // The finalizer keeps the pod on its way out for as long as the test looks.
    let uid = bound(stage, "deleted", json!({"finalizers": ["muxflow.dev/test"]})).await;
    wait("the pod let in", || async { first.executor.guests.lock().unwrap().get(&uid).cloned() })
        .await;
    first.node.stop().await;
    let Side { node, executor, .. } = side(stage, stage.client.clone()).await;
    wait("the pod taken over", || async { executor.guests.lock().unwrap().get(&uid).cloned() })
        .await;
    // What somebody does to its annotations takes nothing off the GPU: it is still a guest to drain.
    let bare = json!({"metadata": {"annotations": {names::GPU: null}}});
    world.pods.patch("deleted", &PatchParams::default(), &Patch::Merge(bare)).await.unwrap();
    world.pods.delete("deleted", &DeleteParams::default()).await.unwrap();
    wait("the guest drained", || async { executor.was_told("drain", &uid).then_some(()) }).await;
    let free = json!({"metadata": {"finalizers": null}});
    world.pods.patch("deleted", &PatchParams::default(), &Patch::Merge(free)).await.unwrap();
    wait("the guest gone", || async { executor.was_told("detach", &uid).then_some(()) }).await;
    node.stop().await;
}

/// A pod as the scheduler binds it; its uid.
async fn bound(stage: &Stage, name: &str, metadata: serde_json::Value) -> String {
    bound_to(stage, name, metadata, "n1", GPU).await
}

/// The same, to any GPU.
pub(crate) async fn bound_to(
    stage: &Stage,
    name: &str,
    mut metadata: serde_json::Value,
    node: &str,
    gpu: &str,
) -> String {
    metadata["annotations"] = json!({names::GPU: gpu, names::SHARE: "20/40", names::QUOTA: "1024"});
    let pod = stage.world.pod(name, metadata, json!({"nodeName": node})).await;
    pod.metadata.uid.unwrap()
}
