//! The local loop: who has come, who is leaving, who is gone, and what the kubelet may give away. It
//! asks nobody outside this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muxflow_types::JobId;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use super::executor::{Executor, NotLetIn};
use super::ground::{Attached, Ground};
use super::identity;
use super::placed::{self, Placed};
use crate::device::plugin::Kind;
use crate::device::wire::{Device, HEALTHY, UNHEALTHY};
use crate::resource::State;
use crate::scheduler::pods::{self, PodName};

const TURN_EVERY: Duration = Duration::from_millis(500);
/// A pod that was not let in is tried again after this long at the latest.
const PUT_OFF_AT_MOST: Duration = Duration::from_secs(60);

/// The devices of one kind. A GPU that is out of order is offered to nobody; one whose service needs
/// all of it is offered to no job. It comes back by itself with its state. What services hold by the
/// other way of asking for a GPU, as a device or by a claim, is offered to no further service.
pub(crate) fn devices(executor: &dyn Executor, kind: Kind, held: &BTreeSet<String>) -> Vec<Device> {
    let healthy = |state: State, uuid: &str| match kind {
        Kind::Online => state != State::Disabled && !held.contains(uuid),
        Kind::Offline => !matches!(state, State::Disabled | State::Overlimit),
    };
    let device = |uuid: String| {
        let state = executor.read(&uuid).map_or(State::Disabled, |reading| reading.state);
        let health = if healthy(state, &uuid) { HEALTHY } else { UNHEALTHY };
        Device { id: uuid, health: health.to_owned() }
    };
    executor.gpus().into_iter().map(|gpu| device(gpu.uuid)).collect()
}

/// A pod, and whether it was let in.
type LetIn = (Placed, Result<PathBuf, NotLetIn>);

/// How a pod is told what would be better.
type Advise = Box<dyn Fn(PodName, String) + Send>;

/// The loop's own memory.
pub(crate) struct Local {
    ground: Arc<Ground>,
    devices: Vec<(Kind, watch::Sender<Vec<Device>>)>,
    urgent: Arc<Notify>,
    states: BTreeMap<String, State>,
    draining: BTreeSet<JobId>,
    /// Pods of an earlier agent that are being let in.
    coming: BTreeMap<JobId, JoinHandle<LetIn>>,
    /// Pods that were not let in: when to try again, and how long after the time before.
    put_off: BTreeMap<JobId, (Instant, Duration)>,
    /// Namespaces whose processes were seen to belong to the pod.
    verified: BTreeSet<(JobId, u64)>,
    /// Guests that were told what would be better, or need not be.
    advised: BTreeSet<JobId>,
    advise: Advise,
    /// Where the kernel tells of processes.
    proc: PathBuf,
}

impl Local {
    pub(crate) fn new(
        ground: Arc<Ground>,
        devices: Vec<(Kind, watch::Sender<Vec<Device>>)>,
        urgent: Arc<Notify>,
        advise: impl Fn(PodName, String) + Send + 'static,
    ) -> Self {
        Local {
            ground,
            devices,
            urgent,
            states: BTreeMap::new(),
            draining: BTreeSet::new(),
            coming: BTreeMap::new(),
            put_off: BTreeMap::new(),
            verified: BTreeSet::new(),
            advised: BTreeSet::new(),
            advise: Box::new(advise),
            proc: "/proc".into(),
        }
    }

