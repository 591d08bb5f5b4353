//! All services of the machine: declared, looked at and removed; remembered over a restart.
//!
//! When the manager goes, the services stay: only the fronts close. The next manager finds the
//! replicas again by what was written down.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use muxflow_api::service::{LatencyView, ServiceDeclaration, ServiceView};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::watch;

use crate::ServiceError;
use crate::executor::Executor;
use crate::front::{Counts, Front};
use crate::latency::LatencyWindow;
use crate::pool::WINDOW;
use crate::service::{self, PlaceBook, Remembered, Service};
use crate::service_loop::{Order, ServiceLoop, front_latency, view_of};
use crate::spec::ServiceSpec;
use crate::state;

struct Entry {
    orders: UnboundedSender<Order>,
    view: Arc<Mutex<ServiceView>>,
    front: Arc<Front>,
    address: SocketAddr,
    stop_front: watch::Sender<bool>,
    serving: tokio::task::JoinHandle<()>,
    task: tokio::task::JoinHandle<()>,
    /// Closed when the loop has ended.
    gone: watch::Receiver<()>,
    /// It was told to leave.
    leaving: bool,
}

/// A service that is written down and was not taken up.
struct LeftOut {
    declared: ServiceDeclaration,
    remembered: Vec<Remembered>,
    path: PathBuf,
    error_text: String,
}

impl LeftOut {
    fn view(&self) -> ServiceView {
        ServiceView {
            declared: self.declared.clone(),
            address: String::new(),
            wanted_replicas: self.declared.min_replicas,
            replicas: Vec::new(),
            to_restart: 0,
            latency: LatencyView::default(),
            requests_total: 0,
            failed_total: 0,
            retried_total: 0,
            waiting_for: Some(format!(
                "not taken up: {}; declare the service again or remove it",
                self.error_text
            )),
        }
    }
}

/// An error with what lies under it.
fn error_text(error: &ServiceError) -> String {
    let source = std::error::Error::source(error).map(|source| format!(": {source}"));
    format!("{error}{}", source.unwrap_or_default())
}

/// What stands for a declaration that cannot be read.
fn nothing_known(name: &str) -> ServiceDeclaration {
    ServiceDeclaration { name: name.to_owned(), ..ServiceDeclaration::default() }
}

/// All services.
pub struct ServiceManager {
    executor: Arc<dyn Executor>,
    runtime: Handle,
    dir: PathBuf,
    book: PlaceBook,
    services: Arc<Mutex<BTreeMap<String, Entry>>>,
    left_out: Mutex<BTreeMap<String, LeftOut>>,
    /// Held from looking for a name to having taken it.
    declaring: Mutex<()>,
}

impl std::fmt::Debug for ServiceManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServiceManager").field("dir", &self.dir).finish_non_exhaustive()
    }
}

impl ServiceManager {
    /// Takes up what an earlier manager left in `dir`. A service that cannot be taken up is listed
    /// with the reason, and its file stays.
    pub fn start(
        executor: Arc<dyn Executor>,
        dir: &Path,
        runtime: Handle,
    ) -> Result<Self, ServiceError> {
        let wrong = |path: &Path, reason: String| ServiceError::State { path: path.into(), reason };
        std::fs::create_dir_all(dir).map_err(|e| wrong(dir, e.to_string()))?;
        let manager = ServiceManager {
            executor,
            runtime,
            dir: dir.to_owned(),
            book: PlaceBook::default(),
            services: Arc::default(),
            left_out: Mutex::default(),
            declaring: Mutex::default(),
        };
        let entries = std::fs::read_dir(dir).map_err(|e| wrong(dir, e.to_string()))?;
        let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        files.retain(|path| path.extension().is_some_and(|end| end == "json"));
        files.sort();
        for path in files {
            // One that cannot be taken up must not keep the others and all jobs from running.
            if let Err(left) = manager.take_up(&path) {
                let (path, error) = (path.display(), &left.error_text);
                tracing::error!(%path, error, "a service is not taken up");
                manager.left_out().insert(left.declared.name.clone(), *left);
            }
        }
        Ok(manager)
    }

    fn take_up(&self, path: &Path) -> Result<(), Box<LeftOut>> {
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let stem = stem.unwrap_or_default();
        let left = |declared, remembered, error: &ServiceError| {
            let (path, error_text) = (path.to_owned(), error_text(error));
            Box::new(LeftOut { declared, remembered, path, error_text })
        };
        let (declared, remembered) =
            state::read(path).map_err(|error| left(nothing_known(&stem), Vec::new(), &error))?;
        if declared.name != stem {
            let reason = format!(
                "it declares `{}`, and a file has the name of its service; remove it or give it that name",
                declared.name
            );
            let error = ServiceError::State { path: path.to_owned(), reason };
            return Err(left(nothing_known(&stem), Vec::new(), &error));
        }
        let launched = self.launch(&declared, &remembered, false);
        launched.map(drop).map_err(|error| left(declared, remembered, &error))
    }

