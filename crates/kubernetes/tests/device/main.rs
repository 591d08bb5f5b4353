//! The device plugin against a kubelet that is a test double but speaks the real protocol over real
//! sockets.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod kubelet;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::reflector;
use kube::runtime::watcher::Event;
use muxflow_agent::gpu::guest::GuestSpec;
use muxflow_kubernetes::device::plugin::{DevicePlugin, Kind};
use muxflow_kubernetes::device::registration::Plugin;
use muxflow_kubernetes::device::wire::{Device, HEALTHY, UNHEALTHY};
use muxflow_kubernetes::node::executor::{Executor, LocalGpu, NotLetIn, Reading};
use muxflow_kubernetes::node::ground::{Ground, Places, Wish};
use muxflow_types::JobId;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;

use kubelet::{Choice, FakeKubelet, OFFLINE, ONLINE, until};

/// An executor that lets everybody in and remembers whom.
struct FakeExecutor {
    gpus: usize,
    folder: PathBuf,
    guests: Mutex<BTreeMap<String, String>>,
}

impl Executor for FakeExecutor {
    fn gpus(&self) -> Vec<LocalGpu> {
        (0..self.gpus)
            .map(|n| LocalGpu {
                uuid: uuid(n),
                gpu_type: "T4".into(),
                pci: format!("0000:{n:02x}:00"),
                memory_bytes: 16 << 30,
                mps_pipe: Some(self.folder.join(format!("mps-{n}"))),
                multi_user: true,
            })
            .collect()
    }

    fn read(&self, _: &str) -> Option<Reading> {
        None
    }

    fn attach(&self, uuid: &str, guest: GuestSpec) -> Result<PathBuf, NotLetIn> {
        let mut guests = self.guests.lock().unwrap();
        let job = guest.job.as_str().to_owned();
        match guests.get(uuid) {
            Some(other) if *other != job => {
                return Err(NotLetIn::Refused(format!("{other} is on this GPU")));
            }
            _ => {}
        }
        guests.insert(uuid.to_owned(), job.clone());
        Ok(self.folder.join("control").join(job))
    }

    fn drain(&self, _: &str, _: &JobId, _: &str) {}
    fn detach(&self, uuid: &str, _: &JobId) {
        self.guests.lock().unwrap().remove(uuid);
    }
    fn relent(&self, _: &str) {}
    fn namespaces(&self, _: &str) -> Vec<u64> {
        Vec::new()
    }
}

fn uuid(n: usize) -> String {
    format!("GPU-{n}")
}

struct Scene {
    folder: TempDir,
    executor: Arc<FakeExecutor>,
    pods: reflector::store::Writer<Pod>,
    devices: watch::Sender<Vec<Device>>,
    wishes: UnboundedReceiver<Wish>,
    _stop: watch::Sender<bool>,
}

fn all(gpus: usize, health: &str) -> Vec<Device> {
    (0..gpus).map(|n| Device { id: uuid(n), health: health.to_owned() }).collect()
}

fn bound(name: &str, age: usize, gpu: usize, share: u32) -> Pod {
    let pod = json!({"metadata": {"name": name, "namespace": "default",
            "uid": format!("uid-{name}"),
            "creationTimestamp": format!("2026-01-01T00:00:{age:02}Z"),
            "annotations": {"muxflow.dev/gpu": uuid(gpu),
                "muxflow.dev/sm-share": format!("{share}/40"),
                "muxflow.dev/memory-quota-bytes": "1073741824"}},
        "spec": {"containers": [], "nodeName": "here"}, "status": {"phase": "Pending"}});
    serde_json::from_value(pod).unwrap()
}

impl Scene {
    /// Both plugins of a node with so many GPUs; the kubelet comes or is there already.
    fn open(gpus: usize, cdi: bool) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        std::fs::create_dir_all(path.join("device-plugins")).unwrap();
        std::fs::create_dir_all(path.join("cdi")).unwrap();
        let executor = Arc::new(FakeExecutor {
            gpus,
            folder: path.to_owned(),
            guests: Mutex::new(BTreeMap::new()),
        });
        let (reader, pods) = reflector::store();
        let (tell, wishes) = unbounded_channel();
        let places = Places {
            cdi: cdi.then(|| path.join("cdi")),
            state: path.join("state"),
            plugins: path.join("device-plugins"),
            pod_resources: path.join("pod-resources/kubelet.sock"),
            ..Places::default()
        };
        let ground = Arc::new(Ground::new(executor.clone(), reader, &places, tell));
        let (devices, told) = watch::channel(all(gpus, HEALTHY));
        let (stop, stopped) = watch::channel(false);
        for kind in [Kind::Online, Kind::Offline] {
            let plugin = Arc::new(DevicePlugin::new(kind, Arc::clone(&ground), told.clone()));
            let registration = Plugin {
                folder: places.plugins.clone(),
                resource: DevicePlugin::resource(kind),
                options: DevicePlugin::options(kind),
            };
            tokio::spawn(registration.run(plugin, stopped.clone()));
        }
        Scene { folder, executor, pods, devices, wishes, _stop: stop }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    async fn kubelet(&self) -> FakeKubelet {
        let kubelet = FakeKubelet::start(self.path());
        kubelet.wait_for_devices(OFFLINE, HEALTHY, self.executor.gpus).await;
        kubelet.wait_for_devices(ONLINE, HEALTHY, self.executor.gpus).await;
        kubelet
    }

