//! Has pods evicted that must leave. Their gates are shut already, so a disruption budget that says no
//! delays nothing but the end of the pod; it is asked again until the pod leaves or need not.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, EvictParams, PostParams, Preconditions};
use kube::runtime::events::EventType;
use kube::{Client, Error as KubeError};
use muxflow_types::JobId;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;

use super::ground::{Ground, Wish};
use crate::events::Teller;
use crate::resource::State;
use crate::scheduler::pods::{self, PodName};

const AGAIN_AFTER: Duration = Duration::from_secs(2);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Asks for evictions.
pub(crate) struct Evictor {
    client: Client,
    teller: Arc<Teller>,
    ground: Arc<Ground>,
    wanted: BTreeMap<JobId, Wanted>,
}

/// A pod, and the GPU that it leaves.
struct Leaver {
    pod: PodName,
    gpu: String,
}

struct Wanted {
    wish: Wish,
    next: Instant,
    /// It was asked for already, in vain.
    asked: bool,
}

impl Evictor {
    pub(crate) fn new(client: Client, ground: Arc<Ground>, teller: Arc<Teller>) -> Self {
        Evictor { client, teller, ground, wanted: BTreeMap::new() }
    }

    pub(crate) async fn run(
        mut self,
        mut wishes: UnboundedReceiver<Wish>,
        mut stop: watch::Receiver<bool>,
    ) {
        loop {
            tokio::select! {
                wish = wishes.recv() => {
                    let Some(wish) = wish else { return };
                    self.want(wish);
                }
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
            let due: Vec<JobId> = self
                .wanted
                .iter()
                .filter(|(_, wanted)| wanted.next <= Instant::now())
                .map(|(job, _)| job.clone())
                .collect();
            for job in due {
                self.pursue(&job).await;
            }
        }
    }

    /// Remembers a wish. One that stands whatever becomes of the GPU is not given up for one that
    /// ends with its illness.
    fn want(&mut self, wish: Wish) {
        let known = self.wanted.get(&wish.job);
        if known.is_some_and(|known| wish.while_ill || !known.wish.while_ill) {
            return;
        }
        let wanted = Wanted { next: Instant::now(), asked: false, wish };
        self.wanted.insert(wanted.wish.job.clone(), wanted);
    }

    /// The pod of a guest and the GPU that it is on, as long as it is not leaving by itself. Where it
    /// is says who let it in, whatever has become of the pod's annotations; for one that was not let in
    /// they say where it was to be.
    fn leaver(&self, job: &JobId) -> Option<Leaver> {
        let pod = self.ground.pod_of(job).filter(|pod| !pods::is_leaving(pod))?;
        let let_in = self.ground.guests().get(job).map(|attached| attached.gpu.clone());
        let gpu = match let_in {
            Some(gpu) => gpu,
            None => self.ground.placed().into_iter().find(|p| p.job == *job)?.gpu.to_string(),
        };
        Some(Leaver { pod: PodName::of(&pod), gpu })
    }

    async fn pursue(&mut self, job: &JobId) {
        let Some((wish, asked)) = self.wanted.get(job).map(|w| (w.wish.clone(), w.asked)) else {
            return;
        };
        let Some(leaver) = self.leaver(job) else {
            self.wanted.remove(job);
            return;
        };
        let executor = &self.ground.executor;
        let state = executor.read(&leaver.gpu).map(|reading| reading.state);
        let well = matches!(state, Some(State::Healthy | State::Unhealthy));
        if wish.while_ill && well && asked {
            executor.relent(&leaver.gpu);
            self.wanted.remove(job);
            return;
        }
        let (type_, reason, note) = match self.ask(&leaver.pod).await {
            Asked::Leaves => {
                // First of all, and before anybody is told.
                executor.drain(&leaver.gpu, job, &wish.why);
                self.wanted.remove(job);
                (EventType::Normal, wish.reason, format!("leaves GPU {}: {}", leaver.gpu, wish.why))
            }
            Asked::Gone => {
                self.wanted.remove(job);
                return;
            }
            Asked::Refused(answer) => {
                self.later(job);
                let note = format!(
                    "held at its gate on GPU {} because {}; not evicted yet: {answer}",
                    leaver.gpu, wish.why
                );
                (EventType::Warning, "EvictionRefused", note)
            }
            Asked::Failed => return self.later(job),
        };
        // The same words about the same pod are written only now and then.
        self.teller.tell(&leaver.pod, type_, reason, "Evicting", &note).await;
    }

    fn later(&mut self, job: &JobId) {
        if let Some(wanted) = self.wanted.get_mut(job) {
            wanted.next = Instant::now() + AGAIN_AFTER;
            wanted.asked = true;
        }
    }

    async fn ask(&self, pod: &PodName) -> Asked {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let preconditions = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
        let parameters = EvictParams {
            delete_options: Some(DeleteParams {
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            }),
            post_options: PostParams::default(),
        };
        match tokio::time::timeout(REQUEST_LIMIT, api.evict(&pod.name, &parameters)).await {
            Ok(Ok(_)) => Asked::Leaves,
            Ok(Err(KubeError::Api(status))) if matches!(status.code, 404 | 409) => Asked::Gone,
            // A budget, or several of them, or somebody who checks requests.
            Ok(Err(KubeError::Api(status))) => {
                tracing::warn!(pod = pod.path(), code = status.code, "the eviction is refused");
                Asked::Refused(status.message.clone())
            }
            Ok(Err(error)) => {
                tracing::warn!(pod = pod.path(), %error, "the eviction failed");
                Asked::Failed
            }
            Err(_) => {
                tracing::warn!(pod = pod.path(), "the eviction was not answered in time");
                Asked::Failed
            }
        }
    }
}

enum Asked {
    Leaves,
    Gone,
    /// What the API server said.
    Refused(String),
    Failed,
}

#[cfg(test)]
#[path = "evict_tests.rs"]
mod tests;
