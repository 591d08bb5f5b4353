//! The Helm chart: it renders, the plain manifests are its rendering, the API server takes all of it,
//! nonsense is refused, and to remove it leaves pods alone.

use std::path::PathBuf;
use std::time::Duration;

use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams};
use muxflow_test_cluster::scenarios::wait;
use serde_json::json;

use crate::Stage;
use crate::install::{self, NAMESPACE};
use crate::world::{Scheduler, settings};

pub(crate) fn deploy(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(path)
}

/// The chart with these values.
pub(crate) fn render(stage: &Stage, values: Option<&str>) -> Result<String, String> {
    let file = stage.cluster.folder().join("values.yaml");
    std::fs::write(&file, values.unwrap_or_default()).unwrap();
    let folder = deploy("helm/muxflow");
    stage.cluster.render_chart(&folder, NAMESPACE, values.is_some().then_some(&*file))
}

const HEAD: &str = "# Rendered from deploy/helm/muxflow with its default values; do not edit.\n# MUXFLOW_UPDATE=1 cargo xtask kubernetes test the_chart\n";

pub(crate) async fn chart(stage: &mut Stage) {
    let render = |values: Option<&str>| render(stage, values);
    let text = format!("{HEAD}{}", render(None).unwrap());
    let committed = deploy("kubernetes/muxflow.yaml");
    if std::env::var_os("MUXFLOW_UPDATE").is_some() {
        std::fs::write(&committed, &text).unwrap();
    }
    let known = std::fs::read_to_string(&committed).unwrap_or_default();
    assert!(known == text, "{} is stale; see its head", committed.display());

    let other = render(Some(
        "image: {repository: r/m, tag: v9}\nscheduler: {replicas: 3}\nagent: {dra: true, runtimeClassName: nvidia}\npodMonitor: {enabled: true}\nnetworkPolicy: {enabled: false}\n",
    ))
    .unwrap();
    for words in [
        "r/m:v9",
        "replicas: 3",
        "--dra",
        "kind: DeviceClass",
        "runtimeClassName: nvidia",
        "kind: PodMonitor",
    ] {
        assert!(other.contains(words), "{words} not in {other}");
    }
    assert!(!other.contains("kind: NetworkPolicy"));
    assert!(render(Some("agent: {cdi: false}")).unwrap().contains("--no-cdi"));
    assert!(render(Some("agent: {holdForSeconds: 77}")).unwrap().contains("--hold-for=77"));
    for (wrong, word) in [
        ("scheduler: {replicaz: 3}", "replicaz"),
        ("scheduler: {replicas: 0}", "replicas"),
        ("agent: {cdi: maybe}", "cdi"),
        // A plan costs more than it can gain when it comes as often as a restart takes.
        ("scheduler: {intervalSeconds: 60}", "intervalSeconds"),
        ("agent: {reportEverySeconds: 200}", "at least twice agent.reportEverySeconds"),
        ("networkPolicy: {apiServerPorts: []}", "apiServerPorts"),
        // The agent would refuse both together, again and again.
        ("agent: {cdi: false, dra: true}", "agent.dra needs agent.cdi"),
        ("agent: {holdForSeconds: 5}", "holdForSeconds"),
    ] {
        let said = render(Some(wrong)).unwrap_err();
        assert!(said.contains(word), "{wrong}: {said}");
    }
    let ports = render(Some("networkPolicy: {apiServerPorts: [16443]}")).unwrap();
    assert!(ports.contains("port: 16443") && !ports.contains("port: 6443"), "{ports}");

    define_pod_monitors(stage).await;
    // The API server checks every field, of the examples too; only tried, not kept.
    let check = PatchParams {
        dry_run: true,
        field_validation: Some(kube::api::ValidationDirective::Strict),
        ..PatchParams::apply("check").force()
    };
    let read = |name: &str| std::fs::read_to_string(deploy(name)).unwrap();
    let examples =
        ["claim", "job", "service"].map(|n| read(&format!("kubernetes/examples/{n}.yaml")));
    for text in examples.iter().chain([&other]) {
        for mut document in serde_saphyr::from_multiple::<DynamicObject>(text).unwrap() {
            let kind = document.types.clone().unwrap().kind;
            if !kind.starts_with("ClusterRole") && kind != "DeviceClass" {
                document.metadata.namespace.get_or_insert_with(|| NAMESPACE.to_owned());
            }
            let name = document.metadata.name.clone().unwrap();
            let tried = install::api(&stage.client, &document);
            let answer = tried.patch(&name, &check, &Patch::Apply(&document)).await;
            answer.unwrap_or_else(|e| panic!("{kind} {name}: {e}"));
        }
    }
    removed(stage).await;
}

