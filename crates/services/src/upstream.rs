//! Connections to one replica: kept while idle, used again, and an account of how far a request got.

use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::combinators::BoxBody;
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// The body of a request on its way to a replica.
pub(crate) type Body = BoxBody<Bytes, hyper::Error>;

/// How long connecting to a replica on this machine may take.
const CONNECT_WITHIN: Duration = Duration::from_secs(1);
/// Idle connections kept per replica.
const IDLE: usize = 32;

/// How far a request got before it failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The replica never saw it.
    NotSent,
    /// It may have been carried out.
    NoAnswer,
}

/// Connections to one replica.
#[derive(Debug)]
pub(crate) struct Connections {
    address: SocketAddr,
    idle: Mutex<Vec<SendRequest<Body>>>,
}

impl Connections {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Connections { address, idle: Mutex::new(Vec::new()) }
    }

    fn idle_one(&self) -> Option<SendRequest<Body>> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(sender) = idle.pop() {
            if sender.is_ready() {
                return Some(sender);
            }
        }
        None
    }

    async fn fresh_one(&self) -> Option<SendRequest<Body>> {
        let connect = TcpStream::connect(self.address);
        let stream = tokio::time::timeout(CONNECT_WITHIN, connect).await.ok()?.ok()?;
        // Small answers must not wait for more to send.
        drop(stream.set_nodelay(true));
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.ok()?;
        tokio::spawn(async move {
            // Its end is seen by whoever waits for an answer.
            drop(connection.await);
        });
        sender.ready().await.ok()?;
        Some(sender)
    }

    /// Sends a request; also returns the connection, to be given back once the answer is read.
    pub(crate) async fn send(
        &self,
        mut request: Request<Body>,
    ) -> Result<(Response<Incoming>, SendRequest<Body>), Failed> {
        // A kept connection may have been closed by the other side meanwhile: then nothing was sent,
        // and a fresh one decides.
        if let Some(mut sender) = self.idle_one() {
            match sender.try_send_request(request).await {
                Ok(response) => return Ok((response, sender)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(Failed::NoAnswer),
                },
            }
        }
        let Some(mut sender) = self.fresh_one().await else {
            return Err(Failed::NotSent);
        };
        match sender.try_send_request(request).await {
            Ok(response) => Ok((response, sender)),
            Err(mut error) => match error.take_message() {
                Some(_) => Err(Failed::NotSent),
                None => Err(Failed::NoAnswer),
            },
        }
    }

    /// Keeps a connection for later.
    pub(crate) fn keep(&self, sender: SendRequest<Body>) {
        if sender.is_closed() {
            return;
        }
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < IDLE {
            idle.push(sender);
        }
    }
}
