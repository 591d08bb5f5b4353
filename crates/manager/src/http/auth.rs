//! Who calls: the kernel tells on the local socket, a token tells on TCP.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header;
use axum::http::request::Parts;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tokio::net::UnixStream;

use super::problem::Refusal;
use crate::user::{Caller, Tokens, is_operator};

/// The cookie that a browser may carry a token in, for streams of events.
pub const COOKIE: &str = "muxflow-token";

/// The user at the other end of a local socket.
#[derive(Debug, Clone, Copy)]
pub struct Peer(Option<(u32, u32)>);

impl Peer {
    /// Who has connected.
    pub fn of(stream: &UnixStream) -> Self {
        Peer(stream.peer_cred().ok().map(|cred| (cred.uid(), cred.gid())))
    }

    /// The user, unless it is an operator. One that the kernel does not tell counts as nobody.
    pub fn common_uid(self) -> Option<u32> {
        let uid = self.0.map_or(u32::MAX, |(uid, _)| uid);
        (!is_operator(uid)).then_some(uid)
    }
}

/// On the local socket: the caller is who the kernel says.
pub async fn by_peer(
    Extension(peer): Extension<Peer>,
    mut request: Request,
    next: Next,
) -> Response {
    let Some((uid, gid)) = peer.0 else {
        return Refusal::unauthorized("the kernel does not tell who calls").into_response();
    };
    request.extensions_mut().insert(Caller::of_uid(uid, Some(gid)));
    next.run(request).await
}

/// On TCP: the caller is whom the token stands for.
pub async fn by_token(
    State(tokens): State<Arc<Tokens>>,
    mut request: Request,
    next: Next,
) -> Response {
    let caller = token(request.headers()).and_then(|token| tokens.find(&token).cloned());
    let Some(caller) = caller else {
        let text = "give a token of the manager's configuration: `Authorization: Bearer TOKEN`";
        return Refusal::unauthorized(text).into_response();
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}

fn token(headers: &axum::http::HeaderMap) -> Option<String> {
    let header = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if let Some(given) = header.and_then(|value| value.strip_prefix("Bearer ")) {
        return Some(given.trim().to_owned());
    }
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    cookies
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='))
        .find(|(name, _)| *name == COOKIE)
        .map(|(_, value)| value.to_owned())
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        let known = parts.extensions.get::<Caller>().cloned();
        known.ok_or_else(|| Refusal::unauthorized("nobody knows who calls"))
    }
}
