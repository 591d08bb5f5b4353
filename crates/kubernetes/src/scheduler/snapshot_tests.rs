//! Objects in, requests out: the snapshot, the planner and the decision together, without a cluster.

use muxflow_policy::cluster::{Parameters, Planner, lint};
use muxflow_predictor::model::Model;
use muxflow_predictor::trained::{Card, TrainedModel};
use muxflow_types::{HealthState, WorkloadName};
use serde_json::{Value, json};

use super::*;
use crate::resource::{GpuSpec, GpuStatus, ProfileSpec, State};
use crate::scheduler::decide::{Action, decide};
use crate::scheduler::offer::real_type;
use crate::scheduler::planning;

#[path = "residents_tests.rs"]
mod residents;

const NOW_S: i64 = 1_000_000;

/// A cluster that a test writes down.
struct World {
    pods: Vec<Arc<Pod>>,
    nodes: Vec<Arc<Node>>,
    gpus: Vec<Arc<Gpu>>,
    profiles: Vec<Arc<Profile>>,
    models: Registry,
    assumed: BTreeMap<String, Assumed>,
    aside: BTreeMap<String, String>,
    missing: BTreeMap<GpuId, Micros>,
    jobs: Vec<Arc<Job>>,
    watched: Micros,
    reschedule: bool,
}

fn at(seconds: i64) -> jiff::Timestamp {
    jiff::Timestamp::from_second(seconds).unwrap()
}

fn node(name: &str, places: u32) -> Arc<Node> {
    let places = places.to_string();
    let node = json!({"metadata": {"name": name}, "status": {"allocatable":
        {"cpu": "8", "pods": "110", "muxflow.dev/offline": places}}});
    Arc::new(serde_json::from_value(node).unwrap())
}

fn gpu(uuid: &str, node: &str) -> Gpu {
    let spec = GpuSpec {
        uuid: uuid.into(),
        node: node.into(),
        gpu_type: "T4".into(),
        sms: 40,
        memory_bytes: 16 << 30,
    };
    let mut gpu = Gpu::new(&uuid.to_lowercase(), spec);
    gpu.status = Some(GpuStatus {
        state: State::Healthy,
        reason: None,
        observed_at: k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at(NOW_S)),
        share_sms: 20,
        quota_bytes: 8 << 30,
        multi_user: true,
        online: None,
        job: None,
        sample: None,
    });
    gpu
}

/// A GPU that says something else about itself.
fn gpu_that(uuid: &str, node: &str, says: impl Fn(&mut GpuStatus)) -> Arc<Gpu> {
    let mut gpu = gpu(uuid, node);
    says(gpu.status.as_mut().unwrap());
    Arc::new(gpu)
}

fn pod(name: &str, annotations: Value, spec: Value) -> Arc<Pod> {
    let mut pod = json!({"metadata": {"name": name, "namespace": "d", "uid": name,
            "creationTimestamp": at(NOW_S - 60).to_string(), "annotations": annotations,
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name,
                "uid": "o", "controller": true}]},
        "spec": {"schedulerName": "muxflow", "containers": [{"name": "c", "resources":
            {"requests": {"cpu": "100m", "muxflow.dev/offline": "1"}}}]},
        "status": {"phase": "Pending"}});
    pod["spec"].as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn waiting(name: &str) -> Arc<Pod> {
    pod(name, json!({}), json!({}))
}

/// Bound by a plan.
fn on(name: &str, node: &str, gpu: &str, more: Value) -> Arc<Pod> {
    let mut annotations = json!({names::GPU: gpu, names::SHARE: "20/40",
        names::QUOTA: (8u64 << 30).to_string()});
    annotations.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    pod(name, annotations, json!({"nodeName": node}))
}

impl World {
    fn new(nodes: Vec<Arc<Node>>, gpus: Vec<Arc<Gpu>>, pods: Vec<Arc<Pod>>) -> Self {
        World {
            pods,
            nodes,
            gpus,
            profiles: Vec::new(),
            models: Registry::with_names(real_type),
            assumed: BTreeMap::new(),
            aside: BTreeMap::new(),
            missing: BTreeMap::new(),
            jobs: Vec::new(),
            watched: Micros::from_secs(300),
            reschedule: false,
        }
    }

