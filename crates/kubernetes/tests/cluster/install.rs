//! What is installed: it is current, and the API server takes it.

use std::path::Path;

use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::authorization::v1::SubjectAccessReview;
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig};
use kube::core::GroupVersionKind;
use kube::{Client, Config};
use muxflow_kubernetes::resource::{Model, Profile};
use muxflow_test_cluster::scenarios::wait;
use serde_json::{Value, json};

use crate::Stage;

pub(crate) const NAMESPACE: &str = "muxflow";

/// All documents that `kubectl apply -k deploy/kubernetes` sends.
pub(crate) fn documents(stage: &Stage) -> Vec<DynamicObject> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kubernetes");
    let text = stage.cluster.kustomize(&folder).unwrap();
    serde_saphyr::from_multiple::<DynamicObject>(&text).unwrap()
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
    for document in documents(stage) {
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
    // Who acts before the API server knows of a right is refused.
    let lease = "muxflow-scheduler".to_owned();
    let leases = ["get", "coordination.k8s.io", "leases"];
    for (account, words, namespace, name) in [
        ("muxflow-scheduler", leases, NAMESPACE, Some(&lease)),
        ("muxflow-scheduler", ["list", "", "pods"], "", None),
        ("muxflow-agent", ["list", "", "pods"], "", None),
    ] {
        wait("the rights known", || async {
            may(stage, [NAMESPACE, account], words, namespace, name).await.then_some(())
        })
        .await;
    }
    let accounts: Api<ServiceAccount> = Api::namespaced(stage.client.clone(), "default");
    wait("the default account", || async { accounts.get_opt("default").await.unwrap() }).await;
}

/// Whether an account, by its namespace and name, may do something, by a verb, a group and a resource.
pub(crate) async fn may(
    stage: &Stage,
    [home, account]: [&str; 2],
    [verb, group, resource]: [&str; 3],
    namespace: &str,
    name: Option<&String>,
) -> bool {
    let (resource, sub) = resource.split_once('/').unwrap_or((resource, ""));
    let review = json!({"spec": {"user": format!("system:serviceaccount:{home}:{account}"),
        "resourceAttributes": {"verb": verb, "group": group, "resource": resource,
            "subresource": sub, "namespace": namespace, "name": name}}});
    let reviews: Api<SubjectAccessReview> = Api::all(stage.client.clone());
    let review = serde_json::from_value(review).unwrap();
    let answer = reviews.create(&PostParams::default(), &review).await.unwrap();
    answer.status.is_some_and(|status| status.allowed)
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
    let profiles: Api<Profile> = Api::all(stage.client.clone());
    for speed in [1e39, 0.0] {
        let spec = json!({"workload": "w", "gpuType": "T4", "soloSpeed": speed});
        let profile = Profile::new("odd", serde_json::from_value(spec).unwrap());
        let said = profiles.create(&PostParams::default(), &profile).await.unwrap_err().to_string();
        assert!(said.contains("soloSpeed"), "{said}");
    }
}

/// What `kubectl get gpus`, `kubectl get profiles` and `kubectl get models` show.
pub(crate) async fn table(stage: &mut Stage) {
    stage.world.node("n1", json!({}), json!({})).await;
    stage.world.gpu("GPU-a", "n1", 10).await;
    let (columns, cells) = shown(stage, "gpus", "gpu-a").await;
    assert_eq!(columns[..4], ["Name", "Node", "Type", "State"]);
    assert_eq!((&cells[3], &cells[6]), (&json!("Healthy"), &json!(10)));

    let profiles: Api<Profile> = Api::all(stage.client.clone());
    let spec = json!({"workload": "w", "gpuType": "T4", "smActivityPct": 37.5});
    let profile = Profile::new("shown", serde_json::from_value(spec).unwrap());
    profiles.create(&PostParams::default(), &profile).await.unwrap();
    let (columns, cells) = shown(stage, "profiles", "shown").await;
    assert_eq!(columns, ["Name", "Workload", "Type", "SM %", "Memory", "Age"]);
    assert_eq!(cells[1..4], [json!("w"), json!("T4"), json!(37.5)]);
    profiles.delete("shown", &DeleteParams::default()).await.unwrap();

    let models: Api<Model> = Api::all(stage.client.clone());
    let spec = json!({"gpuType": "T4", "data": "", "note": "of a test"});
    let model = Model::new("shown", serde_json::from_value(spec).unwrap());
    models.create(&PostParams::default(), &model).await.unwrap();
    let (columns, cells) = shown(stage, "models", "shown").await;
    assert_eq!(columns, ["Name", "Type", "Note", "Age"]);
    assert_eq!(cells[1..3], [json!("T4"), json!("of a test")]);
    models.delete("shown", &DeleteParams::default()).await.unwrap();
}

/// The columns of a resource, and the cells of one of its objects.
async fn shown(stage: &Stage, resource: &str, name: &str) -> (Vec<String>, Vec<Value>) {
    let request = http::Request::get(format!("/apis/muxflow.dev/v1alpha1/{resource}"))
        .header("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
        .body(Vec::new())
        .unwrap();
    let table: Value = stage.client.request(request).await.unwrap();
    let columns = table["columnDefinitions"].as_array().unwrap().iter();
    let columns = columns.filter_map(|c| c["name"].as_str().map(str::to_owned)).collect();
    let mut rows = table["rows"].as_array().unwrap().iter();
    let row = rows.find(|row| row["cells"][0] == name).unwrap();
    (columns, row["cells"].as_array().unwrap().clone())
}

/// A client with nothing but the rights of an installed account.
pub(crate) async fn limited(stage: &Stage, account: &str) -> Client {
    limited_in(stage, NAMESPACE, account).await
}

/// The same, of an account in any namespace.
pub(crate) async fn limited_in(stage: &Stage, namespace: &str, account: &str) -> Client {
    let file = kubeconfig(stage, namespace, account).await;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.unwrap();
    muxflow_kubernetes::connect::client(config).unwrap()
}

/// How to reach the cluster with the rights of an account.
pub(crate) async fn kubeconfig(stage: &Stage, namespace: &str, account: &str) -> Kubeconfig {
    let accounts: Api<ServiceAccount> = Api::namespaced(stage.client.clone(), namespace);
    let wish = TokenRequest { spec: TokenRequestSpec::default(), ..TokenRequest::default() };
    let token: TokenRequest =
        accounts.create_token_request(account, &PostParams::default(), &wish).await.unwrap();
    let mut file = Kubeconfig::read_from(stage.cluster.kubeconfig()).unwrap();
    let auth: AuthInfo =
        serde_json::from_value(json!({"token": token.status.unwrap().token})).unwrap();
    file.auth_infos[0].auth_info = Some(auth);
    file
}
