//! The driver for claims against the real API server, the real controller that makes claims, and the
//! allocation of the real kube-scheduler. The kubelet is a test double that speaks the real protocol.

use std::path::PathBuf;

use kube::Client;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use muxflow_kubernetes::device::grpc;
use muxflow_kubernetes::device::wire::Empty;
use muxflow_kubernetes::dra::driver::Sockets;
use muxflow_kubernetes::dra::wire::*;
use muxflow_kubernetes::names;
use muxflow_kubernetes::resource::State;
use muxflow_test_cluster::Part;
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::node::{FakeExecutor, GPU, Side, overlimit, side_with};
use crate::world::{self, NAMESPACE, Scheduler};
use crate::{Stage, chart, install};

/// The scheduler that Kubernetes ships.
const KUBE: &str = "default-scheduler";
const OFFLINE: &str = "offline-gpu-real";

/// The kubelet's side of a driver: found by its socket, believed by its answer.
pub(crate) struct Kubelet(Channel);

impl Kubelet {
    pub(crate) async fn meet(sockets: &Sockets) -> Self {
        let at = sockets.introduction();
        let door = wait("the driver's socket", || async { grpc::connect(&at).await.ok() }).await;
        let info: Info = grpc::ask(&door, INFO, Empty {}).await.unwrap();
        assert_eq!((info.kind.as_str(), info.name.as_str()), ("DRAPlugin", "muxflow.dev"));
        assert_eq!(info.versions, ["v1.DRAPlugin"]);
        let channel = grpc::connect(&PathBuf::from(info.endpoint)).await.unwrap();
        let taken = Registered { taken: true, error: String::new() };
        grpc::ask::<_, Empty>(&door, REGISTERED, taken).await.unwrap();
        Kubelet(channel)
    }

    pub(crate) async fn prepare(&self, claim: &Claim) -> Result<PreparedDevice, String> {
        let ask = Claims { claims: vec![claim.clone()] };
        let answers: PrepareAnswers = grpc::ask(&self.0, PREPARE, ask).await.unwrap();
        let answer = &answers.claims[&claim.uid];
        if answer.error.is_empty() {
            Ok(answer.devices[0].clone())
        } else {
            Err(answer.error.clone())
        }
    }

    async fn unprepare(&self, claim: &Claim) {
        let ask = Claims { claims: vec![claim.clone()] };
        let answers: UnprepareAnswers = grpc::ask(&self.0, UNPREPARE, ask).await.unwrap();
        assert_eq!(answers.claims[&claim.uid].error, "");
    }
}

pub(crate) fn api(
    client: &Client,
    kind: &str,
    plural: &str,
    namespaced: bool,
) -> Api<DynamicObject> {
    let gvk = GroupVersionKind::gvk("resource.k8s.io", "v1", kind);
    let resource = ApiResource::from_gvk_with_plural(&gvk, plural);
    let client = client.clone();
    if namespaced {
        Api::namespaced_with(client, NAMESPACE, &resource)
    } else {
        Api::all_with(client, &resource)
    }
}

/// What the chart adds for claims, and the template of the example.
pub(crate) async fn install_dra(stage: &Stage) {
    let text = chart::render(stage, Some("agent: {dra: true}")).unwrap();
    let example = std::fs::read_to_string(chart::deploy("kubernetes/examples/claim.yaml")).unwrap();
    let all = [text, example].map(|t| serde_saphyr::from_multiple::<DynamicObject>(&t).unwrap());
    for mut document in all.into_iter().flatten() {
        let kind = document.types.clone().unwrap().kind;
        let name = document.metadata.name.clone().unwrap();
        let template = kind == "ResourceClaimTemplate";
        if template {
            document.metadata.namespace = Some(NAMESPACE.to_owned());
        } else if kind != "DeviceClass" && !name.ends_with("-dra") {
            continue;
        }
        let apply = PatchParams::apply("install").force();
        let api = install::api(&stage.client, &document);
        api.patch(&name, &apply, &Patch::Apply(&document)).await.unwrap();
    }
    for (account, verb, resource) in [
        ("muxflow-agent", "create", "resourceslices"),
        ("muxflow-scheduler", "patch", "resourceclaims/binding"),
    ] {
        let words = [verb, "resource.k8s.io", resource];
        wait("the rights known", || async {
            install::may(stage, [install::NAMESPACE, account], words, "", None).await.then_some(())
        })
        .await;
    }
}

