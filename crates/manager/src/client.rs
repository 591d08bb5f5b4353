//! The API from the other side: what the command line uses. One request at a time, over the local
//! socket or TCP.

use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use muxflow_api::problem::Problem;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::error::{ManagerError, Result};
use crate::http::seats;

/// A request that got no answer for so long is given up.
const LIMIT: Duration = Duration::from_secs(60);
/// The environment variable that names the socket.
pub const SOCKET_VARIABLE: &str = "MUXFLOW_SOCKET";

/// Where the manager is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// On this machine.
    Socket(PathBuf),
    /// Elsewhere, with a token.
    Tcp {
        /// Host and port.
        address: String,
        /// The token.
        token: String,
    },
}

/// A caller of the API.
#[derive(Debug)]
pub struct Client {
    place: Place,
    runtime: tokio::runtime::Runtime,
}

/// The default socket of a manager that runs as this user.
pub fn default_socket(uid: u32) -> PathBuf {
    default_run_dir(uid).join("manager.sock")
}

/// Where a manager that runs as this user keeps what is gone after a reboot.
pub fn default_run_dir(uid: u32) -> PathBuf {
    if uid == 0 {
        return "/run/muxflow".into();
    }
    let own = Path::new("/run/user").join(uid.to_string());
    if own.is_dir() { own.join("muxflow") } else { format!("/dev/shm/muxflow-{uid}").into() }
}

/// The socket to call: the one named, that of this user's own manager, or root's.
pub fn find_socket(named: Option<&Path>, uid: u32) -> PathBuf {
    if let Some(path) = named {
        return path.to_owned();
    }
    let own = default_socket(uid);
    let mine = |dir: &Path| {
        use std::os::unix::fs::MetadataExt;
        // Anybody may make a directory of this name where there is no /run/user.
        std::fs::symlink_metadata(dir).is_ok_and(|there| there.is_dir() && there.uid() == uid)
    };
    if own.exists() && own.parent().is_some_and(mine) { own } else { default_socket(0) }
}

fn trouble(text: impl Into<String>) -> ManagerError {
    ManagerError::Client(text.into())
}

fn unreachable(text: impl Into<String>) -> ManagerError {
    ManagerError::Unreachable(text.into())
}

impl Client {
    /// For a manager at this place.
    pub fn new(place: Place) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| trouble(format!("cannot start a runtime: {error}")))?;
        Ok(Client { place, runtime })
    }

    /// Fetches.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.call(Method::GET, path, None)
    }

    /// Sends.
    pub fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).map_err(|error| trouble(error.to_string()))?;
        self.call(Method::POST, path, Some(body))
    }

    /// Removes.
    pub fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.call(Method::DELETE, path, None)
    }

    fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<T> {
        let answer = self.runtime.block_on(async {
            tokio::time::timeout(LIMIT, self.exchange(method, path, body)).await
        });
        let (status, bytes) = answer.map_err(|_| {
            unreachable(format!("no answer from the manager within {} s", LIMIT.as_secs()))
        })??;
        if status.is_success() {
            return serde_json::from_slice(&bytes)
                .map_err(|error| trouble(format!("a strange answer to {path}: {error}")));
        }
        Err(refusal(status, &bytes))
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(StatusCode, Bytes)> {
        let mut request =
            Request::builder().method(method).uri(path).header(header::HOST, "muxflow");
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Place::Tcp { token, .. } = &self.place {
            request = request.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request
            .body(Full::new(Bytes::from(body.unwrap_or_default())))
            .map_err(|error| trouble(format!("`{path}` cannot be asked for: {error}")))?;
        match &self.place {
            Place::Socket(socket) => {
                let stream = tokio::net::UnixStream::connect(socket).await.map_err(|error| {
                    unreachable(format!(
                        "no manager at {}: {error}; start one with `muxflow up`, or name its socket with --socket or {SOCKET_VARIABLE}",
                        socket.display()
                    ))
                })?;
                send(stream, request).await
            }
            Place::Tcp { address, .. } => {
                let stream = tokio::net::TcpStream::connect(address).await;
                let stream = stream
                    .map_err(|error| unreachable(format!("no manager at {address}: {error}")))?;
                send(stream, request).await
            }
        }
    }
}

/// What an answer says that is not a success.
fn refusal(status: StatusCode, body: &[u8]) -> ManagerError {
    match serde_json::from_slice::<Problem>(body) {
        Ok(problem) if problem.code == seats::CODE => ManagerError::Busy(problem.message),
        Ok(problem) => trouble(problem.message),
        Err(_) => trouble(format!("{status}: {}", String::from_utf8_lossy(body))),
    }
}

async fn send(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Full<Bytes>>,
) -> Result<(StatusCode, Bytes)> {
    let broken = |error: hyper::Error| unreachable(format!("the manager hung up: {error}"));
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let driving = tokio::spawn(connection);
    let answer = sender.send_request(request).await.map_err(broken)?;
    let status = answer.status();
    let bytes = answer.into_body().collect().await.map_err(broken)?.to_bytes();
    driving.abort();
    Ok((status, bytes))
}
