//! The agent's side of a node of a cluster: lets pods in on the GPUs that they were planned for, tells
//! the cluster how its GPUs are, and has pods evicted that must leave.
//!
//! Three loops that do not wait for each other. The local one ([`guests`]) never asks the API server
//! for anything: gates, drains and devices work while it is away. [`report`] writes the `Gpu` objects, [`evict`]
//! asks for evictions and insists. The pods of the node come from a watch.

pub mod evict;
pub mod executor;
#[cfg(test)]
pub(crate) mod fake;
pub mod ground;
pub mod guests;
pub mod identity;
pub mod metrics;
mod news;
pub mod placed;
pub mod report;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher;
use kube::{Api, Client};
use muxflow_types::JobId;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use self::executor::Executor;
use self::ground::{Ground, Places, Wish};
use crate::device::plugin::{DevicePlugin, Kind};
use crate::device::registration::Plugin;
use crate::dra::driver::{Driver, Sockets};
use crate::dra::slice;
use crate::events::{Later, Teller};
use crate::scheduler::watches;
use crate::{Error, dra};

/// What an operator may set.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The name of this node in the cluster.
    pub node: String,
    /// Where things are.
    pub places: Places,
    /// Be a driver for claims too; none without.
    pub dra: Option<Sockets>,
    /// How often an unchanged GPU is reported at least. What matters is reported when it changes.
    pub report_every: Duration,
    /// How long the first list of pods may take.
    pub patience: Duration,
}

impl Settings {
    /// The defaults, for a node of this name.
    pub fn new(node: &str) -> Self {
        Settings {
            node: node.to_owned(),
            places: Places::default(),
            dra: None,
            report_every: Duration::from_secs(120),
            patience: Duration::from_secs(60),
        }
    }
}

/// A node's side that runs.
#[derive(Debug)]
pub struct Node {
    ground: Arc<Ground>,
    services: Arc<report::Services>,
    later: Later,
    /// Says that the agent leaves, and ends the reports with it.
    leave: watch::Sender<bool>,
    reports: JoinSet<()>,
    stop: watch::Sender<bool>,
    /// Loops that end when they are told to stop.
    loops: JoinSet<()>,
    /// What goes on for as long as anybody listens.
    streams: JoinSet<()>,
}

/// How long the last words may take; the API server may be away.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// A pod that was bound before those words were heard still finds its device for so long.
const LATE_COMERS: Duration = Duration::from_secs(2);
/// How long the loops may take to end.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

impl Node {
    /// Starts everything. `wishes` are what the executor says must leave.
    pub async fn start(
        client: Client,
        settings: &Settings,
        executor: Arc<dyn Executor>,
        mut wishes: UnboundedReceiver<Wish>,
    ) -> Result<Self, Error> {
        let changed = Arc::new(Notify::new());
        let (mut streams, mut loops, mut reports) =
            (JoinSet::new(), JoinSet::new(), JoinSet::new());
        let here = watcher::Config::default().fields(&format!("spec.nodeName={}", settings.node));
        let api: Api<Pod> = Api::all(client.clone());
        let pods = watches::follow(&mut streams, api, here, watches::whole, &changed);
        watches::first_list("pods", &pods, settings.patience).await?;
        let (tell, told) = unbounded_channel();
        let ground = Arc::new(Ground::new(executor, pods, &settings.places, tell.clone()));
        streams.spawn(async move {
            while let Some(wish) = wishes.recv().await {
                drop(tell.send(wish));
            }
        });
        let (stop, stopped) = watch::channel(false);
        let mut devices = Vec::new();
        for kind in [Kind::Online, Kind::Offline] {
            let claimed = ground.claimed_by_services();
            let now = guests::devices(&*ground.executor, kind, &claimed);
            let (teller, told) = watch::channel(now);
            let plugin = Arc::new(DevicePlugin::new(kind, Arc::clone(&ground), told));
            let registration = Plugin {
                folder: settings.places.plugins.clone(),
                resource: DevicePlugin::resource(kind),
                options: DevicePlugin::options(kind),
            };
            loops.spawn(registration.run(plugin, stopped.clone()));
            devices.push((kind, teller));
        }
        if let Some(sockets) = &settings.dra {
            start_driver(&mut loops, &client, settings, sockets, &ground, &stopped).await?;
        }
        let urgent = Arc::new(Notify::new());
        let services = Arc::new(report::Services::default());
        let teller = Arc::new(Teller::new(client.clone(), "muxflow-agent", &settings.node));
        let later = Later::new(Arc::clone(&teller));
        let advice = later.clone();
        let advise = move |pod, what| advice.tell(pod, "NoPreStop", "Running", what);
        let local = guests::Local::new(Arc::clone(&ground), devices, Arc::clone(&urgent), advise);
        loops.spawn(local.run(changed, stopped.clone()));
        let reporter = report::Reporter::new(
            client.clone(),
            Arc::clone(&ground),
            settings,
            Arc::clone(&services),
        );
        let (leave, leaves) = watch::channel(false);
        reports.spawn(reporter.run(urgent, leaves));
        let evictor = evict::Evictor::new(client, Arc::clone(&ground), teller);
        loops.spawn(evictor.run(told, stopped));
        Ok(Node { ground, services, later, leave, reports, stop, loops, streams })
    }

