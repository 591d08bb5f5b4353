//! The answers to the kubelet, for the online and the offline resource.

use std::collections::BTreeSet;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, FutureExt as _};
use muxflow_agent::cgroup::encode;
use muxflow_types::JobId;
use tokio::sync::watch;
use tonic::body::Body;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};
use tonic::{Response, Status};

use super::grpc::{self, Messages, Routes};
use super::inject::Injection;
use super::wire::{self, *};
use crate::names;
use crate::node::executor::LocalGpu;
use crate::node::ground::Ground;
use crate::node::placed::{self, Placed};
use crate::scheduler::pods;
use crate::whole_file;

/// How long the watch of pods may lag behind the kubelet, and the kubelet's list behind its calls.
const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Which of the two resources.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A GPU for a service: the device is the GPU.
    Online,
    /// A place beside a service: which GPU it is, the pod's binding says.
    Offline,
}

/// A plugin for one resource.
#[derive(Debug)]
pub struct DevicePlugin {
    kind: Kind,
    ground: Arc<Ground>,
    devices: watch::Receiver<Vec<Device>>,
    /// Each stream to a kubelet holds one too.
    listeners: Arc<()>,
}

impl DevicePlugin {
    /// Tells these devices.
    pub fn new(kind: Kind, ground: Arc<Ground>, devices: watch::Receiver<Vec<Device>>) -> Self {
        DevicePlugin { kind, ground, devices, listeners: Arc::default() }
    }

