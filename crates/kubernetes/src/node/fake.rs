//! An executor that remembers what it was told, and a ground with pods to stand on: for the tests of this
//! crate.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{reflector, watcher};
use muxflow_agent::gpu::guest::GuestSpec;
use muxflow_types::JobId;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::executor::{Executor, LocalGpu, NotLetIn, Reading};
use super::ground::{Attached, Ground, Places, Wish};
use crate::names;
use crate::resource::{SampleStatus, State};
use crate::scheduler::pods::PodName;

pub(crate) const OWN: &str = "11111111-0f2b-4c3d-9e8f-001122334455";
pub(crate) const OTHER: &str = "22222222-0f2b-4c3d-9e8f-001122334455";

/// Two GPUs, `GPU-a` and `GPU-b`.
pub(crate) struct Fake {
    pub(crate) told: Mutex<Vec<String>>,
    pub(crate) state: Mutex<State>,
    /// `GPU-a` does not answer as long as this is set, and then says that it was too late.
    pub(crate) stuck: AtomicBool,
    /// `GPU-a` refuses everybody.
    pub(crate) refuses: AtomicBool,
    pub(crate) namespaces: Vec<u64>,
}

impl Default for Fake {
    fn default() -> Self {
        Fake {
            told: Mutex::default(),
            state: Mutex::new(State::Healthy),
            stuck: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            namespaces: Vec::new(),
        }
    }
}

impl Fake {
    fn tell(&self, words: String) {
        self.told.lock().unwrap().push(words);
    }

    pub(crate) fn told(&self) -> Vec<String> {
        self.told.lock().unwrap().clone()
    }
}

impl Executor for Fake {
    fn gpus(&self) -> Vec<LocalGpu> {
        let gpu = |uuid: &str| LocalGpu {
            uuid: uuid.into(),
            gpu_type: "T4".into(),
            pci: "0000:01:00".into(),
            memory_bytes: 16 << 30,
            mps_pipe: None,
            multi_user: false,
        };
        ["GPU-a", "GPU-b"].map(gpu).to_vec()
    }

    fn read(&self, _: &str) -> Option<Reading> {
        Some(Reading {
            state: *self.state.lock().unwrap(),
            reason: None,
            sms: 40,
            share_sms: 20,
            quota_bytes: 8 << 30,
            demand_pct: 30.0,
            online_activity_pct: None,
            online_memory_bytes: 0,
            sample: SampleStatus::default(),
            guest: None,
            placeable: true,
            outside: Vec::new(),
        })
    }

    fn attach(&self, uuid: &str, guest: GuestSpec) -> Result<PathBuf, NotLetIn> {
        if uuid == "GPU-a" && self.refuses.load(Ordering::Acquire) {
            return Err(NotLetIn::Refused("the GPU is disabled".into()));
        }
        if uuid == "GPU-a" && self.stuck.load(Ordering::Acquire) {
            // Not for ever: a test that fails must be able to end.
            for _ in 0..6_000 {
                if !self.stuck.load(Ordering::Acquire) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            return Err(NotLetIn::NoAnswer("GPU-a did not answer".into()));
        }
        self.tell(format!("attach {}", guest.job));
        Ok("/nowhere".into())
    }

    fn drain(&self, _: &str, guest: &JobId, reason: &str) {
        self.tell(format!("drain {guest}: {reason}"));
    }

    fn detach(&self, _: &str, guest: &JobId) {
        self.tell(format!("detach {guest}"));
    }

    fn relent(&self, uuid: &str) {
        self.tell(format!("relent {uuid}"));
    }

    fn namespaces(&self, _: &str) -> Vec<u64> {
        self.namespaces.clone()
    }
}

/// A ground with what it stands on.
pub(crate) struct Scene {
    pub(crate) executor: Arc<Fake>,
    pub(crate) ground: Arc<Ground>,
    pub(crate) pods: reflector::store::Writer<Pod>,
    pub(crate) wishes: UnboundedReceiver<Wish>,
}

impl Scene {
    pub(crate) fn with(executor: Fake, folder: &Path) -> Self {
        let executor = Arc::new(executor);
        let (tell, wishes) = unbounded_channel();
        let cdi = Some(folder.join("cdi"));
        let places = Places { state: folder.to_owned(), cdi, ..Places::default() };
        let (reader, pods) = reflector::store();
        let ground = Arc::new(Ground::new(executor.clone(), reader, &places, tell));
        Scene { executor, ground, pods, wishes }
    }

    /// Puts a pod that runs into the watch; `more` goes into its metadata.
    pub(crate) fn pod(&mut self, name: &str, uid: &str, gpu: &str, more: Value) {
        self.pod_with(name, uid, gpu, more, json!([]));
    }

    /// The same with these containers.
    pub(crate) fn pod_with(
        &mut self,
        name: &str,
        uid: &str,
        gpu: &str,
        more: Value,
        containers: Value,
    ) {
        let mut metadata = json!({"name": name, "namespace": "d", "uid": uid, "annotations":
            {names::GPU: gpu, names::SHARE: "20/40", names::QUOTA: "1024"}});
        metadata.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let pod = json!({"metadata": metadata, "spec": {"containers": containers}, "status": {"phase": "Running"}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.pods.apply_watcher_event(&watcher::Event::Apply(pod));
    }

    /// Puts a pod that is over into the watch.
    pub(crate) fn failed(&mut self, name: &str, uid: &str) {
        let pod = json!({"metadata": {"name": name, "namespace": "d", "uid": uid},
            "status": {"phase": "Failed"}});
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.pods.apply_watcher_event(&watcher::Event::Apply(pod));
    }

    /// A guest that was let in.
    pub(crate) fn guest(&self, name: &str, uid: &str, gpu: &str) -> JobId {
        let pod = PodName { namespace: "d".into(), name: name.into(), uid: uid.into() };
        let job = JobId::new(uid).unwrap();
        let attached = Attached { pod, gpu: gpu.into(), claimed: false };
        self.ground.guests().insert(job.clone(), attached);
        job
    }
}

/// A process of a pod, in namespace 11.
pub(crate) fn process_of(proc: &Path, pod: &str) {
    let process = proc.join("7");
    std::fs::create_dir_all(process.join("ns")).unwrap();
    std::os::unix::fs::symlink("pid:[11]", process.join("ns/pid")).unwrap();
    std::fs::write(process.join("cgroup"), format!("0::/kubepods/pod{pod}/c")).unwrap();
}