    /// Says on a guest's pod what it did, so that its owner and who operates the cluster see it.
    pub fn blame(&self, job: &JobId, what: &str) {
        if let Some(pod) = self.ground.name_of(job) {
            self.later.tell(pod, "CausedGpuError", "Running", what.to_owned());
        }
    }

    /// What a page of metrics needs; it may outlive the node.
    pub fn metrics(&self) -> impl Fn() -> String + Send + 'static {
        let (ground, services) = (Arc::clone(&self.ground), Arc::clone(&self.services));
        move || metrics::render(&*ground.executor, &services)
    }

    /// An error once a loop has ended that nobody told to: the agent cannot do its work without any of
    /// them, and must be started anew.
    pub fn check(&mut self) -> Result<(), Error> {
        for tasks in [&mut self.reports, &mut self.loops, &mut self.streams] {
            watches::all_run("a loop of the node's side", tasks)?;
        }
        Ok(())
    }

    /// Ends all loops. Pods stay as they are. First the cluster is told that nobody is to come: a pod
    /// that finds no plugin is rejected by the kubelet, and its Job pays for that.
    pub async fn stop(mut self) {
        self.leave.send_replace(true);
        if tokio::time::timeout(LAST_WORDS, self.reports.join_next()).await.is_err() {
            tracing::warn!("the cluster could not be told in time that the agent leaves");
        }
        tokio::time::sleep(LATE_COMERS).await;
        self.stop.send_replace(true);
        let ends = async { while self.loops.join_next().await.is_some() {} };
        if tokio::time::timeout(ENDS_WITHIN, ends).await.is_err() {
            tracing::warn!("a loop of the node's side does not end");
        }
        for mut tasks in [self.reports, self.loops, self.streams] {
            tasks.shutdown().await;
        }
    }
}

/// The driver for claims, where the cluster has them; elsewhere the device plugin is all there is.
async fn start_driver(
    tasks: &mut JoinSet<()>,
    client: &Client,
    settings: &Settings,
    sockets: &Sockets,
    ground: &Arc<Ground>,
    stopped: &watch::Receiver<bool>,
) -> Result<(), Error> {
    let Some(cdi) = settings.places.cdi.clone() else {
        let problem = "needs the container device interface: do not switch it off".to_owned();
        return Err(Error::Setting { setting: "dra", problem });
    };
    let served = slice::is_served(client).await.map_err(Error::request("look for", dra::API))?;
    if !served {
        tracing::warn!("the cluster does not serve {}: no driver for claims", dra::API);
        return Ok(());
    }
    let driver =
        Driver::new(client.clone(), Arc::clone(ground), &settings.node, sockets.clone(), cdi);
    let driver = Arc::new(driver);
    let publisher = slice::Publisher::new(client.clone(), Arc::clone(ground), &settings.node);
    tasks.spawn(publisher.run(Arc::clone(&driver.registered), stopped.clone()));
    tasks.spawn(driver.run(stopped.clone()));
    Ok(())
}
