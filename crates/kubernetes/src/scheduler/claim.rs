//! Pods that ask for their place by a claim (dynamic resource allocation): before such a pod is bound,
//! the planned GPU's device is written into the claim and the claim reserved for the pod, as the
//! scheduler of Kubernetes would.
//!
//! Only the simplest claim is understood, one device of the class for jobs; anything else about it is
//! named, and the pod waits. A claim that was written for a pod whose binding then failed is written
//! anew the next time; one whose pod is gone is given back by the controller of Kubernetes.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::{Client, Error as KubeError};
use muxflow_types::GpuId;
use serde_json::{Value, json};

use super::pods::PodName;
use crate::device::plugin::Kind;
use crate::dra::{DRIVER, slice};

/// The class of devices for jobs.
const CLASS: &str = "offline.muxflow.dev";
/// Keeps an allocated claim until the kubelet has let it go.
const FINALIZER: &str = "resource.kubernetes.io/delete-protection";

/// Why a claim was not allocated.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The pod must wait; the words are for its owner.
    Waits(String),
    /// Worth another try.
    Failed(KubeError),
}

impl From<KubeError> for Problem {
    fn from(error: KubeError) -> Self {
        match &error {
            KubeError::Api(status) if status.code == 403 => Problem::Waits(
                "the scheduler may not allocate claims; install the chart with agent.dra: true"
                    .to_owned(),
            ),
            // Gone, changed meanwhile, or too many at once: another time. Anything else is the claim's.
            KubeError::Api(status)
                if (400..500).contains(&status.code) && !matches!(status.code, 404 | 409 | 429) =>
            {
                Problem::Waits(format!("its claim cannot be allocated: {}", status.message))
            }
            _ => Problem::Failed(error),
        }
    }
}

/// Whether a pod asks by a claim.
pub(crate) fn asks(pod: &Pod) -> bool {
    let claims = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
    claims.is_some_and(|claims| !claims.is_empty())
}

/// The name of the pod's claim: its own, or the one that was made for it.
fn name_of(pod: &Pod) -> Result<String, Problem> {
    let wanted = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref()?.first());
    let Some(wanted) = wanted else {
        return Err(Problem::Waits("it names no claim".to_owned()));
    };
    if let Some(name) = &wanted.resource_claim_name {
        return Ok(name.clone());
    }
    let made = pod.status.as_ref().and_then(|status| status.resource_claim_statuses.as_ref());
    made.into_iter()
        .flatten()
        .find(|made| made.name == wanted.name)
        .and_then(|made| made.resource_claim_name.clone())
        .ok_or_else(|| Problem::Waits(format!("its claim {} has not been made yet", wanted.name)))
}

/// The name of the one request that a claim may have.
fn request(claim: &Value) -> Result<&str, String> {
    let devices = &claim["spec"]["devices"];
    let none: &[Value] = &[];
    let list = |field: &str| devices[field].as_array().map_or(none, Vec::as_slice);
    let [only] = list("requests") else {
        return Err("must have exactly one request".to_owned());
    };
    if !list("constraints").is_empty() || !list("config").is_empty() {
        return Err("has constraints or a configuration, which this scheduler ignores".to_owned());
    }
    let exactly = &only["exactly"];
    let plain = exactly["selectors"].as_array().is_none_or(Vec::is_empty)
        && exactly["adminAccess"].as_bool() != Some(true)
        && exactly["count"].as_u64().unwrap_or(1) == 1
        && matches!(exactly["allocationMode"].as_str(), None | Some("ExactCount"));
    if exactly["deviceClassName"] != CLASS || !plain {
        return Err(format!("must ask for exactly one device of the class {CLASS}, unselected"));
    }
    only["name"].as_str().ok_or_else(|| "has a request without a name".to_owned())
}

/// How a claim stands to a pod.
#[derive(Debug, PartialEq)]
enum Standing {
    Free,
    /// Ready: nothing is left to be done.
    Given,
    /// Given to this pod before, on another GPU.
    Elsewhere,
    Others,
}

fn standing(claim: &Value, uid: &str, result: &Value) -> Standing {
    let status = &claim["status"];
    let reserved = status["reservedFor"].as_array().cloned().unwrap_or_default();
    let ours = reserved.iter().all(|consumer| consumer["uid"] == uid);
    let results = status["allocation"]["devices"]["results"].as_array();
    match (ours, results) {
        (false, _) => Standing::Others,
        (true, None) => Standing::Free,
        (true, Some(results)) => {
            let same = |field: &str| results.iter().all(|given| given[field] == result[field]);
            let whole = results.len() == 1
                && ["request", "driver", "pool", "device"].map(same) == [true; 4];
            match (whole && !reserved.is_empty(), same("driver")) {
                (true, _) => Standing::Given,
                (false, true) => Standing::Elsewhere,
                (false, false) => Standing::Others,
            }
        }
    }
}

