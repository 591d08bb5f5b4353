//! Serves connections, each within limits: a client that connects and does not say what it wants, or
//! breaks off in the middle of saying it, would keep its place for ever.

use std::future::Future as _;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
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
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep};

use super::places::Places;
use super::seats::{Seat, TOO_MANY};
use super::server::Leaving;

/// How long hearing out a client that has too many connections may take, and telling it so.
const REFUSE_WITHIN: Duration = Duration::from_millis(50);
/// So many of them are heard out at a time; they take places meanwhile.
const HEARD_OUT: usize = 8;
/// The most of the head of a request that is read from them.
const HEAD: usize = 16 << 10;

/// Answers with `app` until the server leaves, then lets requests under way end. `admit` says what
/// each request is told about its connection, and gives it a seat where seats are counted; none of
/// both when its user has too many. A client that sends nothing for `silence` while we wait
/// for the head or the body of a request is hung up on; so is one whose head takes longer than that.
pub async fn serve<L: Listener, K: Clone + Send + Sync + 'static>(
    mut listener: Places<L>,
    app: Router,
    admit: impl Fn(&L::Io) -> Option<(K, Option<Seat>)>,
    silence: Duration,
    mut leaving: Leaving,
) {
    let graceful = GracefulShutdown::new();
    let turns = Arc::new(Semaphore::new(HEARD_OUT));
    loop {
        let (io, _) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = leaving.wait() => break,
        };
        let Some((known, seat)) = admit(io.io()) else {
            refuse(io, &turns).await;
            continue;
        };
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
            drop(seat);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Tells a client that it has too many connections. Told before it has asked, it would take that for
/// a broken connection; but where many come at once, nobody waits for what they say.
async fn refuse<I: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    mut io: I,
    turns: &Arc<Semaphore>,
) {
    let Ok(turn) = Arc::clone(turns).try_acquire_owned() else { return tell(&mut io).await };
    tokio::spawn(async move {
        drop(tokio::time::timeout(REFUSE_WITHIN, hear_out(&mut io)).await);
        tell(&mut io).await;
        drop(turn);
    });
}

/// Reads up to the end of the head of a request.
async fn hear_out(io: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
    let mut said = Vec::new();
    while said.len() < HEAD && !said.windows(4).any(|end| end == b"\r\n\r\n") {
        if io.read_buf(&mut said).await? == 0 {
            break;
        }
    }
    Ok(())
}

async fn tell(io: &mut (impl AsyncWrite + Unpin)) {
    // It fits into what the kernel holds for the client, so nothing is waited for.
    drop(tokio::time::timeout(REFUSE_WITHIN, io.write_all(TOO_MANY)).await);
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;

    /// What a client hears that asks, if anything, and is refused.
    async fn refused(asked: &[u8], turns: usize) -> io::Result<String> {
        let (mut client, server) = UnixStream::pair()?;
        client.write_all(asked).await?;
        refuse(server, &Arc::new(Semaphore::new(turns))).await;
        let mut said = String::new();
        client.read_to_string(&mut said).await.map(|_| said)
    }

    #[tokio::test]
    async fn who_is_refused_is_heard_out_first() {
        let told = String::from_utf8(TOO_MANY.to_vec()).unwrap();
        // Closed with something unread, the connection would end with a reset.
        let asked = b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n";
        assert_eq!(refused(asked, 1).await.unwrap(), told);
        assert_eq!(refused(b"", 1).await.unwrap(), told, "nobody is waited for");
        assert_eq!(refused(b"", 0).await.unwrap(), told, "nor are many");
        assert!(refused(asked, 0).await.is_err(), "or this shows nothing");
    }
}