async fn pod_with_claim(stage: &Stage, name: &str, scheduler: &str) -> String {
    let spec = json!({"schedulerName": scheduler,
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "beside-a-service"}],
        "containers": [{"name": "c", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}]});
    let pod = stage.world.pod(name, json!({}), spec).await;
    pod.metadata.uid.unwrap()
}

/// A claim on one place.
pub(crate) async fn claim(stage: &Stage, name: &str) {
    let object = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": name}, "spec": {"devices": {"requests":
            [{"name": "gpu", "exactly": {"deviceClassName": "offline.muxflow.dev"}}]}}});
    let claims = api(&stage.client, "ResourceClaim", "resourceclaims", true);
    claims.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

/// The claim that was made for a pod, once kube-scheduler has allocated it and bound the pod.
async fn allocated(stage: &Stage, pod: &str) -> (Claim, Value) {
    let claims = api(&stage.client, "ResourceClaim", "resourceclaims", true);
    wait(&format!("the claim of {pod} allocated"), || async {
        let pod = stage.world.pods.get(pod).await.unwrap();
        pod.spec.as_ref()?.node_name.as_ref()?;
        let name = pod.status?.resource_claim_statuses?.pop()?.resource_claim_name?;
        let claim = claims.get_opt(&name).await.unwrap()?;
        let given = claim.data["status"]["allocation"]["devices"]["results"].get(0)?.clone();
        let uid = claim.metadata.uid?;
        Some((Claim { namespace: NAMESPACE.to_owned(), uid, name }, given))
    })
    .await
}

/// The devices in a node's slice.
pub(crate) async fn offered(stage: &Stage, node: &str) -> Vec<String> {
    let slices = api(&stage.client, "ResourceSlice", "resourceslices", false);
    let Some(slice) = slices.get_opt(&format!("{node}-muxflow.dev")).await.unwrap() else {
        return Vec::new();
    };
    let devices = slice.data["spec"]["devices"].as_array().cloned().unwrap_or_default();
    devices.iter().map(|d| d["name"].as_str().unwrap().to_owned()).collect()
}

/// A claim is allocated by kube-scheduler from what the agent published, prepared for its pod alone,
/// remembered over a restart of the agent, and let go; a GPU that is Overlimit is offered to nobody.
pub(crate) async fn claims(stage: &mut Stage) {
    let world = stage.world.clone();
    install_dra(stage).await;
    tokio::task::block_in_place(|| stage.cluster.start_part(Part::Scheduler)).unwrap();
    world.node("n1", json!({}), json!({})).await;
    let kubelet_dir = stage.cluster.folder().join("kubelet");
    let sockets = Sockets::under(&kubelet_dir);
    // The rights of the account and no others.
    let client = install::limited(stage, "muxflow-agent").await;
    let first = side_with(stage, client.clone(), Some(sockets.clone())).await;
    let kubelet = Kubelet::meet(&sockets).await;
    wait("both devices offered", || async {
        (offered(stage, "n1").await.len() == 2).then_some(())
    })
    .await;

    let uid = pod_with_claim(stage, "claimer", KUBE).await;
    let (claim, given) = allocated(stage, "claimer").await;
    assert_eq!(
        (given["driver"].as_str(), given["device"].as_str()),
        (Some("muxflow.dev"), Some(OFFLINE))
    );
    let stranger = Claim { uid: "another".to_owned(), ..claim.clone() };
    let said = kubelet.prepare(&stranger).await.unwrap_err();
    assert!(said.contains("another one by now"), "{said}");
    let device = kubelet.prepare(&claim).await.unwrap();
    assert_eq!((device.device.as_str(), device.pool.as_str()), (OFFLINE, "n1"));
    assert_eq!(device.cdi_devices, [format!("muxflow.dev/claim={}", claim.uid)]);
    let guest = first.executor.guest(&uid).unwrap();
    assert_eq!((guest.share.sms().0, guest.quota.0), (20, 8 << 30));
    let file = stage
        .cluster
        .folder()
        .join("node/cdi")
        .join(format!("muxflow.dev-claim-{}.json", claim.uid));
    let spec: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(
        (spec["kind"].as_str(), spec["devices"][0]["name"].as_str()),
        (Some("muxflow.dev/claim"), Some(claim.uid.as_str()))
    );
    let env = spec["devices"][0]["containerEdits"]["env"].to_string();
    for words in [format!("CUDA_VISIBLE_DEVICES={GPU}"), "LD_PRELOAD=".to_owned()] {
        assert!(env.contains(&words), "{words} not in {env}");
    }
    // Asked again, as a kubelet does that restarts.
    assert_eq!(kubelet.prepare(&claim).await.unwrap(), device);
    wait("the pairing told", || async {
        let status = world.gpus.get("gpu-real").await.unwrap().status?;
        (status.job.as_deref() == Some("default/claimer")).then_some(())
    })
    .await;

    first.node.stop().await;
    let Side { node, executor, wishes } = side_with(stage, client, Some(sockets.clone())).await;
    let kubelet = Kubelet::meet(&sockets).await;
    wait("the pod taken over", || async { executor.guest(&uid) }).await;

    executor.set(State::Overlimit);
    wait("no place offered", || async {
        (offered(stage, "n1").await == ["online-gpu-real"]).then_some(())
    })
    .await;
    wishes.send(overlimit(&uid)).unwrap();
    world.wait_for_event("claimer", "GpuOverlimit").await;
    kubelet.unprepare(&claim).await;
    kubelet.unprepare(&claim).await;
    assert!(!file.exists());
    wait("the guest gone", || async { executor.was_told("detach", &uid).then_some(()) }).await;
    assert!(executor.was_told("drain", &uid));

    pod_with_claim(stage, "next", KUBE).await;
    world.wait_for_message("next", "cannot allocate").await;
    executor.set(State::Healthy);
    let (_, given) = allocated(stage, "next").await;
    assert_eq!(given["device"], OFFLINE);
    world.pods.delete("next", &DeleteParams::default()).await.unwrap();
    stage.cluster.kill_part(Part::Scheduler);
    planned(stage, &kubelet, &executor).await;
    node.stop().await;
}

