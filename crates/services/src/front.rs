//! HTTP/1.1 in front of a pool: one port for all replicas of a service.
//!
//! | what happens | what the client sees |
//! | --- | --- |
//! | no replica is ready | it waits, at most as long as a request may take, then 503 |
//! | the replica cannot be reached | another replica: nothing was sent, so nothing is done twice |
//! | it breaks off before its answer is complete | another replica, if the method is idempotent; else 502 |
//! | it does not answer in time | 504 |
//! | the client takes longer than a request may to send its body | 408, and the connection is closed |
//! | it takes nothing, or next to nothing, of its answer for as long | the connection is closed: its place is for others |
//!
//! Bodies up to [`KEPT_BYTES`] are kept so that a request can be made again and an answer is passed on
//! only when it is whole; larger ones are streamed, and then what was begun is not repeated.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::{Frame, SizeHint};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use crate::patient::Patient;
use crate::pool::{Pool, Ticket};
use crate::upstream::{Body, Failed};

/// Bodies up to this size are kept.
pub const KEPT_BYTES: u64 = 1 << 20;
/// A client that sends no head for this long is hung up on.
const HEAD_WITHIN: Duration = Duration::from_secs(30);
/// More clients than this are not served at a time, however many files may be open.
const MOST_CLIENTS: usize = 65_536;
/// A request is tried on at most so many replicas.
const ATTEMPTS: usize = 6;

/// What the front counts.
#[derive(Debug, Default)]
pub struct Counts {
    /// Requests answered.
    pub requests: AtomicU64,
    /// Of these, with 502, 503 or 504 made here.
    pub failed: AtomicU64,
    /// Attempts made again.
    pub retried: AtomicU64,
}

/// The front of one service.
#[derive(Debug)]
pub struct Front {
    /// Its replicas.
    pub pool: Arc<Pool>,
    /// What was counted.
    pub counts: Counts,
    /// How long a request may take, in milliseconds; those that begin later are held to it.
    pub request_within_ms: AtomicU64,
    /// Latencies as clients see them.
    pub latency: std::sync::Mutex<crate::latency::LatencyWindow>,
}

/// Headers that concern one connection only (RFC 9110, section 7.6.1).
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|list| list.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

/// Clients that are served at a time, all services together; others wait in the kernel's line. Each
/// costs up to two descriptors, and the agent in this process must never run out of them.
fn places() -> &'static Arc<Semaphore> {
    static PLACES: OnceLock<Arc<Semaphore>> = OnceLock::new();
    PLACES.get_or_init(|| {
        let count = (muxflow_agent::descriptors::most() / 4).clamp(16, MOST_CLIENTS);
        Arc::new(Semaphore::new(count))
    })
}

type Answer = Response<BoxBody<Bytes, hyper::Error>>;

fn whole(bytes: Bytes) -> BoxBody<Bytes, hyper::Error> {
    Full::new(bytes).map_err(|never: Infallible| match never {}).boxed()
}