    /// A pod that the scheduler bound to a GPU; a higher number is a younger pod.
    fn bind(&mut self, name: &str, age: usize, gpu: usize, share: u32) {
        self.pods.apply_watcher_event(&Event::Apply(bound(name, age, gpu, share)));
    }
}

#[tokio::test]
async fn devices_are_told_and_recover() {
    let scene = Scene::open(3, true);
    let kubelet = scene.kubelet().await;
    let mut ill = all(3, HEALTHY);
    ill[1].health = UNHEALTHY.to_owned();
    scene.devices.send(ill).unwrap();
    kubelet.wait_for_devices(OFFLINE, UNHEALTHY, 1).await;
    assert_eq!(kubelet.devices(OFFLINE, UNHEALTHY), ["GPU-1"]);
    scene.devices.send(all(3, HEALTHY)).unwrap();
    kubelet.wait_for_devices(OFFLINE, HEALTHY, 3).await;
}

#[tokio::test]
async fn an_online_pod_gets_the_gpu_of_its_device() {
    let scene = Scene::open(2, true);
    let kubelet = scene.kubelet().await;
    let device = kubelet.admit(ONLINE, "web", Choice::This("GPU-1")).await.unwrap();
    let container = kubelet.create(ONLINE, &device).await.unwrap();
    assert_eq!(container.env["CUDA_VISIBLE_DEVICES"], "GPU-1");
    assert!(container.mounts["/run/muxflow/mps"].ends_with("mps-1"));
    assert!(!container.env.contains_key("LD_PRELOAD"));
}

#[tokio::test]
async fn the_place_of_the_plan_is_preferred() {
    let mut scene = Scene::open(4, true);
    let kubelet = scene.kubelet().await;
    scene.bind("young", 2, 1, 10);
    scene.bind("old", 1, 3, 30);
    // A kubelet takes the older pod first.
    assert_eq!(kubelet.admit(OFFLINE, "old", Choice::Preferred).await.unwrap(), "GPU-3");
    let container = kubelet.create(OFFLINE, "GPU-3").await.unwrap();
    assert_eq!(container.env["CUDA_VISIBLE_DEVICES"], "GPU-3");
    assert_eq!(container.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "75.01");
    assert!(container.mounts["/run/muxflow/control"].ends_with("control/uid-old"));
    assert_eq!(kubelet.admit(OFFLINE, "young", Choice::Preferred).await.unwrap(), "GPU-1");
}

/// Eight pods start at the same moment and the kubelet gives each the place of another one: all get
/// the GPU, the share and the control block that were planned for them, round after round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_start_together_get_what_was_planned() {
    const PODS: usize = 8;
    let mut scene = Scene::open(PODS, true);
    let kubelet = scene.kubelet().await;
    for round in 0..PODS {
        let names: Vec<String> = (0..PODS).map(|n| format!("p{round}-{n}")).collect();
        for (n, name) in names.iter().enumerate() {
            scene.bind(name, 1, n, u32::try_from(n + 1).unwrap());
        }
        let start = |n: usize| {
            let (kubelet, name) = (&kubelet, &names[n]);
            async move {
                let place = uuid((n + round) % PODS);
                kubelet.admit(OFFLINE, name, Choice::This(&place)).await.unwrap();
                (place.clone(), kubelet.create(OFFLINE, &place).await.unwrap())
            }
        };
        let started = futures::future::join_all((0..PODS).map(start)).await;
        for (n, (place, container)) in started.iter().enumerate() {
            assert_eq!(container.env["CUDA_VISIBLE_DEVICES"], uuid(n), "round {round}");
            let share: f64 = container.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"].parse().unwrap();
            assert!((share - 2.5 * (n as f64 + 1.0)).abs() < 0.02, "{share}");
            let control = &container.mounts["/run/muxflow/control"];
            assert!(control.ends_with(&format!("uid-{}", names[n])), "{control}");
            assert!(container.mounts["/run/muxflow/mps"].ends_with(&format!("mps-{n}")));
            kubelet.release(OFFLINE, place);
            scene.executor.guests.lock().unwrap().clear();
        }
    }
}

#[tokio::test]
async fn a_kubelet_that_restarts_finds_the_plugin_again() {
    let scene = Scene::open(2, true);
    let first = scene.kubelet().await;
    assert_eq!(first.registrations(), 2);
    drop(first);
    // The next one removes the sockets of the plugins and makes its own anew.
    let second = scene.kubelet().await;
    assert_eq!(second.registrations(), 2, "once for each resource");
    drop(second);
    // A dead kubelet's socket file refuses connections; the plugin waits for a living one.
    let socket = scene.path().join("device-plugins/kubelet.sock");
    std::fs::remove_file(&socket).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    scene.kubelet().await;
}

