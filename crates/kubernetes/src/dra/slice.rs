//! Tells the cluster which devices the node has, as its `ResourceSlice`.
//!
//! A GPU whose service needs all of it, or that is out of order, is left out, and comes back by itself
//! with its state. What is allocated already stays so: leaving is the evictor's business.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Client, Error as KubeError};
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};

use super::{API, DRIVER};
use crate::device::plugin::Kind;
use crate::device::wire::HEALTHY;
use crate::node::executor::LocalGpu;
use crate::node::ground::Ground;
use crate::node::{guests, report};

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A kubelet removes the slices of a driver that it misses; what is unchanged, its generation included,
/// changes nothing in the store and wakes nobody.
const AGAIN_AFTER: Duration = Duration::from_secs(300);
const REQUEST_LIMIT: Duration = Duration::from_secs(10);
const WRITER: &str = "muxflow-agent-dra";

/// The device of a GPU for one kind of work.
pub fn device_name(kind: Kind, uuid: &str) -> String {
    let word = match kind {
        Kind::Online => "online",
        Kind::Offline => "offline",
    };
    format!("{word}-{}", uuid.to_lowercase())
}

/// All devices that may be given away now.
fn devices(ground: &Ground) -> Vec<Value> {
    let gpus = ground.executor.gpus();
    let mut devices = Vec::new();
    for kind in [Kind::Online, Kind::Offline] {
        let given = ground.given_to_services().clone();
        for offered in guests::devices(&*ground.executor, kind, &given) {
            let gpu = gpus.iter().find(|gpu| gpu.uuid == offered.id);
            if let Some(gpu) = gpu.filter(|_| offered.health == HEALTHY) {
                devices.push(device(kind, gpu));
            }
        }
    }
    devices
}

fn device(kind: Kind, gpu: &LocalGpu) -> Value {
    let word = match kind {
        Kind::Online => "online",
        Kind::Offline => "offline",
    };
    json!({
        "name": device_name(kind, &gpu.uuid),
        "attributes": {
            "kind": {"string": word},
            "uuid": {"string": gpu.uuid},
            "type": {"string": gpu.gpu_type},
        },
        "capacity": {"memory": {"value": gpu.memory_bytes.to_string()}},
    })
}

/// The writer of a node's slice.
pub(crate) struct Publisher {
    slices: Api<DynamicObject>,
    client: Client,
    ground: Arc<Ground>,
    node: String,
    owner: Option<OwnerReference>,
    /// What was published last, and of which generation it is.
    told: Option<(Vec<Value>, i64)>,
    /// When to publish, whether something has changed or not.
    again_at: Instant,
}

impl Publisher {
    pub(crate) fn new(client: Client, ground: Arc<Ground>, node: &str) -> Self {
        let slices = Api::all_with(client.clone(), &resource("ResourceSlice", "resourceslices"));
        let node = node.to_owned();
        let again_at = Instant::now();
        Publisher { slices, client, ground, node, owner: None, told: None, again_at }
    }

    pub(crate) async fn run(mut self, registered: Arc<Notify>, mut stop: watch::Receiver<bool>) {
        loop {
            let now = devices(&self.ground);
            let same = self.told.as_ref().filter(|(told, _)| *told == now);
            let known = same.map(|(_, generation)| *generation);
            if known.is_none() || Instant::now() >= self.again_at {
                // Grows with each change, also across restarts.
                let fresh = || jiff::Timestamp::now().as_millisecond();
                let generation = known.unwrap_or_else(fresh);
                let publishing = self.publish(&now, generation);
                match tokio::time::timeout(REQUEST_LIMIT, publishing).await {
                    Ok(Ok(())) => {
                        self.told = Some((now, generation));
                        self.again_at = Instant::now() + AGAIN_AFTER;
                    }
                    Ok(Err(error)) => tracing::warn!(%error, "the devices cannot be published"),
                    Err(_) => tracing::warn!("the API server does not take the devices in time"),
                }
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = registered.notified() => self.again_at = Instant::now(),
                _ = stop.wait_for(|stop| *stop) => return,
            }
        }
    }

    async fn publish(&mut self, devices: &[Value], generation: i64) -> Result<(), KubeError> {
        if self.owner.is_none() {
            self.owner = report::owner(&self.client, &self.node).await?;
        }
        let name = format!("{}-{DRIVER}", self.node);
        let object = json!({"apiVersion": API, "kind": "ResourceSlice",
            "metadata": {"name": name, "ownerReferences": self.owner.as_slice()},
            "spec": {"driver": DRIVER, "nodeName": self.node, "devices": devices,
                "pool": {"name": self.node, "generation": generation, "resourceSliceCount": 1}}});
        let apply = PatchParams::apply(WRITER).force();
        self.slices.patch(&name, &apply, &Patch::Apply(&object)).await.map(drop)
    }
}

/// A kind of this API; the types of older clients do not know it.
pub(crate) fn resource(kind: &str, plural: &str) -> ApiResource {
    let (group, version) = API.split_once('/').unwrap_or_default();
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

/// Whether the cluster has what the driver needs.
pub(crate) async fn is_served(client: &Client) -> Result<bool, KubeError> {
    match client.list_api_group_resources(API).await {
        Ok(_) => Ok(true),
        Err(KubeError::Api(status)) if status.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}
