//! Pods of this node as they were placed, from a watch.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Container, Pod};
use kube::runtime::reflector::Store;
use muxflow_types::{Bytes, GpuId, JobId, Micros, SmShare};

use crate::names;
use crate::scheduler::pods::{self, PodName};

/// A pod and what it was given.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    pub(crate) pod: PodName,
    pub(crate) job: JobId,
    pub(crate) gpu: GpuId,
    pub(crate) share: SmShare,
    pub(crate) quota: Bytes,
    pub(crate) created_at: Micros,
    pub(crate) leaving: bool,
    pub(crate) running: bool,
    pub(crate) grace_s: u64,
}

/// What a pod was given: by its binding, or by a claim.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Grant {
    pub(crate) gpu: GpuId,
    pub(crate) share: SmShare,
    pub(crate) quota: Bytes,
}

/// Reads the annotations of a binding; an error says what is missing.
pub(crate) fn granted(pod: &Pod) -> Result<Grant, String> {
    let path = PodName::of(pod).path();
    let text = |annotation: &str| {
        pods::annotation(pod, annotation).ok_or_else(|| {
            format!("pod {path} has no annotation {annotation}: it was not placed by MuxFlow; set schedulerName: {}", names::SCHEDULER)
        })
    };
    let gpu =
        GpuId::new(text(names::GPU)?).map_err(|e| format!("pod {path}, {}: {e}", names::GPU))?;
    text(names::SHARE)?;
    let share = pods::bound_share(pod)
        .ok_or_else(|| format!("pod {path}: {} is no share such as 30/40", names::SHARE))?;
    let quota = text(names::QUOTA)?;
    let quota = quota
        .parse()
        .map_err(|_| format!("pod {path}: {} is no number of bytes: {quota}", names::QUOTA))?;
    Ok(Grant { gpu, share, quota: Bytes(quota) })
}

/// A pod that the scheduler bound.
pub(crate) fn placed(pod: &Pod) -> Result<Placed, String> {
    with(pod, granted(pod)?)
}

/// A pod that was given this.
pub(crate) fn with(pod: &Pod, grant: Grant) -> Result<Placed, String> {
    let name = PodName::of(pod);
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let grace = pod.spec.as_ref().and_then(|s| s.termination_grace_period_seconds);
    Ok(Placed {
        job: pods::job_id(&name).ok_or_else(|| format!("pod {} has no uid", name.path()))?,
        pod: name,
        gpu: grant.gpu,
        share: grant.share,
        quota: grant.quota,
        created_at: pods::created_at(pod),
        leaving: pods::is_leaving(pod),
        running: phase == Some("Running"),
        grace_s: grace.and_then(|s| u64::try_from(s).ok()).unwrap_or(30),
    })
}

/// What to tell of a pod whose container begins to end before anybody can drain its work on the GPU;
/// nothing when each that has the GPU waits in its `preStop`.
pub(crate) fn without_pre_stop(pod: &Pod) -> Option<String> {
    let waits = |container: &&Container| {
        container.lifecycle.as_ref().is_some_and(|lifecycle| lifecycle.pre_stop.is_some())
    };
    let hasty: Vec<&str> = pods::with_gpu(pod)
        .filter(|container| !waits(container))
        .map(|container| container.name.as_str())
        .collect();
    (!hasty.is_empty()).then(|| {
        format!(
            "container {} has no preStop: when the pod is deleted, its processes are told to end before their work on the GPU is drained; add lifecycle.preStop.sleep of 3 seconds",
            hasty.join(", ")
        )
    })
}

/// All pods that were placed here, by a binding or by a claim, and are not over, oldest first: the
/// order in which a kubelet takes them.
pub(crate) fn all(store: &Store<Pod>, claimed: &BTreeMap<JobId, Grant>) -> Vec<Placed> {
    let read = |pod: &Pod| {
        let job = pods::job_id(&PodName::of(pod))?;
        match claimed.get(&job) {
            Some(grant) => with(pod, grant.clone()).ok(),
            None => placed(pod).ok(),
        }
    };
    let pods = store.state();
    let mut all: Vec<Placed> =
        pods.iter().filter(|pod| !pods::is_finished(pod)).filter_map(|pod| read(pod)).collect();
    all.sort_by(|a, b| (a.created_at, &a.pod).cmp(&(b.created_at, &b.pod)));
    all
}

/// A pod by its name, if it is not over.
pub(crate) fn find(store: &Store<Pod>, namespace: &str, name: &str) -> Option<Arc<Pod>> {
    store.find(|pod| {
        pod.metadata.namespace.as_deref() == Some(namespace)
            && pod.metadata.name.as_deref() == Some(name)
            && !pods::is_finished(pod)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_sidecar_with_the_gpu_is_told_to_wait_too() {
        let gpu = json!({"limits": {names::OFFLINE_RESOURCE: "1"}});
        let waits = json!({"preStop": {"sleep": {"seconds": 3}}});
        let pod = |lifecycle: serde_json::Value| -> Pod {
            let sidecar = json!({"name": "train", "restartPolicy": "Always", "resources": gpu,
                "lifecycle": lifecycle});
            serde_json::from_value(json!({"metadata": {}, "spec":
                {"containers": [{"name": "log"}], "initContainers": [sidecar]}}))
            .unwrap()
        };
        let said = without_pre_stop(&pod(json!(null))).unwrap();
        assert!(said.contains("container train has no preStop"), "{said}");
        assert_eq!(without_pre_stop(&pod(waits)), None);
    }
}
