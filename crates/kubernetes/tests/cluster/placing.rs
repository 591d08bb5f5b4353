//! Where jobs go, when they leave, and what they are told.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, ResourceQuota};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::{ModelSpec, Profile, State};
use muxflow_kubernetes::scheduler::Settings;
use muxflow_predictor::model::Model;
use muxflow_predictor::trained::{Card, TrainedModel};
use muxflow_test_cluster::scenarios::wait;
use muxflow_types::{GpuType, Micros, Percent};
use serde_json::json;

use crate::Stage;
use crate::world::{NAMESPACE, Scheduler, owner, set_phase, settings};

pub(crate) async fn best_gpu(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-small", "n1", 8).await;
    world.gpu("GPU-large", "n1", 30).await;
    world.gpu("GPU-sick", "n1", 40).await;
    world.report("GPU-sick", State::Unhealthy, 40).await;
    world.pod("only", json!({"annotations": {names::MEMORY: "4GiB"}}), json!({})).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let places = world.wait_for_places(1).await;
    assert_eq!(places["only"], ("n1".to_owned(), "GPU-large".to_owned()));
    let pod = world.pods.get("only").await.unwrap();
    let annotations = pod.metadata.annotations.unwrap();
    assert_eq!(annotations[names::SHARE], "30/40");
    assert_eq!(annotations[names::QUOTA], (8u64 << 30).to_string());
    assert!(world.wait_for_event("only", "Scheduled").await.contains("GPU-large"));
    scheduler.stop().await;
}

pub(crate) async fn overlimit(stage: &mut Stage) {
    let world = &stage.world;
    for n in ["n1", "n2"] {
        world.node(n, json!({}), json!({})).await;
    }
    for (gpu, node, share) in [("GPU-a", "n1", 30), ("GPU-b", "n1", 30), ("GPU-c", "n2", 30)] {
        world.gpu(gpu, node, share).await;
    }
    world.job("train", 3).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let places = world.wait_for_places(3).await;
    let gpus: BTreeSet<&String> = places.values().map(|(_, gpu)| gpu).collect();
    assert_eq!(gpus.len(), 3, "{places:?}");
    wait("all pods running", || async {
        let pods = world.pods.list(&ListParams::default().fields("status.phase=Running")).await;
        (pods.unwrap().items.len() == 3).then_some(())
    })
    .await;
    let (victim, _) = places.iter().find(|(_, (_, gpu))| gpu == "GPU-b").unwrap();
    // An agent that lives sees to it by itself, and may have its reasons not to.
    world.report("GPU-b", State::Overlimit, 0).await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(world.places().await, places);
    world.last_word("GPU-b", State::Overlimit).await;
    let note = world.wait_for_event(victim, "GpuOverlimit").await;
    assert!(note.contains("GPU-b"), "{note}");
    let successor = wait("the evicted pod gone and another waiting", || async {
        let pods = world.pods.list(&ListParams::default()).await.unwrap().items;
        let names: Vec<String> = pods.iter().filter_map(|p| p.metadata.name.clone()).collect();
        (!names.contains(victim)).then(|| names.into_iter().find(|n| !places.contains_key(n)))?
    })
    .await;
    let told = world.wait_for_message(&successor, "Healthy").await;
    assert!(told.contains("the only GPU"), "{told}");
    world.report("GPU-b", State::Healthy, 30).await;
    let after = world.wait_for_places(3).await;
    assert_eq!(after[&successor].1, "GPU-b");
    for name in after.keys() {
        set_phase(&world.pods, name, "Succeeded").await;
    }
    wait("the Job complete", || async {
        let status = world.jobs.get("train").await.unwrap().status?;
        assert_eq!(status.failed.unwrap_or(0), 0, "the eviction counted as a failure");
        let done = status.conditions?.iter().any(|c| c.type_ == "Complete" && c.status == "True");
        done.then_some(())
    })
    .await;
    scheduler.stop().await;
}