    pub(crate) async fn run(mut self, changed: Arc<Notify>, mut stop: watch::Receiver<bool>) {
        loop {
            self.turn().await;
            tokio::select! {
                () = tokio::time::sleep(TURN_EVERY) => {}
                () = changed.notified() => {}
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    async fn turn(&mut self) {
        self.forget_claims();
        let placed = self.ground.placed();
        self.see_off(&placed);
        self.take_over(&placed).await;
        self.verify();
        self.give_advice();
        self.offer();
    }

    /// A claim ends with its pod, and a pod with its processes, whoever was told of it.
    fn forget_claims(&self) {
        let is_over = |pod: &JobId| {
            self.ground.pod_of(pod).is_none() && !identity::is_there(&self.proc, pod.as_str())
        };
        self.ground.claims.forget_if(self.ground.cdi.as_deref(), is_over);
    }

    /// Tells each new guest once what its pod lacks.
    fn give_advice(&mut self) {
        let guests = self.ground.attached();
        self.advised.retain(|job| guests.contains(job));
        for job in guests {
            if self.advised.insert(job.clone())
                && let Some(pod) = self.ground.pod_of(&job)
                && let Some(what) = placed::without_pre_stop(&pod)
            {
                (self.advise)(PodName::of(&pod), what);
            }
        }
    }

    /// Drains who leaves, and forgets who is gone.
    fn see_off(&mut self, placed: &[Placed]) {
        let living: BTreeMap<&JobId, &Placed> = placed.iter().map(|p| (&p.job, p)).collect();
        let guests: Vec<(JobId, Attached)> =
            self.ground.guests().iter().map(|(job, a)| (job.clone(), a.clone())).collect();
        for (job, attached) in guests {
            let leaving = match living.get(&job) {
                Some(pod) => Some(pod.leaving),
                None if attached.claimed => None,
                // Annotations that were taken away from a running pod take nothing off the GPU.
                None => self.ground.pod_of(&job).map(|pod| pods::is_leaving(&pod)),
            };
            match leaving {
                // Deleted by force, and its kubelet has not come to end it yet: the GPU is not free.
                None if identity::is_there(&self.proc, job.as_str()) => {
                    if self.draining.insert(job.clone()) {
                        let why = "the pod is gone, and its processes are not";
                        tracing::warn!(pod = attached.pod.path(), gpu = attached.gpu, "{why}");
                        self.ground.executor.drain(&attached.gpu, &job, why);
                    }
                }
                None => {
                    self.ground.executor.detach(&attached.gpu, &job);
                    self.ground.guests().remove(&job);
                    self.draining.remove(&job);
                    self.verified.retain(|(of, _)| *of != job);
                    self.urgent.notify_one();
                }
                Some(true) if self.draining.insert(job.clone()) => {
                    self.ground.executor.drain(&attached.gpu, &job, "the pod is deleted");
                }
                Some(_) => {}
            }
        }
        self.see_off_strangers();
    }

    /// A guest that this loop never let in, of a pod that is over, would keep its place for ever.
    fn see_off_strangers(&self) {
        let executor = &self.ground.executor;
        for gpu in executor.gpus() {
            let guest = executor.read(&gpu.uuid).and_then(|reading| reading.guest);
            let Some(job) = guest.filter(|job| !self.ground.guests().contains_key(job)) else {
                continue;
            };
            let is_over = self.ground.pod_of(&job).is_none();
            if is_over && !identity::is_there(&self.proc, job.as_str()) {
                tracing::warn!(gpu = gpu.uuid, %job, "the guest's pod is over");
                executor.detach(&gpu.uuid, &job);
            }
        }
    }

    /// Pods that run and that an earlier agent had let in. A GPU may take long to answer, and nobody
    /// else waits for it.
    async fn take_over(&mut self, placed: &[Placed]) {
        self.hear_who_came().await;
        let waits = |job: &JobId| placed.iter().any(|p| p.running && p.job == *job);
        self.put_off.retain(|job, _| waits(job));
        let known = self.ground.attached();
        let local: BTreeSet<String> =
            self.ground.executor.gpus().into_iter().map(|gpu| gpu.uuid).collect();
        for pod in placed.iter().filter(|p| p.running && !known.contains(&p.job)) {
            let later = self.put_off.get(&pod.job).is_some_and(|(at, _)| Instant::now() < *at);
            let here = local.contains(pod.gpu.as_str());
            if !here || later || self.coming.contains_key(&pod.job) {
                continue;
            }
            let (ground, pod) = (Arc::clone(&self.ground), pod.clone());
            let job = pod.job.clone();
            let letting = tokio::spawn(async move {
                let answer = ground.attach(&pod).await;
                (pod, answer)
            });
            self.coming.insert(job, letting);
        }
    }

    /// What has come of pods that were to be let in. One that its GPU refuses cannot be held at a gate
    /// and must leave; one of which nobody has heard is held by its own gate, without a heartbeat.
    async fn hear_who_came(&mut self) {
        let over = |(_, letting): &(&JobId, &JoinHandle<_>)| letting.is_finished();
        let done: Vec<JobId> =
            self.coming.iter().filter(over).map(|(job, _)| job.clone()).collect();
        for job in done {
            let Some(letting) = self.coming.remove(&job) else { continue };
            match letting.await {
                Ok((pod, Ok(_))) => {
                    tracing::info!(pod = pod.pod.path(), gpu = %pod.gpu, "pod taken over");
                    // The agent that let it in has told it.
                    self.advised.insert(job.clone());
                    self.put_off.remove(&job);
                    continue;
                }
                Ok((pod, Err(NotLetIn::Refused(why)))) => {
                    tracing::warn!(pod = pod.pod.path(), gpu = %pod.gpu, why, "a running pod cannot be held at a gate; it must leave");
                    self.ground.must_leave(&job, "NotTakenOver", &why);
                }
                Ok((pod, Err(NotLetIn::NoAnswer(why)))) => {
                    tracing::warn!(pod = pod.pod.path(), gpu = %pod.gpu, why, "a running pod is not taken over yet");
                }
                Err(error) => tracing::warn!(%job, %error, "a pod is not taken over yet"),
            }
            let before = self.put_off.get(&job).map_or(TURN_EVERY, |(_, wait)| *wait);
            let wait = (before * 2).min(PUT_OFF_AT_MOST);
            self.put_off.insert(job, (Instant::now() + wait, wait));
        }
    }

    /// A control block that is used by processes of another pod than the one it was made for means
    /// that the two have each other's GPU.
    fn verify(&mut self) {
        let guests: Vec<(JobId, Attached)> =
            self.ground.guests().iter().map(|(job, a)| (job.clone(), a.clone())).collect();
        for (job, attached) in guests {
            for namespace in self.ground.executor.namespaces(&attached.gpu) {
                let key = (job.clone(), namespace);
                if namespace == 0 || self.verified.contains(&key) {
                    continue;
                }
                let pods = identity::pods_in(&self.proc, namespace);
                if !pods.is_empty() && !pods.contains(job.as_str()) {
                    let why = format!(
                        "processes of pod uid {} use the control block of pod {}",
                        pods.iter().next().map_or("", String::as_str),
                        attached.pod.path()
                    );
                    tracing::error!(gpu = attached.gpu, why, "two pods have each other's GPU");
                    self.ground.executor.drain(&attached.gpu, &job, &why);
                    self.ground.must_leave(&job, "WrongGpu", &why);
                    // Whoever uses it and was not let in is on no GPU that it was planned for. A guest
                    // has a block of its own, by which it is found if it is wrong: numbers in this one
                    // are what the job says. Other pods are no matter of the evictor.
                    for intruder in pods.iter().filter_map(|uid| JobId::new(uid).ok()) {
                        let is_guest = self.ground.guests().contains_key(&intruder);
                        if !is_guest && self.ground.pod_of(&intruder).is_some() {
                            self.ground.must_leave(&intruder, "WrongGpu", &why);
                        }
                    }
                }
                self.verified.insert(key);
            }
        }
    }

    /// Tells the kubelet what changed, and the cluster when a state did.
    fn offer(&mut self) {
        for (kind, teller) in &self.devices {
            let now = devices(&*self.ground.executor, *kind, &self.ground.claimed_by_services());
            teller.send_if_modified(|told| {
                let news = *told != now;
                *told = now;
                news
            });
        }
        let executor = &self.ground.executor;
        let states: BTreeMap<String, State> = executor
            .gpus()
            .into_iter()
            .filter_map(|gpu| Some((executor.read(&gpu.uuid)?.state, gpu.uuid)))
            .map(|(state, uuid)| (uuid, state))
            .collect();
        if states != self.states {
            self.states = states;
            self.urgent.notify_one();
        }
    }
}

#[cfg(test)]
#[path = "guests_tests.rs"]
mod tests;
