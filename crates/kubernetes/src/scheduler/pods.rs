//! What a pod means to the scheduler: whether it is an offline job, where it runs, whether it may be
//! moved, and why not.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::batch::v1::{Job, JobSpec};
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use muxflow_types::{Bytes, GpuType, JobId, Micros, SmCount, SmShare, WorkloadName};

use crate::names;

/// A pod by all its names: the name for people and requests, the uid to be sure that it is the same.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PodName {
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl PodName {
    pub(crate) fn of(pod: &Pod) -> Self {
        PodName {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            name: pod.metadata.name.clone().unwrap_or_default(),
            uid: pod.metadata.uid.clone().unwrap_or_default(),
        }
    }

    /// `namespace/name`, as the agent writes it.
    pub(crate) fn path(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// Why a pod is not moved for the sake of speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    /// Nobody would create it again.
    NoController,
    /// Its Job counts an eviction as a failure.
    CountsAsFailure,
    /// Its Job has not been seen, so nobody knows what an eviction would do to it.
    JobUnknown,
    /// Its owner says that it cannot go on from a checkpoint.
    NotMovable,
}

impl Hold {
    /// The reason of a condition.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Hold::NoController => "NoController",
            Hold::CountsAsFailure => "EvictionCountsAsFailure",
            Hold::JobUnknown => "JobUnknown",
            Hold::NotMovable => "NotMovable",
        }
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Hold::NoController => "it has no controller that would create it again",
            Hold::CountsAsFailure => {
                "its Job counts an eviction against backoffLimit; create the Job with a podFailurePolicy that ignores DisruptionTarget"
            }
            Hold::JobUnknown => "its Job is not known",
            Hold::NotMovable => "its annotation muxflow.dev/movable is false",
        }
    }
}

/// What the user wrote about a job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Wishes {
    pub(crate) workload: WorkloadName,
    pub(crate) memory: Bytes,
    pub(crate) gpu_types: Vec<GpuType>,
    pub(crate) fail_prone: bool,
}

impl Wishes {
    /// Of a job that runs and whose annotations can no longer be read: it stays where it is.
    pub(crate) fn unreadable(pod: &Pod) -> Self {
        let workload = match WorkloadName::new("unreadable") {
            Ok(name) => name,
            Err(_) => unreachable!("a plain word is a workload"),
        };
        let fail_prone = annotation(pod, names::FAIL_PRONE) == Some("true");
        Wishes { workload, memory: Bytes::ZERO, gpu_types: Vec::new(), fail_prone }
    }
}

pub(crate) fn annotation<'a>(pod: &'a Pod, name: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// The job's id in plans: the pod's uid, because a name can come back.
pub(crate) fn job_id(pod: &PodName) -> Option<JobId> {
    JobId::new(&pod.uid).ok()
}

/// Reads the annotations; an error names the one that cannot be read.
pub(crate) fn wishes(pod: &Pod) -> Result<Wishes, String> {
    let read = |name: &str, e: &dyn std::fmt::Display| format!("annotation {name}: {e}");
    let memory = match annotation(pod, names::MEMORY) {
        Some(text) => Bytes::parse(text).map_err(|e| read(names::MEMORY, &e))?,
        None => Bytes::ZERO,
    };
    let workload = match annotation(pod, names::WORKLOAD) {
        Some(text) => text.to_owned(),
        // Without a name of its own, a workload is what its controller runs.
        None => match controller(pod) {
            Some(owner) => {
                format!("{}/{}", pod.metadata.namespace.as_deref().unwrap_or_default(), owner.name)
            }
            None => PodName::of(pod).path(),
        },
    };
    let workload = WorkloadName::new(&workload).map_err(|e| read(names::WORKLOAD, &e))?;
    let gpu_types = annotation(pod, names::GPU_TYPES)
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
        .filter(|t| !t.is_empty())
        .map(|t| GpuType::new(t).map_err(|e| read(names::GPU_TYPES, &e)))
        .collect::<Result<_, _>>()?;
    let fail_prone = annotation(pod, names::FAIL_PRONE) == Some("true");
    Ok(Wishes { workload, memory, gpu_types, fail_prone })
}

/// The share that the job was started with.
pub(crate) fn bound_share(pod: &Pod) -> Option<SmShare> {
    let (sms, total) = annotation(pod, names::SHARE)?.split_once('/')?;
    SmShare::new(SmCount(sms.parse().ok()?), SmCount(total.parse().ok()?)).ok()
}

/// The cap on memory that the job was started with.
pub(crate) fn bound_quota(pod: &Pod) -> Option<Bytes> {
    annotation(pod, names::QUOTA)?.parse().ok().map(Bytes)
}

