//! What is installed: it is current, the API server takes it, and it grants no more than is used.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::core::GroupVersionKind;
use kube::{Client, Config};
use muxflow_kubernetes::resource::State;
use serde_json::{Value, json};

use crate::Stage;
use crate::world::{Scheduler, settings, wait};

pub(crate) const NAMESPACE: &str = "muxflow";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes")
}

/// All documents of all files that `kustomization.yaml` lists, in its order.
pub(crate) fn documents() -> Vec<DynamicObject> {
    let read = |name: &str| std::fs::read_to_string(folder().join(name)).unwrap();
    let list: Value = serde_saphyr::from_str(&read("kustomization.yaml")).unwrap();
    let mut documents = Vec::new();
    for file in list["resources"].as_array().unwrap() {
        let text = read(file.as_str().unwrap());
        documents.extend(serde_saphyr::from_multiple::<DynamicObject>(&text).unwrap());
    }
    documents
}

/// The path of a document's kind: namespaced where the document names a namespace.
pub(crate) fn api(client: &Client, document: &DynamicObject) -> Api<DynamicObject> {
    let types = document.types.clone().unwrap();
    let (group, version) = types.api_version.rsplit_once('/').unwrap_or(("", &types.api_version));
    let mut resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    if let Some(stem) = types.kind.to_lowercase().strip_suffix('y') {
        resource.plural = format!("{stem}ies");
    }
    match document.metadata.namespace.as_deref() {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
        None => Api::all_with(client.clone(), &resource),
    }
}

/// Applies everything as `kubectl apply -k` would, field by field checked by the API server.
pub(crate) async fn install(stage: &Stage) {
    let apply = PatchParams {
        field_validation: Some(kube::api::ValidationDirective::Strict),
        ..PatchParams::apply("install").force()
    };
    for document in documents() {
        let name = document.metadata.name.clone().unwrap();
        let kind = document.types.clone().unwrap().kind;
        api(&stage.client, &document)
            .patch(&name, &apply, &Patch::Apply(&document))
            .await
            .unwrap_or_else(|e| panic!("{kind} {name}: {e}"));
    }
    wait("the definitions served", || async {
        let list = stage.world.gpus.list(&Default::default()).await;
        list.is_ok().then_some(())
    })
    .await;
    let accounts: Api<ServiceAccount> = Api::namespaced(stage.client.clone(), "default");
    wait("the default account", || async { accounts.get_opt("default").await.unwrap() }).await;
}

/// The definitions refuse what the Rust types could not read.
pub(crate) async fn definitions(stage: &mut Stage) {
    stage.world.node("n1", json!({}), json!({})).await;
    stage.world.gpu("GPU-a", "n1", 10).await;
    for (status, field) in [
        (json!({"state": "Sick", "observedAt": "2026-01-01T00:00:00Z"}), "state"),
        (json!({"state": "Healthy", "observedAt": "yesterday"}), "observedAt"),
        (
            json!({"state": "Healthy", "observedAt": "2026-01-01T00:00:00Z", "shareSms": -1}),
            "shareSms",
        ),
    ] {
        let patch = Patch::Merge(json!({"status": status}));
        let answer = stage.world.gpus.patch_status("gpu-a", &PatchParams::default(), &patch).await;
        let said = answer.map(|g| format!("{:?}", g.status)).unwrap_err().to_string();
        assert!(said.contains(field), "{said}");
    }
}

