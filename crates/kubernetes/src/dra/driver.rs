//! The answers to the kubelet: what a pod with a claim gets, and that it is over.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DynamicObject};
use muxflow_types::{Bytes, GpuId, JobId, SmCount, SmShare};
use serde::Deserialize;
use tokio::sync::{Notify, watch};
use tonic::Response;
use tonic::body::Body;
use tonic::codegen::http::{Request as HttpRequest, Response as HttpResponse};

use super::claims::{self, Claimed};
use super::health;
use super::wire::*;
use super::{DRIVER, slice};
use crate::device::grpc::{self, Routes};
use crate::device::inject::Injection;
use crate::device::plugin::{Kind, patiently};
use crate::device::registration::{identity, pause};
use crate::device::wire::Empty;
use crate::node::executor::LocalGpu;
use crate::node::ground::Ground;
use crate::node::placed::{self, Grant};
use crate::resource::State;
use crate::whole_file;

const LOOK_EVERY: Duration = Duration::from_millis(500);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
/// The vendor and class of what the runtime looks up.
const CDI_KIND: &str = "muxflow.dev/claim";

/// Where the kubelet and the driver meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// The folder in which the kubelet looks for plugins.
    pub registry: PathBuf,
    /// The folder of the driver's own socket.
    pub own: PathBuf,
}

impl Sockets {
    /// In the kubelet's folder.
    pub fn under(kubelet: &Path) -> Self {
        Sockets {
            registry: kubelet.join("plugins_registry"),
            own: kubelet.join("plugins").join(DRIVER),
        }
    }

    /// Where the kubelet asks who it is.
    pub fn introduction(&self) -> PathBuf {
        self.registry.join(format!("{DRIVER}-reg.sock"))
    }

    /// Where the kubelet asks for devices.
    pub fn service(&self) -> PathBuf {
        self.own.join("dra.sock")
    }
}

/// The driver.
pub struct Driver {
    client: Client,
    ground: Arc<Ground>,
    node: String,
    sockets: Sockets,
    cdi: PathBuf,
    /// Told when the kubelet has taken the driver.
    pub(crate) registered: Arc<Notify>,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("sockets", &self.sockets).finish_non_exhaustive()
    }
}

/// A claim, as far as it is used.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Vec<Consumer>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Allocation {
    devices: Devices,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Devices {
    results: Vec<Given>,
}

#[derive(Debug, Default, Clone, Deserialize)]
#[serde(default)]
struct Given {
    request: String,
    driver: String,
    pool: String,
    device: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Consumer {
    resource: String,
    uid: String,
}

/// The one device of ours in a claim, and the one pod that may use it.
fn single(name: &str, status: Status) -> Result<(Given, String), String> {
    let results = status.allocation.unwrap_or_default().devices.results;
    let mut ours = results.into_iter().filter(|given| given.driver == DRIVER);
    let given = match (ours.next(), ours.next()) {
        (Some(given), None) => given,
        (None, _) => return Err(format!("claim {name} has no device of {DRIVER} allocated")),
        (Some(_), Some(_)) => {
            return Err(format!("claim {name} has several devices of {DRIVER}; ask for one"));
        }
    };
    let mut pods = status.reserved_for.into_iter().filter(|consumer| consumer.resource == "pods");
    match (pods.next(), pods.next()) {
        (Some(pod), None) => Ok((given, pod.uid)),
        (None, _) => Err(format!("claim {name} is reserved for no pod")),
        (Some(_), Some(_)) => {
            Err(format!("claim {name} is shared by several pods; give each one a claim of its own"))
        }
    }
}

impl Driver {
    /// Answers on these sockets; devices of claims are written into the runtime's folder.
    pub fn new(
        client: Client,
        ground: Arc<Ground>,
        node: &str,
        sockets: Sockets,
        cdi: PathBuf,
    ) -> Self {
        let node = node.to_owned();
        Driver { client, ground, node, sockets, cdi, registered: Arc::default() }
    }