fn refusal(status: StatusCode, text: &str) -> Answer {
    let mut answer = Response::new(whole(Bytes::from(format!("{text}\n"))));
    *answer.status_mut() = status;
    let headers = answer.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    if status == StatusCode::REQUEST_TIMEOUT {
        // Its place is for others.
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    answer
}

/// A streamed answer holds its place in the replica's line until it has ended.
struct Streamed {
    body: Incoming,
    ticket: Option<Ticket>,
}

impl hyper::body::Body for Streamed {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            // Whoever reads does not ask again once the length that was announced is there.
            Poll::Ready(Some(Ok(_))) if !self.body.is_end_stream() => {}
            Poll::Ready(None | Some(Ok(_))) => {
                if let Some(ticket) = self.ticket.take() {
                    ticket.answered();
                }
            }
            Poll::Ready(Some(Err(_))) => {
                if let Some(ticket) = self.ticket.take() {
                    ticket.failed();
                }
            }
            Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a request: kept, or to be used once.
enum Kept {
    Whole(Bytes),
    Once(Option<Body>),
}

impl Kept {
    fn take(&mut self) -> Option<Body> {
        match self {
            Kept::Whole(bytes) => Some(whole(bytes.clone())),
            Kept::Once(body) => body.take(),
        }
    }
}

enum Tried {
    Answered(Answer),
    /// Nothing was sent.
    NotSent,
    /// It may have been carried out.
    BrokeOff,
}

impl Front {
    /// Serves clients until `stop` changes, then lets those under way finish.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, mut stop: watch::Receiver<bool>) {
        let graceful = hyper_util::server::graceful::GracefulShutdown::new();
        loop {
            let place = tokio::select! {
                place = Arc::clone(places()).acquire_owned() => place,
                _ = stop.changed() => break,
            };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stop.changed() => break,
            };
            let Ok((stream, peer)) = accepted else {
                // Out of file descriptors, most likely: give others time to close theirs.
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            drop(stream.set_nodelay(true));
            let stream = Patient::new(stream, Arc::clone(&self));
            let front = Arc::clone(&self);
            let service = service_fn(move |request| {
                let front = Arc::clone(&front);
                async move { Ok::<_, Infallible>(front.answer(request, peer.ip()).await) }
            });
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_WITHIN)
                .serve_connection(TokioIo::new(stream), service);
            let connection = graceful.watch(connection);
            tokio::spawn(async move {
                // A client that hangs up is no error of ours.
                drop(connection.await);
                drop(place);
            });
        }
        drop(listener);
        drop(tokio::time::timeout(self.request_within(), graceful.shutdown()).await);
    }

    pub(crate) fn request_within(&self) -> Duration {
        Duration::from_millis(self.request_within_ms.load(Ordering::Relaxed))
    }

    async fn answer(&self, request: Request<Incoming>, peer: std::net::IpAddr) -> Answer {
        let began = Instant::now();
        let answer = self.forward(request, peer, began).await;
        let us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        let mut latency = self.latency.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        latency.add(muxflow_agent::monitor::now(), muxflow_types::Micros(us));
        answer
    }

    async fn forward(
        &self,
        request: Request<Incoming>,
        peer: std::net::IpAddr,
        began: Instant,
    ) -> Answer {
        let deadline = began + self.request_within();
        let (mut parts, body) = request.into_parts();
        strip(&mut parts.headers);
        if let Ok(value) = HeaderValue::from_str(&peer.to_string()) {
            parts.headers.append("x-forwarded-for", value);
        }
        parts.version = Version::HTTP_11;
        let mut body = if body.size_hint().upper().is_some_and(|size| size <= KEPT_BYTES) {
            let limited = Limited::new(body, usize::try_from(KEPT_BYTES).unwrap_or(usize::MAX));
            match tokio::time::timeout_at(deadline.into(), limited.collect()).await {
                Ok(Ok(collected)) => Kept::Whole(collected.to_bytes()),
                Ok(Err(_)) => return refusal(StatusCode::BAD_REQUEST, "the body broke off"),
                Err(_) => return refusal(StatusCode::REQUEST_TIMEOUT, "the body came too slowly"),
            }
        } else {
            Kept::Once(Some(body.boxed()))
        };
        let mut tried: Vec<String> = Vec::new();
        let mut reached = false;
        while tried.len() < ATTEMPTS {
            let Some(ticket) = self.pool.acquire(&tried, deadline).await else { break };
            let Some(sent) = body.take() else { break };
            reached = true;
            let name = ticket.replica.name.clone();
            if !tried.is_empty() {
                self.counts.retried.fetch_add(1, Ordering::Relaxed);
            }
            let attempt = attempt(&parts, sent, ticket);
            let left = deadline.saturating_duration_since(Instant::now());
            match tokio::time::timeout(left, attempt).await {
                Err(_) => {
                    return self
                        .fail(StatusCode::GATEWAY_TIMEOUT, "the replica did not answer in time");
                }
                Ok(Tried::Answered(answer)) => return answer,
                Ok(Tried::NotSent) => {}
                // Done twice is as done once (RFC 9110, section 9.2.2).
                Ok(Tried::BrokeOff) if parts.method.is_idempotent() => {}
                Ok(Tried::BrokeOff) => break,
            }
            tried.push(name);
        }
        if reached {
            return self.fail(StatusCode::BAD_GATEWAY, "the replica broke off");
        }
        self.fail(StatusCode::SERVICE_UNAVAILABLE, "no replica is ready")
    }

    fn fail(&self, status: StatusCode, text: &str) -> Answer {
        self.counts.failed.fetch_add(1, Ordering::Relaxed);
        refusal(status, text)
    }
}

async fn attempt(parts: &Parts, body: Body, ticket: Ticket) -> Tried {
    let mut request = Request::new(body);
    *request.method_mut() = parts.method.clone();
    *request.uri_mut() = parts.uri.clone();
    *request.headers_mut() = parts.headers.clone();
    let (response, sender) = match ticket.replica.connections.send(request).await {
        Ok(answered) => answered,
        Err(Failed::NotSent) => {
            ticket.failed();
            return Tried::NotSent;
        }
        Err(Failed::NoAnswer) => {
            ticket.failed();
            return Tried::BrokeOff;
        }
    };
    let (mut head, body) = response.into_parts();
    strip(&mut head.headers);
    head.version = Version::HTTP_11;
    if body.size_hint().upper().is_some_and(|size| size <= KEPT_BYTES) {
        return match body.collect().await {
            Ok(collected) => {
                ticket.answered();
                ticket.replica.connections.keep(sender);
                Tried::Answered(Response::from_parts(head, whole(collected.to_bytes())))
            }
            Err(_) => {
                ticket.failed();
                Tried::BrokeOff
            }
        };
    }
    Tried::Answered(Response::from_parts(head, Streamed { body, ticket: Some(ticket) }.boxed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_one_connection_stay_there() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "keep-alive, x-private"),
            ("keep-alive", "timeout=5"),
            ("x-private", "1"),
            ("transfer-encoding", "chunked"),
            ("accept", "*/*"),
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        strip(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["accept"]);
    }
}
