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
use k8s_openapi::api::core::v1::{Node, Pod};
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
    /// Told at each change.
    pub(crate) changed: Arc<Notify>,
    // Ends the watches when it is dropped.
    _tasks: JoinSet<()>,
}

impl Watches {
    /// Opens all watches and waits for their first lists.
    pub(crate) async fn open(client: &Client, patience: Duration) -> Result<Self, Error> {
        let changed = Arc::new(Notify::new());
        let mut tasks = JoinSet::new();
        let all = watcher::Config::default();
        let living =
            watcher::Config::default().fields("status.phase!=Succeeded,status.phase!=Failed");
        let watches = Watches {
            pods: follow(&mut tasks, Api::all(client.clone()), living, &changed),
            nodes: follow(&mut tasks, Api::all(client.clone()), all.clone(), &changed),
            gpus: follow(&mut tasks, Api::all(client.clone()), all.clone(), &changed),
            profiles: follow(&mut tasks, Api::all(client.clone()), all.clone(), &changed),
            models: follow(&mut tasks, Api::all(client.clone()), all.clone(), &changed),
            jobs: follow(&mut tasks, Api::all(client.clone()), all, &changed),
            changed,
            _tasks: tasks,
        };
        first_list("pods", &watches.pods, patience).await?;
        first_list("nodes", &watches.nodes, patience).await?;
        first_list("gpus", &watches.gpus, patience).await?;
        first_list("profiles", &watches.profiles, patience).await?;
        first_list("models", &watches.models, patience).await?;
        first_list("jobs", &watches.jobs, patience).await?;
        Ok(watches)
    }
}

pub(crate) fn follow<K>(
    tasks: &mut JoinSet<()>,
    api: Api<K>,
    config: watcher::Config,
    changed: &Arc<Notify>,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (reader, writer) = reflector::store();
    let changed = changed.clone();
    let stream = watcher(api, config)
        .default_backoff()
        .modify(|object| object.meta_mut().managed_fields = None)
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