pub(crate) async fn constraints(stage: &mut Stage) {
    let world = &stage.world;
    world
        .node(
            "tainted",
            json!({"zone": "a"}),
            json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]}),
        )
        .await;
    world.node("plain", json!({"zone": "b"}), json!({})).await;
    world.gpu("GPU-t", "tainted", 40).await;
    world.gpu("GPU-p", "plain", 10).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let c = |requests| json!([{"name": "c", "image": "none", "resources": {"limits": {"muxflow.dev/offline": "1"}, "requests": requests}}]);
    world.pod("elsewhere", json!({}), json!({"nodeSelector": {"zone": "c"}})).await;
    world.pod("greedy", json!({}), json!({"containers": c(json!({"cpu": "9"}))})).await;
    world.pod("hungry", json!({"annotations": {names::MEMORY: "12GiB"}}), json!({})).await;
    world.pod("typed", json!({"annotations": {names::GPU_TYPES: "H100"}}), json!({})).await;
    world.pod("wrong", json!({"annotations": {names::MEMORY: "much"}}), json!({})).await;
    let spread = json!([{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {}}]);
    world.pod("spread", json!({}), json!({"topologySpreadConstraints": spread})).await;
    world.pod("gated", json!({}), json!({"schedulingGates": [{"name": "later"}]})).await;
    // A service that will not have some jobs in its zone, though they would not mind.
    let term = json!({"topologyKey": "zone", "labelSelector": {"matchLabels": {"loud": "yes"}}});
    let affinity =
        json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}});
    let service = json!({"schedulerName": "other", "nodeName": "plain", "affinity": affinity,
        "containers": [{"name": "c", "image": "none"}]});
    world.pod("service", json!({}), service).await;
    world.pod("loud", json!({"labels": {"loud": "yes"}}), json!({})).await;
    for (pod, words) in [
        ("elsewhere", "outside its node selector"),
        ("greedy", "too little cpu"),
        ("hungry", "asks for"),
        ("typed", "type that the job accepts"),
        ("wrong", "much"),
        ("spread", "topologySpreadConstraints"),
        ("loud", "anti-affinity keeps it away"),
    ] {
        world.wait_for_message(pod, words).await;
    }
    assert_eq!(world.places().await.len(), 0);
    let tolerations = json!([{"key": "gpu", "operator": "Exists"}]);
    world.pod("tolerant", json!({}), json!({"tolerations": tolerations})).await;
    assert_eq!(world.wait_for_places(1).await["tolerant"].1, "GPU-t");
    world.pod("plain", json!({}), json!({})).await;
    assert_eq!(world.wait_for_places(2).await["plain"].1, "GPU-p");
    assert!(world.wait_for_event("elsewhere", "FailedScheduling").await.contains("selector"));
    // A reason that becomes another one is told as that: in the condition and in an event of its own.
    let zone = json!({"metadata": {"labels": {"zone": "c"}}});
    world.nodes.patch("plain", &PatchParams::default(), &Patch::Merge(zone)).await.unwrap();
    world.wait_for_message("elsewhere", "carry a job").await;
    world.wait_for_event_with("elsewhere", "FailedScheduling", "carry a job").await;
    scheduler.stop().await;
}

/// Of two pods for one GPU, the one with the higher priority gets it, though it came later.
pub(crate) async fn priorities(stage: &mut Stage) {
    let world = &stage.world;
    let classes: Api<PriorityClass> = Api::all(stage.client.clone());
    let class = json!({"metadata": {"name": "high"}, "value": 1000});
    classes.create(&PostParams::default(), &serde_json::from_value(class).unwrap()).await.unwrap();
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-a", "n1", 20).await;
    world.pod("low", json!({}), json!({})).await;
    world.pod("high", json!({}), json!({"priorityClassName": "high"})).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let places = world.wait_for_places(1).await;
    assert_eq!(places.keys().collect::<Vec<_>>(), ["high"]);
    // Another one counts more; once that one is bound, every GPU carries a job.
    world.wait_for_message("low", "job").await;
    set_phase(&world.pods, "high", "Succeeded").await;
    wait("the other bound", || async { world.places().await.contains_key("low").then_some(()) })
        .await;
    classes.delete("high", &DeleteParams::default()).await.unwrap();
    scheduler.stop().await;
}