/// Gives the pod's claim the device of a GPU.
pub(crate) async fn allocate(
    client: &Client,
    pod: &Pod,
    node: &str,
    gpu: &GpuId,
) -> Result<(), Problem> {
    let owner = PodName::of(pod);
    let name = name_of(pod)?;
    let resource = slice::resource("ResourceClaim", "resourceclaims");
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &owner.namespace, &resource);
    let Some(mut claim) = api.get_opt(&name).await? else {
        return Err(Problem::Waits(format!("its claim {name} does not exist")));
    };
    let request = request(&claim.data)
        .map_err(|why| Problem::Waits(format!("its claim {name} {why}")))?
        .to_owned();
    let result = json!({"request": request, "driver": DRIVER, "pool": node,
        "device": slice::device_name(Kind::Offline, gpu.as_str())});
    match standing(&claim.data, &owner.uid, &result) {
        Standing::Given => return Ok(()),
        Standing::Others => {
            let why = format!("its claim {name} is allocated already, and not by this scheduler");
            return Err(Problem::Waits(why));
        }
        Standing::Elsewhere => {
            let none = json!({"allocation": null, "reservedFor": null});
            claim = write(&api, &name, &claim, none).await?;
        }
        Standing::Free => {}
    }
    let mut finalizers = claim.metadata.finalizers.clone().unwrap_or_default();
    if !finalizers.iter().any(|finalizer| finalizer == FINALIZER) {
        finalizers.push(FINALIZER.to_owned());
        let patch = json!({"metadata": {"finalizers": finalizers,
            "resourceVersion": claim.metadata.resource_version}});
        claim = api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await?;
    }
    let only = json!({"nodeSelectorTerms": [{"matchFields":
        [{"key": "metadata.name", "operator": "In", "values": [node]}]}]});
    let status = json!({
        "allocation": {"devices": {"results": [result]}, "nodeSelector": only},
        "reservedFor": [{"resource": "pods", "name": owner.name, "uid": owner.uid}],
    });
    write(&api, &name, &claim, status).await.map(drop)
}

/// Writes the status, unless the claim has changed since it was read.
async fn write(
    api: &Api<DynamicObject>,
    name: &str,
    claim: &DynamicObject,
    status: Value,
) -> Result<DynamicObject, Problem> {
    let patch = json!({"metadata": {"resourceVersion": claim.metadata.resource_version},
        "status": status});
    Ok(api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch)).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(requests: Value, status: Value) -> Value {
        json!({"spec": {"devices": {"requests": requests}}, "status": status})
    }

    #[test]
    fn only_one_plain_device_is_understood() {
        let ask = |exactly: Value| json!([{"name": "gpu", "exactly": exactly}]);
        let good = claim(ask(json!({"deviceClassName": CLASS})), json!({}));
        assert_eq!(request(&good), Ok("gpu"));
        let counted = json!({"deviceClassName": CLASS, "count": 1, "allocationMode": "ExactCount"});
        assert_eq!(request(&claim(ask(counted), json!({}))), Ok("gpu"));
        for (requests, words) in [
            (json!([]), "exactly one request"),
            (ask(json!({"deviceClassName": "gpu.nvidia.com"})), CLASS),
            (ask(json!({"deviceClassName": CLASS, "count": 2})), CLASS),
            (ask(json!({"deviceClassName": CLASS, "allocationMode": "All"})), CLASS),
            (ask(json!({"deviceClassName": CLASS, "selectors": [{"cel": {}}]})), CLASS),
            (json!([{"name": "gpu", "firstAvailable": []}]), CLASS),
        ] {
            let said = request(&claim(requests, json!({}))).unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }

    #[test]
    fn a_claim_of_others_is_left_alone() {
        let result = |device: &str| json!({"request": "gpu", "driver": DRIVER, "pool": "n", "device": device});
        let given = |device: &str| json!({"devices": {"results": [result(device)]}});
        let pod = |uid: &str| json!([{"resource": "pods", "name": "p", "uid": uid}]);
        for (status, expected) in [
            (json!({}), Standing::Free),
            (json!({"allocation": given("a"), "reservedFor": pod("u")}), Standing::Given),
            (json!({"allocation": given("b"), "reservedFor": pod("u")}), Standing::Elsewhere),
            (json!({"allocation": given("a")}), Standing::Elsewhere),
            (json!({"allocation": given("a"), "reservedFor": pod("other")}), Standing::Others),
            (
                json!({"allocation": {"devices": {"results": [{"driver": "gpu.nvidia.com"}]}}}),
                Standing::Others,
            ),
        ] {
            let shown = status.to_string();
            let found = standing(&claim(json!([]), status), "u", &result("a"));
            assert_eq!(found, expected, "{shown}");
        }
    }
}