#[tokio::test]
async fn a_plugin_to_which_nobody_listens_introduces_itself_again() {
    let scene = Scene::open(2, true);
    let kubelet = scene.kubelet().await;
    kubelet.hang_up(OFFLINE);
    kubelet.wait_for_devices(OFFLINE, HEALTHY, 2).await;
    assert_eq!(kubelet.registrations(), 3, "and the other one stays as it is");
}

#[tokio::test]
async fn what_an_earlier_holder_got_is_never_taken_for_ones_own() {
    let mut scene = Scene::open(1, true);
    let kubelet = scene.kubelet().await;
    scene.bind("first", 1, 0, 40);
    kubelet.admit(OFFLINE, "first", Choice::Preferred).await.unwrap();
    kubelet.create(OFFLINE, "GPU-0").await.unwrap();
    let spec = || {
        let file = scene.path().join("cdi/muxflow.dev-offline-GPU-0.json");
        std::fs::read_to_string(file).unwrap()
    };
    let before = spec();
    kubelet.release(OFFLINE, "GPU-0");
    scene.executor.guests.lock().unwrap().clear();
    // The second pod holds the place, but its container is not created yet: the name that it was
    // promised is in no file.
    kubelet.admit(OFFLINE, "second", Choice::This("GPU-0")).await.unwrap();
    let promised = std::fs::read_to_string(scene.path().join("state/places/GPU-0")).unwrap();
    assert!(!before.contains(&promised) && spec() == before);
}

/// The kubelet knows pods by their names, and one of a StatefulSet comes back under its own.
#[tokio::test]
async fn a_pod_that_comes_back_by_name_does_not_get_what_its_predecessor_had() {
    let mut scene = Scene::open(2, true);
    let kubelet = scene.kubelet().await;
    let mut leaving = bound("set-0", 1, 0, 10);
    leaving.metadata.deletion_timestamp = leaving.metadata.creation_timestamp.clone();
    scene.pods.apply_watcher_event(&Event::Apply(leaving));
    kubelet.admit(OFFLINE, "set-0", Choice::This("GPU-0")).await.unwrap();
    let next = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let mut next = bound("set-0", 2, 1, 40);
        next.metadata.uid = Some("uid-next".into());
        scene.pods.apply_watcher_event(&Event::Apply(next));
    };
    let (container, ()) = tokio::join!(kubelet.create(OFFLINE, "GPU-0"), next);
    let container = container.unwrap();
    assert_eq!(container.env["CUDA_VISIBLE_DEVICES"], "GPU-1");
    assert!(container.mounts["/run/muxflow/control"].ends_with("uid-next"));
}

#[tokio::test]
async fn a_pod_that_nobody_placed_is_refused_in_words() {
    let mut scene = Scene::open(1, true);
    let kubelet = scene.kubelet().await;
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "stray",
        "namespace": "default", "uid": "u"}, "spec": {"containers": []}}))
    .unwrap();
    scene.pods.apply_watcher_event(&Event::Apply(pod));
    kubelet.admit(OFFLINE, "stray", Choice::Preferred).await.unwrap();
    let refused = kubelet.create(OFFLINE, "GPU-0").await.unwrap_err();
    let said = refused.message();
    assert!(said.contains("default/stray") && said.contains("schedulerName: muxflow"), "{said}");
}

/// Without the container device interface, what was given cannot be changed: a mismatch is refused
/// and the pod is evicted, so that it comes back.
#[tokio::test]
async fn without_cdi_a_mismatch_is_found_and_repaired() {
    let mut scene = Scene::open(2, false);
    let kubelet = scene.kubelet().await;
    scene.bind("a", 1, 0, 40);
    scene.bind("b", 2, 1, 40);
    let place = kubelet.admit(OFFLINE, "a", Choice::Preferred).await.unwrap();
    let right = kubelet.create(OFFLINE, &place).await.unwrap();
    assert_eq!(right.env["CUDA_VISIBLE_DEVICES"], "GPU-0");
    kubelet.admit(OFFLINE, "b", Choice::Preferred).await.unwrap();
    kubelet.create(OFFLINE, "GPU-1").await.unwrap();
    kubelet.release(OFFLINE, "GPU-0");
    kubelet.release(OFFLINE, "GPU-1");
    scene.executor.guests.lock().unwrap().clear();
    scene.bind("c", 3, 0, 40);
    scene.bind("d", 4, 1, 40);
    kubelet.admit(OFFLINE, "d", Choice::This("GPU-0")).await.unwrap();
    let refused = kubelet.create(OFFLINE, "GPU-0").await.unwrap_err();
    assert!(refused.message().contains("evicted to be placed anew"), "{}", refused.message());
    let wish = scene.wishes.recv().await.unwrap();
    assert_eq!((wish.job.as_str(), wish.reason), ("uid-d", "WrongGpu"));
    until("nothing else to repair", || scene.wishes.is_empty()).await;
}