/// What `kubectl get gpus` shows.
pub(crate) async fn table(stage: &mut Stage) {
    stage.world.node("n1", json!({}), json!({})).await;
    stage.world.gpu("GPU-a", "n1", 10).await;
    let request = http::Request::get("/apis/muxflow.dev/v1alpha1/gpus")
        .header("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .unwrap();
    let table: Value = stage.client.request(request).await.unwrap();
    let columns: Vec<&str> = table["columnDefinitions"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|c| c["name"].as_str())
        .collect();
    assert_eq!(columns[..4], ["Name", "Node", "Type", "State"]);
    let cells = &table["rows"][0]["cells"];
    assert_eq!(cells[0], "gpu-a");
    assert_eq!(cells[3], "Healthy");
    assert_eq!(cells[6], 10);
}

/// A client with nothing but the rights of an account.
pub(crate) async fn limited(stage: &Stage, account: &str) -> Client {
    let accounts: Api<ServiceAccount> = Api::namespaced(stage.client.clone(), NAMESPACE);
    let wish = TokenRequest { spec: TokenRequestSpec::default(), ..TokenRequest::default() };
    let token: TokenRequest =
        accounts.create_token_request(account, &PostParams::default(), &wish).await.unwrap();
    let mut file = Kubeconfig::read_from(stage.cluster.kubeconfig()).unwrap();
    let auth: AuthInfo =
        serde_json::from_value(json!({"token": token.status.unwrap().token})).unwrap();
    file.auth_infos[0].auth_info = Some(auth);
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    muxflow_kubernetes::connect::client(config).unwrap()
}

/// The scheduler works with exactly the rights that are installed, and uses every one of them.
pub(crate) async fn rights(stage: &mut Stage) {
    let world = stage.world.clone();
    let client = limited(stage, "muxflow-scheduler").await;
    let forbidden: Api<Namespace> = Api::all(client.clone());
    assert!(forbidden.list(&Default::default()).await.is_err(), "the account can list namespaces");
    world.node("n1", json!({}), json!({})).await;
    world.gpu("GPU-a", "n1", 20).await;
    let mut limited = settings("limited");
    limited.namespace = NAMESPACE.to_owned();
    let scheduler = Scheduler::start(client, limited);
    world.pod("runs", json!({}), json!({})).await;
    world.wait_for_places(1).await;
    world.pod("waits", json!({}), json!({})).await;
    world.wait_for_message("waits", "all 1 GPUs").await;
    world.report("GPU-a", State::Overlimit, 0).await;
    world.wait_for_event("runs", "GpuOverlimit").await;
    // The same thing said again is counted on the event that is there.
    let granted = granted(stage, "muxflow-scheduler", true).await;
    let used = wait("every right used", || async {
        let used = used(stage, "muxflow-scheduler");
        let idle: Vec<_> = granted.difference(&used).collect();
        (idle.is_empty() || idle == [&right("patch", "events.k8s.io", "events")]).then_some(used)
    })
    .await;
    let more: Vec<_> = used.difference(&granted).collect();
    assert!(more.is_empty(), "used without being granted: {more:?}");
    scheduler.stop().await;
}

pub(crate) type Right = (String, String, String);

pub(crate) fn right(verb: &str, group: &str, resource: &str) -> Right {
    (verb.to_owned(), group.to_owned(), resource.to_owned())
}

pub(crate) async fn granted(stage: &Stage, account: &str, has_role: bool) -> BTreeSet<Right> {
    let cluster: Api<ClusterRole> = Api::all(stage.client.clone());
    let local: Api<Role> = Api::namespaced(stage.client.clone(), NAMESPACE);
    let mut rules: Vec<PolicyRule> = cluster.get(account).await.unwrap().rules.unwrap();
    if has_role {
        rules.extend(local.get(account).await.unwrap().rules.unwrap());
    }
    let mut rights = BTreeSet::new();
    for rule in rules {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                for verb in &rule.verbs {
                    rights.insert(right(verb, group, resource));
                }
            }
        }
    }
    rights
}

/// What the account was allowed to do and did, by the API server's audit log.
pub(crate) fn used(stage: &Stage, account: &str) -> BTreeSet<Right> {
    let user = format!("system:serviceaccount:{NAMESPACE}:{account}");
    let log = std::fs::read_to_string(stage.cluster.audit_log()).unwrap();
    let entries = log.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    entries
        .filter(|e| e["user"]["username"] == user.as_str())
        .filter(|e| e["annotations"]["authorization.k8s.io/decision"] == "allow")
        .filter_map(|e| {
            let object = &e["objectRef"];
            let resource = object["resource"].as_str()?;
            let full = match object["subresource"].as_str() {
                Some(sub) => format!("{resource}/{sub}"),
                None => resource.to_owned(),
            };
            Some(right(e["verb"].as_str()?, object["apiGroup"].as_str().unwrap_or(""), &full))
        })
        .collect()
}
