//! The connection of a client that is waited for, but not for ever.
//!
//! A client that reads nothing of its answer, or a little now and then, stops the front from writing.
//! It would hold its place, one of those that all services share, and its replica's line for as long as
//! it likes. So the connection ends once writing has stood still for as long as a request may take
//! while less than [`HEADWAY`] bytes were taken.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use crate::front::Front;

/// Whoever takes this much makes headway, and all patience is there again.
pub(crate) const HEADWAY: usize = 16 << 10;

/// Says how long to wait.
pub(crate) trait Limit {
    /// From now on.
    fn within(&self) -> Duration;
}

impl Limit for Arc<Front> {
    /// As patient as the front's limit for requests.
    fn within(&self) -> Duration {
        self.request_within()
    }
}

pub(crate) struct Patient<S, L> {
    stream: S,
    limit: L,
    /// How long writing stood still since the last headway, before it does so now.
    stood_still: Duration,
    /// Bytes since then.
    taken: usize,
    /// Runs while the client takes nothing, from the first moment on.
    over: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<S, L: Limit> Patient<S, L> {
    pub(crate) fn new(stream: S, limit: L) -> Self {
        Patient { stream, limit, stood_still: Duration::ZERO, taken: 0, over: None }
    }

    fn wait(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if let Poll::Ready(written) = written {
            if let Some((since, _)) = self.over.take() {
                self.stood_still += since.elapsed();
            }
            self.taken = self.taken.saturating_add(*written.as_ref().unwrap_or(&0));
            if self.taken >= HEADWAY {
                (self.taken, self.stood_still) = (0, Duration::ZERO);
            }
            return Poll::Ready(written);
        }
        let left = self.limit.within().saturating_sub(self.stood_still);
        let start = || (Instant::now(), Box::pin(tokio::time::sleep(left)));
        let (_, over) = self.over.get_or_insert_with(start);
        match over.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => {
                let text = "the client takes too little of its answer";
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)))
            }
        }
    }
}

impl<S: AsyncRead + Unpin, L: Unpin> AsyncRead for Patient<S, L> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin, L: Limit + Unpin> AsyncWrite for Patient<S, L> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.wait(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.wait(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    struct Within(Duration);

    impl Limit for Within {
        fn within(&self) -> Duration {
            self.0
        }
    }

    /// Writes a megabyte to a client that takes `bite` bytes, waits, and goes on.
    fn written(within: Duration, bite: usize, pause: Duration) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
        runtime.block_on(async {
            let (ours, mut theirs) = tokio::io::duplex(512);
            let client = tokio::spawn(async move {
                let mut buffer = vec![0; bite];
                while theirs.read_exact(&mut buffer).await.is_ok() {
                    tokio::time::sleep(pause).await;
                }
            });
            let mut patient = Patient::new(ours, Within(within));
            let end = patient.write_all(&vec![7; 1 << 20]).await;
            drop(patient);
            client.await.map_err(io::Error::other)?;
            end
        })
    }

    #[test]
    fn a_client_that_takes_a_little_now_and_then_does_not_keep_its_place() {
        // Something is taken a hundred times within the limit, and never much of it.
        let slow = written(Duration::from_secs(1), 64, Duration::from_millis(10)).unwrap_err();
        assert_eq!(slow.kind(), io::ErrorKind::TimedOut, "{slow}");
        // One that is slow and makes headway may take as long as it likes.
        let steady = written(Duration::from_secs(30), 1 << 15, Duration::from_millis(20));
        steady.unwrap();
    }
}
