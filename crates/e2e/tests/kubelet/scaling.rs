//! An autoscaler of Kubernetes that reads the agent's metric, through an adapter of the metrics API as
//! clusters have one.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Api, DeleteParams, PostParams};
use muxflow_test_cluster::adapter::Adapter;
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};

use crate::stage::Stage;

/// The metric of the shipped example, `deploy/kubernetes/examples/service.yaml`.
const METRIC: &str = "muxflow_service_sm_activity_ratio";
const GROUP: &str = "custom.metrics.k8s.io/v1beta2";

/// The Deployment `web` has one pod. It comes to want more than the target, and gets a second one.
pub(crate) async fn scaled_by_the_metric(stage: &Stage, pod: &str) {
    let port = stage.chart.port;
    let pki = stage.cluster.folder().join("pki");
    let adapter = Adapter::start(&pki, Box::new(move |path| answer(path, port))).unwrap();
    let services: Api<Service> = Api::namespaced(stage.client.clone(), "default");
    let there = json!({"metadata": {"name": "adapter"}, "spec":
        {"type": "ExternalName", "externalName": "localhost"}});
    let there = serde_json::from_value(there).unwrap();
    services.create(&PostParams::default(), &there).await.unwrap();
    let groups: Api<APIService> = Api::all(stage.client.clone());
    let name = "v1beta2.custom.metrics.k8s.io";
    let group = json!({"metadata": {"name": name}, "spec": {"group": "custom.metrics.k8s.io",
        "version": "v1beta2", "groupPriorityMinimum": 100, "versionPriority": 100,
        "insecureSkipTLSVerify": true,
        "service": {"namespace": "default", "name": "adapter", "port": adapter.port()}}});
    let group = serde_json::from_value(group).unwrap();
    groups.create(&PostParams::default(), &group).await.unwrap();
    let scalers: Api<HorizontalPodAutoscaler> = Api::namespaced(stage.client.clone(), "default");
    let scaler = json!({"metadata": {"name": "web"}, "spec": {"minReplicas": 1, "maxReplicas": 2,
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"},
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": METRIC},
            "target": {"type": "AverageValue", "averageValue": "200m"}}}]}});
    let scaler = serde_json::from_value(scaler).unwrap();
    scalers.create(&PostParams::default(), &scaler).await.unwrap();

    let status = || async { scalers.get("web").await.unwrap().status.unwrap_or_default() };
    wait("the autoscaler reads the metric", || async {
        let conditions = status().await.conditions.unwrap_or_default();
        let active = conditions.iter().find(|c| c.type_ == "ScalingActive")?;
        (active.status == "True").then_some(())
    })
    .await;
    assert_eq!(status().await.desired_replicas, 1, "a calm service needs one");
    stage.pause(pod, 0);
    let second = wait("a second pod runs", || async {
        let all = stage.pods().list(&Default::default()).await.unwrap().items;
        let other = all.into_iter().find(|p| {
            let name = p.metadata.name.as_deref().unwrap_or_default();
            name.starts_with("web-") && name != pod
        })?;
        (crate::pods::phase(&other) == "Running").then_some(other)
    })
    .await;
    let second = second.metadata.name.unwrap();
    let gpu = |env: std::collections::BTreeMap<String, String>| env["CUDA_VISIBLE_DEVICES"].clone();
    assert_ne!(gpu(stage.environment(&second).await), gpu(stage.environment(pod).await));
    stage.works(&second, 5).await;

    scalers.delete("web", &DeleteParams::default()).await.unwrap();
    groups.delete(name, &DeleteParams::default()).await.unwrap();
    services.delete("adapter", &DeleteParams::default()).await.unwrap();
}

/// What an adapter answers: which metrics there are, and of one its value for each pod.
fn answer(path: &str, port: u16) -> Option<String> {
    let path = path.split('?').next().unwrap_or_default();
    let rest = path.strip_prefix("/apis/")?.strip_prefix(GROUP)?;
    if rest.is_empty() {
        let metric = json!({"name": format!("pods/{METRIC}"), "singularName": "",
            "namespaced": true, "kind": "MetricValueList", "verbs": ["get"]});
        let list = json!({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP,
            "resources": [metric]});
        return Some(list.to_string());
    }
    if !rest.starts_with("/namespaces/default/pods/") || !rest.ends_with(METRIC) {
        return None;
    }
    let page = page(port)?;
    let values: Vec<Value> = page.lines().filter_map(value).collect();
    let list = json!({"kind": "MetricValueList", "apiVersion": GROUP, "metadata": {},
        "items": values});
    Some(list.to_string())
}

/// A line of the page as a value of the metrics API, by the labels that are documented.
fn value(line: &str) -> Option<Value> {
    let (labels, value) = line.strip_prefix(METRIC)?.strip_prefix('{')?.split_once("} ")?;
    let label = |name: &str| {
        let found = labels.split(',').find_map(|l| l.strip_prefix(name)?.strip_prefix("=\""));
        found.map(|text| text.trim_end_matches('"').to_owned())
    };
    let thousandths = value.trim().parse::<f64>().ok()? * 1e3;
    Some(json!({
        "describedObject": {"kind": "Pod", "apiVersion": "/v1", "namespace": label("namespace")?,
            "name": label("pod")?},
        "metric": {"name": METRIC},
        "timestamp": k8s_openapi::jiff::Timestamp::now().to_string(),
        "value": format!("{thousandths:.0}m"),
    }))
}

/// The agent's page of metrics.
fn page(port: u16) -> Option<String> {
    let mut socket = TcpStream::connect(("127.0.0.1", port)).ok()?;
    socket.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let request = b"GET /metrics HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n";
    socket.write_all(request).ok()?;
    let mut page = String::new();
    socket.read_to_string(&mut page).ok()?;
    Some(page)
}
