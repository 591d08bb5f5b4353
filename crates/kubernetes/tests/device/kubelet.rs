//! A fake kubelet that speaks the real protocol: it takes registrations, follows the devices, asks for
//! a preference, allocates without saying for whom, and lists who holds what. And a fake runtime that
//! looks devices up when a container is created.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use futures::future::{BoxFuture, FutureExt as _};
use muxflow_kubernetes::device::grpc::{self, Routes};
use muxflow_kubernetes::device::wire::*;
use muxflow_kubernetes::names;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::transport::Channel;
use tonic::{Response, Status};

#[derive(Default)]
struct Memory {
    /// Devices with their health, by resource.
    devices: BTreeMap<String, BTreeMap<String, String>>,
    plugins: BTreeMap<String, (Channel, Options)>,
    readers: BTreeMap<String, JoinHandle<()>>,
    registrations: usize,
    /// Device to (namespace, name, what Allocate gave).
    held: BTreeMap<(String, String), (String, String, ContainerAllocation)>,
}

struct Desk {
    folder: PathBuf,
    memory: Arc<Mutex<Memory>>,
}

pub(crate) struct FakeKubelet {
    folder: PathBuf,
    memory: Arc<Mutex<Memory>>,
    _stops: Vec<oneshot::Sender<()>>,
}

impl Routes for Desk {
    fn route(
        self: Arc<Self>,
        request: HttpRequest<Body>,
    ) -> BoxFuture<'static, HttpResponse<Body>> {
        async move {
            match request.uri().path() {
                REGISTER => {
                    let this = &self;
                    grpc::unary(request, |ask: RegisterRequest| async move {
                        this.register(ask).await.map(Response::new)
                    })
                    .await
                }
                LIST_HOLDERS => {
                    let this = &self;
                    grpc::unary(
                        request,
                        |_: Empty| async move { Ok(Response::new(this.holders())) },
                    )
                    .await
                }
                other => grpc::unknown(other),
            }
        }
        .boxed()
    }
}

impl Desk {
    async fn register(&self, ask: RegisterRequest) -> Result<Empty, Status> {
        if ask.version != VERSION || ask.endpoint.contains('/') {
            return Err(Status::invalid_argument("not what a kubelet takes"));
        }
        let socket = self.folder.join("device-plugins").join(&ask.endpoint);
        let channel = grpc::connect(&socket).await.map_err(|e| Status::internal(e.to_string()))?;
        let mut stream = grpc::listen::<_, Devices>(&channel, LIST_AND_WATCH, Empty {}).await?;
        let mut memory = self.memory.lock().unwrap();
        memory.registrations += 1;
        memory
            .plugins
            .insert(ask.resource_name.clone(), (channel, ask.options.unwrap_or_default()));
        let (shared, resource) = (Arc::clone(&self.memory), ask.resource_name.clone());
        let reader = tokio::spawn(async move {
            while let Some(Ok(list)) = stream.next().await {
                let devices = list.devices.into_iter().map(|d| (d.id, d.health)).collect();
                shared.lock().unwrap().devices.insert(resource.clone(), devices);
            }
            shared.lock().unwrap().devices.remove(&resource);
        });
        memory.readers.insert(ask.resource_name, reader);
        Ok(Empty {})
    }

    fn holders(&self) -> Holders {
        let memory = self.memory.lock().unwrap();
        let pods = memory
            .held
            .iter()
            .map(|((resource, device), (namespace, name, _))| Holder {
                name: name.clone(),
                namespace: namespace.clone(),
                containers: vec![HolderContainer {
                    name: "c".into(),
                    devices: vec![HeldDevices {
                        resource_name: resource.clone(),
                        ids: vec![device.clone()],
                    }],
                }],
            })
            .collect();
        Holders { pods }
    }
}

/// How a kubelet chooses among devices.
#[derive(Clone, Copy)]
pub(crate) enum Choice<'a> {
    /// As the plugin prefers, which a kubelet does when it can.
    Preferred,
    /// This one, as a kubelet under a topology policy might.
    This(&'a str),
}

impl FakeKubelet {
    /// Starts as a kubelet does: removes the sockets of all plugins, and listens.
    pub(crate) fn start(folder: &Path) -> Self {
        let plugins = folder.join("device-plugins");
        std::fs::create_dir_all(&plugins).unwrap();
        std::fs::create_dir_all(folder.join("pod-resources")).unwrap();
        for entry in std::fs::read_dir(&plugins).unwrap().flatten() {
            std::fs::remove_file(entry.path()).unwrap();
        }
        let memory = Arc::new(Mutex::new(Memory::default()));
        let desk = Arc::new(Desk { folder: folder.to_owned(), memory: Arc::clone(&memory) });
        let mut stops = Vec::new();
        for socket in ["device-plugins/kubelet.sock", "pod-resources/kubelet.sock"] {
            let (stop, stopped) = oneshot::channel();
            let until = async {
                drop(stopped.await);
            };
            grpc::serve(&folder.join(socket), Arc::clone(&desk), until).unwrap();
            stops.push(stop);
        }
        FakeKubelet { folder: folder.to_owned(), memory, _stops: stops }
    }