    fn rescheduled(self) -> Self {
        World { reschedule: true, ..self }
    }

    fn assemble(&self) -> Assembled {
        assemble(&View {
            at: pods::micros(at(NOW_S)),
            scheduler: "muxflow",
            stale_after: Micros::from_secs(300),
            listen: Micros::from_secs(300),
            watched: self.watched,
            reschedule: self.reschedule,
            pods: &self.pods,
            nodes: &self.nodes,
            gpus: &self.gpus,
            profiles: &self.profiles,
            models: &self.models,
            jobs: &self.jobs,
            assumed: &self.assumed,
            aside: &self.aside,
            missing: &self.missing,
        })
    }

    /// What would be sent.
    fn actions(&self) -> Vec<Action> {
        let world = self.assemble();
        let planner = Planner::new(Parameters::default()).unwrap();
        let plan = planner.plan(&world.snapshot, &self.models).unwrap();
        assert_eq!(lint(&world.snapshot, &plan, planner.parameters()), []);
        decide(world, &plan)
    }

    fn bound(&self) -> Vec<(String, String)> {
        let bind = |action| match action {
            Action::Bind { pod, gpu, .. } => Some((pod.name, gpu.to_string())),
            _ => None,
        };
        self.actions().into_iter().filter_map(bind).collect()
    }

    /// Pods that leave, with the word of their events.
    fn leaving(&self) -> Vec<(String, &'static str)> {
        let evict = |action| match action {
            Action::Evict { pod, reason, .. } => Some((pod.name, reason)),
            _ => None,
        };
        self.actions().into_iter().filter_map(evict).collect()
    }
}

/// One job on one GPU of one node.
fn settled(status: impl Fn(&mut GpuStatus)) -> World {
    let gpus = vec![gpu_that("GPU-a", "n1", status)];
    World::new(vec![node("n1", 8)], gpus, vec![on("job", "n1", "GPU-a", json!({}))])
}

#[test]
fn places_of_other_schedulers_pods_are_counted() {
    let gpus = ["GPU-a", "GPU-b"].map(|g| Arc::new(gpu(g, "n1")));
    let stranger = json!({"schedulerName": "default-scheduler", "nodeName": "n1"});
    let pods = vec![waiting("one"), waiting("two"), pod("stranger", json!({}), stranger)];
    let mut world = World::new(vec![node("n1", 2)], gpus.to_vec(), pods);
    assert_eq!(world.bound().len(), 1);
    world.pods.push(on("mine", "n1", "GPU-a", json!({})));
    assert_eq!(world.bound(), [], "both places are taken");
    let told = world.actions();
    let note = told.iter().find_map(|a| match a {
        Action::Wait { note, .. } => Some(note),
        _ => None,
    });
    assert!(note.unwrap().contains("too little muxflow.dev/offline"), "{told:?}");
    // A plan of everything sees through the places of those whom it may displace, and yet binds none.
    world.reschedule = true;
    assert_eq!(world.bound(), []);
    world.pods.remove(2);
    assert_eq!(world.bound().len(), 1);
}

#[test]
fn a_job_that_counts_more_displaces_one_on_a_full_node() {
    let mut world = settled(|_| {}).rescheduled();
    world.nodes = vec![node("n1", 1)];
    world.pods.push(pod("important", json!({}), json!({"priority": 1_000_000})));
    assert_eq!(world.leaving(), [("job".to_owned(), "Displaced")]);
    assert_eq!(world.bound(), []);
    let patient = json!({"priority": 1_000_000, "preemptionPolicy": "Never"});
    world.pods[1] = pod("important", json!({}), patient);
    assert_eq!(world.leaving(), []);
    let left = World { pods: world.pods.split_off(1), reschedule: false, ..world };
    assert_eq!(left.bound().len(), 1, "it takes what is free");
}

