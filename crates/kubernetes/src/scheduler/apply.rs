//! Sends the requests of a cycle, and believes the API server's answer rather than the plan.
//!
//! Every request names the pod's uid, so that a pod that was deleted and created again under the same
//! name is never hit. A refusal is an ordinary answer: somebody was faster, or a disruption budget
//! says no. The next cycle sees what came of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod};
use kube::Client;
use kube::api::{
    Api, DeleteParams, EvictParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions,
};
use kube::runtime::events::EventType;
use muxflow_types::GpuId;
use serde_json::json;
use tokio::sync::watch;

use super::claim::{self, Problem};
use super::decide::Action;
use super::lease::Valid;
use super::pods::{self, Hold, PodName};
use super::snapshot::Assumed;
use super::told::Told;
use crate::events::{Later, Teller};
use crate::names;

/// How many requests are under way at once.
const PARALLEL: usize = 16;
/// A binding that was not answered may have been made; the GPU is kept for the pod for so long.
const UNSURE_FOR: Duration = Duration::from_secs(30);

/// Sends requests as long as this replica may act.
pub(crate) struct Hands {
    client: Client,
    teller: Arc<Teller>,
    later: Later,
    /// What each pod was last told, so that nothing is told twice.
    told: Told,
}

/// Whether a request may still be sent.
#[derive(Debug)]
pub(crate) struct Permit {
    pub(crate) valid: watch::Receiver<Option<Valid>>,
    /// The plan was made in this one; in another, somebody else may have acted since.
    pub(crate) term: i32,
    /// When this cycle has had its time.
    pub(crate) until: Instant,
}

impl Permit {
    fn holds(&self) -> bool {
        let now = Instant::now();
        let lease = *self.valid.borrow();
        now < self.until && lease.is_some_and(|l| l.term == self.term && now < l.until)
    }
}

/// What the requests of one cycle share.
struct Sending<'a> {
    pods: &'a BTreeMap<&'a str, &'a Arc<Pod>>,
    permit: &'a Permit,
    /// For each answer.
    patience: Duration,
}

impl Sending<'_> {
    /// The answer, unless it takes too long.
    async fn in_time<T>(&self, request: impl Future<Output = T>) -> Option<T> {
        let answer = tokio::time::timeout(self.patience, request).await.ok();
        if answer.is_none() {
            tracing::warn!(patience = ?self.patience, "a request was not answered in time");
        }
        answer
    }
}

/// What a cycle did.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct Outcome {
    /// There was nothing to plan.
    pub(crate) idle: bool,
    /// Bindings that were made.
    pub(crate) bound: Vec<(PodName, Assumed)>,
    /// Bindings that were perhaps made: nobody answered.
    pub(crate) unsure: Vec<(PodName, Assumed)>,
    /// Evictions that were accepted.
    pub(crate) evicted: usize,
    /// Requests that were refused or failed; worth another cycle soon.
    pub(crate) failed: usize,
    /// Requests that were not sent, because the time to act was over; the next cycle sends what is
    /// still right.
    pub(crate) postponed: usize,
    /// Pods that could not be told yet why they wait.
    pub(crate) untold: usize,
    /// Pods whose binding was refused for a reason of their own, by uid, and the reason.
    pub(crate) aside: Vec<(String, String)>,
}

enum Answer {
    Bound(PodName, Assumed),
    Unsure(PodName, Assumed),
    Evicted,
    Told(String, String),
    /// Refused for a reason of its own; whether it was told so.
    Aside(String, String, bool),
    Nothing,
    Failed,
    Postponed,
    Untold,
}

impl std::fmt::Debug for Hands {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hands").field("told", &self.told).finish_non_exhaustive()
    }
}

impl Hands {
    pub(crate) fn new(client: Client, identity: &str) -> Self {
        let teller = Arc::new(Teller::new(client.clone(), "muxflow-scheduler", identity));
        Hands { later: Later::new(Arc::clone(&teller)), teller, client, told: Told::default() }
    }

