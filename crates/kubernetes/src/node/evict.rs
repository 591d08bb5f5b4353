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
use crate::scheduler::pods::PodName;

const AGAIN_AFTER: Duration = Duration::from_secs(2);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Asks for evictions.
pub(crate) struct Evictor {
    client: Client,
    teller: Teller,
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
    refused: bool,
}

impl Evictor {
    pub(crate) fn new(client: Client, ground: Arc<Ground>, node: &str) -> Self {
        let teller = Teller::new(client.clone(), "muxflow-agent", node);
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
        let wanted = Wanted { next: Instant::now(), refused: false, wish };
        self.wanted.insert(wanted.wish.job.clone(), wanted);
    }

    async fn pursue(&mut self, job: &JobId) {
        let Some((wish, refused)) = self.wanted.get(job).map(|w| (w.wish.clone(), w.refused))
        else {
            return;
        };
        let living = self.ground.placed().into_iter().find(|p| p.job == *job);
        let Some(pod) = living.filter(|p| !p.leaving) else {
            self.wanted.remove(job);
            return;
        };
        let (gpu, pod) = (pod.gpu.to_string(), pod.pod);
        let attached = Leaver { pod, gpu };
        let executor = &self.ground.executor;
        let state = executor.read(&attached.gpu).map(|reading| reading.state);
        let well = matches!(state, Some(State::Healthy | State::Unhealthy));
        if wish.while_ill && well && refused {
            executor.relent(&attached.gpu);
            self.wanted.remove(job);
            return;
        }
        match self.evict(&attached, &wish, refused).await {
            Asked::Leaves => {
                executor.drain(&attached.gpu, job, &wish.why);
                self.wanted.remove(job);
            }
            Asked::Gone => {
                self.wanted.remove(job);
            }
            Asked::Refused => self.later(job, true),
            Asked::Failed => self.later(job, refused),
        }
    }

    fn later(&mut self, job: &JobId, refused: bool) {
        if let Some(wanted) = self.wanted.get_mut(job) {
            wanted.next = Instant::now() + AGAIN_AFTER;
            wanted.refused = refused;
        }
    }

    async fn evict(&self, attached: &Leaver, wish: &Wish, refused: bool) -> Asked {
        let pod = &attached.pod;
        let api: Api<Pod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let preconditions = Preconditions { uid: Some(pod.uid.clone()), resource_version: None };
        let parameters = EvictParams {
            delete_options: Some(DeleteParams {
                preconditions: Some(preconditions),
                ..DeleteParams::default()
            }),
            post_options: PostParams::default(),
        };
        let answer = tokio::time::timeout(REQUEST_LIMIT, api.evict(&pod.name, &parameters)).await;
        let say = |type_, reason: &'static str, note: String| async move {
            self.teller.tell(pod, type_, reason, "Evicting", &note).await;
        };
        match answer {
            Ok(Ok(_)) => {
                let note = format!("leaves GPU {}: {}", attached.gpu, wish.why);
                say(EventType::Normal, wish.reason, note).await;
                Asked::Leaves
            }
            Ok(Err(KubeError::Api(status))) if matches!(status.code, 404 | 409) => Asked::Gone,
            Ok(Err(KubeError::Api(status))) if status.code == 429 => {
                if !refused {
                    let note = format!(
                        "held at its gate on GPU {} because {}; not evicted yet: {}",
                        attached.gpu, wish.why, status.message
                    );
                    say(EventType::Warning, "EvictionRefused", note).await;
                }
                Asked::Refused
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
    Refused,
    Failed,
}
