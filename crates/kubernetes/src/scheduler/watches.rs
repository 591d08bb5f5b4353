//! Copies of the cluster's objects, kept current by watches.
//!
//! A watch that breaks is opened again after a growing wait, from a new list if need be. The first
//! lists are read from the store and not from a cache of the API server, so that a new leader sees
//! every binding that the old one made.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Node, Pod, PodSpec};
use kube::api::ObjectMeta;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::Error;
use crate::resource::{Gpu, Model, Profile};

/// All that the scheduler watches.
pub(crate) struct Watches {
    pub(crate) pods: Store<Pod>,
    pub(crate) nodes: Store<Node>,
    pub(crate) gpus: Store<Gpu>,
    pub(crate) profiles: Store<Profile>,
    pub(crate) models: Store<Model>,
    pub(crate) jobs: Store<Job>,
    /// Told at each change but those of GPUs.
    pub(crate) changed: Arc<Notify>,
    /// Told when a GPU was reported: in a large cluster that is all the time.
    pub(crate) reported: Arc<Notify>,
    // Ends the watches when it is dropped.
    tasks: JoinSet<()>,
}

impl Watches {
    /// Opens all watches and waits for their first lists.
    pub(crate) async fn open(client: &Client, patience: Duration) -> Result<Self, Error> {
        let (changed, reported) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let mut tasks = JoinSet::new();
        let all = watcher::Config::default();
        let living =
            watcher::Config::default().fields("status.phase!=Succeeded,status.phase!=Failed");
        let watches = Watches {
            pods: follow(&mut tasks, Api::all(client.clone()), living, slim_pod, &changed),
            nodes: follow(&mut tasks, Api::all(client.clone()), all.clone(), slim_node, &changed),
            gpus: follow(&mut tasks, Api::all(client.clone()), all.clone(), whole, &reported),
            profiles: follow(&mut tasks, Api::all(client.clone()), all.clone(), whole, &changed),
            models: follow(&mut tasks, Api::all(client.clone()), all.clone(), whole, &changed),
            jobs: follow(&mut tasks, Api::all(client.clone()), all, slim_job, &changed),
            changed,
            reported,
            tasks,
        };
        first_list("pods", &watches.pods, patience).await?;
        first_list("nodes", &watches.nodes, patience).await?;
        first_list("gpus", &watches.gpus, patience).await?;
        first_list("profiles", &watches.profiles, patience).await?;
        first_list("models", &watches.models, patience).await?;
        first_list("jobs", &watches.jobs, patience).await?;
        Ok(watches)
    }

    /// An error once a watch has ended: what it has shown would never change again.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        all_run("a watch of the scheduler", &mut self.tasks)
    }
}

/// An error once one of these tasks has ended, which none does by itself unless it panics. Nobody else
/// would notice: what is left of the program goes on without it.
pub(crate) fn all_run(what: &'static str, tasks: &mut JoinSet<()>) -> Result<(), Error> {
    match tasks.try_join_next() {
        None => Ok(()),
        Some(Ok(())) => Err(Error::Ended { what, why: "nobody told it to".to_owned() }),
        Some(Err(error)) => Err(Error::Ended { what, why: error.to_string() }),
    }
}

/// Keeps an object as it is.
pub(crate) fn whole<K>(_: &mut K) {}

/// Of all pods of a cluster, only what a scheduler reads: memory is what this costs.
fn slim_pod(pod: &mut Pod) {
    forget_applied(pod.meta_mut());
    if let Some(status) = &mut pod.status {
        status.container_statuses = None;
        status.init_container_statuses = None;
    }
    if let Some(spec) = &mut pod.spec {
        slim_spec(spec);
    }
}

fn slim_spec(spec: &mut PodSpec) {
    for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
        container.args = None;
        container.command = None;
        container.env = None;
        container.env_from = None;
        container.volume_mounts = None;
        container.lifecycle = None;
        container.liveness_probe = None;
        container.readiness_probe = None;
        container.startup_probe = None;
    }
}

/// Of a Job, what it does about evictions.
fn slim_job(job: &mut Job) {
    forget_applied(job.meta_mut());
    if let Some(spec) = &mut job.spec {
        spec.template.spec = None;
    }
    job.status = None;
}

/// A node lists every image that it holds.
fn slim_node(node: &mut Node) {
    forget_applied(node.meta_mut());
    if let Some(status) = &mut node.status {
        status.images = None;
        status.conditions = None;
        status.volumes_in_use = None;
        status.volumes_attached = None;
    }
}

/// The whole object once more, as text.
fn forget_applied(meta: &mut ObjectMeta) {
    if let Some(annotations) = &mut meta.annotations {
        annotations.remove("kubectl.kubernetes.io/last-applied-configuration");
    }
}

pub(crate) fn follow<K>(
    tasks: &mut JoinSet<()>,
    api: Api<K>,
    config: watcher::Config,
    slim: fn(&mut K),
    changed: &Arc<Notify>,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (reader, writer) = reflector::store();
    let changed = changed.clone();
    let stream = watcher(api, config)
        .default_backoff()
        .modify(move |object| {
            object.meta_mut().managed_fields = None;
            slim(object);
        })
        .reflect(writer);
    tasks.spawn(stream.for_each(move |event| {
        match event {
            Ok(_) => changed.notify_one(),
            Err(error) => {
                tracing::warn!(kind = %K::kind(&()), %error, "a watch broke; it is opened again");
            }
        }
        std::future::ready(())
    }));
    reader
}

pub(crate) async fn first_list<K>(
    kind: &'static str,
    store: &Store<K>,
    patience: Duration,
) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    match tokio::time::timeout(patience, store.wait_until_ready()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) | Err(_) => Err(Error::Watch { kind, waited: patience }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_has_ended_is_noticed() {
        let mut tasks = JoinSet::new();
        tasks.spawn(std::future::pending());
        assert!(all_run("this", &mut tasks).is_ok());
        tasks.spawn(async { panic!("on purpose") });
        let said = loop {
            tokio::task::yield_now().await;
            if let Err(error) = all_run("this", &mut tasks) {
                break error.to_string();
            }
        };
        assert!(said.contains("this has ended") && said.contains("on purpose"), "{said}");
        assert!(all_run("this", &mut tasks).is_ok(), "told once");
    }
}