    /// Sends all requests as long as it is permitted, each with at most `patience` for its answer.
    pub(crate) async fn apply(
        &mut self,
        actions: Vec<Action>,
        pods: &[Arc<Pod>],
        permit: &Permit,
        patience: Duration,
    ) -> Outcome {
        let by_uid: BTreeMap<&str, &Arc<Pod>> =
            pods.iter().filter_map(|p| Some((p.metadata.uid.as_deref()?, p))).collect();
        let living: BTreeSet<&str> = by_uid.keys().copied().collect();
        self.told.forget_all_but(&living);
        let now = Instant::now();
        let actions: Vec<Action> = actions
            .into_iter()
            .filter(|action| match action {
                Action::Wait { pod, note } => {
                    let before = by_uid.get(pod.uid.as_str()).and_then(|p| waiting_message(p));
                    self.told.is_news(&pod.uid, note, before.as_deref(), now)
                }
                Action::Held { pod, note, .. } => {
                    let before = by_uid.get(pod.uid.as_str()).and_then(|p| held_message(p));
                    self.told.is_news(&pod.uid, note, before.as_deref(), now)
                }
                Action::Bind { .. } | Action::Evict { .. } => true,
            })
            .collect();
        let this = &*self;
        let sending = &Sending { pods: &by_uid, permit, patience };
        let answers: Vec<Answer> = futures::stream::iter(actions)
            .map(|action| async move {
                if !permit.holds() {
                    return match action {
                        Action::Bind { .. } | Action::Evict { .. } => Answer::Postponed,
                        Action::Wait { .. } | Action::Held { .. } => Answer::Untold,
                    };
                }
                this.send(action, sending).await
            })
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        let mut outcome = Outcome::default();
        for answer in answers {
            match answer {
                Answer::Bound(pod, assumed) => outcome.bound.push((pod, assumed)),
                Answer::Unsure(pod, assumed) => {
                    outcome.failed += 1;
                    outcome.unsure.push((pod, assumed));
                }
                Answer::Evicted => outcome.evicted += 1,
                Answer::Told(uid, note) => self.told.was_told(uid, note, Instant::now()),
                Answer::Aside(uid, note, told) => {
                    if told {
                        self.told.was_told(uid.clone(), note.clone(), Instant::now());
                    }
                    // Whoever is behind it is planned soon.
                    outcome.failed += 1;
                    outcome.aside.push((uid, note));
                }
                Answer::Nothing => {}
                Answer::Failed => outcome.failed += 1,
                Answer::Postponed => outcome.postponed += 1,
                Answer::Untold => outcome.untold += 1,
            }
        }
        outcome
    }

    async fn send(&self, action: Action, with: &Sending<'_>) -> Answer {
        let answer = match action {
            Action::Bind { pod, node, gpu, annotations } => {
                return self.place(pod, (node, gpu), annotations, with).await;
            }
            Action::Evict { pod, reason, note, .. } => {
                with.in_time(self.evict(pod, reason, note)).await
            }
            Action::Wait { pod, note } => with.in_time(self.tell_waiting(pod, note)).await,
            Action::Held { pod, hold, note } => with.in_time(self.tell_held(pod, hold, note)).await,
        };
        answer.unwrap_or(Answer::Failed)
    }

    /// Has the pod's claim allocated, if it asks by one, and binds it. Each has its own time: as long as
    /// the binding was not sent, it is certain that there is none.
    async fn place(
        &self,
        pod: PodName,
        (node, gpu): (String, GpuId),
        annotations: BTreeMap<String, String>,
        with: &Sending<'_>,
    ) -> Answer {
        let object = with.pods.get(pod.uid.as_str());
        if let Some(object) = object.filter(|object| claim::asks(object)) {
            let allocated = claim::allocate(&self.client, object, &node, &gpu);
            match with.in_time(allocated).await {
                Some(Ok(())) => {}
                Some(Err(Problem::Waits(note))) => return self.set_aside(pod, note, with).await,
                Some(Err(Problem::Failed(error))) => {
                    tracing::warn!(pod = pod.path(), %error, "the claim was not allocated");
                    return Answer::Failed;
                }
                None => return Answer::Failed,
            }
            if !with.permit.holds() {
                return Answer::Postponed;
            }
        }
        let until = Some(Instant::now() + UNSURE_FOR);
        let perhaps = Assumed { node: node.clone(), gpu: gpu.clone(), until };
        match with.in_time(self.bind(pod.clone(), node, gpu, annotations)).await {
            Some(Ok(answer)) => answer,
            Some(Err(note)) => self.set_aside(pod, note, with).await,
            None => Answer::Unsure(pod, perhaps),
        }
    }

    /// A pod that no plan can place as it is: it is told, unless it knows.
    async fn set_aside(&self, pod: PodName, note: String, with: &Sending<'_>) -> Answer {
        let uid = pod.uid.clone();
        let before = with.pods.get(uid.as_str()).and_then(|object| waiting_message(object));
        let mut told = false;
        if self.told.is_news(&uid, &note, before.as_deref(), Instant::now()) {
            let telling = self.tell_waiting(pod, note.clone());
            told = matches!(with.in_time(telling).await, Some(Answer::Told(..)));
        }
        Answer::Aside(uid, note, told)
    }

    /// Says that a pod was bound, now or when nobody answered.
    pub(crate) fn tell_bound(&self, pod: PodName, at: &Assumed) {
        let note = format!("bound to GPU {} on node {}", at.gpu, at.node);
        self.later.tell(pod, "Scheduled", "Binding", note);
    }