/// How much a pod's priority counts: 1 for none or a negative one, and 1 more for each 100, up to the
/// highest priority that users can give.
pub(crate) fn weight(pod: &Pod) -> u32 {
    let priority = pod.spec.as_ref().and_then(|s| s.priority).unwrap_or(0);
    1 + u32::try_from(priority.clamp(0, 1_000_000_000) / 100).unwrap_or(0)
}

/// Whether nobody may be evicted to make room for it.
pub(crate) fn displaces_nobody(pod: &Pod) -> bool {
    pod.spec.as_ref().and_then(|s| s.preemption_policy.as_deref()) == Some("Never")
}

/// The containers of a pod that have a GPU, as a device or by a claim; sidecars too, but not those that
/// end before the others begin.
pub(crate) fn with_gpu(pod: &Pod) -> impl Iterator<Item = &Container> {
    let spec = pod.spec.as_ref();
    let sidecars = spec.and_then(|spec| spec.init_containers.as_ref()).into_iter().flatten();
    let sidecars = sidecars.filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let all = spec.into_iter().flat_map(|spec| &spec.containers).chain(sidecars);
    all.filter(|container| {
        container.resources.as_ref().is_some_and(|resources| {
            let device = |of: &BTreeMap<String, Quantity>| {
                of.contains_key(names::OFFLINE_RESOURCE) || of.contains_key(names::ONLINE_RESOURCE)
            };
            resources.limits.as_ref().is_some_and(device)
                || resources.requests.as_ref().is_some_and(device)
                || resources.claims.as_ref().is_some_and(|claims| !claims.is_empty())
        })
    })
}

/// The user whose processes are on the GPU.
pub(crate) fn runs_as(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let own = with_gpu(pod)
        .next()
        .or(spec.containers.first())
        .and_then(|c| c.security_context.as_ref())
        .and_then(|s| s.run_as_user);
    let shared = spec.security_context.as_ref().and_then(|s| s.run_as_user);
    own.or(shared).and_then(|uid| u32::try_from(uid).ok())
}

pub(crate) fn is_ours(pod: &Pod, scheduler: &str) -> bool {
    pod.spec.as_ref().and_then(|s| s.scheduler_name.as_deref()) == Some(scheduler)
}

pub(crate) fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref().filter(|n| !n.is_empty())
}

pub(crate) fn is_finished(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

pub(crate) fn is_leaving(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

pub(crate) fn is_gated(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|s| s.scheduling_gates.as_ref());
    gates.is_some_and(|g| !g.is_empty())
}

pub(crate) fn created_at(pod: &Pod) -> Micros {
    let created = pod.metadata.creation_timestamp.as_ref();
    created.map_or(Micros::ZERO, |t| micros(t.0))
}

/// A moment as microseconds since 1970; earlier ones count as that.
pub(crate) fn micros(at: jiff::Timestamp) -> Micros {
    Micros(u64::try_from(at.as_microsecond()).unwrap_or(0))
}

pub(crate) fn controller(pod: &Pod) -> Option<&OwnerReference> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|o| o.controller == Some(true))
}

/// Why the pod is not moved; `None` when it may be.
pub(crate) fn hold(pod: &Pod, jobs: &BTreeMap<String, Arc<Job>>) -> Option<Hold> {
    let Some(owner) = controller(pod) else { return Some(Hold::NoController) };
    if annotation(pod, names::MOVABLE) == Some("false") {
        return Some(Hold::NotMovable);
    }
    if owner.kind != "Job" {
        return None;
    }
    let Some(spec) = jobs.get(&owner.uid).and_then(|j| j.spec.as_ref()) else {
        return Some(Hold::JobUnknown);
    };
    if forgives_eviction(spec) { None } else { Some(Hold::CountsAsFailure) }
}

/// The message of a condition that is False.
pub(crate) fn message(pod: &Pod, condition: &str) -> Option<String> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let own = conditions.iter().find(|c| c.type_ == condition && c.status == "False")?;
    own.message.clone()
}

/// Whether the pod says itself that it is not moved.
pub(crate) fn knows_it_stays(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions.into_iter().flatten().any(|c| c.type_ == names::MOVABLE_CONDITION)
}

