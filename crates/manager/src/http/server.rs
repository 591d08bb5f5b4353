//! The server: listens on a local socket and, when asked to, on TCP; in a thread of its own, which is
//! the only place with an async runtime.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use axum::http::StatusCode;
use axum::routing::get;
use axum::{Extension, Json, Router, middleware};
use muxflow_agent::descriptors;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use utoipa_axum::router::OpenApiRouter;

use super::auth::{Peer, by_peer, by_token};
use super::connections;
use super::places::Places;
use super::problem::Refusal;
use super::seats::Seats;
use crate::error::{ManagerError, Result};
use crate::manager::Manager;
use crate::user::Tokens;

/// How long requests that are under way may take when the server leaves.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// A client that we wait for and that is silent for so long is hung up on, unless told otherwise.
pub const SILENCE: Duration = Duration::from_secs(30);

/// So many clients are served at a time on each of the two, and fewer where few files may be open.
const MOST_CLIENTS: usize = 1024;

/// Tells long answers that the server leaves.
#[derive(Debug, Clone)]
pub struct Leaving(watch::Receiver<bool>);

impl Leaving {
    /// Waits until it does.
    pub async fn wait(&mut self) {
        // A sender that is gone means the same.
        drop(self.0.wait_for(|leaves| *leaves).await);
    }
}

/// Where to listen.
#[derive(Debug, Clone)]
pub struct Listen {
    /// The local socket.
    pub socket: PathBuf,
    /// Its mode: who may connect.
    pub socket_mode: u32,
    /// A TCP address, with the tokens that are accepted there.
    pub tcp: Option<(String, Tokens)>,
    /// A client that is silent for so long while we wait for its request is hung up on.
    pub silence: Duration,
}

/// What others add to the server.
#[derive(Default)]
pub struct Extras {
    /// More routes under `/v1`, described like the rest; their callers are known too.
    pub routes: OpenApiRouter,
    /// Pages without an API, such as the dashboard; anybody who can connect may fetch them.
    pub pages: Router,
}

impl std::fmt::Debug for Extras {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Extras").finish_non_exhaustive()
    }
}

/// A server that runs.
#[derive(Debug)]
pub struct Server {
    leave: watch::Sender<bool>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
    address: Option<SocketAddr>,
}

fn file(operation: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> ManagerError {
    let path = path.to_owned();
    move |source| ManagerError::File { operation, path, source }
}

/// Takes the place of a socket that nobody listens on any more; one that is in use stays.
fn bind_socket(path: &Path, mode: u32) -> Result<std::os::unix::net::UnixListener> {
    if let Some(dir) = path.parent() {
        muxflow_agent::private::own_directory(dir, 0o755).map_err(file("use", dir))?;
    }
    if path.exists() {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            return Err(ManagerError::AnotherManager { path: path.to_owned() });
        }
        fs::remove_file(path).map_err(file("remove", path))?;
    }
    // Made under another name, so that nobody connects before its mode is set.
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    drop(fs::remove_file(&beside));
    let listener =
        std::os::unix::net::UnixListener::bind(&beside).map_err(file("listen on", path))?;
    fs::set_permissions(&beside, fs::Permissions::from_mode(mode))
        .map_err(file("set the mode of", path))?;
    fs::rename(&beside, path).map_err(file("rename to", path))?;
    listener.set_nonblocking(true).map_err(file("listen on", path))?;
    Ok(listener)
}