#[test]
fn a_job_keeps_the_quota_that_it_was_started_with() {
    for quota in [0, 1 << 30] {
        let mut world = settled(|s| s.quota_bytes = quota).rescheduled();
        world.pods = vec![on("job", "n1", "GPU-a", json!({names::MEMORY: "6GiB"}))];
        assert_eq!(world.leaving(), [], "the GPU lends {quota} now");
        let another = pod("another", json!({names::MEMORY: "6GiB"}), json!({}));
        world.pods = vec![another];
        assert_eq!(world.bound(), [], "who comes gets what is lent now");
    }
}

#[test]
fn what_is_written_on_a_pod_that_runs_harms_nobody() {
    for (annotation, text) in [
        (names::SHARE, "5/7"),
        (names::SHARE, "much"),
        (names::QUOTA, "all"),
        (names::QUOTA, "999999999999999"),
        (names::MEMORY, "six"),
        (names::WORKLOAD, "a b\n"),
        (names::GPU_TYPES, "***"),
    ] {
        let mut world = settled(|_| {}).rescheduled();
        world.pods = vec![on("job", "n1", "GPU-a", json!({annotation: text})), waiting("new")];
        world.gpus.push(Arc::new(gpu("GPU-b", "n1")));
        // The plan holds (`actions` lints it), the pod stays, and others are served.
        assert_eq!(world.leaving(), [], "{annotation}: {text}");
        assert_eq!(world.bound(), [("new".to_owned(), "GPU-b".to_owned())], "{annotation}: {text}");
        assert!(world.assemble().refused.is_empty(), "{annotation}: {text}");
    }
}

#[test]
fn a_pod_cannot_claim_a_gpu_of_another_node() {
    let gpus = vec![Arc::new(gpu("GPU-a", "n1")), Arc::new(gpu("GPU-b", "n2"))];
    let nodes = vec![node("n1", 8), node("n2", 8)];
    let thief = on("a-thief", "n2", "GPU-a", json!({}));
    let world = World::new(nodes, gpus, vec![thief, on("job", "n1", "GPU-a", json!({}))]);
    assert_eq!(world.leaving(), []);
}

#[test]
fn a_binding_that_may_have_been_made_keeps_its_gpu() {
    let gpus = vec![Arc::new(gpu("GPU-a", "n1"))];
    let mut world = World::new(vec![node("n1", 8)], gpus, vec![waiting("one"), waiting("two")]);
    let assumed = Assumed {
        node: "n1".into(),
        gpu: GpuId::new("GPU-a").unwrap(),
        until: Some(Instant::now()),
    };
    world.assumed.insert("one".into(), assumed);
    for reschedule in [false, true] {
        world.reschedule = reschedule;
        assert_eq!(world.bound(), []);
        assert_eq!(world.leaving(), [], "it is not evicted before anybody knows where it is");
    }
}

#[test]
fn a_service_with_an_unreadable_name_is_no_idle_gpu() {
    let online = json!({"service": "a b\n", "workload": "?", "predictedSmActivityPct": 50.0,
        "critical": true});
    let online: crate::resource::OnlineStatus = serde_json::from_value(online).unwrap();
    let mut world = settled(move |s| s.online = Some(online.clone()));
    world.pods = vec![waiting("new")];
    let told = world.actions();
    assert!(matches!(&told[..], [Action::Wait { note, .. }] if note.contains("outside MPS")));
}

fn model(speed: f64, seen: &[&str]) -> TrainedModel {
    TrainedModel {
        gpu_type: GpuType::new("T4").unwrap(),
        model: Model::Mean(speed),
        online_seen: BTreeSet::new(),
        offline_seen: seen.iter().map(|&name| name.to_owned()).collect(),
        deviation: [0.05, 0.1, 0.2],
        card: Card::default(),
    }
}