    /// Binds a pod; an error is why this pod cannot be bound.
    async fn bind(
        &self,
        pod: PodName,
        node: String,
        gpu: GpuId,
        annotations: BTreeMap<String, String>,
    ) -> Result<Answer, String> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let binding = Binding {
            metadata: ObjectMeta {
                name: Some(pod.name.clone()),
                namespace: Some(pod.namespace.clone()),
                uid: Some(pod.uid.clone()),
                annotations: Some(annotations),
                ..ObjectMeta::default()
            },
            target: ObjectReference {
                kind: Some("Node".to_owned()),
                name: Some(node.clone()),
                ..ObjectReference::default()
            },
        };
        let answer: Result<serde_json::Value, _> =
            api.create_subresource("binding", &pod.name, &PostParams::default(), &binding).await;
        match answer {
            Ok(_) => {
                let assumed = Assumed { node, gpu, until: None };
                self.tell_bound(pod.clone(), &assumed);
                Ok(Answer::Bound(pod, assumed))
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => {
                tracing::info!(
                    pod = pod.path(),
                    answer = status.message,
                    "the pod is bound or gone already"
                );
                Ok(Answer::Nothing)
            }
            Err(error) => {
                tracing::warn!(pod = pod.path(), node, %error, "the binding failed");
                // A refusal is certain; anything else may have come after the binding was made.
                match error {
                    // Of these the pod is innocent.
                    kube::Error::Api(status) if matches!(status.code, 401 | 429) => {
                        Ok(Answer::Failed)
                    }
                    kube::Error::Api(status) if status.code < 500 => {
                        Err(format!("its binding is refused: {}", status.message))
                    }
                    _ => {
                        let until = Some(Instant::now() + UNSURE_FOR);
                        Ok(Answer::Unsure(pod, Assumed { node, gpu, until }))
                    }
                }
            }
        }
    }

    async fn evict(&self, pod: PodName, reason: &'static str, note: String) -> Answer {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let preconditions = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
        let parameters = EvictParams {
            delete_options: Some(DeleteParams {
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            }),
            post_options: PostParams::default(),
        };
        match api.evict(&pod.name, &parameters).await {
            Ok(_) => {
                self.event(&pod, EventType::Normal, reason, "Evicting", &note).await;
                Answer::Evicted
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Answer::Nothing,
            // A budget, or several of them, or somebody who checks requests.
            Err(kube::Error::Api(status)) => {
                tracing::warn!(pod = pod.path(), code = status.code, "the eviction is refused");
                let note = format!("{note}; not evicted yet: {}", status.message);
                self.event(&pod, EventType::Warning, "EvictionRefused", "Evicting", &note).await;
                Answer::Failed
            }
            Err(error) => {
                tracing::warn!(pod = pod.path(), %error, "the eviction failed");
                Answer::Failed
            }
        }
    }

    /// Says that a pod stays where it is, and what its owner can do about it.
    async fn tell_held(&self, pod: PodName, hold: Hold, note: String) -> Answer {
        let condition = json!({
            "type": names::MOVABLE_CONDITION, "status": "False", "reason": hold.word(), "message": note,
        });
        self.tell(pod, condition, EventType::Normal, ["NotMoved", "Reschedule"], note).await
    }

    async fn tell_waiting(&self, pod: PodName, note: String) -> Answer {
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": note,
        });
        let words = ["FailedScheduling", "Scheduling"];
        self.tell(pod, condition, EventType::Warning, words, note).await
    }

    /// A condition and, once it is written, an event with a reason and an action.
    async fn tell(
        &self,
        pod: PodName,
        condition: serde_json::Value,
        type_: EventType,
        [reason, action]: [&str; 2],
        note: String,
    ) -> Answer {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let patch = json!({"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}});
        let patched =
            api.patch_status(&pod.name, &PatchParams::default(), &Patch::Strategic(&patch)).await;
        match patched {
            Ok(_) => {
                self.event(&pod, type_, reason, action, &note).await;
                Answer::Told(pod.uid, note)
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 404 | 409) => Answer::Nothing,
            Err(error) => {
                tracing::warn!(pod = pod.path(), %error, "the pod could not be told");
                Answer::Failed
            }
        }
    }

    async fn event(&self, pod: &PodName, type_: EventType, reason: &str, action: &str, note: &str) {
        self.teller.tell(pod, type_, reason, action, note).await;
    }
}

fn waiting_message(pod: &Pod) -> Option<String> {
    pods::message(pod, "PodScheduled")
}

fn held_message(pod: &Pod) -> Option<String> {
    pods::message(pod, names::MOVABLE_CONDITION)
}

#[cfg(test)]
#[path = "apply_tests.rs"]
mod tests;