/// Whoever admits work before it is scheduled, as Kueue does, holds pods back by a gate or a Job by
/// suspending it; both are placed once they are let go, and not before.
pub(crate) async fn admitted(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    for gpu in ["GPU-a", "GPU-b", "GPU-c"] {
        world.gpu(gpu, "n1", 20).await;
    }
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    world.pod("gated", json!({}), json!({"schedulingGates": [{"name": "later"}]})).await;
    world.suspended_job("held", 1).await;
    world.pod("plain", json!({}), json!({})).await;
    assert_eq!(world.wait_for_places(1).await.keys().collect::<Vec<_>>(), ["plain"]);
    let free = Patch::Merge(json!({"spec": {"schedulingGates": null}}));
    world.pods.patch("gated", &PatchParams::default(), &free).await.unwrap();
    world.wait_for_places(2).await;
    let go_on = Patch::Merge(json!({"spec": {"suspend": false}}));
    world.jobs.patch("held", &PatchParams::default(), &go_on).await.unwrap();
    let places = world.wait_for_places(3).await;
    assert!(places.keys().any(|pod| pod.starts_with("held-")), "{places:?}");
    assert!(places.contains_key("gated"), "{places:?}");
    scheduler.stop().await;
}

/// A model that is an object of the cluster predicts the speeds, on idle GPUs and on shared ones.
pub(crate) async fn model(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-idle", "n1", 20).await;
    world.gpu("GPU-shared", "n1", 20).await;
    let online = json!({"service": "web", "workload": "web", "predictedSmActivityPct": 30.0,
        "memoryBytes": 1 << 30, "inMps": true});
    let patch = Patch::Merge(json!({"status": {"online": online}}));
    world.gpus.patch_status("gpu-shared", &PatchParams::default(), &patch).await.unwrap();
    let profiles: Api<Profile> = Api::all(stage.client.clone());
    for workload in ["web", "bert"] {
        let spec = json!({"workload": workload, "gpuType": "T4", "smActivityPct": 40.0});
        let profile = Profile::new(workload, serde_json::from_value(spec).unwrap());
        profiles.create(&PostParams::default(), &profile).await.unwrap();
    }
    let trained = TrainedModel {
        gpu_type: GpuType::new("T4").unwrap(),
        model: Model::Mean(0.37),
        online_seen: BTreeSet::new(),
        offline_seen: BTreeSet::new(),
        deviation: [0.1; 3],
        card: Card::default(),
    };
    let models: Api<muxflow_kubernetes::resource::Model> = Api::all(stage.client.clone());
    let spec = ModelSpec {
        gpu_type: "T4".into(),
        data: ByteString(muxflow_predictor::file::to_bytes(&trained)),
        note: None,
    };
    let object = muxflow_kubernetes::resource::Model::new("t4", spec);
    models.create(&PostParams::default(), &object).await.unwrap();
    for pod in ["one", "two"] {
        world.pod(pod, json!({"annotations": {names::WORKLOAD: "bert"}}), json!({})).await;
    }
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let places = world.wait_for_places(2).await;
    for pod in places.keys() {
        let annotations = world.pods.get(pod).await.unwrap().metadata.annotations.unwrap();
        assert_eq!(annotations[names::SPEED], "0.370", "{pod} on {:?}", places[pod]);
    }
    models.delete("t4", &DeleteParams::default()).await.unwrap();
    profiles.delete_collection(&DeleteParams::default(), &ListParams::default()).await.unwrap();
    scheduler.stop().await;
}