    pub(crate) fn registrations(&self) -> usize {
        self.memory.lock().unwrap().registrations
    }

    /// Loses the stream of devices and the connection, as when a call breaks.
    pub(crate) fn hang_up(&self, resource: &str) {
        let mut memory = self.memory.lock().unwrap();
        memory.readers.remove(resource).unwrap().abort();
        memory.plugins.remove(resource);
        memory.devices.remove(resource);
    }

    /// Names of the devices with this health.
    pub(crate) fn devices(&self, resource: &str, health: &str) -> Vec<String> {
        let memory = self.memory.lock().unwrap();
        let all = memory.devices.get(resource).cloned().unwrap_or_default();
        all.into_iter().filter(|(_, h)| h == health).map(|(id, _)| id).collect()
    }

    pub(crate) async fn wait_for_devices(&self, resource: &str, health: &str, count: usize) {
        until(&format!("{count} {health} devices of {resource}"), || {
            self.devices(resource, health).len() == count
        })
        .await;
    }

    fn plugin(&self, resource: &str) -> (Channel, Options) {
        self.memory.lock().unwrap().plugins[resource].clone()
    }

    /// Admits a pod: gives it a device, without telling the plugin which pod it is.
    pub(crate) async fn admit(
        &self,
        resource: &str,
        pod: &str,
        choice: Choice<'_>,
    ) -> Result<String, Status> {
        let (channel, options) = self.plugin(resource);
        let available: Vec<String> = {
            let memory = self.memory.lock().unwrap();
            let taken = |id: &String| memory.held.contains_key(&(resource.to_owned(), id.clone()));
            let all = memory.devices[resource].iter();
            all.filter(|(id, health)| *health == HEALTHY && !taken(id))
                .map(|(id, _)| id.clone())
                .collect()
        };
        let device = match choice {
            Choice::This(device) => device.to_owned(),
            Choice::Preferred if options.preferred_allocation => {
                let containers =
                    vec![ContainerPreferredRequest { available, must_include: vec![], size: 1 }];
                let answer: PreferredResponse =
                    grpc::ask(&channel, PREFERRED, PreferredRequest { containers }).await?;
                answer.containers[0].ids[0].clone()
            }
            Choice::Preferred => available[0].clone(),
        };
        let containers = vec![DeviceIds { ids: vec![device.clone()] }];
        let answer: AllocateResponse =
            grpc::ask(&channel, ALLOCATE, AllocateRequest { containers }).await?;
        let key = (resource.to_owned(), device.clone());
        let given = answer.containers[0].clone();
        let held = ("default".to_owned(), pod.to_owned(), given);
        assert!(self.memory.lock().unwrap().held.insert(key, held).is_none(), "given twice");
        Ok(device)
    }

    /// Creates the container that holds a device; what it gets, variables and mounts.
    pub(crate) async fn create(&self, resource: &str, device: &str) -> Result<Container, Status> {
        let (channel, options) = self.plugin(resource);
        if options.pre_start_required {
            let ids = DeviceIds { ids: vec![device.to_owned()] };
            grpc::ask::<_, Empty>(&channel, PRE_START, ids).await?;
        }
        let key = (resource.to_owned(), device.to_owned());
        let given = self.memory.lock().unwrap().held[&key].2.clone();
        let mut container = Container {
            env: given.envs.into_iter().collect(),
            mounts: given.mounts.into_iter().map(|m| (m.container_path, m.host_path)).collect(),
        };
        for cdi in given.cdi_devices {
            container.look_up(&self.folder.join("cdi"), &cdi.name);
        }
        Ok(container)
    }

    /// The pod is over: its device is free again.
    pub(crate) fn release(&self, resource: &str, device: &str) {
        self.memory.lock().unwrap().held.remove(&(resource.to_owned(), device.to_owned()));
    }
}

/// What a container was created with.
#[derive(Debug, Clone)]
pub(crate) struct Container {
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) mounts: BTreeMap<String, String>,
}

impl Container {
    /// As a runtime resolves a device by its full name.
    fn look_up(&mut self, folder: &Path, name: &str) {
        let is_spec = |path: &PathBuf| path.extension().is_some_and(|end| end == "json");
        let paths = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
        for path in paths.filter(is_spec) {
            let spec: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
            for device in spec["devices"].as_array().unwrap() {
                let full = format!(
                    "{}={}",
                    spec["kind"].as_str().unwrap(),
                    device["name"].as_str().unwrap()
                );
                if full != name {
                    continue;
                }
                let edits = &device["containerEdits"];
                for pair in edits["env"].as_array().unwrap() {
                    let (key, value) = pair.as_str().unwrap().split_once('=').unwrap();
                    self.env.insert(key.to_owned(), value.to_owned());
                }
                for mount in edits["mounts"].as_array().unwrap() {
                    let text = |key: &str| mount[key].as_str().unwrap().to_owned();
                    self.mounts.insert(text("containerPath"), text("hostPath"));
                }
                return;
            }
        }
        panic!("unresolvable device {name}");
    }
}

pub(crate) async fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(60), "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

pub(crate) const OFFLINE: &str = names::OFFLINE_RESOURCE;
pub(crate) const ONLINE: &str = names::ONLINE_RESOURCE;