/// Whether the Job's podFailurePolicy ignores a pod that was disrupted. The first rule that matches
/// counts; a rule on exit codes may match before, because an evicted process ends with one.
fn forgives_eviction(spec: &JobSpec) -> bool {
    for rule in spec.pod_failure_policy.iter().flat_map(|p| &p.rules) {
        let disruption = rule
            .on_pod_conditions
            .iter()
            .flatten()
            .any(|c| c.type_ == "DisruptionTarget" && matches!(c.status.as_str(), "" | "True"));
        if disruption {
            return rule.action == "Ignore";
        }
        if rule.on_exit_codes.is_some() && rule.action != "Ignore" {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn pod(metadata: Value) -> Pod {
        serde_json::from_value(json!({"metadata": metadata, "spec": {"containers": []}})).unwrap()
    }

    fn owned(kind: &str) -> Pod {
        pod(json!({"name": "p", "namespace": "d", "ownerReferences":
            [{"apiVersion": "x", "kind": kind, "name": "owner", "uid": "u1", "controller": true}]}))
    }

    fn job(policy: Value) -> BTreeMap<String, Arc<Job>> {
        let job: Job =
            serde_json::from_value(json!({"spec": {"template": {}, "podFailurePolicy": policy}}))
                .unwrap();
        BTreeMap::from([("u1".to_owned(), Arc::new(job))])
    }

    #[test]
    fn only_pods_that_come_back_unpunished_are_moved() {
        let none = BTreeMap::new();
        assert_eq!(hold(&pod(json!({"name": "bare"})), &none), Some(Hold::NoController));
        assert_eq!(hold(&owned("ReplicaSet"), &none), None);
        assert_eq!(hold(&owned("Job"), &none), Some(Hold::JobUnknown));
        assert_eq!(hold(&owned("Job"), &job(json!({"rules": []}))), Some(Hold::CountsAsFailure));
        let ignore = json!({"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]});
        let exit = json!({"action": "FailJob", "onExitCodes": {"operator": "In", "values": [143]}});
        assert_eq!(hold(&owned("Job"), &job(json!({"rules": [ignore]}))), None);
        assert_eq!(hold(&owned("Job"), &job(json!({"rules": [ignore, exit]}))), None);
        let punished = Some(Hold::CountsAsFailure);
        assert_eq!(hold(&owned("Job"), &job(json!({"rules": [exit, ignore]}))), punished);
        let mut stuck = owned("ReplicaSet");
        stuck.metadata.annotations =
            Some(BTreeMap::from([(names::MOVABLE.to_owned(), "false".to_owned())]));
        assert_eq!(hold(&stuck, &none), Some(Hold::NotMovable));
    }

    #[test]
    fn the_user_is_that_of_the_container_with_the_gpu() {
        let with = |spec: Value| -> Option<u32> {
            runs_as(&serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap())
        };
        let user = |n: u32| json!({"runAsUser": n});
        let device = json!({"limits": {names::OFFLINE_RESOURCE: "1"}});
        let claim = json!({"claims": [{"name": "gpu"}]});
        let log = json!({"name": "log", "securityContext": user(1)});
        for gpu in [&device, &claim] {
            let train = json!({"name": "t", "securityContext": user(2), "resources": gpu});
            assert_eq!(with(json!({"containers": [log, train]})), Some(2));
            let mut sidecar = train.clone();
            sidecar["restartPolicy"] = json!("Always");
            let spec = json!({"containers": [log], "initContainers": [train, sidecar]});
            let pod = serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap();
            assert_eq!(with_gpu(&pod).count(), 1, "one that ends before the others begin has none");
            assert_eq!(with(spec), Some(2));
            let plain = json!({"name": "t", "resources": gpu});
            let spec = json!({"containers": [log, plain], "securityContext": user(3)});
            assert_eq!(with(spec), Some(3), "its own, else the pod's");
        }
        assert_eq!(with(json!({"containers": [log]})), Some(1));
    }

    #[test]
    fn wishes_are_read_and_mistakes_are_named() {
        let p = pod(json!({"name": "p", "namespace": "d", "annotations": {
            "muxflow.dev/memory": "6GiB", "muxflow.dev/gpu-types": "T4, A10"}}));
        let w = wishes(&p).unwrap();
        assert_eq!(w.memory, Bytes::from_gib(6));
        assert_eq!(w.gpu_types.len(), 2);
        assert_eq!(w.workload.as_str(), "d/p");
        assert!(!w.fail_prone);
        let marked = pod(json!({"name": "p", "namespace": "d", "annotations": {
            "muxflow.dev/fail-prone": "true"}}));
        assert!(wishes(&marked).unwrap().fail_prone);
        assert_eq!(wishes(&owned("Job")).unwrap().workload.as_str(), "d/owner");
        let bad = pod(json!({"name": "p", "annotations": {"muxflow.dev/memory": "six"}}));
        let said = wishes(&bad).unwrap_err();
        assert!(said.contains("muxflow.dev/memory") && said.contains("six"), "{said}");
    }

    #[test]
    fn a_higher_priority_never_counts_less() {
        let with = |p: i32| {
            let mut pod = pod(json!({"name": "p"}));
            pod.spec.as_mut().unwrap().priority = Some(p);
            weight(&pod)
        };
        assert_eq!(with(-5), 1);
        assert_eq!(with(0), 1);
        assert!(with(1000) > with(100) && with(1_000_000_000) > with(1_000_000));
        assert_eq!(with(i32::MAX), with(1_000_000_000));
    }
}