/// Our own scheduler allocates the claim: the plan says which GPU, and with which share and quota. A claim
/// that it does not understand is named.
async fn planned(stage: &Stage, kubelet: &Kubelet, executor: &FakeExecutor) {
    let world = &stage.world;
    wait("the place free again", || async {
        let free = world.pods.list(&Default::default()).await.unwrap().items.is_empty();
        free.then_some(())
    })
    .await;
    let scheduler = Scheduler::start(stage.limited().await, world::settings("a"));
    let odd = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"name": "two"}, "spec": {"devices": {"requests":
            [{"name": "gpu", "exactly": {"deviceClassName": "offline.muxflow.dev", "count": 2}}]}}});
    let claims = api(&stage.client, "ResourceClaim", "resourceclaims", true);
    let made = claims.create(&Default::default(), &serde_json::from_value(odd).unwrap()).await;
    made.unwrap();
    let spec = json!({"resourceClaims": [{"name": "gpu", "resourceClaimName": "two"}],
        "containers": [{"name": "c", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}]});
    world.pod("odd", json!({}), spec).await;
    let told = world.wait_for_message("odd", "its claim two").await;
    assert!(told.contains("exactly one device of the class offline.muxflow.dev"), "{told}");

    // It waits, and keeps nobody else from the one GPU.
    let uid = pod_with_claim(stage, "planned", "muxflow").await;
    let (claim, given) = allocated(stage, "planned").await;
    assert_eq!(
        given,
        json!({"request": "gpu", "driver": "muxflow.dev", "pool": "n1", "device": OFFLINE})
    );
    let object = claims.get(&claim.name).await.unwrap();
    assert_eq!(object.data["status"]["reservedFor"][0]["uid"], uid.as_str());
    world.pods.delete("odd", &DeleteParams::default().grace_period(0)).await.unwrap();
    claims.delete("two", &DeleteParams::default()).await.unwrap();
    let annotations = world.pods.get("planned").await.unwrap().metadata.annotations.unwrap();
    assert_eq!(
        (annotations[names::GPU].as_str(), annotations[names::SHARE].as_str()),
        (GPU, "20/40")
    );
    assert_eq!(kubelet.prepare(&claim).await.unwrap().device, OFFLINE);
    let guest = executor.guest(&uid).unwrap();
    assert_eq!(guest.quota.0.to_string(), annotations[names::QUOTA]);
    world.pods.delete("planned", &DeleteParams::default()).await.unwrap();
    kubelet.unprepare(&claim).await;
    wait("the claim given back with its pod", || async {
        claims.get_opt(&claim.name).await.unwrap().is_none().then_some(())
    })
    .await;
    scheduler.stop().await;
}