/// The definition of a PodMonitor belongs to the Prometheus operator; this one knows the fields that the
/// chart writes, as theirs does, and refuses all others.
async fn define_pod_monitors(stage: &Stage) {
    let duration = json!({"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"});
    let endpoint = json!({"type": "object", "properties": {"port": {"type": "string"},
        "interval": duration, "honorLabels": {"type": "boolean"}}});
    let labels = json!({"type": "object", "additionalProperties": {"type": "string"}});
    let selector = json!({"type": "object", "properties": {"matchLabels": labels}});
    let spec = json!({"type": "object", "required": ["selector"], "properties":
        {"selector": selector, "podMetricsEndpoints": {"type": "array", "items": endpoint}}});
    let schema = json!({"type": "object", "required": ["spec"], "properties": {"spec": spec}});
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "podmonitors.monitoring.coreos.com"},
        "spec": {"group": "monitoring.coreos.com", "scope": "Namespaced",
            "names": {"kind": "PodMonitor", "plural": "podmonitors", "singular": "podmonitor"},
            "versions": [{"name": "v1", "served": true, "storage": true,
                "schema": {"openAPIV3Schema": schema}}]}});
    let definition: DynamicObject = serde_json::from_value(definition).unwrap();
    let apply = PatchParams::apply("install").force();
    let name = definition.metadata.name.clone().unwrap();
    let api = install::api(&stage.client, &definition);
    api.patch(&name, &apply, &Patch::Apply(&definition)).await.unwrap();
    wait("PodMonitors served", || async {
        let request = http::Request::get("/apis/monitoring.coreos.com/v1/podmonitors");
        let request = request.body(Vec::new()).unwrap();
        stage.client.request::<serde_json::Value>(request).await.ok().map(drop)
    })
    .await;
}

/// Everything but the definitions is removed and installed again under a scheduler that runs, as an
/// upgrade or a mistake would: pods that run are the same afterwards, those that it has bound too.
async fn removed(stage: &Stage) {
    let world = &stage.world;
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-a", "n1", 20).await;
    let scheduler = Scheduler::start(stage.limited().await, settings("a"));
    let online = json!({"schedulerName": "default-scheduler", "nodeName": "n1"});
    world.pod("online", json!({}), online).await;
    world.pod("offline", json!({}), json!({})).await;
    world.wait_for_places(1).await;
    let mut before = Vec::new();
    for name in ["online", "offline"] {
        before.push((name, world.pods.get(name).await.unwrap().metadata.uid));
    }
    for document in install::documents(stage).iter().rev() {
        let kind = document.types.clone().unwrap().kind;
        if !matches!(kind.as_str(), "CustomResourceDefinition" | "Namespace") {
            let name = document.metadata.name.clone().unwrap();
            let api = install::api(&stage.client, document);
            api.delete(&name, &DeleteParams::default()).await.unwrap();
        }
    }
    // Time for a few cycles of a scheduler that may do nothing any more.
    tokio::time::sleep(Duration::from_secs(3)).await;
    for (name, uid) in &before {
        wait("the pod still runs", || async {
            let pod = world.pods.get(name).await.unwrap();
            assert_eq!(pod.metadata.uid, *uid, "{name}");
            assert!(pod.metadata.deletion_timestamp.is_none(), "{name}");
            (pod.status?.phase? == "Running").then_some(())
        })
        .await;
    }
    install::install(stage).await;
    scheduler.stop().await;
}