    /// Serves until `stop`; makes its sockets again when somebody removes them.
    pub async fn run(self: Arc<Self>, mut stop: watch::Receiver<bool>) {
        let both = [self.sockets.service(), self.sockets.introduction()];
        while !*stop.borrow() {
            let (end, ended) = watch::channel(false);
            // The kubelet looks at the second as soon as it is there; the first must be there then.
            match both.iter().try_for_each(|socket| self.serve(socket, ended.clone())) {
                Ok(()) => {
                    let known = both.each_ref().map(|socket| identity(socket));
                    while !*stop.borrow() && both.each_ref().map(|s| identity(s)) == known {
                        pause(&mut stop, LOOK_EVERY).await;
                    }
                }
                Err(error) => {
                    let folder = self.sockets.registry.display();
                    tracing::warn!(%folder, %error, "the driver cannot listen; are the kubelet's folders plugins and plugins_registry mounted?");
                    pause(&mut stop, LOOK_EVERY * 4).await;
                }
            }
            end.send_replace(true);
        }
        for socket in both {
            drop(std::fs::remove_file(socket));
        }
    }

    fn serve(self: &Arc<Self>, at: &Path, mut ended: watch::Receiver<bool>) -> std::io::Result<()> {
        if let Some(folder) = at.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let until = async move {
            drop(ended.wait_for(|ended| *ended).await);
        };
        grpc::serve(at, Arc::clone(self), until).map(drop)
    }