/// Reschedules every second, and takes a restart for nearly free.
fn restless() -> Settings {
    let mut settings = settings("a");
    settings.parameters.interval = Micros::from_secs(1);
    settings.parameters.restart_cost = Micros(1000);
    settings.parameters.max_disruption = Percent::FULL;
    settings
}

pub(crate) async fn moving(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-slow-1", "n1", 4).await;
    world.gpu("GPU-slow-2", "n1", 4).await;
    world.pod("bare", json!({}), json!({})).await;
    let owner = owner(&stage.client).await;
    world.pod("owned", owner, json!({})).await;
    let scheduler = Scheduler::start(stage.limited().await, restless());
    let before = world.wait_for_places(2).await;
    for gpu in ["GPU-fast-1", "GPU-fast-2"] {
        world.gpu(gpu, "n1", 40).await;
    }
    let note = world.wait_for_event("owned", "Moved").await;
    assert!(note.contains("GPU-fast"), "{note}");
    wait("the owned pod gone", || async {
        world.pods.get_opt("owned").await.unwrap().is_none().then_some(())
    })
    .await;
    // Three more reschedulings, with two fast GPUs free.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(world.places().await.get("bare"), before.get("bare"));
    scheduler.stop().await;
}

/// Of two Jobs on slow GPUs, the one whose podFailurePolicy ignores evictions is moved to a fast one;
/// the one that would pay for it stays, although another fast GPU is free, and is told why.
pub(crate) async fn punished(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-slow-1", "n1", 4).await;
    world.gpu("GPU-slow-2", "n1", 4).await;
    world.job_with("strict", 1, None).await;
    world.job("forgiving", 1).await;
    let scheduler = Scheduler::start(stage.limited().await, restless());
    let before = world.wait_for_places(2).await;
    let of = |job: &str| before.keys().find(|pod| pod.starts_with(job)).unwrap().clone();
    let (strict, forgiving) = (of("strict-"), of("forgiving-"));
    for gpu in ["GPU-fast-1", "GPU-fast-2"] {
        world.gpu(gpu, "n1", 40).await;
    }
    let note = world.wait_for_event(&forgiving, "Moved").await;
    assert!(note.contains("GPU-fast"), "{note}");
    let failed = world.jobs.get("forgiving").await.unwrap().status.and_then(|s| s.failed);
    assert_eq!(failed.unwrap_or(0), 0, "the eviction counted as a failure");
    // Two more reschedulings.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert_eq!(world.places().await.get(&strict), before.get(&strict));
    // Its owner is told, and what to do about it.
    let told = world.wait_for_event(&strict, "NotMoved").await;
    assert!(told.contains("podFailurePolicy that ignores DisruptionTarget"), "{told}");
    let condition = |pod: Pod| {
        let all = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        all.into_iter().find(|c| c.type_ == names::MOVABLE_CONDITION)
    };
    let on_strict = condition(world.pods.get(&strict).await.unwrap()).unwrap();
    assert_eq!((on_strict.status.as_str(), on_strict.message), ("False", Some(told)));
    assert_eq!(on_strict.reason.as_deref(), Some("EvictionCountsAsFailure"));
    for (pod, _) in world.places().await.into_iter().filter(|(pod, _)| *pod != strict) {
        let told = condition(world.pods.get(&pod).await.unwrap());
        assert!(told.is_none(), "{pod}: {told:?}");
    }
    scheduler.stop().await;
}

