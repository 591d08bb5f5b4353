//! Claims: the driver beside the device plugin, asked by a real kubelet.

use std::path::PathBuf;
use std::time::Duration;

use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use muxflow_kubernetes::names;
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};

use crate::life::{plain, unharmed};
use crate::pods::{annotation, phase};
use crate::stage::{GPUS, NODE, Stage, offered};

/// A worker that records what it does, as the first process.
const WORKER: &str = r#"exec "$WORKER" 500 8 "$OUT/$NAME.pause" "$OUT/$NAME.record""#;

fn api(stage: &Stage, kind: &str, plural: &str, namespaced: bool) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("resource.k8s.io", "v1", kind);
    let resource = ApiResource::from_gvk_with_plural(&gvk, plural);
    if namespaced {
        Api::namespaced_with(stage.client.clone(), "default", &resource)
    } else {
        Api::all_with(stage.client.clone(), &resource)
    }
}

/// A template of claims on one device of each class.
async fn templates(stage: &Stage) {
    let all = api(stage, "ResourceClaimTemplate", "resourceclaimtemplates", true);
    for class in ["online", "offline"] {
        let template = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
            "metadata": {"name": class}, "spec": {"spec": {"devices": {"requests": [{"name": "gpu",
                "exactly": {"deviceClassName": format!("{class}.muxflow.dev")}}]}}}});
        all.patch(class, &PatchParams::apply("test"), &Patch::Apply(template)).await.unwrap();
    }
}

/// The specification of a pod that has a claim where others ask for a device.
fn by_claim(stage: &Stage, class: &str, script: &str) -> Value {
    let resource = if class == "online" { names::ONLINE_RESOURCE } else { names::OFFLINE_RESOURCE };
    let mut spec = stage.spec(resource, script);
    spec["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": class}]);
    spec["containers"][0]["resources"] = json!({"claims": [{"name": "gpu"}]});
    spec
}

/// The devices that the node offers to claims.
async fn devices(stage: &Stage) -> Vec<String> {
    let slices = api(stage, "ResourceSlice", "resourceslices", false);
    let Some(slice) = slices.get_opt(&format!("{NODE}-muxflow.dev")).await.unwrap() else {
        return Vec::new();
    };
    let devices = slice.data["spec"]["devices"].as_array().cloned().unwrap_or_default();
    devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect()
}

/// Waits until just these kinds of devices are offered, by the beginnings of their names.
async fn offers(stage: &Stage, online: usize, offline: usize) {
    let what = format!("{online} devices for services and {offline} for jobs in the slice");
    wait(&what, || async {
        let all = devices(stage).await;
        let count = |start: &str| all.iter().filter(|name| name.starts_with(start)).count();
        (count("online-") == online && count("offline-") == offline).then_some(())
    })
    .await;
}

/// The uid of the claim that was made for a pod.
async fn claim_of(stage: &Stage, pod: &str) -> String {
    let claims = api(stage, "ResourceClaim", "resourceclaims", true);
    let status = stage.pods().get(pod).await.unwrap().status.unwrap();
    let name = status.resource_claim_statuses.unwrap().pop().unwrap().resource_claim_name.unwrap();
    claims.get(&name).await.unwrap().metadata.uid.unwrap()
}

/// The files of a claim that is prepared: what the runtime looks up, and what the agent remembers.
fn files(stage: &Stage, claim: &str) -> [PathBuf; 2] {
    [
        stage.node.inside(&format!("run/cdi/muxflow.dev-claim-{claim}.json")),
        stage.node.folder().join(format!("muxflow/claims/{claim}.json")),
    ]
}

/// Services and jobs by claims beside others that ask for devices: the kubelet takes the driver, has
/// claims prepared and lets them go; no GPU is given to two. An agent that is updated and a kubelet that
/// is killed in between change nothing for who runs.
pub(crate) async fn claims(stage: &mut Stage) {
    stage.healthy_gpus().await;
    templates(stage).await;
    offers(stage, GPUS, GPUS).await;

    stage.pause("claimed", 20_000);
    stage.create("claimed", by_claim(stage, "online", WORKER)).await;
    let service = stage.running("claimed").await;
    let env = stage.environment("claimed").await;
    assert!(!env.contains_key("LD_PRELOAD"), "a service is under no restraint");
    assert_eq!(env["CUDA_MPS_PIPE_DIRECTORY"], "/run/muxflow/mps");
    let served = env["CUDA_VISIBLE_DEVICES"].clone();
    stage.works("claimed", 10).await;
    // What is held by a claim is no device any more, and what is held as a device no claim's.
    let this = &*stage;
    wait("the claimed GPU withdrawn as a device", || async {
        (offered(&this.client).await.1 == [1, 2]).then_some(())
    })
    .await;
    stage.start_service("device").await;
    stage.running("device").await;
    assert_ne!(stage.environment("device").await["CUDA_VISIBLE_DEVICES"], served);
    stage.works("device", 10).await;
    // What is left in the slice is the claimed one.
    offers(stage, GPUS - 1, GPUS).await;
    stage.create("unclaimed", by_claim(stage, "online", WORKER)).await;
    let said = stage.event("unclaimed", "FailedScheduling").await;
    assert!(said.contains("cannot allocate"), "{said}");
    stage.pods().delete("unclaimed", &DeleteParams::default()).await.unwrap();
    for pod in ["claimed", "device"] {
        let of = format!("muxflow_service_sm_demand_ratio{{namespace=\"default\",pod=\"{pod}\"");
        wait(&of, || async { (this.metric(&of).await > 0.0).then_some(()) }).await;
    }

    jobs(stage).await;
    unharmed(stage, &service).await;
    stage.works("claimed", 10).await;
}

