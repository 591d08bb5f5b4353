//! The local loop: who has come, who is leaving, who is gone, and what the kubelet may give away. It
//! asks nobody outside this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use muxflow_types::JobId;
use tokio::sync::{Notify, watch};

use super::executor::Executor;
use super::ground::{Attached, Ground};
use super::identity;
use super::placed::Placed;
use crate::device::plugin::Kind;
use crate::device::wire::{Device, HEALTHY, UNHEALTHY};
use crate::resource::State;
use crate::scheduler::pods;

const TURN_EVERY: Duration = Duration::from_millis(500);

/// The devices of one kind. A GPU that is out of order is offered to nobody; one whose service needs
/// all of it is offered to no job. It comes back by itself with its state.
pub(crate) fn devices(executor: &dyn Executor, kind: Kind) -> Vec<Device> {
    let healthy = |state: State| match kind {
        Kind::Online => state != State::Disabled,
        Kind::Offline => !matches!(state, State::Disabled | State::Overlimit),
    };
    let device = |uuid: String| {
        let state = executor.read(&uuid).map_or(State::Disabled, |reading| reading.state);
        let health = if healthy(state) { HEALTHY } else { UNHEALTHY };
        Device { id: uuid, health: health.to_owned() }
    };
    executor.gpus().into_iter().map(|gpu| device(gpu.uuid)).collect()
}

/// The loop's own memory.
#[derive(Debug)]
pub(crate) struct Local {
    ground: Arc<Ground>,
    devices: Vec<(Kind, watch::Sender<Vec<Device>>)>,
    urgent: Arc<Notify>,
    states: BTreeMap<String, State>,
    draining: BTreeSet<JobId>,
    /// Namespaces whose processes were seen to belong to the pod.
    verified: BTreeSet<(JobId, u64)>,
    /// Where the kernel tells of processes.
    proc: PathBuf,
}

impl Local {
    pub(crate) fn new(
        ground: Arc<Ground>,
        devices: Vec<(Kind, watch::Sender<Vec<Device>>)>,
        urgent: Arc<Notify>,
    ) -> Self {
        Local {
            ground,
            devices,
            urgent,
            states: BTreeMap::new(),
            draining: BTreeSet::new(),
            verified: BTreeSet::new(),
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
        let placed = self.ground.placed();
        self.see_off(&placed);
        self.take_over(&placed).await;
        self.verify();
        self.offer();
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
            if self.ground.pod_of(&job).is_none() {
                tracing::warn!(gpu = gpu.uuid, %job, "the guest's pod is over");
                executor.detach(&gpu.uuid, &job);
            }
        }
    }

    /// Pods that run and that an earlier agent had let in.
    async fn take_over(&mut self, placed: &[Placed]) {
        let known = self.ground.attached();
        let local: BTreeSet<String> =
            self.ground.executor.gpus().into_iter().map(|gpu| gpu.uuid).collect();
        for pod in placed.iter().filter(|p| p.running && !known.contains(&p.job)) {
            if !local.contains(pod.gpu.as_str()) {
                continue;
            }
            match self.ground.attach(pod).await {
                Ok(_) => tracing::info!(pod = pod.pod.path(), gpu = %pod.gpu, "pod taken over"),
                Err(why) => {
                    tracing::warn!(pod = pod.pod.path(), gpu = %pod.gpu, why, "a running pod cannot be held at a gate; it must leave");
                    self.ground.must_leave(&pod.job, &why);
                }
            }
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
                    self.ground.must_leave(&job, &why);
                }
                self.verified.insert(key);
            }
        }
    }

    /// Tells the kubelet what changed, and the cluster when a state did.
    fn offer(&mut self) {
        for (kind, teller) in &self.devices {
            let now = devices(&*self.ground.executor, *kind);
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
mod tests {
    use std::sync::Mutex;

    use kube::runtime::reflector;
    use muxflow_agent::gpu::guest::GuestSpec;

    use super::*;
    use crate::node::executor::{LocalGpu, Reading};
    use crate::node::ground::Places;
    use crate::scheduler::pods::PodName;

    const OWN: &str = "11111111-0f2b-4c3d-9e8f-001122334455";
    const OTHER: &str = "22222222-0f2b-4c3d-9e8f-001122334455";

    /// A guest whose processes are in namespace 11.
    #[derive(Default)]
    struct OneGuest {
        drained: Mutex<Vec<String>>,
    }

    impl Executor for OneGuest {
        fn gpus(&self) -> Vec<LocalGpu> {
            Vec::new()
        }

        fn read(&self, _: &str) -> Option<Reading> {
            None
        }

        fn attach(&self, _: &str, _: GuestSpec) -> Result<PathBuf, String> {
            Err("nobody comes".to_owned())
        }

        fn drain(&self, _: &str, guest: &JobId, reason: &str) {
            self.drained.lock().unwrap().push(format!("{guest}: {reason}"));
        }

        fn detach(&self, _: &str, _: &JobId) {}

        fn relent(&self, _: &str) {}

        fn namespaces(&self, _: &str) -> Vec<u64> {
            vec![11]
        }
    }

    /// What comes of processes of a pod in the namespace: who was drained, and the wish.
    fn verified_among(pod: &str) -> (Vec<String>, Option<crate::node::ground::Wish>) {
        let dir = tempfile::tempdir().unwrap();
        let process = dir.path().join("proc/7");
        std::fs::create_dir_all(process.join("ns")).unwrap();
        std::os::unix::fs::symlink("pid:[11]", process.join("ns/pid")).unwrap();
        std::fs::write(process.join("cgroup"), format!("0::/kubepods/pod{pod}/c")).unwrap();
        let executor = Arc::new(OneGuest::default());
        let (tell, mut wishes) = tokio::sync::mpsc::unbounded_channel();
        let places = Places { state: dir.path().to_owned(), ..Places::default() };
        let (pods, _writer) = reflector::store();
        let ground = Arc::new(Ground::new(executor.clone(), pods, &places, tell));
        let name = PodName { namespace: "d".into(), name: "p".into(), uid: OWN.into() };
        let attached = Attached { pod: name, gpu: "GPU-a".into(), claimed: false };
        ground.guests().insert(JobId::new(OWN).unwrap(), attached);
        let mut local = Local::new(ground, Vec::new(), Arc::default());
        local.proc = dir.path().join("proc");
        local.verify();
        let drained = executor.drained.lock().unwrap().clone();
        local.verify();
        assert_eq!(*executor.drained.lock().unwrap(), drained, "seen to once");
        (drained, wishes.try_recv().ok())
    }

    #[test]
    fn a_pod_that_uses_the_control_block_of_another_is_found_by_its_control_group() {
        assert_eq!(verified_among(OWN), (Vec::new(), None));
        let (drained, wish) = verified_among(OTHER);
        let wish = wish.unwrap();
        assert_eq!((wish.job.as_str(), wish.reason, wish.while_ill), (OWN, "WrongGpu", false));
        assert!(wish.why.contains(OTHER) && wish.why.contains("d/p"), "{}", wish.why);
        assert_eq!(drained, [format!("{OWN}: {}", wish.why)]);
    }
}