    fn left_out(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, LeftOut>> {
        self.left_out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn services(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Entry>> {
        self.services.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Declares a service, or changes one of the same name. Returns where its front listens.
    pub fn declare(&self, declared: &ServiceDeclaration) -> Result<SocketAddr, ServiceError> {
        let spec = ServiceSpec::new(declared)?;
        let _alone = self.declaring.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sent = None;
        if let Some(entry) = self.services().get(&declared.name) {
            if entry.leaving {
                return Err(ServiceError::Declaration {
                    service: declared.name.clone(),
                    field: "name",
                    problem:
                        "is that of a service that is leaving: declare it again when it is gone"
                            .into(),
                });
            }
            let (asked, has) = (spec.listen.port(), entry.address.port());
            if asked != 0 && asked != has {
                return Err(ServiceError::Declaration {
                    service: declared.name.clone(),
                    field: "port",
                    problem: format!(
                        "is {asked}, but the front listens on {has}: remove the service first"
                    ),
                });
            }
            let (answer, answered) = mpsc::channel();
            let order = Order::Declare(Box::new((declared.clone(), spec)), answer);
            sent = entry.orders.send(order).is_ok().then_some((entry.address, answered));
        }
        if let Some((address, answered)) = sent {
            // Not under the lock of the list: the loop may be at its disk.
            return match answered.recv() {
                Ok(written) => written.map(|()| address),
                Err(_) => Err(self.unknown(&declared.name)),
            };
        }
        // One that was not taken up is taken up now, with the replicas that it had.
        let remembered = self.left_out().get(&declared.name).map(|left| left.remembered.clone());
        let address = self.launch(declared, &remembered.unwrap_or_default(), true)?;
        self.left_out().remove(&declared.name);
        Ok(address)
    }

    /// `must_write`: what is declared now is on the disk before anybody is told that it is declared.
    /// What was there before goes on even when the disk is full.
    fn launch(
        &self,
        declared: &ServiceDeclaration,
        remembered: &[Remembered],
        must_write: bool,
    ) -> Result<SocketAddr, ServiceError> {
        let spec = ServiceSpec::new(declared)?;
        let failed = |source| ServiceError::Listen {
            service: declared.name.clone(),
            address: spec.listen,
            source,
        };
        let listener = std::net::TcpListener::bind(spec.listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let _inside = self.runtime.enter();
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let mut declared = declared.clone();
        // The same port again after a restart, or clients would have to look for it.
        declared.port = address.port();
        let path = self.dir.join(format!("{}.json", declared.name));
        let written = state::text(&declared, remembered);
        let written = match state::write(&path, &written) {
            Ok(()) => Some(written),
            Err(_) if !must_write => None,
            Err(source) => {
                let service = declared.name;
                return Err(ServiceError::NotWritten { service, path, source });
            }
        };
        let service = Service::new(
            spec.clone(),
            Arc::clone(&self.executor),
            Arc::clone(&self.book),
            self.runtime.clone(),
            remembered,
        );
        let front = Arc::new(Front {
            pool: Arc::clone(&service.pool),
            counts: Counts::default(),
            request_within_ms: AtomicU64::new(declared.request_within_ms),
            latency: Mutex::new(LatencyWindow::new(WINDOW.0, WINDOW.1)),
        });
        let (stop_front, stopped) = watch::channel(false);
        let serving = self.runtime.spawn(Arc::clone(&front).serve(listener, stopped));
        let (orders, received) = unbounded_channel();
        let (here, gone) = watch::channel(());
        let view = Arc::new(Mutex::new(view_of(&declared, address, &service, &front)));
        let loop_ = ServiceLoop {
            declared: declared.clone(),
            address,
            service,
            front: Arc::clone(&front),
            view: Arc::clone(&view),
            path,
            written,
            told: false,
            _gone: here,
        };
        let task = self.runtime.spawn(loop_.run(received));
        let leaving = false;
        let entry =
            Entry { orders, view, front, address, stop_front, serving, task, gone, leaving };
        self.services().insert(declared.name.clone(), entry);
        Ok(address)
    }

    /// All services, by name.
    pub fn list(&self) -> Vec<ServiceView> {
        let view = |entry: &Entry| {
            let mut view = entry.view.lock().unwrap_or_else(PoisonError::into_inner).clone();
            view.latency = front_latency(&entry.front);
            view
        };
        let mut views: Vec<ServiceView> = self.services().values().map(view).collect();
        views.extend(self.left_out().values().map(LeftOut::view));
        views.sort_by(|a, b| a.declared.name.cmp(&b.declared.name));
        views
    }

    /// One service.
    pub fn get(&self, name: &str) -> Result<ServiceView, ServiceError> {
        let found = self.list().into_iter().find(|view| view.declared.name == name);
        found.ok_or_else(|| self.unknown(name))
    }

    fn unknown(&self, name: &str) -> ServiceError {
        let mut known: Vec<String> = self.services().keys().cloned().collect();
        known.extend(self.left_out().keys().cloned());
        known.sort();
        let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
        ServiceError::Unknown { service: name.to_owned(), known }
    }

    /// Replaces every replica, one after another, without losing a request.
    pub fn restart(&self, name: &str) -> Result<(), ServiceError> {
        if let Some(left) = self.left_out().get(name) {
            let (service, reason) = (name.to_owned(), left.error_text.clone());
            return Err(ServiceError::NotTakenUp { service, reason });
        }
        self.refuse_in_shadow(name)?;
        let sent = self.services().get(name).map(|entry| entry.orders.send(Order::Restart).is_ok());
        if sent == Some(true) { Ok(()) } else { Err(self.unknown(name)) }
    }

    /// What would have to stop or start a replica is refused in shadow mode.
    fn refuse_in_shadow(&self, name: &str) -> Result<(), ServiceError> {
        let runs = |entry: &Entry| {
            !entry.view.lock().unwrap_or_else(PoisonError::into_inner).replicas.is_empty()
        };
        if self.executor.is_shadow() && self.services().get(name).is_some_and(runs) {
            return Err(ServiceError::Shadow { service: name.to_owned() });
        }
        Ok(())
    }

    /// Lets requests under way finish, stops all replicas and forgets the service. Its name is free
    /// for another one only then.
    pub async fn remove(&self, name: &str) -> Result<(), ServiceError> {
        let left = self.left_out().remove(name);
        if let Some(left) = left {
            return self.forget(name, left);
        }
        self.refuse_in_shadow(name)?;
        let mut gone = {
            let mut services = self.services();
            let Some(entry) = services.get_mut(name) else {
                drop(services);
                return Err(self.unknown(name));
            };
            entry.leaving = true;
            entry.stop_front.send_replace(true);
            drop(entry.orders.send(Order::Remove));
            entry.gone.clone()
        };
        // Whoever asked may hang up before it is gone; its name is free then all the same.
        let (services, name) = (Arc::clone(&self.services), name.to_owned());
        let leaving = self.runtime.spawn(async move {
            while gone.changed().await.is_ok() {}
            let mut services = services.lock().unwrap_or_else(PoisonError::into_inner);
            if services.get(&name).is_some_and(|entry| entry.orders.is_closed()) {
                services.remove(&name);
            }
        });
        drop(leaving.await);
        Ok(())
    }

    /// Stops the replicas of a service that was not taken up, and removes its file.
    fn forget(&self, name: &str, left: LeftOut) -> Result<(), ServiceError> {
        let forgotten = self.stop_and_forget(name, &left.path);
        if forgotten.is_err() {
            self.left_out().insert(name.to_owned(), left);
        }
        forgotten
    }

    fn stop_and_forget(&self, name: &str, path: &Path) -> Result<(), ServiceError> {
        for place in self.executor.places().iter().filter(|place| place.is_declared) {
            let Some((replica, _)) = &place.taken_by else { continue };
            if !service::is_replica_of(name, replica) {
                continue;
            }
            if self.executor.is_shadow() {
                return Err(ServiceError::Shadow { service: name.to_owned() });
            }
            self.executor.stop(&place.id, replica)?;
        }
        std::fs::remove_file(path).map_err(|e| ServiceError::State {
            path: path.to_owned(),
            reason: format!("it cannot be removed: {e}"),
        })
    }

    /// Closes the fronts, gives the requests under way so long to end, and ends the runtime that all
    /// of it runs on. Replicas go on.
    pub fn close(&self, runtime: tokio::runtime::Runtime, within: Duration) {
        let fronts = self.shutdown();
        // A runtime that is shut down drops what is under way: it is waited for before.
        let ended = runtime.block_on(async {
            let all = async {
                for front in fronts {
                    drop(front.await);
                }
            };
            tokio::time::timeout(within, all).await
        });
        if ended.is_err() {
            tracing::warn!(?within, "requests that took longer were cut off");
        }
        runtime.shutdown_timeout(Duration::from_millis(100));
    }

    /// Closes the fronts; replicas go on. What comes back ends when the requests under way have: as
    /// long as that takes, the runtime must live.
    pub fn shutdown(&self) -> Vec<tokio::task::JoinHandle<()>> {
        let all = std::mem::take(&mut *self.services()).into_values();
        all.map(|entry| {
            entry.stop_front.send_replace(true);
            entry.task.abort();
            entry.serving
        })
        .collect()
    }
}
