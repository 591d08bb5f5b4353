//! A plugin's life beside a kubelet: serve on a socket, introduce yourself, and begin again when the
//! kubelet has restarted.
//!
//! A kubelet that starts deletes all sockets of plugins and forgets them; capacity is 0 until each
//! has introduced itself again. So two things are watched: the plugin's own socket, and the identity
//! of the kubelet's. A socket file that a dead kubelet left refuses connections; that is tried again.
//! And a kubelet that lost its stream of devices, for whatever reason, does not come back by itself: a
//! plugin to which nobody listens introduces itself again.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::grpc::{self, Routes};
use super::wire::{Empty, Options, REGISTER, RegisterRequest, VERSION};

/// How often the sockets are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long nobody may listen; a kubelet listens as soon as it has taken the plugin.
const UNHEARD_AT_MOST: Duration = Duration::from_secs(10);
/// How long an introduction may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// One plugin, for one resource.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The kubelet's folder of plugins.
    pub folder: PathBuf,
    /// What its devices are requested as.
    pub resource: &'static str,
    /// What it can do.
    pub options: Options,
}

/// Which file this is: a file that was deleted and made again is another one.
pub(crate) fn identity(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec()))
}

impl Plugin {
    fn socket(&self) -> PathBuf {
        self.folder.join(self.endpoint())
    }

    fn endpoint(&self) -> String {
        format!("{}.sock", self.resource.replace('/', "-"))
    }

    /// Serves and stays registered until `stop` says true or its sender is gone.
    pub async fn run(self, routes: Arc<impl Routes>, mut stop: watch::Receiver<bool>) {
        while !*stop.borrow() {
            let (end, ended) = tokio::sync::oneshot::channel::<()>();
            let until = async {
                drop(ended.await);
            };
            match grpc::serve(&self.socket(), Arc::clone(&routes), until) {
                Ok(_server) => self.stay(&*routes, &mut stop).await,
                Err(error) => {
                    let socket = self.socket();
                    tracing::warn!(socket = %socket.display(), %error, "the plugin cannot listen; is the kubelet's folder mounted?");
                    pause(&mut stop, LOOK_EVERY * 4).await;
                }
            }
            drop(end);
        }
        drop(std::fs::remove_file(self.socket()));
    }

    /// Introduces the plugin, and returns when it must begin again.
    async fn stay(&self, routes: &impl Routes, stop: &mut watch::Receiver<bool>) {
        let own = identity(&self.socket());
        let kubelet = self.folder.join("kubelet.sock");
        let mut registered_with = None;
        let mut heard = Instant::now();
        loop {
            let present = identity(&kubelet);
            if routes.has_listener() {
                heard = Instant::now();
            } else if registered_with.is_some() && heard.elapsed() > UNHEARD_AT_MOST {
                tracing::warn!(resource = self.resource, "the kubelet no longer listens");
                registered_with = None;
            }
            if present.is_some() && present != registered_with {
                match self.register(&kubelet).await {
                    Ok(()) => {
                        tracing::info!(resource = self.resource, "registered with the kubelet");
                        (registered_with, heard) = (present, Instant::now());
                    }
                    Err(error) => {
                        tracing::warn!(resource = self.resource, %error, "the kubelet does not take the plugin yet");
                    }
                }
            }
            pause(stop, LOOK_EVERY).await;
            if *stop.borrow() || identity(&self.socket()) != own {
                return;
            }
        }
    }

    async fn register(&self, kubelet: &Path) -> Result<(), tonic::Status> {
        let request = RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: self.endpoint(),
            resource_name: self.resource.to_owned(),
            options: Some(self.options),
        };
        let introduce = async {
            let channel = grpc::connect(kubelet)
                .await
                .map_err(|error| tonic::Status::unavailable(format!("{error:?}")))?;
            grpc::ask::<_, Empty>(&channel, REGISTER, request).await
        };
        let answer = tokio::time::timeout(PATIENCE, introduce).await;
        answer.map_err(|_| tonic::Status::deadline_exceeded("no answer"))?.map(|_| ())
    }
}

/// Waits, or until everything ends.
pub(crate) async fn pause(stop: &mut watch::Receiver<bool>, time: Duration) {
    // Whichever comes first; a sender that is gone means that everything ends.
    drop(tokio::time::timeout(time, stop.wait_for(|stop| *stop)).await);
}