    /// The resource of a kind.
    pub fn resource(kind: Kind) -> &'static str {
        match kind {
            Kind::Online => names::ONLINE_RESOURCE,
            Kind::Offline => names::OFFLINE_RESOURCE,
        }
    }

    /// What it asks the kubelet for.
    pub fn options(kind: Kind) -> Options {
        let offline = kind == Kind::Offline;
        Options { pre_start_required: offline, preferred_allocation: offline }
    }

    fn tell(&self) -> Messages<Devices> {
        let begin = (self.devices.clone(), Arc::clone(&self.listeners), true);
        Box::pin(futures::stream::unfold(begin, |(mut devices, listener, first)| async move {
            if !first && devices.changed().await.is_err() {
                return None;
            }
            let now = devices.borrow_and_update().clone();
            Some((Ok(Devices { devices: now }), (devices, listener, false)))
        }))
    }

    fn prefer(&self, request: &PreferredRequest) -> PreferredResponse {
        let placed = self.ground.placed();
        let served = self.ground.attached();
        let containers = request
            .containers
            .iter()
            .map(|container| DeviceIds { ids: preferred(container, &placed, &served) })
            .collect();
        PreferredResponse { containers }
    }

    async fn allocate(&self, request: AllocateRequest) -> Result<AllocateResponse, Status> {
        let mut containers = Vec::new();
        for container in &request.containers {
            let device = single(&container.ids)?;
            containers.push(match self.kind {
                Kind::Online => {
                    let gpu = self.gpu(device)?;
                    self.give_to_service(device)?;
                    Injection::online(&gpu, &self.ground.paths).allocation()
                }
                Kind::Offline if self.ground.cdi.is_some() => self.promise(device)?,
                Kind::Offline => self.allocate_now(device).await?,
            });
        }
        Ok(AllocateResponse { containers })
    }

    /// A GPU serves one service, whether it was asked for as a device or by a claim.
    fn give_to_service(&self, device: &str) -> Result<(), Status> {
        if self.ground.claimed_by_services().contains(device) {
            let why = format!("GPU {device} is held by the claim of another service");
            return Err(Status::failed_precondition(why));
        }
        self.ground.given_to_services().insert(device.to_owned());
        Ok(())
    }

    fn gpu(&self, uuid: &str) -> Result<LocalGpu, Status> {
        let found = self.ground.executor.gpus().into_iter().find(|gpu| gpu.uuid == uuid);
        found.ok_or_else(|| Status::not_found(format!("there is no GPU {uuid} on this node")))
    }

    /// A name that the runtime looks up when it creates the container; nothing is behind it yet. It
    /// is a new one each time, so that what an earlier holder got can never be taken for it.
    fn promise(&self, device: &str) -> Result<ContainerAllocation, Status> {
        let now = jiff::Timestamp::now().as_microsecond();
        let name = format!("{device}.{now}");
        let file = self.ground.place_file(device);
        whole_file::write(&file, name.as_bytes()).map_err(Status::internal)?;
        let full = format!("{}={name}", names::OFFLINE_RESOURCE);
        let cdi_devices = vec![CdiDevice { name: full }];
        Ok(ContainerAllocation { cdi_devices, ..ContainerAllocation::default() })
    }

    /// Without the container device interface, everything is given at once, to the pod that is
    /// expected; [`DevicePlugin::prepare`] finds out whether it was that one.
    async fn allocate_now(&self, device: &str) -> Result<ContainerAllocation, Status> {
        let served = self.ground.attached();
        let expected = patiently(|| {
            let waiting =
                |p: &Placed| p.gpu.as_str() == device && !p.leaving && !served.contains(&p.job);
            self.ground.placed().into_iter().find(|p| waiting(p))
        });
        let expected = expected.await.ok_or_else(|| {
            Status::failed_precondition(format!(
                "no pod was bound to GPU {device}: offline pods need schedulerName: {}",
                names::SCHEDULER
            ))
        })?;
        let injection = self.attach(&expected).await?;
        Ok(injection.allocation())
    }

    async fn attach(&self, placed: &Placed) -> Result<Injection, Status> {
        let gpu = self.gpu(placed.gpu.as_str())?;
        let control = self.ground.attach(placed).await;
        let control = control.map_err(|why| Status::unavailable(why.words()))?;
        Ok(Injection::offline(&gpu, &self.ground.paths, placed.share, &control))
    }

    /// A container is about to be created: finds out whose it is, and gives it its GPU.
    async fn prepare(&self, request: &DeviceIds) -> Result<Empty, Status> {
        let device = single(&request.ids)?;
        let (namespace, name) = self.holder(device).await?;
        // The kubelet names no uid: one that leaves is the predecessor of that name, whose successor
        // the watch has not shown yet.
        let pod = patiently(|| {
            placed::find(&self.ground.pods, &namespace, &name).filter(|pod| !pods::is_leaving(pod))
        });
        let pod = pod.await;
        let pod = pod.ok_or_else(|| {
            Status::unavailable(format!("pod {namespace}/{name} is not known here yet"))
        })?;
        let placed = placed::placed(&pod).map_err(Status::failed_precondition)?;
        let Some(folder) = &self.ground.cdi else { return self.verify(device, &placed) };
        let injection = self.attach(&placed).await?;
        let promised = fs::read_to_string(self.ground.place_file(device)).map_err(|error| {
            Status::internal(format!("nothing was promised to the holder of {device}: {error}"))
        })?;
        let spec = injection.cdi(names::OFFLINE_RESOURCE, &promised);
        let file = folder.join(format!("muxflow.dev-offline-{}.json", encode(device)));
        whole_file::write(&file, spec.to_string().as_bytes()).map_err(Status::internal)?;
        if placed.gpu.as_str() != device {
            tracing::info!(pod = placed.pod.path(), gpu = %placed.gpu, place = device, "the kubelet gave another place; the GPU is the planned one");
        }
        Ok(Empty {})
    }

    /// Everything was given already: to the right one?
    fn verify(&self, device: &str, placed: &Placed) -> Result<Empty, Status> {
        if placed.gpu.as_str() == device {
            return Ok(Empty {});
        }
        let why = format!(
            "the kubelet gave pod {} the GPU {device} and not {}, which it was planned for; it is evicted to be placed anew",
            placed.pod.path(),
            placed.gpu
        );
        self.ground.must_leave(&placed.job, "WrongGpu", &why);
        Err(Status::failed_precondition(why))
    }

    /// The pod that holds a device, by the kubelet's own list.
    async fn holder(&self, device: &str) -> Result<(String, String), Status> {
        let began = Instant::now();
        loop {
            let holders = self.ground.holders().await.map_err(|error| {
                Status::unavailable(format!(
                    "the kubelet does not say who holds {device} (is its pod-resources folder mounted?): {}",
                    error.message()
                ))
            })?;
            let resource = Self::resource(self.kind);
            if let Some(pod) = holders.pods.iter().find(|pod| holds(pod, resource, device)) {
                return Ok((pod.namespace.clone(), pod.name.clone()));
            }
            if began.elapsed() > PATIENCE {
                return Err(Status::unavailable(format!(
                    "the kubelet's list names no holder of {device}"
                )));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl Routes for DevicePlugin {
    fn has_listener(&self) -> bool {
        Arc::strong_count(&self.listeners) > 1
    }

    fn route(
        self: Arc<Self>,
        request: HttpRequest<Body>,
    ) -> BoxFuture<'static, HttpResponse<Body>> {
        let path = request.uri().path().to_owned();
        async move {
            match path.as_str() {
                wire::OPTIONS => {
                    let options = Self::options(self.kind);
                    grpc::unary(request, |_: Empty| async move { Ok(Response::new(options)) }).await
                }
                LIST_AND_WATCH => grpc::streaming(request, |_: Empty| self.tell()).await,
                PREFERRED => {
                    grpc::unary(request, |ask: PreferredRequest| {
                        let answer = self.prefer(&ask);
                        async move { Ok(Response::new(answer)) }
                    })
                    .await
                }
                ALLOCATE => {
                    grpc::unary(request, |ask: AllocateRequest| async {
                        self.allocate(ask).await.map(Response::new)
                    })
                    .await
                }
                PRE_START => {
                    let this = &self;
                    grpc::unary(request, |ask: DeviceIds| async move {
                        let answer = this.prepare(&ask).await;
                        if let Err(status) = &answer {
                            tracing::warn!(devices = ?ask.ids, why = status.message(), "a container is refused");
                        }
                        answer.map(Response::new)
                    })
                    .await
                }
                other => grpc::unknown(other),
            }
        }
        .boxed()
    }
}

/// Whether a pod holds a device.
pub(crate) fn holds(pod: &Holder, resource: &str, device: &str) -> bool {
    let held = pod.containers.iter().flat_map(|container| &container.devices);
    held.filter(|held| held.resource_name == resource)
        .any(|held| held.ids.iter().any(|id| id == device))
}

fn single(devices: &[String]) -> Result<&str, Status> {
    match devices {
        [device] => Ok(device),
        more => Err(Status::invalid_argument(format!(
            "a container may ask for one GPU of MuxFlow, and this one was given {}",
            more.len()
        ))),
    }
}

/// The devices that fit the plan best: those of the pods that wait for theirs, oldest first.
fn preferred(
    request: &ContainerPreferredRequest,
    placed: &[Placed],
    served: &BTreeSet<JobId>,
) -> Vec<String> {
    let planned = placed
        .iter()
        .filter(|p| !p.leaving && !served.contains(&p.job))
        .map(|p| p.gpu.as_str())
        .filter(|gpu| request.available.iter().any(|id| id == gpu));
    let mut chosen: Vec<String> = Vec::new();
    let all = request.must_include.iter().map(String::as_str).chain(planned);
    for device in all.chain(request.available.iter().map(String::as_str)) {
        if !chosen.iter().any(|known| known == device) {
            chosen.push(device.to_owned());
        }
    }
    chosen.truncate(usize::try_from(request.size).unwrap_or(0));
    chosen
}

/// Asks again until there is an answer, for a while.
pub(crate) async fn patiently<T>(look: impl Fn() -> Option<T>) -> Option<T> {
    let began = Instant::now();
    loop {
        let found = look();
        if found.is_some() || began.elapsed() > PATIENCE {
            return found;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