impl Server {
    /// Listens, and answers until it is stopped.
    pub fn start(manager: Arc<Manager>, listen: &Listen, extras: Extras) -> Result<Self> {
        let unix = bind_socket(&listen.socket, listen.socket_mode)?;
        let tcp = match &listen.tcp {
            None => None,
            Some((address, tokens)) => {
                let failed = |e| file("listen on", Path::new(address))(e);
                let listener = std::net::TcpListener::bind(address).map_err(failed)?;
                listener.set_nonblocking(true).map_err(failed)?;
                Some((listener, Arc::new(tokens.clone())))
            }
        };
        let address = tcp.as_ref().and_then(|(listener, _)| listener.local_addr().ok());
        let (leave, leaving) = watch::channel(false);
        let (api, pages) = assemble(manager, extras, &leaving);
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("api")
            .enable_all()
            .build()
            .map_err(file("start a thread for", &listen.socket))?;
        let silence = listen.silence;
        let body = move || {
            runtime.block_on(serve(unix, tcp, api, pages, silence, leaving));
            runtime.shutdown_timeout(Duration::from_secs(1));
        };
        let thread = std::thread::Builder::new().name("api".into()).spawn(body);
        let thread = thread.map_err(file("start a thread for", &listen.socket))?;
        Ok(Server { leave, thread: Some(thread), socket: listen.socket.clone(), address })
    }

    /// The TCP address, when it listens on one.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// The local socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.leave.send_replace(true);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
        drop(fs::remove_file(&self.socket));
    }
}

async fn unknown() -> Refusal {
    Refusal::new(StatusCode::NOT_FOUND, "not-found", "there is no such page; see /v1/openapi.json")
}

async fn wrong_method() -> Refusal {
    Refusal::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method-not-allowed",
        "this page has no such method; see /v1/openapi.json",
    )
}

/// The API, whose callers must be known, and the pages beside it.
fn assemble(
    manager: Arc<Manager>,
    extras: Extras,
    leaving: &watch::Receiver<bool>,
) -> (Router, Router) {
    let own = super::routes().with_state(manager);
    let (api, description) = own.merge(extras.routes).split_for_parts();
    let description = Arc::new(description);
    let api = api
        .route(
            "/v1/openapi.json",
            get(move || {
                let description = Arc::clone(&description);
                async move { Json(utoipa::openapi::OpenApi::clone(&description)) }
            }),
        )
        .method_not_allowed_fallback(wrong_method)
        .layer(Extension(Leaving(leaving.clone())));
    (api, extras.pages)
}

async fn serve(
    unix: std::os::unix::net::UnixListener,
    tcp: Option<(std::net::TcpListener, Arc<Tokens>)>,
    api: Router,
    pages: Router,
    silence: Duration,
    leaving: watch::Receiver<bool>,
) {
    let local = api.clone().layer(middleware::from_fn(by_peer)).merge(pages.clone());
    // Each has places of its own: clients on TCP keep nobody from the local socket.
    let most = (descriptors::most() / 8).clamp(8, MOST_CLIENTS);
    let free = || Arc::new(Semaphore::new(most));
    let seats = Seats::new(most);
    let admit = |stream: &UnixStream| {
        let peer = Peer::of(stream);
        match peer.common_uid() {
            Some(uid) => seats.take(uid).map(|seat| (peer, Some(seat))),
            None => Some((peer, None)),
        }
    };
    let stop = Leaving(leaving.clone());
    let on_socket = async {
        match UnixListener::from_std(unix) {
            Ok(listener) => {
                let places = Places::new(listener, &free());
                let app = local.fallback(unknown);
                connections::serve(places, app, admit, silence, stop).await;
            }
            Err(error) => tracing::error!(error = %error, "cannot listen on the local socket"),
        }
    };
    let stop = Leaving(leaving.clone());
    let on_tcp = async {
        let Some((listener, tokens)) = tcp else { return };
        let app = api.layer(middleware::from_fn_with_state(tokens, by_token)).merge(pages);
        match TcpListener::from_std(listener) {
            Ok(listener) => {
                let places = Places::new(listener, &free());
                let admit = |_: &_| Some(((), None));
                connections::serve(places, app.fallback(unknown), admit, silence, stop).await;
            }
            Err(error) => tracing::error!(error = %error, "cannot listen on TCP"),
        }
    };
    let mut stop = Leaving(leaving);
    let too_long = async {
        stop.wait().await;
        tokio::time::sleep(LEAVE_WITHIN).await;
    };
    tokio::select! {
        _ = async { tokio::join!(on_socket, on_tcp) } => {}
        () = too_long => tracing::info!("left requests behind that did not end"),
    }
}
