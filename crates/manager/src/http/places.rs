//! A listener with so many places and no more: who comes when all are taken waits in the kernel's
//! line. Each connection costs a file descriptor of a process that must always have one to spare.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A listener whose connections need a place.
#[derive(Debug)]
pub struct Places<L> {
    listener: L,
    free: Arc<Semaphore>,
}

impl<L> Places<L> {
    /// With these places, which others may share.
    pub fn new(listener: L, free: &Arc<Semaphore>) -> Self {
        Places { listener, free: Arc::clone(free) }
    }
}

impl<L: Listener> Listener for Places<L> {
    type Io = Seated<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // Nobody closes it, so there is a place some time.
        let place = Arc::clone(&self.free).acquire_owned().await.ok();
        let (io, address) = self.listener.accept().await;
        (Seated { io, _place: place }, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

/// A connection with its place, which is free again when it ends.
#[derive(Debug)]
pub struct Seated<I> {
    io: I,
    _place: Option<OwnedSemaphorePermit>,
}

impl<I> Seated<I> {
    /// The connection.
    pub fn io(&self) -> &I {
        &self.io
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Seated<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(context, into)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Seated<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};

    #[tokio::test]
    async fn who_finds_no_place_waits_for_one() {
        let free = Arc::new(Semaphore::new(2));
        let mut places = Places::new(TcpListener::bind("127.0.0.1:0").await.unwrap(), &free);
        let address = places.local_addr().unwrap();
        let mut clients = Vec::new();
        for _ in 0..3 {
            clients.push(TcpStream::connect(address).await.unwrap());
        }
        let (first, _) = places.accept().await;
        let (_second, _) = places.accept().await;
        let soon = std::time::Duration::from_millis(100);
        assert!(tokio::time::timeout(soon, places.accept()).await.is_err(), "both are taken");
        drop(first);
        let (third, _) = places.accept().await;
        assert_eq!(third.io().peer_addr().unwrap(), clients[2].local_addr().unwrap());
        assert_eq!(free.available_permits(), 0);
    }
}
