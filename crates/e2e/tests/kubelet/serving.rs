//! GPUs that break and return, and services as ordinary Deployments.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::{Gpu, State};
use muxflow_test_cluster::scenarios::wait;
use serde_json::json;

use crate::pods::{annotation, phase};
use crate::stage::{Stage, offered};

/// Waits until the node offers so many places for services and for jobs.
async fn offers(stage: &Stage, places: [i64; 2]) {
    let what = format!("{places:?} places for services and jobs");
    wait(&what, || async { (offered(&stage.client).await.1 == places).then_some(()) }).await;
}

/// A GPU asks to be reset: the job on it leaves, nobody new gets it, neither service nor job, and when
/// it was reset it is offered again by itself, and who waited for it runs there.
pub(crate) async fn disabled(stage: &mut Stage) {
    stage.healthy_gpus().await;
    let spec = || stage.spec(names::OFFLINE_RESOURCE, "exec sleep 600");
    futures::join!(stage.create("left", spec()), stage.create("right", spec()));
    for job in ["left", "right"] {
        stage.running(job).await;
    }
    // Before the fault: the pod may be gone by the time that its GPU is told as broken.
    let before = stage.pods().list(&ListParams::default()).await.unwrap().items;
    stage.fault(0, &["xid", "154"]);
    let gpus: Api<Gpu> = Api::all(stage.client.clone());
    let broken = wait("a GPU told as Disabled", || async {
        let all = gpus.list(&ListParams::default()).await.unwrap().items;
        let is_it = |gpu: &Gpu| gpu.status.as_ref().is_some_and(|s| s.state == State::Disabled);
        all.into_iter().find(is_it).map(|gpu| gpu.spec.uuid)
    })
    .await;
    let on = |pod: &Pod| annotation(pod, names::GPU) == broken;
    let victim = before.into_iter().find(on).unwrap().metadata.name.unwrap();
    stage.event(&victim, "GpuOverlimit").await;
    stage.gone(&victim).await;
    offers(stage, [1, 1]).await;

    stage.start_service("first").await;
    stage.running("first").await;
    assert_ne!(stage.environment("first").await["CUDA_VISIBLE_DEVICES"], broken);
    stage.works("first", 10).await;
    stage.start_service("second").await;
    let said = stage.event("second", "FailedScheduling").await;
    assert!(said.contains("Insufficient muxflow.dev/online"), "{said}");
    stage.pause("again", 5_000);
    let works = r#"exec "$WORKER" 500 8 "$OUT/again.pause" "$OUT/again.record""#;
    stage.create("again", stage.spec(names::OFFLINE_RESOURCE, works)).await;
    stage.event("again", "FailedScheduling").await;

    stage.fault(0, &["reset"]);
    offers(stage, [2, 2]).await;
    stage.running("second").await;
    assert_eq!(stage.environment("second").await["CUDA_VISIBLE_DEVICES"], broken);
    stage.works("second", 10).await;
    let again = stage.running("again").await;
    assert_eq!(annotation(&again, names::GPU), broken);
    stage.works("first", 10).await;
    let errors = stage.record("first").iter().filter(|line| line.contains("error")).count();
    assert_eq!(errors, 0, "the service on the other GPU saw errors");

    // Whoever breaks it is told so, whoever else is there.
    stage.works("again", 20).await;
    let culprit = stage.processes("again.record");
    assert_eq!(culprit.len(), 1, "{culprit:?}");
    stage.fault(0, &["--pid", &culprit[0].to_string(), "xid", "31"]);
    let said = stage.event("again", "CausedGpuError").await;
    assert!(said.contains(&broken) && said.contains("xid.31"), "{said}");
}

/// A service as a Deployment behind a Service: it is found by its endpoints, a new version replaces the
/// old one pod by pod on the GPUs of the node, and the job beside it stays.
pub(crate) async fn rollout(stage: &mut Stage) {
    stage.healthy_gpus().await;
    let deployments: Api<Deployment> = Api::namespaced(stage.client.clone(), "default");
    let services: Api<Service> = Api::namespaced(stage.client.clone(), "default");
    let script = r#"echo 100000 > "$OUT/$NAME.pause"; exec "$WORKER" 20000 20 "$OUT/$NAME.pause" "$OUT/$NAME.record""#;
    let mut spec = stage.spec(names::ONLINE_RESOURCE, script);
    spec["restartPolicy"] = json!("Always");
    let web = json!({"metadata": {"name": "web"}, "spec": {"replicas": 1,
        "selector": {"matchLabels": {"app": "web"}},
        "strategy": {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": {"app": "web"}}, "spec": spec}}});
    let web = serde_json::from_value(web).unwrap();
    deployments.create(&PostParams::default(), &web).await.unwrap();
    let door = json!({"metadata": {"name": "web"}, "spec": {"selector": {"app": "web"},
        "ports": [{"port": 80}]}});
    let door = serde_json::from_value(door).unwrap();
    services.create(&PostParams::default(), &door).await.unwrap();

    let this = &*stage;
    let old = wait("the service found by its endpoints", || async {
        let ready = endpoints(this).await;
        (ready.len() == 1).then(|| ready[0].clone())
    })
    .await;
    stage.works(&old, 10).await;
    stage.pause("job", 5_000);
    let job = r#"exec "$WORKER" 500 8 "$OUT/job.pause" "$OUT/job.record""#;
    let placed = stage.create("job", stage.spec(names::OFFLINE_RESOURCE, job)).await;
    stage.running("job").await;
    stage.works("job", 10).await;

    let version = json!({"spec": {"template": {"metadata": {"annotations": {"version": "2"}}}}});
    deployments.patch("web", &PatchParams::default(), &Patch::Merge(version)).await.unwrap();
    let new = wait("the new version serves alone", || async {
        let ready = endpoints(this).await;
        // One is always ready: the old one goes when the new one has come.
        assert!(!ready.is_empty(), "nobody serves");
        let old = this.pods().get_opt(&old).await.unwrap().is_some();
        (!old && ready.len() == 1).then(|| ready[0].clone())
    })
    .await;
    assert_ne!(new, old);
    stage.works(&new, 10).await;
    stage.works("job", 10).await;
    let job = stage.pods().get("job").await.unwrap();
    assert_eq!((phase(&job), &job.metadata.uid), ("Running", &placed.metadata.uid));
    // The autoscaler's metric follows the pods of the Deployment.
    let of = |pod: &str| {
        format!("muxflow_service_sm_activity_ratio{{namespace=\"default\",pod=\"{pod}\"")
    };
    wait("the metric of the new pod", || async {
        (this.metric(&of(&new)).await > 0.0).then_some(())
    })
    .await;
    wait("the old pod's metric no longer told", || async {
        (this.metric(&of(&old)).await == 0.0).then_some(())
    })
    .await;
    crate::scaling::scaled_by_the_metric(stage, &new).await;
    services.delete("web", &DeleteParams::default()).await.unwrap();
    deployments.delete("web", &DeleteParams::background()).await.unwrap();
}

/// The pods that are ready behind the Service.
async fn endpoints(stage: &Stage) -> Vec<String> {
    let slices: Api<EndpointSlice> = Api::namespaced(stage.client.clone(), "default");
    let of = ListParams::default().labels("kubernetes.io/service-name=web");
    let slices = slices.list(&of).await.unwrap().items;
    let all = slices.into_iter().flat_map(|slice| slice.endpoints);
    let ready = |e: &k8s_openapi::api::discovery::v1::Endpoint| {
        e.conditions.as_ref().is_some_and(|c| c.ready == Some(true))
    };
    all.filter(ready).filter_map(|e| e.target_ref?.name).collect()
}
