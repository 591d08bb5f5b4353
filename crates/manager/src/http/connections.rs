//! Serves connections, each within limits: a client that connects and does not say what it wants, or
//! breaks off in the middle of saying it, would keep its place for ever.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::serve::Listener;
use hyper::Request;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::time::{Instant, Sleep};

use super::places::Places;
use super::server::Leaving;

/// Answers with `app` until the server leaves, then lets requests under way end. `known` says what
/// each request is told about its connection. A client that sends nothing for `silence` while we wait
/// for the head or the body of a request is hung up on; so is one whose head takes longer than that.
pub async fn serve<L: Listener, K: Clone + Send + Sync + 'static>(
    mut listener: Places<L>,
    app: Router,
    known: impl Fn(&L::Io) -> K,
    silence: Duration,
    mut leaving: Leaving,
) {
    let graceful = GracefulShutdown::new();
    loop {
        let (io, _) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = leaving.wait() => break,
        };
        let known = known(io.io());
        let app = TowerToHyperService::new(app.clone());
        let answer = service_fn(move |request: Request<Incoming>| {
            let mut request = request.map(|body| Awaited::new(body, silence));
            request.extensions_mut().insert(known.clone());
            app.call(request)
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(silence)
            .serve_connection(TokioIo::new(io), answer);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A client that hangs up is no error of ours.
            drop(connection.await);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// The body of a request, which fails when no more of it comes for too long.
struct Awaited {
    body: Incoming,
    silence: Duration,
    until: Pin<Box<Sleep>>,
}

impl Awaited {
    fn new(body: Incoming, silence: Duration) -> Self {
        Awaited { body, silence, until: Box::pin(tokio::time::sleep(silence)) }
    }
}

impl Body for Awaited {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(context) {
            let next = Instant::now() + self.silence;
            self.until.as_mut().reset(next);
            return Poll::Ready(frame.map(|frame| frame.map_err(io::Error::other)));
        }
        match self.until.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Some(Err(io::ErrorKind::TimedOut.into()))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
