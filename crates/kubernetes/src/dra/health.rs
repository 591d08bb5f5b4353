//! How devices that were given by claims are, for the status of their pods: a kubelet of 1.36 asks each
//! driver for it, and asks again every few seconds where nobody answers.
//!
//! A GPU has five states here and three there. What counts is whether the work that holds the device
//! may go on: a state that only keeps others away is well for who is there, and is told in words.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::slice;
use crate::device::grpc::Messages;
use crate::device::plugin::Kind;
use crate::node::ground::Ground;
use crate::resource::State;

/// Kubelet to driver: how are your devices, from now on.
pub const WATCH: &str = "/v1alpha1.DRAResourceHealth/NodeWatchResources";

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// A kubelet takes a device for unknown of which it has not heard for 30 s.
const AGAIN_AFTER: Duration = Duration::from_secs(10);

/// The kubelet asks; there is nothing to say in it.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Ask {}

/// All devices of the driver.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Healths {
    /// Each with its health.
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<DeviceHealth>,
}

/// One device.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DeviceHealth {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub device: Option<Device>,
    /// How it is.
    #[prost(enumeration = "Health", tag = "2")]
    pub health: i32,
    /// When that was found out, in seconds since 1970.
    #[prost(int64, tag = "3")]
    pub at_s: i64,
    /// For how long it counts; none means as long as the kubelet likes.
    #[prost(int64, tag = "4")]
    pub timeout_s: i64,
    /// In words.
    #[prost(string, tag = "5")]
    pub message: String,
}

/// A device by its names.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Device {
    /// The pool that it is of.
    #[prost(string, tag = "1")]
    pub pool: String,
    /// Its name there.
    #[prost(string, tag = "2")]
    pub name: String,
}

/// What a kubelet tells apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Health {
    /// Nobody knows yet.
    Unknown = 0,
    /// Its work may go on.
    Healthy = 1,
    /// Its work cannot stay.
    Unhealthy = 2,
}

/// How a GPU in a state is for who holds it.
fn health(kind: Kind, state: State) -> Health {
    match (state, kind) {
        (State::Init, _) => Health::Unknown,
        (State::Healthy | State::Unhealthy, _) | (State::Overlimit, Kind::Online) => {
            Health::Healthy
        }
        (State::Overlimit, Kind::Offline) | (State::Disabled, _) => Health::Unhealthy,
    }
}

fn all(ground: &Ground, pool: &str) -> Vec<DeviceHealth> {
    let mut devices = Vec::new();
    for gpu in ground.executor.gpus() {
        let reading = ground.executor.read(&gpu.uuid);
        let state = reading.as_ref().map_or(State::Init, |reading| reading.state);
        let why = reading.and_then(|reading| reading.reason);
        let message = match why {
            Some(why) => format!("{state:?}: {why}"),
            None => format!("{state:?}"),
        };
        for kind in [Kind::Online, Kind::Offline] {
            let name = slice::device_name(kind, &gpu.uuid);
            devices.push(DeviceHealth {
                device: Some(Device { pool: pool.to_owned(), name }),
                health: health(kind, state).into(),
                message: message.clone(),
                ..DeviceHealth::default()
            });
        }
    }
    devices
}

/// What a kubelet that listens was told last, and when.
struct Listener {
    ground: Arc<Ground>,
    pool: String,
    told: Option<(Vec<DeviceHealth>, Instant)>,
}

impl Listener {
    /// Waits for the next thing to tell.
    async fn next(mut self) -> (Healths, Self) {
        loop {
            let now = all(&self.ground, &self.pool);
            let known = |(before, at): &(Vec<DeviceHealth>, Instant)| {
                *before == now && at.elapsed() < AGAIN_AFTER
            };
            if !self.told.as_ref().is_some_and(known) {
                let at_s = jiff::Timestamp::now().as_second();
                let dated = |device: &DeviceHealth| DeviceHealth { at_s, ..device.clone() };
                let message = Healths { devices: now.iter().map(dated).collect() };
                self.told = Some((now, Instant::now()));
                return (message, self);
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// Tells at once when something changes, and now and then that nothing has.
pub(crate) fn watch(ground: Arc<Ground>, pool: String) -> Messages<Healths> {
    let listener = Listener { ground, pool, told: None };
    Box::pin(futures::stream::unfold(listener, |listener| async {
        let (message, listener) = listener.next().await;
        Some((Ok(message), listener))
    }))
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;

    use super::*;
    use crate::node::fake::{Fake, Scene};

    #[test]
    fn what_keeps_only_others_away_is_well_for_who_is_there() {
        for (state, online, offline) in [
            (State::Init, Health::Unknown, Health::Unknown),
            (State::Healthy, Health::Healthy, Health::Healthy),
            (State::Unhealthy, Health::Healthy, Health::Healthy),
            (State::Overlimit, Health::Healthy, Health::Unhealthy),
            (State::Disabled, Health::Unhealthy, Health::Unhealthy),
        ] {
            assert_eq!(health(Kind::Online, state), online, "{state:?}");
            assert_eq!(health(Kind::Offline, state), offline, "{state:?}");
        }
    }

    #[tokio::test]
    async fn every_device_is_told_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let scene = Scene::with(Fake::default(), dir.path());
        let mut stream = watch(Arc::clone(&scene.ground), "n1".to_owned());
        let first = stream.next().await.unwrap().unwrap();
        assert_eq!(first.devices.len(), scene.ground.executor.gpus().len() * 2);
        assert!(first.devices.iter().all(|d| d.at_s > 0 && !d.message.is_empty()), "{first:?}");
        let pools = first.devices.iter().filter_map(|d| d.device.as_ref()).map(|d| &d.pool);
        assert!(pools.into_iter().all(|pool| pool == "n1"));
    }
}