/// A quota of two places: the third pod of the Job does not come to be until one has ended.
pub(crate) async fn quota(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    for gpu in ["GPU-a", "GPU-b", "GPU-c"] {
        world.gpu(gpu, "n1", 20).await;
    }
    let quotas: Api<ResourceQuota> = Api::namespaced(stage.client.clone(), NAMESPACE);
    let two = json!({"metadata": {"name": "two"}, "spec": {"hard": {"requests.muxflow.dev/offline": "2"}}});
    quotas.create(&PostParams::default(), &serde_json::from_value(two).unwrap()).await.unwrap();
    wait("the quota counted", || async { quotas.get("two").await.unwrap().status?.hard }).await;
    world.job("train", 3).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let places = world.wait_for_places(2).await;
    let said = world.wait_for_event("train", "FailedCreate").await;
    assert!(said.contains("exceeded quota"), "{said}");
    assert_eq!(world.pods.list(&ListParams::default()).await.unwrap().items.len(), 2);
    set_phase(&world.pods, places.keys().next().unwrap(), "Succeeded").await;
    wait("the third bound", || async {
        let after = world.places().await;
        after.keys().any(|pod| !places.contains_key(pod)).then_some(())
    })
    .await;
    quotas.delete("two", &DeleteParams::default()).await.unwrap();
    scheduler.stop().await;
}

pub(crate) async fn budget(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-a", "n1", 30).await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(stage.client.clone(), NAMESPACE);
    let budget = json!({"metadata": {"name": "b"}, "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "x"}}}});
    budgets.create(&PostParams::default(), &serde_json::from_value(budget).unwrap()).await.unwrap();
    world.pod("guarded", json!({"labels": {"app": "x"}}), json!({})).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    world.wait_for_places(1).await;
    wait("the budget counts the pod", || async {
        let status = budgets.get("b").await.unwrap().status?;
        (status.current_healthy == 1).then_some(())
    })
    .await;
    world.last_word("GPU-a", State::Overlimit).await;
    let note = world.wait_for_event("guarded", "EvictionRefused").await;
    assert!(note.contains("not evicted yet"), "{note}");
    assert!(world.pods.get("guarded").await.unwrap().metadata.deletion_timestamp.is_none());
    budgets.delete("b", &DeleteParams::default()).await.unwrap();
    world.wait_for_event("guarded", "GpuOverlimit").await;
    scheduler.stop().await;
}

/// Two pods that name one GPU, as a scheduler with a wrong clock could have left them.
pub(crate) async fn doubled(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-a", "n1", 30).await;
    let on = json!({"annotations": {names::GPU: "GPU-a", names::SHARE: "30/40"}});
    world.pod("first", on.clone(), json!({"nodeName": "n1"})).await;
    tokio::time::sleep(Duration::from_millis(1100)).await; // Creation times have whole seconds.
    world.pod("second", on, json!({"nodeName": "n1"})).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    assert!(world.wait_for_event("second", "GpuTakenTwice").await.contains("GPU-a"));
    wait("the second gone", || async {
        world.pods.get_opt("second").await.unwrap().is_none().then_some(())
    })
    .await;
    assert!(world.pods.get("first").await.unwrap().metadata.deletion_timestamp.is_none());
    scheduler.stop().await;
}

/// Reports of GPUs, of which a large cluster has hundreds each second, are read and no more while no pod
/// waits; when one does, each may bring it its place.
pub(crate) async fn idle(stage: &mut Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-a", "n1", 20).await;
    world.pod("first", json!({}), json!({})).await;
    let settings = settings("a");
    let counters = settings.counters.clone();
    let scheduler = Scheduler::start(stage.limited().await, settings);
    world.wait_for_places(1).await;
    wait("the pod runs", || async {
        let pod = world.pods.get("first").await.unwrap();
        (pod.status?.phase? == "Running").then_some(())
    })
    .await;
    // So many looks while the GPU reports again and again, and how long that took.
    let reports = || async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let (began, before) = (std::time::Instant::now(), counters.looks());
        for _ in 0..40 {
            world.report("GPU-a", State::Healthy, 20).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        (counters.looks() - before, began.elapsed().as_secs())
    };
    let (looks, took_s) = reports().await;
    assert!(looks <= took_s / 5 + 2, "{looks} looks in {took_s} s, though nobody waits");
    world.pod("second", json!({}), json!({})).await;
    world.wait_for_event("second", "FailedScheduling").await;
    let (more, took_s) = reports().await;
    assert!(more > took_s / 5 + 2, "{more} looks in {took_s} s, though a pod waits");
    scheduler.stop().await;
}