    async fn status(&self, claim: &Claim) -> Result<Status, String> {
        let name = format!("{}/{}", claim.namespace, claim.name);
        let resource = slice::resource("ResourceClaim", "resourceclaims");
        let api: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), &claim.namespace, &resource);
        let got = tokio::time::timeout(REQUEST_LIMIT, api.get(&claim.name)).await;
        let object = got
            .map_err(|_| format!("claim {name}: the API server does not answer"))?
            .map_err(|error| format!("claim {name}: {error}"))?;
        if object.metadata.uid.as_deref() != Some(claim.uid.as_str()) {
            return Err(format!("claim {name} is another one by now than uid {}", claim.uid));
        }
        serde_json::from_value(object.data["status"].clone())
            .map_err(|error| format!("claim {name}, status: {error}"))
    }

    async fn prepare(&self, claim: &Claim) -> Result<PreparedDevice, String> {
        let name = format!("{}/{}", claim.namespace, claim.name);
        let (given, pod) = single(&name, self.status(claim).await?)?;
        let (kind, gpu) = self.device(&given.device)?;
        let found = patiently(|| {
            self.ground.pods.find(|p| p.metadata.uid.as_deref() == Some(pod.as_str()))
        });
        let Some(object) = found.await else {
            return Err(format!("claim {name}: its pod {pod} is not known here yet"));
        };
        let known = self.known(claim, &pod, &gpu).map_err(|why| format!("claim {name}: {why}"))?;
        let (grant, known) = match known {
            Some(grant) => (grant, true),
            None => {
                if kind == Kind::Online {
                    self.is_free(&gpu.uuid, &claim.uid)
                        .await
                        .map_err(|why| format!("claim {name}: {why}"))?;
                }
                (self.grant(kind, &gpu, &object)?, false)
            }
        };
        let job = JobId::new(&pod).map_err(|error| format!("claim {name}: {error}"))?;
        self.ground.claims.insert(&claim.uid, Claimed { pod: job, kind, grant: grant.clone() })?;
        let injection = match kind {
            Kind::Online => Injection::online(&gpu, &self.ground.paths),
            Kind::Offline => {
                let placed = placed::with(&object, grant)?;
                let control = match self.ground.attach(&placed).await {
                    Ok(control) => control,
                    Err(why) => {
                        // Not given, so the next attempt asks anew what may be given.
                        if !known {
                            self.ground.claims.remove(&claim.uid)?;
                        }
                        return Err(why.words());
                    }
                };
                Injection::offline(&gpu, &self.ground.paths, placed.share, &control)
            }
        };
        let spec = injection.cdi(CDI_KIND, &claim.uid);
        whole_file::write(&self.cdi_file(&claim.uid), spec.to_string().as_bytes())?;
        tracing::info!(claim = name, gpu = gpu.uuid, ?kind, "a claim is prepared");
        Ok(PreparedDevice {
            requests: vec![given.request],
            pool: given.pool,
            device: given.device,
            cdi_devices: vec![format!("{CDI_KIND}={}", claim.uid)],
        })
    }

    /// What the pod was given when the claim was prepared before: it may run already, and keeps it. A
    /// claim that has come to name another GPU since then cannot be kept to, and the pod leaves.
    fn known(&self, claim: &Claim, pod: &str, gpu: &LocalGpu) -> Result<Option<Grant>, String> {
        let known = self.ground.claims.get(&claim.uid).filter(|known| known.pod.as_str() == pod);
        let Some(known) = known else { return Ok(None) };
        if known.grant.gpu.as_str() == gpu.uuid {
            return Ok(Some(known.grant));
        }
        let why = format!(
            "it names GPU {} now, and its pod was given {}; the pod is evicted to be placed anew",
            gpu.uuid, known.grant.gpu
        );
        self.ground.must_leave(&known.pod, "WrongGpu", &why);
        Err(why)
    }

    /// A GPU serves one service, whether it was asked for by a claim or as a device. A kubelet that
    /// does not say who holds what keeps nobody from serving.
    async fn is_free(&self, uuid: &str, claim: &str) -> Result<(), String> {
        match tokio::time::timeout(REQUEST_LIMIT, self.ground.look_who_holds()).await {
            Ok(Ok(_)) => {}
            Ok(Err(status)) => {
                tracing::warn!(why = status.message(), "the kubelet does not say who holds GPUs");
            }
            Err(_) => tracing::warn!("the kubelet does not answer who holds GPUs"),
        }
        if self.ground.given_to_services().contains(uuid) {
            return Err(format!("GPU {uuid} is held by a service that asked for it as a device"));
        }
        if self.ground.claims.serves_another(uuid, claim) {
            return Err(format!("GPU {uuid} is held by the claim of another service"));
        }
        Ok(())
    }

    /// Whose device this is.
    fn device(&self, name: &str) -> Result<(Kind, LocalGpu), String> {
        for gpu in self.ground.executor.gpus() {
            for kind in [Kind::Online, Kind::Offline] {
                if slice::device_name(kind, &gpu.uuid) == name {
                    return Ok((kind, gpu));
                }
            }
        }
        Err(format!("there is no device {name} on this node"))
    }

    /// What a pod gets of a GPU: what its binding says, or what the GPU has to lend now.
    fn grant(&self, kind: Kind, gpu: &LocalGpu, pod: &Pod) -> Result<Grant, String> {
        if let Ok(bound) = placed::granted(pod)
            && kind == Kind::Offline
            && bound.gpu.as_str() == gpu.uuid
        {
            return Ok(bound);
        }
        let id = GpuId::new(&gpu.uuid).map_err(|error| error.to_string())?;
        let reading = self.ground.executor.read(&gpu.uuid);
        let Some(reading) = reading.filter(|reading| reading.sms > 0) else {
            return Err(format!("GPU {} is not known well enough yet", gpu.uuid));
        };
        let sms = match kind {
            Kind::Online => reading.sms,
            Kind::Offline if reading.state == State::Healthy => reading.share_sms,
            Kind::Offline => {
                return Err(format!("GPU {} is {:?} and takes no job", gpu.uuid, reading.state));
            }
        };
        let share = SmShare::new(SmCount(sms), SmCount(reading.sms)).map_err(|error| {
            format!("GPU {} has no SMs to lend at the moment: {error}", gpu.uuid)
        })?;
        Ok(Grant { gpu: id, share, quota: Bytes(reading.quota_bytes) })
    }

    /// Lets go; what is not there is gone already. The local loop lets the guest go with it.
    fn unprepare(&self, claim: &Claim) -> Result<(), String> {
        whole_file::remove(&self.cdi_file(&claim.uid))?;
        self.ground.claims.remove(&claim.uid)
    }

    fn cdi_file(&self, uid: &str) -> PathBuf {
        claims::cdi_file(&self.cdi, uid)
    }

    async fn prepare_all(&self, ask: Claims) -> PrepareAnswers {
        let mut answers = PrepareAnswers::default();
        for claim in ask.claims {
            let answer = match self.prepare(&claim).await {
                Ok(device) => PrepareAnswer { devices: vec![device], error: String::new() },
                Err(error) => {
                    tracing::warn!(claim = claim.name, error, "a claim cannot be prepared");
                    PrepareAnswer { devices: Vec::new(), error }
                }
            };
            answers.claims.insert(claim.uid, answer);
        }
        answers
    }

    fn unprepare_all(&self, ask: Claims) -> UnprepareAnswers {
        let answer = |claim: Claim| {
            let error = self.unprepare(&claim).err().unwrap_or_default();
            (claim.uid, UnprepareAnswer { error })
        };
        UnprepareAnswers { claims: ask.claims.into_iter().map(answer).collect() }
    }

    fn info(&self) -> Info {
        Info {
            kind: KIND.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.sockets.service().display().to_string(),
            versions: vec![SERVICE.to_owned()],
        }
    }

    fn taken(&self, told: &Registered) {
        if told.taken {
            tracing::info!("the kubelet has taken the driver");
            self.registered.notify_one();
        } else {
            tracing::warn!(why = told.error, "the kubelet does not take the driver");
        }
    }
}