/// Waits until the kubelet has put the health of a pod's device into the pod's status.
async fn healthy_on(stage: &Stage, pod: &str) {
    wait("the health of the device in the pod's status", || async {
        let status = stage.pods().get(pod).await.unwrap().status?;
        let told = status.container_statuses?.pop()?.allocated_resources_status?;
        let of_claim = told.into_iter().find(|told| told.name == "claim:gpu")?;
        let device = of_claim.resources?.pop()?;
        (device.health.as_deref() == Some("Healthy")).then_some(())
    })
    .await;
}

/// A job by a claim that MuxFlow's scheduler allocates, and one as a device.
async fn jobs(stage: &mut Stage) {
    stage.pause("job", 5_000);
    stage.create("job", by_claim(stage, "offline", WORKER)).await;
    let job = stage.running("job").await;
    let planned = annotation(&job, names::GPU);
    let env = stage.environment("job").await;
    assert_eq!(env["CUDA_VISIBLE_DEVICES"], planned);
    assert_eq!(env["LD_PRELOAD"], "/run/muxflow/libxcuda.so");
    assert_eq!(env["CUDA_MPS_PIPE_DIRECTORY"], "/run/muxflow/mps");
    assert!(env.contains_key("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "{env:?}");
    let mounts = stage.mounts("job");
    for at in ["/run/muxflow/control", "/run/muxflow/libxcuda.so", "/run/muxflow/mps"] {
        assert!(mounts.iter().any(|mount| mount == at), "{at} not in {mounts:?}");
    }
    stage.works("job", 20).await;
    let claim = claim_of(stage, "job").await;
    for file in files(stage, &claim) {
        assert!(file.exists(), "{}", file.display());
    }
    healthy_on(stage, "job").await;
    stage.create("beside", stage.spec(names::OFFLINE_RESOURCE, "exec sleep 600")).await;
    let beside = stage.running("beside").await;
    assert_ne!(annotation(&beside, names::GPU), planned, "one GPU for two jobs");
    stage.create("late", by_claim(stage, "offline", WORKER)).await;
    stage.event("late", "FailedScheduling").await;
    stage.pods().delete("late", &DeleteParams::default()).await.unwrap();

    stage.chart.update_agent().await;
    stage.works("job", 20).await;
    let taken =
        |stage: &Stage| stage.agent_log().matches("the kubelet has taken the driver").count();
    let earlier = taken(stage);
    stage.node.kill_kubelet();
    stage.works("job", 20).await;
    stage.node.start_kubelet().unwrap();
    let this = &*stage;
    wait("the driver taken by the next kubelet", || async {
        (taken(this) > earlier).then_some(())
    })
    .await;
    stage.works("job", 20).await;
    unharmed(stage, &job).await;

    stage.pods().delete("job", &DeleteParams::default()).await.unwrap();
    let line = format!("guest is drained job={}", job.metadata.uid.unwrap());
    wait("the job drained", || async {
        this.agent_log().lines().any(|l| plain(l).contains(&line)).then_some(())
    })
    .await;
    stage.gone("job").await;
    let claims = api(stage, "ResourceClaim", "resourceclaims", true);
    wait("the claim let go", || async {
        let left = files(this, &claim).iter().any(|file| file.exists());
        let listed = claims.list(&Default::default()).await.unwrap().items;
        let known = listed.iter().any(|c| c.metadata.uid.as_deref() == Some(claim.as_str()));
        (!left && !known).then_some(())
    })
    .await;
    // The next one gets the place, and gives it back when it ends by itself.
    stage.create("next", by_claim(stage, "offline", "exit 0")).await;
    wait("the next pod done", || async {
        let pod = this.pods().get("next").await.unwrap();
        (phase(&pod) == "Succeeded").then_some(())
    })
    .await;
    assert_eq!(stage.environment("next").await["CUDA_VISIBLE_DEVICES"], planned);
    let folder = stage.node.folder().join("muxflow/claims");
    wait("no claim of a job remembered", || async {
        (std::fs::read_dir(&folder).unwrap().count() == 1).then_some(())
    })
    .await;
    come_during_an_update(stage).await;
}

/// Jobs that come while the agent is updated wait for the next one; no pod is rejected for want of a
/// plugin. None of them may fail once.
async fn come_during_an_update(stage: &Stage) {
    let names: Vec<String> = (0..6).map(|n| format!("during-{n}")).collect();
    let create = async {
        for name in &names {
            stage.create_job(name, stage.spec(names::OFFLINE_RESOURCE, "exit 0")).await;
            tokio::time::sleep(Duration::from_millis(700)).await;
        }
    };
    futures::join!(stage.chart.update_agent(), create);
    for name in &names {
        wait(&format!("{name} finished"), || async {
            let status = stage.jobs().get(name).await.unwrap().status?;
            assert_eq!(status.failed.unwrap_or(0), 0, "{name} lost a pod to the update");
            (status.succeeded == Some(1)).then_some(())
        })
        .await;
    }
}