#[test]
fn the_model_of_a_type_predicts_for_idle_gpus_too() {
    let online = json!({"service": "s", "workload": "s", "predictedSmActivityPct": 50.0,
        "inMps": true, "memoryBytes": 1 << 30});
    let online: crate::resource::OnlineStatus = serde_json::from_value(online).unwrap();
    let spec = json!({"workload": "s", "gpuType": "T4", "smActivityPct": 40.0});
    let spec: ProfileSpec = serde_json::from_value(spec).unwrap();
    let shared = gpu_that("GPU-b", "n1", |s| s.online = Some(online.clone()));
    let pods = ["one", "two"].map(|n| pod(n, json!({names::WORKLOAD: "bert"}), json!({})));
    let gpus = vec![Arc::new(gpu("GPU-a", "n1")), shared];
    let mut world = World::new(vec![node("n1", 8)], gpus, pods.to_vec());
    world.profiles = vec![Arc::new(Profile::new("s", spec))];
    world.models.insert(model(0.37, &["bert"]));
    let speeds: Vec<String> = world
        .actions()
        .into_iter()
        .filter_map(|action| match action {
            Action::Bind { annotations, .. } => Some(annotations[names::SPEED].clone()),
            _ => None,
        })
        .collect();
    assert_eq!(speeds, ["0.370", "0.370"]);
}

#[test]
fn what_differs_in_nothing_that_counts_is_one_kind() {
    let online = |n: u64| {
        let online = json!({"service": format!("s{n}"), "workload": format!("s{n}"),
            "predictedSmActivityPct": 50.0, "inMps": true, "memoryBytes": (1 << 30) + n});
        Some(serde_json::from_value(online).unwrap())
    };
    let noisy = |n: u64| {
        gpu_that(&format!("GPU-{n}"), "n1", |s| {
            s.quota_bytes += n << 10;
            s.online = online(n);
        })
    };
    let pods: Vec<_> = (0..20).map(|n| waiting(&format!("p{n}"))).collect();
    let world = World::new(vec![node("n1", 8)], (1..8).map(noisy).collect(), pods);
    let seen = world.assemble();
    let kinds: BTreeSet<String> = seen
        .snapshot
        .gpus
        .iter()
        .map(|g| {
            let o = g.online.as_ref().unwrap();
            format!("{} {:?} {:?} {:?}", g.gpu_type, g.quota, o.memory, o.profile)
        })
        .collect();
    assert_eq!(kinds.len(), 1, "{kinds:?}");
    let jobs: BTreeSet<String> = seen
        .snapshot
        .jobs
        .iter()
        .map(|j| format!("{} {:?} {:?}", j.workload, j.profiles, j.gpu_types))
        .collect();
    assert_eq!(jobs.len(), 1, "{jobs:?}");
    assert_eq!(seen.requirements.len(), 1);
    // A name that a model knows stays.
    let mut known = world;
    known.models.insert(model(0.5, &["d/p3"]));
    let named = WorkloadName::new("d/p3").unwrap();
    assert!(known.assemble().snapshot.jobs.iter().any(|j| j.workload == named));
}

#[test]
fn a_pod_that_no_plan_can_place_keeps_nobody_waiting() {
    let gpus = vec![Arc::new(gpu("GPU-a", "n1"))];
    let odd = pod("odd", json!({}), json!({"priority": 1_000_000}));
    let mut world = World::new(vec![node("n1", 8)], gpus, vec![odd, waiting("next")]);
    assert_eq!(world.bound(), [("odd".to_owned(), "GPU-a".to_owned())]);
    world.aside.insert("odd".into(), "its claim two must ask for one".into());
    assert_eq!(world.bound(), [("next".to_owned(), "GPU-a".to_owned())]);
    let told = world.actions();
    let says = |action: &Action| matches!(action, Action::Wait { pod, note } if pod.name == "odd" && note.contains("claim two"));
    assert!(told.iter().any(says), "{told:?}");
}