impl Routes for Driver {
    fn route(
        self: Arc<Self>,
        request: HttpRequest<Body>,
    ) -> BoxFuture<'static, HttpResponse<Body>> {
        let path = request.uri().path().to_owned();
        async move {
            let this = &self;
            match path.as_str() {
                INFO => {
                    grpc::unary(request, |_: Empty| async move { Ok(Response::new(this.info())) })
                        .await
                }
                REGISTERED => {
                    grpc::unary(request, |told: Registered| async move {
                        this.taken(&told);
                        Ok(Response::new(Empty {}))
                    })
                    .await
                }
                PREPARE => {
                    grpc::unary(request, |ask: Claims| async move {
                        Ok(Response::new(this.prepare_all(ask).await))
                    })
                    .await
                }
                UNPREPARE => {
                    grpc::unary(request, |ask: Claims| async move {
                        Ok(Response::new(this.unprepare_all(ask)))
                    })
                    .await
                }
                health::WATCH => {
                    grpc::streaming(request, |_: health::Ask| {
                        health::watch(Arc::clone(&this.ground), this.node.clone())
                    })
                    .await
                }
                other => grpc::unknown(other),
            }
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::fake::{Fake, OTHER, OWN, Scene};
    use serde_json::json;

    #[tokio::test]
    async fn a_claim_that_was_prepared_keeps_its_gpu_or_its_pod_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let mut scene = Scene::with(Fake::default(), dir.path());
        let nobody = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = crate::connect::client(nobody).unwrap();
        let sockets = Sockets::under(dir.path());
        let ground = Arc::clone(&scene.ground);
        let driver = Driver::new(client, ground, "n1", sockets, dir.path().to_owned());
        let claim = Claim { uid: "c".into(), ..Claim::default() };
        let [a, b]: [LocalGpu; 2] = scene.ground.executor.gpus().try_into().unwrap();
        assert_eq!(driver.known(&claim, OWN, &a), Ok(None));
        let grant = Grant {
            gpu: GpuId::new(&a.uuid).unwrap(),
            share: SmShare::new(SmCount(10), SmCount(40)).unwrap(),
            quota: Bytes(1 << 30),
        };
        let job = JobId::new(OWN).unwrap();
        let claimed = Claimed { pod: job.clone(), kind: Kind::Offline, grant: grant.clone() };
        scene.ground.claims.insert("c", claimed).unwrap();
        assert_eq!(driver.known(&claim, OWN, &a), Ok(Some(grant)));
        assert_eq!(driver.known(&claim, OTHER, &b), Ok(None), "another pod has it now");
        let said = driver.known(&claim, OWN, &b).unwrap_err();
        assert!(said.contains("GPU-a") && said.contains("GPU-b"), "{said}");
        let wish = scene.wishes.try_recv().unwrap();
        assert_eq!((wish.job, wish.reason), (job, "WrongGpu"));
    }

    fn read(status: serde_json::Value) -> Result<(Given, String), String> {
        single("d/c", serde_json::from_value(status).unwrap())
    }

    #[test]
    fn a_claim_has_one_device_of_ours_and_one_pod() {
        let result = |driver: &str| json!({"request": "r", "driver": driver, "pool": "n", "device": "offline-gpu-1"});
        let pod = json!({"resource": "pods", "name": "p", "uid": "u1"});
        let good = json!({"allocation": {"devices": {"results": [result("other.dev"), result("muxflow.dev")]}},
            "reservedFor": [pod]});
        let (given, uid) = read(good).unwrap();
        assert_eq!((given.device.as_str(), uid.as_str()), ("offline-gpu-1", "u1"));
        let ours = json!({"devices": {"results": [result("muxflow.dev")]}});
        let twice = json!({"devices": {"results": [result("muxflow.dev"), result("muxflow.dev")]}});
        for (status, words) in [
            (json!({}), "no device"),
            (json!({"allocation": ours}), "reserved for no pod"),
            (json!({"allocation": ours, "reservedFor": [pod, pod]}), "several pods"),
            (json!({"allocation": twice, "reservedFor": [pod]}), "ask for one"),
        ] {
            let said = read(status).map(|(_, uid)| uid).unwrap_err();
            assert!(said.contains(words) && said.contains("d/c"), "{said}");
        }
    }
}