#[test]
fn of_two_pods_on_a_gpu_the_one_that_its_agent_names_stays() {
    // The older one, of another GPU of the node, has been written upon.
    let gpus = vec![
        gpu_that("GPU-a", "n1", |s| s.job = Some("d/a-old".into())),
        gpu_that("GPU-b", "n1", |s| s.job = Some("d/b-young".into())),
    ];
    let pods = vec![on("a-old", "n1", "GPU-b", json!({})), on("b-young", "n1", "GPU-b", json!({}))];
    let mut world = World::new(vec![node("n1", 8)], gpus, pods);
    assert_eq!(world.leaving(), [("a-old".to_owned(), "GpuTakenTwice")]);
    // Where the agent has not said, it is the older one.
    world.gpus[1] = Arc::new(gpu("GPU-b", "n1"));
    assert_eq!(world.leaving(), [("b-young".to_owned(), "GpuTakenTwice")]);
}

#[test]
fn a_gpu_of_a_pod_that_may_not_be_displaced_is_planned_for_nobody_else() {
    let mut bare = (*on("bare", "n1", "GPU-fast", json!({}))).clone();
    bare.metadata.owner_references = None;
    let gpus =
        vec![gpu_that("GPU-fast", "n1", |_| {}), gpu_that("GPU-slow", "n1", |s| s.share_sms = 4)];
    let important = pod("important", json!({}), json!({"priority": 1_000_000}));
    let pods = vec![Arc::new(bare), important];
    let mut world = World::new(vec![node("n1", 8)], gpus, pods).rescheduled();
    assert_eq!(world.leaving(), []);
    assert_eq!(world.bound(), [("important".to_owned(), "GPU-slow".to_owned())]);
    // What a critical service must not have beside it leaves all the same.
    let online = json!({"service": "s", "workload": "s", "predictedSmActivityPct": 50.0,
        "critical": true, "inMps": true, "memoryBytes": 1 << 30});
    let online: crate::resource::OnlineStatus = serde_json::from_value(online).unwrap();
    let mut prone = (*on("prone", "n1", "GPU-a", json!({names::FAIL_PRONE: "true"}))).clone();
    prone.metadata.owner_references = None;
    world.pods = vec![Arc::new(prone)];
    world.gpus = vec![gpu_that("GPU-a", "n1", move |s| s.online = Some(online.clone()))];
    assert_eq!(world.leaving(), [("prone".to_owned(), "NoLongerFits")]);
}

#[test]
fn a_speed_that_cannot_be_is_not_believed() {
    let gpus = vec![Arc::new(gpu("GPU-a", "n1"))];
    let job = pod("job", json!({names::WORKLOAD: "bert"}), json!({}));
    let mut world = World::new(vec![node("n1", 8)], gpus, vec![job]);
    for speed in [1e39, 1e300, 0.0, -1.0, 1e-30] {
        let spec = json!({"workload": "bert", "gpuType": "T4", "soloSpeed": speed});
        let spec: ProfileSpec = serde_json::from_value(spec).unwrap();
        world.profiles = vec![Arc::new(Profile::new("bert", spec))];
        assert_eq!(world.bound().len(), 1, "{speed}");
    }
}

#[tokio::test]
async fn a_world_without_a_plan_is_survived() {
    let gpus = vec![Arc::new(gpu("GPU-a", "n1"))];
    let world = World::new(vec![node("n1", 1)], gpus, vec![waiting("p")]);
    let planner = Planner::new(Parameters::default()).unwrap();
    let (mut kept, speeds) = (Default::default(), Arc::new(Registry::with_names(real_type)));
    let mut broken = world.assemble();
    let job = &mut broken.snapshot.jobs[0];
    // More than the weights of the matching can hold.
    job.solo_speed = job.gpu_types.iter().map(|kind| (kind.clone(), 1e39)).collect();
    assert!(planner.plan(&broken.snapshot, &*speeds).is_err(), "nothing is shown here");
    let none = planning::plan(&planner, &mut kept, broken, Arc::clone(&speeds)).await;
    assert!(none.is_none());
    let next = planning::plan(&planner, &mut kept, world.assemble(), speeds).await;
    assert_eq!(next.unwrap().1.assignments.len(), 1);
}
